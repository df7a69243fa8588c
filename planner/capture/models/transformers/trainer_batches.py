"""Make batches for a Trainer of transformers or TRL.

They are copies of its longest sample, made by its own collator.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from planner.errors import ModelError

MOST_SAMPLES = 1000  # the longest sample is sought among this many
_DEEPEST = 4  # nested lists are measured to this depth


def longest_sample(trainer: Any, dataset: Any, what: str, name: str) -> tuple[Any, Any]:
    """Return a batch of a dataset's longest sample, and a batch of two copies of this sample.

    The trainer's collator makes both batches. The sample is the longest of the dataset's first
    `MOST_SAMPLES`. `what` is the dataset's attribute and `name` is the job's name, for messages. Raises
    ModelError if there is no sample.
    """
    if dataset is None:
        raise ModelError(f"{name}: its trainer has no {what}; give it one with a sample")
    longest = max(first_samples(dataset), key=_length, default=None)
    if longest is None:
        raise ModelError(f"{name}: the {what} of its trainer is empty; give it a sample")
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
    return collate([longest]), collate([longest, longest])


def first_samples(dataset: Any) -> Iterator[Any]:
    """Return an iterator over the first `MOST_SAMPLES` samples of a dataset.

    Samples are read by index if the dataset has indices and a length, else streamed, as DataLoader does.
    """
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_index:
        return islice(iter(dataset), MOST_SAMPLES)
    return (dataset[index] for index in range(min(len(dataset), MOST_SAMPLES)))


def _length(sample: Any) -> tuple[int, int]:
    """Return a sample's length, as counts of its numbers and of its characters."""
    return _count(sample, _numbers), _count(sample, lambda leaf: len(leaf) if isinstance(leaf, str) else 0)


def _count(value: Any, measure: Callable[[Any], int], depth: int = 0) -> int:
    if isinstance(value, Mapping):
        return _count([*value.values()], measure, depth)
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        first = value[0] if value else None
        if isinstance(first, int | float):  # a list of numbers
            return len(value) if measure is _numbers else 0
        return sum(_count(one, measure, depth + 1) for one in value)
    return measure(value)


def _numbers(value: Any) -> int:
    """Return the count of the numbers that a value holds.

    A tensor or array has its elements, an image its pixels, a number 1, anything else 0.
    """
    for name in ("shape", "size"):  # `shape` of tensors and arrays, `size` of PIL's images
        dims = getattr(value, name, None)
        if isinstance(dims, tuple) and all(isinstance(one, int) for one in dims):
            return prod(dims)
    return int(isinstance(value, int | float))


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested batch. Mappings, lists and tuples are searched."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(one)


class Batches:
    """A data loader whose batches are copies of one sample.

    Batches are on the GPU, as from accelerate's loader.
    """

    def __init__(self, trainer: Any, samples: tuple[Any, Any], batch: int, length: int, count: int) -> None:
        """Set up a loader of `count` batches of `batch` samples.

        The loader reports the length `length`. `samples` are the two batches of `longest_sample`.
        """
        self.dataset = range(batch * length)
        self.batch_size = batch
        self._trainer, self._samples = trainer, samples
        self._length, self._count = length, count

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        for _ in range(self._count):
            yield send_to_device(_repeated(*self._samples, self.batch_size), self._trainer.args.device)


def _repeated(one: Any, two: Any, batch: int) -> Any:
    """Return the collator's output for `batch` equal samples.

    `one` and `two` are its outputs for one and for two samples. Dimensions of tensors, and lists, whose sizes
    differ between the two outputs grow with the batch. Each of their rows is repeated `batch` times in a row,
    since TRL's batches hold all chosen texts before all rejected texts.
    """
    if isinstance(two, Mapping):
        return {name: _repeated(one[name], value, batch) for name, value in two.items()}
    if isinstance(two, list | tuple):
        if len(two) != len(one):
            return type(two)(row for row in one for _ in range(batch))
        parts = map(_repeated, one, two, [batch] * len(two))
        return type(two)(parts) if type(two) in (list, tuple) else type(two)(*parts)
    if not isinstance(two, Tensor):
        return two
    for dim in [dim for dim in range(two.dim()) if one.shape[dim] != two.shape[dim]]:
        one = one.repeat_interleave(batch, dim)
    return one
