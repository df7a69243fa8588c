"""DeepSpeed's configuration as transformers and accelerate hold it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.api.integrations.deepspeed_fields import deepspeed_fields
from planner.errors import UsageError
from planner.jobs import ClipGradients, Precision

AUTO = {
    "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
    "steps_per_print": float("inf"),
}  # fmt: skip


def fields(config: Any = AUTO, ranks: int = 4, **given: Any) -> dict[str, Any]:
    framework = {"precision": Precision.AMP_BF16, "clip_gradients": ClipGradients.NORM, "ddp": True, **given}
    return deepspeed_fields(config, framework, ranks, "Arguments: deepspeed")


def test_the_engine_takes_over() -> None:
    """Buckets of gradients and the scaling of losses are left to it; it evaluates as the arguments say."""
    made = fields(grad_scaler=True, evaluate=True, eval_batch=8, accumulate=4)
    assert (made["world_size"], made["accumulate"], made["clip_gradients"]) == (4, 4, ClipGradients.NORM)
    assert (made["ddp"], made["grad_scaler"], made["evaluate"], made["eval_batch"]) == (False, False, True, 8)
    assert json.loads(made["deepspeed"])["zero_allow_untested_optimizer"] is True


def test_a_process_alone_gives_no_number_of_ranks() -> None:
    """The user does, by world_size."""
    assert fields(ranks=1)["world_size"] == 0


def test_precision_is_the_configurations() -> None:
    """That of the arguments fills "auto"; where the configuration says it, nothing is left to fill."""
    assert fields()["precision"] is Precision.AMP_BF16
    assert fields({**AUTO, "bf16": {"enabled": True}})["precision"] is Precision.FP32
    assert fields(precision=Precision.FP32)["precision"] is Precision.FP32


def test_clipping_is_the_configurations() -> None:
    """Without the key the engine clips nothing, whatever the arguments say."""
    without = {key: value for key, value in AUTO.items() if key != "gradient_clipping"}
    assert fields(without)["clip_gradients"] is ClipGradients.NONE


def test_a_file_is_read(tmp_path: Path) -> None:
    """As transformers takes its name."""
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**AUTO, "steps_per_print": 10}))
    assert fields(str(path)) == fields()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("nowhere.json", "Arguments: deepspeed: nowhere.json cannot be read"),
        ({"zero_optimization": {"stage": 3}}, "deepspeed: bf16 is on in the arguments and not in it"),
        (
            {**AUTO, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            "^Arguments: deepspeed: zero_optimization.offload_optimizer is not planned",
        ),
    ],
)
def test_what_is_not_planned_is_named(config: Any, words: str) -> None:
    """The setting and the JSON's key stand in one line."""
    with pytest.raises(UsageError, match=words):
        fields(config)


def test_trainers_and_accelerators_are_planned_by_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model, precision and batch have the same plan, however DeepSpeed's settings are given."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")  # accelerate sets it for the process
    pytest.importorskip("deepspeed", reason="DeepSpeed is not among the extras")
    transformers = pytest.importorskip("transformers")
    from planner.api.integrations.huggingface import max_batch_of_arguments, max_batch_of_loop
    from tests.api.integrations.test_huggingface import SAMPLE, bert

    accelerate = pytest.importorskip("accelerate")
    zero = {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    model, config = bert(), {**AUTO, "gradient_clipping": 1.0, "zero_optimization": zero}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, bf16=True, optim="adamw_torch")
    arguments.deepspeed = config
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config={**config, "bf16": {"enabled": True}})
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters())
    options: Any = {"gpu_mib": 4000, "world_size": 4}
    trained = max_batch_of_arguments(model, arguments, SAMPLE, **options)
    looped = max_batch_of_loop(model, SAMPLE, optimizer, accelerator, **options)
    assert trained.max_batch == looped.max_batch > 1
    assert "ZeRO 2, by its own engine" in str(trained)
