"""Whole numbers as terms in the batch size and the GPU's multiprocessors, worked out without torch.

A rule of `trace/scratch` says how much memory a kernel takes, in Python and from tensors' shapes. Run once
with numbers that remember what becomes of them (`trace/symbols.py`), it leaves a `Case`: terms for what it
answered, and every comparison on its way. Where these come out the same for another batch size, the rule
would go the same way, so the terms give what it would say; no other batch size is answered.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Node = tuple[str, int, int]  # an operation and its operands: places of earlier nodes, or for "c" the number

BATCH, MULTIPROCESSORS, CONSTANT = "b", "m", "c"
_LONGEST_SHIFT = 64
_MOST_BITS = 128


def _bits(a: int, b: int) -> int:
    return a.bit_length()


def _shifted(a: int, b: int) -> int:
    return a << min(max(b, 0), _LONGEST_SHIFT)


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "l": _shifted,
    "n": _bits,
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "L": operator.le,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison of two terms, and how it came out."""

    comparison: str
    left: int
    right: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """One step of a kernel: a letter of `stored_loop` and the place of its number of bytes or blocks."""

    letter: str
    term: int


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule answers wherever its comparisons come out alike, for batch sizes from `low` to `high`."""

    low: int
    high: int
    nodes: tuple[Node, ...]
    guards: tuple[Guard, ...]
    answers: tuple[Answer, ...]

    @property
    def asks_multiprocessors(self) -> bool:
        """Whether it depends on them."""
        return any(letter == MULTIPROCESSORS for letter, _, _ in self.nodes)


def work_out(case: Case, batch: int, multiprocessors: int) -> list[tuple[str, int]] | None:
    """The steps with their numbers; None where the rule might go another way."""
    if not case.low <= batch <= case.high:
        return None
    if not case.answers and not case.guards:
        return []
    values = _values(case.nodes, batch, multiprocessors)
    if values is None:
        return None
    for guard in case.guards:
        if COMPARISONS[guard.comparison](values[guard.left], values[guard.right]) is not guard.holds:
            return None
    return [(answer.letter, values[answer.term]) for answer in case.answers]


def _values(nodes: Sequence[Node], batch: int, multiprocessors: int) -> list[int] | None:
    """The value of each node; None for what no rule would compute, as a file could ask for."""
    values: list[int] = []
    for operation, a, b in nodes:
        if operation == CONSTANT:
            values.append(a)
        elif operation == BATCH:
            values.append(batch)
        elif operation == MULTIPROCESSORS:
            values.append(multiprocessors)
        else:
            if operation in "/%" and not values[b]:
                return None
            value = OPERATIONS[operation](values[a], values[b])
            if value.bit_length() > _MOST_BITS:
                return None
            values.append(value)
    return values


def check_case(case: Case) -> None:
    """Raise ValueError for a case that cannot be worked out in a few steps and small numbers."""
    for place, (operation, a, b) in enumerate(case.nodes):
        if operation in OPERATIONS:
            if not (0 <= a < place and 0 <= b < place):
                raise ValueError(f"node {place} stands before its operands")
        elif operation not in (BATCH, MULTIPROCESSORS, CONSTANT):
            raise ValueError(f"node {place} is no operation: {operation!r}")
    places = range(len(case.nodes))
    for guard in case.guards:
        if guard.comparison not in COMPARISONS or guard.left not in places or guard.right not in places:
            raise ValueError(f"no comparison: {guard}")
    if any(answer.term not in places for answer in case.answers):
        raise ValueError("an answer without its term")
