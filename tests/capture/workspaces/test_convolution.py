"""Memory that convolutions take beside their outputs, apart from cuDNN's."""

from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.workspaces.ops import Hold, KernelOp, Op, Output, Release
from planner.jobs import MemoryFormat
from planner.program.kernels.convolution import Convolution, ConvWorkspaceSource, WorkspaceAccount, Workspaces
from planner.program.kernels.expansion import OpKind
from tests.helpers.models import AMPERE, job_of
from tests.helpers.workspaces import (
    OUTPUT,
    REST,
    W_BYTES,
    X_BYTES,
    Y_BYTES,
    W,
    X,
    Y,
    aten,
    crossed,
    last,
    meta,
    steps,
)


def weight_gradient(grad: Tensor, weight: Tensor, stride: int = 1, **options: Any) -> tuple[Op, ...]:
    """Return the steps of a backward pass without the gradients of input and bias."""
    shape = (grad.shape[0], weight.shape[1], *(stride * size for size in grad.shape[2:]))
    args = (
        grad,
        meta(*shape, dtype=weight.dtype),
        weight,
        None,
        [stride, stride],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, False],
    )
    return steps(aten.convolution_backward.default, *args, out=(None, weight, None), **options)


def test_weight_gradients_image_by_image() -> None:
    """MobileNetV2's last convolution on a GPU of compute capability 8.6: 323 times 1.5625 MiB, and nothing
    for longer sums over batch and positions, on other GPUs, where channels do not widen, with a stride, in
    half precision.
    """
    weight = meta(1280, 320, 1, 1)
    assert weight_gradient(meta(323, 1280, 3, 3), weight) == (
        OUTPUT,
        KernelOp(OpKind.TRY, 323 * 1280 * 320 * 4),
    )
    assert weight_gradient(meta(350, 1280, 3, 3), weight) == (
        OUTPUT,
        KernelOp(OpKind.TRY, 350 * 1280 * 320 * 4),
    )
    assert weight_gradient(meta(351, 1280, 3, 3), weight) == (OUTPUT,)
    assert weight_gradient(meta(64, 1280, 7, 7), weight)[1] == KernelOp(OpKind.TRY, 64 * 1280 * 320 * 4)
    assert weight_gradient(meta(65, 1280, 7, 7), weight) == (OUTPUT,)
    assert weight_gradient(meta(323, 1280, 3, 3), weight, capability=(8, 9)) == (OUTPUT,)
    assert weight_gradient(meta(323, 320, 3, 3), meta(320, 1280, 1, 1)) == (OUTPUT,)
    assert weight_gradient(meta(128, 2048, 3, 3), meta(2048, 512, 1, 1)) == (OUTPUT,)
    assert weight_gradient(meta(323, 1280, 3, 3), weight, stride=2) == (OUTPUT,)
    half = meta(1280, 320, 1, 1, dtype=torch.float16)
    assert weight_gradient(meta(323, 1280, 3, 3, dtype=torch.float16), half) == (OUTPUT,)
    copy = Hold(323 * 1280 * 9 * 4)  # the gradient is brought into the input's format
    term = KernelOp(OpKind.TRY, 323 * 1280 * 320 * 4)
    assert weight_gradient(last(323, 1280, 3, 3), weight) == (copy, OUTPUT, term, Release(1))


def conv(x: Tensor, weight: Tensor, *, transposed: bool = False) -> tuple[Op, ...]:
    """The steps of a forward pass."""
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    return steps(aten.convolution.default, *args)


def conv_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: str, groups: int = 1) -> tuple[Op, ...]:
    """The steps of a backward pass; `mask` states which gradients are needed."""
    output_mask = [letter == "1" for letter in mask]
    args = (grad, x, weight, [len(weight)], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, output_mask)
    out = tuple(meta(1) if one else None for one in output_mask)
    return steps(aten.convolution_backward.default, *args, out=out)


def test_a_convolution_copies_what_is_not_in_its_format() -> None:
    """The input before the output, the weight after it; channels last as soon as one of the two is."""
    x, w, y = Hold(X_BYTES), Hold(W_BYTES), meta(*X)
    assert conv(y, meta(*W)) == conv(last(*X), last(*W)) == (REST,)
    assert conv(y, last(*W)) == conv(crossed(*X), meta(*W)) == (x, REST)
    assert conv(last(*X), meta(*W)) == (REST, w)
    assert conv(y, last(16, 32, 3, 3), transposed=True) == (x, REST)


class Seen:
    """Collects convolutions, and answers that they take nothing."""

    name = "seen"

    def __init__(self) -> None:
        self.convolutions: list[Convolution] = []

    def __call__(self, capability: Any, sm_count: int, convolution: Convolution) -> Workspaces:
        self.convolutions.append(convolution)
        return Workspaces(0)

    def account(self, capability: Any, sm_count: int) -> WorkspaceAccount:
        return WorkspaceAccount(ConvWorkspaceSource.LIBRARY)


def test_valid_padding_is_that_of_zeros() -> None:
    """`padding="valid"` leaves one zero for all dimensions; layouts and queries are the same."""

    def trained(**padding: Any) -> tuple[Any, list[Convolution]]:
        def build(_: Any) -> nn.Module:
            with torch.device("meta"):
                return nn.Sequential(nn.Conv2d(16, 32, 4, 4, **padding), nn.Conv2d(32, 8, 3, **padding))

        seen = Seen()
        job = job_of("16x20x20", memory_format=MemoryFormat.CHANNELS_LAST)
        return record(job, 4, AMPERE, build, conv_workspace_query=seen).events, seen.convolutions

    assert trained(padding="valid") == trained()
    first = trained(padding="valid")[1][0]
    assert (first.x, first.padding, first.stride) == ((4, 16, 20, 20), (0, 0), (4, 4))


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
