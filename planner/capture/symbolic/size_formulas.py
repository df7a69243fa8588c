"""Formulas in the size of samples through the numbers that programs at several sizes have.

A number is a polynomial of the size, of a part of the size rounded up (padded rows, strided convolutions),
or of both. A formula counts only if it gives every known number and has one to spare.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from msgspec import Struct

from planner.capture.symbolic.kernel_calls import TensorMeta
from planner.program import Affine, NotAffineError

MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
_Powers = tuple[tuple[int, int], ...]  # of each term: of the size, and of its part
_IN_SIZE: tuple[_Powers, ...] = (((0, 0),), ((0, 0), (1, 0)), ((0, 0), (1, 0), (2, 0)))
_IN_PARTS: tuple[_Powers, ...] = (
    ((0, 0), (0, 1)),
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (0, 1)),
    ((0, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (1, 1)),
)
_CANDIDATES = sorted(
    [(powers, 1) for powers in _IN_SIZE]
    + [(powers, multiple) for powers in _IN_PARTS for multiple in MULTIPLES],
    key=lambda candidate: len(candidate[0]),
)


class Formula(Struct, frozen=True):
    """A sum of terms `factor * size**i * part**j`, the part being `size / multiple` rounded up."""

    powers: _Powers
    multiple: int
    factors: tuple[int, ...]

    def at(self, size: int) -> int:
        """Return the number at a size."""
        return sum(f * t for f, t in zip(self.factors, _terms(self.powers, self.multiple, size), strict=True))


def _terms(powers: _Powers, multiple: int, size: int) -> list[int]:
    quotient = -(-size // multiple)
    return [size**i * quotient**j for i, j in powers]


class _Solver(Struct, frozen=True):
    """The inverse of the terms of a candidate at as many sizes as it has terms."""

    powers: _Powers
    multiple: int
    rows: list[list[int]]  # terms at all sizes
    chosen: tuple[int, ...]  # indices of the sizes
    adjugate: list[list[int]]
    determinant: int

    def solve(self, numbers: Sequence[int]) -> Formula | None:
        """Return the formula with whole factors through the numbers at all sizes; None: there is none."""
        known = [numbers[index] for index in self.chosen]
        factors = []
        for row in self.adjugate:
            factor, rest = divmod(sum(a * b for a, b in zip(row, known, strict=True)), self.determinant)
            if rest:
                return None
            factors.append(factor)
        for terms, number in zip(self.rows, numbers, strict=True):
            if sum(f * t for f, t in zip(factors, terms, strict=True)) != number:
                return None
        return Formula(self.powers, self.multiple, tuple(factors))


class FormulaFit:
    """Fits formulas to numbers at the same sizes, those for equal numbers once.

    A formula has whole factors, gives every number, and has as few terms as any that does.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.formulas: dict[tuple[int, ...], list[Formula]] = {}
        self._solvers = [
            solver for candidate in _CANDIDATES if (solver := _solver(*candidate, self.sizes)) is not None
        ]

    def fit(self, numbers: tuple[int, ...]) -> Formula:
        """Return a simplest formula through numbers at the sizes. Raises NotAffineError."""
        if numbers not in self.formulas:
            self.formulas[numbers] = self._simplest(numbers)
        if not self.formulas[numbers]:
            raise NotAffineError(f"no formula gives {numbers} at sizes {self.sizes}")
        return self.formulas[numbers][0]

    def most_doubtful(self, sizes: Iterable[int]) -> int | None:
        """Return the size at which most numbers have several equally simple formulas that differ."""
        doubtful = [formulas for formulas in self.formulas.values() if len(formulas) > 1]
        counts = {
            size: sum(len({formula.at(size) for formula in formulas}) > 1 for formulas in doubtful)
            for size in sizes
        }
        most = max(counts, key=counts.__getitem__, default=None)
        return most if most is not None and counts[most] else None

    def _simplest(self, numbers: tuple[int, ...]) -> list[Formula]:
        found: list[Formula] = []
        for solver in self._solvers:
            if found and len(solver.powers) > len(found[0].powers):
                break
            if len(numbers) > len(solver.powers) or len(set(numbers)) == 1:
                formula = solver.solve(numbers)
                found += [] if formula is None else [formula]
        return found

    def fit_values(self, values: Sequence[Any]) -> Any:
        """Return arguments of a call with a formula, or two of a line, for each number that differs.

        Raises NotAffineError.
        """
        first = values[0]
        if all(type(value) is type(first) and value == first for value in values):
            return first
        if all(type(value) is int or isinstance(value, Affine) for value in values):
            lines = [value if isinstance(value, Affine) else Affine(value, 0) for value in values]
            fixed, slope = (
                self.fit(tuple(getattr(line, name) for line in lines)) for name in ("fixed", "slope")
            )
            return _Line(fixed, slope)
        if all(isinstance(value, TensorMeta) and value.dtype is first.dtype for value in values):
            sizes, strides = (
                self.fit_values([getattr(value, name) for value in values]) for name in ("sizes", "strides")
            )
            return TensorMeta(sizes, strides, first.dtype)
        if all(isinstance(value, tuple) and len(value) == len(first) for value in values):
            return tuple(self.fit_values(items) for items in zip(*values, strict=True))
        raise NotAffineError(f"an argument is {first!r} at size {self.sizes[0]} and another one elsewhere")


class _Line(Struct, frozen=True):
    """An affine integer in the batch size, as formulas."""

    fixed: Formula
    slope: Formula


def values_at(value: Any, size: int) -> Any:
    """Return arguments of a call at a size."""
    if isinstance(value, _Line):
        line = Affine(value.fixed.at(size), value.slope.at(size))
        return line if line.slope else line.fixed
    if isinstance(value, TensorMeta):
        return TensorMeta(values_at(value.sizes, size), values_at(value.strides, size), value.dtype)
    if isinstance(value, tuple):
        return tuple(values_at(item, size) for item in value)
    return value


def _solver(powers: _Powers, multiple: int, sizes: Sequence[int]) -> _Solver | None:
    """Return the solver of a candidate; None where the sizes do not determine its factors."""
    rows = [_terms(powers, multiple, size) for size in sizes]
    for chosen in combinations(range(len(sizes)), len(powers)):
        matrix = [rows[index] for index in chosen]
        determinant = _determinant(matrix)
        if determinant:
            return _Solver(powers, multiple, rows, chosen, _adjugate(matrix), determinant)
    return None


def _determinant(matrix: list[list[int]]) -> int:
    if len(matrix) == 1:
        return matrix[0][0]
    return sum(
        (-1) ** column * matrix[0][column] * _determinant(_minor(matrix, 0, column))
        for column in range(len(matrix))
    )


def _adjugate(matrix: list[list[int]]) -> list[list[int]]:
    indices = range(len(matrix))
    if len(matrix) == 1:
        return [[1]]
    return [
        [(-1) ** (row + column) * _determinant(_minor(matrix, column, row)) for column in indices]
        for row in indices
    ]


def _minor(matrix: list[list[int]], row: int, column: int) -> list[list[int]]:
    return [[*line[:column], *line[column + 1 :]] for index, line in enumerate(matrix) if index != row]
