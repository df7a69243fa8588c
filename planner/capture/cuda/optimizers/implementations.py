"""Make optimizers and gradient clipping choose CUDA's implementations on the meta device.

Multi-tensor kernels get addresses and sizes as kernel arguments, not in device memory
(ATen/native/cuda/MultiTensorApply.cuh), and the fused optimizers allocate nothing
(ATen/native/cuda/FusedAdamKernel.cu, FusedSgdKernel.cu, FusedAdagradKernel.cu). The one kernel with a
workspace is the norm (`planner.capture.recorder.composed`).
"""

import sys
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as _group

from planner.capture.cuda.devices.placement import is_on_host
from planner.capture.cuda.threads import caller_frame


def patches() -> Iterator[tuple[str, object]]:
    """Yield names and replacements of functions by which optimizers choose kernels or make tensors."""
    yield "torch.as_tensor", _recorded(torch.as_tensor)
    yield "torch.tensor", _recorded(torch.tensor)
    # torch/optim/optimizer.py takes foreach by default if all parameters are on such a device,
    # torch/nn/utils/clip_grad.py by `_has_foreach_support` of `_foreach_utils`, and AveragedModel of
    # `swa_utils` if the user gives no averaging function.
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils", "torch.optim.swa_utils"):
        yield f"{module}._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]
    yield "torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cuda", "meta"]
    for module in ("torch.nn.utils.clip_grad", "torch.optim.optimizer", "torch.optim.swa_utils"):
        yield f"{module}._group_tensors_by_device_and_dtype", _by_side
    for name, held in sys.modules.copy().items():  # the module of each class has the functions by their names
        if name.startswith("torch.optim.") and hasattr(held, "_get_capturable_supported_devices"):
            yield f"{name}._get_capturable_supported_devices", lambda *_, **__: ["cuda", "meta"]
        if name.startswith("torch.optim.") and hasattr(held, "_default_to_fused_or_foreach"):
            yield f"{name}._default_to_fused_or_foreach", _choose


def _by_side(
    tensorlistlist: list[list[Any]], with_indices: bool = False
) -> dict[tuple[Any, torch.dtype], tuple[list[list[Any]], list[int]]]:
    """Group lists of tensors by dtype and device, with stand-ins for CPU tensors grouped as on the CPU.

    The tensors of the first list decide, as in `_group_tensors_by_device_and_dtype`.
    """
    grouped = {}
    for (device, dtype), (lists, indices) in _group(tensorlistlist, with_indices).items():
        are_on_host = [one is not None and is_on_host(one) for one in lists[0]]
        for side in {*are_on_host}:
            kept = [one is side for one in are_on_host]
            key = torch.device("cpu") if side else device, dtype
            grouped[key] = [[*compress(each, kept)] for each in lists], [*compress(indices, kept)]
    return grouped


def _choose(params: list[Tensor], *args: Any, **kwargs: Any) -> tuple[bool, bool]:
    """Return (fused, foreach) as torch chooses them, or (False, False) if any parameter is on the CPU."""
    if any(map(is_on_host, params)):
        return False, False
    return _default_to_fused_or_foreach(params, *args, **kwargs)


def _recorded(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a tensor factory so that recorders see the meta tensors that optimizers make with it.

    `plain` is `torch.tensor` or `torch.as_tensor`, which optimizers of torch and torchao call with a number.
    On CUDA the tensor is made on the CPU and copied to the GPU; on the meta device it is made directly,
    beneath all modes (`internal_new_from_data`, torch/csrc/utils/tensor_new.cpp).
    """

    def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        made = plain(data, *args, **kwargs)
        caller = str(caller_frame().f_globals.get("__name__", ""))
        is_optimizer = caller.startswith(("torch.optim.", "torchao.optim."))
        is_new = made.is_meta and not isinstance(data, Tensor) and is_optimizer
        return torch.empty_like(made) if is_new else made

    return make
