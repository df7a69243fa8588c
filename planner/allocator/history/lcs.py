"""Compute the longest common subsequence of two long sequences of numbers exactly.

The sequences may have tens of thousands of numbers. The algorithm is bit-parallel: one row of the table of
lengths is one large integer, whose bit j is 0 if the length grows at column j (Crochemore, Iliopoulos, Pinzon
and Reid 2001; Hyyrö 2004). If the table would take too much memory, the problem is halved first (Hirschberg
1975).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

MOST_TABLE_BITS = 2**30  # 128 MiB

Pair = tuple[int, int]


def align_rows(
    first: Sequence[int], second: Sequence[int], most_table_bits: int = MOST_TABLE_BITS
) -> list[Pair]:
    """Return the longest common subsequence of two sequences as pairs of indices.

    Both indices ascend from pair to pair. Among several longest lists the choice is arbitrary but
    deterministic. `most_table_bits` bounds the memory of the table.
    """
    start, end = 0, 0
    shorter = min(len(first), len(second))
    while start < shorter and first[start] == second[start]:
        start += 1
    while end < shorter - start and first[-1 - end] == second[-1 - end]:
        end += 1
    inner = _align(first[start : len(first) - end], second[start : len(second) - end], most_table_bits)
    return [
        *((index, index) for index in range(start)),
        *((one + start, other + start) for one, other in inner),
        *((len(first) - index, len(second) - index) for index in range(end, 0, -1)),
    ]


def _align(first: Sequence[int], second: Sequence[int], most_table_bits: int) -> list[Pair]:
    if not first or not second:
        return []
    if len(second) > 1 and len(first) * len(second) > most_table_bits:
        return _align_halves(first, second, most_table_bits)
    return _trace_back(first, second, list(_rows(first, second)))


def _rows(first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    """Yield each row of the table of lengths as one integer, with a bit for each column.

    Bit j of row i is for `first[j]` and the first i numbers of `second`. It is 0 if the length grows at
    column j.
    """
    places: dict[int, int] = {}
    for column, number in enumerate(first):
        places[number] = places.get(number, 0) | 1 << column
    full = (1 << len(first)) - 1
    row = full
    yield row
    for number in second:
        matches = row & places.get(number, 0)
        row = ((row + matches) | (row - matches)) & full
        yield row


def _trace_back(first: Sequence[int], second: Sequence[int], rows: list[int]) -> list[Pair]:
    pairs = []
    column, row = len(first), len(second)
    while column and row:
        if first[column - 1] == second[row - 1]:
            column, row = column - 1, row - 1
            pairs.append((column, row))
        elif rows[row] >> (column - 1) & 1:  # the last column adds nothing
            column -= 1
        else:
            row -= 1
    return pairs[::-1]


def _align_halves(first: Sequence[int], second: Sequence[int], most_table_bits: int) -> list[Pair]:
    middle = len(second) // 2
    ahead = _lengths(first, second[:middle])
    behind = _lengths(first[::-1], second[middle:][::-1])[::-1]
    split = max(range(len(first) + 1), key=lambda column: ahead[column] + behind[column])
    before = _align(first[:split], second[:middle], most_table_bits)
    after = _align(first[split:], second[middle:], most_table_bits)
    return [*before, *((one + split, other + middle) for one, other in after)]


def _lengths(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the lengths of the longest common subsequences of `second` and each prefix of `first`.

    The first length is for the empty prefix.
    """
    (row,) = deque(_rows(first, second), maxlen=1)
    bits = f"{row:0{len(first)}b}"[::-1]
    return list(accumulate((bit == "0" for bit in bits), initial=0))
