"""The text of `planner explain`: where the memory goes at the peak, what gaps cost, how steps differ."""

from collections.abc import Iterator, Mapping, Sequence

from planner.differ import Difference
from planner.events import Phase, Role
from planner.explanation import Explanation, Fragmentation, LiveBlock, ModuleShare, Moment, Shown, fold
from planner.plan import Estimate
from planner.report.assumptions import short_op
from planner.report.difference import difference_lines
from planner.report.figures import mib
from planner.report.layout import DIGITS, NAMES, WIDTH, entry, heading, job_text, table, time_text, wrapped
from planner.report.text import assumed, consists_of, verdict

SMALLEST_SHARE = 0.005  # of the peak: modules below it are summed up in one line
MOST_MODULE_LINES = 30  # as many levels of modules are shown as these hold, unless the user says how many
OUTSIDE = "(outside of modules)"


def explanation_text(
    estimate: Estimate,
    explanation: Explanation,
    difference: Difference | None,
    shown: Shown,
    import_seconds: float,
) -> str:
    """The report of `planner explain`."""
    lines = [*verdict(estimate), *entry("Job", job_text(estimate.job))]
    lines += entry("Peak allocated", _peak_text(estimate, explanation))
    for part in (
        consists_of(estimate),
        _modules(explanation, shown.depth),
        _tensors(explanation, shown.top),
        _fragmentation(explanation.fragmentation),
        _steps(explanation),
        [] if difference is None else difference_lines(difference, shown.top),
        assumed(estimate),
    ):
        lines += ["", *part] if part else []
    seconds = {"importing": import_seconds, "tracing": estimate.seconds.trace}
    return "\n".join([*lines, time_text({**seconds, "replaying": estimate.seconds.replay})])


def moment_text(moment: Moment) -> str:
    """When something happens, in words."""
    return ", ".join(_moment(moment))


def _moment(moment: Moment) -> Iterator[str]:
    if moment.phase is Phase.SETUP:
        yield "moving the model to the GPU"
    else:
        yield f"step {moment.step}"
        yield {
            Phase.INPUTS: "copying the batch to the GPU",
            Phase.FORWARD: "forward pass",
            Phase.BACKWARD: "backward pass",
            Phase.OPTIMIZER: "optimizer",
        }.get(moment.phase, str(moment.phase))
    if moment.module:
        yield f"module {moment.module}"
    if moment.op:
        yield short_op(moment.op)


def _peak_text(estimate: Estimate, explanation: Explanation) -> str:
    unlimited = ", on a card without end" if estimate.failed is not None else ""
    return f"{_mib(explanation.run.peak_allocated_bytes)} MiB in {moment_text(explanation.peak)}{unlimited}"


def _mib(size_bytes: int) -> str:
    return f"{mib(size_bytes, DIGITS):,.1f}"


# ---- modules


def _modules(explanation: Explanation, depth: int | None) -> list[str]:
    """The tree of modules with shares of the allocated peak and what each holds most of."""
    total = explanation.run.peak_allocated_bytes
    if not total:
        return []
    levels = depth or readable_depth(explanation.modules)
    return [
        heading("By module at the peak") + "   share  mostly",
        *_module_lines(fold(explanation.modules, levels), 0, total),
    ]


def readable_depth(modules: ModuleShare) -> int:
    """How many levels of modules can be shown without losing the reader; at least 1."""
    depth, lines = 1, 0
    while True:
        now = len(list(_module_lines(fold(modules, depth + 1), 0, max(1, modules.size_bytes))))
        if now > MOST_MODULE_LINES or now == lines or fold(modules, depth + 1) == fold(modules, depth):
            return depth
        depth, lines = depth + 1, now


def _module_lines(share: ModuleShare, level: int, total: int) -> Iterator[str]:
    rows: list[tuple[int, ModuleShare | None]] = [(child.size_bytes, child) for child in share.children]
    if share.own_bytes and (level == 0 or share.children):
        rows.append((share.own_bytes, None))
    rows.sort(key=lambda row: -row[0])
    shown = [row for row in rows if row[0] >= SMALLEST_SHARE * total]
    for size_bytes, child in shown:
        name = (OUTSIDE if level == 0 else "(itself)") if child is None else child.name.rpartition(".")[2]
        yield _module_line(
            name, level, size_bytes, total, _own_roles(share) if child is None else child.by_role
        )
        if child is not None:
            yield from _module_lines(child, level + 1, total)
    rest = rows[len(shown) :]
    if rest:
        noun = "module" if len(rest) == 1 else "modules"
        yield _module_line(f"({len(rest)} smaller {noun})", level, sum(size for size, _ in rest), total, None)


def _own_roles(share: ModuleShare) -> dict[Role, int]:
    """What a module holds without its children, by role."""
    return {
        role: size_bytes - sum(child.by_role[role] for child in share.children)
        for role, size_bytes in share.by_role.items()
    }


def _module_line(name: str, level: int, size_bytes: int, total: int, roles: Mapping[Role, int] | None) -> str:
    label = f"  {'  ' * level}{name}"
    mostly = ""
    if roles is not None:
        role = max(roles, key=lambda role: roles[role])
        share = roles[role] / size_bytes
        mostly = f"  {role}" if share > 0.995 else f"  {role} {share:.0%}"
    return f"{label:<{NAMES + 2}}{_mib(size_bytes):>12}  {size_bytes / total:6.1%}{mostly}"


# ---- tensors


def _tensors(explanation: Explanation, top: int) -> list[str]:
    """The largest blocks in use at the peak, each with the line of code behind it where that is known."""
    lines = [f"Largest of the {len(explanation.blocks):,} blocks in use at the peak"]
    for block in explanation.blocks[:top]:
        lines += _tensor(block)
    return lines


def _tensor(block: LiveBlock) -> list[str]:
    detail = block.detail
    held = "" if detail is None or not detail.dtype else f"{tensor_text(detail.shape, detail.dtype)}  "
    born = "" if block.phase is Phase.SETUP else f", step {block.step} {block.phase}"
    where = f" in {block.module}" if block.module else ""
    beginning = f"{_mib(block.size_bytes):>11} MiB  {block.role:<13}"
    lines = wrapped(beginning, f"{held}{short_op(block.op)}{where}{born}")
    if detail is not None and detail.source:
        lines.append(_shortened(f"{'':<17}{detail.source}  {detail.code}"))
    return lines


def tensor_text(shape: Sequence[int], dtype: str) -> str:
    """`64x3x224x224 float32`."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


# ---- gaps, steps


def _fragmentation(found: Fragmentation) -> list[str]:
    largest = ", ".join(
        f"{_mib(gap.size_bytes)} of {_mib(gap.segment_bytes)}" for gap in found.largest_gaps[:3]
    )
    gaps = f"between blocks in use, largest {largest}" if largest else "between blocks in use"
    return table(
        "At the reserved peak",
        [
            ("reserved", found.reserved_bytes, moment_text(found.moment)),
            ("allocated then", found.allocated_bytes, f"{_mib(found.rounding_bytes)} of it by rounding up"),
            ("gaps", found.gap_bytes, gaps),
            ("free segments", found.free_segment_bytes, "given back to CUDA where memory is short"),
        ],
    )


def _steps(explanation: Explanation) -> list[str]:
    """Peaks by step, by phase of the last step, and of evaluation alone."""
    head = f"{'Highest levels':<{NAMES + 2}}{'allocated':>12}{'reserved':>12}{'at the end':>12}"
    lines = [head]
    for step in explanation.steps:
        name = "set-up" if step.step == 0 else f"step {step.step}"
        levels = (step.allocated_bytes, step.reserved_bytes, step.end_allocated_bytes)
        lines.append(_levels(f"  {name}", levels))
        if step.step == explanation.peak.step:
            for phase in explanation.phases:
                if phase.step == step.step > 0:
                    levels = (phase.allocated_bytes, phase.reserved_bytes, phase.end_allocated_bytes)
                    lines.append(_levels(f"    {phase.phase}", levels))
    evaluation = explanation.evaluation
    if evaluation is not None:
        levels = (
            evaluation.peak_allocated_bytes,
            evaluation.peak_reserved_bytes,
            evaluation.end_allocated_bytes,
        )
        lines.append(_levels("  evaluation alone", levels))
    return lines


def _levels(name: str, levels: Sequence[int]) -> str:
    return f"{name:<{NAMES + 2}}" + "".join(f"{_mib(level):>12}" for level in levels)
