"""Train on the meta device with DeepSpeed's own engine, as the first of several ranks.

ZeRO stages 1, 2 and 3 are supported. The model counts as made on the CPU, and `deepspeed.initialize`
converts, moves and shards it, as in DeepSpeed's guides.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.capture.cuda.devices.placement import Placement
from planner.capture.distributed.deepspeed_process import deepspeed_process, import_deepspeed
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.loop.batches import batch_loader, evaluation_loader
from planner.capture.loop.checkpoint import checkpointed_blocks
from planner.capture.loop.named_optimizers import state_tensors
from planner.capture.loop.runtime import BatchLoader
from planner.capture.loop.training_loop import MOST_MICRO_BATCHES, LoopVariables, loss_of, run_evaluation
from planner.capture.models.live.optimizer import optimizer_maker
from planner.capture.recorder.recorder import Recorder
from planner.capture.techniques.technique import CapturedLoop, Notes, Technique
from planner.jobs import Checkpoint, Job, Loss, fill_deepspeed
from planner.program import Category, Phase

# Attributes of ZeRO's optimizers -> categories of their tensors (runtime/zero/stage_1_and_2.py, stage3.py).
_HELD = {
    "single_partition_of_fp32_groups": Category.OPTIMIZER,
    "fp32_partitioned_groups_flat": Category.OPTIMIZER,
    "averaged_gradients": Category.GRADIENT,
    "grad_partitions_flat_buffer": Category.GRADIENT,
    "lp_param_buffer": Category.PARAMETER,
    "bit16_groups_flat": Category.PARAMETER,
}


def run_zero(job: Job, model: nn.Module, batch: int, recorder: Recorder) -> tuple[str, ...]:
    """Record `job.loop.steps` optimizer steps with DeepSpeed's engine, and return notes for the trace."""
    config = fill_deepspeed(job, batch, hidden_size_of(model))
    micro_batches = config["gradient_accumulation_steps"]
    few = config["gradient_accumulation_steps"] = min(micro_batches, MOST_MICRO_BATCHES)
    recorder.start_phase(0, Phase.SETUP)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.host.add(tensor)
    model.train()
    load_batch = batch_loader(model, job, batch)
    with _silenced(), _checkpointed(model, job) as notes, recorder, torch.enable_grad():
        loop = _Loop(job, _engine(model, job, config), recorder)
        loop.set_categories()
        for step in range(1, job.loop.steps + 1):
            if step == job.loop.steps:
                if job.loop.evaluate:
                    loop.evaluate(step, evaluation_loader(model, job, batch))
                loop.gather(step)
            for _ in range(few):
                loop.run_micro_batch(step, load_batch)
        loop.start(job.loop.steps, Phase.END)
    if few < micro_batches:
        run = f"of the {micro_batches:,} micro-batches in each step, {few} are run"
        notes = (*notes, f"{run}; the others repeat the last")
    stage = config["zero_optimization"]["stage"]
    return (f"DeepSpeed {_library().__version__}: ZeRO {stage}, by its own engine", *notes)


def hidden_size_of(model: nn.Module) -> int | None:
    """Return the hidden size in a model's configuration, the largest of several, or None if unknown.

    transformers fills a DeepSpeed configuration with the hidden size.
    """
    configs = (getattr(one, "config", None) for one in model.modules())  # a step's model is inside a module
    config = next((one for one in configs if one is not None), None)
    sizes = getattr(config, "hidden_sizes", None)
    size = getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else max(sizes) if sizes else None


def _library() -> Any:
    return importlib.import_module("deepspeed")


def _engine(model: nn.Module, job: Job, config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine for a model, with the job's optimizer if the configuration names none."""
    parameters = [*model.parameters()]
    optimizer = None if "optimizer" in config else optimizer_maker(model, job)(model, parameters)
    engine, *_ = _library().initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=config
    )
    return engine


@contextmanager
def _checkpointed(model: nn.Module, job: Job) -> Iterator[tuple[str, ...]]:
    if job.loop.checkpoint is Checkpoint.NONE:
        yield ()
        return
    with checkpointed_blocks(model, job) as notes:
        yield notes


@contextmanager
def _silenced() -> Iterator[None]:
    """Limit DeepSpeed's log to errors inside the context."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Loop:
    """A training loop over DeepSpeed's engine, which keeps batch, output and loss alive as a script does."""

    def __init__(self, job: Job, engine: Any, recorder: Recorder) -> None:
        self._job = job
        self._engine = engine
        self._recorder = recorder
        self._variables = LoopVariables()
        self._evaluated = LoopVariables()

    def start(self, step: int, phase: Phase) -> None:
        """Set the categories of blocks, and start a phase of a step.

        Categories are not set at step 0 and before a batch is loaded.
        """
        if step > 0 and phase is not Phase.INPUTS:
            self.set_categories()
        self._recorder.start_phase(step, phase)

    def run_micro_batch(self, step: int, load_batch: BatchLoader) -> None:
        """Run the forward and the backward pass of one micro-batch, and the step of the engine.

        The engine decides whether its step updates the weights.
        """
        self.start(step, Phase.INPUTS)
        self._variables.load(load_batch)
        self.start(step, Phase.FORWARD)
        self._forward(self._variables)
        self.start(step, Phase.BACKWARD)
        self._engine.backward(self._variables.loss)
        self.start(step, Phase.OPTIMIZER)
        self._engine.step()

    def _forward(self, variables: LoopVariables) -> None:
        """Call the engine on the batch in `variables`, and assign the output and the loss there."""
        variables.output = self._engine(*variables.args, **variables.kwargs)
        assert isinstance(self._job.loop.loss, Loss)
        variables.loss = loss_of(self._job.loop.loss, variables.output, variables.target)
        if self._job.loop.drop_output:
            variables.output = None

    def evaluate(self, step: int, load_batch: BatchLoader) -> None:
        """Evaluate the model on two batches, before the training in `step`."""
        forward = partial(self._forward, self._evaluated)
        run_evaluation(self._engine, self._evaluated, load_batch, forward, self.start, step)

    def gather(self, step: int) -> None:
        """Gather sharded weights as `save_16bit_model` does, if the configuration enables it."""
        engine = self._engine
        if engine.zero_optimization_partition_weights() and engine.zero_gather_16bit_weights_on_model_save():
            self.start(step, Phase.GATHERING)
            engine._zero3_consolidated_16bit_state_dict()

    def set_categories(self) -> None:
        """Set the categories of blocks that now hold parameters, buffers, gradients or optimizer state."""
        module = self._engine.module
        held = [(one, Category.PARAMETER) for one in (*module.parameters(), *module.buffers())]
        sharded = self._engine.optimizer
        for name, category in _HELD.items():
            value = getattr(sharded, name, None)
            leaves = tree_leaves(dict(value) if isinstance(value, dict) else value)
            held += [(one, category) for one in leaves if isinstance(one, Tensor)]
        for bucket in getattr(sharded, "ipg_buckets", {}).values():
            leaves = tree_leaves(bucket.buffer)  # one tensor in stage 3, several in lower stages
            held += [(one, Category.GRADIENT) for one in leaves if isinstance(one, Tensor)]
        held += [(one, Category.OPTIMIZER) for one in state_tensors(self._engine.basic_optimizer)]
        for tensor, category in held:
            if tensor.is_meta:
                self._recorder.set_category(tensor, category)


def _import(job: Job) -> None:
    import_deepspeed()


@contextmanager
def _open_process(job: Job, placement: Placement, other_ranks: OtherRanks) -> Iterator[None]:
    with deepspeed_process(job.sharding.world_size, placement):
        yield


def _run(loop: CapturedLoop) -> Notes:
    return run_zero(loop.job, loop.model, loop.batch, loop.recorder)


DEEPSPEED = Technique(
    lambda job: bool(job.sharding.deepspeed), prepare=_import, open_process=_open_process, run_loop=_run
)
