"""Workspaces of embeddings, indices and sorts."""

import pytest
import torch
from torch import Tensor

from planner.capture.arguments import as_cpu_tensor
from planner.capture.workspaces.ops import Hold, Op, Release, ReleaseBeneath
from planner.capture.workspaces.registry import RULES
from planner.capture.workspaces.tensor.indexing import _index, _index_put, _masked_select
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from planner.program import OpKind
from planner.program.target import Target
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace
from tests.helpers.workspaces import REST, aten, index, meta, steps

CHIP = Target.for_capability(AMPERE)


def wrapped(size: int) -> tuple[Op, ...]:
    return Hold(size), Hold(size), ReleaseBeneath(1)


def blocks(ops: tuple[Op, ...]) -> str:
    """Return the blocks that ops make (+bytes) and free before the kernel returns (-bytes), in order."""
    held, story = [], []
    for op in ops:
        if isinstance(op, int):
            story += [f"+{op}", f"-{op}"]
        elif op.kind is OpKind.HOLD:
            held.append(op.number)
            story.append(f"+{op.number}")
        elif op.kind in (OpKind.RELEASE, OpKind.RELEASE_BENEATH):
            story.append(f"-{held.pop(-1 - (op.number if op.kind is OpKind.RELEASE_BENEATH else 0))}")
    return " ".join(story)


def test_embedding_gradient_of_few_indices_needs_nothing() -> None:
    """Up to 3072 indices one kernel does it all."""
    assert steps(aten.embedding_dense_backward.default, meta(3072, 8), index(3072), 50, -1, False) == (REST,)


def test_embedding_gradient_of_many_indices_sorts_them() -> None:
    """4096 indices into 1000 rows of 8: sorted, in groups, then 4096 / 10 + 1000 partial rows in float32."""
    ops = steps(
        aten.embedding_dense_backward.default,
        meta(2, 2048, 8, dtype=torch.bfloat16),
        index(2, 2048),
        1000,
        -1,
        False,
    )
    assert ops == (
        Hold(32_768), Hold(32_768), Hold(32_768), radix_sort_bytes(4096, 8, 8, CHIP, bits=10), Release(1),
        REST, Hold(32_768), Hold(8), Hold(32_768), 1279, Release(1),
        Hold(8000), Hold(8000), Hold(8), Hold(1409 * 8), Hold(1409 * 8 * 4),
    )  # fmt: skip


def sums(grad: Tensor, indices: Tensor, rows: int) -> tuple[Op, ...]:
    """Return the ops after those that hold the groups of equal indices and of their partial rows."""
    return steps(aten.embedding_dense_backward.default, grad, indices, rows, -1, False)[15:]


def test_partial_rows_of_few_groups_are_added_as_they_are_made() -> None:
    """Of 40,200 indices of 30 rows, 4050 partial rows: their indices, and half precision in float32."""
    grad, indices = meta(40_200, 16), index(40_200)
    assert sums(grad, indices, 30) == (Hold(4050 * 8),)
    assert sums(grad.half(), indices, 30) == (Hold(4050 * 8), Hold(30 * 16 * 4))
    assert sums(meta(40_200, 4096), indices, 130) == (Hold(4150 * 4096 * 4),)  # 520 blocks of threads
    assert sums(meta(4020, 16), index(4020), 300) == (Hold(702 * 16 * 4),)  # few partial rows for each
    torch.use_deterministic_algorithms(True)
    try:
        assert sums(grad, indices, 30) == (Hold(4050 * 16 * 4),)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("capability", "dtype", "storage"),
    [
        ((8, 9), torch.int64, 3071), ((8, 9), torch.int32, 2815), ((8, 0), torch.int64, 3071),
        ((9, 0), torch.int64, 2815), ((12, 0), torch.int64, 2047),
    ],
)  # fmt: skip
def test_counts_scale_gradients_by_frequency(
    capability: tuple[int, int], dtype: torch.dtype, storage: int
) -> None:
    """Counts are held, and take the storage of two scans before the gradient is made."""
    args = (meta(196_608, 8), meta(196_608, dtype=dtype), 100, -1, True)
    ops = steps(aten.embedding_dense_backward.default, *args, capability=capability)
    count = Hold(196_608 * dtype.itemsize)
    assert ops[ops.index(REST) - 4 : ops.index(REST)] == (Release(1), count, storage, storage)
    offsets = index(1)
    bag_args = (*args[:2], offsets, args[1], offsets, offsets, 100, True, 0, False, None)
    bag = steps(aten._embedding_bag_backward.default, *bag_args, out=args[0], capability=capability)
    assert count in bag and storage in bag


@pytest.mark.parametrize(
    ("capability", "dtype", "storage"),
    [
        ((8, 9), torch.int64, 3583), ((8, 9), torch.int32, 2303), ((8, 0), torch.int64, 1791),
        ((8, 0), torch.int32, 1535), ((9, 0), torch.int64, 1279), ((9, 0), torch.int32, 1279),
    ],
)  # fmt: skip
def test_the_first_of_equal_indices_are_found_tile_by_tile(
    capability: tuple[int, int], dtype: torch.dtype, storage: int
) -> None:
    """50,000 indices take the storage that emulated GPUs allocate."""
    args = (meta(50_000, 16), meta(50_000, dtype=dtype), 6000, -1, False)
    ops = steps(aten.embedding_dense_backward.default, *args, capability=capability)
    assert ops[ops.index(REST) + 4 :][:2] == (storage, Release(1))


def test_accumulating_index_put_sorts_its_indices() -> None:
    """2401 positions of a table of 169 rows and 3 columns, as in Swin's relative positions."""
    args = (meta(169, 3), [index(2401)], meta(2401, 3), True)
    linear = 2401 * 8
    checked = Hold(8), Hold(8), 1, 1, Release(2)
    assert steps(aten.index_put.default, *args) == (
        REST, *checked, *wrapped(linear), Hold(linear), Hold(linear), Hold(linear),
        radix_sort_bytes(2401, 8, 8, CHIP, bits=8),
    )  # fmt: skip
    assert steps(aten.index_put.default, *args[:3], False) == ()
    none = (meta(169, 3), [index(0)], meta(0, 3), True)
    assert steps(aten.index_put.default, *none) == ()


def test_a_mask_is_as_many_indices_as_it_lets_through() -> None:
    """Five of 20 x 30 places, each with four values: indices of two dimensions, and five to sort."""
    mask = meta(20, 30, dtype=torch.bool)
    func = aten._index_put_impl_.default
    result = steps(func, meta(20, 30, 4), [mask], meta(5, 4), True, True)
    assert result == (
        Hold(2 * 8 * 5), REST, *wrapped(40), *wrapped(40), Release(1), Hold(40), Hold(40), Hold(40),
        radix_sort_bytes(5, 8, 8, CHIP, bits=10),
    )  # fmt: skip
    behind = steps(func, meta(4, 20, 30), [None, mask], meta(4, 5), True, True)
    assert behind == result


def test_several_indices_are_summed_up() -> None:
    """Each is wrapped and multiplied in blocks of its own, and added to the first."""
    args = (meta(10, 20, 4), [index(6), index(6)], meta(6, 4), True, True)
    linear = 6 * 8
    ops = steps(aten._index_put_impl_.default, *args)
    assert ops[:8] == (REST, *wrapped(linear), *wrapped(linear), Release(1))


def test_indices_are_checked_where_they_are_expanded() -> None:
    """The extrema of each, and two comparisons; an index of a row is copied for those of 64 rows."""
    ops = steps(aten.index_put_.default, meta(10, 20), [index(64, 1), index(6)], meta(), True)
    extrema, copy = (Hold(8), Hold(8)), Hold(8 * 384)
    checked = *extrema, copy, Release(1), 1, 1, Release(2)
    assert ops[:21] == (REST, *checked, *wrapped(8 * 384), *checked, *wrapped(8 * 384))


HOST, INT32 = as_cpu_tensor(index(50)), meta(50, dtype=torch.int32)
HOST_INT32 = as_cpu_tensor(INT32)
COLUMN, HOST_COLUMN = index(50, 1), as_cpu_tensor(index(50, 1))
MASK = as_cpu_tensor(meta(64, dtype=torch.bool))


@pytest.mark.parametrize(
    ("indices", "held"),
    [
        ([index(50), index(50)], ""),
        ([HOST, index(50)], "+400"),
        ([HOST, HOST], "+400 +400"),
        ([HOST_COLUMN, index(50)], "+400 +20000 +20000 -400"),
        ([HOST_COLUMN, HOST], "+400 +400 +20000 +20000 -400 -400"),
        ([INT32], "+400"),
        ([HOST_INT32, HOST_INT32], "+200 +200 +400 -200 +400 -200"),
        ([INT32, HOST_INT32], "+200 +400 +400 -200"),
        ([meta(50, 1, dtype=torch.int32), HOST_INT32], "+200 +20000 +20000 -200"),
    ],
)
def test_indices_are_moved_and_converted(indices: list[Tensor], held: str) -> None:
    """Blocks in the order in which torch 2.13 makes and frees them on an emulated RTX 4090."""
    x, values = meta(64, 3000), meta(50)
    assert blocks(_index((x, indices), values, CHIP)) == held
    assert blocks(_index_put((x, indices, values, False), x, CHIP)) == held


@pytest.mark.parametrize(
    ("indices", "held"),
    [
        ([HOST, index(50)], "+400 +400 +400 -400 -400"),
        ([index(50), HOST], "+400 +400 -400 +400 -400"),
        ([HOST, HOST], "+400 +400 -400"),
        ([INT32, index(50)], "+400 +400 +400 -400 +400 +400 -400 -400 -400"),
        ([index(50), INT32], "+400 +400 +400 -400 +400 +400 -400 -400 -400"),
        ([HOST_INT32, index(50)], "+400 +400 +400 -400 -400"),
    ],
)
def test_an_index_of_the_cpu_is_multiplied_there(indices: list[Tensor], held: str) -> None:
    """Blocks in which the indices are summed up before they are sorted, as in the test before."""
    x = meta(64, 3000)
    ops = _index_put((x, indices, meta(50), True, True), x, CHIP)
    assert blocks(ops) == f"{held} +400 +400 +400 +1 -1"


def test_a_mask_of_the_cpu_is_read_there() -> None:
    """Its true elements are moved as indices; if a number is assigned, all are taken to be true."""
    x = meta(64, 3000)
    assert blocks(_index((x, [MASK]), x, CHIP)) == "+512"
    assert blocks(_index((x, [MASK]), meta(5, 3000), CHIP)) == "+40"
    assert blocks(_index_put((x, [MASK], meta(), False), x, CHIP)) == "+512"
    assert blocks(_index_put((x, [MASK], x, True), x, CHIP)) == "+512 +512 +512 +512 +1 -1"


def test_a_roll_shifts_one_dimension_after_another() -> None:
    """Each shift but the last makes a tensor that lives until the kernel returns; the copy of an input that
    is not contiguous does not.
    """
    x, size = meta(2, 8, 8, 3), 2 * 8 * 8 * 3 * 4
    assert steps(aten.roll.default, x, [3], [1]) == (REST,)
    assert steps(aten.roll.default, x, [3, 3], [1, 2]) == (Hold(size), REST)
    assert steps(aten.roll.default, x, [3, 3, 1], [1, 2, 3]) == (Hold(size), Hold(size), REST)
    crossed = x.transpose(1, 2)
    assert steps(aten.roll.default, crossed, [3, 3], [1, 2]) == (
        Hold(size), Hold(size), ReleaseBeneath(1), REST
    )  # fmt: skip


# ---- sorting


@pytest.mark.parametrize(
    ("many", "sizes", "bits", "capability", "block"),
    [
        (2401, (8, 8), 8, (8, 6), 3_584),  # Swin's relative positions on an emulated RTX 3090
        (2304, (8, 8), 8, (8, 6), 512),  # a single block of threads
        (2401, (8, 8), 16, (8, 6), 44_544),  # two passes: the other halves of keys and values
        (7681, (8, 8), 8, (8, 6), 5_632),  # three blocks of 3,840 pairs
        (7681, (8, 8), 8, (9, 0), 4_608),  # two of 4,608
    ],
)
def test_the_temporary_storage_of_a_radix_sort(
    many: int, sizes: tuple[int, int], bits: int, capability: tuple[int, int], block: int
) -> None:
    """The allocator rounds CUB's storage up to 512 bytes."""
    size = radix_sort_bytes(many, *sizes, Target.for_capability(capability), bits)
    assert -(-size // 512) * 512 == block


@pytest.mark.parametrize(
    ("capability", "sms", "of_halves", "of_bytes"),
    [
        ((8, 9), 58, 11_657_471, 9_783_551), ((8, 0), 108, 14_299_391, 11_104_511),
        ((7, 5), 40, 10_694_911, 9_302_271), ((9, 0), 132, 10_014_207, 294_399),
    ],
)  # fmt: skip
def test_keys_of_less_than_four_bytes_are_sorted_in_passes_of_fewer_bits(
    capability: tuple[int, int], sms: int, of_halves: int, of_bytes: int
) -> None:
    """983,040 keys of two bytes and of one take the storage that emulated GPUs allocate."""
    target = Target(capability, sms)
    assert radix_sort_bytes(983_040, 2, 8, target) == of_halves
    assert radix_sort_bytes(983_040, 1, 8, target) == of_bytes


def test_short_rows_are_sorted_in_place() -> None:
    """Rows of up to 4096 elements take the numbers 0, 1, 2, ... of one row."""
    assert steps(aten.sort.default, meta(7, 4096)) == (32_768,)


def test_long_rows_are_sorted_together() -> None:
    """Three rows of 5000: pairs of index and row, twice, and the keys, then the rows' numbers alone; sorted
    along another dimension, the input and both results are laid out anew.
    """
    pair, keys = 8 * 15_000, 4 * 15_000
    body = Hold(pair), Hold(pair), Hold(keys), 194_047, Release(1), 6_655
    assert steps(aten.sort.default, meta(3, 5000)) == (REST, *body)
    assert steps(aten.sort.default, meta(5000, 3), 0) == (REST, Hold(keys), Hold(keys), Hold(pair), *body)
    assert steps(aten.sort.default, meta(5000)) == (REST, Hold(40_000), radix_sort_bytes(5000, 4, 8, CHIP))


def test_rows_with_gaps_are_copied_before_they_are_sorted() -> None:
    """The results have no gaps. If the rows lie one after another in them, the input alone is copied."""
    keys, pair = Hold(4 * 15_000), Hold(8 * 15_000)
    assert steps(aten.sort.default, meta(3, 6000)[:, :5000])[:4] == (REST, keys, pair, pair)
    assert steps(aten.sort.default, meta(3, 10_000)[:, ::2])[:4] == (REST, keys, pair, pair)
    assert steps(aten.sort.default, meta(5000, 6)[:, :3], 0)[:5] == (REST, keys, keys, pair, pair)


def test_many_long_rows_are_sorted_by_one_kernel() -> None:
    """Its storage has two aligned parts, the other halves of keys and of indices."""
    sizes = Hold(12_000_000), 18_000_383
    assert steps(aten.sort.default, meta(300, 5000)) == (REST, *sizes)
    halves = steps(aten.sort.default, meta(300, 5000, dtype=torch.float16))
    assert halves == (REST, Hold(12_000_000), 15_000_319)


def test_a_selection_by_several_blocks_counts_digits() -> None:
    """8192 rows of 1000 take a block each, 8 rows of 100,000 take 56 on 84 multiprocessors.

    Held are a value, two ranks and two prefixes of digits for each row, 256 counts for each block, 256 sums
    for each row, and two numbers for each block. Emulated GPUs of compute capability 8.6 allocate the same.
    """
    rows = (
        Hold(32_768), Hold(65_536), Hold(65_536), Hold(4_194_304), Hold(8_388_608), Hold(32_768),
        Hold(32_768), 1279, 1279, Release(7),
    )  # fmt: skip
    assert steps(aten.topk.default, meta(8192, 1000), 8) == (REST, *rows)
    assert steps(aten.topk.default, meta(1000, 8192), 8, 0) == (REST, *rows)
    assert steps(aten.topk.default, meta(8, 100_000), 8) == (
        REST, Hold(32), Hold(64), Hold(64), Hold(229_376), Hold(8192), Hold(1792), Hold(1792), 1279, 1279,
        Release(7),
    )  # fmt: skip
    doubles = steps(aten.topk.default, meta(8192, 1000, dtype=torch.float64), 8)
    assert doubles[1:4] == (Hold(65_536), Hold(65_536), Hold(131_072))
    transposed = steps(aten.topk.default, meta(1000, 8192).t(), 8)
    assert transposed == (REST, Hold(32_768_000), *rows[:-1], Release(8))


@pytest.mark.parametrize(
    ("rows", "least"), [(20, 20_000), (21, 10_000), (80, 8000), (199, 5000), (4001, 400)]
)
def test_a_selection_from_short_rows_needs_nothing(rows: int, least: int) -> None:
    """The least length of a row for several blocks depends on the number of rows."""
    assert steps(aten.topk.default, meta(rows, least - 1), 8) == (REST, Release(0))
    assert len(steps(aten.topk.default, meta(rows, least), 8)) > 2


def test_sums_of_digits_are_made_since_torch_2_10() -> None:
    """Before, each block sums the counts of the others."""
    x = meta(8192, 1000)
    rule = RULES[aten.topk.default]
    ops = rule((x, 8), aten.topk(x, 8), replace(CHIP, torch=(2, 9)))
    assert Hold(8_388_608) not in ops and ops[-1] == Release(6)


@pytest.mark.parametrize(
    ("capability", "storage"), [((7, 5), 9727), ((8, 0), 6399), ((9, 0), 5887), ((10, 0), 5375)]
)
def test_the_storage_of_sums_over_a_million_rows(capability: tuple[int, int], storage: int) -> None:
    """16 bytes for each tile of blocks and 4 for its first key, as emulated GPUs allocate them."""
    assert steps(aten.topk.default, meta(1_000_000, 400), 8, capability=capability)[-2] == storage


def test_many_selected_values_are_sorted() -> None:
    """5000 of 8192 in each of three rows: the sort is over before the indices are gathered."""
    ops = steps(aten.topk.default, meta(3, 8192), 5000)
    sort = steps(aten.sort.default, meta(3, 5000))
    assert ops == (REST, Release(0), Hold(120_000), Hold(60_000), *sort, Release(2), 120_000)
    assert steps(aten.topk.default, meta(3, 8192), 5000, -1, True, False) == (REST, Release(0))


@pytest.mark.parametrize(
    ("many", "storage"),
    [(16_384, 1536), (65_536, 2560), (262_144, 6144), (1_048_576, 19_968), (4_194_304, 76_288)],
)
def test_masked_scatter_counts_the_elements_before(many: int, storage: int) -> None:
    """Beside the result stand 8 bytes an element, an expanded mask's copy, and the storage of a scan: in
    blocks of 512 bytes that of torch 2.13 with CUDA 13.0 on emulated GPUs of 7.5, 8.6 and 9.0.
    """
    x, mask, source = meta(many // 64, 64), meta(many // 64, 64, dtype=torch.bool), meta(8)
    first, counts, scan = steps(aten.masked_scatter.default, x, mask, source)
    assert (first, counts) == (REST, Hold(8 * many))
    assert -(-scan // 512) * 512 == storage
    narrow = meta(many // 64, 1, dtype=torch.bool)
    assert steps(aten.masked_scatter_.default, x, narrow, source) == (REST, counts, Hold(many), scan)
    strided = meta(8, 2)[:, 0]
    assert steps(aten.masked_scatter_.default, x, mask, strided)[-1] == Hold(8 * 4)


def test_a_mask_that_selects_is_as_many_indices() -> None:
    """Five of 20 x 30 places: found by CUB, then their indices of two dimensions lie beside the result."""
    mask = meta(20, 30, dtype=torch.bool)
    found = (Hold(4), 4, Hold(2 * 8 * 5), 8 * 33, REST)
    assert _index((meta(20, 30, 4), [mask]), meta(5, 4), CHIP) == found
    assert _index((meta(4, 20, 30), [None, mask]), meta(4, 5), CHIP) == found
    assert _masked_select((meta(20, 30), mask), meta(5), CHIP) == found
    assert _index((meta(20, 30), [index(5)]), meta(5, 30), CHIP) == ()


def test_indices_of_unlike_strides_are_copied() -> None:
    """Rows of a batch, expanded along 5 places in each, beside the places; places alone, or of like strides,
    are taken as they are.
    """
    points, rows, places = meta(4, 9, 3), index(4).view(4, 1), index(4, 5)
    assert steps(aten.index.Tensor, points, [rows.expand(4, 5), places]) == (Hold(160), REST)
    assert steps(aten.index.Tensor, points, [rows, places]) == (Hold(160), REST)
    assert steps(aten.index.Tensor, points, [rows, index(5)]) == (Hold(160), Hold(160), REST)
    assert steps(aten.index.Tensor, points, [places, places]) == ()
    assert steps(aten.index.Tensor, points, [None, places]) == ()


def test_embedding_copies_indices_that_no_view_makes_flat() -> None:
    """A slice of columns is copied before the output; a slice of a vector is read as it is."""
    func, table = aten.embedding.default, meta(50, 8)
    assert steps(func, table, index(4, 6)) == ()
    assert steps(func, table, index(4, 6)[:, :-1]) == (Hold(8 * 20), REST)
    assert steps(func, table, index(6).expand(4, 6)) == (Hold(8 * 24), REST)
    assert steps(func, table, index(6)[::2]) == ()


def test_means_of_scattered_rows_count_them() -> None:
    """Ones for each element of the source and their sums, in the order of each operator, and a mask."""
    x, source = meta(10, 8), meta(40, 8)
    for func in (aten.scatter_reduce.two, aten.scatter_reduce_.two):
        ops = steps(func, x, 0, index(40, 8), source, "mean")
        assert ops == (Hold(4 * 320), Hold(4 * 80), 80)
        assert steps(func, x, 0, index(40, 8), source, "amax") == ()
    for func in (aten.index_reduce.default, aten.index_reduce_.default):
        assert steps(func, x, 0, index(40), source, "mean") == (Hold(4 * 80), 4 * 320, 80)
        assert steps(func, x, 0, index(40), source, "prod") == ()


def test_repeats_are_summed_before_what_is_repeated_is_numbered() -> None:
    """A million repeats: 1117 tiles of CUB; int32 repeats are converted for the sum alone."""
    many = Hold(8_000_000)
    func, out = aten.repeat_interleave.Tensor, index(5)
    assert steps(func, index(1_000_000), out=out) == (many, 18_943, REST)
    ops = steps(func, meta(1_000_000, dtype=torch.int32), out=out)
    assert ops == (many, many, 18_943, Release(1), REST)
    assert steps(func, index(0), out=out) == ()


def test_lengths_of_segments_are_summed_with_a_zero_before_them() -> None:
    """Beside the result, and beside the gradient; CUB reduces vectors, and sums rows of lengths nowhere."""
    func, gradient = aten.segment_reduce.default, aten._segment_reduce_backward.default
    lengths = index(1_000_000)
    offsets = Hold(8), Hold(8_000_008), ReleaseBeneath(1), 18_943
    assert steps(func, meta(100), "sum", lengths, out=meta(1)) == (REST, *offsets, 1)
    assert steps(func, meta(100, 3)[:, :2], "sum", lengths, out=meta(1)) == (Hold(800), REST, *offsets)
    rows = steps(func, meta(4, 100), "sum", index(4, 5), None, None, 1, out=meta(1))
    assert rows == (REST, Hold(32), Hold(192), ReleaseBeneath(1))
    assert steps(func, meta(9, 3), "sum", None, None, index(4), out=meta(1)) == (REST,)
    result, data = meta(5), meta(100)
    assert steps(gradient, result[:1].expand(5), result, data, "sum", lengths, out=data) == (
        Hold(20), REST, *offsets,
    )  # fmt: skip


def test_draws_from_weights_check_them_and_take_noise() -> None:
    """Weights of 8 rows are checked; a single draw is the largest noise of a row, several are the first."""
    func, weights = aten.multinomial.default, meta(8, 100)
    extrema = Hold(4), Hold(4), Hold(1), Hold(1), Hold(1), ReleaseBeneath(1), ReleaseBeneath(1)
    rows = Hold(32), Hold(8), Hold(1), ReleaseBeneath(1), ReleaseBeneath(1), 1
    noise = Hold(3200)
    assert steps(func, weights, 1) == (REST, *extrema, *rows, noise)
    assert steps(func, weights, 1, True) == (REST, *extrema, *rows, noise)
    assert steps(func, weights, 4)[:16] == (REST, *extrema, *rows, noise, Hold(128))
    assert steps(func, meta(100), 1) == (
        REST, *extrema, Hold(4), Hold(1), ReleaseBeneath(1), 1, Hold(400),
    )  # fmt: skip


def test_draws_with_replacement_sum_weights() -> None:
    """A copy of the weights, which is normalised in another, and their running sums."""
    assert steps(aten.multinomial.default, meta(8, 100), 4, True) == (REST, *[Hold(3200)] * 3)
