"""Layouts of the results of layer norm and batch norm."""

from typing import Any

import pytest
import torch

from tests.helpers.meta_kernels import FLOATS, agrees, aten, image, meta, ours


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3), (1, 1), (4, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("last", [1, 2])
def test_layer_norm_of_contiguous_inputs(dtype: torch.dtype, shape: tuple[int, ...], last: int) -> None:
    """Layer norm of a contiguous tensor and its gradients are as in torch, statistics included."""
    x, weight = meta(*shape, dtype=dtype), meta(*shape[-last:], dtype=dtype)
    agrees(aten.native_layer_norm.default, x, shape[-last:], weight, weight, 1e-5)
    agrees(aten.native_layer_norm.default, x, shape[-last:], weight, None, 1e-5)
    agrees(aten.native_layer_norm.default, x, shape[-last:], None, None, 1e-5)
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    mean = meta(*shape[:-last], *[1] * last, dtype=kind)
    for mask in ([True] * 3, [True, False, False], [False, True, True]):
        agrees(aten.native_layer_norm_backward.default, x, x, shape[-last:], mean, mean, weight, weight, mask)


def test_layer_norm_of_other_layouts() -> None:
    """CUDA's layer norm answers contiguous even where the input is transposed or a slice."""
    weight = meta(4)
    for x in (meta(3, 2, 4).transpose(0, 1), meta(2, 4, 3).transpose(1, 2), meta(2, 6, 4)[:, :3]):
        statistics = ((2, 3, 1), (3, 1, 1), torch.float32, 24)
        expected = ((2, 3, 4), (12, 4, 1), torch.float32, 96), statistics, statistics
        assert ours(aten.native_layer_norm.default, x, [4], weight, weight, 1e-5) == expected
        agrees(aten.native_layer_norm.default, x, [4], weight, weight, 1e-5)
        mean = meta(2, 3, 1)
        assert ours(
            aten.native_layer_norm_backward.default, x, x, [4], mean, mean, weight, weight, [True] * 3
        ) == (
            ((2, 3, 4), (12, 4, 1), torch.float32, 96),
            ((4,), (1,), torch.float32, 16),
            ((4,), (1,), torch.float32, 16),
        )


@pytest.mark.parametrize(
    "args",
    [
        (meta(2, 3), [4], None, None, 1e-5),
        (meta(2, 3), [], None, None, 1e-5),
        (meta(2, 3), [2, 2, 3], None, None, 1e-5),
        (meta(2, 3), [3], meta(4), None, 1e-5),
        (meta(2, 3), [3], None, meta(1, 3), 1e-5),
        (meta(2, 3, dtype=torch.int64), [3], None, None, 1e-5),
        (meta(2, 3, dtype=torch.float16), [3], meta(3), meta(3), 1e-5),
        (torch.empty(2, 3), [3], torch.empty(3), torch.empty(3), 1e-5),
    ],
)
def test_layer_norm_leaves_errors_to_torch(args: tuple[Any, ...]) -> None:
    """Layer norm over shapes or dtypes that do not fit is torch's own to judge."""
    assert ours(aten.native_layer_norm.default, *args) is NotImplemented


PAIRS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float32),
]  # input and parameters


@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 1, 1, 1)], ids=str)
def test_batch_norm_of_contiguous_inputs(
    dtype: torch.dtype, kind: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Batch norm in training and its gradients are as in torch."""
    x, weight = meta(*shape, dtype=dtype), meta(shape[1], dtype=kind)
    for statistics in ((weight, weight), (None, None)):
        agrees(aten.native_batch_norm.default, x, weight, weight, *statistics, True, 0.1, 1e-5)
    saved = (weight, weight, weight, weight)
    backward = (aten.native_batch_norm_backward.default, x, x, weight, *saved, True, 1e-5)
    agrees(*backward, [True, True, True])
    if len(shape) > 2:  # cuDNN makes all gradients, whichever are requested
        assert ours(*backward, [False, True, False]) == ours(*backward, [True, True, True])


def test_batch_norm_that_cudnn_does_not_take() -> None:
    """bfloat16, two dimensions or no parameters: the native kernel keeps statistics in evaluation as well."""
    weight = meta(3)
    statistics = ((3,), (1,), torch.float32, 12)
    for x, scale in (
        (meta(2, 3), weight),
        (meta(2, 3, 4, 5, dtype=torch.bfloat16), weight),
        (meta(2, 3, 4, 5), None),
    ):
        for training in (True, False):
            args = (x, scale, scale, weight, weight, training, 0.1, 1e-5)
            agrees(aten.native_batch_norm.default, *args)
            assert ours(aten.native_batch_norm.default, *args)[1:] == (statistics, statistics)


def test_batch_norm_in_evaluation_saves_nothing() -> None:
    """cuDNN returns no statistics in evaluation, and keeps the input's format."""
    weight = meta(3)
    nothing = ((0,), (1,), torch.float32, 0)
    assert ours(
        aten.native_batch_norm.default, meta(2, 3, 4, 5), weight, weight, weight, weight, False, 0.1, 1e-5
    ) == (((2, 3, 4, 5), (60, 20, 5, 1), torch.float32, 480), nothing, nothing)
    assert ours(
        aten.native_batch_norm.default, image(2, 3, 4, 5), weight, weight, weight, weight, False, 0.1, 1e-5
    ) == (((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, 480), nothing, nothing)


def test_batch_norm_leaves_the_rest_to_torch() -> None:
    """Batch norm over a slice, without statistics, or with parameters of another size is torch's own."""
    weight = meta(3)
    for args in (
        (meta(2, 6, 4)[:, :3], weight, weight, weight, weight, True, 0.1, 1e-5),
        (meta(2, 4, 4), weight, weight, weight, weight, True, 0.1, 1e-5),
        (meta(2, 3, 4), weight, weight, None, None, False, 0.1, 1e-5),
    ):
        assert ours(aten.native_batch_norm.default, *args) is NotImplemented
