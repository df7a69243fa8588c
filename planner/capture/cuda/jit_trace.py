"""Replace `torch.jit.trace` for modules whose meta kernels cannot be traced."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Remark = Callable[[str], None]


def tracing(plain: Callable[..., Any], on_remark: Remark) -> Callable[..., Any]:
    """Return a version of `torch.jit.trace` that returns a module itself if meta kernels fail in the trace.

    Sizes are tensors in a trace, which meta kernels in Python refuse; a traced module runs the operators of
    the module.
    """

    @functools.wraps(plain)
    def trace(func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(func, *args, **kwargs)
        except TypeError:
            if not isinstance(func, nn.Module):
                raise
            on_remark("traces a module for TorchScript: planned operator by operator")
            return func

    return trace
