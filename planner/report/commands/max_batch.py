"""The reports that people read first: plain, aligned text of at most 100 columns that survives a pipe."""

from collections.abc import Iterator, Mapping, Sequence

from planner.allocator import Failure, Replay
from planner.hardware import MIB, is_fitted
from planner.planning import LARGEST_BATCH, Estimate, Plan, RetryCost, Seconds
from planner.program import Phase
from planner.report.assumptions import of_run, short_op
from planner.report.layout import (
    DIGITS,
    NAMES,
    Row,
    card_table,
    entry,
    heading,
    job_text,
    table,
    time_text,
    wrapped,
)
from planner.report.units import breakdown, chance_text, mib, shares

MOST_STEPS = 5  # of which the retries are listed


def max_batch_text(plan: Plan, import_seconds: float) -> str:
    """The report of `planner max-batch`."""
    shown = shown_first(plan)
    lines = [*answer_lines(plan), *multiple_lines(plan), *entry("Job", job_text(plan.job))]
    if shown is not None:
        lines += ["", *card_table(plan.budget), "", *_memory(shown)]
    if plan.with_retries not in (None, shown):
        lines += ["", *table(*memory_rows(plan.with_retries))]
    if plan.at_max is not None and plan.first_failure is not None:
        lines += ["", *beyond_lines(plan.first_failure, plan.search.largest)]
    if shown is not None:
        lines += ["", *assumed(shown)]
    return "\n".join([*lines, took(plan.seconds, import_seconds)])


def estimate_text(estimate: Estimate, import_seconds: float) -> str:
    """The report of `planner estimate`."""
    lines = [*verdict(estimate), *entry("Job", job_text(estimate.job))]
    lines += ["", *card_table(estimate.budget), "", *_memory(estimate), "", *assumed(estimate)]
    return "\n".join([*lines, took(estimate.seconds, import_seconds)])


def answer_lines(plan: Plan) -> list[str]:
    """The largest batch, or why there is none."""
    search, sure = plan.search, f"at confidence {plan.budget.confidence:g}"
    if plan.at_max is None and plan.largest_of_any_size:
        return entry("Largest batch", f"none {sure} that is a multiple of {plan.multiple_of}")
    if plan.at_max is None:
        failed = [] if plan.first_failure is None else _failure(plan.first_failure)
        return [*entry("Largest batch", f"none {sure}, not even 1 fits"), *failed]
    if search.first_failure is None and search.largest >= LARGEST_BATCH:
        return entry("Largest batch", f"{search.largest}, where the search ends: memory hardly depends on it")
    lead, retrying = plan.answer, plan.with_retries
    if lead is None:
        lines = entry("Largest batch", f"none without retries {sure}")
    else:
        whole = ", the whole epoch" if lead.run.batch == plan.job.dataset_size else ""
        lines = entry("Largest batch", f"{lead.run.batch}{whole} {sure}{_speed(plan)}")
    if retrying is not None:
        lines += entry(
            "With retries",
            f"{retrying.run.batch}, at the cost of retries: {retries_text(retrying.retry_costs)}",
        )
    return [*lines, *risk_lines(*(found for found in (lead, retrying) if found is not None))]


def shown_first(plan: Plan) -> Estimate | None:
    """The estimate that is shown in full."""
    return plan.answer or plan.at_max or plan.first_failure


def _speed(plan: Plan) -> str:
    if plan.with_retries is None:
        return ""
    return ", without retries" if plan.at_comfortable is not None else ", none runs without retries"


def retries_text(costs: Sequence[RetryCost]) -> str:
    """What retries cost, by the steps that were traced."""
    counts = [str(cost.retries) for cost in costs]
    if len(counts) > MOST_STEPS:
        counts = [*counts[:MOST_STEPS], "..."]
    each = ", ".join(counts[:-1]) + (" and " if len(counts) > 1 else "") + counts[-1]
    frees = sum(cost.cuda_frees for cost in costs)
    steps = f"the {len(costs)} steps" if len(costs) > 1 else "the step"
    return (
        f"{each} in {steps} traced; torch then releases what it has cached (calls of cudaFree in all: "
        f"{frees}; the GPU stands still meanwhile) and asks CUDA again"
    )


def multiple_lines(plan: Plan) -> list[str]:
    """Say of which number the answer is a multiple, and what fits of any size."""
    if plan.multiple_of == 1:
        return []
    fits, at_ease = plan.largest_of_any_size, plan.comfortable_of_any_size
    which = f"{at_ease} fits without retries, {fits} with" if at_ease < fits else f"{fits or 'none'} fits"
    return entry("Multiple of", f"{plan.multiple_of}; of any size, {which}")


def verdict(estimate: Estimate) -> list[str]:
    """Whether the batch fits, and where it fails if it does not."""
    batch, sure = estimate.run.batch, f"at confidence {estimate.budget.confidence:g}"
    process = f"{mib(estimate.process_bytes, DIGITS):,} MiB"
    if estimate.failed is not None:
        return [
            f"Batch {batch} does not fit {sure}; without a limit it would take {process}",
            *_failure(estimate),
            *risk_lines(estimate),
        ]
    if estimate.budget.arena.share_bytes is None:
        return [f"Batch {batch} takes {process} of GPU memory"]
    costs = estimate.retry_costs
    lines = [f"Batch {batch} fits {sure}{', with retries' if costs else ''}"]
    if costs:
        lines += entry("Retries", retries_text(costs))
    return [*lines, *risk_lines(estimate)]


def risk_lines(*estimates: Estimate) -> list[str]:
    """The probability that each batch runs out of memory, where anything bounds it, or why there is none."""
    chances = dict.fromkeys(
        f"{chance_text(found.p_out_of_memory)} at batch {found.run.batch}"
        for found in estimates
        if found.p_out_of_memory is not None
    )
    if chances:
        return entry("Risk", f"P(out of memory) {', '.join(chances)}")
    return _no_risk(estimates[0]) if estimates else []


def _no_risk(estimate: Estimate) -> list[str]:
    """Why there is no probability, where a GPU bounds the memory and no published run is like the job."""
    budget = estimate.budget
    is_bounded = budget.arena.share_bytes is not None
    if not is_bounded or not budget.likeness.unlike or is_fitted(budget):
        return []
    return entry("Risk", f"not known: no published run {' or '.join(budget.likeness.unlike)}")


def _memory(estimate: Estimate) -> list[str]:
    return [*table(*memory_rows(estimate)), *step_lines(estimate.run), "", *consists_of(breakdown(estimate))]


def memory_rows(estimate: Estimate) -> tuple[str, list[Row]]:
    """What the batch takes, as a title and rows."""
    run, confidence = estimate.run, estimate.budget.confidence
    rows = [
        ("peak allocated", run.peak_allocated_bytes, "tensors and workspaces, as torch counts them"),
        ("peak reserved", run.peak_reserved_bytes, "what torch's caching allocator holds"),
        ("process", estimate.process_bytes, "reserved and CUDA context, as nvidia-smi shows it"),
    ]
    if estimate.failed is None:
        rows.append(("process, at most", estimate.process_upper_bytes, f"at confidence {confidence:g}"))
    how = ", no limit" if estimate.failed is not None else ", with retries" if estimate.retry_costs else ""
    return f"Batch {run.batch}{how}", rows


def consists_of(parts: Mapping[str, int]) -> list[str]:
    """Return the breakdown of a process as a table."""
    lines = [heading("The process consists of") + "   share"]
    for name, rounded, share in shares(parts, DIGITS):
        lines.append(f"  {name:<{NAMES}}{rounded:>12,.1f}  {share:6.1%}")
    return lines


def step_lines(run: Replay) -> list[str]:
    """The peaks of the first step and of later ones, where they are not the same."""
    first, later = run.first_step, run.later_steps
    if later is None or mib(first.allocated_bytes, DIGITS) == mib(later.allocated_bytes, DIGITS):
        return []
    sizes = [f"{mib(peaks.allocated_bytes, DIGITS):,.1f} MiB" for peaks in (first, later)]
    return [f"  peak allocated in the first step {sizes[0]}, in later ones {sizes[1]}"]


def _failure(estimate: Estimate) -> list[str]:
    """Where the run under the budget ended."""
    if estimate.failed is None or estimate.failed.failure is None:
        return []
    failure = estimate.failed.failure
    place = ", ".join(_place(failure))
    return entry("Fails at", f"{place}: no room for {_size(failure.requested_bytes)}")


def _place(failure: Failure) -> Iterator[str]:
    if failure.phase is Phase.SETUP:
        yield "moving the model to the GPU"
    elif failure.phase is Phase.INPUTS:
        yield f"step {failure.step}"
        yield "copying the batch to the GPU"
    else:
        yield f"step {failure.step}"
        yield str(failure.phase)
    if failure.module:
        yield f"module {failure.module}"
    if failure.phase not in (Phase.SETUP, Phase.INPUTS):
        yield short_op(failure.op)


def beyond_lines(failure: Estimate, largest: int) -> list[str]:
    """What the smallest batch that does not fit would take, and where it fails."""
    odd = ", though larger ones do" if failure.run.batch < largest else ""
    process = f"{mib(failure.process_bytes, DIGITS):,} MiB"
    return [
        f"Batch {failure.run.batch} does not fit{odd}; without a limit it would take {process}",
        *_failure(failure),
    ]


def assumed(estimate: Estimate) -> list[str]:
    """What the answer takes for granted, one sentence each."""
    return ["Assumed", *(line for sentence in of_run(estimate) for line in wrapped("  - ", sentence))]


def took(seconds: Seconds, import_seconds: float) -> str:
    """Where the seconds went."""
    return time_text({"importing": import_seconds, "tracing": seconds.trace, "replaying": seconds.replay})


def _size(size_bytes: int) -> str:
    return f"{mib(size_bytes, DIGITS):,} MiB" if size_bytes >= MIB else f"{size_bytes:,} bytes"
