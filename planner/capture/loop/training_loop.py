"""Run the training or inference loop of a job.

The loop is captured on `meta` and measured on a GPU. The loop's variables decide lifetimes. As in `for x, y
in loader: x = x.to(device)`, the last batch on the device is released before the next batch is copied; the
output and the loss live until their variables are assigned again. An evaluation between the steps has
separate variables, which also stay assigned; it runs while the variables of the previous step are still
assigned, except in Lightning's loop.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from planner.capture.loop.checkpoint import checkpointed_blocks
from planner.capture.loop.ddp import Buckets
from planner.capture.loop.generate import run_generation
from planner.capture.loop.loss_source import floating_leaves, notes_on_loss, returned_loss
from planner.capture.loop.named_optimizers import OptimizerList, members_of
from planner.capture.loop.optimizers import clip, make_ema
from planner.capture.loop.runtime import BatchLoader, LoopRuntime, PhaseHook
from planner.errors import ModelError
from planner.jobs import Checkpoint, ClipGradients, Compile, Job, Loss, Mode, Offload, ZeroGrad, is_code
from planner.program import Category, Phase

MOST_MICRO_BATCHES = 4  # run in each step; all but the first allocate the same
EVALUATED_BATCHES = 2  # in the second batch, the variables of the first are still assigned

_CRITERIA: dict[Loss, Callable[[Tensor, Any], Tensor]] = {
    Loss.CROSS_ENTROPY: F.cross_entropy,
    Loss.MSE: F.mse_loss,
    Loss.BCE_WITH_LOGITS: F.binary_cross_entropy_with_logits,
}


@dataclass(slots=True)
class LoopVariables:
    """The variables of a training script (batch, output and loss), which keep their tensors alive."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    output: Any = None
    loss: Tensor | None = None
    notes: tuple[str, ...] = ()  # on the loss of the last output

    def load(self, load_batch: BatchLoader) -> None:
        """Release the last batch, then load the next."""
        self.args, self.kwargs, self.target = (), {}, None
        self.args, self.kwargs, self.target = load_batch()

    def forget_loss_of_output(self) -> None:
        """Release the loss that a training_step returned, and keep what else it returned."""
        is_mapping = isinstance(self.output, Mapping)
        self.output = {k: v for k, v in self.output.items() if k != "loss"} if is_mapping else None

    def release(self) -> None:
        """Release the last batch, its output and its loss."""
        self.args, self.kwargs, self.target, self.output, self.loss = (), {}, None, None, None


def run_loop(
    model: nn.Module,
    job: Job,
    load_batch: BatchLoader,
    optimizer: optim.Optimizer | OptimizerList | None,
    on_phase: PhaseHook,
    runtime: LoopRuntime,
    load_evaluated: BatchLoader | None = None,
) -> tuple[str, ...]:
    """Run `job.loop.steps` steps of a job; return notes on checkpoints, skipped tokens and the loss.

    The steps train, infer or generate. All variables are still alive in the phase `END`. `load_evaluated`
    loads the batches of the evaluation if they have another size. `optimizer` is None in modes without an
    optimizer. Raises ModelError for a model that has no blocks to checkpoint or does not generate, and in
    training for a loss that is code if the runtime has no criterion.
    """
    if is_code(job.loop.loss) and runtime.criterion is None and job.loop.mode is Mode.TRAIN:
        raise ModelError(
            f"{job.model.name}: loss {job.loop.loss} is code, which neither MemTracker nor a run on a GPU "
            "calls here; name a loss that the planner knows"
        )
    if job.loop.mode is Mode.GENERATE:
        return run_generation(model, job, load_batch, on_phase, runtime)
    model.train(job.loop.mode is not Mode.INFER)
    notes: tuple[str, ...] = ()
    with ExitStack() as stack:
        if job.loop.checkpoint is Checkpoint.BLOCKS and job.loop.mode is not Mode.INFER:
            notes = stack.enter_context(checkpointed_blocks(model, job))
        called = compiled(model, job)
        if optimizer is None:
            _run_forward(called, job, load_batch, on_phase, runtime)
            return notes
        buckets = None
        if job.sharding.ddp:
            buckets = stack.enter_context(closing(Buckets(model, job, runtime.set_category)))
        ema = make_ema(model) if job.loop.ema else None
        evaluated = load_batch if load_evaluated is None else load_evaluated
        loop = _TrainingLoop(
            model, called, job, load_batch, optimizer, on_phase, runtime, buckets, ema, evaluated
        )
        loop.run()
        return notes + loop.variables.notes


def with_few_micro_batches(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the job with at most `MOST_MICRO_BATCHES` micro-batches, and a note if others are left out.

    From the second micro-batch on, each adds to existing gradients in place, so that all allocate the same
    blocks in the same order.
    """
    if job.loop.accumulate <= MOST_MICRO_BATCHES:
        return job, ()
    note = (
        f"of the {job.loop.accumulate:,} micro-batches in each step, {MOST_MICRO_BATCHES} are run; the "
        "others repeat the last"
    )
    return job.replace(accumulate=MOST_MICRO_BATCHES), (note,)


def compiled(model: nn.Module, job: Job) -> Callable[..., Any]:
    """Return the model, or the model compiled by torch.compile if the job says so."""
    if job.model.compile is Compile.NONE:
        return model
    called: Callable[..., Any] = torch.compile(model, mode=job.model.compile)
    return called


def _run_forward(
    called: Callable[..., Any], job: Job, load_batch: BatchLoader, on_phase: PhaseHook, runtime: LoopRuntime
) -> None:
    variables = LoopVariables()
    with torch.set_grad_enabled(job.loop.mode is Mode.FORWARD):
        for step in range(1, job.loop.steps + 1):
            on_phase(step, Phase.INPUTS)
            variables.load(load_batch)
            on_phase(step, Phase.FORWARD)
            with runtime.autocast():
                variables.output = called(*variables.args, **variables.kwargs)
        on_phase(job.loop.steps, Phase.END)


@dataclass(frozen=True, slots=True)
class _TrainingLoop:
    """A training loop with the objects that it keeps between steps."""

    model: nn.Module
    called: Callable[..., Any]  # the model, or its compiled form
    job: Job
    load_batch: BatchLoader
    optimizer: optim.Optimizer | OptimizerList
    on_phase: PhaseHook
    runtime: LoopRuntime
    buckets: Buckets | None
    ema: AveragedModel | None
    load_evaluated: BatchLoader
    variables: LoopVariables = field(default_factory=LoopVariables)
    evaluated: LoopVariables = field(default_factory=LoopVariables)

    def run(self) -> None:
        """Train for the job's steps, and evaluate before the last step if the job evaluates."""
        job = self.job
        if self.ema is not None:
            for tensor in (*self.ema.parameters(), *self.ema.buffers()):
                self.runtime.set_category(tensor, Category.OPTIMIZER)
        with torch.enable_grad():
            for step in range(1, job.loop.steps + 1):
                if job.loop.evaluate and step == job.loop.steps:
                    self._evaluate(step)
                for micro_batch in range(job.loop.accumulate):
                    self._forward_and_backward(step, micro_batch)
                self._update(step)
            self.on_phase(job.loop.steps, Phase.END)

    def _forward_and_backward(self, step: int, micro_batch: int) -> None:
        """Run the forward and backward passes of one micro-batch.

        The passes add to the gradients. The loss is divided by the number of micro-batches. Lightning divides
        by 1 too, and keeps nothing of the undivided loss (lightning/pytorch/loops/optimization/automatic.py).
        """
        job, variables = self.job, self.variables
        self.on_phase(step, Phase.INPUTS)
        variables.load(self.load_batch)
        self.on_phase(step, Phase.FORWARD)
        if micro_batch == 0:
            self._zero_grad(ZeroGrad.BEFORE_FORWARD)
        with self.runtime.autocast():
            if self.buckets is not None:
                self.buckets.before_forward()
            with self._saving():
                self._forward(variables)
            is_of_lightning = job.loop.loss is Loss.TRAINING_STEP
            if job.loop.accumulate > 1 or is_of_lightning:
                assert variables.loss is not None
                variables.loss = variables.loss / job.loop.accumulate
            if is_of_lightning:
                variables.forget_loss_of_output()
            if job.loop.backward_in_autocast:
                self._backward(step, micro_batch)
        if not job.loop.backward_in_autocast:
            self._backward(step, micro_batch)

    def _forward(self, variables: LoopVariables) -> None:
        """Call the model on the batch in `variables`, and assign the output, loss and notes there."""
        variables.output = self.called(*variables.args, **variables.kwargs)
        if self.runtime.criterion is not None:
            variables.loss = self.runtime.criterion(variables.output, variables.target)
        else:
            assert isinstance(self.job.loop.loss, Loss)
            variables.loss = loss_of(self.job.loop.loss, variables.output, variables.target)
        variables.notes = notes_on_loss(self.job.loop.loss, variables.output)
        if self.job.loop.drop_output:
            variables.output = None

    def _saving(self) -> AbstractContextManager[None]:
        """Return a context that keeps tensors saved for the backward pass on the CPU if the job offloads."""
        if self.job.loop.offload is Offload.NONE:
            return nullcontext()
        return save_on_cpu(pin_memory=True)

    def _backward(self, step: int, micro_batch: int) -> None:
        self.on_phase(step, Phase.BACKWARD)
        if micro_batch == 0:
            self._zero_grad(ZeroGrad.BEFORE_BACKWARD)
        loss, scaler = self.variables.loss, self.runtime.scaler
        assert loss is not None
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _update(self, step: int) -> None:
        """Clip the gradients if the job says so, run the optimizer, and update the moving average, if any.

        Scaled gradients are unscaled before they are clipped. The gradients are cleared at the end if the job
        clears them after the step.
        """
        job, optimizer, scaler = self.job, self.optimizer, self.runtime.scaler
        self.on_phase(step, Phase.OPTIMIZER)
        if job.loop.clip_gradients is not ClipGradients.NONE:
            if scaler is not None:
                for member in members_of(optimizer):
                    scaler.unscale_(member)
            clip(job.loop.clip_gradients, self.model.parameters())
        if scaler is None:
            optimizer.step()
        else:
            for member in members_of(optimizer):
                scaler.step(member)
            scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self._zero_grad(ZeroGrad.AFTER_STEP)

    def _zero_grad(self, when: ZeroGrad) -> None:
        if self.job.loop.zero_grad is when:
            self.optimizer.zero_grad(set_to_none=not self.job.loop.keep_grads)

    def _evaluate(self, step: int) -> None:
        """Evaluate the model before the last step.

        The usual three steps then begin with two steps of training. Lightning's loops keep no batch beyond
        its step, and release the gradients before an evaluation (`on_validation_model_zero_grad`,
        lightning/pytorch/core/hooks.py).
        """
        is_of_lightning = self.job.loop.loss is Loss.TRAINING_STEP
        if is_of_lightning:
            self.variables.release()
            self.optimizer.zero_grad()
        run_evaluation(
            self.model, self.evaluated, self.load_evaluated, self._evaluate_batch, self.on_phase, step
        )
        if is_of_lightning:
            self.evaluated.release()

    def _evaluate_batch(self) -> None:
        with self.runtime.autocast():
            self._forward(self.evaluated)


def run_evaluation(
    model: nn.Module,
    variables: LoopVariables,
    load_batch: BatchLoader,
    forward: Callable[[], None],
    on_phase: PhaseHook,
    step: int,
) -> None:
    """Run two batches in eval mode without gradients, as between two epochs.

    A batch runs the forward pass and the loss. `forward` runs the model on the batch in `variables`. The
    model is in training mode afterwards.
    """
    model.eval()
    with torch.no_grad():
        for _ in range(EVALUATED_BATCHES):
            on_phase(step, Phase.INPUTS)
            variables.load(load_batch)
            on_phase(step, Phase.EVALUATION)
            forward()
    model.train()


def loss_of(kind: Loss, output: Any, target: Tensor | None) -> Tensor:
    """Return the scalar loss of the kind `kind` for a model's output.

    For several output tensors it is the sum of their losses. For `Loss.OUTPUT` and `Loss.TRAINING_STEP` it is
    the loss that the model returned.
    """
    if kind in (Loss.OUTPUT, Loss.TRAINING_STEP):
        loss: Tensor = output if isinstance(output, Tensor) else returned_loss(output)[1]
        return loss
    leaves = floating_leaves(output)
    if not leaves:
        raise TypeError("the output has no floating-point tensor, of which a loss could be computed")
    losses = [t.sum() if kind is Loss.SUM else _loss_of_one(kind, t, target) for t in leaves]
    total = losses[0]
    for other in losses[1:]:
        total = total + other
    return total


def _loss_of_one(kind: Loss, output: Tensor, target: Tensor | None) -> Tensor:
    """Return the loss of one output tensor. An error gets a note on the shapes of output and target."""
    try:
        return _CRITERIA[kind](output, target)
    except Exception as error:
        if target is not None:
            shapes = ("x".join(map(str, tensor.shape)) or "a scalar" for tensor in (output, target))
            error.add_note("the output is {}, the target {}, the batch first".format(*shapes))
        raise
