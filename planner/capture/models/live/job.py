"""Make a job from a live module and a batch of its data.

Training frameworks hold both. The module is copied without its weights, which costs no memory. The planned
loop calls it through a step that the framework names, such as a LightningModule's `training_step`, whose
result is the loss.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.capture.models.live.closures import rebind_closures
from planner.capture.models.live.optimizer import AnyLiveOptimizer
from planner.capture.models.meta_init import like_on_meta
from planner.capture.models.quantized.layers import quantized_on_meta
from planner.errors import UsageError
from planner.jobs import Job, Loss, Mode, TensorSpec

Step = Callable[[nn.Module, Any], Any]  # the module and a batch -> the loss, or a mapping with "loss"
StandIn = tuple[object, object]  # an object that is not copied, and the object that replaces it in the copy
Prepare = Callable[[nn.Module], object]  # changes a copy as the framework changes the model before training


@dataclass(frozen=True, slots=True)
class LiveEvaluation:
    """An evaluation of a live module between training steps. It has a separate data loader."""

    sample: Any  # a batch as its data loader yields it
    step: Step
    batch: int = 0  # samples in each batch; 0 for the batch size of the training run

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the shapes and dtypes of an evaluation batch's tensors.

        The batch dimension is left out. Raises UsageError for a batch without tensors or with several batch
        sizes.
        """
        return _specs_of(_tensors_of(self.sample))

    def load(self, batch: int) -> tuple[Tensor, ...]:
        """Return an evaluation batch's tensors, uninitialised on the meta device.

        `batch` is the batch size of the training run, which applies unless `self.batch` is set.
        """
        size = self.batch or batch
        return tuple(
            torch.empty((size, *one.shape), dtype=getattr(torch, one.dtype), device="meta")
            for one in self.inputs()
        )

    def run(self, module: nn.Module, tensors: Iterable[Tensor]) -> Any:
        """Run the evaluation step on a batch, and return its "loss" and "result" in a dictionary.

        The loss is the first tensor of the result. A captured loop keeps the result alive until the next
        batch.
        """
        result = self.step(module, _rebuilt(self.sample, tensors))
        kept = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return {"loss": kept[0] if kept else torch.empty((), device="meta"), "result": result}


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The inputs and batch size of a live module, with a function that copies it. Copies have no weights."""

    inputs: tuple[TensorSpec, ...]  # the tensors of the batch, without the batch dimension
    batch: int  # the batch size of the sample batch
    build: Callable[[], nn.Module]  # makes a copy without weights, whose forward pass is the step


class _StepModule(nn.Module):
    """A module whose forward pass is one step on the tensors of a batch."""

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        rebuild: Callable[[Iterable[Tensor]], Any],
        optimizer: AnyLiveOptimizer | None = None,
        evaluation: LiveEvaluation | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._step, self._rebuild, self._optimizer = step, rebuild, optimizer
        self._evaluation = evaluation

    def forward(self, *tensors: Tensor) -> Any:
        """Run the step on the batch.

        In eval mode, the evaluation's step is run if there is one. A last tensor that is not part of the
        batch only takes memory (`held_bytes` of `read_live_model`).
        """
        if self._evaluation is not None and not self.training:
            return self._evaluation.run(self.module, tensors)
        return self._step(self.module, self._rebuild(tensors))

    @property
    def make_own_optimizer(self) -> Callable[[], optim.Optimizer] | None:
        """Return a function that rebuilds the live optimizer over the copy, or None without a live optimizer.

        Without it, the job's optimizer is used.
        """
        optimizer = self._optimizer
        return None if optimizer is None else lambda: optimizer.over(self.module)


def evaluated_loader(model: nn.Module, batch: int) -> Callable[[], Any] | None:
    """Return a function that makes a live module's evaluation batches, or None if it has no evaluation.

    `batch` is the batch size of the training run.
    """
    evaluation = model._evaluation if isinstance(model, _StepModule) else None
    return None if evaluation is None else lambda: (evaluation.load(batch), {}, None)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the live module's copy inside a `_StepModule`, or any other model unchanged."""
    return model.module if isinstance(model, _StepModule) else model


def read_live_model(
    module: nn.Module,
    sample: object,
    step: Step,
    stand_ins: Iterable[StandIn] = (),
    optimizer: AnyLiveOptimizer | None = None,
    prepare: Prepare | None = None,
    held_bytes: int = 0,
    evaluation: LiveEvaluation | None = None,
) -> LiveModel:
    """Return the inputs and batch size of a live module, with a function that builds copies without weights.

    `sample` is a batch as the data loader yields it: tensors in tuples, lists and mappings, the batch size
    being the first dimension of each. An object that has one of the `stand_ins`, such as a trainer, is not
    copied. `optimizer` replaces the job's optimizer, `prepare` changes each copy. `held_bytes` are allocated
    per sample in addition to the batch, as one more input. `evaluation` is run in eval mode. Raises
    UsageError for a batch without tensors or with several batch sizes.
    """
    tensors = _tensors_of(sample)
    specs = _specs_of(tensors)
    if evaluation is not None:
        evaluation.inputs()

    def rebuild(given: Iterable[Tensor]) -> Any:
        return _rebuilt(sample, given)

    if held_bytes:
        specs += (TensorSpec((held_bytes,), "uint8"),)
    replaced = tuple(stand_ins)
    batch = tensors[0].shape[0]

    def build() -> nn.Module:
        copied = copy_weightless(module, replaced)
        if prepare is not None:
            prepare(copied)
        return _StepModule(copied, step, rebuild, optimizer, evaluation)

    return LiveModel(specs, batch, build)


def _tensors_of(sample: object) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    if not tensors:
        raise UsageError("the sample batch has no tensors; give one as the data loader does")
    return tensors


def _specs_of(tensors: list[Tensor]) -> tuple[TensorSpec, ...]:
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(f"the tensors of the sample batch have several batch sizes: {shapes}; give others")
    return tuple(
        TensorSpec(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors
    )


def _rebuilt(sample: object, given: Iterable[Tensor]) -> Any:
    remaining = iter(given)
    return tree_map_only(Tensor, lambda _: next(remaining), sample)


def copy_weightless(module: nn.Module, stand_ins: Iterable[StandIn] = ()) -> nn.Module:
    """Return a deep copy of a module with meta tensors. Originals in `stand_ins` are replaced."""
    memo: dict[int, Any] = {id(original): replacement for original, replacement in stand_ins}
    weightless_memo([module], memo)
    copied = copy.deepcopy(module, memo)
    complete_copy(module, copied, memo)
    return copied


def weightless_memo(modules: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Add meta counterparts of the modules' tensors to a deep copy's memo.

    Copies that are made with the memo have no gradients; a copied LightningModule has the planned GPU as its
    device.
    """
    gpu = torch.device("cuda", 0)
    for module in modules:
        for one in module.modules():
            device = vars(one).get("_device")  # a LightningModule's: the CPU until training starts
            if isinstance(device, torch.device):
                memo[id(device)] = gpu
        for tensor in (*module.parameters(), *module.buffers()):
            quantized = quantized_on_meta(tensor, memo)
            memo[id(tensor)] = like_on_meta(tensor) if quantized is None else quantized
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                memo[id(tensor.grad)] = None


def complete_copy(module: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Complete a deep copy of a module: rebind closures, and compile modules whose originals are compiled.

    Closures then refer to copied objects. Copying drops the compiled form (torch/nn/modules/module.py,
    `__getstate__`). `memo` is the memo of the deep copy.
    """
    compiled = {name for name, one in module.named_modules() if one._compiled_call_impl is not None}
    for name, one in copied.named_modules():
        rebind_closures(one, memo)
        if name in compiled:
            one.compile()


def live_job(name: str, model: LiveModel) -> Job:
    """Return a job named `name` that trains a live model, with the model's output as the loss."""
    return Job.create(name, inputs=model.inputs, mode=Mode.TRAIN, loss=Loss.OUTPUT)


def fields_of_process() -> dict[str, Any]:
    """Return the job field `cudnn_benchmark`, as torch has it in this process."""
    return {"cudnn_benchmark": torch.backends.cudnn.benchmark}


def is_deterministic() -> bool:
    """Return whether `torch.use_deterministic_algorithms` is on in this process."""
    return torch.are_deterministic_algorithms_enabled()
