"""Say whether a batch fits: the headline of an estimate, with risk, retries and failure."""

from collections.abc import Sequence

from planner.hardware import MIB, is_fitted
from planner.planning import (
    Answer,
    Estimate,
    RetryCost,
    steps_of_epoch,
)
from planner.program import LEFT_OUT_NOTE, Outcome
from planner.report.describe import place_text
from planner.report.document import (
    Entry,
    Headline,
    Style,
)
from planner.report.units import (
    mib_text,
    probability_text,
)

STYLES: dict[Outcome, Style] = {
    Outcome.FITS: "good",
    Outcome.FITS_WITH_RETRIES: "warning",
    Outcome.DOES_NOT_FIT: "bad",
}
_UNSURE = (Answer.LIKELY, Answer.NOT_KNOWN)
_NEARLY_ONE = 0.985  # probabilities of at least this get a decimal, as 99 % may be the confidence
MAX_STEPS = 5  # the most steps whose retries are listed


def headline(estimate: Estimate, *entries: Entry) -> Headline:
    """Return the headline with the verdict on a batch, the unplanned parts of the job, and `entries`."""
    answer, own = verdict(estimate)
    return Headline((answer, *own, *left_out_entries(estimate), *entries), style_of(estimate))


def left_out_entries(estimate: Estimate | None) -> list[Entry]:
    """Return an entry with the unplanned parts of the job, or [] if there are none."""
    notes = () if estimate is None else estimate.notes
    left_out = [note.removeprefix(LEFT_OUT_NOTE) for note in notes if note.startswith(LEFT_OUT_NOTE)]
    return [Entry("Not planned", "; ".join(left_out))] if left_out else []


def style_of(estimate: Estimate) -> Style:
    """Return the style for the verdict on a batch, such as "good" or "bad"."""
    if estimate.answer is None:
        return "neutral"
    is_warning = estimate.answer in _UNSURE or estimate.step_limit is not None
    return "warning" if is_warning else STYLES[estimate.outcome]


def exit_entries(estimate: Estimate | None) -> list[Entry]:
    """Return an entry that explains exit code 1 for an uncertain answer, or [] for a certain answer.

    The answer is uncertain if the batch likely fits, or if it is not known whether it fits. Returns [] too if
    `estimate` is None.
    """
    if estimate is None or estimate.answer not in _UNSURE:
        return []
    return [Entry("Exit code", f"1: it does not fit at confidence {estimate.budget.confidence:g}")]


def verdict(estimate: Estimate) -> tuple[str, tuple[Entry, ...]]:
    """Return the verdict on a batch as (text, entries). The entries are on its failure, retries and risk."""
    batch, process = estimate.run.batch, f"{mib_text(estimate.process_bytes)} MiB"
    if estimate.answer is None:
        return f"Batch {batch} takes {process} of GPU memory", ()
    how = ", with retries" if estimate.retry_costs else ""
    answer = f"{batch_answer(estimate)}{how}{until_text(estimate)}"
    if estimate.is_unlimited:
        answer += unlimited_text(estimate)
    return answer, (*failure_entries(estimate), *retries_entries(estimate), *risk_entries(estimate))


def unlimited_text(estimate: Estimate) -> str:
    """Return a clause on the memory that a batch would take without a limit.

    The allocated bytes are needed on any GPU; further reserved bytes may be released under a memory limit.
    """
    process, allocated = mib_text(estimate.process_bytes), mib_text(estimate.run.peak_allocated_bytes)
    return f"; without a limit it would take {process} MiB, {allocated} of them allocated at once"


def batch_answer(estimate: Estimate) -> str:
    """Return the sentence on whether a batch fits: yes, likely, unknown or no."""
    batch = estimate.run.batch
    if estimate.answer is Answer.DOES_NOT_FIT:
        return f"Batch {batch} does not fit"
    if estimate.answer is Answer.NOT_KNOWN:
        return f"It is not known whether batch {batch} fits"
    if estimate.answer is Answer.LIKELY:
        return f"Batch {batch} likely fits ({likely_text(estimate.p_out_of_memory)})"
    return f"Batch {batch} fits at confidence {estimate.budget.confidence:g}"


def likely_text(p_out_of_memory: float | None) -> str:
    """Return 1 - `p_out_of_memory`, the probability that a batch fits, as text in percent."""
    share = 1 - (p_out_of_memory or 0)
    return f"{share:.0%}".replace("%", " %") if share < _NEARLY_ONE else probability_text(share)


def until_text(estimate: Estimate) -> str:
    """Return a clause on the last step that fits if memory grows, or "" if all steps fit."""
    limit = estimate.step_limit
    if limit is None:
        return ""
    steps, until = steps_of_epoch(estimate.job, estimate.run.batch), f"step {limit.steps:,}"
    of_epoch = f" of {steps:,} in an epoch" if steps else ""
    about = "" if limit.is_exact else "about "
    if estimate.outcome is Outcome.DOES_NOT_FIT:
        return f": memory grows with every step, and lasts until {about}{until}{of_epoch}"
    return f", until {about}{until}{of_epoch}: memory grows with every step"


def retries_entries(estimate: Estimate) -> list[Entry]:
    """Return an entry with the cost of allocator retries, or [] if there are no retries.

    If no retries are expected, the entry has the cost of the retries in the least memory at the confidence.
    """
    if estimate.retry_costs:
        return [Entry("Retries", retries_text(estimate.retry_costs))]
    costs = estimate.retry_costs_at_confidence
    if not costs:
        return []
    return [Entry("Retries", f"none expected; {scarce_text(estimate)}, {retries_text(costs)}")]


def scarce_text(estimate: Estimate) -> str:
    """Return the phrase "in the least memory at confidence C"."""
    return f"in the least memory at confidence {estimate.budget.confidence:g}"


def retries_text(costs: Sequence[RetryCost]) -> str:
    """Return text with the retries in each traced step, and the calls of cudaFree in all."""
    counts = [str(cost.retries) for cost in costs]
    if len(counts) > MAX_STEPS:
        counts = [*counts[:MAX_STEPS], "..."]
    each = ", ".join(counts[:-1]) + (" and " if len(counts) > 1 else "") + counts[-1]
    frees = sum(cost.cuda_frees for cost in costs)
    steps = f"the {len(costs)} steps" if len(costs) > 1 else "the step"
    return (
        f"{each} in {steps} traced; torch then releases what it has cached (calls of cudaFree in all: "
        f"{frees}; the GPU waits meanwhile) and asks CUDA again"
    )


def risk_entries(*estimates: Estimate) -> list[Entry]:
    """Return one entry with the probability of running out of memory at each batch.

    If no probability is known, the entry has the reason. Returns [] if there is neither a probability nor a
    reason, such as in unlimited memory.
    """
    probabilities = dict.fromkeys(
        f"{probability_text(estimate.p_out_of_memory)} at batch {estimate.run.batch}{_steps_text(estimate)}"
        for estimate in estimates
        if estimate.p_out_of_memory is not None
    )
    if probabilities:
        return [Entry("Risk", f"P(out of memory) {', '.join(probabilities)}")]
    if not estimates:
        return []
    budget = estimates[0].budget
    unlike = budget.likeness.unlike
    if budget.limits.allocator_limit_bytes is None or not unlike or is_fitted(budget):
        return []
    return [Entry("Risk", f"not known: no run that is known {' or '.join(unlike)}")]


def _steps_text(estimate: Estimate) -> str:
    """Return " in N steps" if the batch fits and growing memory limits its steps, else ""."""
    if estimate.growth is None or estimate.step_limit is None or estimate.outcome is Outcome.DOES_NOT_FIT:
        return ""
    return f" in {estimate.growth.steps} steps"


def failure_entries(estimate: Estimate) -> list[Entry]:
    """Return an entry on the request that fails, or [] if none fails. It has the request's place and size."""
    if estimate.failed is None or estimate.failed.failure is None:
        return []
    failure = estimate.failed.failure
    requested = failure.requested_bytes
    size = f"{mib_text(requested)} MiB" if requested >= MIB else f"{requested:,} bytes"
    text, more = f"{place_text(failure)}: no room for {size}", estimate.failed_bytes
    if more is not None and more != estimate.budget.limits.allocator_limit_bytes:
        text += f" where the allocator has {mib_text(more)} MiB, which is as probable"
    elif estimate.answer in _UNSURE and more is not None:
        text += f" {scarce_text(estimate)}"
    return [Entry("Fails at", text)]
