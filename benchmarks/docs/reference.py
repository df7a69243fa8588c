"""The reference as pages of the site: the command line from its parser, Python from its docstrings."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from planner.cli.options import CALIBRATIONS, CLUSTER, DEVICE, JOB
from planner.cli.parser import COMMANDS, build_command
from planner.jobs import JOB_OPTIONS

SHARED = {
    "Options of a job": JOB,
    "Options of the GPU": DEVICE,
    "Options of calibrations": CALIBRATIONS,
    "Options of several GPUs": CLUSTER,
}
# The public names, where they live: mkdocstrings reads the sources and does not run them.
FUNCTIONS = {
    "max_batch": ("planner.api.max_batch", "MaxBatchResult"),
    "estimate": ("planner.api.estimate", "EstimateResult"),
    "gpus": ("planner.api.fleet.gpus", "GpusResult"),
    "explain": ("planner.api.explain", "ExplainResult"),
    "advise": ("planner.api.advise", "AdviceResult"),
    "max_size": ("planner.api.max_size", "MaxSizeResult"),
    "serve": ("planner.api.serve", "ServeResult"),
    "clusters": ("planner.api.fleet.clusters", "ClusterResult"),
    "advise_cluster": ("planner.api.fleet.clusters", ""),
    "check": ("planner.api.check.check", "CheckResult"),
    "guard": ("planner.api.guard.guard", "Guard"),
    "diagnose": ("planner.api.diagnose", "DiagnoseResult"),
    "watch": ("planner.api.watch", ""),
}
CLASSES = {
    "Job": "planner.jobs.job",
    "Device": "planner.hardware.device",
    "DoesNotFitError": "planner.errors",
}


def reference_pages() -> dict[str, str]:
    """Return the pages as Markdown, by their place in the site."""
    return {
        "reference/commands.md": "\n".join(_commands()) + "\n",
        "reference/python.md": "\n".join(_python()) + "\n",
    }


def _commands() -> Iterator[str]:
    yield "# Command line\n"
    yield "What `planner COMMAND --help` prints, with the options that commands share given once.\n"
    for name in COMMANDS:
        command = build_command(name)
        own = {parameter.name: parameter for parameter in command.params}
        shared = [title for title, group in SHARED.items() if group.keys() <= own.keys()]
        known = {key for title in shared for key in SHARED[title]}
        yield f"## planner {name}\n"
        yield f"{_paragraphs(command.help or '')}\n"
        if shared:
            links = ", ".join(
                f"[{title[0].lower()}{title[1:]}](#{title.lower().replace(' ', '-')})" for title in shared
            )
            yield f"Takes the {links}, and:\n"
        yield from _options(parameter for key, parameter in own.items() if key not in known)
    everything = {parameter.name: parameter for name in COMMANDS for parameter in build_command(name).params}
    for title, group in SHARED.items():
        yield f"## {title}\n"
        yield from _options(everything[key] for key in group)


def _options(parameters: Iterable[Any]) -> Iterator[str]:
    yield "| option | meaning |\n|---|---|"
    for one in parameters:
        spelling = " / ".join([*one.opts, *one.secondary_opts])
        value = f" {one.metavar}" if one.metavar else ""
        is_argument = one.param_type_name == "argument"
        shown = one.metavar or one.name.upper() if is_argument else spelling + value
        yield f"| `{_cell(shown)}` | {_cell(getattr(one, 'help', None) or '')} |"
    yield ""


def _python() -> Iterator[str]:
    yield "# Python\n"
    yield (
        "`import planner` imports neither torch nor typer; what is used is imported when it is used. "
        "Every function takes the options of the command line as keywords, with underscores: "
        "[Options](#options). "
        "`str(result)` is the plain report, `rich.print(result)` that of a terminal, `result.to_dict()` the "
        "[JSON](../json.md). Errors are those of `planner.errors`.\n"
    )
    yield "## Functions\n"
    for name, (module, _) in FUNCTIONS.items():
        yield f"::: {module}.{name}\n"
    yield "## Results\n"
    for module, result in (*FUNCTIONS.values(), ("planner.api.request.varying", "VaryingResult")):
        if result:
            yield f"::: {module}.{result}\n    options:\n      members: true\n"
    yield "## Jobs, GPUs, errors\n"
    for name, module in CLASSES.items():
        yield f"::: {module}.{name}\n"
    yield "## Options\n"
    yield "| keyword | meaning |\n|---|---|"
    for option in JOB_OPTIONS:
        yield f"| `{option.name}` | {_cell(option.help)} |"


def _paragraphs(text: str) -> str:
    return re.sub(r"\n{2,}", "\n\n", text.replace("\b", "").strip())


def _cell(text: str) -> str:
    """Return text as a cell of a table, where `|` and `<` mean something else."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")
