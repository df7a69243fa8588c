"""Convolutions that PyTorch runs itself: the blocks of their products, in bfloat16 on a T4.

Sizes and order are as an allocator recorded them with torch 2.13 on an emulated GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.workspaces.nn.conv_operands import ConvCall
from planner.capture.workspaces.nn.native_convolution import runs_products
from planner.capture.workspaces.ops import Hold, Op, Output, Release, ReleaseBeneath, UseCublas
from planner.jobs import Mode, Precision
from planner.program import Target
from tests.capture.recorder.test_recorder import story
from tests.helpers import workspaces
from tests.helpers.models import job_of, trace_of
from tests.helpers.workspaces import OUTPUT, aten

T4 = (7, 5)
BLAS, BACK = UseCublas(), Release(1)
Sizes = tuple[int, ...]


def meta(*shape: int) -> Tensor:
    """A contiguous tensor."""
    return workspaces.meta(*shape, dtype=torch.bfloat16)


def last(*shape: int) -> Tensor:
    """A tensor in the channels-last format."""
    return workspaces.last(*shape, dtype=torch.bfloat16)


def options(x: Tensor, transposed: bool, groups: int, step: int, dilation: int) -> tuple[Any, ...]:
    """Stride, padding and so on, so that a kernel of three keeps the size."""
    rank = x.dim() - 2
    padding = 0 if transposed else dilation
    return [step] * rank, [padding] * rank, [dilation] * rank, transposed, [0] * rank, groups


def forward(
    x: Tensor, weight: Tensor, y: Tensor, *, bias: int = 0, transposed: bool = False, groups: int = 1,
    step: int = 1, dilation: int = 1,
) -> tuple[Op, ...]:  # fmt: skip
    """The steps of a forward pass."""
    args = (x, weight, meta(bias) if bias else None, *options(x, transposed, groups, step, dilation))
    return workspaces.steps(aten.convolution.default, *args, out=y, capability=T4)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, mask: str, *, transposed: bool = False, groups: int = 1,
    step: int = 1, dilation: int = 1,
) -> tuple[Op, ...]:  # fmt: skip
    """The steps of a backward pass; `mask` states which gradients are needed."""
    needed = [letter == "1" for letter in mask]
    args = (grad, x, weight, [32], *options(x, transposed, groups, step, dilation), needed)
    out = tuple(meta(1) if one else None for one in needed)
    return workspaces.steps(aten.convolution_backward.default, *args, out=out, capability=T4)


X, W, Y = (4, 16, 20, 20), (32, 16, 3, 3), (4, 32, 20, 20)
X_BYTES, W_BYTES, Y_BYTES, COLUMNS = 51_200, 9_216, 102_400, 115_200


def test_one_sample_is_unfolded_to_columns() -> None:
    """Operands that are not contiguous are copied; the output is contiguous whatever they are."""
    columns = Hold(COLUMNS)
    assert forward(meta(*X), meta(*W), meta(*Y)) == (OUTPUT, columns, BLAS, BACK)
    copies = Hold(X_BYTES), Hold(W_BYTES)
    assert forward(last(*X), last(*W), meta(*Y), bias=32) == (*copies, OUTPUT, columns, BLAS, BACK)


def test_gradients_share_the_columns() -> None:
    """The bias gradient is made before that of the weight."""
    columns, plain = Hold(COLUMNS), (meta(*X), meta(*W))
    made = (OUTPUT, columns, BLAS, Output(1), OUTPUT, BACK)
    assert backward(meta(*Y), *plain, "111") == made
    assert backward(meta(*Y), *plain, "010") == (OUTPUT, columns, BLAS, BACK)
    assert backward(meta(*Y), *plain, "001") == (OUTPUT,)
    copies = Hold(X_BYTES), Hold(W_BYTES), Hold(Y_BYTES)
    assert backward(last(*Y), last(*X), last(*W), "111") == (*copies, *made, BACK)


def test_the_bias_gradient_is_reduced_in_between() -> None:
    """A reduction of 16 samples of 128 by 128 pixels to 8 channels takes a buffer and semaphores: with 72 SMs
    72/40 of the 320 bytes that a T4 took.
    """
    grad, x, weight = meta(16, 8, 128, 128), meta(16, 16, 128, 128), meta(8, 16, 3, 3)
    scratch = Hold(576), Hold(32), Release(2)
    expected = (OUTPUT, Hold(4_718_592), BLAS, Output(1), *scratch, OUTPUT, BACK)
    assert backward(grad, x, weight, "111") == expected


def test_groups_run_in_turn_and_are_joined() -> None:
    """Their parts of the input are copied, unless there is one sample alone."""
    x, y, columns = Hold(X_BYTES // 2), Hold(Y_BYTES // 2), Hold(COLUMNS // 2)
    group = (x, y, columns, BACK, ReleaseBeneath(1))
    first = (x, y, columns, BLAS, BACK, ReleaseBeneath(1))
    weight = meta(32, 8, 3, 3)
    assert forward(meta(*X), weight, meta(*Y), groups=2) == (*first, *group, OUTPUT)
    y, columns = Hold(Y_BYTES // 8), Hold(COLUMNS // 2)
    single = (y, columns, BACK)
    expected = (y, columns, BLAS, BACK, *single, OUTPUT)
    assert forward(meta(1, *X[1:]), weight, meta(1, *Y[1:]), groups=2) == expected


def test_gradients_of_groups_are_joined() -> None:
    """A gradient in channels last is copied in its own format, then to be contiguous."""
    x, weight, grad = Hold(X_BYTES), Hold(W_BYTES // 2), Hold(Y_BYTES // 2)
    part, columns = Hold(X_BYTES // 2), Hold(COLUMNS // 2)
    ops = backward(last(*Y), last(*X), last(32, 8, 3, 3), "110", groups=2)
    assert ops[:9] == (x, weight, grad, part, grad, part, columns, BLAS, Hold(W_BYTES // 4))
    assert ops[9:13] == (ReleaseBeneath(1), ReleaseBeneath(2), ReleaseBeneath(2), ReleaseBeneath(2))
    assert ops[-2:] == (OUTPUT, OUTPUT)


def test_dilated_kernels_make_all_gradients_first() -> None:
    """The bias gradient is summed up in a block of its own, sample by sample."""
    x, weight, grad = meta(*X), meta(*W), meta(*Y)
    columns, total = Hold(COLUMNS), Hold(64)
    assert forward(x, weight, grad, dilation=2) == (OUTPUT, columns, BLAS, BACK)
    expected = (OUTPUT, OUTPUT, OUTPUT, columns, BLAS, total, BACK, BACK)
    assert backward(grad, x, weight, "111", dilation=2) == expected
    assert backward(grad, x, weight, "001", dilation=2) == (OUTPUT, total, BACK)


def test_volumes_run_as_dilated_convolutions() -> None:
    """Even kernels of one voxel take columns."""
    x, grad = meta(2, 16, 8, 8, 8), meta(2, 32, 8, 8, 8)
    expected = (OUTPUT, OUTPUT, Hold(442_368), BLAS, BACK)
    assert backward(grad, x, meta(32, 16, 3, 3, 3), "110") == expected


def test_transposed_kernels_take_the_columns_of_their_outputs() -> None:
    """Ones add the bias; the two gradients' kernels copy, and take columns, each for itself."""
    x, weight, y = (4, 16, 20, 20), (16, 32, 2, 2), (4, 32, 40, 40)
    columns, copies = Hold(102_400), (Hold(51_200), Hold(4_096))
    how: Any = {"transposed": True, "step": 2}
    plain = forward(meta(*x), meta(*weight), meta(*y), **how)
    assert plain == (OUTPUT, columns, BLAS, BACK)
    ones = Hold(3_200)
    assert forward(last(*x), last(*weight), meta(*y), bias=32, **how) == (
        *copies, OUTPUT, columns, ones, BLAS, BACK, BACK,
    )  # fmt: skip
    grad = Hold(409_600)
    assert backward(last(*y), last(*x), last(*weight), "111", **how) == (
        *copies, grad, OUTPUT, columns, BLAS, BACK, BACK, OUTPUT, OUTPUT, grad, columns, BACK, BACK,
    )  # fmt: skip


def test_the_output_of_a_transposed_volume_is_resized() -> None:
    """It has the input's size before, which goes once the larger one is there."""
    x, weight, y = meta(2, 16, 8, 8, 8), meta(16, 32, 2, 2, 2), meta(2, 32, 16, 16, 16)
    ops = forward(x, weight, y, transposed=True, step=2)
    assert ops == (Hold(32_768), OUTPUT, BACK, Hold(262_144), BLAS, BACK)


def test_cudnn_runs_what_it_supports() -> None:
    """Products are for bfloat16 below compute capability 8.0, and not for depthwise convolutions."""

    def runs(dtype: torch.dtype, capability: tuple[int, int], groups: int) -> bool:
        x, weight = (workspaces.meta(*s, dtype=dtype) for s in (X, (16, 16 // groups, 3, 3)))
        target = Target.for_capability(capability)
        return runs_products(ConvCall(x, weight, x, (1, 1), (1, 1), (1, 1), False, groups, target))

    assert runs(torch.bfloat16, (7, 5), 1) and runs(torch.bfloat16, (7, 0), 8)
    assert not runs(torch.bfloat16, (8, 0), 1)
    assert not runs(torch.float16, (7, 5), 1)
    assert not runs(torch.bfloat16, (7, 5), 16)


def test_products_of_convolutions_have_cublas_take_its_workspace() -> None:
    """Once in each thread, right at the first product: after the columns, before they are freed."""
    job = job_of("4x8x8", mode=Mode.TRAIN, precision=Precision.BF16, steps=1)
    trace = trace_of(lambda: nn.Conv2d(4, 4, 3), job, 2, T4)
    kept = [line for line in story(trace) if line.startswith("+8519680")]
    assert len(kept) == 2
    lines = [line.split()[0] for line in story(trace)]
    columns = f"+{4 * 9 * 36 * 2}"
    assert lines[lines.index("+8519680") - 1] == columns
    assert lines[lines.index("+8519680") + 1] == "-" + columns[1:]
