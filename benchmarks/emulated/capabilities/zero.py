"""DeepSpeed's ZeRO, stages 1 to 3: its own engine on both sides."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.finetune_cases import LLAMA
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/zero.py"
_LLAMA = {**LLAMA, "use_cache": False}
_BERT = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_BF16: dict[str, Any] = {"bf16": {"enabled": True}}
_FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 16}}
_SMALL = {"reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}
_SMALL_3 = {
    "reduce_bucket_size": 1_000_000,
    "stage3_prefetch_bucket_size": 500_000,
    "stage3_param_persistence_threshold": 10_000,
    "stage3_max_live_parameters": 4_000_000,
    "stage3_max_reuse_distance": 4_000_000,
    "sub_group_size": 2_000_000,
}


class _Trained(NamedTuple):
    """One job, as both sides need it."""

    zero: Mapping[str, Any]
    more: Mapping[str, Any] = {}  # of the configuration
    model: str = "LlamaForCausalLM"
    config: Mapping[str, Any] = _LLAMA
    shape: tuple[int, ...] = (8, 512)
    gpu: str = "A100 40GB"
    ranks: int = 2
    optimizer: str = "AdamW"
    checkpoint: bool = False


def _case(number: int, job: _Trained) -> Case:
    configuration = {"zero_allow_untested_optimizer": True, "zero_optimization": dict(job.zero), **job.more}
    described = {
        "model": job.model,
        "config": dict(job.config),
        "shape": job.shape,
        "optimizer": job.optimizer,
        "checkpoint": job.checkpoint,
        "classes": job.model.endswith("Classification"),
        "deepspeed": {**configuration, "train_micro_batch_size_per_gpu": job.shape[0]},
    }
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks))
    is_image = len(job.shape) == 4
    options = {
        "model_arg": dict(job.config),
        "input": "x".join(map(str, job.shape[1:])) + ("" if is_image else ":int64"),
        "optimizer": job.optimizer.lower(),
        **({"checkpoint": "blocks"} if job.checkpoint else {}),
        "deepspeed": json.dumps(configuration),
        "world_size": job.ranks,
    }
    name = job.model if ":" in job.model else f"hf:{job.model}"
    drawn = DrawnJob(number, name, job.shape[0], job.gpu, options)
    # Stage 3 steps torch's optimizer once for each sub-group, so that its steps are not the engine's.
    stop_after = 0 if job.zero["stage"] == 3 else 3
    return Case(drawn, (*launch, SCRIPT, json.dumps(described)), stop_after, job.ranks)


_VIT: dict[str, Any] = {"model": "torchvision:vit_b_16", "config": {}, "shape": (32, 3, 224, 224)}
_CASES = (
    _Trained({"stage": 1}),
    _Trained({"stage": 1, **_SMALL}, _BF16, ranks=4),
    _Trained({"stage": 1}, {**_BF16, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}),
    _Trained({"stage": 2}, _BF16),
    _Trained({"stage": 2, "overlap_comm": True, **_SMALL}, _BF16, ranks=4),
    _Trained({"stage": 2, "contiguous_gradients": False, "overlap_comm": False, **_SMALL}),
    _Trained({"stage": 2, "overlap_comm": True}, {**_FP16, "gradient_accumulation_steps": 3}, gpu="RTX 3090"),
    _Trained({"stage": 2, **_SMALL}, {"gradient_clipping": 1.0}, **_VIT),
    _Trained({"stage": 3}, _BF16),
    _Trained({"stage": 3, **_SMALL_3}, ranks=4),
    _Trained({"stage": 3, "overlap_comm": True, **_SMALL_3}, _BF16, ranks=4, checkpoint=True),
    _Trained({"stage": 3, "overlap_comm": False, **_SMALL_3}, _BF16, gpu="H100 80GB", shape=(4, 1024)),
    _Trained(
        {"stage": 3, **_SMALL_3},
        {**_BF16, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
        optimizer="SGD",
    ),
    _Trained(
        {"stage": 3, "contiguous_gradients": False},
        _FP16,
        "BertForSequenceClassification",
        _BERT,
        (16, 256),
        "RTX 4090",
    ),
    _Trained({"stage": 3, **_SMALL_3}, **_VIT),
)
CAPABILITY = Capability(
    "DeepSpeed's ZeRO 1 to 3 by its own engine, under torchrun; the first rank is compared",
    tuple(_case(number, job) for number, job in enumerate(_CASES, 1)),
)
