"""Detect the half-precision convolutions over volumes that torch 2.9 runs without cuDNN.

The wheels of 2.9 bring cuDNN 9.10, whose results are wrong for some volumes (pytorch/pytorch#163539), so that
torch runs the convolutions by matrix products (`use_cudnn` in ATen/native/Convolution.cpp; #163581). Earlier
versions accept the wrong results. 2.10 brings the same cuDNN and runs volumes by cuDNN, without the engines
that give wrong results.
"""

from typing import Any

import torch

from planner.capture.workspaces.nn.conv_operands import ConvCall, input_of, is_channels_last, operand_of
from planner.program import Target, TorchVersion, format_torch_version

_VERSION: TorchVersion = (2, 9)
_CONVOLUTION = torch.ops.aten.convolution.default


def is_volume_without_cudnn(call: ConvCall) -> bool:
    """Return whether torch runs a convolution over volumes without cuDNN.

    torch 2.9 does so in half precision if the tensors are contiguous and the kernel is larger than a voxel.
    2.9.0 also does so for tensors in channels last, which is ignored.
    """
    if call.target.torch != _VERSION or call.x.dim() != 5:
        return False
    is_half = call.x.dtype in (torch.float16, torch.bfloat16)
    is_last = is_channels_last(input_of(call.x), operand_of(call.weight))
    return is_half and not is_last and any(size != 1 for size in call.weight.shape[2:])


def note_on_call(func: Any, args: tuple[Any, ...], out: Any, target: Target) -> str:
    """Return a note on a convolution over volumes without cuDNN, or "" for any other call."""
    if func is not _CONVOLUTION or target.torch != _VERSION:
        return ""
    call = ConvCall(args[0], args[1], out, args[3], args[4], args[5], args[6], args[8], target)
    if not is_volume_without_cudnn(call):
        return ""
    return (
        f"torch {format_torch_version(target.torch)} runs three-dimensional convolutions in half precision "
        "without cuDNN, since the 9.10 of its wheels gives wrong results for some: the columns of its own "
        "products of matrices are planned; with cuDNN 9.15 or newer in its place, cuDNN runs them"
    )
