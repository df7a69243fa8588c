"""Evaluate a Trainer of transformers or TRL by its own loop, between two of its steps.

The batches are copies of the longest sample of its evaluation data, as many samples each as
`per_device_eval_batch_size` says. Losses, predictions and labels are gathered as the loop gathers them, which
keeps them on the GPU until `eval_accumulation_steps` or the end. The first batches run, since each of them
finds the gaps between blocks that the growing results before it have left; for the other batches only the
results are made and gathered, between the runs. Texts are generated to their full length. Facts from
transformers 5.23.
"""

import sys
from collections.abc import Iterator, Mapping
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


def evaluates(arguments: Any) -> bool:
    """Return whether a trainer evaluates while it trains."""
    strategy = str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy))
    return strategy != "no" or bool(arguments.eval_on_start)


class Evaluation:
    """The evaluation of one trainer; after `run`, `notes` say which part of it is planned."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name
        self.notes: tuple[str, ...] = ()

    def run(self) -> None:
        """Evaluate on each of the trainer's evaluation datasets; an evaluation that fails becomes a note.

        Errors about reads of values are raised, and a PlannerError if the trainer has evaluation data.
        """
        trainer = self._trainer
        given = trainer.eval_dataset
        datasets = list(given.values()) if isinstance(given, Mapping) and given else [given]
        for dataset in datasets:
            try:
                self._run_on(dataset)
            except Exception as error:
                if isinstance(error, PlannerError) and dataset is not None or reads_values(error):
                    raise
                what = "the trainer's evaluation, which may take more memory"
                self.notes += (f"{LEFT_OUT_NOTE}{what}: {sentence_of(error)}",)

    def _run_on(self, dataset: Any) -> None:
        trainer, arguments = self._trainer, self._trainer.args
        batch, more = arguments.eval_batch_size, arguments.eval_accumulation_steps
        count = ceil(len(dataset) / batch) if hasattr(dataset, "__len__") else None
        samples = longest_sample(trainer, dataset, "eval_dataset", self._name)
        gathered = min(count or _RUN, more or count or _RUN)
        predicts = trainer.compute_metrics is not None
        generates = predicts and getattr(arguments, "predict_with_generate", False)
        run = min(gathered, _GENERATING if generates else _RUN)
        batches = Batches(trainer, samples, batch, count or run, run)
        with (
            _gathering(gathered - run, run),
            _generating_all_tokens(trainer) if generates else nullcontext(),
            patched(trainer, "compute_metrics", self._metrics()),
        ):
            trainer.evaluation_loop(batches, "Evaluation", prediction_loss_only=None if predicts else True)
        self.notes += (self._note(batch, count, gathered),)
        if generates:
            self.notes += (
                f"its evaluation generates texts of full length; between the first {WHOLE_TOKENS} and the "
                f"last {WHOLE_TOKENS} tokens only the growth of the key-value cache is traced",
            )

    def _metrics(self) -> Any:
        """Return a stand-in for `compute_metrics` that computes nothing, or None if the trainer has none."""
        return None if self._trainer.compute_metrics is None else lambda *given, **named: {}

    def _note(self, batch: int, count: int | None, gathered: int) -> str:
        what = "losses" if self._trainer.compute_metrics is None else "losses, predictions and labels"
        if count is None:
            kept = f"its data has no length, and the {what} of {gathered} batches gather on the GPU"
        else:
            kept = f"the {what} of {gathered:,} of its {count:,} batches gather on the GPU"
        return (
            f"its evaluation comes before the last step, on batches of {batch:,} of the longest of its "
            f"samples; {kept}"
        )


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
    """Return a copy of a batch's results in new blocks, repeated for `count` batches."""
    if isinstance(tensors, Tensor):
        return tensors.clone() if count == 1 else tensors.repeat_interleave(count, 0)
    if isinstance(tensors, Mapping):
        return {name: _repeated(one, count) for name, one in tensors.items()}
    return type(tensors)(_repeated(one, count) for one in tensors)
