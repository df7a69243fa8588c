"""Meta kernels for operators whose outputs on CUDA differ in strides or size from torch's meta kernels.

Strides decide memory: kernels that need a contiguous input copy a non-contiguous input, and `linear` and
`reshape` keep the copy. For contiguous inputs these kernels agree with torch's, unless a function says
otherwise. Each kernel returns NotImplemented for arguments that are left to torch's kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.pointwise import pointwise_output
from planner.capture.meta_kernels.strides import (
    broadcast,
    channels_last,
    contiguous,
    empty,
    empty_strided,
    is_floating_meta,
    suggests_channels_last,
)
from planner.capture.workspaces.nn.norms import is_cudnn_batch_norm


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums on CUDA: float32, or float64 for float64. Source: ATen/AccumulateType.h."""
    return torch.float64 if dtype is torch.float64 else torch.float32


# ---- layer norm: ATen/native/cuda/layer_norm_kernel.cu


def _native_layer_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """Return the output, the means and the inverse deviations of layer norm, all contiguous.

    CUDA's kernel copies an input that is not contiguous.
    """
    if not _fits_layer_norm(x, normalized, weight, bias):
        return NotImplemented
    out, mean = _fused_rms_norm(x, normalized, weight, eps)
    return out, mean, empty(mean.shape, mean.dtype)


def _native_layer_norm_backward(
    grad: Tensor, x: Tensor, normalized: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Return layer norm's contiguous gradients of input, weight and bias, None if not selected by `mask`.

    torch's meta kernel follows the strides of gradient and input if both are transposed.
    """
    if not _fits_layer_norm(x, normalized, weight, bias) or grad.shape != x.shape:
        return NotImplemented
    if (mask[1] and weight is None) or (mask[2] and bias is None):
        return NotImplemented
    return _gradients((x, weight, bias), mask)


def _gradients(tensors: Sequence[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return a contiguous gradient for each tensor, None if the tensor is None or not selected by `mask`."""
    pairs = zip(tensors, mask, strict=True)
    return tuple(empty(t.shape, t.dtype) if is_needed and t is not None else None for t, is_needed in pairs)


def _fits_layer_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> bool:
    sizes = tuple(normalized)
    if not sizes or 0 in x.shape or tuple(x.shape[-len(sizes) :]) != sizes:
        return False
    return is_floating_meta(x, weight, bias) and all(
        t is None or tuple(t.shape) == sizes for t in (weight, bias)
    )


def _fused_rms_norm(x: Tensor, normalized: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    """Return the output of RMS norm and the reciprocal root mean square of each row, both contiguous.

    torch has no meta kernel for RMS norm.
    """
    lead = x.dim() - len(normalized)
    rows = (*x.shape[:lead], *[1] * len(normalized))
    return empty(x.shape, x.dtype), empty(rows, _statistics_dtype(x.dtype))


def _fused_rms_norm_backward(
    grad: Tensor, x: Tensor, normalized: Sequence[int], rstd: Tensor, weight: Tensor | None,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    return _gradients((x, weight), mask)


# ---- batch norm: ATen/native/cudnn/BatchNorm.cpp, ATen/native/cuda/Normalization.cu


def _native_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Return the output and the saved statistics of batch norm.

    The output has the input's memory format. In evaluation cuDNN saves no statistics, so the saved tensors
    are empty, whereas torch's meta kernel makes two copies. The native kernel always saves statistics.
    """
    if not _fits_batch_norm(x, weight) or (not training and (mean is None or var is None)):
        return NotImplemented
    saved = (x.shape[1] if training or not is_cudnn_batch_norm(x, weight, bias, training) else 0,)
    kind = _statistics_dtype(x.dtype)
    return empty_strided(x.shape, _kept_format(x), x.dtype), empty(saved, kind), empty(saved, kind)


def _native_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Any, var: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Return the gradients of input, weight and bias for batch norm in training.

    cuDNN ignores `mask`. The native kernel follows the mask for all three gradients; torch's meta kernel for
    two of the three.
    """
    if not _fits_batch_norm(x, weight) or grad.shape != x.shape or weight is None or not train:
        return NotImplemented
    output_mask = (True, True, True) if is_cudnn_batch_norm(x, weight, weight, train) else mask
    dx = empty_strided(x.shape, _kept_format(x), x.dtype) if output_mask[0] else None
    return (dx, *_gradients((weight, weight), output_mask[1:]))


def _fits_batch_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the meta kernels for batch norm apply to an input and a weight.

    The input must be dense. The weight has the input's dtype, or float32 for an input in half precision. The
    weight may be None.
    """
    if x.dim() < 2 or 0 in x.shape or not x.is_meta or not x.dtype.is_floating_point:
        return False
    dense = x.is_contiguous() or suggests_channels_last(x)
    if weight is None:
        return dense
    mixed = x.dtype.itemsize == 2 and weight.dtype is torch.float32
    return weight.is_meta and (weight.dtype is x.dtype or mixed) and weight.shape == x.shape[1:2] and dense


def _kept_format(x: Tensor) -> tuple[int, ...]:
    return channels_last(x.shape) if suggests_channels_last(x) else contiguous(x.shape)


# ---- products of groups: ATen/native/GroupedMMUtils.h


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Return the output of a grouped matrix product, with rows padded to a multiple of 16 bytes.

    A factor of 3 dimensions has one matrix per group; values of `offs` bound the groups in a factor of 2
    dimensions. torch's meta kernel refuses single precision, which CUDA multiplies group by group.
    """
    kind = out_dtype or a.dtype
    ranks = a.dim(), b.dim()
    if (offs is None) != (ranks == (3, 3)) or not is_floating_meta(a, b):
        return NotImplemented
    lead = () if offs is None or 3 in ranks else (offs.shape[0],)
    if ranks == (3, 3):
        lead = (a.shape[0],)
    shape = (*lead, a.shape[-2], b.shape[-1])
    unit = 16 // kind.itemsize
    row = -(-shape[-1] // unit) * unit
    return empty_strided(shape, contiguous((*shape[:-1], row)), kind)


# ---- losses


def _binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Any:
    """Return the loss in the strides of the input; if reduced, in a storage of the unreduced loss's size.

    Source: ATen/native/cuda/Loss.cu.
    """
    if not is_floating_meta(x, target, weight) or x.shape != target.shape or 0 in x.shape:
        return NotImplemented
    loss = torch.empty_like(x)
    return loss.as_strided((), ()) if reduction else loss


def _binary_cross_entropy_backward(grad: Tensor, x: Tensor, target: Tensor, *_: Any) -> Any:
    """Return the gradient of a binary cross entropy in the strides of the input."""
    return _binary_cross_entropy(x, target, None, 0)


def _resized_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Any:
    """Return a reduced MSE, smooth L1 or soft margin loss in a storage of the unreduced loss's size.

    Source: ATen/native/Loss.cpp. On CUDA the unreduced loss is resized.
    """
    shape = broadcast([x.shape, target.shape])
    if reduction == 0 or not is_floating_meta(x, target) or not shape or 0 in shape:
        return NotImplemented
    return empty(shape, torch.promote_types(x.dtype, target.dtype)).as_strided((), ())


def _contiguous_gradient(grad: Tensor, x: Tensor, target: Tensor, *_: Any) -> Any:
    """Return the gradient of a loss for its input, contiguous whatever the strides of the input.

    The kernel fills contiguous zeros (ATen/native/Loss.cpp).
    """
    if not is_floating_meta(x) or x.shape != target.shape or 0 in x.shape:
        return NotImplemented
    return empty(x.shape, x.dtype)


def _ctc_loss(
    scores: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Return each sample's CTC loss, and the forward variables that the backward pass needs.

    Source: ATen/native/cuda/LossCTC.cu. torch has no meta kernel for CTC loss.
    """
    steps, samples = scores.shape[:2]
    if isinstance(target_lengths, Tensor) and target_lengths.is_meta:
        longest = targets.shape[-1]  # the length to which targets are padded
    else:
        longest = max(int(length) for length in target_lengths)
    return empty((samples,), scores.dtype), empty((samples, steps, 2 * longest + 1), scores.dtype)


def _ctc_loss_backward(grad: Tensor, scores: Tensor, *_: Any) -> Any:
    return empty(scores.shape, scores.dtype)


def _log_sigmoid(x: Tensor) -> Any:
    """Return the output of log-sigmoid, and an empty buffer.

    Source: ATen/native/cuda/Activation.cpp. torch's kernels for the CPU and for meta tensors make a buffer of
    the input's size.
    """
    out = pointwise_output(x)
    return NotImplemented if out is NotImplemented else (out, empty((0,), x.dtype))


# ---- other operators with contiguous outputs


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Return the output of `roll`, contiguous whatever the strides of the input.

    Source: ATen/native/cuda/TensorTransformations.cu.
    """
    rank = x.dim()
    if not x.is_meta or 0 in x.shape or rank < 1 or len(shifts) != len(dims) or not shifts:
        return NotImplemented
    if any(not -rank <= dim < rank for dim in dims):
        return NotImplemented
    return empty(x.shape, x.dtype)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    """Return softmax's input gradient, contiguous whatever `grad`'s strides (ATen/native/SoftMax.cpp)."""
    if grad.shape != output.shape or 0 in grad.shape or not is_floating_meta(grad, output):
        return NotImplemented
    if dtype is not grad.dtype or not -grad.dim() <= dim < grad.dim():
        return NotImplemented
    return empty(grad.shape, grad.dtype)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    """Return the output of `masked_fill`, contiguous whatever the strides of the input.

    The kernel fills a contiguous copy in place (ATen/native/TensorAdvancedIndexing.cpp).
    """
    if not (x.is_meta and mask.is_meta) or mask.dtype is not torch.bool or mask.shape != x.shape:
        return NotImplemented
    if not x.dtype.is_floating_point or isinstance(value, complex) or 0 in x.shape:
        return NotImplemented
    return empty(x.shape, x.dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Return the output of `x[mask]` for a meta tensor and a CPU mask, one element for each True element.

    torch would convert the mask to the selected indices.
    """
    if len(indices) != 1 or (mask := indices[0]) is None:
        return NotImplemented
    if mask.is_meta or mask.dtype is not torch.bool or not x.is_meta or mask.shape != x.shape:
        return NotImplemented
    return empty((int(mask.count_nonzero()),), x.dtype)


def _resized_input(func: Any, x: Tensor, *args: Any) -> Any:
    """Return the output of im2col or col2im, with a storage at least as large as the input's.

    CUDA's kernels make the output in the input's size, then resize it (ATen/native/cuda: Im2Col.cu,
    Col2Im.cu).
    """
    if not is_floating_meta(x) or 0 in x.shape:
        return NotImplemented
    return empty(x.shape, x.dtype).resize_(func(x, *args).shape)


def _geqrf(x: Tensor) -> Any:
    """Return reflections in the layout of LAPACK, column by column, and their factors.

    Source: ATen/native/BatchLinearAlgebra.cpp. torch has no meta kernel for `geqrf`.
    """
    *batch, rows, columns = x.shape
    reflections = empty((*batch, columns, rows), x.dtype).mT
    return reflections, empty((*batch, min(rows, columns)), x.dtype)


def _linalg_lstsq(matrices: Tensor, right: Tensor, rcond: float | None = None, *, driver: Any = None) -> Any:
    """Return solutions in a storage with rows for residuals, and residuals if rows are more than columns.

    Ranks and singular values have no elements. Source: ATen/native/BatchLinearAlgebra.cpp.
    """
    *batch, rows, columns = matrices.shape
    dtype, most = matrices.dtype, max(rows, columns)
    is_vector = right.dim() == 1 or right.shape == matrices.shape[:-1]
    width = () if is_vector else right.shape[-1:]
    batch = batch if is_vector else [*(broadcast([batch, right.shape[:-2]]) or ())]
    solutions = empty((*batch, *width, most), dtype)[..., :columns]
    residuals = empty((*batch, *(width or (1,))) if rows > columns else (0,), dtype)
    return solutions if is_vector else solutions.mT, residuals, empty((0,), torch.int64), empty((0,), dtype)


def _weight_int4pack_mm(
    activations: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor
) -> Tensor:
    """Return the product with packed 4-bit weights.

    The weights are packed in tiles of 8 rows (ATen/native/cuda/int4mm.cu).
    """
    return activations.new_empty(activations.shape[0], 8 * packed.shape[0])


# Operators that torch cannot run on the meta device. Constructors of models call them too.
MISSING: Mapping[str, Callable[..., Any]] = {"geqrf": _geqrf}
KERNELS: Mapping[str, Callable[..., Any]] = {
    "im2col": partial(_resized_input, torch.ops.aten.im2col.default),
    "col2im": partial(_resized_input, torch.ops.aten.col2im.default),
    "native_layer_norm": _native_layer_norm,
    "native_layer_norm_backward": _native_layer_norm_backward,
    "_fused_rms_norm": _fused_rms_norm,
    "_fused_rms_norm_backward": _fused_rms_norm_backward,
    "native_batch_norm": _native_batch_norm,
    "native_batch_norm_backward": _native_batch_norm_backward,
    "_grouped_mm": _grouped_mm,
    "binary_cross_entropy": _binary_cross_entropy,
    "binary_cross_entropy_backward": _binary_cross_entropy_backward,
    "mse_loss smooth_l1_loss soft_margin_loss": _resized_loss,
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward": _contiguous_gradient,
    "_ctc_loss _ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward _ctc_loss_backward.Tensor": _ctc_loss_backward,
    "log_sigmoid_forward": _log_sigmoid,
    "roll": _roll,
    "_softmax_backward_data": _softmax_backward,
    "masked_fill.Scalar": _masked_fill,
    "index.Tensor": _index,
    "geqrf": _geqrf,
    "linalg_lstsq": _linalg_lstsq,
    "_weight_int4pack_mm": _weight_int4pack_mm,
}
