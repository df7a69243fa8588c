"""Look up ATen operators by name.

Tables of functions are keyed by operator.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function")


def overload(name: str) -> Any:
    """Return the ATen operator `name`, such as "mm" or "add.Tensor".

    A name without a dot means the default overload.

    >>> str(overload("mm")), str(overload("add.Tensor"))
    ('aten.mm.default', 'aten.add.Tensor')
    """
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


def operator_table(functions: Mapping[str, _Function]) -> dict[Any, _Function]:
    """Return functions keyed by ATen operator, from functions keyed by one or more names, split by spaces."""
    return {overload(name): function for names, function in functions.items() for name in names.split()}
