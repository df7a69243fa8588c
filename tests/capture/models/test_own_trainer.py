"""Trainers of transformers and TRL that a user's file makes are traced by their own `train()`."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import Job, Mode, parse_tensor_spec, resolve_job
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace, validate
from tests.helpers.models import AMPERE

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[2] / "programs" / "trainers"

CODE = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids, labels):
        scores = self.head(self.table(input_ids))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "scores": scores}

def collate(rows):
    longest = max(len(row["text"]) for row in rows)
    ids = torch.tensor([row["text"] + [0] * (longest - len(row["text"])) for row in rows])
    return {"input_ids": ids, "labels": ids}

def make(eval_rows=0, **settings):
    rows = [{"text": [1] * length} for length in (3, 40, 7)]
    arguments = TrainingArguments("out", report_to="none", remove_unused_columns=False, **settings)
    given = {"eval_dataset": [{"text": [1] * 60}] * eval_rows, "compute_metrics": fail} if eval_rows else {}
    return Trainer(Net(), arguments, train_dataset=rows, data_collator=collate, **given)

def fail(prediction):
    raise RuntimeError("a plan has no metrics")
"""
BATCH = 8
PARAMETERS = 4 * (50 * 16 + 16 * 50 + 50)


def job_of_trainer(folder: Path, code: str = CODE, **options: object) -> Job:
    """Return the job of a file that makes a trainer."""
    file = folder / "train.py"
    file.write_text(code)
    return resolve_job(f"{file}:make", {}, **options)


def trace_of(job: Job) -> Trace:
    """Return the trace of a trainer."""
    trace = record(job, BATCH, AMPERE)
    validate(trace)
    return trace


def blocks(trace: Trace, category: Category) -> list[int]:
    """Return the sizes of all blocks of a category."""
    return [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is category]


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")


def test_a_trainer_trains_on_its_longest_sample(tmp_path: Path) -> None:
    """Three batches of eight times 40 tokens, for inputs and labels, and two moments of AdamW."""
    job = job_of_trainer(tmp_path)
    assert job.loop.mode is Mode.STEP
    trace = trace_of(job)
    assert sum(blocks(trace, Category.PARAMETER)) == PARAMETERS
    assert sum(size for size in blocks(trace, Category.OPTIMIZER) if size > 8) == 2 * PARAMETERS
    copied = [size for size in blocks(trace, Category.INPUT) if size == 8 * 40 * BATCH]
    assert len(copied) == 2 * job.loop.steps
    assert any("copies of the longest of the first 1,000 samples" in note for note in trace.notes)


def test_accumulation_is_the_trainers(tmp_path: Path) -> None:
    """Each of three steps takes two batches, and has two backward passes and one update."""
    job = job_of_trainer(tmp_path, model_args=(("gradient_accumulation_steps", 2),))
    phases = [e.phase for e in trace_of(job).events if isinstance(e, PhaseStart)]
    assert phases.count(Phase.BACKWARD) == 6
    assert phases.count(Phase.OPTIMIZER) == 3


def test_few_of_many_micro_batches_are_run(tmp_path: Path) -> None:
    """Of six batches on the GPU in each step four are trained on; the others only lie there."""
    job = job_of_trainer(tmp_path, model_args=(("gradient_accumulation_steps", 6),))
    trace = trace_of(job)
    phases = [e.phase for e in trace.events if isinstance(e, PhaseStart)]
    assert phases.count(Phase.BACKWARD) == 4 * job.loop.steps
    assert blocks(trace, Category.INPUT).count(8 * 40 * BATCH) == 2 * 6 * job.loop.steps
    assert any("of the 6 micro-batches in each step, 4 are run" in note for note in trace.notes)


EVALUATES = (("eval_strategy", "epoch"), ("per_device_eval_batch_size", 16))


def test_its_evaluation_is_planned_from_its_own_data(tmp_path: Path) -> None:
    """Batches of 16 of the longest text of the evaluation data, whose scores gather on the GPU: those of nine
    batches beside those of ten.
    """
    job = job_of_trainer(tmp_path, model_args=(("eval_rows", 160), *EVALUATES))
    trace = trace_of(job)
    batch = 16 * 60
    temporaries = blocks(trace, Category.TEMPORARY)
    assert [4 * 50 * batch * count in temporaries for count in (2, 9, 10, 11)] == [True, True, True, False]
    assert 8 * batch * 10 in temporaries  # the labels
    assert 4 * 16 * 10 in temporaries  # the losses
    assert any("batches of 16 of the longest of its samples; the losses, predictions and labels of 10 of its"
               in note for note in trace.notes)  # fmt: skip


def test_predictions_that_go_to_the_cpu_do_not_gather(tmp_path: Path) -> None:
    """With `eval_accumulation_steps` so many batches gather, and no more."""
    settings = (("eval_rows", 160), ("eval_accumulation_steps", 4), *EVALUATES)
    trace = trace_of(job_of_trainer(tmp_path, model_args=settings))
    batch = 4 * 50 * 16 * 60
    temporaries = blocks(trace, Category.TEMPORARY)
    assert [batch * count in temporaries for count in (3, 4, 5)] == [True, True, False]


def test_a_trainer_that_does_not_evaluate_is_planned_without(tmp_path: Path) -> None:
    """Data for an evaluation that no setting asks for is not read."""
    given = job_of_trainer(tmp_path, model_args=(("eval_rows", 160),))
    assert trace_of(given).events == trace_of(job_of_trainer(tmp_path)).events


def test_it_evaluates_and_saves_within_its_steps(tmp_path: Path) -> None:
    """The batch of the second step is alive in the evaluation, and the batch of the last when it saves."""
    settings = (("eval_rows", 16), ("max_steps", 3), *EVALUATES)
    batch = 8 * BATCH * 40  # bytes of texts or labels, of the longest text of the training data
    alive: dict[Phase, int] = {}
    found: set[int] = set()
    for event in trace_of(job_of_trainer(tmp_path, model_args=settings)).events:
        if isinstance(event, PhaseStart):
            alive[event.phase] = len(found)
        elif isinstance(event, Free):
            found.discard(event.block)
        elif event.category is Category.INPUT and event.size_bytes == batch:
            found.add(event.block)
    assert (alive[Phase.EVALUATION], alive[Phase.END]) == (2, 2)


def test_an_evaluation_that_cannot_be_planned_is_named(tmp_path: Path) -> None:
    """Data that its collator refuses is named with the collator's reason; the rest is planned."""
    broken = CODE.replace("[1] * 60", "None")
    trace = trace_of(job_of_trainer(tmp_path, broken, model_args=(("eval_rows", 160), *EVALUATES)))
    (note,) = [note for note in trace.notes if "evaluation" in note]
    assert note.startswith("not planned: the trainer's evaluation, which may take more memory: ")
    assert "NoneType" in note


KEEPS = """
from transformers import TrainerCallback

class Keeps(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, model=None, **kwargs):
        self.kept = model.table.weight.new_zeros(997)
        if "eval_score" in model.needed:
            metrics["eval_score"]

class Own(Trainer):
    def evaluate(self, *args, **kwargs):
        self.own = self.model.table.weight.new_zeros(499)
        return super().evaluate(*args, **kwargs)

def make_own(needed="", **settings):
    trainer = make(eval_rows=16, **settings)
    trainer.__class__ = Own
    trainer.model.needed = needed
    trainer.add_callback(Keeps())
    return trainer
"""


@pytest.mark.parametrize(
    ("settings", "count"), [((), 1), ((("eval_on_start", True),), 2), ((("needed", "eval_score"),), 1)]
)
def test_callbacks_and_methods_of_evaluations_run(
    tmp_path: Path, settings: tuple[tuple[str, object], ...], count: int
) -> None:
    """Each evaluation has what they keep; a callback that fails for want of a score is named."""
    code = f"{CODE}{KEEPS}".replace("def make_own", "def make_trainer")
    (tmp_path / "train.py").write_text(code)
    given = (("max_steps", 3), *EVALUATES, *settings)
    trace = trace_of(resolve_job(f"{tmp_path / 'train.py'}:make_trainer", {}, model_args=given))
    allocated = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    assert (allocated.count(4 * 997), allocated.count(4 * 499)) == (count, count)
    left_out = [note for note in trace.notes if "callbacks" in note]
    assert len(left_out) == ("needed" in dict(settings))
    assert all(note.startswith("not planned: callbacks after its evaluation: ") for note in left_out)


def test_a_dataset_that_cannot_be_evaluated_does_not_stop_the_others(tmp_path: Path) -> None:
    """Each dataset has its evaluation; the one that fails is named."""
    broken = '{"a": rows, "b": [{"text": None}], "c": rows}'
    several = CODE.replace('[{"text": [1] * 60}] * eval_rows', broken)
    trace = trace_of(job_of_trainer(tmp_path, several, model_args=(("eval_rows", 1), *EVALUATES)))
    starts = [event.phase for event in trace.events if isinstance(event, PhaseStart)]
    assert Phase.EVALUATION in starts
    notes = [note for note in trace.notes if "evaluation" in note]
    assert len(notes) == 2 and sum(note.startswith("not planned: the trainer's") for note in notes) == 1


WRITES = """
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

def make(**settings):
    shape = dict(d_model=32, d_ff=32, d_kv=8, num_heads=2, num_layers=1, vocab_size=50)
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    arguments = Seq2SeqTrainingArguments("out", report_to="none", **settings)
    text = {"input_ids": torch.ones(10, dtype=torch.int64), "labels": torch.ones(6, dtype=torch.int64)}
    given = {"train_dataset": [text] * 4, "eval_dataset": [text] * 32, "compute_metrics": lambda found: {}}
    return Seq2SeqTrainer(model, arguments, **given)
"""


def test_an_evaluation_generates_texts_of_their_full_length(tmp_path: Path) -> None:
    """Keys and values grow by each of 30 tokens but the last, for all 3 beams of a batch of 16."""
    settings = (*EVALUATES, ("predict_with_generate", True), ("generation_max_length", 30))
    trace = trace_of(job_of_trainer(tmp_path, WRITES, model_args=(*settings, ("generation_num_beams", 3))))
    token = 4 * 16 * 3 * 2 * 8  # bytes of a token's keys
    found = set(blocks(trace, Category.TEMPORARY)) | set(blocks(trace, Category.ACTIVATION))
    assert [tokens for tokens in range(1, 40) if token * tokens in found] == [*range(1, 30)]
    assert any("between the first 4 and the last 4 tokens only the growth" in note for note in trace.notes)


def test_headlines_name_what_is_not_planned(tmp_path: Path) -> None:
    """That an evaluation is left out is said before the memory of the GPU."""
    (tmp_path / "train.py").write_text(CODE.replace("[1] * 60", "None"))
    settings: dict[str, object] = {**dict(EVALUATES), "eval_rows": 4}
    given: dict[str, Any] = {"model": f"{tmp_path / 'train.py'}:make", "model_arg": settings, "gpu": "T4"}
    lines = str(planner.estimate(batch=BATCH, **given)).splitlines()
    (line,) = [number for number, text in enumerate(lines) if text.startswith("Not planned:")]
    assert "the trainer's evaluation, which may take more memory" in lines[line]
    assert line < next(number for number, text in enumerate(lines) if "left for the allocator" in text)


def test_what_is_not_planned_of_a_trainer_is_refused(tmp_path: Path) -> None:
    """Compiling, and samples beside those of its data."""
    with pytest.raises(UsageError, match="torch_compile of its arguments is not planned"):
        record(job_of_trainer(tmp_path, model_args=(("torch_compile", True),)), BATCH, AMPERE)
    with pytest.raises(UsageError, match="remove --input and --target"):
        record(job_of_trainer(tmp_path, inputs=[parse_tensor_spec("40:int64")]), BATCH, AMPERE)


PREFERENCES = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

def net():
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=256))

def make():
    tokenizer = Tokenizer(models.WordLevel({"<p>": 0, "<e>": 1, "<u>": 2, "w": 3}, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<p>", eos_token="<e>")
    rows = [{"prompt": "w w", "chosen": " w w w", "rejected": " w"}] * 4
    arguments = DPOConfig("out", report_to="none", bf16=False, gradient_checkpointing=False)
    return DPOTrainer(net(), net(), args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=words)
"""


def test_preferences_have_a_model_of_reference(tmp_path: Path) -> None:
    """Chosen and rejected texts make one batch of twice as many, and two models lie on the GPU."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    trace = trace_of(job_of_trainer(tmp_path, PREFERENCES))
    assert len([size for size in blocks(trace, Category.PARAMETER) if size == 4 * 256 * 64]) == 4
    assert 8 * (2 + 3 + 1) * 2 * BATCH in blocks(trace, Category.INPUT)  # with an end of text


def test_a_process_keeps_its_answer_on_gpus(tmp_path: Path) -> None:
    """transformers finds no GPU after a plan, where there is none."""
    import torch
    from transformers.utils import is_torch_cuda_available

    trace_of(job_of_trainer(tmp_path))
    assert is_torch_cuda_available() == torch.cuda.is_available()


# Files as people write them, with the shape of one of the tensors that go to the GPU in a batch of four, and
# its bytes an element.
FILES = {
    "custom_dataset": ((4, 24), 8),
    "regression_objects": ((4, 16), 8),
    "masked": ((4, 20), 8),
    "streaming": ((4, 32), 8),
    "token_stream": ((4, 32), 8),
    "seq2seq": ((4, 20), 8),
    "speech": ((4, 80, 200), 4),
    "ctc": ((4, 8000), 4),
    "vision": ((4, 3, 32, 32), 4),
    "detection": ((4, 3, 32, 32), 4),
    "tuples": ((4, 20), 4),
    "preference": ((8, 6), 8),  # chosen and rejected, each with an end of text
    "reward": ((8, 5), 8),
    "token_classes": ((4, 9), 8),
    "answers": ((4, 48), 8),
    "segmentation": ((4, 3, 64, 64), 4),
    "choices": ((4, 4, 12), 8),
    "grouped_rates": ((4, 20), 8),
    "distillation": ((4, 20), 8),
    "chat": ((4, 6), 8),  # with an end of text
}
_OF_TRL = ("preference", "reward", "chat")


@pytest.mark.parametrize("name", FILES)
def test_files_as_people_write_them_are_planned_unchanged(name: str) -> None:
    """Own collators, own datasets, streams, objects, images, nested labels, own optimizers, a second model,
    callbacks that need scores: the longest sample is in each batch, which the trainer's own loop trains on.
    """
    for library in ("datasets", "PIL", *(["trl", "peft"] if name in _OF_TRL else [])):
        pytest.importorskip(library)
    shape, width = FILES[name]
    job = resolve_job(f"{PROGRAMS / name}.py:make_trainer", {})
    assert job.loop.mode is Mode.STEP
    trace = record(job, 4, AMPERE)
    validate(trace)
    size = -(-prod(shape) * width // 512) * 512
    assert size in {-(-one // 512) * 512 for one in blocks(trace, Category.INPUT)}
    assert sum(blocks(trace, Category.PARAMETER)) > 0
    phases = [e.phase for e in trace.events if isinstance(e, PhaseStart)]
    assert phases.count(Phase.OPTIMIZER) == job.loop.steps


def test_arguments_that_choose_the_cpu_are_planned_for_the_gpu(tmp_path: Path) -> None:
    """A file that is tried without a GPU is planned as one that has it."""
    on_cpu = trace_of(job_of_trainer(tmp_path, model_args=(("use_cpu", True),)))
    assert on_cpu.events == trace_of(job_of_trainer(tmp_path)).events


def test_trainers_that_generate_are_refused_by_name(tmp_path: Path) -> None:
    """The answer to GRPO is that it is not planned, not what its collator gives."""
    pytest.importorskip("trl")
    code = PREFERENCES.replace("DPOConfig, DPOTrainer", "GRPOConfig, GRPOTrainer").replace(
        "DPOConfig(", "GRPOConfig("
    )
    code = code.replace(
        "    return DPOTrainer(net(), net(), ", "    return GRPOTrainer(net(), lambda **given: [0.0], "
    )
    with pytest.raises(
        UsageError, match="a GRPOTrainer trains on texts that a model generates meanwhile, which is not"
    ):
        record(job_of_trainer(tmp_path, code), BATCH, AMPERE)


def test_a_trainer_that_the_file_makes_is_planned_by_its_name(tmp_path: Path) -> None:
    """It is planned as the trainer that a function of the file returns; its methods are refused."""
    file = tmp_path / "script.py"
    file.write_text(f"{CODE}\ntrainer = make()\n\nif __name__ == '__main__':\n    trainer.train()\n")
    named = trace_of(resolve_job(f"{file}:trainer", {}))
    assert named.events == trace_of(job_of_trainer(tmp_path)).events
    with pytest.raises(
        UsageError, match=r"script\.py:trainer\.train: is a method of an object that trains; "
    ):
        resolve_job(f"{file}:trainer.train", {})
