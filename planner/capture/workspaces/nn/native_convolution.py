"""Workspace rules of PyTorch's own convolution kernels.

They are depthwise kernels and matrix products. `_select_conv_backend` (ATen/native/Convolution.cpp) selects
the kernels if it does not select cuDNN. The order of the blocks of products is as an allocator recorded it
with torch 2.13 on an emulated GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from planner.capture.workspaces._rule import released, tensor_bytes
from planner.capture.workspaces.nn.conv_operands import (
    ConvCall,
    ConvOperand,
    copy_of_sequence,
    input_of,
    is_channels_last,
    operand_of,
)
from planner.capture.workspaces.nn.volumes import is_volume_without_cudnn
from planner.capture.workspaces.ops import Hold, Op, Ops, Output, Release, ReleaseBeneath, UseCublas
from planner.capture.workspaces.tensor.reductions import Dense, reduction

# ---- depthwise kernels


def is_depthwise(call: ConvCall) -> bool:
    """Return whether each channel of the input has separate filters (`is_depthwise`)."""
    return not call.transposed and call.groups > 1 and call.x.shape[1] == call.groups


def is_native_depthwise(call: ConvCall) -> bool:
    """Return whether a call is a contiguous depthwise convolution that PyTorch's own kernel runs.

    PyTorch's kernel runs it, except in float16 for workloads at which cuDNN is faster (Convolution.cpp,
    use_cudnn_depthwise and the workloads that it lists).
    """
    if not is_depthwise(call):
        return False
    x, weight = input_of(call.x), operand_of(call.weight)
    if is_channels_last(x, weight):
        return False
    if call.x.dtype is not torch.float16 or call.x.dim() == 5 or any(step != 1 for step in call.dilation):
        return True
    sizes: tuple[int, ...] = x.shape
    batch, channels, height, width = sizes
    step, kernel = call.stride[-1], call.weight.shape[-1]
    if channels < 32 or (call.stride[0] != step and height != 1):
        return True
    if height == 1 and step == 1:
        return False
    if weight.shape[2] != kernel or kernel not in (1, 3, 5) or width < 7 or step not in (1, 2):
        return True
    if step == 1:
        return False
    if batch == 1:
        return kernel == 1 and width > 28
    if kernel == 1:
        return not (batch <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))


def depthwise_gradients(grad: ConvOperand, x: ConvOperand, mask: Sequence[bool]) -> Ops:
    """Return the ops of PyTorch's depthwise kernels for the gradients of input and weight.

    The kernel for images makes the weight gradient first (the order of arguments in
    ATen/native/cuda/DepthwiseConv2d.cu); the kernel for volumes makes both before it copies, and keeps the
    copy of the output's gradient (DepthwiseConv3d.cu).
    """
    copy, held = grad.copies_to(is_last=False), x.copies_to(is_last=False) if mask[1] else ()
    if len(grad.shape) == 5:
        return (*(Output() for is_needed in mask[:2] if is_needed), *copy, *held, *released(held))
    ops: Ops = ()
    if mask[1]:
        ops += (*held, Output(1 if mask[0] else 0), *released(held))
    if mask[0]:
        ops += (Output(),)
    return (*copy, *ops, *released(copy))


# ---- products of matrices: ATen/native/cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu,
# NaiveConvolutionTranspose2d.cu and NaiveConvolutionTranspose3d.cu


def runs_products(call: ConvCall) -> bool:
    """Return whether PyTorch runs a convolution as products of unfolded columns.

    PyTorch does so if it does not use cuDNN (`use_cudnn`): for bfloat16 below compute capability 8.0, and for
    volumes in some versions. Depthwise convolutions are never unfolded.
    """
    if is_depthwise(call):
        return False
    is_bfloat16 = torch.bfloat16 in (call.x.dtype, call.weight.dtype)
    return (is_bfloat16 and call.target.capability < (8, 0)) or is_volume_without_cudnn(call)


def forward_products(call: ConvCall, *, has_bias: bool) -> Ops:
    """Return the ops of a convolution's forward pass that PyTorch runs as matrix products.

    Samples and groups run one after another.
    """
    run = _Products(call, ["y"])
    x = run.contiguous("x", input_of(call.x))
    run.contiguous("weight", operand_of(call.weight))
    for _ in range(call.groups):
        run.part("x of group", x)
        if call.transposed:
            run.output_of_transposed()
            run.hold("columns", run.columns_bytes)
            if has_bias:
                run.hold("ones", prod(call.y.shape[2:]) * call.y.element_size())
        else:
            run.result("y")
            if run.needs_columns or run.is_dilated:
                run.hold("columns", run.columns_bytes)
        run.multiply()
        run.free("ones", "columns", "x of group")
    return (*copy_of_sequence(call.x), *run.joined())


def gradients_by_products(call: ConvCall, mask: Sequence[bool]) -> Ops:
    """Return the ops of a convolution's backward pass that PyTorch runs as matrix products.

    `mask` selects the gradients of input, weight and bias.
    """
    names = [name for name, is_needed in zip(("x", "weight", "bias"), mask, strict=True) if is_needed]
    run = _Products(call, names)
    x = run.contiguous("x", input_of(call.x))
    run.contiguous("weight", operand_of(call.weight))
    for _ in range(call.groups):
        grad = run.part("gradient of group", operand_of(call.y))
        run.part("x of group", x)
        if call.transposed:
            _gradients_of_transposed(run, grad)
        elif run.is_dilated:
            _gradients_of_dilated(run, grad)
        else:
            _gradients(run, grad)
        run.free("x of group", "gradient of group")
    return (*copy_of_sequence(call.x), *run.joined())


def _gradients(run: "_Products", grad: ConvOperand) -> None:
    run.contiguous("gradient", grad)
    if "x" in run.names:
        run.result("x")
        run.hold("columns", run.columns_bytes)
        run.multiply()
    if "bias" in run.names:
        run.result("bias")
        run.sum_to_bias(grad.shape, 0, *range(2, len(grad.shape)))
    if "weight" in run.names:
        run.result("weight")
        if "columns" not in run.held:
            run.hold("columns", run.columns_bytes)
        run.multiply()
    run.free("columns", "gradient")


def _gradients_of_dilated(run: "_Products", grad: ConvOperand) -> None:
    """Record in `run` the ops of the gradients of a dilated convolution.

    The bias gradient is summed up sample by sample; one sum is recorded, since all sums take the same block.
    """
    run.contiguous("gradient", grad)
    for name in run.names:
        run.result(name)
    if run.names != ["bias"]:
        run.hold("columns", run.columns_bytes)
        run.multiply()
    if "bias" in run.names:
        run.hold("sum", run.bytes_of("bias"))
        run.sum_to_bias(grad.shape[1:], *range(1, len(grad.shape) - 1))
        run.free("sum")
    run.free("columns", "gradient")


def _gradients_of_transposed(run: "_Products", grad: ConvOperand) -> None:
    """Record in `run` the ops of the gradients of a transposed convolution.

    The input's gradient comes first. Another kernel makes the gradients of weight and bias.
    """
    for names in (["x"], ["weight", "bias"]):
        needed = [name for name in names if name in run.names]
        if not needed:
            continue
        if names == ["x"]:
            run.contiguous("gradient", grad)
        for name in needed:
            run.result(name)
        if names != ["x"]:
            run.contiguous("gradient", grad)
        if run.needs_columns:
            run.hold("columns", run.columns_bytes)
        if needed != ["bias"]:
            run.multiply()
        if "bias" in needed:
            run.sum_to_bias(grad.shape, 0, *range(2, len(grad.shape)))
        run.free("columns", "gradient")


@dataclass(slots=True)
class _Products:
    """A recorder of the ops of one convolution by matrix products. Held blocks have names."""

    call: ConvCall
    names: list[str]  # names of the results, in order
    held: list[str] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _made: list[str] = field(default_factory=list)
    _has_multiplied: bool = False

    @property
    def is_dilated(self) -> bool:
        """Return whether the kernels of dilated convolutions run, as they do for all volumes."""
        return self.call.x.dim() == 5 or any(step != 1 for step in self.call.dilation)

    @property
    def needs_columns(self) -> bool:
        """Return whether the input must be unfolded to columns.

        If not, the input itself serves as the columns.
        """
        call = self.call
        ones = (*call.weight.shape[2:], *call.stride, *call.dilation)
        return any(number != 1 for number in ones) or any(number != 0 for number in call.padding)

    @property
    def columns_bytes(self) -> int:
        """Return the bytes of the unfolded columns of one sample and one group.

        There is one column for each output position, or input position if the convolution is transposed.
        """
        positions = (self.call.x if self.call.transposed else self.call.y).shape[2:]
        return prod(self.call.weight.shape[1:]) * prod(positions) * self.call.x.element_size()

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one group's part of a result: "x", "weight", "bias" or "y"."""
        call = self.call
        if name == "bias":
            return call.y.shape[1] // call.groups * call.y.element_size()
        return tensor_bytes({"x": call.x, "weight": call.weight, "y": call.y}[name]) // call.groups

    def hold(self, name: str, size_bytes: int) -> None:
        """Record the allocation of a block under a name."""
        self._ops.append(Hold(size_bytes))
        self.held.append(name)

    def free(self, *names: str) -> None:
        """Record that the named blocks are freed. Names without a held block are ignored."""
        for name in names:
            if name in self.held:
                beneath = self.held[::-1].index(name)
                self._ops.append(ReleaseBeneath(beneath) if beneath else Release(1))
                del self.held[-1 - beneath]

    def contiguous(self, name: str, operand: ConvOperand) -> ConvOperand:
        """Return an operand in contiguous form, and record a copy if one is needed."""
        if operand.copies_to(is_last=False):
            self.hold(name, operand.size_bytes)
        return operand.contiguous(is_last=False)

    def part(self, name: str, operand: ConvOperand) -> ConvOperand:
        """Return one group's part of an operand, and record a copy if the part is not dense (`subtensor`)."""
        part = operand.group_of(self.call.groups)
        if part.copies_to(part.suggests_last):
            self.hold(name, part.size_bytes)
        return part.contiguous(part.suggests_last)

    def result(self, name: str) -> None:
        """Record the allocation of a result, or of one group's part of it if there are several groups."""
        if self.call.groups > 1:
            self.hold(f"part of {name}", self.bytes_of(name))
        else:
            left = [other for other in self.names if other not in self._made]
            self._ops.append(Output(left.index(name)))
            self._made.append(name)

    def output_of_transposed(self) -> None:
        """Record the allocation of the output of a transposed convolution.

        Over volumes, a larger output is made in the input's size and then resized.
        """
        is_resized = self.call.x.dim() == 5 and self.bytes_of("y") > self.bytes_of("x")
        if is_resized:
            self.hold("old output", self.bytes_of("x"))
        self.result("y")
        self.free("old output")

    def multiply(self) -> None:
        """Record the use of cuBLAS, unless it is recorded already."""
        if not self._has_multiplied:
            self._ops.append(UseCublas())
        self._has_multiplied = True

    def sum_to_bias(self, shape: Sequence[int], *dims: int) -> None:
        """Record the reduction of a contiguous output gradient to the bias gradient.

        `dims` are the reduced dimensions.
        """
        scratch = reduction(Dense(tuple(shape)), dims, 4, self.call.target)
        self._ops += [*scratch, *released(scratch)]

    def joined(self) -> Ops:
        """Return all recorded ops, followed by the whole results if there are several groups."""
        if self.call.groups > 1:
            self._ops += [Output() for _ in self.names]
        return tuple(self._ops)
