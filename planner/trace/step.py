"""What one training (or inference) process does: the loop that is traced, and that calibration runs on a GPU.

The names of the loop decide lifetimes. As in `for x, y in loader: x = x.to(device)`, the last batch on the
device is gone before the next one is copied; the output and the loss live until their names are bound
again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from planner.events import Phase
from planner.job import Job, Loss, Mode, TensorSpec, ZeroGrad

Fetch = Callable[
    [], tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None]
]  # inputs, keyword inputs, target
OnPhase = Callable[[int, Phase], None]


class Scaler(Protocol):
    """As much of `torch.amp.GradScaler` as a loop needs."""

    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: optim.Optimizer) -> None: ...
    def step(self, optimizer: optim.Optimizer) -> object: ...
    def update(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What the loop runs on: autocast and gradient scaling are not the same on `meta` and on a GPU."""

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # a new region
    scaler: Scaler | None = None


_CRITERIA: dict[Loss, Callable[[Tensor, Any], Tensor]] = {
    Loss.CROSS_ENTROPY: F.cross_entropy,
    Loss.MSE: F.mse_loss,
    Loss.BCE_WITH_LOGITS: F.binary_cross_entropy_with_logits,
}


def run_loop(
    model: nn.Module,
    job: Job,
    fetch: Fetch,
    optimizer: optim.Optimizer | None,
    on_phase: OnPhase,
    machine: Machine,
) -> None:
    """Run `job.steps` steps; `on_phase` hears each phase as it starts, and `END` while all names still live.

    `fetch` copies a new batch to the device. `optimizer` is None in the modes that have none.
    """
    training = job.mode is not Mode.INFER
    model.train(training)
    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = {}
    output = loss = None
    with torch.set_grad_enabled(training):
        for step in range(1, job.steps + 1):
            on_phase(step, Phase.INPUTS)
            args, kwargs, target = (), {}, None  # the loop's names go to the next batch before it is copied
            args, kwargs, target = fetch()
            on_phase(step, Phase.FORWARD)
            if optimizer is not None and job.zero_grad is ZeroGrad.BEFORE_FORWARD:
                optimizer.zero_grad(set_to_none=not job.keep_grads)
            region = machine.autocast()
            with region:
                output = model(*args, **kwargs)
                if optimizer is None:
                    continue
                loss = loss_of(job.loss, output, target)
            on_phase(step, Phase.BACKWARD)
            if job.zero_grad is ZeroGrad.BEFORE_BACKWARD:
                optimizer.zero_grad(set_to_none=not job.keep_grads)
            loss.backward()  # type: ignore[no-untyped-call]
            on_phase(step, Phase.OPTIMIZER)
            optimizer.step()
            if job.zero_grad is ZeroGrad.AFTER_STEP:
                optimizer.zero_grad(set_to_none=not job.keep_grads)
        on_phase(job.steps, Phase.END)
    del output, loss


def loss_of(kind: Loss, output: Any, target: Tensor | None) -> Tensor:
    """The scalar that is differentiated. A model with several outputs gets the sum of the losses of each."""
    if kind is Loss.OUTPUT:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None:
            loss = output["loss"] if isinstance(output, dict) else output[0]
        return loss
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    losses = [t.sum() if kind is Loss.SUM else _CRITERIA[kind](t, target) for t in leaves]
    total = losses[0]
    for other in losses[1:]:
        total = total + other
    return total


def empty_batch(
    job: Job, batch: int, device: str
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None]:
    """Uninitialised inputs and target of this batch size on the device."""

    def empty(spec: TensorSpec) -> Tensor:
        return torch.empty(batch, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)

    args = tuple(empty(spec) for spec in job.inputs if spec.keyword is None)
    kwargs = {spec.keyword: empty(spec) for spec in job.inputs if spec.keyword is not None}
    needs_target = job.mode is Mode.TRAIN and job.target is not None
    return args, kwargs, empty(job.target) if needs_target and job.target is not None else None
