"""Convert the measuring script's jobs to jobs of the planner."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from planner.jobs import (
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
    complete_job,
    freeze,
    parse_tensor_spec,
)

PEAK_STEPS, HISTORY_STEPS = 4, 3  # the steps that measure.py runs for each kind of record
_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "local:cnn": ("zoo:CNN", {"channels": 3, "height": 224, "width": 224}),
    "monai:unetr": (
        "monai:UNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": [64, 64, 64],
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


class UnsupportedJobError(Exception):
    """Error for a valid record whose job the planner cannot express, with the reason as its text."""


class RecordedJob(Struct, frozen=True):
    """The job of a record, in the measuring script's terms."""

    model: str
    inp: str
    target: str
    loss: Loss
    precision: Precision
    optimizer: Optimizer
    impl: OptimizerImpl
    memory_format: MemoryFormat
    mode: Mode
    zero_grad: ZeroGrad
    alloc_conf: str
    benchmark: bool
    kwargs: dict[str, Any]

    def convert(self, steps: int) -> Job:
        """Convert the recorded job to a job of the planner with `steps` steps.

        Raises UnsupportedJobError if the planner lacks the model, or UsageError for tensors that measure.py
        never writes. In pure half precision measure.py converts a batch on the device, after the copy, while
        the planner's batches have the model's type. So the record has one more block at the start of a step,
        when few blocks are alive.
        """
        name, own_args = _MODELS.get(self.model, (self.model, {}))
        if not name.startswith(("torchvision:", "monai:", "zoo:")):
            raise UnsupportedJobError(f"{self.model}: the planner has no such model")
        return complete_job(
            Job.create(
                model=name,
                model_args=tuple((key, freeze(value)) for key, value in (own_args | self.kwargs).items()),
                inputs=(parse_tensor_spec(self.inp),),
                target=parse_tensor_spec(self.target),
                loss=self.loss,
                mode=self.mode,
                optimizer=self.optimizer,
                optimizer_impl=self.impl,
                zero_grad=self.zero_grad,
                steps=steps,
                precision=self.precision,
                grad_scaler=self.precision is Precision.AMP_FP16 and self.mode is Mode.TRAIN,
                memory_format=self.memory_format,
                cudnn_benchmark=self.benchmark,
            )
        )
