"""Batch sizes for trainers of transformers and TRL that exist already."""

import inspect
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.api.integrations import huggingface
from planner.api.integrations.batch_choice import BatchSplit
from planner.api.integrations.huggingface import max_batch_of_trainer, plan_trainer
from planner.capture import construct_model, record, trainer_job, trainer_maker
from planner.errors import UsageError
from planner.jobs import resolve_job
from planner.program.events import Alloc, Site, Trace
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("trl")

PROGRAM = Path(__file__).parents[2] / "programs" / "trainers" / "custom_dataset.py"

# What a user's file holds.
CODE = """
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

def net():
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=256))

def tokenizer():
    words = Tokenizer(models.WordLevel({"<p>": 0, "<e>": 1, "<u>": 2, "w": 3}, unk_token="<u>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<p>", eos_token="<e>")

FIXED = {"output_dir": "out", "report_to": "none", "bf16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "max_steps": 1, "disable_tqdm": True}

def dpo(**settings):
    rows = [{"prompt": "w w", "chosen": " w" * 20, "rejected": " w" * 9}] * 4
    return DPOTrainer(net(), net(), args=DPOConfig(**FIXED, **settings),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer())

class Watch(TrainerCallback):
    pass

def sft(**settings):
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    return SFTTrainer(net(), args=SFTConfig(**FIXED, **settings), processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"text": "w " * 40}] * 4), peft_config=adapters,
        callbacks=[Watch()])
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a user's file."""
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def trainers(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the functions of the file, which a script calls."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return SimpleNamespace(**names)


def located(trace: Trace) -> list[tuple[object, Site | None]]:
    """Return the events with the sites of their blocks, whichever numbers these have."""
    return [
        (replace(event, site=0), trace.sites[event.site]) if isinstance(event, Alloc) else (event, None)
        for event in trace.events
    ]


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_a_trainer_is_planned_as_from_its_file(trainers: Any, file: Path, name: str) -> None:
    """The copy of a trainer allocates what one that a file makes does, though it was made without a GPU."""
    made = trainer_maker(getattr(trainers, name)(use_cpu=True), 1)
    by_file = record(resolve_job(f"{file}:{name}", {}), 4, AMPERE)
    job = trainer_job(getattr(trainers, name)(use_cpu=True))
    copied = record(job, 4, AMPERE, lambda job: construct_model(job, made))
    assert located(copied) == located(by_file)


def test_a_trainer_keeps_its_effective_batch_and_trains(trainers: Any) -> None:
    """Two micro-batches of 16 become one of 32, which fits; the trainer, which is as before, trains with it.
    A callback of the user's, which may keep tensors, is named.
    """
    trainer = trainers.sft(per_device_train_batch_size=16, gradient_accumulation_steps=2, use_cpu=True)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.warns(UserWarning, match="the trainer's Watch is not run; what it keeps on the GPU"):
        report = plan_trainer(trainer, gpu_mib=1500)
    assert "the trainer's Watch is not run" in str(report)
    assert all(value.equal(before[key]) for key, value in trainer.model.state_dict().items())
    assert report.max_batch >= 32
    assert trainer.args.per_device_train_batch_size == 32
    assert trainer.args.gradient_accumulation_steps == 1
    trainer.train()
    assert trainer.state.train_batch_size == 32


def test_what_is_no_fresh_trainer_is_refused(trainers: Any) -> None:
    """A model, a trainer that has trained, and one of several processes."""
    with pytest.raises(UsageError, match="expected a Trainer of transformers or TRL, got a LlamaForCausalLM"):
        plan_trainer(trainers.net(), gpu_mib=1500)
    trainer = trainers.sft(use_cpu=True)
    trainer.args.distributed_state.num_processes = 2
    try:
        with pytest.warns(UserWarning, match="no plan, .*plan in one process, before torchrun"):
            assert plan_trainer(trainer, gpu_mib=1500) is None
        with pytest.raises(UsageError, match="plan in one process, before torchrun"):
            max_batch_of_trainer(trainer, gpu_mib=1500)
    finally:
        trainer.args.distributed_state.num_processes = 1
    trainer.model_wrapped = object()
    with pytest.warns(UserWarning, match="no plan, .*plan before train"):
        assert plan_trainer(trainer, gpu_mib=1500) is None


def scalar_labels() -> Any:
    """Return a trainer on a dataset whose labels are 0-d tensors, of a file."""
    names: dict[str, Any] = {"__name__": "train"}
    exec(PROGRAM.read_text(), names)
    return names["make_trainer"]()


def test_labels_without_length_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual form of a dataset, whose labels are 0-d tensors, gets its batch and trains."""
    monkeypatch.chdir(tmp_path)
    trainer = scalar_labels()
    report = plan_trainer(trainer, gpu_mib=1500)
    assert report is not None and report.max_batch >= 4
    assert trainer.args.per_device_train_batch_size == 4


def test_an_evaluation_that_does_not_fit_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a whole evaluation that no batch of the training leaves room for: the batch is that of the
    training, and a warning says what would help.
    """
    monkeypatch.chdir(tmp_path)
    trainer = scalar_labels()
    trainer.args.eval_strategy, trainer.args.per_device_eval_batch_size = "epoch", 2048
    trainer.eval_dataset = [trainer.train_dataset[0]] * 100_000
    trainer.compute_metrics = lambda prediction: {}
    trainer.model.num_labels = trainer.model.config.num_labels = 4000
    trainer.model.classifier = torch.nn.Linear(64, 4000)
    with pytest.warns(UserWarning, match="its evaluation does not fit at any batch of the training: take"):
        report = plan_trainer(trainer, gpu_mib=1500)
    assert report is not None and report.max_batch > 0


class OddError(Exception):
    """An error whose message fails too."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


PARTS = [one for one in vars(huggingface) if inspect.isfunction(vars(huggingface)[one])]


@pytest.mark.parametrize(
    "part",
    [
        *("trainer_job", "trainer_maker", "notes_of_trainer", "split_to_fit", "bytes_of_longest_sample"),
        *("choice_of", "plan_job", "shortfall", "set_batch", "notes_of_callbacks", "notes_of"),
    ],
)
def test_a_plan_that_cannot_be_made_never_ends_training(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part of the hook raises, one warning gives the reason and the trainer is as it was."""
    assert part in PARTS
    monkeypatch.chdir(tmp_path)
    trainer = scalar_labels()
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, part, raise_odd)
        if part in ("choice_of", "plan_job", "shortfall", "set_batch"):  # what comes before takes seconds
            patch.setattr(
                huggingface, "split_to_fit", lambda *given: (SimpleNamespace(warning=""), BatchSplit(2, 1))
            )
        if part in ("choice_of", "plan_job"):
            patch.setattr(huggingface, "split_to_fit", lambda samples, plan, *given: plan(1))
        if part == "choice_of":
            patch.setattr(
                huggingface, "plan_job", lambda *given: SimpleNamespace(max_batch=1, comfortable_batch=1)
            )
        with pytest.warns(
            UserWarning, match="no plan, per_device_train_batch_size stays as it is: .*OddError: no message"
        ):
            assert plan_trainer(trainer, gpu_mib=1500) is None
    assert trainer.args.per_device_train_batch_size == 4


def raise_odd(*given: Any, **named: Any) -> Any:
    """Raise an error of somebody else's code."""
    raise OddError


@pytest.mark.parametrize("broken", ["dataset", "collator", "model"])
def test_data_that_raises_never_ends_training(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset, a collator or a model that fails on a plan's sample gives one warning."""
    monkeypatch.chdir(tmp_path)
    trainer = scalar_labels()
    if broken == "dataset":
        trainer.train_dataset.encodings = None
    elif broken == "collator":
        trainer.data_collator = raise_odd
    else:
        trainer.model.forward = raise_odd
    with pytest.warns(UserWarning, match="no plan, per_device_train_batch_size stays as it is: "):
        assert plan_trainer(trainer, gpu_mib=1500) is None


def test_a_plan_draws_no_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and collators that draw random numbers leave the generators of training as they were."""
    numpy = pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    trainer = scalar_labels()
    collate = trainer.data_collator

    def augment(rows: Any) -> Any:
        random.random(), numpy.random.rand(3), torch.rand(3)
        return collate(rows)

    trainer.data_collator = augment
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    plan_trainer(trainer, gpu_mib=1500)
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
