"""The text of `planner explain`: where the memory goes at the peak, what gaps cost, how steps differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.allocator.history import Difference
from planner.planning import (
    Estimate,
    Explanation,
    Fragmentation,
    LiveBlock,
    ModuleShare,
    Moment,
    Shown,
    fold,
)
from planner.program import Category, Phase
from planner.report.assumptions import short_op
from planner.report.commands.explain_diff import difference_lines
from planner.report.commands.explain_workspaces import parts_text, sureness, workspace_text, workspaces_title
from planner.report.commands.max_batch import assumed, consists_of, took, verdict
from planner.report.layout import (
    DIGITS,
    NAMES,
    WIDTH,
    Row,
    entry,
    heading,
    job_text,
    table,
    wrapped,
)
from planner.report.units import breakdown, mib

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
    lines += entry("Peak allocated", peak_text(estimate, explanation))
    for part in (
        *breakdown_sections(breakdown(estimate), explanation, shown),
        _workspaces(estimate, explanation, shown.top),
        _fragmentation(explanation.fragmentation),
        _steps(explanation),
        [] if difference is None else difference_lines(difference, shown.top),
        assumed(estimate),
    ):
        lines += ["", *part] if part else []
    return "\n".join([*lines, took(estimate.seconds, import_seconds)])


def breakdown_sections(
    parts: Mapping[str, int], explanation: Explanation, shown: Shown
) -> tuple[list[str], ...]:
    """Return the process by category, and the peak by module and tensor."""
    return consists_of(parts), _modules(explanation, shown.depth), _tensors(explanation, shown.top)


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


def peak_text(estimate: Estimate, explanation: Explanation) -> str:
    """How high the peak is and when it is reached."""
    unlimited = ", on a card without end" if estimate.failed is not None else ""
    return f"{level_text(explanation)}{unlimited}"


def level_text(explanation: Explanation) -> str:
    """Return how high the peak is and when it is reached, whatever bounds it."""
    return f"{_mib(explanation.run.peak_allocated_bytes)} MiB in {moment_text(explanation.peak)}"


def _mib(size_bytes: int) -> str:
    return f"{mib(size_bytes, DIGITS):,.1f}"


# ---- modules


def _modules(explanation: Explanation, depth: int | None) -> list[str]:
    """The tree of modules with shares of the allocated peak and what each holds most of."""
    total, rows = explanation.run.peak_allocated_bytes, shown_modules(explanation, depth)
    if not rows:
        return []
    return [
        heading("By module at the peak") + "   share  mostly",
        *(_module_line(row, total) for row in rows),
    ]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A line of the tree of modules."""

    name: str
    level: int
    size_bytes: int
    mostly: str  # the category that it holds most of
    role: Category | None  # the same; None for the sum of the smaller ones


def readable_depth(modules: ModuleShare) -> int:
    """How many levels of modules can be shown without losing the reader; at least 1."""
    depth, lines = 1, 0
    while True:
        now = len(list(module_rows(fold(modules, depth + 1), 0, max(1, modules.size_bytes))))
        if now > MOST_MODULE_LINES or now == lines or fold(modules, depth + 1) == fold(modules, depth):
            return depth
        depth, lines = depth + 1, now


def shown_modules(explanation: Explanation, depth: int | None) -> list[ModuleRow]:
    """The tree as it is shown."""
    modules, total = explanation.modules, explanation.run.peak_allocated_bytes
    return list(module_rows(fold(modules, depth or readable_depth(modules)), 0, total)) if total else []


def module_rows(share: ModuleShare, level: int, total: int) -> Iterator[ModuleRow]:
    """The modules below `share` and what is its own, the larger ones first, the smallest summed up."""
    rows: list[tuple[int, ModuleShare | None]] = [(child.size_bytes, child) for child in share.children]
    if share.own_bytes and (level == 0 or share.children):
        rows.append((share.own_bytes, None))
    rows.sort(key=lambda row: -row[0])
    shown = [row for row in rows if row[0] >= SMALLEST_SHARE * total]
    for size_bytes, child in shown:
        name = (OUTSIDE if level == 0 else "(itself)") if child is None else child.name.rpartition(".")[2]
        roles = _own_roles(share) if child is None else child.by_role
        role = max(roles, key=lambda role: roles[role])
        part = roles[role] / size_bytes
        yield ModuleRow(name, level, size_bytes, str(role) if part > 0.995 else f"{role} {part:.0%}", role)
        if child is not None:
            yield from module_rows(child, level + 1, total)
    rest = rows[len(shown) :]
    if rest:
        noun = "module" if len(rest) == 1 else "modules"
        yield ModuleRow(f"({len(rest)} smaller {noun})", level, sum(size for size, _ in rest), "", None)


def _own_roles(share: ModuleShare) -> dict[Category, int]:
    """What a module holds without its children, by role."""
    return {
        role: size_bytes - sum(child.by_role[role] for child in share.children)
        for role, size_bytes in share.by_role.items()
    }


def _module_line(row: ModuleRow, total: int) -> str:
    label = f"  {'  ' * row.level}{row.name}"
    mostly = f"  {row.mostly}" if row.mostly else ""
    return f"{label:<{NAMES + 2}}{_mib(row.size_bytes):>12}  {row.size_bytes / total:6.1%}{mostly}"


# ---- tensors


def _tensors(explanation: Explanation, top: int) -> list[str]:
    """The largest blocks in use at the peak, each with the line of code behind it where that is known."""
    lines = [tensors_title(explanation)]
    for block in explanation.blocks[:top]:
        lines += _tensor(block)
    return lines


def tensors_title(explanation: Explanation) -> str:
    """What the list of tensors is taken from."""
    return f"Largest of the {len(explanation.blocks):,} blocks in use at the peak"


def _tensor(block: LiveBlock) -> list[str]:
    beginning = f"{_mib(block.size_bytes):>11} MiB  {block.role:<13}"
    lines = wrapped(beginning, block_text(block))
    detail = block.detail
    if detail is not None and detail.source:
        lines.append(_shortened(f"{'':<17}{detail.source}  {detail.code}"))
    return lines


def block_text(block: LiveBlock) -> str:
    """What a block holds and who asked for it."""
    detail = block.detail
    held = "" if detail is None or not detail.dtype else f"{tensor_text(detail.shape, detail.dtype)}  "
    born = "" if block.phase is Phase.SETUP else f", step {block.step} {block.phase}"
    where = f" in {block.module}" if block.module else ""
    return f"{held}{short_op(block.op)}{where}{born}"


def tensor_text(shape: Sequence[int], dtype: str) -> str:
    """`64x3x224x224 float32`."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _workspaces(estimate: Estimate, explanation: Explanation, top: int) -> list[str]:
    """The largest workspaces of convolutions, what they consist of, and how sure that is."""
    if not explanation.workspaces:
        return []
    lines = [workspaces_title(explanation)]
    for one in explanation.workspaces[:top]:
        lines += wrapped(f"{_mib(one.size_bytes):>11} MiB  ", workspace_text(one))
        lines += wrapped(f"{'':<17}", parts_text(one))
    return [*lines, *wrapped("  ", sureness(estimate, explanation))]


# ---- gaps, steps


def _fragmentation(found: Fragmentation) -> list[str]:
    return table(*fragmentation_rows(found))


def fragmentation_rows(found: Fragmentation) -> tuple[str, list[Row]]:
    """What was reserved and not allocated, as a title and rows."""
    largest = ", ".join(
        f"{_mib(gap.size_bytes)} of {_mib(gap.segment_bytes)}" for gap in found.largest_gaps[:3]
    )
    gaps = f"between blocks in use, largest {largest}" if largest else "between blocks in use"
    return "At the reserved peak", [
        ("reserved", found.reserved_bytes, moment_text(found.moment)),
        ("allocated then", found.allocated_bytes, f"{_mib(found.rounding_bytes)} of it by rounding up"),
        ("gaps", found.gap_bytes, gaps),
        ("free segments", found.free_segment_bytes, "given back to CUDA where memory is short"),
    ]


def _steps(explanation: Explanation) -> list[str]:
    head = f"{'Highest levels':<{NAMES + 2}}{'allocated':>12}{'reserved':>12}{'at the end':>12}"
    return [
        head,
        *(
            f"{'  ' + name:<{NAMES + 2}}" + "".join(f"{_mib(level):>12}" for level in levels)
            for name, levels in level_rows(explanation)
        ),
    ]


def level_rows(explanation: Explanation) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Allocated and reserved peak and what is left at the end: by step, by phase of the step that has the
    peak, and of evaluation alone.
    """
    for step in explanation.steps:
        name = "set-up" if step.step == 0 else f"step {step.step}"
        yield name, (step.allocated_bytes, step.reserved_bytes, step.end_allocated_bytes)
        if step.step == explanation.peak.step:
            for phase in explanation.phases:
                if phase.step == step.step > 0:
                    levels = (phase.allocated_bytes, phase.reserved_bytes, phase.end_allocated_bytes)
                    yield f"  {phase.phase}", levels
    run = explanation.evaluation
    if run is not None:
        yield "evaluation alone", (run.peak_allocated_bytes, run.peak_reserved_bytes, run.end_allocated_bytes)
