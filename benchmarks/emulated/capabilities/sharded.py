"""Training on several GPUs: FSDP2, with replicas too, and DistributedDataParallel."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.finetune_cases import LLAMA
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/sharded.py"
_LLAMA = {**LLAMA, "use_cache": False}
_BERT = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class _Sharded(NamedTuple):
    """One job, as both sides need it."""

    model: str = "LlamaForCausalLM"
    config: Mapping[str, Any] = _LLAMA
    blocks: tuple[str, ...] = ("model.layers",)
    shape: tuple[int, ...] = (8, 512)
    gpu: str = "A100 40GB"
    ranks: int = 2
    policy: Mapping[str, str] = {}  # of mixed precision: bf16 or fp32
    reshard: bool | int | None = None
    replicas: int = 1
    ddp: Mapping[str, Any] | None = None
    optimizer: str = "AdamW"
    implementation: str = ""  # "fused"; "": torch's default
    accumulate: int = 1
    clip: bool = False
    checkpoint: bool = False


def _case(number: int, job: _Sharded) -> Case:
    described = {
        "model": job.model,
        "config": dict(job.config),
        "blocks": job.blocks,
        "shape": job.shape,
        "policy": {key: _DTYPES[value] for key, value in job.policy.items()},
        **({} if job.reshard is None else {"reshard": job.reshard}),
        "replicas": job.replicas,
        **({} if job.ddp is None else {"ddp": dict(job.ddp)}),
        "optimizer": job.optimizer,
        "optimizer_arguments": {job.implementation: True} if job.implementation else {},
        "accumulate": job.accumulate,
        "clip": job.clip,
        "checkpoint": job.checkpoint,
        "classes": job.model.endswith("Classification"),
    }
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks))
    drawn = DrawnJob(number, _model(job), job.shape[0], job.gpu, _options(job))
    return Case(drawn, (*launch, SCRIPT, json.dumps(described)), ranks=job.ranks)


def _model(job: _Sharded) -> str:
    return job.model if ":" in job.model else f"hf:{job.model}"


def _options(job: _Sharded) -> dict[str, Any]:
    """Return the options of the planner."""
    is_image = len(job.shape) == 4
    given = {
        **job.policy,
        **({} if job.reshard is None else {"reshard_after_forward": str(job.reshard).lower()}),
        **({"replicas": job.replicas} if job.replicas > 1 else {}),
    }
    arguments = [f"{key}={value}" for key, value in given.items()]
    return {
        "model_arg": dict(job.config),
        "input": "x".join(map(str, job.shape[1:])) + ("" if is_image else ":int64"),
        "optimizer": job.optimizer.lower(),
        **({"optimizer_impl": job.implementation} if job.implementation else {}),
        **({"accumulate": job.accumulate} if job.accumulate > 1 else {}),
        **({"clip_gradients": "norm"} if job.clip else {}),
        **({"checkpoint": "blocks"} if job.checkpoint else {}),
        **({"ddp": True} if job.ddp is not None else {"fsdp": job.ranks}),
        **({"ddp_bucket_view": True} if job.ddp else {}),
        **({"fsdp_arg": arguments} if arguments else {}),
    }


_MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
_RESNET = ("layer1", "layer2", "layer3", "layer4")
_CASES = (
    _Sharded(),
    _Sharded(policy=_MIXED, implementation="fused"),
    _Sharded(ranks=4, policy=_MIXED, clip=True),
    _Sharded(ranks=4, policy=_MIXED, replicas=2, accumulate=2),
    _Sharded(ranks=4, reshard=2, checkpoint=True),
    _Sharded(reshard=False, policy={"param_dtype": "bf16"}, checkpoint=True, gpu="H100 80GB"),
    _Sharded(
        ranks=3, config={**LLAMA, "use_cache": False, "vocab_size": 16001}, optimizer="SGD", gpu="RTX 3090"
    ),
    _Sharded(
        "BertForSequenceClassification",
        _BERT,
        ("bert.encoder.layer",),
        (16, 256),
        gpu="RTX 4090",
        policy=_MIXED,
    ),
    _Sharded("torchvision:vit_b_16", {}, ("encoder.layers",), (32, 3, 224, 224), policy=_MIXED, clip=True),
    _Sharded("torchvision:resnet50", {}, _RESNET, (32, 3, 224, 224), optimizer="SGD", gpu="RTX 3090"),
    _Sharded(ranks=4, replicas=2, shape=(4, 1024), gpu="H100 80GB", implementation="fused"),
    _Sharded(ddp={}),
    _Sharded("torchvision:resnet50", {}, _RESNET, (64, 3, 224, 224), ddp={}, optimizer="SGD", gpu="RTX 3090"),
    _Sharded(ddp={"gradient_as_bucket_view": True}, ranks=4, accumulate=2),
)
CAPABILITY = Capability(
    "training on several GPUs: FSDP2 and DistributedDataParallel, under torchrun; the first rank is compared",
    tuple(_case(number, job) for number, job in enumerate(_CASES, 1)),
)
