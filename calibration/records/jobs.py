"""From the job of a measure.py record to ours, as far as our jobs can say it."""

from collections.abc import Mapping
from typing import Any

from planner.jobs import (
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
    choose,
    complete_job,
    freeze,
    parse_tensor_spec,
)

PEAK_STEPS, HISTORY_STEPS = 4, 3  # as many as measure.py runs for each kind of record
_WHAT_IT_BUILDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "local:cnn": ("zoo:CNN", {"channels": 3, "height": 224, "width": 224}),
    "monai:unetr": (
        "monai:UNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (64, 64, 64),
            "feature_size": 16,
            "hidden_size": 768,
            "mlp_dim": 3072,
            "num_heads": 12,
            "norm_name": "instance",
            "res_block": True,
            "dropout_rate": 0.0,
        },
    ),
}
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("model", "inp", "target", "loss", "precision", "optimizer", "impl"), str),
    **dict.fromkeys(("memory_format", "mode", "zero_grad", "alloc_conf"), str),
    "benchmark": bool,
    "kwargs": dict,
}


class NotOursError(Exception):
    """The record is sound, but no job of ours says what it measured; the text says why."""


def check_measured_job(said: object) -> Mapping[str, Any]:
    """The job of a record with all its keys, of the right types. Raises ValueError."""
    if not isinstance(said, dict):
        raise ValueError("job: no mapping")
    for key, kind in _TYPES.items():
        if type(said.get(key)) is not kind:
            raise ValueError(f"job.{key}: {str(said.get(key))[:40]!r} is no {kind.__name__}")
    return said


def job_of_measured(said: Mapping[str, Any], steps: int) -> Job:
    """Our job of these steps. Raises NotOursError, or UsageError for values that measure.py never writes.

    In pure half precision measure.py converts a batch on the device, after it was copied; our batches come
    in the model's type. That takes a block more at the start of a step, where little is alive.
    """
    source = said["model"]
    name, own_args = _WHAT_IT_BUILDS.get(source, (source, {}))
    if not name.startswith(("torchvision:", "monai:", "zoo:")):
        raise NotOursError(f"{source}: the planner has no such model")
    precision = choose(Precision, said["precision"], "precision")
    args = {**own_args, **said["kwargs"]}
    return complete_job(
        Job(
            model=name,
            model_args=tuple((key, freeze(_listed(value))) for key, value in args.items()),
            inputs=(parse_tensor_spec(said["inp"]),),
            target=parse_tensor_spec(said["target"]),
            loss=choose(Loss, said["loss"], "loss"),
            mode=choose(Mode, said["mode"], "mode"),
            optimizer=choose(Optimizer, said["optimizer"], "optimizer"),
            optimizer_impl=choose(OptimizerImpl, said["impl"], "impl"),
            zero_grad=choose(ZeroGrad, said["zero_grad"], "zero_grad"),
            steps=steps,
            precision=precision,
            grad_scaler=precision is Precision.AMP_FP16 and said["mode"] == Mode.TRAIN,
            memory_format=choose(MemoryFormat, said["memory_format"], "memory_format"),
            cudnn_benchmark=said["benchmark"],
        )
    )


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
