"""The reports that people read first: plain, aligned text of at most 100 columns that survives a pipe."""

from collections.abc import Iterable, Iterator
from textwrap import wrap

from planner.budget import Budget
from planner.device import MIB
from planner.events import Phase
from planner.job import Job, Mode, OptimizerImpl
from planner.plan import Estimate, Plan, Seconds
from planner.replay import Failure
from planner.report.assumptions import of_run, short_op
from planner.report.figures import breakdown, is_endless, mib, mib_parts
from planner.search import LARGEST_BATCH

WIDTH = 100
_NAMES = 26  # columns of a table's first column
_DIGITS = 1  # of MiB

Row = tuple[str, int, str]  # name, bytes, remark


def max_batch_text(plan: Plan, import_seconds: float) -> str:
    """The report of `planner max-batch`."""
    shown = plan.at_max or plan.first_failure
    lines = [*_answer(plan), *_entry("Job", _job(plan.job))]
    if shown is not None:
        lines += ["", *_card(plan.budget), "", *_memory(shown)]
    if plan.at_max is not None and plan.first_failure is not None:
        lines += ["", *_beyond(plan.first_failure, plan.search.largest)]
    if shown is not None:
        lines += ["", *_assumed(shown)]
    return "\n".join([*lines, _time(plan.seconds, import_seconds)])


def estimate_text(estimate: Estimate, import_seconds: float) -> str:
    """The report of `planner estimate`."""
    lines = [*_verdict(estimate), *_entry("Job", _job(estimate.job))]
    lines += ["", *_card(estimate.budget), "", *_memory(estimate), "", *_assumed(estimate)]
    return "\n".join([*lines, _time(estimate.seconds, import_seconds)])


def _answer(plan: Plan) -> list[str]:
    search, sure = plan.search, f"at confidence {plan.budget.confidence:g}"
    if plan.at_max is None:
        failed = [] if plan.first_failure is None else _failure(plan.first_failure)
        return [*_entry("Largest batch", f"none {sure}, not even 1 fits"), *failed]
    if search.first_failure is None and search.largest >= LARGEST_BATCH:
        return _entry(
            "Largest batch", f"{search.largest}, where the search ends: memory hardly depends on it"
        )
    lines = _entry("Largest batch", f"{search.largest} {sure}")
    if search.comfortable < search.largest:
        costs = "more makes torch release cached memory and ask again, which takes time"
        lines += _entry("Comfortable", f"{search.comfortable or 'none'}; {costs}")
    return lines


def _verdict(estimate: Estimate) -> list[str]:
    batch, sure = estimate.run.batch, f"at confidence {estimate.budget.confidence:g}"
    process = f"{mib(estimate.process_bytes, _DIGITS):,} MiB"
    if estimate.failed is not None:
        return [
            f"Batch {batch} does not fit {sure}; without a limit it would take {process}",
            *_failure(estimate),
        ]
    if not _bounds(estimate.budget):
        return [f"Batch {batch} takes {process} of GPU memory"]
    retries = estimate.run.retries
    how = f", releasing cached memory {_times(retries)} on the way, which takes time" if retries else ""
    return [f"Batch {batch} fits {sure}{how}"]


def _job(job: Job) -> str:
    given = ", ".join(f"{key}={_value(value)}" for key, value in job.model_args)
    model = f"{job.model} = {job.source}" if job.source else job.model
    target = f", target {job.target}" if job.target is not None else ""
    sample = f"one sample: input {' and '.join(map(str, job.inputs))}{target}"
    return f"{model}{f'({given})' if given else ''}; {_doing(job)}; {sample}"


def _doing(job: Job) -> str:
    if job.mode is Mode.INFER:
        return "inference"
    if job.mode is Mode.FORWARD:
        return "forward pass with gradients recorded"
    how = "" if job.optimizer_impl is OptimizerImpl.FOREACH else f" ({job.optimizer_impl})"
    return f"training with {job.optimizer}{how}, {job.loss} loss"


def _value(value: object) -> str:
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, tuple) else str(value)


def _bounds(budget: Budget) -> list[int]:
    """What bounds the allocator, in bytes."""
    arena = budget.arena
    return [bound for bound in (arena.capacity_bytes, arena.limit_bytes) if bound is not None]


def _card(budget: Budget) -> list[str]:
    device, sure = budget.device, f"confidence {budget.confidence:g}"
    rows: list[Row] = []
    bounded = not is_endless(device.usable)
    if bounded:
        rows.append(("total", device.total.value, device.total.source))
        rows.append(("usable by torch", device.usable.value, device.usable.source))
    rows.append(("CUDA context", device.context.value, device.context.source))
    if budget.cap_bytes is not None:
        rows.append(("allocator's cap", budget.cap_bytes, "given by the user"))
    if _bounds(budget):
        rest = "usable less context" if bounded else "the cap"
        if bounded and budget.cap_bytes is not None:
            rest += " or the cap"
        rows.append(("left for the allocator", min(_bounds(budget)), f"{rest}, less a margin for {sure}"))
    return _table(device.name if bounded else "Any GPU", rows)


def _memory(estimate: Estimate) -> list[str]:
    run, confidence = estimate.run, estimate.budget.confidence
    rows = [
        ("peak allocated", run.peak_allocated_bytes, "tensors and workspaces, as torch counts them"),
        ("peak reserved", run.peak_reserved_bytes, "what torch's caching allocator holds"),
        ("process", estimate.process_bytes, "reserved and CUDA context, as nvidia-smi shows it"),
    ]
    if estimate.failed is None:
        rows.append(("process, at most", estimate.process_upper_bytes, f"at confidence {confidence:g}"))
    unlimited = ", no limit" if estimate.failed is not None else ""
    lines = [
        *_table(f"Batch {run.batch}{unlimited}", rows),
        "",
        _heading("The process consists of") + "   share",
    ]
    parts = breakdown(estimate)
    for name, rounded in mib_parts(parts, _DIGITS).items():
        if parts[name]:
            share = parts[name] / estimate.process_bytes
            lines.append(f"  {name:<{_NAMES}}{rounded:>12,.1f}  {share:6.1%}")
    return lines


def _failure(estimate: Estimate) -> list[str]:
    """Where the run under the budget ended."""
    if estimate.failed is None or estimate.failed.failure is None:
        return []
    failure = estimate.failed.failure
    place = ", ".join(_place(failure))
    return _entry("Fails at", f"{place}: no room for {_size(failure.requested_bytes)}")


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


def _beyond(failure: Estimate, largest: int) -> list[str]:
    odd = ", though larger ones do" if failure.run.batch < largest else ""
    process = f"{mib(failure.process_bytes, _DIGITS):,} MiB"
    return [
        f"Batch {failure.run.batch} does not fit{odd}; without a limit it would take {process}",
        *_failure(failure),
    ]


def _assumed(estimate: Estimate) -> list[str]:
    return ["Assumed", *(line for sentence in of_run(estimate) for line in _wrapped("  - ", sentence))]


def _time(seconds: Seconds, import_seconds: float) -> str:
    parts = {"importing": import_seconds, "tracing": seconds.trace, "replaying": seconds.replay}
    spent = ", ".join(f"{value:.1f} s {doing}" for doing, value in parts.items())
    return f"Took {sum(parts.values()):.1f} s: {spent}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _size(size_bytes: int) -> str:
    return f"{mib(size_bytes, _DIGITS):,} MiB" if size_bytes >= MIB else f"{size_bytes:,} bytes"


def _table(title: str, rows: Iterable[Row]) -> list[str]:
    lines = [_heading(title)]
    for name, size_bytes, remark in rows:
        lines += _wrapped(f"  {name:<{_NAMES}}{mib(size_bytes, _DIGITS):>12,.1f}  ", remark)
    return lines


def _heading(title: str) -> str:
    return f"{title:<{_NAMES + 2}}{'MiB':>12}"


def _entry(name: str, text: str) -> list[str]:
    return _wrapped(f"{name + ':':<16}", text)


def _wrapped(beginning: str, text: str) -> list[str]:
    """The text behind its beginning, and under itself where it takes several lines."""
    lines = wrap(text, WIDTH - len(beginning), break_on_hyphens=False) or [""]
    rest = " " * len(beginning)
    return [f"{beginning}{lines[0]}".rstrip(), *(f"{rest}{line}" for line in lines[1:])]
