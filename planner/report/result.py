"""Base class of results, which renders their reports."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec

from planner.report.document import Document, printable_parts

P = ParamSpec("P")


class Report(NamedTuple):
    """The two functions that build a result's report: as a document, and as a JSON object."""

    document: Callable[[], Document]
    to_json: Callable[[], dict[str, Any]]


def report_of(
    document: Callable[P, Document], to_json: Callable[P, dict[str, Any]], *args: P.args, **kwargs: P.kwargs
) -> Report:
    """Return a `Report` with both functions bound to the arguments."""
    return Report(partial(document, *args, **kwargs), partial(to_json, *args, **kwargs))


def render(result: "Result", form: Literal["text", "terminal", "json"]) -> Any:
    """Return a result's report as wrapped text, as an object for rich, or as a JSON object."""
    report = result._report()
    if form == "json":
        return report.to_json()
    document = printable_parts(report.document())
    if form == "text":
        from planner.report.plain import render_plain

        return render_plain(document)
    from planner.report.terminal import render_terminal

    return render_terminal(document)


class Result:
    """Base class of results, which `str`, `to_dict` and rich show as reports."""

    __slots__ = ()

    def _report(self) -> Report:
        """Return the two functions that build the result's report."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the result's report as a JSON object."""
        document: dict[str, Any] = render(self, "json")
        return document

    def __str__(self) -> str:
        text: str = render(self, "text")
        return text

    def __rich__(self) -> object:
        return render(self, "terminal")
