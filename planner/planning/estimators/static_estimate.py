"""Compare the totals of the formula and other estimators with the memory of a GPU.

None of the estimates knows the allocator or the CUDA context. So a total is compared with the memory that the
planner's own replay may take on the same GPU: usable memory less context and margin, or the cap.
"""

from msgspec import Struct

from planner.errors import UsageError
from planner.hardware import Budget
from planner.jobs import Job, Mode
from planner.planning.estimators.formula import MOMENTS, AffineCounts, Counts, Usage, largest_batch, usage
from planner.planning.estimators.methods import Method
from planner.planning.estimators.peers import MEBIBYTE_BYTES, PeerEstimate

Line = tuple[str, int]  # the name of a term, bytes


class StaticEstimate(Struct, frozen=True):
    """The memory that one estimator computes for one batch size."""

    method: Method
    job: Job
    batch: int
    budget: Budget
    lines: tuple[Line, ...]  # as the estimator prints them, totals included
    total_bytes: int  # the total for the job's mode
    unit_bytes: int  # the estimator's megabyte
    seconds: float

    @property
    def fits(self) -> bool:
        """Return whether the total is within the allocator's limit, or True if there is no limit."""
        left = self.budget.limits.allocator_limit_bytes
        return left is None or self.total_bytes <= left


class FormulaPlan(Struct, frozen=True):
    """The largest batch size that fits by the formula, with estimates at it and at the next batch size."""

    job: Job
    budget: Budget
    max_batch: int  # 0 if not even 1 fits
    at_max: StaticEstimate | None  # None if not even 1 fits
    first_failure: StaticEstimate
    seconds: float


def moments_of(job: Job) -> int:
    """Return the number of moments that the job's optimizer keeps for each weight.

    The formula calls the number m. Raises UsageError for an optimizer or a mode that the formula has no term
    for.
    """
    if job.loop.mode is Mode.FORWARD:
        raise UsageError(
            "--mode forward: the formula knows training and inference; give --mode train or --mode infer, "
            "or use --method trace"
        )
    if job.loop.optimizer not in MOMENTS:
        raise UsageError(
            f"optimizer {job.loop.optimizer}: the formula counts moments the size of the weights, and "
            f"{job.loop.optimizer} keeps others; use --method trace"
        )
    return MOMENTS[job.loop.optimizer]


def formula_total_bytes(job: Job, memory: Usage) -> int:
    """Return the formula's total for inference or for training, depending on the job's mode."""
    return memory.inference_bytes if job.loop.mode is Mode.INFER else memory.training_bytes


def formula_estimate(job: Job, batch: int, budget: Budget, counts: Counts, seconds: float) -> StaticEstimate:
    """Compute the formula's estimate from the numbers of elements at a batch size.

    The estimate has the notebook's seven lines. Raises as `moments_of` does.
    """
    memory = usage(counts, moments_of(job))
    lines = (
        ("Data", memory.data_bytes),
        ("Weight", memory.weight_bytes),
        ("Forward output", memory.forward_output_bytes),
        ("Weight gradient", memory.weight_gradient_bytes),
        ("Output gradient", memory.output_gradient_bytes),
        ("Total for training", memory.training_bytes),
        ("Total for inference", memory.inference_bytes),
    )
    total_bytes = formula_total_bytes(job, memory)
    return StaticEstimate(Method.FORMULA, job, batch, budget, lines, total_bytes, MEBIBYTE_BYTES, seconds)


def formula_plan(job: Job, budget: Budget, counts: AffineCounts, seconds: float) -> FormulaPlan:
    """Find the largest batch size that fits by the formula, and estimate it and the next batch size.

    Raises as `moments_of` does, and ValueError if memory has no limit or does not grow with the batch size.
    """
    left = budget.limits.allocator_limit_bytes
    if left is None:
        raise ValueError("without a GPU or a cap no batch is the largest")
    moments = moments_of(job)
    largest = largest_batch(
        lambda batch: formula_total_bytes(job, usage(counts.at(batch), moments)),
        left,
    )

    def at(batch: int) -> StaticEstimate:
        return formula_estimate(job, batch, budget, counts.at(batch), seconds)

    return FormulaPlan(job, budget, largest, at(largest) if largest else None, at(largest + 1), seconds)


def peer_estimate(
    method: Method, job: Job, batch: int, budget: Budget, peer: PeerEstimate, seconds: float
) -> StaticEstimate:
    """Convert another tool's estimate to a `StaticEstimate` with the tool's terms and their total."""
    lines = (*peer.parts, ("Total", peer.total_bytes))
    return StaticEstimate(method, job, batch, budget, lines, peer.total_bytes, peer.unit_bytes, seconds)
