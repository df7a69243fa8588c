"""Workspace of softmax's backward pass: ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.strides import contiguous, pointwise_strides
from planner.capture.workspaces._rule import contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Outputs, Rule
from planner.program import Target


def _backward(args: Args, out: Any, target: Target) -> Ops:
    """Hold the product of gradient and output beside the result, and contiguous copies of product and
    output.
    """
    grad, output = args[0], args[1]
    product = Hold(max(tensor_bytes(grad), tensor_bytes(output)))
    copy = () if _is_product_contiguous(grad, output) else (product,)
    return (Outputs(), product, *copy, *contiguous_copies(output))


def _is_product_contiguous(grad: Tensor, output: Tensor) -> bool:
    if grad.is_contiguous() and output.is_contiguous():
        return True
    shape = tuple(output.shape)
    return pointwise_strides(shape, [tuple(grad.stride()), tuple(output.stride())]) == contiguous(shape)


RULES: Mapping[str, Rule] = {"_softmax_backward_data": _backward}
