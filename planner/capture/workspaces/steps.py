"""What a kernel asks of the allocator, step by step, as a rule writes it down.

A rule answers for one call of an operator with a sequence of steps:

- a plain number: a block of so many bytes, given back before the next step;
- `Trial`: the same, but where the block is refused the kernel goes a way that needs none;
- `Search`: a trial that only the first call of its kind makes: the same operator, shapes and arguments;
- `Held`: a block that lives until it is released, or the kernel returns;
- `Release(n)`: the `n` held blocks that were taken last are given back; `Made.RELEASE`: all of them;
- `ReleaseBeneath(n)`: the `n` held blocks that were taken before the last one are given back;
- `Made.OUTPUT`: the next of the operator's outputs is made here, `Made.SECOND`: the one after the next;
  `Made.REST`: all that are still to be made.

A rule that names no output has them made before its first step; those that it does not name are made after
its last. Blocks of no bytes are none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.strides import channels_last, suggests_channels_last
from planner.program import ConvWorkspace, Target


@dataclass(frozen=True, slots=True)
class Held:
    """A block beside which the kernel takes others."""

    size_bytes: int


# For what the block of this number is; called for explanations alone, since shapes may not be numbers else.
Why = Callable[[int], ConvWorkspace]


@dataclass(frozen=True, slots=True)
class Trial:
    """A block that is given back at once, and without which the kernel gets by."""

    size_bytes: int
    why: Why | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Search:
    """A trial that only the first call of its kind makes."""

    size_bytes: int
    why: Why | None = field(default=None, compare=False, repr=False)


class Made(Enum):
    OUTPUT = auto()  # the next output
    SECOND = auto()  # the output after the next
    REST = auto()  # all outputs that are not made yet
    RELEASE = auto()  # all held blocks are given back


@dataclass(frozen=True, slots=True)
class Release:
    """So many of the held blocks are given back, the latest first."""

    blocks: int


@dataclass(frozen=True, slots=True)
class ReleaseBeneath:
    """So many of the held blocks are given back, those that were taken before the last one."""

    blocks: int


Step = int | Trial | Search | Held | Release | ReleaseBeneath | Made
_SIZED: dict[type, str] = {Held: "h", Trial: "t", Search: "s"}
# Outputs are born in the order in which they are made, so that a stored loop need not tell them apart.
_LETTERS = {Made.OUTPUT: "o", Made.SECOND: "o", Made.REST: "a", Made.RELEASE: "e"}


def letter_of(step: Step) -> tuple[str, Any]:
    """The step as `planner.program.stored_loop.LETTERS` have it, with its size as the rule wrote it down, or
    0.
    """
    if isinstance(step, Made):
        return _LETTERS[step], 0
    if isinstance(step, Release):
        return "r", step.blocks
    if isinstance(step, ReleaseBeneath):
        return "b", step.blocks
    if isinstance(step, Held | Trial | Search):
        return _SIZED[type(step)], step.size_bytes
    return "p", step


Rule = Callable[[tuple[Any, ...], Any, Target], tuple[Step, ...]]  # arguments, result, chip


def released(held: Sequence[Step]) -> tuple[Step, ...]:
    """Return the release of blocks that a kernel held, where there are any."""
    return (Release(len(held)),) if held else ()


def argument(args: tuple[Any, ...], position: int, default: Any = None) -> Any:
    """An argument that the caller may have left to its default; torch then hands on a shorter tuple."""
    return args[position] if len(args) > position else default


def tensor_bytes(t: Tensor) -> int:
    """Elements times their size: what a contiguous copy takes.

    >>> import torch
    >>> tensor_bytes(torch.empty(2, 3, device="meta").expand(4, 2, 3))
    96
    """
    return t.numel() * t.element_size()


def copies(*tensors: Tensor | None) -> tuple[Step, ...]:
    """The copies that `contiguous()` makes of those that are not, held until the kernel returns."""
    return tuple(Held(tensor_bytes(t)) for t in tensors if t is not None and not t.is_contiguous())


def positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
    """All arguments in the order of the operator's schema, where some were given by name.

    >>> import torch
    >>> x = torch.empty(2)
    >>> positional(torch.ops.aten.sort.stable, (x,), {"stable": True})[1:]
    (True, -1, False)
    """
    if not kwargs:
        return args
    rest = func._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest))


def packed_copies(*tensors: Tensor | None) -> tuple[Step, ...]:
    """As `copies` for kernels that also take tensors in the channels-last format of their rank."""
    return tuple(Held(tensor_bytes(t)) for t in tensors if t is not None and not is_packed(t))


def is_packed(t: Tensor) -> bool:
    """Contiguous, or without gaps in the format that its strides suggest (`suggest_memory_format`)."""
    return t.is_contiguous() or (suggests_channels_last(t) and t.stride() == channels_last(t.shape))


def copies_like(x: Tensor, *others: Tensor | None) -> tuple[Step, ...]:
    """Copies of the others where they are not in the format that the strides of `x` suggest."""
    last = suggests_channels_last(x)

    def fits(t: Tensor) -> bool:
        return t.stride() == channels_last(t.shape) if last else t.is_contiguous()

    return tuple(Held(tensor_bytes(t)) for t in others if t is not None and not fits(t))
