"""FSDP2 as accelerate's plugin and transformers' arguments hold it."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from accelerate import FullyShardedDataParallelPlugin  # noqa: E402

from planner.api.integrations.fsdp_fields import fsdp_fields  # noqa: E402
from planner.api.integrations.huggingface import (  # noqa: E402
    fields_of_arguments,
    max_batch_of_arguments,
    max_batch_of_loop,
)
from planner.api.max_batch import max_batch  # noqa: E402
from planner.errors import UsageError  # noqa: E402
from planner.jobs import FsdpArguments, Precision  # noqa: E402

CONFIG = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "use_cache": False,
}  # fmt: skip
SAMPLE = {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
BLOCKS = "transformer_based_wrap"


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def plugin(**options: Any) -> Any:
    with mock.patch.dict(os.environ):
        return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "auto_wrap_policy": BLOCKS, **options})


def accelerator(given: Any, **options: Any) -> Any:
    """An accelerator as one of four processes of accelerate launch has it."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    made = accelerate.Accelerator(cpu=True, **options)
    made.state.distributed_type, made.state.fsdp_plugin = accelerate.DistributedType.FSDP, given
    made.state.num_processes = 4
    return made


@pytest.fixture(autouse=True)
def forget_accelerators() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def arguments(tmp_path: Any, **options: Any) -> Any:
    with mock.patch.dict(os.environ):
        return transformers.TrainingArguments(str(tmp_path), use_cpu=True, **options)


def fields(given: Any, **more: Any) -> dict[str, Any]:
    framework = {"precision": Precision.AMP_BF16, "grad_scaler": False, "ddp": True, **more}
    return fsdp_fields(given, framework, 4, "Accelerator: fsdp_plugin")


def test_the_plugin_shards() -> None:
    """Mixed precision is the policy's, as accelerate fills it; gradients are reduced with the last batch."""
    made = fields(plugin())
    assert (made["fsdp"], made["ddp"], made["precision"]) == (4, False, Precision.FP32)
    assert made["fsdp_arg"] == FsdpArguments(
        by="accelerate", reshard_after_forward=True, gradient_sync="last", param_dtype="bf16",
        reduce_dtype="bf16", output_dtype="bf16", auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    )  # fmt: skip


def test_a_policy_of_ones_own_is_planned() -> None:
    """Its types stand before those of mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = fields(plugin(mixed_precision_policy=policy, transformer_cls_names_to_wrap=["LlamaMLP"]))
    given = made["fsdp_arg"]
    assert (given.param_dtype, given.reduce_dtype, given.output_dtype) == ("bf16", "fp32", None)
    assert given.transformer_cls_names_to_wrap == ("LlamaMLP",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp_version": 1}, "fsdp_version 1 is not planned: set fsdp_version=2"),
        ({"cpu_offload": True}, "cpu_offload is not planned: parameters and their optimizer are on the CPU"),
        ({"ignored_modules": "lm_head"}, "ignored_modules is not planned"),
    ],
)
def test_what_is_not_planned_is_named(given: Any, words: str) -> None:
    """One line has the setting and what to do."""
    model = llama()
    with pytest.raises(UsageError, match=words):
        max_batch_of_loop(model, SAMPLE, torch.optim.AdamW(model.parameters()), accelerator(plugin(**given)))


def test_fp16_is_refused() -> None:
    """Its scaler is not planned beside FSDP."""
    with pytest.raises(UsageError, match="with fp16 is not planned: the loss is scaled; use bf16"):
        fields(plugin(), grad_scaler=True)


@pytest.mark.slow
def test_arguments_and_accelerators_are_planned_as_the_job_by_hand(tmp_path: Any) -> None:
    """The same model on as many ranks has the same plan, however the settings are given."""
    model, mixed = llama(), {"param_dtype=bf16", "reduce_dtype=bf16", "output_dtype=bf16"}
    given = arguments(tmp_path, bf16=True, fsdp=True, max_grad_norm=0.0, optim="adamw_torch")
    trained = max_batch_of_arguments(model, given, SAMPLE, gpu_mib=1500, fsdp=4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    looped = max_batch_of_loop(
        model, SAMPLE, optimizer, accelerator(plugin(), mixed_precision="bf16"), gpu_mib=1500,
        zero_grad="after-step",
    )  # fmt: skip
    by_hand = max_batch(
        llama, input=["input_ids=64:int64", "labels=64:int64"], loss="output", optimizer="adamw",
        zero_grad="after-step", fsdp=4, gpu_mib=1500, fsdp_arg=["by=accelerate", *sorted(mixed)],
    )  # fmt: skip
    assert trained.max_batch == looped.max_batch == by_hand.max_batch > 1
    assert "LlamaDecoderLayer" in str(trained)


def test_checkpoints_of_the_plugin_are_planned() -> None:
    """Its wrappers change no names by which the optimizer knows its parameters."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [
        max_batch_of_loop(
            model, SAMPLE, optimizer, accelerator(plugin(activation_checkpointing=on)), gpu_mib=1500
        ).max_batch
        for on in (False, True)
    ]
    assert 0 < batches[0] < batches[1]


def test_arguments_alone_ask_for_the_number_of_ranks(tmp_path: Any) -> None:
    """A process alone does not know it."""
    with pytest.raises(UsageError, match="--fsdp-arg without --fsdp: give the number of ranks"):
        max_batch_of_arguments(llama(), arguments(tmp_path, fsdp=True), SAMPLE, gpu_mib=1500)


def test_the_config_of_arguments_is_planned(tmp_path: Any) -> None:
    """Names with and without the prefix mean the same."""
    config = {"fsdp_reshard_after_forward": False, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    made = fields_of_arguments(arguments(tmp_path, fsdp=True, fsdp_config=config))
    given = made["fsdp_arg"]
    assert given.reshard_after_forward is False
    assert given.transformer_cls_names_to_wrap == ("LlamaDecoderLayer",)


def test_loading_by_the_first_rank_is_named(tmp_path: Any) -> None:
    """The answer says how it is planned."""
    given = arguments(tmp_path, fsdp=True, fsdp_config={"cpu_ram_efficient_loading": True})
    result = max_batch_of_arguments(llama(), given, SAMPLE, gpu_mib=1500, fsdp=2)
    assert "TrainingArguments: fsdp_config: cpu_ram_efficient_loading" in " ".join(str(result).split())


def test_an_accelerator_alone_drops_its_plugin() -> None:
    """It says so, since nothing of the plugin is left in it."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = llama()
    with mock.patch.dict(os.environ):
        alone = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin())
        with pytest.raises(UsageError, match="accelerate drops it in a process alone"):
            max_batch_of_loop(model, SAMPLE, torch.optim.AdamW(model.parameters()), alone, gpu_mib=1500)


def test_replicas_of_a_parallelism_config_are_planned() -> None:
    """Two groups of two ranks hold the same; tensor parallel is refused."""
    given = accelerator(plugin())
    given.state.parallelism_config = SimpleNamespace(dp_replicate_size=2, tp_size=1, cp_size=1, sp_size=1)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    result = max_batch_of_loop(model, SAMPLE, optimizer, given, gpu_mib=1500)
    assert "replicas=2" in str(result)
    given.state.parallelism_config.tp_size = 2
    with pytest.raises(UsageError, match="is not planned: the model is split over GPUs"):
        max_batch_of_loop(model, SAMPLE, optimizer, given, gpu_mib=1500)
