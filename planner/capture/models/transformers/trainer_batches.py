"""Batches for a Trainer of transformers or TRL: copies of the longest of its samples, by its own collator."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from planner.errors import ModelError

MOST_SAMPLES = 1000  # in which the longest is sought
_DEEPEST = 4  # lists in lists that are measured


def longest_sample(trainer: Any, dataset: Any, what: str, name: str) -> tuple[Any, Any]:
    """Return the longest of a dataset's samples, put together once and twice by the trainer's collator.

    `what` is the dataset's attribute and `name` the job's, for messages. Raises ModelError without a sample.
    """
    if dataset is None:
        raise ModelError(f"{name}: its trainer has no {what}; give it one with a sample")
    longest = max(first_samples(dataset), key=_length, default=None)
    if longest is None:
        raise ModelError(f"{name}: the {what} of its trainer is empty; give it a sample")
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
    return collate([longest]), collate([longest, longest])


def first_samples(dataset: Any) -> Iterator[Any]:
    """Yield the first samples of a dataset as torch's DataLoader reads it: by index, or streamed."""
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_index:
        return islice(iter(dataset), MOST_SAMPLES)
    return (dataset[index] for index in range(min(len(dataset), MOST_SAMPLES)))


def _length(sample: Any) -> tuple[int, int]:
    """Return how many numbers and how many letters a sample has; texts count among equals alone."""
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
    """Return the number of elements of a tensor, an array or an image; 1 of a number, 0 of anything else."""
    for name in ("shape", "size"):  # of tensors and arrays; of PIL's images
        dims = getattr(value, name, None)
        if isinstance(dims, tuple) and all(isinstance(one, int) for one in dims):
            return prod(dims)
    return int(isinstance(value, int | float))


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(one)


class Batches:
    """Batches of copies of one sample, as a loader of accelerate yields them: on the GPU."""

    def __init__(self, trainer: Any, samples: tuple[Any, Any], batch: int, length: int, count: int) -> None:
        """`length` is what the trainer is told, `count` how many batches there are."""
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
    """Return the collator's result for `batch` samples, from its results for one and for two.

    A dimension of a tensor, or a list, that grows by so much a sample has rows of the first sample, or of
    halves as TRL's: chosen texts, then rejected ones.
    """
    if isinstance(two, Mapping):
        return {name: _repeated(one[name], value, batch) for name, value in two.items()}
    if isinstance(two, list | tuple):
        grows = len(two) != len(one)
        parts: Iterable[Any] = [*one] * batch if grows else map(_repeated, one, two, [batch] * len(two))
        return type(two)(parts) if type(two) in (list, tuple) else type(two)(*parts)
    if not isinstance(two, Tensor):
        return two
    for dim in [dim for dim in range(two.dim()) if one.shape[dim] != two.shape[dim]]:
        one = one.repeat_interleave(batch, dim)
    return one
