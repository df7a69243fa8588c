"""Training on several GPUs by accelerate's plugin for FSDP2."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.finetune_cases import LLAMA
from benchmarks.emulated.jobs import DrawnJob

ACCELERATE = "benchmarks/emulated/capabilities/scripts/accelerate_fsdp.py"
_LLAMA = {**LLAMA, "use_cache": False}
_BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}


class _Trained(NamedTuple):
    """One job, as both sides need it."""

    plugin: Mapping[str, Any] = _BLOCKS
    precision: str = "bf16"
    model: str = "LlamaForCausalLM"
    config: Mapping[str, Any] = _LLAMA
    shape: tuple[int, ...] = (8, 512)
    gpu: str = "A100 40GB"
    ranks: int = 2
    optimizer: str = "AdamW"
    accumulate: int = 1
    clip: bool = False
    checkpoint: bool = False


def _case(number: int, job: _Trained) -> Case:
    described = {key: value for key, value in job._asdict().items() if key not in ("gpu", "ranks")}
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), ACCELERATE)
    types = {
        key: "bf16" for key in ("param_dtype", "reduce_dtype", "output_dtype") if job.precision == "bf16"
    }
    given = {"by": "accelerate", "gradient_sync": "last", **types, **job.plugin}
    options = {
        "model_arg": dict(job.config),
        "input": f"{job.shape[1]}:int64",
        "optimizer": job.optimizer.lower(),
        "zero_grad": "after-step",
        "fsdp": job.ranks,
        "fsdp_arg": [f"{key}={_text(value)}" for key, value in given.items()],
        **({"accumulate": job.accumulate} if job.accumulate > 1 else {}),
        **({"clip_gradients": "norm"} if job.clip else {}),
        **({"checkpoint": "blocks"} if job.checkpoint else {}),
    }
    drawn = DrawnJob(number, f"hf:{job.model}", job.shape[0], job.gpu, options)
    return Case(drawn, (*launch, json.dumps(described)), ranks=job.ranks)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


_CASES = (
    _Trained(),
    _Trained(precision="no", clip=True),
    _Trained({**_BLOCKS, "reshard_after_forward": False}, ranks=4, gpu="H100 80GB"),
    _Trained(accumulate=2, clip=True),
    _Trained({**_BLOCKS, "activation_checkpointing": True}, shape=(16, 512)),
    _Trained({**_BLOCKS, "transformer_cls_names_to_wrap": ["LlamaMLP"]}, checkpoint=True),
    _Trained({"auto_wrap_policy": "no_wrap"}, optimizer="SGD", gpu="RTX 3090"),
    _Trained(config={**_LLAMA, "tie_word_embeddings": True}, gpu="RTX 4090", ranks=4, clip=True),
)
CAPABILITY = Capability(
    "FSDP2 by accelerate's plugin, under torchrun; the first rank is compared",
    tuple(_case(number, job) for number, job in enumerate(_CASES, 1)),
)
