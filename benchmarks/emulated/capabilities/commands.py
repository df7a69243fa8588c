"""How the emulated side runs a job: the planner's own loop, or a command that follows from its options."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from benchmarks.emulated.capabilities.case import Case
from benchmarks.emulated.jobs import DrawnJob

FOLDER = "tests/programs"
FILES, SCRIPTS = f"{FOLDER}/user_files", f"{FOLDER}/scripts"
_BY_ITSELF = 1000  # optimizer steps after which a command is stopped that ends before
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


def case_of(job: DrawnJob, what: str = "") -> Case:
    """Return the case of a job: its model, if that is of a file, or else its options tell the script.

    What is special about a run over samples of many sizes are its allocator's configuration and its cap.
    """
    options = job.options
    if "run_steps" in options:
        config, cap = (re.search(pattern, what) for pattern in (r"\w+:\w+", r"(?<=cap )\d+"))
        special = (config[0] if config else "", cap[0] if cap else "0")
        return Case(job, (f"{SCRIPTS}/varying_shapes.py", *special), options["run_steps"])
    if ".py:" in job.model:
        return _of_file(job)
    if "deepspeed" in options:
        return _zero(job)
    if "by=accelerate" in options.get("fsdp_arg", ()):
        return _accelerate(job)
    if options.keys() & {"fsdp", "tp", "ddp"}:
        return _sharded(job)
    if options.keys() & {"peft", "quantize", "liger"}:
        return _finetuned(job)
    return Case(job)


# ---- files


def _of_file(job: DrawnJob) -> Case:
    path, _, name = job.model.partition(":")
    folder, _, file = path.removeprefix(f"{FOLDER}/").partition("/")
    if file in ("activation_memory.py", "activation_budget.py", "compiled_models.py"):  # models alone
        return Case(job)
    arguments, inputs = job.options.get("model_arg", {}), job.options.get("input")
    sized = (path, "--batch-size", str(job.batch))
    if folder == "user_files":
        return Case(job, (*sized, "--steps", "3"), _BY_ITSELF)
    if folder == "parallel_files":
        return _launched(job, (*sized, *_flags(arguments)), _BY_ITSELF)
    if folder == "diffusers_files":
        is_cached = file == "controlnet.py" and inputs[0].startswith("latents=")
        more = ("--cached",) if is_cached else ()
        return Case(job, (*sized, "--options", json.dumps(arguments), *more), _BY_ITSELF)
    if file == "generate.py":
        words = ("--tokens", inputs.partition(":")[0], "--options", json.dumps(arguments))
        return Case(job, (*sized, *words), stop_after=0)
    if inputs is None:  # a function that makes a Trainer
        described = {"trainer": name, "batch": job.batch, **arguments}
        return Case(job, ("-P", path, json.dumps(described)), _BY_ITSELF)
    tokens = {"tokens": int(inputs.partition(":")[0])} if isinstance(inputs, str) else {}
    return Case(job, (path, json.dumps({"batch": job.batch, **tokens, **arguments})), _BY_ITSELF)


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in arguments.items():
        option = f"--{key.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


def _launched(job: DrawnJob, command: tuple[str, ...], stop_after: int = 3, ranks: int = 0) -> Case:
    """Return the case of a command under torchrun."""
    ranks = ranks or job.options["world_size"]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    return Case(job, (*launch, *command), stop_after, ranks, job.options.get("rank", 0))


# ---- models of libraries, trained by a script that takes their description


def _described(job: DrawnJob) -> dict[str, Any]:
    """Return what the descriptions of training on several GPUs share."""
    options = job.options
    name = job.model.removeprefix("hf:")
    return {
        "model": name,
        "config": options.get("model_arg", {}),
        "shape": (job.batch, *map(int, options["input"].partition(":")[0].split("x"))),
        "optimizer": _OPTIMIZERS[options["optimizer"]],
        "checkpoint": options.get("checkpoint") == "blocks",
        "classes": name.endswith("Classification"),
    }


def _values(texts: list[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values of texts KEY=VALUE."""
    return {key: read(value) for key, _, value in (text.partition("=") for text in texts)}


def _zero(job: DrawnJob) -> Case:
    configuration = json.loads(job.options["deepspeed"])
    given = {**configuration, "train_micro_batch_size_per_gpu": job.batch}
    # Stage 3 steps torch's optimizer once for each sub-group, so that its steps are not the engine's.
    stop_after = 0 if configuration["zero_optimization"]["stage"] == 3 else 3
    described = {**_described(job), "deepspeed": given, "evaluate": job.options.get("evaluate", False)}
    return _launched(job, (f"{SCRIPTS}/zero.py", json.dumps(described)), stop_after)


def _accelerate(job: DrawnJob) -> Case:
    plugin = _values(job.options["fsdp_arg"], yaml.safe_load)
    types = [plugin.pop(f"{key}_dtype", None) for key in ("param", "reduce", "output")]
    described = {
        **_described(job),
        "plugin": {key: value for key, value in plugin.items() if key not in ("by", "gradient_sync")},
        "precision": types[0] or "no",
        "accumulate": job.options.get("accumulate", 1),
        "clip": "clip_gradients" in job.options,
    }
    command = (f"{SCRIPTS}/accelerate_fsdp.py", json.dumps(described))
    return _launched(job, command, ranks=job.options["fsdp"])


_BLOCKS = {  # the modules whose children FSDP2 shards one by one
    "BertForSequenceClassification": ["bert.encoder.layer"],
    "torchvision:vit_b_16": ["encoder.layers"],
    "torchvision:resnet50": ["layer1", "layer2", "layer3", "layer4"],
}
_DDP_RANKS = {14: 4}  # by the number of the row, which does not tell it; 2 of the others


def _sharded(job: DrawnJob) -> Case:
    options, described = job.options, _described(job)
    given = _values(options.get("fsdp_arg", []), yaml.safe_load)
    is_ddp, split = "ddp" in options, options.get("tp", 0)
    blocks = ["base_model.model.model.layers" if "peft" in options else "model.layers"]
    implementation, precision = options.get("optimizer_impl"), options.get("precision", "")
    described |= {
        "blocks": _BLOCKS.get(described["model"], blocks),
        "policy": {key: _DTYPES[given[key]] for key in ("param_dtype", "reduce_dtype") if key in given},
        "replicas": given.get("replicas", 1),
        "optimizer_arguments": {implementation: True} if implementation else {},
        "accumulate": options.get("accumulate", 1),
        "clip": "clip_gradients" in options,
        **({"reshard": given["reshard_after_forward"]} if "reshard_after_forward" in given else {}),
        **({"ddp": _flag(options, "ddp_bucket_view", "gradient_as_bucket_view")} if is_ddp else {}),
        **({"tp": split} if split else {}),
        **({"ends": True} if given.get("by") == "torchtitan" else {}),
        **({"freeze": [text.removesuffix("*") for text in options["freeze"]]} if "freeze" in options else {}),
        **({"lora": _values(options["peft_arg"], json.loads)} if "peft" in options else {}),
        **({"autocast": _DTYPES[precision.removeprefix("amp-")]} if precision else {}),
        **({"offload": True} if given.get("offload") else {}),
    }
    ranks = _DDP_RANKS.get(job.number, 2) if is_ddp else options.get("fsdp", 1) * (split or 1)
    return _launched(job, (f"{SCRIPTS}/sharded.py", json.dumps(described)), ranks=ranks)


def _flag(options: Mapping[str, Any], option: str, name: str) -> dict[str, bool]:
    return {name: True} if options.get(option) else {}


# ---- fine-tuning


def _finetuned(job: DrawnJob) -> Case:
    options, precision = job.options, job.options["precision"]
    quantize, is_torchao = options.get("quantize", ""), "-" in options.get("quantize", "")
    arguments = _values(options.get("quantize_arg", []), json.loads)
    dtype = "float32" if precision == "amp-bf16" else _DTYPES[precision]
    described = {
        "model": job.model.removeprefix("hf:"),
        "config": options["model_arg"],
        "batch": job.batch,
        "tokens": int(options["input"].partition(":")[0]),
        "dtype": dtype,
        "autocast": precision.startswith("amp"),
        "checkpoint": options.get("checkpoint") == "blocks",
        "prepare": "prepare_kbit" in options,
        **({"peft": _peft(options["peft"], options["peft_arg"])} if "peft" in options else {}),
        **({"quantize": _bitsandbytes(quantize, dtype) | arguments} if quantize and not is_torchao else {}),
        **({"torchao": {"kind": quantize, **arguments}} if is_torchao else {}),
        **({"liger": True} if "liger" in options else {}),
        **({"optimizer": "Adam"} if options["optimizer"] == "adam" else {}),
    }
    return Case(job, ("-P", f"{SCRIPTS}/finetune.py", json.dumps(described)))


def _peft(name: str, arguments: list[str]) -> dict[str, Any]:
    """Return the class of peft and its keywords."""
    variants = {"dora": ("lora", {"use_dora": True}), "rslora": ("lora", {"use_rslora": True})}
    method, preset = variants.get(name, (name, {}))
    return {"method": method, "task_type": "CAUSAL_LM", **preset, **_values(arguments, json.loads)}


def _bitsandbytes(kind: str, dtype: str) -> dict[str, Any]:
    """Return keywords of BitsAndBytesConfig."""
    if kind == "int8":
        return {"load_in_8bit": True}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": dtype}
