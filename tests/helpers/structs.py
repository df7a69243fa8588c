"""Copies of values with some fields changed."""

import dataclasses
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def replace(value: T, /, **changes: Any) -> T:
    """Return a copy of a Struct or a dataclass with other values of some fields."""
    copy: Any = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
    return copy(value, **changes)  # type: ignore[no-any-return]
