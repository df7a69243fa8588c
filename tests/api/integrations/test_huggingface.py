"""Batch sizes for Hugging Face's Trainer and for accelerate."""

import dataclasses
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from planner.api.integrations.huggingface import (
    fields_of_arguments,
    max_batch_of_arguments,
    max_batch_of_loop,
    plan_batch_size,
    plan_training_arguments,
)

transformers = pytest.importorskip("transformers")
from planner.api.max_batch import max_batch  # noqa: E402
from planner.errors import ModelError, UsageError  # noqa: E402
from planner.jobs import ClipGradients, Optimizer, OptimizerImpl, Precision, ZeroGrad  # noqa: E402

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


class Loss(torch.nn.Module):
    """A model that returns its loss alone, as the Trainer holds on to it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def by_hand(**options: Any) -> Any:
    """The plan of the same job, written out."""
    return max_batch(
        Loss, input=INPUTS, loss="output", optimizer="adamw", optimizer_impl="fused",
        zero_grad="after-step", clip_gradients="norm", gpu_mib=1500, **options,
    )  # fmt: skip


def planned(model: Any, given: Any, **options: Any) -> tuple[int, int]:
    changed = plan_training_arguments(model, given, SAMPLE, gpu_mib=1500, **options)
    return changed.per_device_train_batch_size, changed.gradient_accumulation_steps


def test_the_effective_batch_stays(model: Any, tmp_path: Any) -> None:
    """8 samples in 4 micro-batches become 32 at once where they fit, not as many as fit."""
    given = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert planned(model, given) == (32, 1)
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (8, 4)


def test_the_effective_batch_grows_on_request(model: Any, tmp_path: Any) -> None:
    """With `grow` the batch is the largest without retries of the same job by hand, without accumulation."""
    given = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert planned(model, given, grow=True) == (by_hand().comfortable_batch, 1)
    assert planned(model, given, grow=True, multiple_of=64)[0] % 64 == 0


@pytest.mark.slow
@pytest.mark.parametrize("samples", [40960, 2 * 1019, 128 * 1024])
def test_a_batch_that_does_not_fit_is_split_exactly(model: Any, tmp_path: Any, samples: int) -> None:
    """An effective batch with a good divisor is met exactly, also in more than 100 micro-batches."""
    batch, steps = planned(model, arguments(tmp_path, per_device_train_batch_size=samples))
    most = by_hand(accumulate=2).comfortable_batch
    assert batch * steps == samples
    assert batch <= most
    assert steps <= 2 * -(-samples // batch)


@pytest.mark.slow
def test_a_batch_that_splits_badly_becomes_smaller_with_a_warning(model: Any, tmp_path: Any) -> None:
    """A prime number of samples loses fewer than one a micro-batch, and a warning names it."""
    given = arguments(tmp_path, per_device_train_batch_size=4999)
    with pytest.warns(UserWarning, match=r"4,999 samples in each step of the optimizer become"):
        batch, steps = planned(model, given)
    assert 0 < 4999 - batch * steps < steps


@pytest.mark.slow
def test_inputs_that_wait_on_the_gpu_are_counted(model: Any, tmp_path: Any) -> None:
    """The Trainer moves the inputs of all micro-batches before the first: they are part of the plan."""
    inputs = {}
    for steps in (1, 4):
        given = arguments(tmp_path, gradient_accumulation_steps=steps)
        result = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500)
        estimate = result.to_dict()["at_max"]
        inputs[steps] = estimate["breakdown_mib"]["inputs"] / result.max_batch
        assert ("holds the inputs of all 4 micro-batches" in str(estimate["assumptions"])) == (steps == 4)
    assert inputs[4] == pytest.approx(4 * inputs[1], rel=0.02)


def test_fields_of_arguments(tmp_path: Any) -> None:
    """Optimizer, precision, clipping, accumulation and checkpointing come from the arguments."""
    given = arguments(tmp_path, optim="adamw_torch_fused", bf16=True, gradient_accumulation_steps=3)
    assert fields_of_arguments(given) == {
        "optimizer": Optimizer.ADAMW,
        "optimizer_impl": OptimizerImpl.FUSED,
        "precision": Precision.AMP_BF16,
        "grad_scaler": False,
        "zero_grad": ZeroGrad.AFTER_STEP,
        "accumulate": 3,
        "clip_gradients": ClipGradients.NORM,
        "evaluate": False,
        "eval_batch": 0,
        "ddp": False,
        "liger": False,
    }
    with pytest.raises(UsageError, match="optim galore_adamw is not planned"):
        fields_of_arguments(arguments(tmp_path, optim="galore_adamw", optim_target_modules=["query"]))


def test_optimizers_of_the_trainer_have_the_names_of_their_classes(tmp_path: Any) -> None:
    """A name is planned as the class that the Trainer makes of it."""
    pytest.importorskip("bitsandbytes")
    named = {
        name: fields_of_arguments(arguments(tmp_path, optim=name))["optimizer"]
        for name in ("adafactor", "adamw_bnb_8bit", "lion_8bit")
    }
    assert named == {
        "adafactor": "transformers.optimization.Adafactor",
        "adamw_bnb_8bit": "bitsandbytes.optim.adamw.AdamW",
        "lion_8bit": "bitsandbytes.optim.lion.Lion",
    }


def test_embeddings_keep_32_bits_of_state(model: Any, tmp_path: Any) -> None:
    """The Trainer overrides 8-bit state of embeddings: their moments are four times as large as others."""
    pytest.importorskip("bitsandbytes")
    embedded = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Embedding))
    given = arguments(tmp_path, optim="adamw_bnb_8bit")
    result = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500)
    assert at_max(result)["breakdown_mib"]["optimizer"] >= 2 * 4 * embedded / 2**20


@pytest.mark.slow
def test_liger_patches_the_copy_alone(model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_liger_kernel` patches the model of the plan; a model that Liger does not know is named."""
    seen = []

    def patch(model: Any) -> None:
        seen.append(model)

    patches: Any = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"bert": patch}, _apply_liger_kernel_to_instance=patch
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    for package in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    given = arguments(tmp_path)
    given.use_liger_kernel, given.liger_kernel_config = True, {"rope": False}
    notes = str(at_max(max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500))["assumptions"])
    assert seen and all(one is not model and one.config.model_type == "bert" for one in seen)
    assert "liger_kernel_config: all of Liger's kernels for the model are planned" in notes
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN.clear()
    seen.clear()
    notes = str(at_max(max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500))["assumptions"])
    assert not seen
    assert "use_liger_kernel: Liger has no kernels for this model" in notes


def at_max(result: Any) -> dict[str, Any]:
    return dict(result.to_dict()["at_max"])


@pytest.mark.slow
def test_evaluations_are_planned(model: Any, tmp_path: Any) -> None:
    """An evaluation on larger batches than the training's decides the answer, and predictions are named."""
    given = arguments(tmp_path, eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=3000)
    result = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500)
    assert result.max_batch == by_hand(eval_batch=3000).max_batch
    assert "predictions of the whole evaluation gather on the GPU" in str(at_max(result)["assumptions"])
    moved = dataclasses.replace(given, eval_accumulation_steps=1)
    notes = at_max(max_batch_of_arguments(model, moved, SAMPLE, gpu_mib=1500))["assumptions"]
    assert "predictions of the whole evaluation" not in str(notes)


@pytest.mark.slow
def test_an_evaluation_with_retries_does_not_shrink_the_training_batch(model: Any, tmp_path: Any) -> None:
    """One retry when an evaluation starts costs nothing, so the batch is that of a training at ease."""
    given = arguments(tmp_path, eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=3000)
    most = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500).max_batch
    assert planned(model, given, grow=True)[0] == min(most, by_hand().comfortable_batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"torch_compile": True}, "torch_compile: torch.compile is planned as eager code"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: the planned batch is where"),
        ({"torch_empty_cache_steps": 4}, "torch_empty_cache_steps: planned without"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: batches of long samples"),
    ],
)
def test_settings_that_are_not_planned_are_named(model: Any, tmp_path: Any, options: Any, name: str) -> None:
    """A setting that changes memory and is not planned stands in text, JSON and a warning."""
    given = arguments(tmp_path, **options)
    with pytest.warns(UserWarning, match=f"TrainingArguments: {name}"):
        planned(model, given)
    result = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500)
    assert name in " ".join(str(result).split())
    assert name in str(at_max(result)["assumptions"])


def test_plain_arguments_warn_of_nothing(model: Any, tmp_path: Any) -> None:
    """The defaults of TrainingArguments are planned in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert planned(model, arguments(tmp_path)) == (8, 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fsdp", ["full_shard", "offload"], "TrainingArguments: fsdp_config: cpu_offload is not planned"),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "TrainingArguments: deepspeed: zero_optimization.offload_param is not planned",
        ),
        ("gradient_checkpointing_kwargs", {"offload": True}, "offload=True moves activations to the CPU"),
    ],
)
def test_settings_that_are_refused(model: Any, tmp_path: Any, name: str, value: Any, message: str) -> None:
    """A setting that a plan for one GPU cannot answer is refused in one line, of which the hook warns."""
    given = arguments(tmp_path)
    setattr(given, name, value)
    with pytest.raises(UsageError, match=message):
        max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500)
    with pytest.warns(UserWarning, match=f"no plan, per_device_train_batch_size stays as it is: .*{message}"):
        changed = plan_training_arguments(model, given, SAMPLE, gpu_mib=1500)
    assert changed.per_device_train_batch_size == given.per_device_train_batch_size


def test_label_smoothing_and_noise_take_memory(tmp_path: Any) -> None:
    """Label smoothing keeps log-probabilities of all tokens, NEFTune's noise another embedding: less fits."""
    config = transformers.GPT2Config(vocab_size=2000, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    sample = {name: torch.zeros(2, 32, dtype=torch.int64) for name in ("input_ids", "labels")}

    def most(**options: Any) -> int:
        result = max_batch_of_arguments(model, arguments(tmp_path, **options), sample, gpu_mib=2000)
        return result.max_batch

    assert most(label_smoothing_factor=0.1) < most()
    assert most(neftune_noise_alpha=5.0) <= most()


def test_caches_are_off_as_the_trainer_has_them(tmp_path: Any) -> None:
    """A model whose config has a key-value cache trains without it, unless `use_cache` enables it."""
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=4, n_head=2, n_positions=512)
    model = transformers.GPT2LMHeadModel(config)
    assert model.config.use_cache
    sample = {name: torch.zeros(2, 512, dtype=torch.int64) for name in ("input_ids", "labels")}
    without = max_batch_of_arguments(model, arguments(tmp_path), sample, gpu_mib=2000).max_batch
    cached = arguments(tmp_path, use_cache=True)
    assert max_batch_of_arguments(model, cached, sample, gpu_mib=2000).max_batch <= without
    assert model.config.use_cache


@pytest.mark.slow
def test_checkpointing_is_what_the_library_does(model: Any, tmp_path: Any) -> None:
    """Checkpoints of every layer save more than of every second; enabled on the model they are the same."""

    def most(plain: Any, **options: Any) -> int:
        result = max_batch_of_arguments(plain, arguments(tmp_path, **options), SAMPLE, gpu_mib=1500)
        return result.max_batch

    every = most(model, activation_checkpointing=True)
    second = most(model, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    assert most(model) < second < every
    enabled = bert()
    enabled.gradient_checkpointing_enable()
    assert most(enabled) == every
    assert not model.is_gradient_checkpointing


def test_optimizer_arguments_are_planned(model: Any, tmp_path: Any) -> None:
    """Momentum in `optim_args` is a state of the optimizer, which plain SGD has not."""

    def states(**options: Any) -> float:
        given = arguments(tmp_path, optim="sgd", **options)
        result = max_batch_of_arguments(model, given, SAMPLE, allocator_cap_mib=300)
        return float(at_max(result)["breakdown_mib"]["optimizer"])

    assert states() == 0 < states(optim_args="momentum=0.9")


def test_a_compiled_model_is_planned_and_named(model: Any, tmp_path: Any) -> None:
    """torch.compile(model) plans as the model, and the answer notes it."""
    compiled = torch.compile(model, backend="eager")
    result = max_batch_of_arguments(compiled, arguments(tmp_path), SAMPLE, gpu_mib=1500)
    assert result.max_batch == by_hand().max_batch
    assert "torch.compile is planned as eager" in str(at_max(result)["assumptions"])


def test_unexpected_errors_are_the_planners(tmp_path: Any) -> None:
    """A model that cannot be read ends a report with an error of the planner, whatever it raised; the hook
    warns, and its arguments are as they were.
    """

    class Odd(torch.nn.Module):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            raise KeyError("nothing here")

    reason = "the job cannot be read: KeyError: 'nothing here'"
    with pytest.raises(ModelError, match=reason):
        max_batch_of_arguments(Odd(), arguments(tmp_path), SAMPLE, gpu_mib=1500)
    given = arguments(tmp_path, per_device_train_batch_size=3)
    with pytest.warns(UserWarning, match=f"no plan, per_device_train_batch_size stays as it is: {reason}"):
        changed = plan_training_arguments(Odd(), given, SAMPLE, gpu_mib=1500)
    assert changed.per_device_train_batch_size == 3


def accelerator_of(**options: Any) -> Any:
    """A real one, as if it were the first of the process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


@pytest.mark.slow
def test_a_real_accelerator(model: Any) -> None:
    """The loop's settings in accelerate's own object are planned, also for the optimizer that it wraps."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    plain = torch.optim.AdamW(model.parameters(), fused=False, foreach=True)
    batch = plan_batch_size(model, SAMPLE, plain, accelerator, gpu_mib=1500)
    same = max_batch(
        bert, input=INPUTS, loss="output", optimizer="adamw", accumulate=2, gpu_mib=1500
    )  # fmt: skip
    assert batch == same.comfortable_batch
    prepared_model, prepared = accelerator.prepare(bert(), plain)
    assert type(prepared) is not type(plain)
    with pytest.raises(UsageError, match="parameters that the model has not"):
        plan_batch_size(prepared_model, SAMPLE, prepared, accelerator, gpu_mib=1500)
    _, wrapped = accelerator.prepare(model, plain)
    assert plan_batch_size(model, SAMPLE, wrapped, accelerator, gpu_mib=1500) == batch


def test_mixed_precision_of_an_accelerator(model: Any) -> None:
    """Autocast is planned from the accelerator's precision, with outputs converted to float32."""
    accelerator = accelerator_of(mixed_precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = max_batch_of_loop(model, SAMPLE, optimizer, accelerator, gpu_mib=1500)
    assert "CUDA's autocast to bfloat16" in str(at_max(result)["assumptions"])
    same = max_batch(bert, input=INPUTS, loss="output", precision="amp-bf16", gpu_mib=1500)
    assert abs(result.max_batch - same.max_batch) <= 0.01 * same.max_batch


def test_dynamo_and_handlers_of_an_accelerator(model: Any) -> None:
    """A compiler is named; autocast that a handler turns off is refused."""
    from accelerate.utils import AutocastKwargs

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiling = accelerator_of(dynamo_backend="eager")
    with pytest.warns(UserWarning, match="dynamo_backend: torch.compile is planned as eager code"):
        plan_batch_size(model, SAMPLE, optimizer, compiling, gpu_mib=1500)
    off = accelerator_of(kwargs_handlers=[AutocastKwargs(enabled=False)])
    with pytest.raises(UsageError, match="AutocastKwargs: enabled is not planned: autocast is off"):
        plan_batch_size(model, SAMPLE, optimizer, off, gpu_mib=1500)


def test_a_model_with_another_forward(model: Any) -> None:
    """A model that accelerate has wrapped for mixed precision is refused, not planned wrongly."""
    accelerator = accelerator_of(mixed_precision="bf16")
    prepared = accelerator.prepare(bert())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"plan before accelerator\.prepare\(model\)"):
        plan_batch_size(prepared, SAMPLE, optimizer, accelerator, gpu_mib=1500)
