"""The sizes of varying samples, and batches drawn from them.

The module finds the varying dimensions and the distribution of sizes. Dimensions with equal ranges vary
together: `input_ids=16..512` and `attention_mask=16..512` share a length. Sizes are drawn with replacement by
Python's `random.Random(f"{seed}:{sequence}")`, so that a seed gives the same batches everywhere.
"""

import importlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from planner._support.bounded_read import open_regular
from planner.errors import UsageError
from planner.jobs.job import Batching, Job, Lengths, Samples, TensorSpec

Size = tuple[int, ...]  # the size of a sample: one number for each range
Range = tuple[int, int]
MEGABATCH = 50  # batches that transformers sorts together (trainer_pt_utils.py, get_length_grouped_indices)
MOST_BYTES = 2**30  # limit of a file of sizes
_LONGEST_LINE = 2**24  # bytes of a line: the tokens of a sample in JSON
_KEYS = ("length", "input_ids")  # keys of an object in a line of a file


class BatchShape(NamedTuple):
    """The number of samples in a batch, and their padded size."""

    batch: int
    size: Size


def size_ranges(job: Job) -> tuple[Range, ...]:
    """Return the distinct ranges of a job's varying dimensions, or () if all samples have one size."""
    specs = (*job.samples.inputs, *([job.samples.target] if job.samples.target else []), *job.samples.targets)
    ranges = (each for spec in specs for each in spec.ranges)
    return tuple(dict.fromkeys((low, high) for low, high in ranges if low < high))


def at_size(job: Job, size: Size) -> Job:
    """Return the job with all samples at one size, which has a number for each of its `size_ranges`."""
    chosen = dict(zip(size_ranges(job), size, strict=True))

    def fixed(spec: TensorSpec) -> TensorSpec:
        shape = tuple(chosen.get(each, each[1]) for each in spec.ranges)
        return replace(spec, shape=shape, smallest=())

    samples = Samples(
        inputs=tuple(map(fixed, job.samples.inputs)),
        target=None if job.samples.target is None else fixed(job.samples.target),
        targets=tuple(map(fixed, job.samples.targets)),
        dataset_size=job.samples.dataset_size,
        lengths=Lengths.FIXED,
    )
    return replace(job, samples=samples)


class SizeDistribution(Struct, frozen=True):
    """The distribution of samples' sizes: uniform within ranges, or as counted in a file."""

    ranges: tuple[Range, ...]
    sizes: tuple[Size, ...] = ()  # distinct sizes of the file in ascending order; empty if uniform
    cumulative: tuple[int, ...] = ()  # number of samples up to and including each of `sizes`
    clipped: int = 0  # number of samples of the file outside the ranges, moved to the ranges' ends
    pad_to: int = 1

    @property
    def largest(self) -> Size:
        """Return the largest padded size of each range."""
        if not self.sizes:
            return tuple(self._padded(high) for _, high in self.ranges)
        return tuple(self._padded(max(column)) for column in zip(*self.sizes, strict=True))

    @property
    def smallest(self) -> Size:
        """Return the smallest padded size of each range."""
        if not self.sizes:
            return tuple(self._padded(low) for low, _ in self.ranges)
        return tuple(self._padded(min(column)) for column in zip(*self.sizes, strict=True))

    def draw(self, random: Random) -> Size:
        """Draw the size of one sample before padding."""
        if not self.sizes:
            return tuple(low + int(random.random() * (high - low + 1)) for low, high in self.ranges)
        return self.sizes[bisect_left(self.cumulative, random.random() * self.cumulative[-1])]

    def draw_largest(self, random: Random, samples: int) -> Size:
        """Draw the padded size of a batch of `samples` samples."""
        if len(self.ranges) > 1:
            return self.pad([self.draw(random) for _ in range(samples)])
        share = random.random() ** (1 / samples)  # P(largest of n <= s) = P(one <= s)**n
        if self.sizes:
            return self.pad([self.sizes[bisect_left(self.cumulative, share * self.cumulative[-1])]])
        ((low, high),) = self.ranges
        return self.pad([(low + int(share * (high - low + 1)),)])

    def pad(self, samples: Sequence[Size]) -> Size:
        """Return the size to which the samples of one batch are padded."""
        return tuple(self._padded(max(column)) for column in zip(*samples, strict=True))

    def size_of_share(self, share: float) -> int:
        """Return the quantile at `share` of the sizes before padding, of a distribution with one range."""
        if self.sizes:
            return self.sizes[bisect_left(self.cumulative, share * self.cumulative[-1])][0]
        ((low, high),) = self.ranges
        return min(high, low + int(share * (high - low + 1)))

    def share_below(self, size: int) -> float:
        """Return the share of samples padded to less than `size`, of a distribution with one range."""
        largest = (size - 1) // self.pad_to * self.pad_to  # the largest size padded to less
        if self.sizes:
            place = bisect_left(self.sizes, (largest + 1,))
            return self.cumulative[place - 1] / self.cumulative[-1] if place else 0.0
        ((low, high),) = self.ranges
        return min(1.0, max(0.0, (largest - low + 1) / (high - low + 1)))

    def grid(self) -> tuple[Size, ...]:
        """Return all padded sizes of one range, or combinations of selected padded sizes of several ranges.

        The sizes are in ascending order. `_some` selects the sizes of each of several ranges.
        """
        columns = [self.paddings(place) for place in range(len(self.ranges))]
        return tuple(product(*(columns if len(columns) == 1 else map(_some, columns))))

    def paddings(self, place: int = 0) -> tuple[int, ...]:
        """Return all padded sizes of the range with the index `place`, in ascending order."""
        if self.sizes:
            return tuple(sorted({self._padded(size[place]) for size in self.sizes}))
        low, high = self.ranges[place]
        return tuple(sorted({self._padded(size) for size in range(low, high + 1)}))

    def _padded(self, size: int) -> int:
        return -(-size // self.pad_to) * self.pad_to


def _some(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first size, the last size, and up to five sizes for each power of two.

    A size belongs to the largest power of two that divides it.
    """
    by_power: dict[int, list[int]] = {}
    for size in sizes:
        by_power.setdefault(size & -size, []).append(size)
    chosen = {sizes[0], sizes[-1]}
    for alike in by_power.values():
        chosen.update(alike[place * (len(alike) - 1) // 4] for place in range(5))
    return tuple(sorted(chosen))


def load_distribution(job: Job) -> SizeDistribution:
    """Return the distribution of a job's sample sizes. Raises UsageError for a file without valid sizes."""
    ranges = size_ranges(job)
    if not job.samples.sizes:
        return SizeDistribution(ranges, pad_to=job.samples.pad_to)
    counts: Counter[Size] = Counter()
    clipped = 0
    for size, count in _read(Path(job.samples.sizes), len(ranges)):
        inside = tuple(min(max(one, low), high) for one, (low, high) in zip(size, ranges, strict=True))
        counts[inside] += count
        clipped += count * (inside != size)
    if not counts:
        raise UsageError(f"--sizes {job.samples.sizes}: the file has no sizes; write one sample in a line")
    sizes = tuple(sorted(counts))
    return SizeDistribution(
        ranges, sizes, tuple(accumulate(counts[s] for s in sizes)), clipped, job.samples.pad_to
    )


def _read(path: Path, columns: int) -> Iterator[tuple[Size, int]]:
    """Yield sizes and their counts from a folder of the library datasets, a numpy file, or a text file."""
    if path.is_dir():
        yield from _from_dataset(path, columns)
    elif path.suffix == ".npy":
        yield from _from_array(path, columns)
    else:
        yield from _from_lines(path, columns)


def _from_dataset(path: Path, columns: int) -> Iterator[tuple[Size, int]]:
    """Yield the length of each sample in all splits of a dataset from `save_to_disk`, with a count of 1."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(
            f"--sizes {path}: datasets is not installed, which reads this folder; install it, or write the "
            "lengths into a text file, one in a line"
        ) from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # its formats raise various errors
        reason = " ".join(str(error).split())[:100]
        raise UsageError(f"--sizes {path}: is no folder of save_to_disk ({reason}); name one") from None
    for split in loaded.values() if isinstance(loaded, dict) else (loaded,):
        key = next((key for key in _KEYS if key in split.column_names), None)
        if key is None or columns != 1:
            raise UsageError(
                f"--sizes {path}: needs one range, and a column {' or '.join(_KEYS)}; it has "
                f"{', '.join(split.column_names[:8])}"
            )
        for value in split[key]:
            length = value if isinstance(value, int) else len(value)
            yield (max(1, length),), 1


def _from_array(path: Path, columns: int) -> Iterator[tuple[Size, int]]:
    """Yield the size of each sample in a numpy file, a number or a row, with a count of 1."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        raise UsageError(
            f"--sizes {path}: numpy is not installed, which reads this file; install it"
        ) from None
    try:
        with open_regular(path, MOST_BYTES):
            values = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # its parsers of the header raise various errors
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:100]
        raise UsageError(
            f"--sizes {path}: cannot be read ({reason}); give an array of whole numbers"
        ) from None
    if not isinstance(values, numpy.ndarray) or values.ndim == 0:
        raise UsageError(f"--sizes {path}: holds no row of sizes; give an array of whole numbers")
    shape = (-1,) if values.ndim == 1 and columns == 1 else (len(values), columns)
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2) or values.size != len(values) * columns:
        raise UsageError(
            f"--sizes {path}: expected whole numbers, {columns} for each sample, got {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    for row in values.reshape(shape).tolist():
        size = (row,) if isinstance(row, int) else tuple(row)
        if min(size) < 1:
            raise UsageError(f"--sizes {path}: has a size of {min(size)}; give sizes from 1")
        yield size, 1


def _from_lines(path: Path, columns: int) -> Iterator[tuple[Size, int]]:
    """Yield sizes and their counts from the lines of a file.

    A line has numbers, or a JSON object with a length or tokens.
    """
    try:
        with open_regular(path, MOST_BYTES) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                size = _from_line(line.decode(), number, columns, path)
                if size is not None:
                    yield size
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise UsageError(f"--sizes {path}: cannot be read ({reason}); give a text file of sizes") from None


def _from_line(line: str, number: int, columns: int, path: Path) -> tuple[Size, int] | None:
    """Return the size and count in a line, or None if the line has no size.

    Empty lines, comments and the columns' names have no size. Raises UsageError that does not quote the line:
    a data file may have named any file.
    """
    text = line.partition("#")[0].strip()
    if not text:
        return None
    numbers = _from_json(text) if text.startswith("{") else _from_text(text)
    if numbers is None or len(numbers) not in (columns, columns + 1) or min(numbers) < 1:
        if number == 1 and numbers is None:  # the names of columns
            return None
        expected = "one size" if columns == 1 else f"{columns} sizes"
        raise UsageError(
            f"--sizes {path}, line {number}: expected {expected} of a sample and perhaps a count"
        )
    return numbers[:columns], (numbers[columns] if len(numbers) > columns else 1)


def _from_text(text: str) -> Size | None:
    fields = text.replace(",", " ").replace("x", " ").replace(";", " ").split()
    return tuple(map(int, fields)) if all(f.isdecimal() and len(f) < 19 for f in fields) else None


def _from_json(text: str) -> Size | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = next((row[key] for key in _KEYS if key in row), None)
    if isinstance(value, list):
        return (len(value),)
    return (value,) if type(value) is int else None


def draw_batches(
    job: Job, sizes: SizeDistribution, batch: int, sequence: int, count: int
) -> tuple[BatchShape, ...]:
    """Draw the shapes of the first `count` batches of a run.

    The job's seed and `sequence` determine the run's batches. With `Batching.TOKENS`, `batch` is the largest
    number of tokens in a batch, else the number of samples.
    """
    random = Random(f"{job.samples.seed}:{sequence}")
    draws = {
        Batching.PADDED: _padded,
        Batching.GROUPED: _grouped,
        Batching.TOKENS: _by_tokens,
        Batching.PACKED: _packed,
        Batching.SCALED: _scaled,
    }
    batches = draws[job.samples.batching](sizes, batch, random, job.samples.run_steps * job.loop.accumulate)
    return tuple(shape for shape, _ in zip(batches, range(count), strict=False))


def _padded(sizes: SizeDistribution, batch: int, random: Random, total: int) -> Iterator[BatchShape]:
    while True:
        yield BatchShape(batch, sizes.draw_largest(random, batch))


def _scaled(sizes: SizeDistribution, batch: int, random: Random, total: int) -> Iterator[BatchShape]:
    while True:
        yield BatchShape(batch, sizes.pad([sizes.draw(random)]))


def _packed(sizes: SizeDistribution, batch: int, random: Random, total: int) -> Iterator[BatchShape]:
    while True:
        yield BatchShape(batch, sizes.pad([tuple(high for _, high in sizes.ranges)]))


def _grouped(sizes: SizeDistribution, batch: int, random: Random, total: int) -> Iterator[BatchShape]:
    """Yield batches of samples of similar sizes, as transformers' group_by_length makes them.

    Samples are drawn in megabatches, each sorted in descending order of size and cut into batches. The first
    batch is padded to the largest sample of the run.
    """
    first = sizes.draw_largest(random, total * batch)
    megabatch = min(MEGABATCH, max(1, total // 4))
    while True:
        drawn = sorted((sizes.draw(random) for _ in range(megabatch * batch)), reverse=True)
        for start in range(0, len(drawn), batch):
            shape = sizes.pad(drawn[start : start + batch])
            yield BatchShape(batch, tuple(map(max, shape, first)) if first else shape)
            first = ()


def _by_tokens(sizes: SizeDistribution, batch: int, random: Random, total: int) -> Iterator[BatchShape]:
    """Yield batches with at most `batch` padded tokens, or of a single sample that has more tokens.

    Samples are added as long as the batch does not exceed the limit.
    """
    taken: list[Size] = []
    while True:
        taken.append(sizes.draw(random))
        if len(taken) * max(sizes.pad(taken)) > batch and len(taken) > 1:
            yield BatchShape(len(taken) - 1, sizes.pad(taken[:-1]))
            taken = taken[-1:]


def check_sizes(job: Job) -> None:
    """Raise UsageError if options about sizes are given though all samples have one size."""
    if size_ranges(job):
        return
    given: Iterable[str] = (
        f"--{name.replace('_', '-')}"
        for name in ("sizes", "batching", "pad_to", "run_steps", "seed")
        if not job.has_default(name)
    )
    for flag in given:
        raise UsageError(
            f"{flag}: all samples have one size; give a range, such as --input input_ids=16..1024:int64"
        )


def require_one_size(job: Job) -> None:
    """Raise UsageError if a job's samples vary in size, or if the job has options about sizes."""
    check_sizes(job)
    specs = (*job.samples.inputs, *([job.samples.target] if job.samples.target else []), *job.samples.targets)
    ranged = next((spec for spec in specs if spec.smallest), None)
    if ranged is not None:
        one = replace(ranged, smallest=())
        raise UsageError(
            f"--input {ranged}: samples of many sizes are planned by max-batch, estimate, explain, advise, "
            f"gpus and sweep, by their default method; give one size here, such as {one}"
        )
