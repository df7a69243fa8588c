"""The parts of a convolution's workspace, by its size alone.

A library returns how many bytes it takes, not why. But the sizes of tensors are known, and what kernels put
beside them follows few patterns, which stand here as terms. cuDNN's answers for some thousands of
convolutions and published logs (benchmarks/published/README.md, `cudnn_workspaces.csv`) show them; what a
term is for is our inference. Where terms add up to the workspace, but for `NARROW_BYTES`, they are named;
else copies are, if little is left beside them, and what is left is called unnamed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import compress, product
from math import prod

from msgspec import Struct

from planner.program import Alloc, Convolution, ConvWorkspace, Direction, Trace

NARROW_BYTES = 2048  # cuDNN aligns the parts of a workspace and keeps small tables beside them
_COPIES_OVER_BESIDE = 10_000  # the same for large copies: tables grow with the kernel's steps
_BESIDE_TILES_BYTES, _COUNTER_BYTES = 512, 4  # in all; for each tile, whose blocks wait for each other
_LARGEST_LOOSE_SHARE = 0.02  # of a workspace, beside copies alone: tables for strides and borders
_LARGEST_UNNAMED_SHARE = 0.25  # the same where kernels mostly copy
_TILE_BYTES = 4 * 128 * 128  # what a block of threads adds up
_MOST_TILES, _MOST_SUMS = 1024, 128
_SUM_OVER_BESIDE = 32  # at least: any size is a number of times small weights, and a little
_IMAGE_TIMES = (1, 2, 4, 8)  # sums for each image
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Term(StrEnum):
    COPY = "copy"  # of x, w or y: in another layout
    FILLED = "filled copy"  # the same, at least half as large again: channels are filled up to 8 or 16 bytes
    FLOAT32 = "float32 copy"  # of the result: more precise than it, or with channels in whole tiles
    SUMS = "partial sums"  # of the result in float32, most often the weights' gradient: the sum is split
    TILES = "partial sums in tiles"  # the same, 128 x 128 numbers at a time
    FILTERS = "Winograd filters"  # transformed weights alone; tiles of x and y stay in the kernel
    WINOGRAD = "Winograd"  # transformed weights, inputs and outputs
    FFT = "FFT"
    GEMM = "matrix of patches"  # each patch under the kernel a column: explicit GEMM
    IMAGES = "image-wise sums"  # a gradient of the weights for each image: the fitted term without a library
    UNNAMED = "unnamed"


class Part(Struct, frozen=True):
    """One term of a workspace."""

    term: Term
    of: str  # x, w, y, or "" where it is not of one tensor
    times: int
    size_bytes: int  # all times together


Parts = tuple[Part, ...]


class LayerWorkspace(Struct, frozen=True):
    """The workspace of one convolution in one direction, however often it runs."""

    module: str  # qualified; "" outside of modules
    direction: Direction  # as cuDNN sees it: the forward pass of a transposed one is a data gradient
    size_bytes: int  # as it is requested
    searched: bool  # room for the largest of all engines, while they are timed
    engine: int | None  # None where stored answers or the fitted term give it
    notes: str
    parts: Parts  # add up to `size_bytes`


def layer_workspaces(trace: Trace) -> tuple[LayerWorkspace, ...]:
    """Return each once, by falling size; none where the trace was taken without details."""
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
    """Terms that add up to the workspace, the largest first; `notes` are those of cuDNN's engine.

    x, w and y are the input, the weights and the output of the convolution, or their gradients.
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
    """Return terms with no more than `NARROW_BYTES` beside them; () where there are none."""
    for part in _whole(query, transforms):
        if 0 <= workspace_bytes - part.size_bytes <= _BESIDE_TILES_BYTES:
            return (part,)
    copies = list(_copies(query))
    kinds: tuple[_Beside, ...] = (_filters,) if transforms == ["Winograd"] else ()
    if not transforms:
        kinds = (_sums, _tiles)
        copied = _almost(copies, workspace_bytes, max(NARROW_BYTES, workspace_bytes // _COPIES_OVER_BESIDE))
        if copied is not None:
            return copied
    for beside, copied in product(kinds, copies):
        more = beside(query, workspace_bytes - _bytes_of(copied))
        if more:
            return (*copied, *more)
    return ()


def _loose(query: Convolution, workspace_bytes: int) -> Parts:
    """Return copies alone, where little is left beside them."""
    shares = [_LARGEST_LOOSE_SHARE]
    if not query.channels_last or _ELEMENT_BYTES[query.dtype] != 2:  # tensor cores read these as they are
        shares.append(_LARGEST_UNNAMED_SHARE)
    splits = (_almost(_copies(query), workspace_bytes, share * workspace_bytes) for share in shares)
    return next(filter(None, splits), ())


def _almost(copies: Iterable[Parts], workspace_bytes: int, beside_bytes: float) -> Parts | None:
    """Return the first copies that leave so much of the workspace at most; None where there are none."""
    return next((one for one in copies if 0 <= workspace_bytes - _bytes_of(one) <= beside_bytes), None)


def _bytes_of(parts: Parts) -> int:
    return sum(part.size_bytes for part in parts)


# ---- what stands beside copies: () where the term does not apply

_Beside = Callable[[Convolution, int], Parts]


def _filters(query: Convolution, left_bytes: int) -> Parts:
    """25 numbers of 4 bytes for each pair of channels, and one for each channel of the result."""
    rows, channels = query.w[0], query.w[1]
    size_bytes = 100 * rows * channels + 4 * (rows if query.direction is Direction.FORWARD else channels)
    fits = 0 <= left_bytes - size_bytes <= NARROW_BYTES
    return (Part(Term.FILTERS, "", 1, size_bytes),) if fits else ()


def _sums(query: Convolution, left_bytes: int) -> Parts:
    """Channels as they are, filled up, or in whole tiles, in which those of w stand beside each other."""
    result = _result(query)
    rows, channels, *extents = getattr(query, result)
    sizes = [4 * rows * _up(channels, step) * prod(extents) for step in (1, 4, 8, 64, 128)]
    if result == "w":
        sizes.append(4 * rows * _up(channels * prod(extents), 128))
    for size_bytes in sizes:
        times, beside_bytes = divmod(left_bytes, size_bytes)
        most_beside_bytes = min(NARROW_BYTES, size_bytes // _SUM_OVER_BESIDE)
        if 1 <= times <= _MOST_SUMS and beside_bytes <= most_beside_bytes:
            return (Part(Term.SUMS, result, times, times * size_bytes),)
    return ()


def _tiles(query: Convolution, left_bytes: int) -> Parts:
    times, beside_bytes = divmod(left_bytes, _TILE_BYTES)
    if not 1 <= times <= _MOST_TILES or beside_bytes > _BESIDE_TILES_BYTES + _COUNTER_BYTES * times:
        return ()
    return (Part(Term.TILES, "", times, times * _TILE_BYTES),)


# ---- copies


def _copies(query: Convolution) -> Iterator[Parts]:
    """Yield all choices of tensors to copy. Of contiguous ones a kernel for channels last copies most,
    so the fullest come first; in channels_last the emptiest do. Inputs come before the result, and a gradient
    of the weights last, since their partial sums are likelier.
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
    """Yield copies of these tensors, with each padding that kernels are seen to use."""
    kinds = [(Term.COPY, letter, _sizes(query, letter)) for letter in letters]
    kinds += [(Term.FLOAT32, letter, sizes) for letter, sizes in float32.items()]
    for chosen in product(*(sizes for _, _, sizes in kinds)):
        yield tuple(
            Part(Term.FILLED if term is Term.COPY and 2 * size >= 3 * sizes[-1] else term, of, 1, size)
            for (term, of, sizes), size in zip(kinds, chosen, strict=True)
        )


def _sizes(query: Convolution, letter: str) -> tuple[int, ...]:
    """Return bytes of a copy whose channels, or each group's, fill 16 bytes or 8; the last is as it is."""
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
    """Return the bytes of a result in float32, in half precision, and with channels in whole tiles."""
    sizes: tuple[int, ...] = getattr(query, letter)
    steps = (1, 8, 64, 128) if _ELEMENT_BYTES[query.dtype] == 2 else (64, 128)
    spread = 4 * sizes[0] * prod(sizes[2:])
    candidates = dict.fromkeys(spread * _up(sizes[1], step) for step in steps)
    return tuple(size for size in candidates if size not in _sizes(query, letter))


def _result(query: Convolution) -> str:
    return {Direction.FORWARD: "y", Direction.DATA: "x", Direction.WEIGHT: "w"}[query.direction]


# ---- terms that are the whole workspace: benchmarks/published/README.md lists the rows that they fit


def _whole(query: Convolution, transforms: list[str]) -> Iterator[Part]:
    """Yield parts of square kernels over images; `GEMM` not of points, where it would be a copy."""
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
    if "Winograd" in transforms or not transforms:  # no note names it where cuBLASLt multiplies the tiles
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
