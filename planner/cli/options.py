"""The options that commands share, and the decorator that adds them to a command.

Each value arrives as a string and is converted by this module, so that all error messages are alike.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option

from planner.cli.output import Output, emit, emit_before_raising, progress, warn
from planner.cli.paths import cache_folder, folder_to_read
from planner.errors import UsageError
from planner.jobs import JOB_OPTIONS, JobOption, OptionKind, shown
from planner.report import Result

Action = Callable[[], int]  # a parsed command, ready to run; returns the exit code
Answer = tuple[Result, bool]  # a command's result, and whether it means yes: exit code 0, else 1
Group = Mapping[str, Any]  # the annotation of each parameter, by its name


def option(metavar: str, text: str, *flags: str) -> Any:
    """Return typer's declaration of an option with a value.

    `flags` are its names; without `flags`, the parameter names it.
    """
    return Option(*flags, metavar=metavar, help=text)


def flag(spelling: str, text: str) -> Any:
    """Return typer's declaration of an option without a value. typer's `--no-...` is not declared."""
    return Option(spelling, help=text)


Batch = Annotated[int | None, option("N", "Batch size; by default that of the catalogue or the trace file.")]
Method = Annotated[
    str | None,
    option(
        "NAME", "trace or formula; estimate also knows torchinfo, torchsummary, modelsize and memtracker."
    ),
]
MultipleOf = Annotated[int | None, option("N", "The largest batch that is a multiple of N.")]
Catalogue = Annotated[str | None, option("FILE", "A catalogue instead of the planner's models.yaml.")]
AllowCode = Annotated[
    bool | None, flag("--allow-code", "Allow FILE.py:NAME, which runs code, in these files.")
]
Isolate = Annotated[bool | None, flag("--isolate", "Run the model in a separate process.")]
TimeLimit = Annotated[float | None, option("SECONDS", "Time limit per trace with --isolate; 600 by default.")]
GpuMib = Annotated[
    int | None, option("N", "Any other GPU, by its total memory in MiB as nvidia-smi shows it.")
]
AllocConf = Annotated[
    str | None, option("TEXT", "Value of PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
]
Confidence = Annotated[float | None, option("P", "Probability with which the answer holds; 0.99 by default.")]
Calibrations = Annotated[
    list[str] | None, option("DIR", "A folder of calibrations to search first; repeatable.")
]

_TYPES: Mapping[OptionKind, Any] = {
    OptionKind.FLAG: bool | None,
    OptionKind.COUNT: int | None,
    OptionKind.CHOICE: str | None,
    OptionKind.TEXT: str | None,
}


def _declare(option: JobOption) -> Any:
    """Return the type of a job option, annotated with typer's declaration of the option."""
    spelling = f"{option.flag}/--no-{option.flag[2:]}" if option.is_negatable else option.flag
    kind = _TYPES.get(option.kind, list[str] | None)
    return Annotated[kind, Option(spelling, metavar=option.metavar, help=option.help)]


JOB: Group = {
    "model": Annotated[
        str | None,
        option(
            "NAME",
            "A name of models.yaml, SOURCE:NAME (torchvision, timm, hf, diffusers, monai, smp), "
            "nnunet:PLANS.json, or FILE.py:NAME.",
        ),
    ],
    **{option.name: _declare(option) for option in JOB_OPTIONS},
    "models": Catalogue,
    "allow_code": Annotated[
        bool | None, flag("--allow-code", "Allow FILE.py:NAME, which runs code, in the file of --models.")
    ],
    "isolate": Isolate,
    "time_limit": TimeLimit,
    "trace": Annotated[
        str | None, option("FILE", "Plan from a saved trace instead of a model, without torch.")
    ],
    "save_trace": Annotated[str | None, option("FILE", "Save the trace for --trace or a bug report.")],
    "no_cache": Annotated[
        bool | None,
        flag("--no-cache", "Neither read nor write cached traces and answers of cuDNN (see planner cache)."),
    ],
}
LIMITS: Group = {
    "allocator_cap_mib": Annotated[
        int | None, option("N", "Limit of the caching allocator, as with set_per_process_memory_fraction.")
    ],
    "alloc_conf": AllocConf,
    "confidence": Confidence,
}
DEVICE: Group = {
    "gpu": Annotated[str | None, option("NAME", "A GPU such as 'RTX 4090' or L4.")],
    "gpu_mib": GpuMib,
    **LIMITS,
}
CALIBRATIONS: Group = {
    "calibrations": Calibrations,
    "no_calibration": Annotated[bool | None, flag("--no-calibration", "Plan without stored calibrations.")],
}
CLUSTER: Group = {
    "global_batch": Annotated[
        int | None, option("N", "The batch of all GPUs together, which is split over several of them.")
    ],
    "cluster": Annotated[
        str | None,
        option("FILE", "With --global-batch: the GPUs of this YAML file: gpu, nodes, gpus_per_node."),
    ],
    "seq": Annotated[
        int | None, option("N", "With --global-batch: tokens of a sample, in place of --input.")
    ],
}
_OUTPUT: Group = {
    "json": Annotated[bool | None, flag("--json", "Print one JSON object instead of the report.")],
    "debug": Annotated[bool | None, flag("--debug", "Show the traceback of an error.")],
}


def with_options(*groups: Group) -> Callable[[Callable[..., Answer | int]], Callable[..., Action]]:
    """Return a decorator that adds groups of options to a command.

    The output options are added too. The command receives the parameters that it names: `options`, keywords
    of the functions of `planner.api`, and `on_progress`. The answer that it returns is printed, unless the
    command names `output`: then it prints its answer itself and returns an exit code. The function that typer
    calls only converts the values, and returns a function that runs the command.
    """

    def decorate(command: Callable[..., Answer | int]) -> Callable[..., Action]:
        parameters = inspect.signature(command).parameters.values()
        own = {each.name: each.annotation for each in parameters if each.name not in _GIVEN}
        shared = {name: annotation for group in groups for name, annotation in group.items()}
        annotations = {**shared, **own, **_OUTPUT}

        def collect(**strings: Any) -> Action:
            values = {name: _convert(name, annotations[name], strings[name]) for name in annotations}
            arguments = {name: values[name] for name in own}
            if groups:
                arguments["options"] = _keywords({name: values[name] for name in shared})
            return partial(_run, command, Output(bool(values["json"])), **arguments)

        collect.__doc__, collect.__annotations__ = command.__doc__, annotations
        collect.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in annotations.items()
            ]
        )
        return collect

    return decorate


_GIVEN = ("options", "on_progress", "output")  # parameters of a command that are not options


def _run(command: Callable[..., Any], output: Output, /, **arguments: Any) -> int:
    """Run a command with a line of progress, print its answer, and return the exit code.

    A command with a parameter `output` shows progress and prints its answer itself.
    """
    parameters = inspect.signature(command).parameters
    if "output" in parameters:
        code: int = command(**arguments, output=output)
        return code
    with emit_before_raising(partial(emit, output=output)), progress() as on_progress:
        if "on_progress" in parameters:
            arguments["on_progress"] = on_progress
        result, is_yes = command(**arguments)
    emit(result, output)
    return 0 if is_yes else 1


def _convert(name: str, annotation: Any, value: Any) -> Any:
    kind = get_args(get_args(annotation)[0])[0]
    if value is None or kind not in (int, float, Path):
        return value
    if kind is Path:
        return Path(value)
    return parse_int(option_flag(name), value) if kind is int else parse_float(option_flag(name), value)


def _keywords(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of command-line options to keyword arguments of `planner.api`.

    Raises UsageError for contradicting options.
    """
    if "no_cache" in values:
        values |= {"cache": None if values.pop("no_cache") else cache_folder(), "warn": warn}
    if "no_calibration" in values:
        if values["no_calibration"] and values["calibrations"]:
            raise UsageError("--calibrations and --no-calibration exclude each other; remove one")
        values["own_calibrations"] = folder_to_read()
    return values


def option_flag(name: str) -> str:
    """Return the command-line flag of the option whose parameter is `name`."""
    return "--" + name.replace("_", "-")


def parse_int(flag: str, text: str) -> int:
    """Parse a whole number, without a check of its range. Raises UsageError."""
    try:
        # The length is checked first because Python refuses to convert thousands of digits.
        if len(text) <= 100 and "_" not in text:
            return int(text)
    except ValueError:
        pass
    raise UsageError(f"{flag}: expected a whole number, got {shown(text)}")


def parse_float(flag: str, text: str) -> float:
    """Parse a number, without a check of its range. Raises UsageError."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag}: expected a number, got {shown(text)}") from None
