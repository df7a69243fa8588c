"""The estimation methods of `--method`, and the options that each method supports."""

from collections.abc import Mapping
from enum import StrEnum

from planner.errors import UsageError
from planner.jobs import JOB_OPTIONS


class Method(StrEnum):
    """A method of estimation, under its name on the command line."""

    TRACE = "trace"  # the planner itself
    FORMULA = "formula"  # planner.planning.estimators.formula
    TORCHINFO = "torchinfo"
    TORCHSUMMARY = "torchsummary"
    MODELSIZE = "modelsize"  # pytorch_modelsize
    MEMTRACKER = "memtracker"  # torch.distributed._tools.mem_tracker


# The name of each method in texts.
TITLES = {
    Method.TRACE: "this planner",
    Method.FORMULA: "the closed formula",
    Method.TORCHINFO: "torchinfo",
    Method.TORCHSUMMARY: "torchsummary",
    Method.MODELSIZE: "pytorch_modelsize",
    Method.MEMTRACKER: "MemTracker",
}

# Options that every method supports. They set the memory that a total is compared with, or do not affect the
# estimate.
_COMMON = (
    *("models", "gpu", "gpu_mib", "allocator_cap_mib", "confidence", "on_progress"),
    *("own_calibrations", "cache", "warn"),
)


def find_method(name: str | None, usable: tuple[Method, ...] = tuple(Method)) -> Method:
    """Return the method named `name`, or TRACE if `name` is None. Raises UsageError if it is not usable."""
    if name is None:
        return Method.TRACE
    if name not in list(usable):
        raise UsageError(f"--method {name}: unknown here; use one of {', '.join(usable)}")
    return Method(name)


def takes_loss(method: Method) -> bool:
    """Return whether the estimate of a method depends on the loss and its target."""
    return any(option.name == "loss" and method in option.methods for option in JOB_OPTIONS)


def reject_unsupported_options(method: Method, options: Mapping[str, object]) -> None:
    """Raise UsageError for the first option that is given but not supported by the method.

    Names are fields of `planner.api.Options`. An option that is None, False or empty counts as not given.
    """
    supported = [*_COMMON, *(option.name for option in JOB_OPTIONS if method in option.methods)]
    for name, value in options.items():
        if (
            method is not Method.TRACE
            and name not in supported
            and value not in (None, False, "", (), [], {})
        ):
            raise UsageError(
                f"--{name.replace('_', '-')} and --method {method}: {TITLES[method]} takes no account of it; "
                "remove it, or use --method trace"
            )
