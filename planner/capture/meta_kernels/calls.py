"""Call operators that torch may decompose, and release the tensors that importing dynamo keeps alive."""

import gc
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch


def call_operator(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an operator's result; release the stack frames that an import of dynamo by the call keeps."""
    knows_dynamo = "torch._dynamo" in sys.modules
    out = func(*args, **kwargs) if kwargs else func(*args)
    if not knows_dynamo and "torch._dynamo" in sys.modules:
        release_importing_frames()
    return out


def release_importing_frames() -> None:
    """Release the stack frames that the import of dynamo kept alive, with the tensors in them.

    The first decomposition in a process imports dynamo (torch/_compile.py), which calls `torch.fx.wrap`. That
    function keeps its own frame in a variable, a cycle that lasts until garbage is collected.
    """
    wrap = torch.fx._symbolic_trace.wrap.__code__
    for one in gc.get_objects():
        if type(one) is FrameType and one.f_code is wrap:
            one.clear()
