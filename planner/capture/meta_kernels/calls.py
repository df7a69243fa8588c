"""Call operators, and clear the stack frames that an import of dynamo keeps alive."""

import gc
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch


def call_operator(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator and return its result. If the call imports dynamo, clear the import's stack frames."""
    knows_dynamo = "torch._dynamo" in sys.modules
    out = func(*args, **kwargs) if kwargs else func(*args)
    if not knows_dynamo and "torch._dynamo" in sys.modules:
        release_importing_frames()
    return out


def release_importing_frames() -> None:
    """Clear the stack frames that dynamo's import keeps alive, so that their tensors are freed.

    The first decomposition in a process imports dynamo (torch/_compile.py), which calls `torch.fx.wrap`. That
    function keeps its own frame in a variable, a cycle that lasts until garbage is collected.
    """
    wrap = torch.fx._symbolic_trace.wrap.__code__
    for one in gc.get_objects():
        if type(one) is FrameType and one.f_code is wrap:
            one.clear()
