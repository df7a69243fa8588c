"""Find the largest batch sizes of a command by runs alone, extrapolating their memory linearly."""

from collections.abc import Callable
from typing import TypeVar

from planner.planning.command.command_runs import CommandRuns
from planner.planning.search.boundary import (
    Search,
    boundary_along_lines,
    boundary_between,
    boundary_from_guess,
    largest_by_extrapolation,
)
from planner.program import LARGEST_BATCH, Outcome

T = TypeVar("T")


def by_units(function: Callable[[int], T], unit: int) -> Callable[[int], T]:
    """Convert a function of the batch size to a function of the number of units."""
    return lambda units: function(units * unit)


def in_samples(search: Search, unit: int) -> Search:
    """Convert the batch sizes in the result of a search from units to samples."""
    failure = None if search.first_failure is None else search.first_failure * unit
    probes = tuple((units * unit, outcome) for units, outcome in search.probes)
    return Search(search.largest * unit, search.comfortable * unit, failure, probes)


def search_by_commands(runs: CommandRuns, unit: int, ends: tuple[int, int], most: int) -> Search:
    """Find the largest batch sizes with and without retries, extrapolating from runs at both `ends`.

    Only multiples of `unit` up to `most` are tried.
    """
    low, high = ends[0] // unit, ends[1] // unit
    search = largest_by_extrapolation(
        by_units(runs.outcome, unit),
        (by_units(runs.reserved_bytes, unit), by_units(runs.allocated_bytes, unit)),
        runs.limit_bytes,
        (low, max(high, low + 1)),
        most // unit,
    )
    return in_samples(search, unit)


def largest_without_retries(runs: CommandRuns, unit: int, guess: int, most: int) -> int:
    """Return the largest multiple of `unit` up to `most` that fits without retries."""

    def fits(batch: int) -> bool:
        return runs.outcome(batch) is Outcome.FITS

    high = min((batch for batch, run in runs.on_gpu.items() if run.outcome is not Outcome.FITS), default=None)
    if high is None:
        return boundary_from_guess(by_units(fits, unit), guess // unit, most // unit) * unit
    low = max((batch for batch in runs.on_gpu if batch < high), default=0)
    return boundary_between(by_units(fits, unit), low // unit, high // unit) * unit


def largest_with_retries(runs: CommandRuns, unit: int, guess: int, most: int) -> int:
    """Return the largest multiple of `unit` up to `most` that fits, with or without retries.

    If memory is short, cuDNN takes smaller workspaces, so the memory of runs with retries follows a separate
    line. The search extrapolates from the largest run with retries, or begins at `guess` if there is none.
    """

    def fits(batch: int) -> bool:
        return runs.outcome(batch) is not Outcome.DOES_NOT_FIT

    def need_bytes(batch: int) -> int:
        return runs.on_gpu[batch].largest.peak.allocated_bytes

    retrying = [batch for batch, run in runs.on_gpu.items() if run.outcome is Outcome.FITS_WITH_RETRIES]
    if not retrying:
        return boundary_from_guess(by_units(fits, unit), guess // unit, most // unit) * unit
    return unit * boundary_along_lines(
        by_units(fits, unit),
        by_units(need_bytes, unit),
        runs.limit_bytes,
        max(retrying) // unit,
        most // unit,
    )


def search_whole(
    whole: CommandRuns, steps: CommandRuns, search: Search, unit: int, most: int, notes: list[str]
) -> Search:
    """Return `search` if runs beyond the first optimizer steps confirm it, or search again by them."""
    if search.largest >= LARGEST_BATCH // 2:
        whole.outcome(max(steps.on_gpu))
        return search
    answers = sorted({search.comfortable, search.largest} - {0})
    refused = next((batch for batch in answers if _needs_more(whole, steps, batch)), None)
    if refused is None:
        return search
    notes.append(
        f"batch {refused} runs its first optimizer steps, and needs more memory in what follows them: an "
        "evaluation, a checkpoint or later steps"
    )
    if whole.outcome(refused) is not Outcome.DOES_NOT_FIT:
        return search_by_commands(whole, unit, (max(unit, refused // 2), refused), most)
    if whole.outcome(unit) is Outcome.DOES_NOT_FIT:
        return Search(0, 0, unit, ((unit, Outcome.DOES_NOT_FIT),))
    return search_by_commands(whole, unit, (unit, refused), refused)


def fails_after_steps(whole: CommandRuns, steps: CommandRuns, batch: int) -> bool:
    """Return whether the run of `whole` fails after the optimizer steps at which the runs of `steps` end."""
    whole.outcome(batch)
    failure, last_step = whole.on_gpu[batch].failure, steps.options.stop_after
    return failure is not None and last_step is not None and failure.step > last_step


def _needs_more(whole: CommandRuns, steps: CommandRuns, batch: int) -> bool:
    """Return whether a run of `whole` fails after the first steps, or differs in outcome from `steps`."""
    return fails_after_steps(whole, steps, batch) or whole.outcome(batch) is not steps.outcome(batch)
