"""How values come about: operators with their arguments, run on the CPU when what they give is asked for.

A storage's contents are told by a recipe. A recipe refers to the contents that its arguments had when it was
written down; a write in place makes new contents, so that older recipes still find what they saw.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.capture.values.nms import nms
from planner.errors import BatchTooLargeError

MOST_BYTES = 2**31  # of one storage whose values are asked for
# Parts of names of operators whose results are drawn: what weights are multiplied with.
DRAWN = (
    *("convolution", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "addmv", "aten::mv"),
    *("scaled_dot_product", "_grouped_mm", "_cudnn_rnn", "roi_align"),
)
_UNBOUNDED = ("log", "div", "reciprocal", "exp", "sqrt", "pow")  # may leave the finite numbers
_MADE_HERE: dict[str, Callable[..., Any]] = {"torchvision::nms": nms}  # no CPU kernel beside every torch


@dataclass(slots=True, weakref_slot=True, eq=False)
class Contents:
    """What a storage holds: bytes once they are asked for; until then how they come about."""

    size_bytes: int
    dtype: torch.dtype
    recipe: "Recipe | None" = None  # None: nobody knows, so they are drawn
    storage: torch.UntypedStorage | None = None
    by_chance: bool = False  # the values, once they are there, come from some that were drawn


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an operator got it: a view of contents that a later write leaves alone."""

    contents: Contents
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True, eq=False)
class Recipe:
    """An operator with its arguments, and the contents that running it tells."""

    func: Any
    leaves: list[Any]  # meta tensors as `Ref`
    spec: TreeSpec
    drawn: bool
    written: list[tuple[Contents, "weakref.ref[Contents]"]] = field(default_factory=list)  # before, after
    made: list[tuple[int, Ref, "weakref.ref[Contents]"]] = field(default_factory=list)

    @property
    def needed(self) -> list[Contents]:
        return [] if self.drawn else [leaf.contents for leaf in self.leaves if isinstance(leaf, Ref)]


def compute(recipe: Recipe) -> tuple[Any, dict[int, torch.UntypedStorage]]:
    """What the operator gives on the CPU, and its copies of what it writes, by what was there before."""
    written = {id(before) for before, _ in recipe.written}
    if not written:
        written = {id(ref.contents) for ref in written_to(recipe.func, *_arguments(recipe, lambda ref: ref))}
    copies: dict[int, torch.UntypedStorage] = {}

    def real(ref: Ref) -> Tensor:
        storage, key = ref.contents.storage, id(ref.contents)
        assert storage is not None
        if key in written:
            storage = copies.setdefault(key, storage.clone())  # type: ignore[no-untyped-call]
        return ref.on(storage)

    args, kwargs = _arguments(recipe, real)
    kernel = _MADE_HERE.get(recipe.func._schema.name, recipe.func)
    return kernel(*args, **kwargs), copies


def fill(recipe: Recipe) -> None:
    """Run a recipe and hand its values to the contents that still live; what the CPU cannot run is left."""
    if recipe.drawn:
        return
    try:
        out, copies = compute(recipe)
    except (NotImplementedError, RuntimeError, IndexError):
        return
    by_chance = any(contents.by_chance for contents in recipe.needed)
    for before, reference in recipe.written:
        after = reference()
        if after is not None:
            after.storage, after.by_chance = copies[id(before)], by_chance or before.by_chance
    results = tree_flatten(out)[0]
    for index, layout, reference in recipe.made:
        contents = reference()
        if contents is not None:
            result = _finite(recipe.func, results[index]) if by_chance else results[index]
            contents.storage, contents.by_chance = _laid_out(result, layout, contents.size_bytes), by_chance


def _finite(func: Any, drawn: Tensor) -> Tensor:
    """Numbers of chance without NaN, and without infinities where they are out of an operator's domain.

    Training goes well in the run that is planned: what checks for them finds none.
    """
    if not drawn.dtype.is_floating_point:
        return drawn
    if any(name in func._schema.name for name in _UNBOUNDED):
        return drawn.nan_to_num()
    return drawn.nan_to_num(posinf=float("inf"), neginf=float("-inf"))


def _laid_out(real: Tensor, layout: Ref, size_bytes: int) -> torch.UntypedStorage:
    """A storage with these values where the tensor on meta has them."""
    storage = real.untyped_storage()
    as_on_meta = real.stride() == layout.stride and real.storage_offset() == layout.offset
    if not as_on_meta or storage.nbytes() != size_bytes:
        storage = torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]
        layout.on(storage).copy_(real)
    return storage


def draw(contents: Contents) -> torch.UntypedStorage:
    """Normal floats; whole numbers are 0, which is an index into anything."""
    if contents.size_bytes > MOST_BYTES:
        raise BatchTooLargeError(
            f"values of a tensor of {contents.size_bytes / 2**20:,.0f} MiB are read, more than the "
            f"{MOST_BYTES // 2**20:,} MiB that are drawn at random on the CPU"
        )
    contents.by_chance = True
    count = contents.size_bytes // contents.dtype.itemsize
    if contents.dtype.is_floating_point:
        return torch.randn(count).to(contents.dtype).untyped_storage()
    return torch.zeros(count, dtype=contents.dtype).untyped_storage()


def layout_of(ref: Ref) -> Ref:
    """The layout alone: a recipe must not keep what it makes alive."""
    return Ref(Contents(0, ref.dtype), ref.dtype, ref.size, ref.stride, ref.offset)


def _arguments(recipe: Recipe, real: Callable[[Ref], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves = [real(leaf) if isinstance(leaf, Ref) else leaf for leaf in recipe.leaves]
    args, kwargs = tree_unflatten(leaves, recipe.spec)
    return args, kwargs


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors among the arguments that the operator writes to."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            several = value if isinstance(value, list | tuple) else (value,)
            found.extend(one for one in several if isinstance(one, Tensor | Ref))
    return found
