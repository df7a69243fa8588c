"""Find the largest batch size of a command by replays of its allocator's histories, which runs confirm."""

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from planner.emulator import EmulatedRun
from planner.planning.command.by_runs import (
    by_units,
    fails_after_steps,
    in_samples,
    largest_with_retries,
    largest_without_retries,
    search_by_commands,
)
from planner.planning.command.command_runs import CommandRuns
from planner.planning.command.fit import CommandFit, end_and_peak, fit_runs
from planner.planning.search.boundary import Search, boundary_from_guess, largest, largest_near, search_of
from planner.program import LARGEST_BATCH, Outcome

_FIRST_BATCH = 32  # the batch size whose history guides the search
_NEAR = 0.95  # share of the batch size that one history suggests: near the answer, and likely to fit
_MOST_STRETCH = 16  # a history is not followed beyond this many times its batch size
_MOST_RUNS = 12  # runs to confirm replays, after which the search uses runs alone


@dataclass(slots=True)
class BatchFinder:
    """The search for the largest batch size of a command among the multiples of `unit`."""

    runs: CommandRuns
    unit: int
    whole: CommandRuns | None = None  # runs beyond the first optimizer steps, which answers have to survive
    fit: CommandFit | None = None  # None if histories do not align, so that runs alone answer
    notes: list[str] = field(default_factory=list)
    recorded: dict[int, EmulatedRun] = field(default_factory=dict)  # runs without retries, by batch size
    most: int = LARGEST_BATCH  # the largest batch size to try
    retries_differ: str = ""  # why replays do not find the largest batch size with retries; empty if they do

    def find(self) -> Search:
        """Find the largest batch sizes with and without retries.

        Replays that runs confirm give the answers, or runs alone if replays fail.
        """
        first = max(1, _FIRST_BATCH // self.unit) * self.unit
        self._record(first)
        guess = self._guess(first)
        while True:
            self.runs.outcome(guess)
            guess = self._with_steps(guess)
            self._record(guess)
            reason = self._refit(guess)
            if reason:  # a batch size between both may take the same way as the larger one
                self._record((min(self.recorded) + max(self.recorded)) // 2 // self.unit * self.unit)
                reason = self._refit(guess)
            if reason:
                return self._find_by_runs(reason)
            search = self._search()
            farthest = max(self.recorded) * _MOST_STRETCH
            if search.largest <= farthest or not self._depends_on_batch():
                return self._confirm(search)
            guess = farthest

    # ---- histories

    def _record(self, batch: int) -> None:
        """Put a run of the command without retries at a batch size into `recorded`, unless it has one."""
        if batch not in self.recorded:
            self.recorded[batch] = self.runs.unbounded(batch)

    def _guess(self, first: int) -> int:
        """Return a batch size near the answer, guessed from the memory of the recorded run at `first`.

        The result is never `first`, so that two batch sizes can be fitted.
        """
        guess = first * _MOST_STRETCH
        for end_bytes, peak_bytes in end_and_peak(self.recorded[first], first):
            per_sample_bytes = (peak_bytes - end_bytes) // first
            if per_sample_bytes > 0:
                guess = min(guess, max(0, self.runs.limit_bytes - end_bytes) // per_sample_bytes)
        guess = max(1, int(_NEAR * guess) // self.unit) * self.unit
        return guess if guess != first else 2 * first

    def _with_steps(self, batch: int) -> int:
        """Return the largest batch size up to `batch` at which the command takes an optimizer step.

        A result below `batch` also becomes the limit of the search.
        """
        if self._has_steps(batch):
            return batch
        units = batch // self.unit
        batch = boundary_from_guess(by_units(self._has_steps, self.unit), units // 2, units - 1) * self.unit
        self.most = batch
        self.notes.append(
            f"from batch {batch + self.unit} on the command takes no optimizer step, as where its data set "
            "has fewer samples than a batch: larger ones are not looked at"
        )
        return batch

    def _has_steps(self, batch: int) -> bool:
        has_steps = any(run.largest.step_count for run in self.recorded.values())
        return not has_steps or self.runs.unbounded(batch).largest.step_count > 0

    def _refit(self, near: int) -> str:
        """Fit programs to the recorded histories, and return "" or the reason why no program fits.

        No program fits if the histories do not align.
        """
        fit = fit_runs(self.recorded, near, self.runs.device)
        self.fit = fit if isinstance(fit, CommandFit) else None
        return "" if isinstance(fit, CommandFit) else fit

    def _depends_on_batch(self) -> bool:
        return self.fit is not None and self.fit.depends_on_batch

    # ---- by replay

    def _outcome(self, batch: int) -> Outcome:
        """Return the outcome at a batch size from its run, or from a replay if there was no run."""
        run = self.runs.on_gpu.get(batch)
        if run is not None:
            return run.outcome
        assert self.fit is not None
        return self.fit.outcome(batch)

    def _search(self) -> Search:
        return in_samples(largest(by_units(self._outcome, self.unit), self.most // self.unit), self.unit)

    def _search_near(self, search: Search, outcome: Callable[[int], Outcome]) -> Search:
        """Search again by the function `outcome`, starting near the answers of an earlier search."""
        guesses = search.comfortable // self.unit, search.largest // self.unit
        found = largest_near(by_units(outcome, self.unit), guesses, self.most // self.unit)
        return in_samples(found, self.unit)

    def _confirm(self, search: Search) -> Search:
        """Run the answers of a search on the GPU, and search again until the runs confirm the answers.

        The batch sizes after the answers are run too. If replays and runs keep disagreeing, the search goes
        on by runs alone.
        """
        most_runs = self.runs.count + _MOST_RUNS
        contradictions = 0  # in a row: one may be a matter of bytes, two mean that the traces are wrong
        while (batch := self._unconfirmed(search)) is not None:
            if self.runs.count >= most_runs:
                return self._find_by_runs("replays and runs disagree again and again", search)
            expected = self._outcome(batch)
            if self._needs_more_whole(batch, search, expected):
                return search
            outcome = self.runs.outcome(batch)
            contradictions = 0 if outcome is expected else contradictions + 1
            # This run has the history if it fits without retries; else the history takes one more run.
            if outcome is Outcome.FITS or contradictions > 1:
                reason = self._learn(batch)
                if reason:
                    return self._find_by_runs(reason, search)
            search = self._search_near(search, self._outcome)
        if self.retries_differ:
            return self._find_retrying_by_runs(search)
        if search.largest and self.fit is not None and not self.fit.depends_on_batch:
            self.notes.append(
                f"memory is the same at batches {' and '.join(map(str, self.fit.batches))}: the command's "
                "batches do not grow beyond, as where its data set is smaller"
            )
        return search

    def _needs_more_whole(self, batch: int, search: Search, expected: Outcome) -> bool:
        """Return whether an answer needs more memory in a run beyond the first optimizer steps than in them.

        The command is run to find it out. Returns False without a run if there are no whole runs, or if the
        batch size is not an answer that is expected to fit. A whole run that fits as expected, or fails in
        its first steps, also counts as a run of the first steps.
        """
        is_answer = batch in (search.comfortable, search.largest) and expected is not Outcome.DOES_NOT_FIT
        if self.whole is None or not is_answer:
            return False
        outcome = self.whole.outcome(batch)
        if fails_after_steps(self.whole, self.runs, batch):
            return True
        if outcome in (expected, Outcome.FITS, Outcome.DOES_NOT_FIT):
            self.runs.on_gpu[batch] = self.whole.on_gpu[batch]
            return False
        return self.runs.outcome(batch) is expected

    def _learn(self, batch: int) -> str:
        """Refit with the run at a batch size, and return "" or the reason not to trust replays.

        A replay and a run may differ in whether retries suffice, since libraries that are short of memory
        take smaller workspaces. Then `retries_differ` is set, and replays still tell which batch sizes fit
        without retries.
        """
        self._record(batch)
        reason = self._refit(batch)
        if self.fit is None:
            return reason
        expected, outcome = self.fit.outcome(batch), self.runs.outcome(batch)
        differs = f"at batch {batch} a replay gives {expected}, a run {outcome}"
        if Outcome.FITS not in (expected, outcome) and expected is not outcome:
            self.retries_differ = differs
            return ""
        return "" if expected is outcome else differs

    def _unconfirmed(self, search: Search) -> int | None:
        """Return a batch size that has to run on the GPU to confirm a search, or None if all of them ran.

        They are the answers and their successors, or the largest recorded batch size if memory does not
        depend on the batch size.
        """
        if search.largest and not self._depends_on_batch():
            deciding = [max(self.recorded)]
        else:
            answers = [search.comfortable, *([] if self.retries_differ else [search.largest])]
            deciding = [batch for answer in answers for batch in (answer, answer + self.unit)]
        return next(
            (batch for batch in deciding if 0 < batch <= self.most and batch not in self.runs.on_gpu), None
        )

    # ---- by runs

    def _find_retrying_by_runs(self, near: Search) -> Search:
        """Find the largest batch size that fits with retries, by runs alone.

        The largest batch without retries is confirmed already.
        """
        self.notes.append(f"the largest batch with retries is found by runs alone: {self.retries_differ}")
        return self._search_of_runs(near.comfortable, near)

    def _find_by_runs(self, reason: str, near: Search | None = None) -> Search:
        """Find the largest batch sizes with and without retries by runs alone, and add `reason` to the notes.

        The search is near the answers of `near`, or else extrapolates.
        """
        self.fit = None
        self.notes.append(f"found by runs alone, since histories cannot be replayed: {reason}")
        if near is None:
            return search_by_commands(
                self.runs, self.unit, (min(self.recorded), max(self.recorded)), self.most
            )
        return self._search_of_runs(
            largest_without_retries(self.runs, self.unit, near.comfortable, self.most), near
        )

    def _search_of_runs(self, comfortable: int, near: Search) -> Search:
        """Find the largest batch size with retries by runs; `comfortable` is the answer without retries."""
        best = largest_with_retries(self.runs, self.unit, max(comfortable, near.largest), self.most)
        probes = {**dict(near.probes), **{batch: run.outcome for batch, run in self.runs.on_gpu.items()}}
        search = search_of(dict(sorted(probes.items())), max(comfortable, best), comfortable)
        return replace(search, first_failure=best + self.unit)
