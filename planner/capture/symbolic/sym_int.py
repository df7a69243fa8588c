"""Numbers that remember what a rule does with them, so that it need not be asked again.

A `Number` has a value, which decides every comparison, and a term in the batch size and the multiprocessors.
What cannot be followed (a conversion to a plain number, a square root, a hash) pins the number to its value:
the case then holds only where the term has this value.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.program import BATCH, CONSTANT, Guard, Node

ENDLESS = 2**62


@dataclass(slots=True)
class Record:
    """What one call of a rule has done so far."""

    batch: int  # that the numbers have their values for
    low: int = 1
    high: int = ENDLESS
    nodes: list[Node] = field(default_factory=list)
    guards: dict[Guard, None] = field(default_factory=dict)
    _places: dict[Node, int] = field(default_factory=dict)

    def place(self, node: Node) -> int:
        """Where the node stands, which is written down once."""
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return self._places[node]


class Number:
    """A whole number; `line` is (fixed, slope) where it is a straight line in the batch size."""

    __slots__ = ("_place", "line", "record", "value")

    def __init__(self, record: Record, value: int, line: tuple[int, int] | None, place: int = -1) -> None:
        self.record, self.value, self.line, self._place = record, value, line, place

    def place(self) -> int:
        """Its node; lines are written down when they are needed."""
        if self._place < 0:
            assert self.line is not None
            fixed, slope = self.line
            node = self.record.place((CONSTANT, fixed, 0))
            if slope:
                times = self.record.place((BATCH, 0, 0))
                if slope != 1:
                    times = self.record.place(("*", self.record.place((CONSTANT, slope, 0)), times))
                node = times if fixed == 0 else self.record.place(("+", node, times))
            self._place = node
        return self._place

    # ---- arithmetic

    def _made(self, letter: str, left: Any, right: Any, value: int, line: tuple[int, int] | None) -> Any:
        if line is not None:
            return Number(self.record, value, line) if line[1] else value
        a, b = (as_number(self.record, side).place() for side in (left, right))
        return Number(self.record, value, None, self.record.place((letter, a, b)))

    def _with(self, letter: str, other: Any, left: Any, right: Any) -> Any:
        if not isinstance(other, int | Number):
            return NotImplemented
        a, b = as_number(self.record, left), as_number(self.record, right)
        value = _ARITHMETIC[letter](a.value, b.value)
        return self._made(letter, a, b, value, _line(letter, a.line, b.line))

    def __add__(self, other: Any) -> Any:
        return self._with("+", other, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._with("+", other, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._with("-", other, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("-", other, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._with("*", other, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("*", other, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._with("/", other, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with("/", other, other, self)

    def __mod__(self, other: Any) -> Any:
        return self._with("%", other, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._with("%", other, other, self)

    def __lshift__(self, other: Any) -> Any:
        return self._with("l", other, self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self._with("l", other, other, self)

    def __neg__(self) -> Any:
        return 0 - self

    def bit_length(self) -> Any:
        """As of a plain number."""
        return self._made("n", self, self, self.value.bit_length(), None)

    # ---- comparisons

    def _compared(self, comparison: str, left: Any, right: Any) -> bool:
        if not isinstance(left, int | Number) or not isinstance(right, int | Number):
            return False  # with None or a text: never equal, and never asked anything else
        a, b = as_number(self.record, left), as_number(self.record, right)
        holds = _COMPARED[comparison](a.value, b.value)
        difference = _line("-", a.line, b.line)
        if difference is None:
            self.record.guards[Guard(comparison, a.place(), b.place(), holds)] = None
        else:
            _narrow(self.record, comparison, difference, holds)
        return holds

    def __lt__(self, other: Any) -> bool:
        return self._compared("<", self, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared("<", other, self)

    def __le__(self, other: Any) -> bool:
        return self._compared("L", self, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared("L", other, self)

    def __eq__(self, other: object) -> bool:
        return self._compared("=", self, other)

    def __ne__(self, other: object) -> bool:
        return not self._compared("=", self, other)

    def __bool__(self) -> bool:
        return not self._compared("=", self, 0)

    # ---- what cannot be followed

    def pinned(self) -> int:
        """The value, which the term has to have from now on."""
        self._compared("=", self, self.value)
        return self.value

    def __hash__(self) -> int:
        return hash(self.pinned())

    def __int__(self) -> int:
        return self.pinned()

    def __index__(self) -> int:
        return self.pinned()

    def __float__(self) -> float:
        return float(self.pinned())

    def __pow__(self, other: Any) -> Any:
        return self.pinned() ** other

    def __truediv__(self, other: Any) -> float:
        return self.pinned() / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / self.pinned()


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "l": operator.lshift,
}  # fmt: skip
_COMPARED: dict[str, Callable[[int, int], bool]] = {"<": operator.lt, "L": operator.le, "=": operator.eq}


def as_number(record: Record, value: Any) -> Number:
    """The number itself, or a plain one as a line without slope."""
    return value if isinstance(value, Number) else Number(record, int(value), (int(value), 0))


def _line(letter: str, a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """The line that comes of two, where it is one."""
    if a is None or b is None:
        return None
    if letter in "+-":
        sign = 1 if letter == "+" else -1
        return a[0] + sign * b[0], a[1] + sign * b[1]
    if letter == "*" and not (a[1] and b[1]):
        return a[0] * b[0], a[0] * b[1] + a[1] * b[0]
    if letter == "/" and not b[1] and b[0] > 0 and a[0] % b[0] == 0 and a[1] % b[0] == 0:
        return a[0] // b[0], a[1] // b[0]
    if letter == "%" and not b[1] and b[0] > 0 and a[1] % b[0] == 0:
        return a[0] % b[0], 0
    if not a[1] and not b[1] and letter in _ARITHMETIC:
        return _ARITHMETIC[letter](a[0], b[0]), 0
    return None


def _narrow(record: Record, comparison: str, difference: tuple[int, int], holds: bool) -> None:
    """Keep the batch sizes for which `fixed + slope * batch` compares with 0 as it did here."""
    fixed, slope = difference
    if slope == 0:
        return
    if comparison == "=":
        root, rest = divmod(-fixed, slope)
        if holds:
            record.low = record.high = root
        elif rest == 0 and root > record.batch:
            record.high = min(record.high, root - 1)
        elif rest == 0:
            record.low = max(record.low, root + 1)
        return
    if not holds:  # not d < 0 is -d <= 0; not d <= 0 is -d < 0
        fixed, slope, comparison = -fixed, -slope, "L" if comparison == "<" else "<"
    if comparison == "<":
        fixed += 1  # of whole numbers
    if slope > 0:
        record.high = min(record.high, -fixed // slope)
    else:
        record.low = max(record.low, -(-fixed // -slope))
