"""Judge whether a batch fits: FITS, TIGHT, RISKY or OUT OF MEMORY.

On a GPU, the replay decides, first in the memory available at the confidence, then in the likeliest memory.
Under a budget of the process, the process as nvidia-smi shows it has to stay below the budget. The allocator
does not know the budget, so no retry is counted on.
"""

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from planner.hardware import EVEN_ODDS, UNLIMITED_BYTES, Budget, is_fitted, upper_process_bytes
from planner.planning.check.config import FailOn, Headroom
from planner.planning.estimate import Estimate, estimate_batch
from planner.program import Outcome, Trace

_MOST = 0.9995  # the largest confidence at which a process is bounded; beyond, no margin is known
_HALVINGS = 20


class Verdict(StrEnum):
    """The verdicts on a batch, from good to bad."""

    FITS = "FITS"  # fits at the confidence, without retries and with the headroom
    TIGHT = "TIGHT"  # fits at the confidence, but with retries or with less than the headroom
    RISKY = "RISKY"  # most likely fits, but does not fit at the confidence
    OUT_OF_MEMORY = "OUT OF MEMORY"  # most likely does not fit

    def is_no(self, fail_on: FailOn) -> bool:
        """Return whether this verdict is `fail_on` or worse."""
        order = list(Verdict)
        return order.index(self) >= order.index(Verdict[fail_on.name])


class Judgement(Struct, frozen=True):
    """A verdict on a batch, with the reason, available bytes and probability of running out of memory."""

    verdict: Verdict
    reason: str  # empty for FITS
    available_bytes: int | None  # the smaller of the GPU's usable memory and the budget; None if unlimited
    p_out_of_memory: float | None  # None if no known run resembles the job


def judge(
    estimate: Estimate, trace: Trace, even: Budget, budget_bytes: int | None, headroom: Headroom
) -> Judgement:
    """Judge a batch on its GPU and, if `budget_bytes` is given, under that budget; return the worse verdict.

    The returned available bytes are the smaller, and the returned probability is the larger, of both
    judgements. `even` is the GPU's budget at confidence 0.5.
    """
    judgements = [_judge_gpu(estimate, trace, even, headroom)]
    if budget_bytes is not None:
        judgements.append(_judge_process(estimate, budget_bytes, headroom))
    order = list(Verdict)
    worst = max(judgements, key=lambda one: order.index(one.verdict))
    sizes = [one.available_bytes for one in judgements if one.available_bytes is not None]
    chances = [one.p_out_of_memory for one in judgements if one.p_out_of_memory is not None]
    return replace(
        worst, available_bytes=min(sizes, default=None), p_out_of_memory=max(chances, default=None)
    )


def _judge_gpu(estimate: Estimate, trace: Trace, even: Budget, headroom: Headroom) -> Judgement:
    usable_bytes = estimate.budget.device.usable.value
    available_bytes = None if usable_bytes >= UNLIMITED_BYTES else usable_bytes
    verdict, reason = Verdict.FITS, ""
    if estimate.outcome is Outcome.DOES_NOT_FIT:
        likely = estimate_batch(estimate.job, trace, even).outcome
        if likely is Outcome.DOES_NOT_FIT:
            verdict, reason = Verdict.OUT_OF_MEMORY, "most likely does not fit"
        else:
            sure = f"{estimate.budget.confidence:g}"
            verdict, reason = Verdict.RISKY, f"most likely fits, and not at confidence {sure}"
    elif estimate.outcome is Outcome.FITS_WITH_RETRIES:
        need = "fits by retries of the allocator alone" if estimate.retry_costs else "may need retries"
        verdict, reason = Verdict.TIGHT, f"{need}, which take time"
    elif available_bytes is not None:
        left_bytes = available_bytes - estimate.process_upper_bytes
        if left_bytes < headroom.of(available_bytes):
            verdict, reason = Verdict.TIGHT, "leaves less than the headroom free"
    return Judgement(verdict, reason, available_bytes, estimate.p_out_of_memory)


def _judge_process(estimate: Estimate, budget_bytes: int, headroom: Headroom) -> Judgement:
    upper_bytes = estimate.process_upper_bytes
    likely_bytes = max(estimate.process_bytes, _upper_at(estimate, EVEN_ODDS))
    verdict, reason = Verdict.FITS, ""
    if likely_bytes > budget_bytes:
        verdict, reason = Verdict.OUT_OF_MEMORY, "most likely takes more than the budget"
    elif upper_bytes > budget_bytes:
        sure = f"{estimate.budget.confidence:g}"
        verdict = Verdict.RISKY
        reason = f"most likely stays within the budget, and not at confidence {sure}"
    elif budget_bytes - upper_bytes < headroom.of(budget_bytes):
        verdict, reason = Verdict.TIGHT, "leaves less than the headroom of the budget free"
    return Judgement(verdict, reason, budget_bytes, _probability_beyond(estimate, budget_bytes))


def _upper_at(estimate: Estimate, confidence: float) -> int:
    return upper_process_bytes(
        replace(estimate.budget, confidence=confidence), estimate.run.peak_reserved_bytes
    )


def _probability_beyond(estimate: Estimate, budget_bytes: int) -> float | None:
    """Return the probability that a process exceeds a budget, or None if no known run is like the job."""
    if estimate.budget.likeness.unlike and not is_fitted(estimate.budget):
        return None
    low, high = 1 - _MOST, _MOST
    if _upper_at(estimate, _MOST) <= budget_bytes:
        return round(1 - _MOST, 6)
    if is_fitted(estimate.budget):  # its bounds start at even odds, above a fitted line
        low = EVEN_ODDS
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _upper_at(estimate, middle) <= budget_bytes else (low, middle)
    return 1 - low


def largest_that_holds(holds: Callable[[int], bool], start: int, most: int) -> int:
    """Return the largest batch up to `most` for which `holds` returns True, or 0 if there is none.

    If `holds` is true for a batch, it has to be true for all smaller batches. The search begins at `start`,
    which should be near the answer.
    """
    low, high, probe = 0, most + 1, min(start, most)
    while high - low > 1:
        if holds(probe):
            low = probe
            probe = min(2 * probe, (low + high) // 2) if high > most else (low + high) // 2
        else:
            high = probe
            probe = (low + high) // 2
    return low
