"""Tensors whose sizes remember what a rule does with them, and the asking of a rule with such."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.symbolic.sym_int import Number, Record, as_number
from planner.capture.workspaces.ops import Op, Rule, letter_of
from planner.program import BATCH, CONSTANT, MULTIPROCESSORS, Answer, Case, Target


class UnknownToSketchesError(Exception):
    """A rule asks a sketch for something that sketches do not know."""


class Sizes(tuple[Any, ...]):
    """As much of torch.Size as rules use."""

    def numel(self) -> Any:
        """The product."""
        return prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Sizes(found) if isinstance(index, slice) else found


class Sketch:
    """As much of a tensor on meta as rules look at; its sizes may be Numbers."""

    is_meta = True
    __class__ = Tensor  # type: ignore[assignment]  # rules tell tensors from None by it

    def __init__(self, sizes: Iterable[Any], strides: Iterable[Any], dtype: torch.dtype) -> None:
        self.shape, self._strides, self.dtype = Sizes(sizes), tuple(strides), dtype

    def stride(self, dim: int | None = None) -> Any:
        """All strides, or that of one dimension."""
        return self._strides if dim is None else self._strides[dim]

    def size(self, dim: int | None = None) -> Any:
        """All sizes, or that of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The rank."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.shape)

    def numel(self) -> Any:
        """Elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """c10/core/Contiguity.h: dimensions of size 1 may have any stride."""
        expected: Any = 1
        if self.numel() == 0:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected = expected * size
        return True

    def transpose(self, a: int, b: int) -> "Sketch":
        """The same memory with two dimensions exchanged."""
        order = list(range(self.dim()))
        order[a], order[b] = order[b], order[a]
        return Sketch([self.shape[d] for d in order], [self._strides[d] for d in order], self.dtype)

    def t(self) -> "Sketch":
        """The transpose of a matrix."""
        return self.transpose(0, 1)

    def reshape(self, *sizes: int) -> "Sketch":
        """All in a row, which is all that rules ask for."""
        if sizes != (-1,):
            raise UnknownToSketchesError(f"reshape{sizes}")
        return Sketch([self.numel()], [1], self.dtype)

    def __getattr__(self, name: str) -> Any:
        """Called for what is not above."""
        raise UnknownToSketchesError(name)


def ask(rule: Rule, args: Any, out: Any, chip: Target, record: Record) -> Case:
    """What the rule answers to arguments with Numbers of this record in them.

    Raises UnknownToSketchesError: only a run can tell.
    """
    processors = Number(record, chip.sm_count, None, record.place((MULTIPROCESSORS, 0, 0)))
    steps = rule(args, out, Target(chip.capability, processors))  # type: ignore[arg-type]
    answers = tuple(_answer(record, step) for step in steps)
    return _pruned(Case(record.low, record.high, tuple(record.nodes), tuple(record.guards), answers))


def _answer(record: Record, step: Op) -> Answer:
    letter, size = letter_of(step)
    if letter == "s":
        raise UnknownToSketchesError("a search, which only the first call makes")
    return Answer(letter, as_number(record, size).place())


def _pruned(case: Case) -> Case:
    """Without the nodes that neither comparisons nor answers need."""
    wanted = {place for guard in case.guards for place in (guard.left, guard.right)}
    wanted |= {answer.term for answer in case.answers}
    for place in range(len(case.nodes) - 1, -1, -1):
        letter, a, b = case.nodes[place]
        if place in wanted and letter not in (BATCH, CONSTANT, MULTIPROCESSORS):
            wanted |= {a, b}
    places = {old: new for new, old in enumerate(sorted(wanted))}
    leaves = (BATCH, CONSTANT, MULTIPROCESSORS)
    nodes = tuple(
        (letter, a, b) if letter in leaves else (letter, places[a], places[b])
        for letter, a, b in (case.nodes[old] for old in sorted(wanted))
    )
    guards = tuple(
        replace(guard, left=places[guard.left], right=places[guard.right]) for guard in case.guards
    )
    answers = tuple(Answer(answer.letter, places[answer.term]) for answer in case.answers)
    return replace(case, nodes=nodes, guards=guards, answers=answers)
