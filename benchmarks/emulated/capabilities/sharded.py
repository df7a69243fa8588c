"""Training on several GPUs: FSDP2, with replicas too, and DistributedDataParallel."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.finetune_cases import LLAMA, texts_of
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/sharded.py"
LLAMA_WITHOUT_CACHE = {**LLAMA, "use_cache": False}
_BERT = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class ShardedJob(NamedTuple):
    """One job, as both sides need it."""

    model: str = "LlamaForCausalLM"
    config: Mapping[str, Any] = LLAMA_WITHOUT_CACHE
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
    tp: int = 0  # ranks that share a layer's tensors
    ends: bool = False  # embeddings, and norm and head, are sharded by themselves, as torchtitan does
    freeze: tuple[str, ...] = ()  # what the names of frozen parameters begin with
    lora: Mapping[str, Any] | None = None  # keywords of peft's LoraConfig
    autocast: str = ""  # bf16 or fp16, the latter with a scaler
    rank: int = 0  # that is compared
    offload: bool = False  # parameters, gradients and the optimizer's state on the CPU


def case_of(number: int, job: ShardedJob) -> Case:
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
        **({"tp": job.tp} if job.tp else {}),
        **({"ends": True} if job.ends else {}),
        **({"freeze": job.freeze} if job.freeze else {}),
        **({} if job.lora is None else {"lora": dict(job.lora)}),
        **({"autocast": _DTYPES[job.autocast]} if job.autocast else {}),
        **({"offload": True} if job.offload else {}),
        "classes": job.model.endswith("Classification"),
    }
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks))
    drawn = DrawnJob(number, _model(job), job.shape[0], job.gpu, _options(job))
    return Case(drawn, (*launch, SCRIPT, json.dumps(described)), ranks=job.ranks, rank=job.rank)


def _model(job: ShardedJob) -> str:
    return job.model if ":" in job.model else f"hf:{job.model}"


def _options(job: ShardedJob) -> dict[str, Any]:
    """Return the options of the planner."""
    is_image = len(job.shape) == 4
    given = {
        **job.policy,
        **({} if job.reshard is None else {"reshard_after_forward": str(job.reshard).lower()}),
        **({"replicas": job.replicas} if job.replicas > 1 else {}),
        **({"by": "torchtitan"} if job.ends else {}),
        **({"offload": "true"} if job.offload else {}),
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
        **_sizes(job),
        **({"ddp_bucket_view": True} if job.ddp else {}),
        **({"freeze": [f"{prefix}*" for prefix in job.freeze]} if job.freeze else {}),
        **({} if job.lora is None else {"peft": "lora", "peft_arg": texts_of(job.lora)}),
        **({"precision": f"amp-{job.autocast}"} if job.autocast else {}),
        **({"fsdp_arg": arguments} if arguments else {}),
        **({"rank": job.rank} if job.rank else {}),
    }


def _sizes(job: ShardedJob) -> dict[str, Any]:
    if job.ddp is not None:
        return {"ddp": True}
    groups = job.ranks // (job.tp or 1)
    return {**({"fsdp": groups} if groups > 1 else {}), **({"tp": job.tp} if job.tp else {})}


MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
_RESNET = ("layer1", "layer2", "layer3", "layer4")
_LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
_ADAPTED = ("base_model.model.model.layers",)
_CASES = (
    ShardedJob(),
    ShardedJob(policy=MIXED, implementation="fused"),
    ShardedJob(ranks=4, policy=MIXED, clip=True),
    ShardedJob(ranks=4, policy=MIXED, replicas=2, accumulate=2),
    ShardedJob(ranks=4, reshard=2, checkpoint=True),
    ShardedJob(reshard=False, policy={"param_dtype": "bf16"}, checkpoint=True, gpu="H100 80GB"),
    ShardedJob(
        ranks=3, config={**LLAMA, "use_cache": False, "vocab_size": 16001}, optimizer="SGD", gpu="RTX 3090"
    ),
    ShardedJob(
        "BertForSequenceClassification",
        _BERT,
        ("bert.encoder.layer",),
        (16, 256),
        gpu="RTX 4090",
        policy=MIXED,
    ),
    ShardedJob("torchvision:vit_b_16", {}, ("encoder.layers",), (32, 3, 224, 224), policy=MIXED, clip=True),
    ShardedJob("torchvision:resnet50", {}, _RESNET, (32, 3, 224, 224), optimizer="SGD", gpu="RTX 3090"),
    ShardedJob(ranks=4, replicas=2, shape=(4, 1024), gpu="H100 80GB", implementation="fused"),
    ShardedJob(ddp={}),
    ShardedJob(
        "torchvision:resnet50", {}, _RESNET, (64, 3, 224, 224), ddp={}, optimizer="SGD", gpu="RTX 3090"
    ),
    ShardedJob(ddp={"gradient_as_bucket_view": True}, ranks=4, accumulate=2),
    ShardedJob(ends=True, policy=MIXED, implementation="fused", clip=True, checkpoint=True),
    ShardedJob(ends=True, policy=MIXED, reshard=False, ranks=4, replicas=2, gpu="H100 80GB"),
    ShardedJob(lora=_LORA, blocks=_ADAPTED, policy=MIXED),
    ShardedJob(lora=_LORA, blocks=_ADAPTED, ranks=4, reshard=False, checkpoint=True, clip=True),
    ShardedJob(freeze=("model.embed_tokens", "model.layers.0."), ranks=4, policy=MIXED),
    ShardedJob(
        "torchvision:resnet50",
        {},
        _RESNET,
        (32, 3, 224, 224),
        optimizer="SGD",
        freeze=("layer1", "layer2"),
        autocast="fp16",
    ),
    ShardedJob(autocast="fp16", clip=True, ranks=4),
    ShardedJob(autocast="bf16", accumulate=2, gpu="H100 80GB"),
    ShardedJob(ddp={}, lora=_LORA, autocast="bf16"),
    ShardedJob(
        "torchvision:resnet50",
        {},
        _RESNET,
        (32, 3, 224, 224),
        ddp={},
        freeze=("layer1", "layer2"),
        autocast="fp16",
    ),
    ShardedJob(
        ranks=3, config={**LLAMA_WITHOUT_CACHE, "vocab_size": 16001}, optimizer="SGD", gpu="RTX 3090", rank=2
    ),
    ShardedJob(
        "BertForSequenceClassification",
        {**_BERT, "num_labels": 3},
        ("bert.encoder.layer",),
        (16, 256),
        gpu="RTX 4090",
        ranks=4,
        rank=3,
    ),
    ShardedJob(offload=True),
    ShardedJob(offload=True, policy=MIXED, ranks=4, accumulate=2, gpu="RTX 3090"),
    ShardedJob(offload=True, policy=MIXED, checkpoint=True, reshard=False, optimizer="SGD", gpu="H100 80GB"),
    ShardedJob(
        "torchvision:vit_b_16", {}, ("encoder.layers",), (32, 3, 224, 224), offload=True, ranks=4, replicas=2
    ),
)
CAPABILITY = Capability(
    "training on several GPUs: FSDP2 and DistributedDataParallel, under torchrun; the first rank is compared",
    tuple(case_of(number, job) for number, job in enumerate(_CASES, 1)),
    {
        25: "the last of three ranks, whose parts are uneven: to_empty makes them without padding, and the "
        "first forward pass copies them into padded ones, which the plan has from the start"
    },
)
