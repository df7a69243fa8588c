"""Run the training of a user's Trainer of transformers or TRL.

The user's file makes the Trainer. The Trainer's own `train()` runs, with its loss, optimizer, accumulation,
clipping and precision. Batches are copies of the longest of the first samples of its data, made by its own
collator and moved to the GPU as its loader does. Its evaluation runs between two steps. Checkpoints and logs
are omitted. Facts from transformers 5.23 and TRL 1.16.
"""

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor

from planner.capture.cuda.triton_kernels import launching_nothing
from planner.capture.models.libraries import quiet
from planner.capture.models.transformers.trainer_batches import MOST_SAMPLES, Batches, longest_sample
from planner.capture.models.transformers.trainer_evaluation import Evaluation, evaluation_phrases
from planner.capture.models.user_code.step import StepModule
from planner.capture.patching import all_patched, patched
from planner.errors import UsageError
from planner.jobs import Job
from planner.program import LEFT_OUT_NOTE, Phase

_ASKED = ("is_torch_cuda_available", "is_torch_bf16_gpu_available", "is_torch_tf32_available")
# Callbacks that print, and those that need the scores of evaluations.
_OMITTED_CALLBACKS = (
    *("PrinterCallback", "ProgressCallback", "NotebookProgressCallback"),
    "EarlyStoppingCallback",
)
_LIBRARIES = re.compile(r"^\s*(from|import) +(transformers|trl)\b", re.M)
# Trainers of TRL that train on texts which a model generates during training.
_GENERATING = (
    *("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "NashMDTrainer", "XPOTrainer", "PPOTrainer"),
    *("AsyncGRPOTrainer", "DistillationTrainer", "AsyncDistillationTrainer", "GKDTrainer", "GOLDTrainer"),
    *("SDPOTrainer", "SDFTTrainer", "IWOPDTrainer", "A2POTrainer", "MiniLLMTrainer"),
)
_KERNELS = "trl.kernels.chunked_logprob"  # its kernels are Triton's if a GPU and Triton are available


def is_trainer(made: object) -> bool:
    """Return whether an object's class is the Trainer of transformers or derives from it."""
    return any(
        kind.__name__ == "Trainer" and kind.__module__ == "transformers.trainer"
        for kind in type(made).__mro__
    )


@contextmanager
def trainers_constructed() -> Iterator[None]:
    """Make Trainers that are constructed inside the context find the planned GPU.

    DPO's hash and log probabilities are not computed.

    transformers asks only once in each process whether there is a GPU, so the functions that ask are
    replaced. `use_cpu=True`, with which people try a script without a GPU, is ignored.
    """
    module: Any = sys.modules.get("transformers.training_args")
    if module is None:
        yield
        return
    answers: dict[str, Any] = {name: _yes for name in _ASKED if hasattr(module, name)}
    with ExitStack() as stack:
        stack.enter_context(all_patched(module, answers))
        of_gpu = _on_gpu(module.TrainingArguments.__post_init__)
        stack.enter_context(patched(module.TrainingArguments, "__post_init__", of_gpu))
        stack.enter_context(quiet())
        stack.enter_context(_without_progress())
        preferences: Any = sys.modules.get("trl.trainer.dpo_trainer")
        if preferences is not None:
            stack.enter_context(patched(preferences, "hash_module", lambda module: ""))
            known = patched(preferences.DPOTrainer, "_precompute_ref_logps", _zero_logps)
            stack.enter_context(known)
        yield


def import_trainers(code: str) -> None:
    """Import the module of `TrainingArguments` if code imports transformers or TRL."""
    if _LIBRARIES.search(code):
        with suppress(Exception), quiet():  # if it fails, the file's own import says why
            importlib.import_module("transformers.training_args")


def _yes() -> bool:
    return True


def _on_gpu(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    def complete(arguments: Any) -> None:
        arguments.use_cpu = False
        post_init(arguments)

    return complete


def _zero_logps(trainer: Any, dataset: Any, name: str, batch_size: int) -> Any:
    """Add log probabilities of the reference model to a dataset, all zero.

    `precompute_ref_log_probs` would compute these columns.
    """
    for column in ("ref_chosen_logps", "ref_rejected_logps"):
        dataset = dataset.add_column(column, [0.0] * len(dataset))
    return dataset


@contextmanager
def _without_progress() -> Iterator[None]:
    """Disable progress bars of the library `datasets` inside the context."""
    datasets: Any = sys.modules.get("datasets")
    if datasets is None or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


class TrainerModule(StepModule):
    """A module with the models that a Trainer holds. `run` trains by the Trainer's own `train()`."""

    def __init__(self, trainer: Any, job: Job) -> None:
        """Find the Trainer's models, and check its settings.

        Raises UsageError for inputs of the job, and for settings that are not planned.
        """
        super().__init__(trainer.train, trainer, job.model.name)
        self.trainer = trainer
        self._waiting: list[Any] = []  # batches of a step that are on the GPU but not run
        self._evaluation = Evaluation(trainer, job.model.name)
        if job.samples.inputs or job.samples.target is not None:
            raise UsageError(
                f"{job.model.name}: its trainer has data of its own; remove --input and --target"
            )
        self._check(trainer.args, job.model.name)

    def tensors_on_host(self) -> Iterator[Tensor]:
        """Yield the model's tensors if FSDP shards it, since they are on the CPU before `train()`."""
        if self.trainer.args.fsdp:
            yield from self.trainer.model.parameters()
            yield from self.trainer.model.buffers()

    def _check(self, arguments: Any, name: str) -> None:
        for kind in type(self.trainer).__mro__:
            if kind.__name__ in _GENERATING and kind.__module__.startswith("trl."):
                raise UsageError(
                    f"{name}: a {kind.__name__} trains on texts that a model generates meanwhile, which is "
                    "not planned; planner run emulates such a script"
                )
        refused = {
            "deepspeed": arguments.deepspeed,
            "torch_compile": arguments.torch_compile,
            "auto_find_batch_size": arguments.auto_find_batch_size,
            "activation_offloading": getattr(
                arguments, "activation_offloading", False
            ),  # of TRL, by addresses
            **_of_fsdp(arguments),
        }
        for setting, value in refused.items():
            if value:
                raise UsageError(
                    f"{name}: {setting} of its arguments is not planned for a trainer; remove it, or "
                    "planner run emulates such a script"
                )

    def _notes(self) -> tuple[str, ...]:
        """Return notes on the training data, on evaluations and on parts that are not planned."""
        arguments = self.trainer.args
        notes = [
            f"its {type(self.trainer).__name__} trains on copies of the longest of the first "
            f"{MOST_SAMPLES:,} samples of its data"
        ]
        if getattr(arguments, "precompute_ref_log_probs", False):
            notes.append(LEFT_OUT_NOTE + "the pass of its reference over all samples before training")
        return (*notes, *self._evaluation.notes)

    def run(
        self,
        batch: int,
        steps: int,
        most_micro_batches: int,
        on_step: Callable[[], None],
        continue_with: Callable[[Phase], None],
    ) -> tuple[str, ...]:
        """Train `steps` optimizer steps with batches of `batch` samples; return notes on data and evaluation.

        `on_step` is called before the batches of a step are loaded, `continue_with` with each further phase
        that begins. A trainer evaluates and saves within a step, while the batches of the step are on the
        GPU; the phase `END` begins there too. All micro-batches of a step are on the GPU at once, but only
        the first `most_micro_batches` are run.
        """
        trainer = self.trainer
        arguments = trainer.args
        loaded = arguments.gradient_accumulation_steps
        few = arguments.gradient_accumulation_steps = min(loaded, most_micro_batches)
        evaluated = evaluation_phrases(arguments, steps)
        arguments.max_steps, arguments.per_device_train_batch_size = steps, batch
        arguments.save_strategy = arguments.eval_strategy = "no"
        arguments.eval_on_start = arguments.load_best_model_at_end = False
        trainer._train_batch_size = batch
        for callback in [*trainer.callback_handler.callbacks]:
            if not {kind.__name__ for kind in type(callback).__mro__}.isdisjoint(_OMITTED_CALLBACKS):
                trainer.remove_callback(callback)
        samples = longest_sample(trainer, trainer.train_dataset, "train_dataset", self._name)
        batches = Batches(trainer, samples, batch, steps * few, steps * loaded)
        load = trainer.get_batch_samples

        def end_step(step: int) -> None:
            if step in evaluated:
                continue_with(Phase.EVALUATION)
                self._evaluation.run(" and ".join(evaluated.values()))
            if step == steps:
                continue_with(Phase.END)

        trainer.add_callback(_calling_between_steps(end_step))

        def load_noted(iterator: Any, count: int, *args: Any) -> Any:
            on_step()
            found, items = load(iterator, loaded, *args)
            self._waiting = found[few:]
            continue_with(Phase.FORWARD)
            return found[:few], items

        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(patched(trainer, "get_train_dataloader", lambda: batches))
            stack.enter_context(patched(trainer, "get_batch_samples", load_noted))
            stack.enter_context(_kernels_of_triton())
            trainer.train()
        if few == loaded:
            return self._notes()
        run = f"of the {loaded:,} micro-batches in each step, {few} are run"
        return (*self._notes(), f"{run}; the others repeat the last")


def _calling_between_steps(call: Callable[[int], None]) -> Any:
    """Return a callback that calls `call` with the number of finished steps, first with 0 before any step."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            call(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            call(state.global_step)

    return Callback()


def _of_fsdp(arguments: Any) -> dict[str, Any]:
    """Return the FSDP settings that are refused if true, by name, or {} if FSDP is not used."""
    if not arguments.fsdp:
        return {}
    given = arguments.fsdp_plugin_args or {}
    return {
        "fsdp_config version 1": given.get("fsdp_version") != 2,
        "fsdp_config cpu_offload": given.get("cpu_offload"),
        "fsdp_config cpu_ram_efficient_loading": given.get("cpu_ram_efficient_loading"),
    }


@contextmanager
def _kernels_of_triton() -> Iterator[None]:
    """Make TRL use its Triton kernels inside the context, as on a GPU. The kernels launch nothing."""
    module = sys.modules.get(_KERNELS)
    if module is None:
        yield
        return
    with (
        launching_nothing(module, ("_forward_kernel", "_backward_kernel")),
        patched(module, "_TRITON_AVAILABLE", True),
    ):
        yield
