"""Parse names of optimizers: short names, classes of torch.optim, dotted names and FILE.py:NAME."""

import re
from typing import Any

from planner.errors import UsageError
from planner.jobs.job import Optimizer
from planner.jobs.parse import is_file_name, kind_text, nearest, shown

# torch/optim/__init__.py; classes of a newer torch are given by dotted names.
TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
LIBRARY_OPTIMIZERS = (  # examples of dotted names
    *("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.PagedAdamW8bit", "lion_pytorch.Lion"),
    *("torchao.optim.AdamW8bit", "torchao.optim.AdamW4bit", "transformers.optimization.Adafactor"),
)
# Libraries whose optimizers a data file may name: importing them runs no code of the file's author.
_TRUSTED = ("torch.optim.", "bitsandbytes.optim.", "torchao.optim.", "transformers.optimization.")
_TORCH = "torch.optim."


def parse_optimizer(value: object) -> Optimizer | str:
    """Parse an optimizer: short name, torch.optim class (case ignored), dotted name or FILE.py:NAME.

    A class object stands for its dotted name. A class of torch.optim with a short name becomes that name.
    Raises UsageError.
    """
    text = _dotted_name(value) if isinstance(value, type) else value
    if not isinstance(text, str):
        raise UsageError(
            f"--optimizer: {kind_text(text)} is refused; name yours as FILE.py:NAME, or give its class"
        )
    if text in list(Optimizer):
        return Optimizer(text)
    if is_file_name(text, f"--optimizer: {shown(text)}"):
        return text
    of_torch = {name.lower(): name for name in TORCH_OPTIMIZERS}
    bare = text[len(_TORCH) :] if text.startswith(_TORCH) else text
    if bare.lower() in of_torch:
        lowered = bare.lower()
        return Optimizer(lowered) if lowered in list(Optimizer) else _TORCH + of_torch[lowered]
    if "." in text and all(part.isidentifier() for part in text.split(".")):
        return text
    near = nearest(text, (*Optimizer, *TORCH_OPTIMIZERS))
    hint = f"the nearest: {near}" if near else f"one of {', '.join(Optimizer)}"
    raise UsageError(
        f"--optimizer: unknown value {shown(text)}; {hint}; any class of torch.optim, a dotted name such as "
        "bitsandbytes.optim.AdamW8bit, or FILE.py:NAME"
    )


def _dotted_name(kind: type[Any]) -> str:
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"--optimizer: the class {kind.__qualname__} cannot be imported; name it as FILE.py:NAME"
        )
    module = "torch.optim" if re.match(r"torch\.optim\.\w+$", kind.__module__) else kind.__module__
    return f"{module}.{kind.__qualname__}"


def is_optimizer_file(optimizer: Optimizer | str) -> bool:
    """Return whether an optimizer is given as FILE.py:NAME."""
    return not isinstance(optimizer, Optimizer) and ":" in optimizer


def optimizer_runs_code(optimizer: Optimizer | str) -> bool:
    """Return whether creating the optimizer runs code from outside the trusted libraries."""
    return not isinstance(optimizer, Optimizer) and not optimizer.startswith(_TRUSTED)


def optimizer_library(optimizer: Optimizer | str) -> str:
    """Return the top-level package of a dotted optimizer name, or "" for torch and for other names."""
    if isinstance(optimizer, Optimizer) or is_optimizer_file(optimizer):
        return ""
    package = optimizer.partition(".")[0]
    return "" if package == "torch" else package
