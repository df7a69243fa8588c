"""What kernels take beside their outputs: the steps of each rule on shapes whose bytes are written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.capture.workspaces._rule import positional_args
from planner.capture.workspaces.ops import Hold, Op, Output, Outputs, Release, TryAlloc
from planner.capture.workspaces.registry import RULES, Coverage, coverage_of
from planner.capture.workspaces.tensor.reductions import reduction
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from planner.jobs import Mode
from planner.program.events import validate
from planner.program.target import Target
from tests.capture.recorder.test_recorder import Apply, story
from tests.helpers.models import AMPERE, HOPPER, born, job_of, trace_of

aten = torch.ops.aten
REST, OUTPUT = Outputs(), Output()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    """A contiguous tensor of indices."""
    return meta(*shape, dtype=torch.int64)


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in the channels-last format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return meta(*shape, dtype=dtype).to(memory_format=formats[len(shape)])


def steps(func: Any, *args: Any, out: Any = None, capability: tuple[int, int] = AMPERE) -> tuple[Op, ...]:
    """What the operator's rule says of these arguments; the result is torch's own where it is not given."""
    result = func(*args) if out is None else out
    return tuple(RULES[func](args, result, Target.for_capability(capability)))


# ---- the recorder and the steps


class Pool(nn.Module):
    """One operator with two outputs of 4 and 8 bytes."""

    def forward(self, x: Tensor) -> Any:
        return aten.max_pool2d_with_indices(x, [2, 2])


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ((), "+4 +8"),
        ((7,), "+4 +8 +7 -7"),
        ((TryAlloc(7),), "+4 +8 +7 -7"),
        ((Hold(7), Hold(9)), "+4 +8 +7 +9 -9 -7"),
        ((Hold(7), REST), "+7 +4 +8 -7"),
        ((OUTPUT, 7, OUTPUT, 9), "+4 +7 -7 +8 +9 -9"),
        ((OUTPUT, 7), "+4 +7 -7 +8"),
        ((Hold(7), OUTPUT, Release(1), 9, REST), "+7 +4 -7 +9 -9 +8"),
        ((Hold(7), Hold(9), Release(1), REST), "+7 +9 -9 +4 +8 -7"),
        ((Hold(0), 0), "+4 +8"),
    ],
    ids=str,
)
def test_a_rule_orders_outputs_and_scratch(
    written: tuple[Op, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks before, between and after the outputs; those that are held go in reverse order."""
    func = aten.max_pool2d_with_indices.default
    monkeypatch.setitem(RULES, func, lambda args, out, capability: written)  # type: ignore[arg-type]
    trace = trace_of(Pool, job_of("1x2x2", mode=Mode.INFER), 1)
    validate(trace)
    lines = [line.split()[0] for line in story(trace)]
    start = lines.index("forward") + 1
    assert " ".join(lines[start : lines.index("end")]) == told


def test_arguments_by_name_are_put_in_order() -> None:
    """A rule finds arguments by position, however they were given."""
    x = meta(3)
    assert positional_args(aten.sort.stable, (x,), {"stable": True, "dim": 0})[1:] == (True, 0, False)
    assert positional_args(aten.sum.dim_IntList, (x, [0]), {}) == (x, [0])


def test_states_of_operators() -> None:
    """A rule, a declaration, a tag or a view make an operator known; all else is not."""
    assert coverage_of(aten.embedding_dense_backward.default) is Coverage.RULE
    assert coverage_of(aten.mm.default) is Coverage.RULE
    assert coverage_of(aten.gather.default) is Coverage.NO_WORKSPACE
    assert coverage_of(aten.sin.default) is Coverage.NO_WORKSPACE
    assert coverage_of(aten.view.default) is Coverage.NO_WORKSPACE
    assert coverage_of(aten._linalg_svd.default) is Coverage.UNKNOWN


# ---- products


def test_operands_that_cublas_cannot_read_are_copied() -> None:
    """Rows or columns must be next to each other; an expanded gradient has neither."""
    grad = meta(1).expand(2, 5)
    assert steps(aten.mm.default, grad.t(), meta(2, 3)) == (Hold(40),)
    assert steps(aten.mm.default, meta(3, 4).t(), meta(3, 5)) == ()
    assert steps(aten.addmm.default, meta(5), meta(2, 6)[:, :3], meta(3, 5)) == ()
    assert steps(aten.addmm.default, meta(5), meta(2, 6)[:, ::2], meta(3, 5)) == (Hold(24),)
    assert steps(aten.bmm.default, meta(2, 3, 4).permute(2, 0, 1), meta(4, 3, 5)) == (Hold(96),)
    assert steps(aten.bmm.default, meta(2, 3, 4), meta(1, 4, 5).expand(2, 4, 5)) == ()


# ---- reductions


def test_a_bias_gradient_splits_its_rows_over_the_gpu() -> None:
    """25,216 rows of 768: 168 blocks per output on 84 multiprocessors, each with 32 x 4 outputs in a buffer
    that has room for 128 times as many (Reduce.cuh multiplies by the block's width once more).
    """
    assert reduction(meta(25216, 768), [0], 4, Target.for_capability(AMPERE)) == (
        Hold(4 * 768 * 168 * 128),
        Hold(4 * 6),
    )
    assert steps(aten.sum.dim_IntList, meta(25216, 768), [0], True) == (Hold(66_060_288), Hold(24))
    hopper = steps(aten.sum.dim_IntList, meta(25216, 768), [0], True, capability=HOPPER)
    assert hopper == (Hold(4 * 768 * 352 * 128), Hold(24))


def test_reductions_that_stay_in_their_blocks() -> None:
    """Few inputs per output, or outputs enough for all multiprocessors: nothing is handed over."""
    assert steps(aten.mean.dim, meta(128, 2048, 7, 7), [2, 3]) == ()
    assert steps(aten.sum.dim_IntList, meta(128, 1000), [0]) == ()
    assert steps(aten.sum.default, meta(10)) == ()
    assert steps(aten.amax.default, meta(100_000, 512), [1]) == ()


def test_a_sum_of_everything() -> None:
    """19,267,584 inputs: 512 threads with 4 values at a time, 252 blocks, one partial result each."""
    assert steps(aten.sum.default, meta(128, 3, 224, 224)) == (Hold(4 * 252), Hold(4))


def test_partial_results_that_are_pairs_are_larger() -> None:
    """Mean and variance take four times a sum's buffer, a maximum with its place as much."""
    x = meta(128, 3, 224, 224)
    assert steps(aten.var.correction, x, out=meta()) == (Hold(16 * 252), Hold(4))
    assert steps(aten.argmax.default, x, out=meta()) == (Hold(16 * 252), Hold(4))


def test_logsumexp_takes_the_exponentials() -> None:
    """The maxima and a tensor like the input, before the result."""
    assert steps(aten.logsumexp.default, meta(4, 5, 6), [-1]) == (Hold(80), Hold(480), REST)


def test_the_norm_of_a_list_takes_partial_norms() -> None:
    """For each of three tensors as many chunks of 65,536 elements as the largest has."""
    tensors = [meta(10), meta(70_000), meta(1)]
    assert steps(aten._foreach_norm.Scalar, tensors) == (Hold(3 * 2 * 4),)


# ---- convolutions


def weight_gradient(grad: Tensor, weight: Tensor, **options: Any) -> tuple[Op, ...]:
    """Without the gradients of input and bias."""
    shape = (grad.shape[0], weight.shape[1], *grad.shape[2:])
    args = (grad, meta(*shape), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    return steps(aten.convolution_backward.default, *args, out=(None, weight, None), **options)


def test_weight_gradients_image_by_image() -> None:
    """MobileNetV2's last convolution on a GPU of compute capability 8.6: 323 times 1.5625 MiB, and nothing
    where that passes 512 MiB, on other GPUs, at more positions, with fewer weights, in half precision.
    """
    weight = meta(1280, 320, 1, 1)
    assert weight_gradient(meta(323, 1280, 3, 3), weight) == (OUTPUT, TryAlloc(323 * 1280 * 320 * 4))
    assert weight_gradient(meta(328, 1280, 3, 3), weight) == (OUTPUT,)
    assert weight_gradient(meta(323, 1280, 3, 3), weight, capability=(8, 9)) == (OUTPUT,)
    assert weight_gradient(meta(323, 1280, 4, 3), weight) == (OUTPUT,)
    assert weight_gradient(meta(323, 1280, 3, 3), meta(1280, 200, 1, 1)) == (OUTPUT,)
    half = meta(1280, 320, 1, 1, dtype=torch.float16)
    assert weight_gradient(meta(323, 1280, 3, 3, dtype=torch.float16), half) == (OUTPUT,)
    copy = Hold(323 * 1280 * 9 * 4)  # the gradient is brought into the input's format
    assert weight_gradient(last(323, 1280, 3, 3), weight) == (copy, OUTPUT, Release(1))


# ---- copies of a convolution's operands, as an allocator recorded them with torch 2.13 on an emulated GPU

X, W, Y = (4, 16, 20, 20), (32, 16, 3, 3), (4, 32, 20, 20)
X_BYTES, W_BYTES, Y_BYTES = 102_400, 18_432, 204_800


def crossed(batch: int, channels: int, height: int, width: int) -> Tensor:
    """A tensor in neither format."""
    return meta(batch, height, channels, width).transpose(1, 2)


def conv(x: Tensor, weight: Tensor, *, transposed: bool = False) -> tuple[Op, ...]:
    """The steps of a forward pass."""
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    return steps(aten.convolution.default, *args)


def conv_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: str, groups: int = 1) -> tuple[Op, ...]:
    """The steps of a backward pass; `mask` says which gradients are wanted."""
    wanted = [letter == "1" for letter in mask]
    args = (grad, x, weight, [len(weight)], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, wanted)
    out = tuple(meta(1) if one else None for one in wanted)
    return steps(aten.convolution_backward.default, *args, out=out)


def test_a_convolution_copies_what_is_not_in_its_format() -> None:
    """The input before the output, the weight after it; channels last as soon as one of the two is."""
    x, w, y = Hold(X_BYTES), Hold(W_BYTES), meta(*X)
    assert conv(y, meta(*W)) == conv(last(*X), last(*W)) == (REST,)
    assert conv(y, last(*W)) == conv(crossed(*X), meta(*W)) == (x, REST)
    assert conv(last(*X), meta(*W)) == (REST, w)
    assert conv(y, last(16, 32, 3, 3), transposed=True) == (x, REST)


def test_gradients_of_a_convolution_copy_what_is_not_in_their_format() -> None:
    """The output's gradient once for both where the input suggests another format, else for each."""
    x, w, y = Hold(X_BYTES), Hold(W_BYTES), Hold(Y_BYTES)
    plain, back = (meta(*X), meta(*W)), Release(1)
    assert conv_backward(meta(*Y), *plain, "110") == (OUTPUT, OUTPUT)
    assert conv_backward(last(*Y), *plain, "110") == (y, OUTPUT, OUTPUT, back)
    assert conv_backward(crossed(*Y), *plain, "110") == (OUTPUT, y, back, y, OUTPUT, back)
    assert conv_backward(crossed(*Y), *plain, "010") == (y, OUTPUT, back)
    assert conv_backward(last(*Y), last(*X), meta(*W), "110") == (OUTPUT, w, back, OUTPUT)
    assert conv_backward(meta(*Y), last(*X), meta(*W), "100") == (y, OUTPUT, w, back, back)
    assert conv_backward(meta(*Y), meta(*X), last(*W), "110") == (x, y, OUTPUT, OUTPUT, Release(2))
    assert conv_backward(last(*Y), meta(*X), last(*W), "100") == (y, OUTPUT, y, back, back)


def test_depthwise_kernels_of_torch_make_the_weight_gradient_first() -> None:
    """A gradient that is not contiguous is copied for both, the input for the weight gradient alone."""
    weight, x, back = meta(16, 1, 3, 3), Hold(X_BYTES), Release(1)
    assert conv_backward(meta(*X), meta(*X), weight, "110", 16) == (Output(1), OUTPUT)
    assert conv_backward(meta(*X), meta(*X), weight, "010", 16) == (OUTPUT,)
    assert conv_backward(last(*X), meta(*X), weight, "110", 16) == (x, Output(1), OUTPUT, back)
    assert conv_backward(meta(*X), crossed(*X), weight, "110", 16) == (x, Output(1), back, OUTPUT)


def test_depthwise_kernels_of_volumes_make_both_gradients_before_they_copy() -> None:
    """The copy of the output's gradient lives until the kernel returns, after the bias gradient."""
    volume = (2, 16, 8, 8, 8)
    x, other, weight = meta(*volume), meta(2, 8, 16, 8, 8).transpose(1, 2), meta(16, 1, 3, 3, 3)
    copy, back = Hold(65_536), Release(1)
    assert conv_backward(x, x, weight, "110", 16) == (OUTPUT, OUTPUT)
    assert conv_backward(other, x, weight, "111", 16)[:4] == (OUTPUT, OUTPUT, copy, OUTPUT)
    assert conv_backward(x, other, weight, "110", 16) == (OUTPUT, OUTPUT, copy, back)
    assert conv_backward(x, other, weight, "100", 16) == (OUTPUT,)


def test_the_second_output_comes_first() -> None:
    """The mask of dropout before its result, the total weight of nll_loss2d before the loss."""
    assert steps(aten.native_dropout.default, meta(2, 3), 0.1, True) == (Output(1), OUTPUT)
    args = (meta(2, 5, 8, 8), index(2, 8, 8), None, 1, -100)
    assert steps(aten.nll_loss2d_forward.default, *args) == (Output(1), OUTPUT)


def test_upsampling_copies_a_gradient_beside_its_result() -> None:
    """A slice of channels, as `cat` gives back; either format is read as it is."""
    size = ([32, 32], [4, 8, 16, 16], 2.0, 2.0)
    part = meta(4, 16, 32, 32)[:, :8]
    for grad in (meta(4, 8, 32, 32), last(4, 8, 32, 32)):
        assert steps(aten.upsample_nearest2d_backward.default, grad, *size) == (REST,)
    assert steps(aten.upsample_nearest2d_backward.default, part, *size) == (REST, Hold(131_072))
    same = ([32, 32], [4, 8, 32, 32], False, 1.0, 1.0)  # bilinear, of no other size: copied as it is
    assert steps(aten.upsample_bilinear2d_backward.default, part, *same) == ()


@pytest.mark.parametrize("shape", [(4, 8, 16, 16), (4, 8, 1, 1), (64, 32)])
def test_the_native_batch_norm_makes_the_gradients_of_its_scale_first(shape: tuple[int, ...]) -> None:
    """From sums that it holds, for channels last, images of one pixel and matrices; the input comes last."""
    x = last(*shape, dtype=torch.bfloat16) if shape[-1] == 16 else meta(*shape, dtype=torch.bfloat16)
    scale = meta(shape[1], dtype=torch.bfloat16)
    args = (x, x, scale, scale, scale, scale, scale, True, 1e-5, [True, True, True])
    sums = Hold(4 * shape[1])
    made = steps(aten.native_batch_norm_backward.default, *args, out=(x, scale, scale))
    assert made == (sums, sums, Output(1), Output(1), REST)


def test_softmax_multiplies_gradient_and_output_first() -> None:
    """The product stands beside the result; it and the output are copied where they are not contiguous."""
    plain, other, size = meta(*X), crossed(*X), Hold(X_BYTES)

    def backward(grad: Tensor, output: Tensor) -> tuple[Op, ...]:
        args = (grad, output, -1, torch.float32)
        return steps(aten._softmax_backward_data.default, *args, out=plain)

    assert backward(plain, plain) == (REST, size)
    assert backward(meta(4, 16, 1, 20).expand(X), plain) == (REST, size)
    assert backward(other, plain) == backward(plain, other) == (REST, size, size)
    assert backward(other, other) == (REST, size, size, size)


# ---- normalisation


def test_layer_norm_copies_strided_inputs_first() -> None:
    """The copy is made before the outputs and lives beside them."""
    weight = meta(6)
    x = meta(2, 6, 4).transpose(1, 2)
    assert steps(aten.native_layer_norm.default, x, [6], weight, weight, 1e-5) == (Hold(192), REST)
    assert steps(aten.native_layer_norm.default, meta(2, 4, 6), [6], weight, weight, 1e-5) == (REST,)


def backward_of_layer_norm(rows: int, columns: int) -> tuple[Op, ...]:
    x, weight, figure = meta(rows, columns), meta(columns), meta(rows, 1)
    args = (x, x, [columns], figure, figure, weight, weight, [True, True, True])
    return steps(aten.native_layer_norm_backward.default, *args)


def test_layer_norm_with_many_rows_sums_in_two_passes() -> None:
    """401,408 rows of 96 (ConvNeXt at batch 128): 10,922 rows of partial sums for each of two gradients."""
    partial = Hold(10_922 * 96 * 4)
    summed = (OUTPUT, Hold(4 * 96 * 86 * 64), Hold(8), Release(2))  # 86 blocks per output
    assert backward_of_layer_norm(128 * 56 * 56, 96) == (
        OUTPUT, Hold(384), Hold(384), partial, partial, *summed, *summed,
    )  # fmt: skip
    assert backward_of_layer_norm(128 * 197, 768) == (OUTPUT, REST)
    assert backward_of_layer_norm(64 * 1024, 96) == (OUTPUT, REST)


def test_group_norm() -> None:
    """Scale and shift per sample and channel; in the backward pass two sums and three coefficients."""
    x, weight, figure = meta(2, 6, 4, 4), meta(6), meta(2, 3)
    assert steps(aten.native_group_norm.default, x, weight, weight, 2, 6, 16, 3, 1e-5) == (
        REST, Hold(48), Hold(48),
    )  # fmt: skip
    assert steps(aten.native_group_norm.default, x, None, None, 2, 6, 16, 3, 1e-5) == (REST,)
    args = (x, x, figure, figure, weight, 2, 6, 16, 3, [True, True, True])
    assert steps(aten.native_group_norm_backward.default, *args) == (
        REST, Hold(48), Hold(48), Hold(48), Hold(24), Hold(24),
    )  # fmt: skip


def test_group_norm_over_channels_last() -> None:
    """Moments per sample, group and row of 24 bytes; 4 rows of 4 pixels."""
    x, weight = last(2, 6, 4, 4), meta(6)
    found = steps(
        aten.native_group_norm.default, x, weight, weight, 2, 6, 16, 3, 1e-5, out=(x, meta(2, 3), meta(2, 3))
    )
    assert found == (REST, 2 * 3 * 4 * 24, Hold(48), Hold(48))


def test_batch_norm_in_bfloat16_and_channels_last() -> None:
    """No cuDNN for bfloat16: staging of 4 figures for 64 channels and 98 rows of blocks, and semaphores."""
    x, weight = last(32, 64, 56, 56, dtype=torch.bfloat16), meta(64)
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert steps(aten.native_batch_norm.default, *args) == (Hold(4 * 64 * 128 * 4), Hold(8))
    plain = (meta(32, 64, 56, 56, dtype=torch.bfloat16), *args[1:])
    assert steps(aten.native_batch_norm.default, *plain) == ()


def test_batch_norm_wants_the_gradient_in_the_inputs_format() -> None:
    """A contiguous gradient of a channels-last activation is copied, and an expanded one."""
    weight = meta(6)
    for x, grad, size in (
        (last(2, 6, 4, 4), meta(2, 6, 4, 4), 768),
        (meta(2, 6, 4, 4), last(2, 6, 4, 4), 768),
        (meta(2, 6, 4, 4), meta(2, 6, 1, 1).expand(2, 6, 4, 4), 768),
        (last(2, 6, 4, 4), last(2, 6, 4, 4), 0),
    ):
        args = (grad, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
        expected = (Hold(size), REST) if size else (REST,)
        assert steps(aten.native_batch_norm_backward.default, *args, out=(x, weight, weight)) == expected


# ---- copies


@pytest.mark.parametrize(
    ("func", "args", "copied"),
    [
        (aten._softmax.default, (meta(2, 3, 4).transpose(1, 2), -1, False), 96),
        (aten._log_softmax.default, (last(2, 3, 4, 4), 1, False), 384),
        (aten.max_pool2d_with_indices.default, (meta(2, 6, 4, 4)[:, ::2], [2, 2]), 384),
        (aten.max_pool2d_with_indices.default, (last(2, 6, 4, 4), [2, 2]), 0),
        (aten.avg_pool3d.default, (last(1, 2, 4, 4, 4), [2, 2, 2]), 512),
        (aten.cumsum.default, (meta(4, 5).t(), 0), 80),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_copy_what_they_cannot_read(func: Any, args: tuple[Any, ...], copied: int) -> None:
    """A contiguous copy before the outputs, held beside them; no copy where the kernel takes the format."""
    assert steps(func, *args) == ((Hold(copied), REST) if copied else ())


def test_an_average_pools_gradient_follows_the_input() -> None:
    """A contiguous gradient is copied for an input in channels last, but adaptive pools read any strides."""
    grad, x = meta(2, 6, 2, 2), last(2, 6, 4, 4)
    pool = (grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    assert steps(aten.avg_pool2d_backward.default, *pool) == (Hold(192), REST)
    assert steps(aten._adaptive_avg_pool2d_backward.default, grad, x) == (REST,)


# ---- look-ups


def test_embedding_gradient_of_few_indices_needs_nothing() -> None:
    """Up to 3072 indices one kernel does it all."""
    assert steps(aten.embedding_dense_backward.default, meta(3072, 8), index(3072), 50, -1, False) == (REST,)


def test_embedding_gradient_of_many_indices_sorts_them() -> None:
    """4096 indices into 1000 rows of 8: sorted, then 4096 / 10 + 1000 partial rows in float32."""
    found = steps(
        aten.embedding_dense_backward.default,
        meta(2, 2048, 8, dtype=torch.bfloat16),
        index(2, 2048),
        1000,
        -1,
        False,
    )
    assert found == (
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
    """Up to 4096 elements: the numbers 0, 1, 2, ... of one row."""
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


# ---- losses


def test_a_mean_squared_error_is_made_in_full_first() -> None:
    """The result, then a loss per element; without reduction the result is that loss."""
    x = meta(4, 5)
    assert steps(aten.mse_loss.default, x, x) == (REST, Hold(80))
    assert steps(aten.mse_loss.default, x, x, 0) == ()


def test_cross_entropy_of_logits_takes_two_tensors() -> None:
    """The logarithm of the sigmoid and the loss per element, before the result."""
    x = meta(4, 5)
    func = aten.binary_cross_entropy_with_logits.default
    assert steps(func, x, x) == (Hold(80), Hold(80), REST)
    assert steps(func, x, x, None, None, 0) == (Hold(80), REST)


def test_binary_cross_entropy_keeps_the_whole_loss() -> None:
    """Its mean lies in the storage of the loss per element, which lives as long as the mean does."""

    def loss(x: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(x, torch.empty_like(x))

    trace = trace_of(lambda: Apply(loss), job_of("25", mode=Mode.INFER), 2)
    assert born(trace, "binary_cross_entropy") == [200, 4]


def test_ctc_loss_keeps_the_forward_variables() -> None:
    """Four samples, 50 steps, targets of up to 30 labels with blanks between: 61 states."""

    def loss(x: Tensor) -> Tensor:
        targets = torch.empty(4, 30, dtype=torch.int64, device=x.device)
        scores = x.transpose(0, 1).log_softmax(2)
        return nn.functional.ctc_loss(scores, targets, torch.full((4,), 50), torch.tensor([30, 7, 9, 2]))

    trace = trace_of(lambda: Apply(loss), job_of("50x20"), 4)
    assert born(trace, "_ctc_loss") == [32, 32, 32, 16, 4 * 50 * 61 * 4]


# ---- transforms


def test_distances_extend_both_sets_of_points() -> None:
    """30 and 40 points of 5 coordinates, extended to 7."""
    x, y = meta(2, 30, 5), meta(2, 40, 5)
    found = steps(aten._euclidean_dist.default, x, y)
    assert found[-3:] == (Hold(2 * 30 * 7 * 4), Hold(2 * 40 * 7 * 4), REST)


def test_fourier_transforms_take_a_work_area() -> None:
    """As large as the larger of input and output; to real values the input is copied as well."""
    x, y = meta(2, 8, 8), meta(2, 8, 5, dtype=torch.complex64)
    assert steps(aten._fft_r2c.default, x, [1, 2], 0, True) == (REST, 640)
    assert steps(aten._fft_c2r.default, y, [1, 2], 2, 8) == (REST, Hold(640), 640)
