"""The ways to estimate that `--method` names, and which options each of them can honour."""

from collections.abc import Mapping
from enum import StrEnum

from planner.errors import UsageError


class Method(StrEnum):
    TRACE = "trace"  # the planner itself
    FORMULA = "formula"  # planner.planning.estimators.formula
    TORCHINFO = "torchinfo"
    TORCHSUMMARY = "torchsummary"
    MODELSIZE = "modelsize"  # pytorch_modelsize
    MEMTRACKER = "memtracker"  # torch.distributed._tools.mem_tracker


# What each method is called where people read.
TITLES = {
    Method.TRACE: "this planner",
    Method.FORMULA: "the closed formula",
    Method.TORCHINFO: "torchinfo",
    Method.TORCHSUMMARY: "torchsummary",
    Method.MODELSIZE: "pytorch_modelsize",
    Method.MEMTRACKER: "MemTracker",
}

# The model, its input and the memory that its total is held against. A new option is refused until it is
# listed here.
_ALL = frozenset(
    {
        *("model_arg", "input", "models", "gpu", "gpu_mib", "allocator_cap_mib", "confidence", "tell"),
        *("own_calibrations", "cache", "warn"),  # nobody has asked for them
    }
)
_LOOP = frozenset(
    {"target", "loss", "mode", "optimizer", "optimizer_impl", "zero_grad", "keep_grads", "steps"}
)
_HONOURED = {
    Method.FORMULA: _ALL | {"mode", "optimizer"},
    Method.TORCHINFO: _ALL,
    Method.TORCHSUMMARY: _ALL,
    Method.MODELSIZE: _ALL,
    Method.MEMTRACKER: _ALL | _LOOP,
}


def find_method(name: str | None, usable: tuple[Method, ...] = tuple(Method)) -> Method:
    """The method of this name, by default the planner's own. Raises UsageError."""
    if name is None:
        return Method.TRACE
    if name not in list(usable):
        raise UsageError(f"--method {name}: unknown here; use one of {', '.join(usable)}")
    return Method(name)


def refuse_unknown_options(method: Method, options: Mapping[str, object]) -> None:
    """Raise UsageError for the first option that is given and means nothing to the method.

    Names are those of `planner.api.Options`; None, False and empty lists are not given.
    """
    honoured = _HONOURED.get(method)
    for name, value in options.items():
        if honoured is not None and name not in honoured and value not in (None, False, "", (), [], {}):
            raise UsageError(
                f"--{name.replace('_', '-')} and --method {method}: {TITLES[method]} takes no account of it; "
                "leave it away, or use --method trace"
            )
