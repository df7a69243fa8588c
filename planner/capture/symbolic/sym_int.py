"""Symbolic integers that record the expressions and guards of a workspace rule.

The rule runs once on symbolic integers. A `SymInt` has a value, which decides every comparison,
and an expression in the batch size and the number of multiprocessors. An operation that cannot be followed
(conversion to a plain number, square root, hash) specializes the integer to its value: the variant then holds
only if the expression has this value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.program import BATCH, COMPARISONS, CONSTANT, OPERATIONS, Guard, Node

ENDLESS = 2**62


@dataclass(slots=True)
class ShapeEnv:
    """The nodes and guards that one call of a workspace rule records.

    The record holds for batch sizes from `min_batch` to `max_batch`.
    """

    batch: int  # the batch size for which symbolic integers have their values
    min_batch: int = 1
    max_batch: int = ENDLESS
    nodes: list[Node] = field(default_factory=list)
    guards: dict[Guard, None] = field(default_factory=dict)
    _places: dict[Node, int] = field(default_factory=dict)

    def place(self, node: Node) -> int:
        """Return the index of a node, and add the node if it is new."""
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return self._places[node]


def _arithmetic(letter: str, *, is_reflected: bool = False) -> Callable[["SymInt", Any], Any]:
    """Return a method of `SymInt` for the operation named `letter`, with exchanged operands if reflected."""

    def method(self: "SymInt", other: Any) -> Any:
        if not isinstance(other, int | SymInt):
            return NotImplemented
        return _result(self.env, letter, *((other, self) if is_reflected else (self, other)))

    return method


def _comparison(
    letter: str, *, is_reflected: bool = False, is_negated: bool = False
) -> Callable[["SymInt", object], bool]:
    """Return a method of `SymInt` for the comparison named `letter`, which also records the result.

    A symbolic integer is unequal to None and to strings.
    """

    def method(self: "SymInt", other: object) -> bool:
        if not isinstance(other, int | SymInt):
            return is_negated
        return _holds(self.env, letter, *((other, self) if is_reflected else (self, other))) is not is_negated

    return method


class SymInt:
    """An integer with a value and a symbolic expression.

    `line` is (fixed, slope) if the integer is affine in the batch size, else None.
    """

    __slots__ = ("_place", "line", "env", "value")

    def __init__(self, env: ShapeEnv, value: int, line: tuple[int, int] | None, place: int = -1) -> None:
        self.env, self.value, self.line, self._place = env, value, line, place

    def place(self) -> int:
        """Return the index of the integer's node. Nodes of an affine integer are added when first needed."""
        if self._place < 0:
            assert self.line is not None
            fixed, slope = self.line
            node = self.env.place((CONSTANT, fixed, 0))
            if slope:
                times = self.env.place((BATCH, 0, 0))
                if slope != 1:
                    times = self.env.place(("*", self.env.place((CONSTANT, slope, 0)), times))
                node = times if fixed == 0 else self.env.place(("+", node, times))
            self._place = node
        return self._place

    __add__, __radd__ = _arithmetic("+"), _arithmetic("+", is_reflected=True)
    __sub__, __rsub__ = _arithmetic("-"), _arithmetic("-", is_reflected=True)
    __mul__, __rmul__ = _arithmetic("*"), _arithmetic("*", is_reflected=True)
    __floordiv__, __rfloordiv__ = _arithmetic("/"), _arithmetic("/", is_reflected=True)
    __mod__, __rmod__ = _arithmetic("%"), _arithmetic("%", is_reflected=True)
    __lshift__, __rlshift__ = _arithmetic("l"), _arithmetic("l", is_reflected=True)
    __lt__, __gt__ = _comparison("<"), _comparison("<", is_reflected=True)
    __le__, __ge__ = _comparison("L"), _comparison("L", is_reflected=True)
    __eq__, __ne__ = _comparison("="), _comparison("=", is_negated=True)

    def __neg__(self) -> Any:
        return 0 - self

    def bit_length(self) -> Any:
        """Return the integer's bit length, as `int.bit_length`, as a symbolic integer."""
        return _result(self.env, "n", self, self)

    def __bool__(self) -> bool:
        return self != 0

    # ---- operations that cannot be followed

    def specialize_to_hint(self) -> int:
        """Return the value, and record the guard that the expression has this value."""
        _holds(self.env, "=", self, self.value)
        return self.value

    __int__ = __index__ = specialize_to_hint

    def __hash__(self) -> int:
        return hash(self.specialize_to_hint())

    def __float__(self) -> float:
        return float(self.specialize_to_hint())

    def __pow__(self, other: Any) -> Any:
        return self.specialize_to_hint() ** other

    def __truediv__(self, other: Any) -> float:
        return self.specialize_to_hint() / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / self.specialize_to_hint()


def as_sym_int(env: ShapeEnv, value: Any) -> SymInt:
    """Convert a plain number to a symbolic constant; return a symbolic integer unchanged."""
    return value if isinstance(value, SymInt) else SymInt(env, int(value), (int(value), 0))


def _result(env: ShapeEnv, letter: str, left: Any, right: Any) -> Any:
    """Apply the operation `letter` to two integers, plain or symbolic; a constant result is plain."""
    a, b = as_sym_int(env, left), as_sym_int(env, right)
    value, line = OPERATIONS[letter](a.value, b.value), _line(letter, a.line, b.line)
    if line is None:
        return SymInt(env, value, None, env.place((letter, a.place(), b.place())))
    return SymInt(env, value, line) if line[1] else value


def _holds(env: ShapeEnv, letter: str, left: Any, right: Any) -> bool:
    """Return the result of a comparison, and record it as a guard or as a smaller range of batch sizes.

    The range is made smaller if both operands are affine.
    """
    a, b = as_sym_int(env, left), as_sym_int(env, right)
    holds = COMPARISONS[letter](a.value, b.value)
    difference = _line("-", a.line, b.line)
    if difference is None:
        env.guards[Guard(letter, a.place(), b.place(), holds)] = None
    else:
        _refine_range(env, letter, difference, holds)
    return holds


def _line(letter: str, a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (fixed, slope) of an operation's result, or None if the result is not known to be affine."""
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
    if not a[1] and not b[1] and letter != "n":
        return OPERATIONS[letter](a[0], b[0]), 0
    return None


def _refine_range(env: ShapeEnv, comparison: str, difference: tuple[int, int], holds: bool) -> None:
    """Narrow the range of `env` around its batch size to sizes at which a comparison has the result `holds`.

    The comparison is between `fixed + slope * batch` and 0.
    """
    fixed, slope = difference
    if slope == 0:
        return
    if comparison == "=":
        root, rest = divmod(-fixed, slope)
        if holds:
            env.min_batch = env.max_batch = root
        elif rest == 0 and root > env.batch:
            env.max_batch = min(env.max_batch, root - 1)
        elif rest == 0:
            env.min_batch = max(env.min_batch, root + 1)
        return
    if not holds:  # not d < 0 is -d <= 0; not d <= 0 is -d < 0
        fixed, slope, comparison = -fixed, -slope, "L" if comparison == "<" else "<"
    if comparison == "<":
        fixed += 1  # for integers, d < 0 is d + 1 <= 0
    if slope > 0:
        env.max_batch = min(env.max_batch, -fixed // slope)
    else:
        env.min_batch = max(env.min_batch, -(-fixed // -slope))
