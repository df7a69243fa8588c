"""Workspaces of embeddings, indices and sorts."""

import torch

from planner.capture.workspaces.ops import Hold
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from tests.helpers.workspaces import REST, aten, index, meta, steps


def test_embedding_gradient_of_few_indices_needs_nothing() -> None:
    """Up to 3072 indices one kernel does it all."""
    assert steps(aten.embedding_dense_backward.default, meta(3072, 8), index(3072), 50, -1, False) == (REST,)


def test_embedding_gradient_of_many_indices_sorts_them() -> None:
    """4096 indices into 1000 rows of 8: sorted, then 4096 / 10 + 1000 partial rows in float32."""
    ops = steps(
        aten.embedding_dense_backward.default,
        meta(2, 2048, 8, dtype=torch.bfloat16),
        index(2, 2048),
        1000,
        -1,
        False,
    )
    assert ops == (
        Hold(32_768), Hold(32_768), 32_768 + radix_sort_bytes(4096, 8, 8), REST, Hold(8000), Hold(8),
        Hold(8000), Hold(8000), Hold(8), Hold(1409 * 8), Hold(1409 * 8 * 4),
    )  # fmt: skip


def test_accumulating_index_put_sorts_its_indices() -> None:
    """2401 positions of a table of 169 rows and 3 columns, as in Swin's relative positions."""
    args = (meta(169, 3), [index(2401)], meta(2401, 3), True)
    linear = 2401 * 8
    assert steps(aten.index_put.default, *args) == (
        REST, Hold(linear), Hold(linear), Hold(linear), linear + radix_sort_bytes(2401, 8, 8),
    )  # fmt: skip
    assert steps(aten.index_put.default, *args[:3], False) == ()


def test_a_mask_is_as_many_indices_as_it_lets_through() -> None:
    """Five of 20 x 30 places, each with four values: indices of two dimensions, and five to sort."""
    mask = meta(20, 30, dtype=torch.bool)
    result = steps(aten.index_put.default, meta(20, 30, 4), [mask], meta(5, 4), True)
    assert result == (
        Hold(2 * 8 * 5), REST, Hold(40), Hold(40), Hold(40), 40 + radix_sort_bytes(5, 8, 8)
    )  # fmt: skip
    behind = steps(aten.index_put.default, meta(4, 20, 30), [None, mask], meta(4, 5), True)
    assert behind == result


# ---- sorting


def test_short_rows_are_sorted_in_place() -> None:
    """Rows of up to 4096 elements take the numbers 0, 1, 2, ... of one row."""
    assert steps(aten.sort.default, meta(7, 4096)) == (32_768,)
    assert steps(aten.topk.default, meta(7, 100_000), 5) == ()


def test_long_rows_are_sorted_together() -> None:
    """Three rows of 5000: pairs of index and row, twice, then the keys; sorted along another dimension, the
    input and both results are laid out anew.
    """
    pair, keys = 8 * 15_000, 4 * 15_000
    body = (
        Hold(pair), Hold(pair), keys + radix_sort_bytes(15_000, 4, 8), radix_sort_bytes(15_000, 8, 0)
    )  # fmt: skip
    assert steps(aten.sort.default, meta(3, 5000)) == (REST, *body)
    assert steps(aten.sort.default, meta(5000, 3), 0) == (REST, Hold(keys), Hold(keys), Hold(pair), *body)
    assert steps(aten.sort.default, meta(5000)) == (REST, Hold(40_000), radix_sort_bytes(5000, 4, 8))
