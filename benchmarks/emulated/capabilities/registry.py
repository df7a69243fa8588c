"""The capabilities: tables whose rows name their jobs, and modules here that have a `CAPABILITY`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.capabilities.commands import case_of
from benchmarks.emulated.jobs import DrawnJob, options_of
from benchmarks.emulated.rows import Row
from benchmarks.rows import read_rows

HERE = Path(__file__).parent
_MODULES = ("data_parallel",)
# What the rows of each table are, as the page says it.
_TABLES: Mapping[str, str] = {
    "accelerate_fsdp": "FSDP2 by accelerate's plugin, under torchrun; the first rank is compared",
    "activation_offload": "activations offloaded to the CPU",
    "adapters": "LoRA, DoRA and other methods of peft (`--peft`)",
    "compiled": "models called through `torch.compile`",
    "cuda_graphs": 'models called through `torch.compile(mode="reduce-overhead")`',
    "cut_losses": "Apple's cut cross entropy",
    "diffusers_training": "ControlNets beside frozen models and LoRA of peft, as scripts with diffusers "
    "train them",
    "diffusion": "networks of diffusers, built on both sides from their configurations",
    "evaluations": "a Trainer's, with what it gathers on the GPU",
    "fused_losses": "Liger's fused cross entropy and layers (`--liger`)",
    "generation": "decoders of transformers: the planner's own loop on both sides, and scripts with "
    "`generate`, its caches, beams and samples",
    "host_optimizer": "torchao's CPUOffloadOptimizer in a step of one's own",
    "nnunet_plans": "configurations of nnU-Net's plans with deep supervision, Dice and cross entropy",
    "optimizers": "every class of torch.optim without a closure, bitsandbytes, torchao (its compiled steps "
    "with cached kernels) and others",
    "parallel_files": "scripts that shard their model by themselves, with tensor, sequence and loss "
    "parallel, torchao's float8 training and compiled blocks, or by a Trainer of transformers with FSDP2, "
    "under torchrun; the first rank is compared",
    "pipelines": "pipelines of `torch.distributed.pipelining` in files, under torchrun; each rank is "
    "compared; runs of row 8 (zero bubble, the second rank) differ by 0.9% allocated and 4.4% reserved, as "
    "NCCL's thread frees what was sent",
    "preferences": "DPO, reward models and SFT by the trainers of TRL",
    "quantized_weights": "NF4, FP4 and LLM.int8() weights of bitsandbytes (`--quantize`)",
    "selective_checkpoints": "selective checkpoints in a model's own forward, and budgets of compiled models",
    "sharded": "training on several GPUs: FSDP2 and DistributedDataParallel, under torchrun; the first rank "
    "is compared",
    "tensor_parallel": "tensor parallel by the plans of transformers, alone and within FSDP2, under "
    "torchrun; the first rank is compared",
    "torchao_weights": "weights of torchao: INT8, INT4, NF4, FP8 and training in them; the script says that "
    "no texts are packed",
    "user_files": "training scripts as people write them, planned by the name of their step",
    "varying_shapes": "samples of many sizes, 60 sampled batches (`--input 16..512:int64`)",
    "vision_language": "models of images and texts, detectors and segmentation with their losses, and "
    "speech, of transformers",
    "zero": "DeepSpeed's ZeRO 1 to 3 by its own engine, under torchrun; the first rank is compared",
}
_NOT_EMULATED = "planned, not emulated, where kernels compute nothing and the model reads a result of one"
# Causes of rows outside the bars, by number.
_CAUSES: Mapping[str, dict[int, str]] = {
    "optimizers": {
        14: "the emulated run reads the `mu` of ASGD, which a kernel fills, as 0 and takes another branch "
        "in the first step than a GPU, where it is 1",
        59: "inductor fuses FP8 conversions of large parameters into the kernel before, without their "
        "buffers",
    },
    "parallel_files": {
        18: "two emulated runs reserved 830,472,192 bytes, which are planned, and 912,261,120",
    },
    "sharded": {
        25: "the last of three ranks, whose parts are uneven: to_empty makes them without padding, and the "
        "first forward pass copies them into padded ones, which the plan has from the start",
    },
    "user_files": {
        26: "of the emulated side: nn.TransformerEncoder compares its mask with a causal one and reads "
        "`.all()` (`_detect_is_causal_mask`), which is false there, since kernels compute nothing; a GPU "
        "takes causal flash attention, as planned",
    },
    "vision_language": {
        **dict.fromkeys((15, 16), f"{_NOT_EMULATED}: which pictures are padding"),
        **dict.fromkeys((17, 18, 19), f"{_NOT_EMULATED}: counts of objects, which split tensors"),
        **dict.fromkeys((28, 29), f"{_NOT_EMULATED}: the patches of each image, which split tensors"),
    },
}


def capability_names() -> Iterator[str]:
    """Yield the names of all capabilities, in alphabetical order."""
    yield from sorted((*_TABLES, *_MODULES))


def job_of(row: Row) -> DrawnJob:
    """Return the job that a row names."""
    return DrawnJob(row.number, row.model, row.batch, row.gpu, options_of(row.options))


def load_capability(name: str) -> Capability:
    """Return a capability by its name."""
    if name in _TABLES:
        cases = (case_of(job_of(row), row.what) for row in read_rows(HERE / f"{name}.csv", Row))
        return Capability(_TABLES[name], tuple(cases), _CAUSES.get(name, {}))
    capability = importlib.import_module(f"benchmarks.emulated.capabilities.{name}").CAPABILITY
    assert isinstance(capability, Capability)
    return capability
