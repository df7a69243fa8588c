"""Report the layers, sizes and contents of convolutions' workspaces."""

from collections.abc import Iterator
from typing import Any

from planner.hardware.cudnn import LayerWorkspace, Part, Term
from planner.jobs import PUBLISHED
from planner.planning import Estimate, Explanation
from planner.report.commands.explain.tables import LISTED_WIDTH
from planner.report.document import Block, Cell, Column, Paragraph, Table
from planner.report.units import attributes, mib_text, to_builtins

LIBRARY, STORED_ANSWERS, FITTED = "cuDNN", "stored answers of cuDNN", "fitted term"
_TERMS = {
    Term.FLOAT32: "{of} in float32",
    Term.SUMS: "{times} x {of} of partial sums",
    Term.TILES: "{times:,} tiles of partial sums",
    Term.IMAGES: "{times:,} x {of}, summed up by image",
    Term.UNNAMED: "unnamed",
}
_MIN_BYTES = 2**19 // 10  # smallest part that is named: 0.05 MiB, which rounds to 0.1
_OF_SIZES = (
    "What a part is for is inferred from its size; x, w and y are input, weights and output, or their "
    "gradients."
)


def workspaces_section(estimate: Estimate, explanation: Explanation, top: int) -> list[Block]:
    """Return the section on the largest workspaces of convolutions, or [] if there are no workspaces."""
    if not explanation.workspaces:
        return []
    title, sure = workspaces_title(explanation), certainty(estimate, explanation)
    rows = [
        (f"{mib_text(one.size_bytes)} MiB", Cell(workspace_text(one), detail=parts_text(one)))
        for one in explanation.workspaces[:top]
    ]
    table = Table((Column(is_number=True, min_width=LISTED_WIDTH), Column()), rows, indent=0)
    return [Paragraph(title, "strong"), table, Paragraph(sure, "faint")]


def workspaces_title(explanation: Explanation) -> str:
    """Return the title of the table of largest workspaces."""
    return f"Largest of the {len(explanation.workspaces):,} workspaces of convolutions"


def workspace_text(one: LayerWorkspace) -> str:
    """Return a text with the direction, module and engine of a workspace."""
    where = f" in {one.module}" if one.module else ""
    timed = ", while engines are timed" if one.searched else ""
    if one.engine is None:
        return f"{one.direction}{where}{timed}"
    notes = f" ({one.notes})" if one.notes else ""
    return f"{one.direction}{where}{timed}, engine {one.engine}{notes}"


def parts_text(one: LayerWorkspace) -> str:
    """Return a text that names the larger parts of a workspace, with their MiB if there are several."""
    parts = list(_parts(one.parts))
    named = [part for part in parts if part[1] >= _MIN_BYTES] or parts[:1]
    if len(named) == 1:
        return named[0][0]
    return " + ".join(f"{text} {mib_text(size_bytes)}" for text, size_bytes in named)


def _parts(parts: tuple[Part, ...]) -> Iterator[tuple[str, int]]:
    for term, more in ((Term.COPY, ""), (Term.FILLED, " with channels filled up")):
        letters = sorted((part.of for part in parts if part.term is term), key="xwy".index)
        if letters:
            *most, last = letters
            text = f"copies of {', '.join(most)} and {last}" if most else f"copy of {last}"
            yield f"{text}{more}", sum(part.size_bytes for part in parts if part.term is term)
    for part in parts:
        if part.term not in (Term.COPY, Term.FILLED):
            text = _TERMS.get(part.term, str(part.term))
            yield text.format(of=part.of, times=part.times), part.size_bytes


def certainty(estimate: Estimate, explanation: Explanation) -> str:
    """Return a text on how certain the workspaces' sizes are, or "" if there are no workspaces."""
    if not explanation.workspaces:
        return ""
    if explanation.workspaces[0].engine is None and estimate.job.environment.cudnn != PUBLISHED:
        return (
            "By answers of a cuDNN that come with the planner: for the convolutions that they hold mostly to "
            f"the byte (docs/cudnn.md), for others those of similar convolutions. {_OF_SIZES}"
        )
    if explanation.workspaces[0].engine is None:
        return (
            "Computed by one term, fitted to published peaks; benchmarks/fits/convolution_workspaces.py "
            "prints the range of its thresholds. All other convolutions are assumed to need nothing: "
            "docs/accuracy.md shows the error."
        )
    major, minor = estimate.budget.device.capability
    order = "as PyTorch runs the first engine of cuDNN's heuristics that works"
    if estimate.job.environment.cudnn_benchmark:
        order = (
            "while engines are timed; which of them wins is not known, so the heuristics' first stands for it"
        )
    return (
        f"Exact for the queried version and compute capability {major}.{minor}, {order}; where memory "
        f"is refused, PyTorch goes on to the next engine. {_OF_SIZES}"
    )


def workspaces_to_json(estimate: Estimate, explanation: Explanation, top: int) -> dict[str, Any]:
    """Return the JSON object of the `top` largest workspaces of convolutions.

    `consists_of` adds up to `size_bytes`.
    """
    workspaces = explanation.workspaces
    source = None
    if workspaces:
        without_engine = FITTED if estimate.job.environment.cudnn == PUBLISHED else STORED_ANSWERS
        source = without_engine if workspaces[0].engine is None else LIBRARY
    return {
        "told_by": source,
        "sure": certainty(estimate, explanation),
        "in_all": len(workspaces),
        "convolutions": [_convolution(one) for one in workspaces[:top]],
    }


def _convolution(one: LayerWorkspace) -> dict[str, Any]:
    return {
        **attributes(one, "module", "direction", "size_bytes"),
        "while_timing": one.searched,
        "engine": one.engine,
        "notes": one.notes.split(", ") if one.notes else [],
        "consists_of": to_builtins(one.parts),
    }
