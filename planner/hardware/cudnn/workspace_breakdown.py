"""Infer the parts of a convolution's workspace from the size of the workspace.

A library returns the size of a workspace, not its contents. But the sizes of tensors are known, and kernels
store few other things, which are the terms of this module. cuDNN's answers for some thousands of convolutions
and published logs (benchmarks/published/README.md, `cudnn_workspaces.csv`) show these sizes; the purpose of a
term is our inference. If terms add up to the workspace, except for `NARROW_BYTES`, they are named. Otherwise
copies are named if they leave little of the workspace, and the rest is called unnamed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import compress, product
from math import prod

from msgspec import Struct

from planner.program import Alloc, Convolution, ConvWorkspace, Direction, Trace

NARROW_BYTES = 2048  # unexplained rest: cuDNN aligns the parts of a workspace and adds small tables
_COPIES_OVER_REST = 10_000  # ratio of large copies to such a rest: tables grow with the kernel's steps
_TILE_REST_BYTES, _COUNTER_BYTES = 512, 4  # rest in all, and for each tile: its blocks wait for others
_LARGEST_LOOSE_SHARE = 0.02  # rest as a share of a workspace of copies: tables for strides and borders
_LARGEST_UNNAMED_SHARE = 0.25  # the same if kernels mostly copy
_TILE_BYTES = 4 * 128 * 128  # the sums of one block of threads
_MOST_TILES, _MOST_SUMS = 1024, 128
_SUM_OVER_REST = 32  # least ratio of a sum to the rest: any size is a multiple of small weights and a rest
_IMAGE_TIMES = (1, 2, 4, 8)  # sums for each image
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Term(StrEnum):
    """The purpose of a part of a workspace, such as a copy of an operand, partial sums or an FFT."""

    COPY = "copy"  # of x, w or y: in another layout
    FILLED = "filled copy"  # the same, at least 1.5 times as large: channels are filled up to 8 or 16 bytes
    FLOAT32 = "float32 copy"  # of the result, before it is rounded, or with channels in whole tiles
    SUMS = "partial sums"  # of the result in float32, most often the weights' gradient: the sum is split
    TILES = "partial sums in tiles"  # the same, 128 x 128 numbers at a time
    FILTERS = "Winograd filters"  # transformed weights alone; tiles of x and y stay in the kernel
    WINOGRAD = "Winograd"  # transformed weights, inputs and outputs
    FFT = "FFT"
    GEMM = "matrix of patches"  # with a column for each patch under the kernel: explicit GEMM
    IMAGES = "image-wise sums"  # a gradient of the weights for each image: the fitted term without a library
    UNNAMED = "unnamed"


class Part(Struct, frozen=True):
    """A part of a workspace, with its purpose, its tensor and its size."""

    term: Term
    of: str  # x, w, y, or "" if it does not belong to one tensor
    times: int  # number of equal buffers that the part consists of
    size_bytes: int  # of all these buffers together


Parts = tuple[Part, ...]


class LayerWorkspace(Struct, frozen=True):
    """The workspace of one convolution in one direction, counted once for all runs of the convolution."""

    module: str  # qualified; "" outside of modules
    direction: Direction  # for cuDNN: the forward pass of a transposed convolution is a data gradient
    size_bytes: int  # as requested
    searched: bool  # whether it is the largest workspace of all engines, allocated while they are timed
    engine: int | None  # None if stored answers or the fitted term give the size
    notes: str
    parts: Parts  # add up to `size_bytes`


def layer_workspaces(trace: Trace) -> tuple[LayerWorkspace, ...]:
    """Return the distinct workspaces of a trace's convolutions, the largest first.

    Returns () if the trace was captured without details.
    """
    rows = {row.block: row for row in trace.conv_workspaces}
    births = [event for event in trace.events if isinstance(event, Alloc) and event.block in rows]
    layers = dict.fromkeys(_of_layer(trace, birth, rows[birth.block]) for birth in births)
    return tuple(sorted(layers, key=lambda layer: -layer.size_bytes))


def _of_layer(trace: Trace, birth: Alloc, row: ConvWorkspace) -> LayerWorkspace:
    size_bytes, engine = birth.size_bytes, row.engine
    if engine < 0 and size_bytes == row.x[0] * 4 * prod(row.w):  # the term of published runs
        parts: Parts = (Part(Term.IMAGES, "w", row.x[0], size_bytes),)
    else:
        parts = name_parts(row.convolution, tuple(row.notes.split(", ")), size_bytes)
    module, known_engine = trace.sites[birth.site].module, None if engine < 0 else engine
    return LayerWorkspace(module, row.direction, size_bytes, row.searched, known_engine, row.notes, parts)


def name_parts(query: Convolution, notes: tuple[str, ...], workspace_bytes: int) -> Parts:
    """Return parts that add up to `workspace_bytes`, the largest first, with an unnamed rest last.

    `notes` are the notes of cuDNN's engine. x, w and y are the input, the weights and the output of the
    convolution, or their gradients.
    """
    if workspace_bytes <= 0:
        return ()
    transforms = [name for name in ("Winograd", "FFT") if any(name in note for note in notes)]
    parts = _exact(query, transforms, workspace_bytes)
    if not parts and not transforms:
        parts = _loose(query, workspace_bytes)
    left_bytes = workspace_bytes - _bytes_of(parts)
    rest = (Part(Term.UNNAMED, "", 1, left_bytes),) if left_bytes else ()
    return (*sorted(parts, key=lambda part: -part.size_bytes), *rest)


def _exact(query: Convolution, transforms: list[str], workspace_bytes: int) -> Parts:
    """Return parts that leave at most a small rest of the workspace unexplained, or () if none do."""
    for part in _whole(query, transforms):
        if 0 <= workspace_bytes - part.size_bytes <= _TILE_REST_BYTES:
            return (part,)
    copies = list(_copies(query))
    kinds: tuple[_ExtraParts, ...] = (_filters,) if transforms == ["Winograd"] else ()
    if not transforms:
        kinds = (_sums, _tiles)
        copied = _almost(copies, workspace_bytes, max(NARROW_BYTES, workspace_bytes // _COPIES_OVER_REST))
        if copied is not None:
            return copied
    for extra_parts, copied in product(kinds, copies):
        more = extra_parts(query, workspace_bytes - _bytes_of(copied))
        if more:
            return (*copied, *more)
    return ()


def _loose(query: Convolution, workspace_bytes: int) -> Parts:
    """Return copies of operands that leave at most a limited share of the workspace, or () if none do."""
    shares = [_LARGEST_LOOSE_SHARE]
    if not query.channels_last or _ELEMENT_BYTES[query.dtype] != 2:  # else tensor cores read without copies
        shares.append(_LARGEST_UNNAMED_SHARE)
    splits = (_almost(_copies(query), workspace_bytes, share * workspace_bytes) for share in shares)
    return next(filter(None, splits), ())


def _almost(copies: Iterable[Parts], workspace_bytes: int, rest_bytes: float) -> Parts | None:
    """Return the first of `copies` that leaves at most `rest_bytes` of the workspace unexplained, or None."""
    return next((one for one in copies if 0 <= workspace_bytes - _bytes_of(one) <= rest_bytes), None)


def _bytes_of(parts: Parts) -> int:
    return sum(part.size_bytes for part in parts)


# ---- parts in addition to copies: () if the term does not apply

_ExtraParts = Callable[[Convolution, int], Parts]


def _filters(query: Convolution, left_bytes: int) -> Parts:
    """Return the Winograd filters if they explain the remaining bytes except a small rest, else ().

    The filters have 25 numbers of 4 bytes for each pair of channels, and one number for each channel of the
    result.
    """
    rows, channels = query.w[0], query.w[1]
    size_bytes = 100 * rows * channels + 4 * (rows if query.direction is Direction.FORWARD else channels)
    fits = 0 <= left_bytes - size_bytes <= NARROW_BYTES
    return (Part(Term.FILTERS, "", 1, size_bytes),) if fits else ()


def _sums(query: Convolution, left_bytes: int) -> Parts:
    """Return partial sums of the result if they explain the remaining bytes except a small rest, else ().

    The channels of a sum are unchanged, filled up, or in whole tiles. In a tile, the channels of w are next
    to each other.
    """
    result = _result(query)
    rows, channels, *extents = getattr(query, result)
    sizes = [4 * rows * _up(channels, step) * prod(extents) for step in (1, 4, 8, 64, 128)]
    if result == "w":
        sizes.append(4 * rows * _up(channels * prod(extents), 128))
    for size_bytes in sizes:
        times, rest_bytes = divmod(left_bytes, size_bytes)
        most_rest_bytes = min(NARROW_BYTES, size_bytes // _SUM_OVER_REST)
        if 1 <= times <= _MOST_SUMS and rest_bytes <= most_rest_bytes:
            return (Part(Term.SUMS, result, times, times * size_bytes),)
    return ()


def _tiles(query: Convolution, left_bytes: int) -> Parts:
    times, rest_bytes = divmod(left_bytes, _TILE_BYTES)
    if not 1 <= times <= _MOST_TILES or rest_bytes > _TILE_REST_BYTES + _COUNTER_BYTES * times:
        return ()
    return (Part(Term.TILES, "", times, times * _TILE_BYTES),)


# ---- copies


def _copies(query: Convolution) -> Iterator[Parts]:
    """Yield the workspace parts for each choice of tensors to copy, the likeliest choice first.

    A kernel for channels last copies most contiguous tensors, so the choices with most copies come first for
    contiguous tensors, and the choices with fewest copies for channels_last. Inputs come before the result,
    and a gradient of the weights last, since its partial sums are likelier.
    """
    result = _result(query)
    sign = 1 if query.channels_last else -1
    order = sorted("xyw", key=lambda letter: (letter == result, letter == "w"))
    chosen = [tuple(compress(order, mask)) for mask in product((True, False), repeat=3)]
    chosen.sort(key=lambda letters: (sign * len(set(letters) - {"w"}), result == "w" and "w" in letters))
    for letters in chosen:
        yield from _sized(query, letters, {})
    if _ELEMENT_BYTES[query.dtype] <= 4 and result != "w":
        for letters in chosen:
            yield from _sized(query, letters, {result: _float32_sizes(query, result)})


def _sized(
    query: Convolution, letters: tuple[str, ...], float32: Mapping[str, tuple[int, ...]]
) -> Iterator[Parts]:
    """Yield one copy of each tensor in `letters` and `float32`, for each combination of padded sizes."""
    kinds = [(Term.COPY, letter, _sizes(query, letter)) for letter in letters]
    kinds += [(Term.FLOAT32, letter, sizes) for letter, sizes in float32.items()]
    for chosen in product(*(sizes for _, _, sizes in kinds)):
        yield tuple(
            Part(Term.FILLED if term is Term.COPY and 2 * size >= 3 * sizes[-1] else term, of, 1, size)
            for (term, of, sizes), size in zip(kinds, chosen, strict=True)
        )


def _sizes(query: Convolution, letter: str) -> tuple[int, ...]:
    """Return the possible sizes of a tensor's copy in bytes.

    The last size has no padding. The channels, of the tensor or of each group, are padded to multiples of 16
    or of 8 bytes, or not padded.
    """
    element_bytes = _ELEMENT_BYTES[query.dtype]
    sizes: tuple[int, ...] = getattr(query, letter)
    groups = 1 if letter == "w" else max(1, query.x[1] // max(1, query.w[1]))
    sizes_bytes: list[int] = []
    for fill_bytes in (16, 8, element_bytes):
        step = max(1, fill_bytes // element_bytes)
        for parts in (1, groups):
            channels = parts * _up(sizes[1] // parts, step)
            rows = _up(sizes[0], step) if letter == "w" else sizes[0]
            sizes_bytes.append(element_bytes * rows * channels * prod(sizes[2:]))
    return tuple(dict.fromkeys(sizes_bytes))


def _float32_sizes(query: Convolution, letter: str) -> tuple[int, ...]:
    """Return the possible sizes in bytes of a result in float32.

    Possible sizes of a copy are excluded. Channels are unchanged or filled up for results in half precision,
    or in whole tiles.
    """
    sizes: tuple[int, ...] = getattr(query, letter)
    steps = (1, 8, 64, 128) if _ELEMENT_BYTES[query.dtype] == 2 else (64, 128)
    spread = 4 * sizes[0] * prod(sizes[2:])
    candidates = dict.fromkeys(spread * _up(sizes[1], step) for step in steps)
    return tuple(size for size in candidates if size not in _sizes(query, letter))


def _result(query: Convolution) -> str:
    return {Direction.FORWARD: "y", Direction.DATA: "x", Direction.WEIGHT: "w"}[query.direction]


# ---- terms that are the whole workspace: benchmarks/published/README.md lists the rows that they fit


def _whole(query: Convolution, transforms: list[str]) -> Iterator[Part]:
    """Yield each part that may fill a whole workspace by itself.

    The parts are image-wise sums, GEMM, Winograd and FFT. A matrix of patches is not yielded for pointwise
    kernels, for which it would be a copy. Winograd and FFT apply to kernels of 3x3 and 5x5 with a stride of
    1.
    """
    kernel = query.w[2:]
    images_bytes = 4 * query.x[0] * prod(query.w)
    if query.direction is Direction.WEIGHT and images_bytes:
        for times in _IMAGE_TIMES:
            yield Part(Term.IMAGES, "w", times * query.x[0], times * images_bytes)
    made = query.x if query.direction is Direction.DATA else query.y
    if prod(kernel) > 1:
        columns = query.w[1] * prod(kernel) * prod((made[0], *made[2:]))
        yield Part(Term.GEMM, "", 1, _ELEMENT_BYTES[query.dtype] * columns)
    if len(kernel) != 2 or kernel not in ((3, 3), (5, 5)) or set(query.stride) != {1}:
        return
    channels = query.w[0] * query.w[1], query.w[0] + query.w[1]
    if "Winograd" in transforms or not transforms:  # no note names it if cuBLASLt multiplies the tiles
        size, tile = (6, 4) if kernel == (3, 3) else (13, 9)
        images = _up(made[0], 16) * prod(-(-extent // tile) for extent in made[2:])
        yield Part(Term.WINOGRAD, "", 1, 4 * size**2 * (channels[0] + channels[1] * images))
    if "FFT" in transforms:
        tiles = 1 if all(extent + kernel[0] - 1 <= 32 for extent in made[2:]) else 2
        images = min(made[0], 32) * tiles
        for more in (0, 24576 * tiles):
            yield Part(Term.FFT, "", 1, 4352 * (channels[0] + channels[1] * images) + more)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
