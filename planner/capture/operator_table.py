"""Tables of functions by operator of ATen."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function")


def overload(name: str) -> Any:
    """Return an operator of ATen, its overload being named after a dot where it has a name.

    >>> str(overload("mm")), str(overload("add.Tensor"))
    ('aten.mm.default', 'aten.add.Tensor')
    """
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


def operator_table(functions: Mapping[str, _Function]) -> dict[Any, _Function]:
    """Return functions by operator; each key names one or several, separated by spaces."""
    return {overload(name): function for names, function in functions.items() for name in names.split()}
