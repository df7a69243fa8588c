"""Evaluate a Trainer of transformers or TRL by its own `evaluate`.

The evaluation runs between two training steps. The batches are copies of the longest sample of its evaluation
data, as many samples each as `per_device_eval_batch_size` says. Losses, predictions and labels are gathered
as the loop gathers them, which keeps them on the GPU until `eval_accumulation_steps` or the end. The first
batches run, since each of them finds the gaps between blocks that the growing results before it have left;
for the other batches only the results are made and gathered, between the runs. Texts are generated to their
full length. Facts from transformers 5.23.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import ceil
from typing import Any

from torch import Tensor

from planner.capture.failure_reasons import reads_values, sentence_of
from planner.capture.models.transformers.key_value_cache import WHOLE_TOKENS, only_growing_between
from planner.capture.models.transformers.trainer_batches import Batches, longest_sample
from planner.capture.patching import patched
from planner.errors import PlannerError
from planner.program import LEFT_OUT_NOTE

_RUN = 16  # most batches that run
_GENERATING = 3  # most batches that run if texts are generated, which takes seconds a batch
_MOST_ADDED = 4000  # most times that results of other batches are made and added
_TRAINER = "transformers.trainer"
_GENERATION_NOTES = (
    f"its evaluation generates texts of full length; between the first {WHOLE_TOKENS} and the last "
    f"{WHOLE_TOKENS} tokens only the growth of the key-value cache is traced",
)


def evaluation_phrases(arguments: Any, steps: int) -> dict[int, str]:
    """Return {step: phrase for notes} for each step after which a plan evaluates; step 0 is the start."""
    strategy = str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy))
    found = {0: "before the first step"} if arguments.eval_on_start else {}
    if strategy != "no":
        found[max(steps - 1, 1)] = "before the last step" if steps > 1 else "after the only step"
    return found


class Evaluation:
    """A runner of a trainer's evaluation; after `run`, its `notes` tell which part is planned."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name
        self._when = ""
        self.notes: tuple[str, ...] = ()

    def run(self, when: str) -> None:
        """Call the trainer's `evaluate`, and note most errors instead of raising them.

        `when` is the time of all evaluations, for notes. Errors about reads of values are raised, and a
        PlannerError if the trainer has evaluation data.
        """
        trainer, handler = self._trainer, self._trainer.callback_handler
        self._when = when
        with (
            patched(trainer, "get_eval_dataloader", self._load),
            patched(trainer, "evaluation_loop", self._gathering_all(trainer.evaluation_loop)),
            patched(trainer, "compute_metrics", self._metrics()),
            patched(trainer, "log", lambda *_, **__: None),
            patched(handler, "on_evaluate", self._calling_back(handler.on_evaluate)),
        ):
            try:
                trainer.evaluate()
            except Exception as error:
                self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        """Note that an evaluation failed, or raise the error.

        Errors about reads of values are raised, and a PlannerError if the trainer has evaluation data.
        """
        has_data = self._trainer.eval_dataset is not None
        if isinstance(error, PlannerError) and has_data or reads_values(error):
            raise error
        what = "the trainer's evaluation, which may take more memory"
        self._note(f"{LEFT_OUT_NOTE}{what}: {sentence_of(error)}")

    def _note(self, text: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, text)))

    def _load(self, eval_dataset: Any = None) -> "_EvaluationBatches | Exception":
        """Return the batches of an evaluation dataset, or the error if they cannot be made.

        The argument is the dataset, its name, or None for the trainer's dataset. An error is returned so that
        other datasets are evaluated.
        """
        trainer = self._trainer
        if isinstance(eval_dataset, str):
            eval_dataset = trainer.eval_dataset[eval_dataset]
        try:
            dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
            return _EvaluationBatches(trainer, dataset, self._name)
        except Exception as error:
            return error

    def _gathering_all(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of `evaluation_loop` that gathers the results of all batches.

        Only the first batches run. An error of one dataset does not stop the evaluation of others.
        """

        def loop(batches: _EvaluationBatches | Exception, *args: Any, **kwargs: Any) -> Any:
            try:
                if isinstance(batches, Exception):
                    raise batches
                with (
                    _gathering(batches.gathered - batches.run, batches.run),
                    _generating_all_tokens(self._trainer) if batches.generates else nullcontext(),
                ):
                    result = plain(batches, *args, **kwargs)
            except Exception as error:
                self._leave_out(error)
                return sys.modules[_TRAINER].EvalLoopOutput(None, None, metrics={}, num_samples=1)
            for note in (self._description(batches), *(_GENERATION_NOTES if batches.generates else ())):
                self._note(note)
            return result

        return loop

    def _calling_back(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of callbacks' `on_evaluate` whose errors become notes.

        Callbacks may fail, since no scores are computed.
        """

        def call(args: Any, state: Any, control: Any, metrics: Any) -> Any:
            try:
                return plain(args, state, control, metrics)
            except Exception as error:
                if reads_values(error):
                    raise
                self._note(f"{LEFT_OUT_NOTE}callbacks after its evaluation: {sentence_of(error)}")
                return control

        return call

    def _metrics(self) -> Any:
        """Return a stand-in for `compute_metrics` that computes nothing, or None if the trainer has none."""
        return None if self._trainer.compute_metrics is None else lambda *given, **named: {}

    def _description(self, batches: "_EvaluationBatches") -> str:
        count, gathered = batches.count, batches.gathered
        what = "losses, predictions and labels" if batches.predicts else "losses"
        if count is None:
            kept = f"its data has no length, and the {what} of {gathered} batches gather on the GPU"
        else:
            kept = f"the {what} of {gathered:,} of its {count:,} batches gather on the GPU"
        return (
            f"its evaluation comes {self._when}, on batches of {batches.batch_size:,} of the longest of its "
            f"samples; {kept}"
        )


class _EvaluationBatches(Batches):
    """A loader of copies of an evaluation dataset's longest sample, for the batches that are run.

    Its length counts all batches, if the dataset has a length.
    """

    def __init__(self, trainer: Any, dataset: Any, name: str) -> None:
        arguments = trainer.args
        batch, more = arguments.eval_batch_size, arguments.eval_accumulation_steps
        self.count = ceil(len(dataset) / batch) if hasattr(dataset, "__len__") else None
        samples = longest_sample(trainer, dataset, "eval_dataset", name)
        self.gathered = min(self.count or _RUN, more or self.count or _RUN)
        self.predicts = trainer.compute_metrics is not None
        self.generates = self.predicts and getattr(arguments, "predict_with_generate", False)
        self.run = min(self.gathered, _GENERATING if self.generates else _RUN)
        super().__init__(trainer, samples, batch, self.count or self.run, self.run)


@contextmanager
def _generating_all_tokens(trainer: Any) -> Iterator[None]:
    """Make a Seq2SeqTrainer generate texts of full length inside the context, without an end token."""
    arguments = trainer.args
    given = {"max_length": arguments.generation_max_length, "num_beams": arguments.generation_num_beams}
    options = {name: value for name, value in given.items() if value is not None}  # as its `evaluate` sets
    config = trainer.model.generation_config
    length = options.get("max_length") or config.max_new_tokens or config.max_length
    with (
        patched(trainer, "_gen_kwargs", options, create=True),
        patched(config, "eos_token_id", None),
        only_growing_between(trainer.model, length),
    ):
        yield


@contextmanager
def _gathering(more: int, run: int) -> Iterator[None]:
    """Make evaluation loops inside the context gather the results of `more` batches that do not run.

    A loop runs `run` batches; the other results are added between the first batch and the last.
    """
    module: Any = sys.modules[_TRAINER]
    plain: Any = module.EvalLoopContainer
    size = max(1, ceil(more / _MOST_ADDED))  # of very many batches, several are added at once
    shares = [min(size, more - start) for start in range(0, more, size)]

    class Container(plain):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._added = 0

        def add(self, tensors: Any) -> None:
            super().add(tensors)
            others = run - 2  # batches that run between the first and the last
            if 0 < self._added <= others:
                for share in shares[self._added - 1 :: others]:
                    made = _repeated(tensors, share)
                    super().add(made)
            self._added += 1

        def to_cpu_and_numpy(self) -> None:
            self.tensors = None

        def get_arrays(self) -> None:
            self.to_cpu_and_numpy()

    with patched(module, "EvalLoopContainer", Container):
        yield


def _repeated(tensors: Any, count: int) -> Any:
    """Return the results of one batch repeated `count` times along the first dimension, in new blocks."""
    if isinstance(tensors, Tensor):
        return tensors.clone() if count == 1 else tensors.repeat_interleave(count, 0)
    if isinstance(tensors, Mapping):
        return {name: _repeated(one, count) for name, one in tensors.items()}
    return type(tensors)(_repeated(one, count) for one in tensors)
