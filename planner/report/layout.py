"""What the text reports share: aligned tables, wrapped entries, and the sections on the job and the card."""

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap

from planner.hardware import Budget
from planner.jobs import Checkpoint, ClipGradients, Job, MemoryFormat, Mode, OptimizerImpl, Precision
from planner.report.units import is_endless, mib

WIDTH = 100
NAMES = 26  # columns of a table's first column
DIGITS = 1  # of MiB

Row = tuple[str, int, str]  # name, bytes, remark


def job_text(job: Job) -> str:
    """What is run, in one line."""
    given = ", ".join(f"{key}={_value(value)}" for key, value in job.model_args)
    model = f"{job.model} = {job.source}" if job.source else job.model
    targets = job.targets if job.target is None else (job.target,)
    target = f", target {' and '.join(map(str, targets))}" if targets else ""
    sample = f"one sample: input {' and '.join(map(str, job.inputs))}{target}"
    return f"{model}{f'({given})' if given else ''}; {doing(job)}; {sample}"


def doing(job: Job) -> str:
    """The part of a job that is not the model."""
    if job.mode is Mode.INFER:
        return ", ".join(("inference", *_numbers(job)))
    if job.mode is Mode.GENERATE:
        return ", ".join((f"generation of {job.new_tokens} tokens", *_numbers(job)))
    if job.mode is Mode.FORWARD:
        return ", ".join(("forward pass with gradients recorded", *_numbers(job)))
    how = "" if job.optimizer_impl is OptimizerImpl.FOREACH else f" ({job.optimizer_impl})"
    parts = (f"training with {job.optimizer}{how}", f"{job.loss} loss", *_numbers(job), *_recipe(job))
    return ", ".join(parts)


def _numbers(job: Job) -> Iterator[str]:
    """Precision and layout where they are not the usual ones."""
    if job.precision is not Precision.FP32:
        yield str(job.precision)
    if job.grad_scaler:
        yield "gradient scaling"
    if job.memory_format is not MemoryFormat.CONTIGUOUS:
        yield str(job.memory_format)
    if job.cudnn_benchmark:
        yield "cudnn.benchmark"
    if job.cudnn:
        yield f"workspaces of cuDNN ({job.cudnn})"
    if job.cublas_workspace_config:
        yield f"CUBLAS_WORKSPACE_CONFIG={job.cublas_workspace_config}"


def _recipe(job: Job) -> Iterator[str]:
    """The rest of what is not as in the simplest loop."""
    if job.checkpoint is not Checkpoint.NONE:
        yield f"checkpointed {job.checkpoint}"
    if job.accumulate > 1:
        yield f"{job.accumulate} micro-batches a step"
    if job.clip_gradients is not ClipGradients.NONE:
        yield f"gradients clipped by {job.clip_gradients}"
    if job.ema:
        yield "moving average of the weights"
    if job.evaluate:
        yield f"evaluation{f' of batches of {job.eval_batch:,}' if job.eval_batch else ''} between the steps"
    if job.dataset_size:
        yield f"epochs of {job.dataset_size:,} samples"
    if job.lengths is not None:
        yield f"{job.lengths} lengths"
    if job.ddp:
        yield "gradient buckets as views" if job.ddp_bucket_view else "gradient buckets"
    if job.freeze:
        yield f"frozen: {' '.join(job.freeze)}"
    if job.train_only:
        yield f"trained only: {' '.join(job.train_only)}"


def _value(value: object) -> str:
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, tuple) else str(value)


def card_table(budget: Budget) -> list[str]:
    """The card's memory and what of it is left for the allocator."""
    return table(*card_rows(budget))


def card_rows(budget: Budget) -> tuple[str, list[Row]]:
    """The same as a title and rows."""
    device, sure = budget.device, f"confidence {budget.confidence:g}"
    rows: list[Row] = []
    bounded = not is_endless(device.usable)
    if bounded:
        rows.append(("total", device.total.value, device.total.source))
        rows.append(("usable by torch", device.usable.value, device.usable.source))
    rows.append(("CUDA context", device.context.value, device.context.source))
    if budget.cap_bytes is not None:
        rows.append(("allocator's cap", budget.cap_bytes, "given by the user"))
    if budget.arena.share_bytes is not None:
        rest = "usable less context" if bounded else "the cap"
        if bounded and budget.cap_bytes is not None:
            rest += " or the cap"
        rows.append(("left for the allocator", budget.arena.share_bytes, f"{rest}, less a margin for {sure}"))
    return device.name if bounded else "Any GPU", rows


def table(title: str, rows: Iterable[Row]) -> list[str]:
    """Rows of a name, MiB and a remark under a heading."""
    lines = [heading(title)]
    for name, size_bytes, remark in rows:
        lines += wrapped(f"  {name:<{NAMES}}{mib(size_bytes, DIGITS):>12,.1f}  ", remark)
    return lines


def heading(title: str) -> str:
    """The first line of a table."""
    return f"{title:<{NAMES + 2}}{'MiB':>12}"


def entry(name: str, text: str) -> list[str]:
    """A line such as `Job: ...`."""
    return wrapped(f"{name + ':':<16}", text)


def wrapped(beginning: str, text: str) -> list[str]:
    """The text behind its beginning, and under itself where it takes several lines."""
    lines = wrap(text, WIDTH - len(beginning), break_on_hyphens=False) or [""]
    rest = " " * len(beginning)
    return [f"{beginning}{lines[0]}".rstrip(), *(f"{rest}{line}" for line in lines[1:])]


def time_text(parts: Mapping[str, float]) -> str:
    """Where the seconds went."""
    spent = ", ".join(f"{seconds:.1f} s {doing}" for doing, seconds in parts.items())
    return f"Took {sum(parts.values()):.1f} s: {spent}"


def signed_percent(share: float) -> str:
    """An error of one digit, such as `+6.3%`; nothing at all has no sign."""
    text = f"{share:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text
