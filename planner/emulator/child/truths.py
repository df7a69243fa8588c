"""Make a script's checks of the values of GPU tensors pass.

Results of kernels read as zero, so that `torch.isfinite(loss)` and `(boxes >= 0).all()` would be false,
and a script that guards against losses that are not finite, or asserts that boxes are boxes, would end. The
checks run their kernels and wait for them as before.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType
from typing import Any

_CHECKS = ("isfinite", "isreal", "isclose")
_KEEPING = ("all", "any", "logical_and", "__and__", "cpu", "to", "detach")  # true if their argument is true


def attach(torch: Any) -> None:
    """Patch torch so that checks of GPU tensors, such as `torch.isfinite`, read as true.

    `GradScaler.get_scale` gives the initial scale in place of 0. A GPU tensor used as a condition is also
    true if the code raises at once when the condition is false.
    """
    holders = torch, torch.Tensor
    read = torch.Tensor.__bool__

    @wraps(read)
    def is_true(self: Any) -> bool:
        frame = sys._getframe(1)
        return read(self) or (self.is_cuda and raises_if_false(frame.f_code, frame.f_lasti))

    torch.Tensor.__bool__ = is_true
    keeping = {getattr(one, name) for one in holders for name in _KEEPING if hasattr(one, name)}

    class Passed(torch.Tensor):  # type: ignore[misc]
        """The tensor that a check returns, which reads as true."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if func is torch.Tensor.item:
                    return True
                return result.as_subclass(Passed) if func in keeping else result

        def __bool__(self) -> bool:
            return bool(self.item())

    def is_of_gpu(value: Any) -> bool:
        """Return whether a value is a plain GPU tensor or parameter, outside torch.compile and functorch."""
        if torch.compiler.is_compiling() or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return False
        return bool(value.is_cuda) and torch._C._functorch.maybe_get_level(value) < 0

    def passing(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def check(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            return result.as_subclass(Passed) if is_of_gpu(result) else result

        return check

    def close(plain: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(plain)
        def check(first: Any, *args: Any, **kwargs: Any) -> bool:
            return plain(first, *args, **kwargs) or is_of_gpu(first)

        return check

    for holder in holders:
        for name in _CHECKS:
            setattr(holder, name, passing(getattr(holder, name)))
        holder.allclose = close(holder.allclose)
    torch.normal = _without_check(torch, torch.normal)
    scale = torch.amp.GradScaler.get_scale
    torch.amp.GradScaler.get_scale = wraps(scale)(lambda self: scale(self) or self._init_scale)


def _without_check(torch: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `torch.normal` that runs the kernels of its check, but does not read the result.

    torch checks in C++ that no standard deviation is negative (ATen/native/DistributionTemplates.h,
    `CHECK_NORMAL_TENSOR_STD`), once for the call and once for the version with a given output.
    """

    @wraps(plain)
    def normal(mean: Any, std: Any = 1.0, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        is_checked = isinstance(std, torch.Tensor) and std.is_cuda and std.numel()
        if not is_checked or args or kwargs or torch.compiler.is_compiling():
            return plain(mean, std, *args, generator=generator, **kwargs)
        std.min().ge(0)
        if isinstance(mean, torch.Tensor):
            made = mean.new_empty(torch.broadcast_shapes(mean.shape, std.shape))
            std.min().ge(0)
        else:
            made = torch.empty_like(std, memory_format=torch.contiguous_format)
            std.min().ge(0)
            mean = torch.full((), mean, dtype=made.dtype, device=made.device)
        return made.normal_(generator=generator).mul_(std).add_(mean)

    return normal


@cache
def raises_if_false(code: CodeType, offset: int) -> bool:
    """Return whether code raises at once, as `assert` does, if the condition at `offset` is false."""
    steps = list(dis.get_instructions(code))
    places = {step.offset: place for place, step in enumerate(steps)}
    at = places.get(offset, len(steps) - 1)
    if steps[at].opname == "TO_BOOL" and at + 1 < len(steps):
        at += 1
    branch = steps[at]
    if "JUMP" not in branch.opname or not ("IF_TRUE" in branch.opname or "IF_FALSE" in branch.opname):
        return False
    following = at + 1 if "IF_TRUE" in branch.opname else places[branch.argval]
    for step in steps[following:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "FOR_ITER", "YIELD", "SEND")):
            return False
    return False
