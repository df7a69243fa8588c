"""The base class of results, and the table of the report of each."""

from importlib import import_module
from typing import Any, Literal

from planner.report.document import printable_parts

# By result: the module in `commands` that reports it, and the prefix of the module's functions `..._document`
# and `..._to_json`. Their parameters are named as the result's attributes that they take.
REPORTS = {
    "AdviceResult": "advise:advice",
    "CacheResult": "cache:cache",
    "CalibrateResult": "calibrations.tables:campaign",
    "CheckResult": "check:check",
    "ClusterResult": "clusters:clusters",
    "CommandResult": "run:command_plan",
    "CompareResult": "compare:comparison",
    "DevicesResult": "devices:devices",
    "EstimateResult": "estimate:estimate",
    "ExplainResult": "explain.report:explanation",
    "FormulaBatchResult": "static_estimate:formula_plan",
    "GpusResult": "gpus:gpus",
    "GuardResult": "guard:guard",
    "LimitResult": "calibrations.verify:limit",
    "MaxBatchResult": "max_batch:plan",
    "MaxSizeResult": "max_size:max_size",
    "ProcessResult": "replay:process",
    "RecordResult": "record:record",
    "ReportResult": "calibrations.contribution:contribution",
    "RunResult": "run:run",
    "ServeResult": "serve:serving",
    "StaticEstimateResult": "static_estimate:static_estimate",
    "SweepResult": "sweep:sweep",
    "TablesResult": "calibrations.tables:tables",
    "VaryingAdviceResult": "varying_advice:varying_advice",
    "VaryingExplainResult": "explain.varying:worst_batch",
    "VaryingResult": "varying:varying",
    "VerifyResult": "calibrations.verify:verification",
}


def render(result: object, form: Literal["text", "terminal", "json"]) -> Any:
    """Return the report of a result as text of at most 100 columns, as a rich object, or as a JSON object."""
    if form == "json":
        return _call(result, "to_json")
    document = printable_parts(_call(result, "document"))
    if form == "text":
        from planner.report.plain import render_plain

        return render_plain(document)
    from planner.report.terminal import render_terminal

    return render_terminal(document)


def _call(result: object, suffix: str) -> Any:
    module, _, prefix = REPORTS[type(result).__name__].partition(":")
    report = getattr(import_module(f"planner.report.commands.{module}"), f"{prefix}_{suffix}")
    code = report.__code__
    return report(*(getattr(result, name) for name in code.co_varnames[: code.co_argcount]))


class Result:
    """The base class of results: `str` gives the text report, `to_dict` the JSON object; rich draws it."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the command."""
        document: dict[str, Any] = render(self, "json")
        return document

    def __str__(self) -> str:
        text: str = render(self, "text")
        return text

    def __rich__(self) -> object:
        return render(self, "terminal")
