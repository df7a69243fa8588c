"""Tell from stack frames whose code is running.

The code is the user's, torch's, the planner's or another library's.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

from planner.program import TorchVersion

_TORCH = frozenset(("torch", "planner", "functorch", "torchgen"))
# Libraries that query the machine once and cache the answer beyond the capture.
_CACHING = _TORCH | {
    *("bitsandbytes", "deepspeed", "diffusers", "monai"),
    *("peft", "timm", "torchmetrics", "torchvision", "transformers", "triton"),
}

_INFERENCE = tuple(f"torch._{one}" for one in ("decomp", "meta_registrations", "prims", "refs", "subclasses"))
_REDRAWN_SINCE: TorchVersion = (2, 13)  # trunc_normal_ draws weights beyond its bounds again

_PATHS = sysconfig.get_paths()
_INSTALLED = (_PATHS["stdlib"], _PATHS["platstdlib"], str(Path(__file__).resolve().parents[2]))

# Modules of these libraries that count as user code: they query again for each script, or make a stream.
_OF_ONE_RUN = ("transformers.training_args", "transformers.cache_utils", "torch.cuda.graphs")


def package_of(frame: FrameType) -> str:
    """Return the name of the top-level package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _function_of(frame: FrameType) -> tuple[str, str]:
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name


def is_of_torch(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch or the planner, except modules that count as user code."""
    return package_of(frame) in _TORCH and frame.f_globals.get("__name__") not in _OF_ONE_RUN


def moves_tensors(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch, except decompositions, meta kernels and fake tensors."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("torch.") and not name.startswith(_INFERENCE)


def skips_meta(frame: FrameType, torch_version: TorchVersion) -> bool:
    """Return whether a frame runs `orthogonal_`, or since 2.13 `trunc_normal_`, which skip meta tensors.

    `torch_version` is the version that the job runs. Earlier versions of `trunc_normal_` make no tensors.
    """
    is_redrawn = draws_truncated(frame) and torch_version >= _REDRAWN_SINCE
    return is_redrawn or _function_of(frame) == ("torch.nn.init", "orthogonal_")


def draws_truncated(frame: FrameType) -> bool:
    """Return whether a frame runs the function that draws the weights for `torch.nn.init.trunc_normal_`."""
    return _function_of(frame) == ("torch.nn.init", "_no_grad_trunc_normal_")


def caches_answers(frame: FrameType) -> bool:
    """Return whether a library that caches device queries runs, except modules that count as user code."""
    return is_of_library(frame) and frame.f_globals.get("__name__") not in _OF_ONE_RUN


def is_of_library(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch, the planner or a library that caches device queries."""
    return package_of(frame) in _CACHING


def line_of_caller(is_left_out: Callable[[FrameType], bool] = is_of_library) -> str:
    """Return FILE:LINE of the innermost calling frame for which `is_left_out` is False, or "" if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_left_out(frame):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def modules_of_users() -> Iterator[ModuleType]:
    """Yield the imported modules outside of Python, the planner and installed libraries: the user's code."""
    for module in sys.modules.copy().values():
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(file, str) and _is_of_user(file):
            yield module


@cache
def _is_of_user(file: str) -> bool:
    is_installed = file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file
    return Path(file).is_absolute() and not is_installed
