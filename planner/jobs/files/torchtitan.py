"""Read a job from a TOML file of torchtitan.

The file is the argument of `train.py --job.config_file`. Options given on the command line fill in or
override the file: the number of GPUs of torchrun is `--fsdp`. The keys are torchtitan's from before its
configuration became Python (torchtitan/config/job_config.py).
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from planner._support.bounded_read import read_text
from planner.errors import UsageError
from planner.jobs.fsdp import FsdpArguments, FsdpType
from planner.jobs.job import (
    CatalogueEntry,
    Checkpoint,
    ClipGradients,
    Job,
    Loss,
    Optimizer,
    OptimizerImpl,
    Precision,
    TensorSpec,
)
from planner.jobs.parse import shown

SUFFIX = ".toml"
_MOST_CHARACTERS = 100_000

# torchtitan/models/llama3/__init__.py; widths of the feed-forward layers by `ffn_dim_multiplier`.
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
_FLAVORS: Mapping[str, Mapping[str, int]] = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "405B": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
    },
    "debugmodel": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 768,
        "vocab_size": 2048,
    },
}
_OPTIMIZERS = {"Adam": Optimizer.ADAM, "AdamW": Optimizer.ADAMW}
_TYPES = {"bfloat16": "bf16", "float32": "fp32"}

# Sections that do not affect the memory of a training step.
_HARMLESS_SECTIONS = "job profiling metrics lr_scheduler checkpoint comm debug experimental"
# Sections without effect if this key of the section is off; `model.converters` enables float8 and MX.
_GATES = {
    "validation": "enable",
    "float8": "enable_float8_linear",
    "mx": "",
    "quantize": "",
    "fault_tolerance": "enable",
    "memory_estimation": "enabled",
}
_HARMLESS = {
    "model": "hf_assets_path tokenizer_path print_after_conversion",
    "optimizer": "lr beta1 beta2 eps weight_decay",
    "training": "steps dataset dataset_path gc_freq gc_debug seed warmup_steps",
    "parallelism": "disable_loss_parallel enable_async_tensor_parallel enable_compiled_autograd "
    "pipeline_parallel_schedule pipeline_parallel_microbatch_size pipeline_parallel_split_points "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule_csv "
    "context_parallel_rotate_method module_fqns_per_model_part",
    "activation_checkpoint": "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop",
    "compile": "components",
}
_PLANNED = {
    "model": "name flavor",
    "optimizer": "name implementation fused",
    "training": "local_batch_size batch_size global_batch_size seq_len max_norm dtype mixed_precision_param "
    "mixed_precision_reduce",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward",
    "activation_checkpoint": "mode",
}
_OFF: tuple[Any, ...] = (None, False, "", 0, 1, [], {}, -1)
_ANSWERS = {  # advice on settings that are not planned
    "model.converters": "float8 and MX change the products of layers; remove them",
    "compile.enable": "compiled code with FSDP is not planned; give --compile none for an eager plan",
    "training.compile": "compiled code with FSDP is not planned; give --compile none for an eager plan",
    "training.enable_cpu_offload": "parameters would be on the CPU; remove it",
    "parallelism.tensor_parallel_degree": "name a FILE.py that splits the model by itself, with --world-size",
}
_OVERRIDES = {"compile.enable": "compile", "training.compile": "compile"}  # overriding option of a setting


def is_torchtitan(model: str) -> bool:
    """Return whether a model's name ends in .toml, as the names of torchtitan's files do."""
    return model.endswith(SUFFIX)


def read_torchtitan(path: str, given: Mapping[str, Any]) -> CatalogueEntry:
    """Return the job and the batch size of a file of torchtitan.

    `given` holds options of the command line. The settings that they override are not checked, and the option
    `fsdp` gives the number of GPUs. Raises UsageError for a file that cannot be read and for settings that
    are not planned.
    """
    given = {name: value for name, value in given.items() if value not in (None, (), [])}
    settings = _sections(path)
    _check(path, settings, given)
    return _Reader(path, settings, given).entry()


def _sections(path: str) -> dict[str, dict[str, Any]]:
    try:
        read = tomllib.loads(read_text(Path(path), _MOST_CHARACTERS))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {reason}; name a TOML file of torchtitan") from error
    if "model" not in read or not all(isinstance(section, dict) for section in read.values()):
        raise UsageError(f"{path}: has no section [model]; name a TOML file of torchtitan")
    return read


def _check(path: str, settings: Mapping[str, Mapping[str, Any]], given: Collection[str]) -> None:
    """Raise UsageError for the first setting that is not planned and not overridden."""
    for section, values in settings.items():
        if section in _HARMLESS_SECTIONS.split() or not values.get(
            _GATES.get(section, ""), section not in _GATES
        ):
            continue
        known = f"{_HARMLESS.get(section, '')} {_PLANNED.get(section, '')}".split()
        for key, value in values.items():
            name = f"{section}.{key}"
            is_off = any(value == off and type(value) is type(off) for off in _OFF)
            if key in known or is_off or _OVERRIDES.get(name) in given:
                continue
            answer = _ANSWERS.get(name, "remove it")
            raise UsageError(f"{path}: {name} = {shown(str(value))} is not planned: {answer}")


class _Reader:
    """A converter of the settings in a torchtitan file to a job."""

    def __init__(
        self, path: str, settings: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
    ) -> None:
        self._path, self._settings, self._given = path, settings, given

    def entry(self) -> CatalogueEntry:
        """Return the job of the file with its batch size."""
        batch = self._count("training.local_batch_size", self._get("training.batch_size", 8))
        length = self._count("training.seq_len", 2048)
        tokens = TensorSpec((length,), "int64")
        ranks, replicas = self._ranks()
        types = self._types()
        implementation = "fused" if self._get("optimizer.fused", True) else "foreach"
        job = Job.create(
            self._path,
            model_args=tuple({**self._sizes(), "use_cache": False, "padded": False}.items()),
            inputs=(tokens,),
            loss=Loss.OUTPUT,
            optimizer=self._choice("optimizer.name", "AdamW", _OPTIMIZERS),
            optimizer_impl=OptimizerImpl(
                self._choice(
                    "optimizer.implementation",
                    implementation,
                    {one.value: one.value for one in OptimizerImpl},
                )
            ),
            clip_gradients=ClipGradients.NORM if self._get("training.max_norm", 1.0) else ClipGradients.NONE,
            checkpoint=self._checkpoint(),
            accumulate=self._accumulate(batch, ranks * replicas),
            source="hf:LlamaForCausalLM",
            **self._sharding(ranks, replicas, types),
        )
        return CatalogueEntry(job, batch, f"The job of torchtitan's {self._path}.")

    def _get(self, name: str, default: Any) -> Any:
        section, _, key = name.partition(".")
        return self._settings.get(section, {}).get(key, default)

    def _refuse(self, name: str, value: Any, what: str) -> UsageError:
        return UsageError(f"{self._path}: {name} = {shown(str(value))} is not planned: {what}")

    def _count(self, name: str, default: Any) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refuse(name, value, "give a number from 1")
        return value

    def _choice(self, name: str, default: str, values: Mapping[str, Any]) -> Any:
        value = self._get(name, default)
        if value not in values:
            raise self._refuse(name, value, f"use one of {', '.join(values)}")
        return values[value]

    def _sizes(self) -> dict[str, int]:
        self._choice("model.name", "llama3", {"llama3": None})
        return {**_LLAMA, **self._choice("model.flavor", "debugmodel", _FLAVORS)}

    def _checkpoint(self) -> Checkpoint:
        if "checkpoint" in self._given:
            return Checkpoint.NONE
        mode = self._get("activation_checkpoint.mode", "selective")
        modes = {"none": Checkpoint.NONE, "full": Checkpoint.BLOCKS}
        if mode not in modes:
            what = "some operators are kept; give --checkpoint blocks or none, whose memory bounds it"
            raise self._refuse("activation_checkpoint.mode", mode, what)
        return modes[mode]

    def _ranks(self) -> tuple[int, int]:
        """Return the number of ranks over which parameters are sharded, and the number of replicas."""
        replicas = self._count("parallelism.data_parallel_replicate_degree", 1)
        name = "parallelism.data_parallel_shard_degree"
        ranks = self._get(name, -1)
        if "fsdp" in self._given:
            total = int(self._given["fsdp"])
            if total % replicas:
                raise UsageError(f"{self._path}: --fsdp {total}: {replicas} replicas do not divide it")
            return total // replicas, replicas
        if ranks == -1:
            raise self._refuse(name, ranks, "it takes all GPUs; give their number, such as --fsdp 8")
        return self._count(name, -1), replicas

    def _types(self) -> tuple[FsdpType, FsdpType]:
        """Return the precisions of computation and of gradient reduction."""
        return (
            self._choice("training.mixed_precision_param", "bfloat16", _TYPES),
            self._choice("training.mixed_precision_reduce", "float32", _TYPES),
        )

    def _sharding(self, ranks: int, replicas: int, types: tuple[FsdpType, FsdpType]) -> dict[str, Any]:
        precision = Precision.BF16 if self._get("training.dtype", "float32") == "bfloat16" else Precision.FP32
        if ranks == 1:  # without FSDP torchtitan uses autocast
            if precision is Precision.FP32 and types[0] == "bf16":
                precision = Precision.AMP_BF16
            return {"precision": precision, "ddp": replicas > 1}
        name = "parallelism.fsdp_reshard_after_forward"
        reshards = self._choice(name, "default", {"default": True, "never": False})
        given = FsdpArguments(
            reshards, replicas, by="torchtitan", param_dtype=types[0], reduce_dtype=types[1]
        )
        return {"precision": precision, "fsdp": ranks * replicas, "fsdp_arg": given}

    def _accumulate(self, batch: int, ranks: int) -> int:
        total = self._get("training.global_batch_size", -1)
        if total == -1:
            return 1
        if not isinstance(total, int) or total < 1 or total % (batch * ranks):
            what = f"{ranks} ranks of {batch} samples do not divide it"
            raise self._refuse("training.global_batch_size", total, what)
        return total // (batch * ranks)
