"""Answer Python queries of autocast for `meta` as for CUDA, and for a GPU that is not here.

Models query with the device type of their tensors (transformers, timm, torch.utils.checkpoint do), which is
`meta` in a capture and would be `cuda` on a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode


def patches(clear: Callable[[], None]) -> Iterator[tuple[str, object]]:
    """Yield names and their replacements; `clear` empties the cache of casts together with torch's own."""
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield f"torch.{name}", _of_cuda(getattr(torch, name))
    yield "torch.autocast.__init__", _of_cuda(autocast_mode.autocast.__init__, position=1)
    for module in ("torch.amp", "torch.amp.autocast_mode"):
        yield f"{module}.is_autocast_available", _of_cuda(autocast_mode.is_autocast_available)
    # `torch.autocast("cuda")` switches itself off where CUDA is not available
    yield "torch.cuda.amp.common.amp_definitely_not_available", lambda: False
    yield "torch.cuda.is_bf16_supported", lambda including_emulation=True: True
    clear_own = torch.clear_autocast_cache

    def clear_both() -> None:
        clear_own()
        clear()

    yield "torch.clear_autocast_cache", clear_both


def _of_cuda(function: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
    """Return the function with `cuda` for `meta`, its device type being the argument at this position."""

    def query(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        if len(values) > position and values[position] == "meta":
            values[position] = "cuda"
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cuda"
        return function(*values, **kwargs)

    return query
