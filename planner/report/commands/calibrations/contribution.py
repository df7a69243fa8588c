"""The report of `planner report`, which packs or checks contributed measurements."""

from collections.abc import Sequence
from typing import Any

from planner.report.document import Bullets, Document, Headline, Paragraph, Style
from planner.report.units import SCHEMA

_NEXT = (
    "Attach the file to an issue of the kind `A measurement`, or add it to calibration/tables/community in a "
    "pull request"
)


def contribution_document(
    packed: Sequence[str], written: Sequence[str], checked: Sequence[str], problems: Sequence[str]
) -> Document:
    """Return the report of `planner report`: problems of checked files, or else the written files."""
    if checked:
        count = f"{len(checked)} file{'s' * (len(checked) > 1)}"
        if not problems:
            return Document.of([Headline((f"{count}: nothing is wrong",), "good")])
        found = f"{count}: {len(problems)} problem{'s' * (len(problems) > 1)}"
        return Document.of([Headline((found,), "bad")], [Bullets("Wrong", tuple(problems))])
    style: Style = "good" if written else "warning"
    answer = f"Written: {', '.join(written)}" if written else "Nothing was written"
    shown = [Paragraph(line) for text in packed for line in text.splitlines()] if written else []
    return Document.of([Headline((answer,), style)], shown, [Paragraph(_NEXT, "faint")] if written else [])


def contribution_to_json(
    packed: Sequence[str], written: Sequence[str], checked: Sequence[str], problems: Sequence[str]
) -> dict[str, Any]:
    """Return the JSON object of `planner report`."""
    return {
        "schema": SCHEMA,
        "packed": list(packed),
        "written": list(written),
        "checked": list(checked),
        "problems": list(problems),
    }
