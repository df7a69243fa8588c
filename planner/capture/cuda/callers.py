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


def _root_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _function_of(frame: FrameType) -> tuple[str, str]:
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name


def is_of_torch(frame: FrameType) -> bool:
    """Return whether a frame runs Python code of torch or the planner.

    Modules in `_OF_ONE_RUN` do not count.
    """
    return _root_of(frame) in _TORCH and frame.f_globals.get("__name__") not in _OF_ONE_RUN


def moves_tensors(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch that may move tensors between devices.

    The planner's code does not count, nor does the code that infers the results of operators.
    """
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("torch.") and not name.startswith(_INFERENCE)


def skips_meta(frame: FrameType, torch_version: TorchVersion) -> bool:
    """Return whether a frame runs an initializer that leaves meta tensors unchanged.

    The initializer is torch's. `torch_version` is the version that the job runs. `trunc_normal_` counts only
    since 2.13, since it makes no tensors in earlier versions.
    """
    is_redrawn = draws_truncated(frame) and torch_version >= _REDRAWN_SINCE
    return is_redrawn or _function_of(frame) == ("torch.nn.init", "orthogonal_")


def draws_truncated(frame: FrameType) -> bool:
    """Return whether a frame runs the function that draws the weights for `torch.nn.init.trunc_normal_`."""
    return _function_of(frame) == ("torch.nn.init", "_no_grad_trunc_normal_")


def caches_answers(frame: FrameType) -> bool:
    """Return whether a frame runs a library that caches device queries.

    Modules in `_OF_ONE_RUN` do not count.
    """
    return is_of_library(frame) and frame.f_globals.get("__name__") not in _OF_ONE_RUN


def is_of_library(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch, the planner or a library in `_CACHING`."""
    return _root_of(frame) in _CACHING


def line_of_caller(is_left_out: Callable[[FrameType], bool] = is_of_library) -> str:
    """Return FILE:LINE of the innermost frame that is not left out, or "".

    Frames for which `is_left_out` returns True are left out.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_left_out(frame):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def modules_of_users() -> Iterator[ModuleType]:
    """Yield the imported modules of the user's code.

    They are not part of Python, the planner or an installed library.
    """
    for module in sys.modules.copy().values():
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(file, str) and _is_of_user(file):
            yield module


@cache
def _is_of_user(file: str) -> bool:
    is_installed = file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file
    return Path(file).is_absolute() and not is_installed
