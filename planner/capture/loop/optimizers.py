"""Make torch's optimizers, clip gradients, and average weights.

Optimizers have their defaults on CUDA.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import _foreach_supported_types
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from planner.errors import UsageError
from planner.jobs import FUSED_OPTIMIZERS, ClipGradients, Optimizer, OptimizerImpl

CONSTRUCTORS: dict[Optimizer, partial[Any]] = {
    Optimizer.SGD: partial(optim.SGD, lr=1e-3),
    Optimizer.MOMENTUM: partial(optim.SGD, lr=1e-3, momentum=0.9),
    Optimizer.NESTEROV: partial(optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    Optimizer.ADAM: partial(optim.Adam, lr=1e-3),
    Optimizer.ADAMW: partial(optim.AdamW, lr=1e-3),
    Optimizer.RMSPROP: partial(optim.RMSprop, lr=1e-3),
    Optimizer.ADAGRAD: partial(optim.Adagrad, lr=1e-3),
    Optimizer.ADAFACTOR: partial(optim.Adafactor, lr=1e-3),
}


def build_optimizer(
    kind: Optimizer,
    impl: OptimizerImpl,
    parameters: Iterable[nn.Parameter],
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> optim.Optimizer:
    """Return torch's optimizer of a kind and implementation over the parameters that require gradients.

    By default torch chooses `foreach` on CUDA (torch/optim/optimizer.py, `_default_to_fused_or_foreach`),
    except for Adafactor and weights of torchao, and a loop over parameters in all other cases. So the
    implementation is always passed. All parameters form one group, or one group for each device mesh
    (transformers' `Trainer.create_optimizer`). `arguments` are further keywords. Raises UsageError if torch
    has no fused implementation of the optimizer.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    is_taken = all(type(one) in _foreach_supported_types for one in trained)
    options: dict[str, Any] = {"foreach": impl is OptimizerImpl.FOREACH and is_taken}
    if impl is OptimizerImpl.FUSED:
        if kind not in FUSED_OPTIMIZERS:
            names = ", ".join(sorted(FUSED_OPTIMIZERS))
            raise UsageError(
                f"--optimizer-impl fused: torch has no fused {kind}; choose foreach, or one of {names}"
            )
        options = {"fused": True}
    optimizer: optim.Optimizer = CONSTRUCTORS[kind](
        [{"params": one} for one in _by_mesh(trained)] or trained, **options, **arguments
    )
    return optimizer


def clip(kind: ClipGradients, parameters: Iterable[nn.Parameter]) -> None:
    """Clip gradients in place by value or by norm, as `kind` says.

    Values are clipped to -1.0 to 1.0, the total norm to 1.0. On CUDA each kind clips all gradients at once
    (torch/nn/utils/clip_grad.py). The norm is not kept. Nothing is clipped if `kind` is NONE.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = _by_mesh(trained)
    if kind is ClipGradients.VALUE:
        for group in groups:
            clip_grad_value_(group, clip_value=1.0)
    elif kind is ClipGradients.NORM and len(groups) > 1:
        _clip_groups(groups)
    elif kind is ClipGradients.NORM:
        clip_grad_norm_(trained, max_norm=1.0)


def _clip_groups(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Clip the gradients on several device meshes so that their total norm is at most 1.0.

    The norm is computed as in transformers' `Trainer._mixed_mesh_grad_norm`.
    """
    norms = [get_total_norm([one.grad for one in group if one.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, 1.0, total)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped by device mesh. No kernel takes tensors of different meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [*groups.values()]


def make_ema(model: nn.Module) -> AveragedModel:
    """Return a copy of a model for an exponential moving average of its parameters.

    `update_parameters(model)` updates the copy after each step of the optimizer. The first call copies, later
    calls average all parameters as one list; buffers are copied each time (torch/optim/swa_utils.py). The
    counter stays on the CPU.
    """
    average = get_ema_multi_avg_fn(0.999)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=average)
