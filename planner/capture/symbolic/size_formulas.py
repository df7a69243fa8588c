"""Fit formulas to the numbers in programs, as functions of the sizes of samples.

A number is a polynomial of a size, of a fraction of the size rounded up (padded rows, strided convolutions),
or of both. If samples have two sizes, it may also be a polynomial of products of their fractions (pixels of
images, attention scores between two texts). A formula is accepted only if it gives every known number, and
there are more numbers than terms or all numbers are equal.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

from msgspec import Struct

from planner.capture.symbolic.kernel_calls import TensorMeta
from planner.program import Affine, NotAffineError

MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
MOST_OF_TWO = 64  # the largest divisor in formulas of two sizes
Size = tuple[int, ...]
_Term = tuple[tuple[int, int, int], ...]  # factors: index of a size, its divisor, power of the quotient
_Powers = tuple[tuple[int, int], ...]  # for each term, the powers of the size and of its fraction
_IN_SIZE: tuple[_Powers, ...] = (((0, 0),), ((0, 0), (1, 0)), ((0, 0), (1, 0), (2, 0)))
_IN_PARTS: tuple[_Powers, ...] = (
    ((0, 0), (0, 1)),
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (0, 1)),
    ((0, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (1, 1)),
)
# For each term, the powers of a fraction of one size and of a fraction of the other.
_IN_BOTH: tuple[_Powers, ...] = (
    ((0, 0), (1, 1)),
    ((0, 0), (1, 0), (0, 1)),
    ((0, 0), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 1), (2, 2)),
    ((0, 0), (1, 0), (0, 1), (1, 1)),
)


def _candidates(sizes: Sequence[Size]) -> list[tuple[_Term, ...]]:
    """Return the combinations of terms that formulas may have, fewest terms first."""
    found = dict.fromkeys(_of_one(0))
    for place in range(1, len(sizes[0])):
        found |= dict.fromkeys(_of_one(place))
    if len(sizes[0]) == 2:
        found |= dict.fromkeys(_of_two(sizes))
    return sorted(found, key=len)


def _of_one(place: int) -> Iterator[tuple[_Term, ...]]:
    of_parts = ((powers, multiple) for powers in _IN_PARTS for multiple in MULTIPLES)
    for powers, multiple in (*((powers, 1) for powers in _IN_SIZE), *of_parts):
        yield tuple(_term((place, 1, i), (place, multiple, j)) for i, j in powers)


def _of_two(sizes: Sequence[Size]) -> Iterator[tuple[_Term, ...]]:
    """Yield combinations of terms in two sizes, each divided by a number and rounded up.

    If a divisor divides all sizes, smaller divisors would give the same formulas and are left out.
    """
    parts = []
    for column in zip(*sizes, strict=True):
        known = [m for m in (1, *MULTIPLES) if m <= MOST_OF_TWO]
        least = max(m for m in known if all(size % m == 0 for size in column))
        parts.append([m for m in known if m >= least])
    for one, other in product(*parts):
        for powers in _IN_BOTH:
            yield tuple(_term((0, one, i), (1, other, j)) for i, j in powers)


def _term(*factors: tuple[int, int, int]) -> _Term:
    return tuple(factor for factor in factors if factor[2])


class Formula(Struct, frozen=True):
    """A function of the sizes of samples: a sum of terms with integer factors.

    Each term is a product of powers of sizes, which are divided by numbers and rounded up.
    """

    terms: tuple[_Term, ...]
    factors: tuple[int, ...]

    def at(self, size: Size) -> int:
        """Return the value of the formula at a size."""
        return sum(f * t for f, t in zip(self.factors, _values(self.terms, size), strict=True))


def _values(terms: tuple[_Term, ...], size: Size) -> list[int]:
    values = []
    for term in terms:
        value = 1
        for place, multiple, power in term:
            value *= (-(-size[place] // multiple)) ** power
        values.append(value)
    return values


class _Solver(Struct, frozen=True):
    """A solver for the factors of a combination of terms. One number for each term determines the factors."""

    terms: tuple[_Term, ...]
    rows: list[list[int]]  # values of the terms at all sizes
    chosen: tuple[int, ...]  # indices of sizes that determine the factors
    adjugate: list[list[int]]
    determinant: int

    def solve(self, numbers: Sequence[int]) -> Formula | None:
        """Return the formula with integer factors that gives all numbers, or None if no formula does."""
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
        return Formula(self.terms, tuple(factors))


class FormulaFit:
    """A finder of the simplest formulas for tuples of numbers at fixed sizes, with a cache of its results.

    A simplest formula has integer factors, gives every number, and has the fewest terms of such formulas.
    """

    def __init__(self, sizes: Sequence[Size]) -> None:
        self.sizes = tuple(sizes)
        self.formulas: dict[tuple[int, ...], list[Formula]] = {}
        self._solvers = [
            solver for terms in _candidates(self.sizes) if (solver := _solver(terms, self.sizes)) is not None
        ]

    def fit(self, numbers: tuple[int, ...]) -> Formula:
        """Return a formula that gives all numbers and has the fewest terms.

        Raises NotAffineError if no formula gives them.
        """
        if numbers not in self.formulas:
            self.formulas[numbers] = self._simplest(numbers)
        if not self.formulas[numbers]:
            raise NotAffineError(f"no formula gives {numbers} at sizes {self.sizes}")
        return self.formulas[numbers][0]

    def most_doubtful(self, sizes: Iterable[Size]) -> Size | None:
        """Return the size at which formulas disagree for the most tuples of numbers, or None if all agree.

        Formulas of one tuple disagree at a size if their values differ.
        """
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
            if found and len(solver.terms) > len(found[0].terms):
                break
            if len(numbers) > len(solver.terms) or len(set(numbers)) == 1:
                formula = solver.solve(numbers)
                found += [] if formula is None else [formula]
        return found

    def fit_values(self, values: Sequence[Any]) -> Any:
        """Return a call's arguments with numbers that differ between sizes as formulas in the size.

        `values` has the arguments at each size. A number that is affine in the batch size gets two formulas.
        Raises NotAffineError if a number has no formula, or if other values differ.
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
            return TensorMeta(sizes, strides, first.dtype, first.on_cpu)
        if all(isinstance(value, tuple) and len(value) == len(first) for value in values):
            return tuple(self.fit_values(items) for items in zip(*values, strict=True))
        raise NotAffineError(f"an argument is {first!r} at size {self.sizes[0]} and another one elsewhere")


class _Line(Struct, frozen=True):
    """An integer that is affine in the batch size, with formulas for its two coefficients."""

    fixed: Formula
    slope: Formula


def values_at(value: Any, size: Size) -> Any:
    """Return a call's arguments with formulas replaced by their values at a size."""
    if isinstance(value, _Line):
        line = Affine(value.fixed.at(size), value.slope.at(size))
        return line if line.slope else line.fixed
    if isinstance(value, TensorMeta):
        sizes, strides = values_at(value.sizes, size), values_at(value.strides, size)
        return TensorMeta(sizes, strides, value.dtype, value.on_cpu)
    if isinstance(value, tuple):
        return tuple(values_at(item, size) for item in value)
    return value


def _solver(terms: tuple[_Term, ...], sizes: Sequence[Size]) -> _Solver | None:
    """Return the solver for a combination of terms, or None if the sizes do not determine its factors."""
    rows = [_values(terms, size) for size in sizes]
    for chosen in combinations(range(len(sizes)), len(terms)):
        matrix = [rows[index] for index in chosen]
        determinant = _determinant(matrix)
        if determinant:
            return _Solver(terms, rows, chosen, _adjugate(matrix), determinant)
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
