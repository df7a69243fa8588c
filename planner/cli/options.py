"""Options that commands share, and the decorator that gives them to a command.

Each value arrives as a string and is converted here, so that all refusals read alike.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, get_args

from typer import Option

from planner.cli.output import Output, warn
from planner.cli.paths import cache_folder, folder_to_read
from planner.errors import UsageError
from planner.jobs import JOB_OPTIONS, JobOption, OptionKind, shown

Action = Callable[[], int]  # a parsed command, ready to run; returns the exit code
Group = Mapping[str, Any]  # the annotation of each parameter, by its name


Batch = Annotated[
    int | None, Option(metavar="N", help="Batch size; by default that of the catalogue or the trace file.")
]
Method = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="trace or formula; estimate also knows torchinfo, torchsummary, modelsize and memtracker.",
    ),
]
MultipleOf = Annotated[int | None, Option(metavar="N", help="The largest batch that is a multiple of N.")]
Plot = Annotated[str | None, Option(metavar="FILE", help="Also draw memory over time: a .png, .svg or .pdf.")]
Catalogue = Annotated[
    str | None, Option(metavar="FILE", help="A catalogue instead of the planner's models.yaml.")
]
AllowCode = Annotated[
    bool | None, Option("--allow-code", help="Allow FILE.py:NAME, which runs code, in these files.")
]
Isolate = Annotated[bool | None, Option("--isolate", help="Run the model in a separate process.")]
TimeLimit = Annotated[
    float | None, Option(metavar="SECONDS", help="Time limit per trace with --isolate; 600 by default.")
]
Gpu = Annotated[str | None, Option(metavar="NAME", help="A GPU such as 'RTX 4090' or L4.")]
GpuMib = Annotated[
    int | None,
    Option(metavar="N", help="Any other GPU, by its total memory in MiB as nvidia-smi shows it."),
]
AllocatorCap = Annotated[
    int | None,
    Option(metavar="N", help="Limit of the caching allocator, as with set_per_process_memory_fraction."),
]
AllocConf = Annotated[
    str | None, Option(metavar="TEXT", help="Value of PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
]
Confidence = Annotated[
    float | None, Option(metavar="P", help="Probability with which the answer holds; 0.99 by default.")
]
Calibrations = Annotated[
    list[str] | None, Option(metavar="DIR", help="A folder of calibrations to search first; repeatable.")
]

_TYPES: Mapping[OptionKind, Any] = {
    OptionKind.FLAG: bool | None,
    OptionKind.COUNT: int | None,
    OptionKind.CHOICE: str | None,
    OptionKind.TEXT: str | None,
}


def _declare(option: JobOption) -> Any:
    """Return the parameter of a job option as typer reads it."""
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.is_negatable else option.flag
    kind = _TYPES.get(option.kind, list[str] | None)
    return Annotated[kind, Option(flag, metavar=option.metavar, help=option.help)]


JOB: Group = {
    "model": Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="A name of models.yaml, SOURCE:NAME (torchvision, timm, hf, monai, smp), or FILE.py:NAME.",
        ),
    ],
    **{option.name: _declare(option) for option in JOB_OPTIONS},
    "models": Catalogue,
    "allow_code": Annotated[
        bool | None,
        Option("--allow-code", help="Allow FILE.py:NAME, which runs code, in the file of --models."),
    ],
    "isolate": Isolate,
    "time_limit": TimeLimit,
    "trace": Annotated[
        str | None, Option(metavar="FILE", help="Plan from a saved trace instead of a model, without torch.")
    ],
    "save_trace": Annotated[
        str | None, Option(metavar="FILE", help="Save the trace for --trace or a bug report.")
    ],
    "no_cache": Annotated[
        bool | None, Option("--no-cache", help="Neither read nor write cached traces (see planner cache).")
    ],
}
LIMITS: Group = {"allocator_cap_mib": AllocatorCap, "alloc_conf": AllocConf, "confidence": Confidence}
DEVICE: Group = {"gpu": Gpu, "gpu_mib": GpuMib, **LIMITS}
CALIBRATIONS: Group = {
    "calibrations": Calibrations,
    "no_calibration": Annotated[
        bool | None, Option("--no-calibration", help="Plan without stored calibrations.")
    ],
}
_OUTPUT: Group = {
    "json": Annotated[bool | None, Option("--json", help="Print one JSON object instead of the report.")],
    "debug": Annotated[bool | None, Option("--debug", help="Show the traceback of an error.")],
}


def with_options(*groups: Group) -> Callable[[Callable[..., int]], Callable[..., Action]]:
    """Add the options of these groups, and those of the output, to the parameters of a command.

    The command gets `output` and, where there are groups, `options`: keywords of the functions of
    `planner.api`. What typer calls converts the values alone; the command runs when the result is called.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., Action]:
        parameters = inspect.signature(command).parameters.values()
        own = {each.name: each.annotation for each in parameters if each.name not in ("options", "output")}
        shared = {name: annotation for group in groups for name, annotation in group.items()}
        annotations = {**shared, **own, **_OUTPUT}

        def collect(**strings: Any) -> Action:
            values = {name: _convert(name, annotations[name], strings[name]) for name in annotations}
            arguments = {name: values[name] for name in own}
            if groups:
                arguments["options"] = _keywords({name: values[name] for name in shared})
            return partial(command, **arguments, output=Output(bool(values["json"])))

        collect.__doc__, collect.__annotations__ = command.__doc__, annotations
        collect.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in annotations.items()
            ]
        )
        return collect

    return decorate


def _convert(name: str, annotation: Any, value: Any) -> Any:
    types = get_args(get_args(annotation)[0])
    if value is None or not (int in types or float in types):
        return value
    return parse_int(option_flag(name), value) if int in types else parse_float(option_flag(name), value)


def _keywords(values: dict[str, Any]) -> dict[str, Any]:
    """Return options of the command line as the functions of `planner.api` take them."""
    if "no_cache" in values:
        values |= {"cache": None if values.pop("no_cache") else cache_folder(), "warn": warn}
    if "no_calibration" in values:
        if values["no_calibration"] and values["calibrations"]:
            raise UsageError("--calibrations and --no-calibration exclude each other; leave one away")
        values["own_calibrations"] = folder_to_read()
    return values


def option_flag(name: str) -> str:
    """Return the spelling of an option on the command line."""
    return "--" + name.replace("_", "-")


def parse_int(flag: str, text: str) -> int:
    """Return a whole number; its range is checked by whoever uses it. Raises UsageError."""
    try:
        # The length is looked at first because Python refuses to convert thousands of digits.
        if len(text) <= 100 and "_" not in text:
            return int(text)
    except ValueError:
        pass
    raise UsageError(f"{flag}: expected a whole number, got {shown(text)}")


def parse_float(flag: str, text: str) -> float:
    """Return a number; its range is checked by whoever uses it. Raises UsageError."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag}: expected a number, got {shown(text)}") from None
