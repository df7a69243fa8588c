"""Which code calls: that of the user, of torch and the planner, or of a library that remembers answers."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

_TORCH = frozenset(("torch", "planner", "functorch", "torchgen"))
# Libraries that ask once and remember the answer beyond the trace.
_REMEMBERING = _TORCH | {
    *("accelerate", "bitsandbytes", "deepspeed", "diffusers", "lightning", "lightning_fabric", "monai"),
    *("peft", "pytorch_lightning", "timm", "torchmetrics", "torchvision", "transformers", "triton"),
}


def _root_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_of_torch(frame: FrameType) -> bool:
    """Whether torch's own Python code or the planner runs in the frame."""
    return _root_of(frame) in _TORCH


def remembers_answers(frame: FrameType) -> bool:
    """Whether the frame is of a library that would keep what it is told about the machine."""
    return _root_of(frame) in _REMEMBERING


def line_of_caller() -> str:
    """The innermost line of user code as FILE:LINE; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and remembers_answers(frame):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def modules_of_users() -> Iterator[ModuleType]:
    """The imported modules that neither Python nor an installed library brought."""
    paths = sysconfig.get_paths()
    library = (paths["stdlib"], paths["platstdlib"], str(Path(__file__).resolve().parents[2]))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not isinstance(file, str) or not Path(file).is_absolute():
            continue
        if not file.startswith(library) and "site-packages" not in file and "dist-packages" not in file:
            yield module
