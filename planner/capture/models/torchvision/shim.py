"""Make torchvision importable without its compiled extension.

The extension may not have been built for the installed torch. torchvision's wheels are built for CUDA. With a
CPU-only torch the extension does not load; torchvision continues without it, but registers fake kernels for
two operators that only the extension defines (torchvision/_meta_registrations.py). So the schemas must be
defined before torchvision is imported, but only if the extension does not load: otherwise a second definition
of the same schemas would abort the process. The other operators here are defined at the same time. Schemas,
shapes and the tensors that autograd saves follow torchvision 0.28: csrc/ops/roi_align.cpp, nms.cpp and
csrc/ops/autograd/roi_align_kernel.cpp, which saves the regions and the size of the input, not the input.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_GRID = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SCHEMAS = {
    "nms": _NMS,
    "qnms": _NMS,
    "roi_align": f"(Tensor input, Tensor rois, {_GRID}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": (
        f"(Tensor grad, Tensor rois, {_GRID}, SymInt batch_size, SymInt channels, SymInt height, "
        "SymInt width, int sampling_ratio, bool aligned) -> Tensor"
    ),
}


def prepare_torchvision() -> None:
    """Make a later `import torchvision` succeed even without its extension. May be called twice."""
    spec = None if "torchvision" in sys.modules else importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads_extension(Path(spec.origin).parent):
        return
    _define_missing()


def _loads_extension(package: Path) -> bool:
    """Return whether torchvision's extension loads, by loading it, or True with a CUDA build of torch.

    It is loaded as torchvision/extension.py will load it. Loading a library twice does no harm. The
    extension's name is `_C` up to torchvision 0.28 and `_C_stable` since 0.29. With a CUDA torch the result
    is True without trying: in a broken installation, a second definition would abort the process.
    """
    if torch.version.cuda is not None:
        return True
    for extension in package.glob("_C*"):
        if extension.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            try:
                torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
            except (ImportError, OSError):
                continue
            return True
    return False


def _define_missing() -> None:
    """Define the missing operators of `_SCHEMAS`, and the meta kernels and gradient of `roi_align`.

    The definitions last for the life of the process.
    """
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        # `define` without a `Library` keeps the definition for the life of the process.
        torch.library.define(f"torchvision::{name}", _SCHEMAS[name])
    if "roi_align" in missing:
        torch.library.impl("torchvision::roi_align", "Meta", _roi_align)
        torch.library.impl("torchvision::_roi_align_backward", "Meta", _roi_align_backward)
        torch.library.register_autograd("torchvision::roi_align", _backward, setup_context=_remember)


def _roi_align(input: Tensor, rois: Tensor, scale: float, height: int, width: int, *_: Any) -> Tensor:
    return input.new_empty((rois.shape[0], input.shape[1], height, width))


def _roi_align_backward(
    grad: Tensor, rois: Tensor, scale: float, pooled_height: int, pooled_width: int, batch: int,
    channels: int, height: int, width: int, *_: Any,
) -> Tensor:  # fmt: skip
    return grad.new_empty((batch, channels, height, width))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    image, rois, *ctx.grid, ctx.sampling_ratio, ctx.aligned = inputs
    ctx.save_for_backward(rois)
    ctx.shape = image.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rois,) = ctx.saved_tensors
    of_input = torch.ops.torchvision._roi_align_backward(
        grad, rois, *ctx.grid, *ctx.shape, ctx.sampling_ratio, ctx.aligned
    )
    return of_input, None, None, None, None, None, None
