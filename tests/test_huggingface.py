"""Batch sizes for Hugging Face's Trainer and for accelerate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.huggingface import fields_of_arguments, plan_batch_size, plan_training_arguments

transformers = pytest.importorskip("transformers")
from planner.api import max_batch  # noqa: E402
from planner.errors import UsageError  # noqa: E402
from planner.job import Checkpoint, ClipGradients, Optimizer, OptimizerImpl, Precision  # noqa: E402

TINY = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
INPUTS = ["input_ids=32:int64", "labels=scalar:int64"]
SAMPLE = {
    "input_ids": torch.zeros(2, 32, dtype=torch.int64),
    "labels": torch.zeros(2, dtype=torch.int64),
}


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY))


@pytest.fixture(scope="module")
def model() -> Any:
    return bert()


def arguments(tmp_path: Any, **options: Any) -> Any:
    return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_arguments_get_the_largest_batch(model: Any, tmp_path: Any) -> None:
    """The planned batch is that of the same job by hand, and accumulation shrinks by what the batch grew."""
    given = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4, max_grad_norm=0)
    planned = plan_training_arguments(
        model, given, SAMPLE, gpu_mib=1500, optimizer_impl="foreach", accumulate=1
    )
    by_hand = max_batch(
        bert, input=INPUTS,
        loss="output", optimizer="adamw", gpu_mib=1500,
    ).max_batch  # fmt: skip
    assert planned.per_device_train_batch_size == by_hand > 32
    assert planned.gradient_accumulation_steps == 1
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (8, 4)


def test_the_samples_of_a_step_stay(model: Any, tmp_path: Any) -> None:
    """A batch that is too large is split so that the optimizer sees as many samples as before."""
    given = arguments(tmp_path, per_device_train_batch_size=40960, max_grad_norm=0)
    planned = plan_training_arguments(model, given, SAMPLE, gpu_mib=1500)
    steps, batch = planned.gradient_accumulation_steps, planned.per_device_train_batch_size
    assert steps > 1
    assert 0 <= steps * batch - 40960 < steps


def test_fields_of_arguments(tmp_path: Any) -> None:
    """Optimizer, precision, clipping, accumulation and checkpointing come from the arguments."""
    given = arguments(tmp_path, optim="adamw_torch_fused", bf16=True, gradient_accumulation_steps=3)
    assert fields_of_arguments(given) == {
        "optimizer": Optimizer.ADAMW,
        "optimizer_impl": OptimizerImpl.FUSED,
        "precision": Precision.AMP_BF16,
        "grad_scaler": False,
        "accumulate": 3,
        "clip_gradients": ClipGradients.NORM,
        "checkpoint": Checkpoint.NONE,
        "ddp": False,
    }
    with pytest.raises(UsageError, match="optim lion_32bit is not planned; use one of adamw_torch"):
        fields_of_arguments(arguments(tmp_path, optim="lion_32bit"))


def test_accelerate(model: Any) -> None:
    """A loop with accelerate gets the batch of the same job planned by hand."""
    accelerator = SimpleNamespace(mixed_precision="bf16", gradient_accumulation_steps=1, num_processes=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = plan_batch_size(model, SAMPLE, optimizer, accelerator, gpu_mib=1500)
    by_hand = max_batch(
        bert, input=INPUTS,
        loss="output", precision="amp-bf16", gpu_mib=1500,
    ).max_batch  # fmt: skip
    assert batch == by_hand
    accelerator.mixed_precision = "fp8"
    with pytest.raises(UsageError, match="mixed precision fp8 is not planned"):
        plan_batch_size(model, SAMPLE, optimizer, accelerator, gpu_mib=1500)


def accelerator_of(**options: Any) -> Any:
    """A real one, as if it were the first of the process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


def test_a_real_accelerator(model: Any) -> None:
    """What accelerate's own object says of a loop is planned, also for the optimizer that it wraps."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    plain = torch.optim.AdamW(model.parameters(), fused=False, foreach=True)
    batch = plan_batch_size(model, SAMPLE, plain, accelerator, gpu_mib=1500)
    by_hand = max_batch(
        bert, input=INPUTS, loss="output", optimizer="adamw", accumulate=2, gpu_mib=1500
    ).max_batch  # fmt: skip
    assert batch == by_hand
    prepared_model, prepared = accelerator.prepare(bert(), plain)
    assert type(prepared) is not type(plain)
    assert plan_batch_size(prepared_model, SAMPLE, prepared, accelerator, gpu_mib=1500) == by_hand


def test_a_model_with_another_forward(model: Any) -> None:
    """A model that accelerate has wrapped for mixed precision is refused, not planned wrongly."""
    accelerator = accelerator_of(mixed_precision="bf16")
    prepared = accelerator.prepare(bert())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"plan before accelerator\.prepare\(model\)"):
        plan_batch_size(prepared, SAMPLE, optimizer, accelerator, gpu_mib=1500)
