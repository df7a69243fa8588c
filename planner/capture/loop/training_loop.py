"""What one training (or inference) process does: the loop that is traced, and that calibration runs on a GPU.

The names of the loop decide lifetimes. As in `for x, y in loader: x = x.to(device)`, the last batch on the
device is gone before the next one is copied; the output and the loss live until their names are bound
again. An evaluation between the steps runs while the names of the step before are still bound, and has
names of its own, which stay bound likewise.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from planner.capture.loop.checkpoint import checkpointed_blocks
from planner.capture.loop.ddp import Buckets, data_parallel
from planner.capture.loop.formats import format_of
from planner.capture.loop.generate import run_generation
from planner.capture.loop.loss_source import notes_on_loss
from planner.capture.loop.optimizers import clip, make_average
from planner.capture.loop.runtime import Fetch, Machine, OnPhase, Scaler
from planner.errors import ModelError
from planner.jobs import (
    Checkpoint,
    ClipGradients,
    Job,
    Loss,
    Mode,
    TensorSpec,
    ZeroGrad,
    batch_of_specs,
    is_code,
)
from planner.program import Category, Phase

__all__ = [
    "Fetch",
    "Machine",
    "OnPhase",
    "Scaler",
    "empty_batch",
    "loss_of",
    "run_loop",
    "with_few_micro_batches",
]

MOST_MICRO_BATCHES = 4  # of a step that are run; all but the first of them allocate the same
EVALUATED_BATCHES = 2  # in the second, the names of the first are still bound

_CRITERIA: dict[Loss, Callable[[Tensor, Any], Tensor]] = {
    Loss.CROSS_ENTROPY: F.cross_entropy,
    Loss.MSE: F.mse_loss,
    Loss.BCE_WITH_LOGITS: F.binary_cross_entropy_with_logits,
}


@dataclass(slots=True)
class _Names:
    """Names of a script; what they are bound to is alive."""

    args: tuple[Any, ...] = ()  # of tensors, or of what holds some
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    output: Any = None
    loss: Tensor | None = None

    def fetch(self, fetch: Fetch) -> None:
        """Let go of the last batch, then copy the next."""
        self.args, self.kwargs, self.target = (), {}, None
        self.args, self.kwargs, self.target = fetch()


@dataclass(frozen=True, slots=True)
class _Script:
    """A loop that trains, with all that it keeps between steps."""

    model: nn.Module
    job: Job
    fetch: Fetch
    optimizer: optim.Optimizer
    on_phase: OnPhase
    machine: Machine
    buckets: Buckets | None
    average: AveragedModel | None
    fetch_evaluated: Fetch
    names: _Names = field(default_factory=_Names)
    evaluated: _Names = field(default_factory=_Names)

    def loss(self, names: "_Names") -> Tensor:
        """The loss of what the model gave for a batch."""
        if self.machine.criterion is not None:
            return self.machine.criterion(names.output, names.target)
        assert isinstance(self.job.loss, Loss)
        return loss_of(self.job.loss, names.output, names.target)

    def zero_grad(self, when: ZeroGrad) -> None:
        """Here the gradients are let go of, if the job does so at this place."""
        if self.job.zero_grad is when:
            self.optimizer.zero_grad(set_to_none=not self.job.keep_grads)


def run_loop(
    model: nn.Module,
    job: Job,
    fetch: Fetch,
    optimizer: optim.Optimizer | None,
    on_phase: OnPhase,
    machine: Machine,
    fetch_evaluated: Fetch | None = None,
) -> tuple[str, ...]:
    """Run `job.steps` steps; `on_phase` hears each phase as it starts, and `END` while all names still live.

    `fetch` copies a new batch to the device, `fetch_evaluated` one for the evaluation, where that has another
    size. `optimizer` is None in the modes that have none. The sentences
    that come back are to be repeated with whatever is concluded from the run. Raises ModelError where the
    model has no blocks to checkpoint, or does not generate.
    """
    if is_code(job.loss) and machine.criterion is None and job.mode is Mode.TRAIN:
        raise ModelError(
            f"{job.model}: loss {job.loss} is code, which neither MemTracker nor a run on a GPU calls here; "
            "name a loss that the planner knows"
        )
    if job.mode is Mode.GENERATE:
        return run_generation(model, job, fetch, on_phase, machine)
    model.train(job.mode is not Mode.INFER)
    notes: tuple[str, ...] = ()
    with ExitStack() as kept:
        if job.checkpoint is Checkpoint.BLOCKS and job.mode is not Mode.INFER:
            notes = kept.enter_context(checkpointed_blocks(model, job))
        if optimizer is None:
            _run_forward(model, job, fetch, on_phase, machine)
            return notes
        buckets = kept.enter_context(data_parallel(model, job, machine.label)) if job.ddp else None
        average = make_average(model) if job.ema else None
        evaluated = fetch if fetch_evaluated is None else fetch_evaluated
        script = _Script(model, job, fetch, optimizer, on_phase, machine, buckets, average, evaluated)
        _train(script)
        notes += notes_on_loss(job.loss, script.names.output)
    return notes


def with_few_micro_batches(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the job with as many micro-batches as are worth running, and the sentence to repeat.

    From the second one on, each finds the gradients of those before and adds to them in place, so that all
    allocate the same blocks in the same order.
    """
    if job.accumulate <= MOST_MICRO_BATCHES:
        return job, ()
    note = (
        f"of the {job.accumulate:,} micro-batches in each step, {MOST_MICRO_BATCHES} are run; the others "
        "repeat the last"
    )
    return replace(job, accumulate=MOST_MICRO_BATCHES), (note,)


def _run_forward(model: nn.Module, job: Job, fetch: Fetch, on_phase: OnPhase, machine: Machine) -> None:
    """Forward passes and nothing else."""
    names = _Names()
    with torch.set_grad_enabled(job.mode is Mode.FORWARD):
        for step in range(1, job.steps + 1):
            on_phase(step, Phase.INPUTS)
            names.fetch(fetch)
            on_phase(step, Phase.FORWARD)
            with machine.autocast():
                names.output = model(*names.args, **names.kwargs)
        on_phase(job.steps, Phase.END)


def _train(script: _Script) -> None:
    job = script.job
    if script.average is not None:
        for tensor in (*script.average.parameters(), *script.average.buffers()):
            script.machine.label(tensor, Category.OPTIMIZER)
    with torch.enable_grad():
        for step in range(1, job.steps + 1):
            if job.evaluate and step == job.steps:
                _evaluate(script, step)
            for micro in range(job.accumulate):
                _forward_and_backward(script, step, micro)
            _update(script, step)
        script.on_phase(job.steps, Phase.END)


def _forward_and_backward(script: _Script, step: int, micro: int) -> None:
    """One micro-batch: `loss / N` and its backward pass, which adds to the gradients that are there."""
    job, names = script.job, script.names
    script.on_phase(step, Phase.INPUTS)
    names.fetch(script.fetch)
    script.on_phase(step, Phase.FORWARD)
    if micro == 0:
        script.zero_grad(ZeroGrad.BEFORE_FORWARD)
    with script.machine.autocast():
        if script.buckets is not None:
            script.buckets.before_forward()
        names.output = script.model(*names.args, **names.kwargs)
        names.loss = script.loss(names)
        if job.accumulate > 1:
            names.loss = names.loss / job.accumulate
        if job.backward_in_autocast:
            _backward(script, step, micro)
    if not job.backward_in_autocast:
        _backward(script, step, micro)


def _backward(script: _Script, step: int, micro: int) -> None:
    script.on_phase(step, Phase.BACKWARD)
    if micro == 0:
        script.zero_grad(ZeroGrad.BEFORE_BACKWARD)
    loss, scaler = script.names.loss, script.machine.scaler
    assert loss is not None
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _update(script: _Script, step: int) -> None:
    """Clip, step, and bring the average up to date."""
    job, optimizer, scaler = script.job, script.optimizer, script.machine.scaler
    script.on_phase(step, Phase.OPTIMIZER)
    if job.clip_gradients is not ClipGradients.NONE:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip(job.clip_gradients, script.model.parameters())
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if script.average is not None:
        script.average.update_parameters(script.model)
    script.zero_grad(ZeroGrad.AFTER_STEP)


def _evaluate(script: _Script, step: int) -> None:
    """Forward passes and losses in eval mode without gradients, as between two epochs.

    Before the last step, so that of the usual three the first two show what training is like without it.
    """
    names = script.evaluated
    script.model.eval()
    with torch.no_grad():
        for _ in range(EVALUATED_BATCHES):
            script.on_phase(step, Phase.INPUTS)
            names.fetch(script.fetch_evaluated)
            script.on_phase(step, Phase.FORWARD)
            with script.machine.autocast():
                names.output = script.model(*names.args, **names.kwargs)
                names.loss = script.loss(names)
    script.model.train()


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


def empty_batch(job: Job, batch: int, device: str) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Uninitialised inputs and target of this batch size on the device."""

    def empty(spec: TensorSpec) -> Tensor:
        shape, dtype = (batch, *spec.shape), getattr(torch, spec.dtype)
        return torch.empty(shape, dtype=dtype, device=device, memory_format=format_of(job, shape, dtype))

    return batch_of_specs(job, empty)
