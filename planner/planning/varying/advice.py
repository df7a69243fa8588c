"""Evaluate changes to the recipe or the batches of a job whose samples vary in size.

Each change is planned like a job: the largest batch whose runs stay within the risk, and the probability that
a run at the requested batch runs out of memory. If the requested batch does not fit with any single change,
the changes that enlarge the largest batch are combined, the mildest first, until it fits.
"""

from collections.abc import Callable, Iterator
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import ModelError, UsageError
from planner.hardware import Budget, with_config
from planner.jobs import Batching, Job, TensorSpec, load_distribution
from planner.planning.changes import (
    SMALLER_BATCHES,
    Change,
    TrainingConfig,
    apply_all,
    change_fields,
    changes_for,
)
from planner.planning.varying.plan import VaryingSide, check_varying, judged, plan_side, risk_of, sampled_at
from planner.planning.varying.programs import SizedPrograms
from planner.planning.varying.risk import RunRisk
from planner.program import OnProgress

FEWER_SIZES = 64  # a multiple to pad to
KEPT_SHARE = 0.95  # share of samples that a smaller range does not cut

OpenPrograms = Callable[[Job], SizedPrograms]


class VaryingAttempt(Struct, frozen=True):
    """A job with changes, the largest batch with them, and the risk at the requested batch."""

    changes: tuple[Change, ...]
    training: TrainingConfig
    side: VaryingSide  # with the largest batch
    asked: RunRisk | None  # at the requested batch, or at its micro-batch if a change splits it

    @property
    def fits(self) -> bool:
        """Return whether a batch is requested, and its probability of running out of memory is acceptable."""
        return self.asked is not None and self.asked.probability <= risk_of(self.side.budget)


class VaryingAdvice(Struct, frozen=True):
    """The plans of a job with varying sample sizes, unchanged and with each change."""

    batch: int | None  # the requested batch; None if the largest was requested
    unchanged: VaryingAttempt
    singles: tuple[VaryingAttempt, ...]  # every change that was tried by itself, the mildest first
    together: VaryingAttempt | None  # several changes with which the batch fits; None if not needed or found
    failed: tuple[tuple[str, str], ...]  # changes that the model does not support, and why
    seconds: float


def advise_varying(
    job: Job, budget: Budget, batch: int | None, open_programs: OpenPrograms, on_progress: OnProgress
) -> VaryingAdvice:
    """Plan a job unchanged and with each change that it allows, and report which changes fail.

    If no change alone makes the batch fit, several are combined. Slow changes are skipped. Splits of the
    batch are skipped if no batch is requested, if the batch fits without changes, or after one split fits.
    Raises the errors of a capture.
    """
    start = perf_counter()
    training = TrainingConfig(job, batch or 1, budget.limits.config)
    programs = open_programs(job)
    budget = judged(budget, programs)
    failed: dict[str, str] = {}

    def attempt(changes: tuple[Change, ...]) -> VaryingAttempt | None:
        on_progress("playing " + (" ".join(change.name for change in changes) or "the recipe as it is"))
        changed = apply_all(training, changes)
        try:
            check_varying(changed.job)
            own = open_programs(changed.job)
            side = plan_side(changed.job, with_config(budget, changed.config), own)
            asked = sampled_at(side, changed.job, own, changed.batch) if batch else None
        except (ModelError, UsageError) as error:
            if not changes:
                raise
            failed[" ".join(change.name for change in changes)] = str(error)
            return None
        return VaryingAttempt(changes, changed, side, asked)

    unchanged = attempt(())
    assert unchanged is not None
    is_enough = batch is None or unchanged.fits
    singles: list[VaryingAttempt] = []
    changes = [*_of_batches(job), *changes_for(training, budget.device.capability)]
    for change in sorted(changes, key=lambda change: change.rank):
        splits = change.group == SMALLER_BATCHES and any(
            one.fits and one.changes[0].group == change.group for one in singles
        )
        if not (change.is_slow or splits or (change.group == SMALLER_BATCHES and is_enough)):
            single = attempt((change,))
            singles += [] if single is None else [single]
    together = None
    if not is_enough and not any(single.fits for single in singles):
        together = _together(unchanged, singles, attempt)
    return VaryingAdvice(
        batch, unchanged, tuple(singles), together, tuple(failed.items()), perf_counter() - start
    )


def _together(
    unchanged: VaryingAttempt,
    singles: list[VaryingAttempt],
    attempt: Callable[[tuple[Change, ...]], VaryingAttempt | None],
) -> VaryingAttempt | None:
    """Combine changes until the requested batch fits, and return that attempt, or None if it never fits.

    Changes that enlarge the largest batch or split the batch are added one by one, in the order of `singles`,
    at most one from each group.
    """
    chosen: list[Change] = []
    for single in singles:
        change = single.changes[0]
        is_useful = single.side.largest > unchanged.side.largest or change.group == SMALLER_BATCHES
        if is_useful and all(change.group != other.group for other in chosen):
            chosen.append(change)
            found = attempt(tuple(chosen)) if len(chosen) > 1 else None
            if found is not None and found.fits:
                return found
    return None


def _of_batches(job: Job) -> Iterator[Change]:
    """Yield changes to the grouping, padding and cutting of samples, or none if several dimensions vary."""
    sizes = load_distribution(job)
    if len(sizes.ranges) > 1:
        return
    ((low, high),) = sizes.ranges
    if job.samples.batching is Batching.PADDED:
        cost = "less padding; samples of similar sizes share a batch, and the largest comes first"
        yield change_fields("--batching grouped", cost, 1, "batching", batching=Batching.GROUPED)
    if (
        high - low >= FEWER_SIZES
        and job.samples.pad_to < FEWER_SIZES
        and job.samples.batching is not Batching.PACKED
    ):
        cost = "somewhat more padding, which fewer sizes leave less fragments for"
        yield change_fields(f"--pad-to {FEWER_SIZES}", cost, 1, "sizes", pad_to=FEWER_SIZES)
    kept = sizes.size_of_share(KEPT_SHARE)
    if low < kept < high and job.samples.batching is not Batching.PACKED:
        name = f"--input with {low}..{kept} in place of {low}..{high}"
        cost = f"samples larger than {kept} are cut, {1 - KEPT_SHARE:.0%} of all"

        def cut(spec: TensorSpec) -> TensorSpec:
            shape = tuple(kept if each == (low, high) else each[1] for each in spec.ranges)
            return replace(spec, shape=shape)

        yield change_fields(
            name,
            cost,
            5,
            "sizes",
            inputs=tuple(map(cut, job.samples.inputs)),
            target=None if job.samples.target is None else cut(job.samples.target),
            targets=tuple(map(cut, job.samples.targets)),
        )
