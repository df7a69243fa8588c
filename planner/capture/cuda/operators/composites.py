"""Kernels that run composite operators on `meta` by the same operators as on CUDA."""

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.meta_kernels.strides import contiguous, suggests_channels_last
from planner.program import TorchVersion

aten = torch.ops.aten
_FUSED_RMS_NORM_SINCE: TorchVersion = (2, 9)  # pytorch/pytorch#153666
_WEIGHTED_IN_FLOAT32_SINCE: TorchVersion = (2, 7)  # pytorch/pytorch#147203
_CONTIGUOUS_EINSUM_SINCE: TorchVersion = (2, 9)  # pytorch/pytorch#161755
_MEAN = 1  # at::Reduction::Mean


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Run `linear` as CUDA does, with the bias added by addmm or in place (ATen/native/Linear.cpp).

    ATen adds the bias out of place for meta tensors or under a dispatch mode (TensorSubclassLikeUtils.h),
    which would cost a second output.
    """
    if bias is not None and weight.dim() == 2:
        if x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        if x.is_contiguous():  # of any rank, including 1, since torch 2.13 at the latest
            rows = x.reshape(-1, x.shape[-1])
            return torch.addmm(bias, rows, weight.t()).view(*x.shape[:-1], weight.shape[0])
    product = torch.matmul(x, weight.t())
    return product if bias is None else product.add_(bias)


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Run `dropout` as CUDA does: by the fused kernel with a boolean mask if training and 0 < p < 1.

    The kernel does not run for an empty tensor. Source: ATen/native/Dropout.cpp.
    """
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return aten.native_dropout(x, p, True)[0]


def _softmax_by(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a softmax by `kernel` that converts float16 to float32 inside the kernel, as CUDA does.

    The conversion follows ATen/native/SoftMax.cpp. On other devices, and for bfloat16 everywhere, the input
    is converted first, which costs a tensor.
    """

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype is torch.float16 and dtype is torch.float32:
            return kernel(x, dim, True)
        return kernel(x if dtype is None else x.to(dtype), dim, False)

    return softmax


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Run `ctc_loss` with lengths in lists; a length without a value counts as the padded length.

    Source: ATen/native/LossCTC.cpp. On the meta device, ATen keeps the lengths as tensors and fails.
    """
    steps, samples = log_probs.shape[:2]
    inputs = [steps] * samples if input_lengths.is_meta else input_lengths.tolist()
    labels = [targets.shape[-1]] * samples if target_lengths.is_meta else target_lengths.tolist()
    return aten.ctc_loss.IntList(log_probs, targets, inputs, labels, blank, reduction, zero_infinity)


def _one_hot(classes: Tensor, num_classes: int = -1) -> Any:
    """Run `one_hot` by scattering ones into zeros, as CUDA does (ATen/native/Onehot.cpp).

    On the meta device, ATen compares the classes with a range.
    """
    count = int(classes.max().item()) + 1 if num_classes < 0 else num_classes
    zeros = torch.zeros((*classes.shape, count), dtype=torch.int64, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


def _mish_backward(grad: Tensor, x: Tensor) -> Any:
    """Run `mish_backward` as one kernel, as on CUDA (native_functions.yaml).

    ATen composes it for meta tensors.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return aten.mish_backward(grad, x)


# ---- einsum: ATen/native/Linear.cpp


def _transposed_einsum(equation: str, operands: list[Tensor], *, path: list[int] | None = None) -> Any:
    """Run `einsum` as torch before 2.9 does, which never exchanges operands for a contiguous result.

    The result of two operands is a view of the product of the first operand's rows and the second one's
    columns, even if the equation names the columns first. Equations of more than two operands are run as in
    the installed torch.
    """
    if len(operands) == 2:
        given, result = _written_out(equation.replace(" ", ""), operands)
        sizes = [dict(zip(labels, x.shape, strict=True)) for labels, x in zip(given, operands, strict=True)]

        def kind(label: str) -> tuple[bool, ...]:
            return tuple(size.get(label, 1) != 1 for size in sizes)

        kinds = [kind(label) for label in result]
        rows = [at for at, kind in enumerate(kinds) if kind == (True, False)]
        columns = [at for at, kind in enumerate(kinds) if not kind[0]]
        is_product = any(kind(label) == (True, True) for label in given[0] if label not in result)
        if is_product and rows and columns and columns[-1] < rows[0]:
            batches = [at for at, kind in enumerate(kinds) if kind == (True, True)]
            order = [*batches, *rows, *columns]
            product = "".join(result[at] for at in order)
            x = aten.einsum.default.decompose(f"{','.join(given)}->{product}", operands)
            return x.permute([order.index(at) for at in range(len(order))])
    return aten.einsum.default.decompose(equation, operands, path=path)


def _written_out(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """Return the labels of the operands and of the result, with each ellipsis replaced by letters.

    If the equation names no result, the result has the ellipsis, and the labels that occur once in
    alphabetical order.
    """
    left, arrow, result = equation.partition("->")
    letters = [letter for letter in ascii_letters if letter not in equation]
    given = left.split(",")
    ranks = [x.dim() - len(labels.replace("...", "")) for labels, x in zip(given, operands, strict=True)]
    rank = max(ranks) if "..." in left else 0  # 0 for operands without an ellipsis
    ellipsis = "".join(letters[:rank])
    if not arrow:
        once = (label for label in left if label.isalpha() and left.count(label) == 1)
        result = "..." + "".join(sorted(once))
    spelled = [labels.replace("...", ellipsis[rank - n :]) for labels, n in zip(given, ranks, strict=True)]
    return spelled, result.replace("...", ellipsis)


# ---- rms_norm: ATen/native/layer_norm.cpp


class _RmsNorm(torch.autograd.Function):
    """An autograd function that runs `_fused_rms_norm` as a single autograd node.

    On the meta device the operator has a composite kernel, whose parts autograd would record one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized: list[int], weight: Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = aten._fused_rms_norm(x, normalized, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.normalized = normalized
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            dx, dweight = aten._fused_rms_norm_backward(grads[0], x, ctx.normalized, rstd, weight, mask)
        return dx, None, dweight, None


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Run `rms_norm` as one fused kernel, or composed for channels-last inputs or weights of another dtype.

    The fused kernel saves the input and one number per row.
    """
    mixed = weight is not None and weight.dtype is not x.dtype
    if mixed or (suggests_channels_last(x) and not x.is_contiguous()):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    return _RmsNorm.apply(x, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]


def _composed_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Run `rms_norm` operator by operator, as torch before 2.9 does."""
    return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)


def _rms_norm_weighted_last(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Run `rms_norm` as torch before 2.7 does: operator by operator, with the weight applied after the cast.

    The input in float32 and the scale live until the end.
    """
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    squares = wide.pow(2)
    scale = squares.mean(dims, keepdim=True).add_(eps or 0.0).rsqrt()
    del squares
    narrow = (wide * scale).type_as(x)
    return narrow if weight is None else narrow * weight


# ---- binary_cross_entropy_with_logits: torch/csrc/autograd/FunctionsManual.cpp


class BinaryCrossEntropyWithLogits(torch.autograd.Function):
    """An autograd function for binary cross entropy with logits, whose backward pass works in place.

    For meta tensors (TensorSubclassLikeUtils.h) torch computes the gradient out of place, which would cost
    two more tensors of the input's size.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
    ) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss = aten.binary_cross_entropy_with_logits(x, target, weight, pos_weight, reduction)
        ctx.save_for_backward(x, target, weight, pos_weight)
        ctx.reduction = reduction
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the input's gradient, computed in place in an intermediate result, and None for the rest.

        The intermediate result is the sigmoid, or with `pos_weight` the weighted term.
        """
        x, target, weight, pos_weight = ctx.saved_tensors
        if pos_weight is None:
            grad = _with_kernel_strides(x).sigmoid().sub_(target)
        else:
            weighted = pos_weight.mul(target)
            grad = weighted.add(1).sub_(target).mul_(_with_kernel_strides(x).sigmoid()).sub_(weighted)
        grad.mul_(grads[0])
        if weight is not None:
            grad.mul_(weight)
        return grad.div_(x.numel()) if ctx.reduction == _MEAN else grad, None, None, None, None


def _binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Any:  # fmt: skip
    if not target.requires_grad:
        return BinaryCrossEntropyWithLogits.apply(x, target, weight, pos_weight, reduction)  # type: ignore[no-untyped-call]
    # torch composes the loss from other operators if the target requires a gradient
    positive = target * F.logsigmoid(x)
    loss = -(positive if pos_weight is None else positive * pos_weight) - (1 - target) * F.logsigmoid(-x)
    loss = loss if weight is None else loss * weight
    return loss.mean() if reduction == _MEAN else loss.sum() if reduction else loss


def _with_kernel_strides(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the strides of CUDA's pointwise results, or another tensor unchanged.

    A contiguous tensor may have unusual strides in dimensions of size 1. CUDA's kernels then return
    contiguous strides (ATen/TensorIterator.cpp, fast_set_up); torch's meta kernels keep the unusual strides.
    """
    return x.as_strided(x.shape, contiguous(x.shape)) if x.is_contiguous() else x


# ---- prod: torch/csrc/autograd/FunctionsManual.cpp, prod_backward


class _Product(torch.autograd.Function):
    """An autograd function for `prod` that computes the gradient as CUDA does if no element is zero.

    Its gradient divides the product by each element. torch counts the zeros first, and takes another path if
    an element is zero. That path is not planned, though torch always takes it for meta tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.prod(x, dtype=dtype) if dim is None else aten.prod(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim, ctx.is_dropped = dim, dim is not None and not keepdim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, out = ctx.saved_tensors
        grad, x, dim = grads[0], x.to(grads[0].dtype), ctx.dim
        if not x.dim():
            return grad * out, None, None, None
        if ctx.is_dropped:
            grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
        zeros = x == 0
        counts = None if dim is None else zeros.sum(dim, True)
        if counts is None:
            del zeros
        else:
            counts.sum()
        gradient = grad * (out / x)
        del counts
        return gradient, None, None, None


def _product(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _Product.apply(x, None, False, dtype)  # type: ignore[no-untyped-call]


def _product_over(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _Product.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


# ---- max, min, median, clamp and take: torch/csrc/autograd/FunctionsManual.cpp


class _Extreme(torch.autograd.Function):
    """An autograd function for `max` and the like, whose gradient joins masks in place.

    For meta tensors (TensorSubclassLikeUtils.h) torch joins the masks of NaN out of place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, select: Callable[[Tensor], Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = select(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient, shared evenly between the elements that equal the result, and None."""
        x, out = ctx.saved_tensors
        is_nan, is_result_nan = x.isnan(), out.isnan()
        mask = (x == out).logical_or_(is_nan.logical_and_(is_result_nan))
        return mask * (grads[0] / mask.sum()), None


def _extreme(select: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: _Extreme.apply(x, select)  # type: ignore[no-untyped-call]


class _Clamp(torch.autograd.Function):
    """An autograd function for `clamp` between tensors, whose gradients join masks in place.

    For meta tensors (TensorSubclassLikeUtils.h) torch joins the masks of two bounds out of place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor | None, high: Tensor | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.clamp.Tensor(x, low, high)
        ctx.save_for_backward(x, low, high)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients, each chosen by masks that live until it is computed, bounds first."""
        (x, low, high), (grad,), needs = ctx.saved_tensors, grads, ctx.needs_input_grad
        zero = grad.new_zeros(())

        def where(mask: Tensor, other: Tensor | None = None) -> Tensor:
            both = mask if other is None else mask.logical_and_(other)
            return torch.where(both, grad, zero)

        if low is None or high is None:
            of_low = where(x < low) if needs[1] else None
            of_high = where(x > high) if needs[2] else None
            return where(x <= high if low is None else x >= low) if needs[0] else None, of_low, of_high
        of_low = where(x < low, low < high) if needs[1] else None
        of_high = where(x > high, high < low) if needs[2] else None
        return where(x >= low, x <= high) if needs[0] else None, of_low, of_high


def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Any:
    return _Clamp.apply(x, min, max)  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    """An autograd function for `take`, whose gradient is put into zeros in place.

    Under a dispatch mode (TensorSubclassLikeUtils.h) torch puts it into a copy of the zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.take(x, index)
        ctx.save_for_backward(x, index)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, index = ctx.saved_tensors
        return torch.zeros_like(x).put_(index, grads[0], True), None


def _take(x: Tensor, index: Tensor) -> Any:
    return _Take.apply(x, index)  # type: ignore[no-untyped-call]


# ---- cumprod: ATen/native/ReduceOps.cpp


def _cumprod_backward(grad: Tensor, x: Tensor, dim: int, out: Tensor) -> Any:
    """Return the gradient of `cumprod` computed as CUDA does if no element is zero.

    torch looks for zeros first, and takes another path if there is one. For meta tensors it always takes a
    third path, made for second gradients, element by element.
    """
    if x.numel() <= 1 or x.shape[dim] == 1:
        return grad
    weighted = out * grad
    zeros = x == 0
    zeros.any()
    flipped = weighted.flip(dim)
    sums = flipped.cumsum(dim)
    reversed_sums = sums.flip(dim)
    del flipped, sums
    gradient = reversed_sums.div(x)
    del reversed_sums, zeros, weighted
    return gradient


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "prod": _product,
    "prod.dim_int": _product_over,
    "max": _extreme(aten.max.default),
    "min": _extreme(aten.min.default),
    "median": _extreme(aten.median.default),
    "nanmedian": _extreme(aten.nanmedian.default),
    "clamp.Tensor": _clamp,
    "take": _take,
    "cumprod_backward": _cumprod_backward,
    "linear": _linear,
    "dropout": _dropout,
    "softmax.int": _softmax_by(aten._softmax),
    "log_softmax.int": _softmax_by(aten._log_softmax),
    "ctc_loss.Tensor": _ctc_loss,
    "one_hot": _one_hot,
    "mish_backward": _mish_backward,
    "rms_norm": _rms_norm,
    "binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits,
}


def kernels(version: TorchVersion) -> dict[str, Callable[..., Any]]:
    """Return the kernels of composite operators for a version of torch, by operator name."""
    older: dict[str, Callable[..., Any]] = {}
    if version < _FUSED_RMS_NORM_SINCE:
        is_weighted_last = version < _WEIGHTED_IN_FLOAT32_SINCE
        older["rms_norm"] = _rms_norm_weighted_last if is_weighted_last else _composed_rms_norm
    if version < _CONTIGUOUS_EINSUM_SINCE:
        older["einsum"] = _transposed_einsum
    return {**_KERNELS, **older}
