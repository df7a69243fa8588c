"""The keyword arguments of the functions of `planner.api`.

They are also the options of the command line.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from planner.hardware import Device
from planner.jobs import TensorSpec

Sample = str | TensorSpec
Folder = str | PathLike[str]
Arguments = Mapping[str, object] | str | Sequence[str] | None


class JobOptions(TypedDict, total=False):
    """The options of a job, as `planner.jobs.JOB_OPTIONS` describes them. None counts as not given."""

    model_arg: Arguments  # {"num_classes": 10}, or ["num_classes=10"]
    input: Sample | Sequence[Sample] | None  # one sample, without the batch dimension
    target: Sample | Sequence[Sample] | None  # several targets have names, and need a loss of your own
    loss: str | None
    mode: str | None
    optimizer: str | type[Any] | None
    optimizer_impl: str | None
    zero_grad: str | None
    drop_output: bool | None
    keep_grads: bool | None
    steps: int | None
    precision: str | None
    grad_scaler: bool | None
    backward_in_autocast: bool | None
    memory_format: str | None
    checkpoint: str | None
    offload: str | None
    accumulate: int | None
    clip_gradients: str | None
    ema: bool | None
    evaluate: bool | None
    eval_batch: int | None
    eval_input: str | Sequence[str] | None
    dataset_size: int | None
    lengths: str | None
    sizes: str | None  # for inputs with a range, such as ids=16..512:int64: "uniform", or a file
    batching: str | None
    pad_to: int | None
    run_steps: int | None
    seed: int | None
    ddp: bool | None
    ddp_bucket_view: bool | None
    freeze: str | Sequence[str] | None
    train_only: str | Sequence[str] | None
    new_tokens: int | None
    cudnn_benchmark: bool | None
    cudnn: str | None  # "installed" or a folder (that library is queried), "stored" or "published"
    cublas_workspace_config: str | None
    torch: str | None  # the version to plan for, such as "2.6"
    peft: str | None
    peft_arg: Arguments  # ["r=16", "target_modules=[q_proj, v_proj]"], or {"r": 16}
    quantize: str | None
    quantize_arg: Arguments
    prepare_kbit: bool | None
    liger: bool | None
    optimizer_arg: Arguments  # {"amsgrad": True}, or ["amsgrad=true"]
    compile: str | None
    fsdp: int | None
    fsdp_arg: Arguments  # ["param_dtype=bf16", "reduce_dtype=fp32"]
    tp: int | None
    world_size: int | None
    rank: int | None
    deepspeed: str | None  # DeepSpeed's JSON file, or its content


class Options(JobOptions, total=False):
    """The options of the job, the GPU and the trace. None counts as not given."""

    models: str | PathLike[str] | None  # a catalogue instead of the planner's models.yaml
    allow_code: bool | None  # the catalogue may name code: FILE.py:NAME
    isolate: bool | None  # run the model in a separate process
    time_limit: float | None  # seconds that a trace may take in the separate process
    gpu: str | Device | None
    gpu_mib: int | None
    allocator_cap_mib: int | None
    alloc_conf: str | None
    confidence: float | None  # default 0.99
    calibrations: Folder | Sequence[Folder] | None  # folders that are searched first
    own_calibrations: Folder | None  # a folder that is searched after `calibrations`
    no_calibration: bool | None
    trace: str | PathLike[str] | None  # plan from this file instead of a model
    save_trace: str | PathLike[str] | None
    cache: Folder | None  # folder for traces and answers of cuDNN; None for no cache
    warn: Callable[[str], None] | None  # called with one line for each harmless failure
    on_progress: Callable[[str], None] | None  # called with one short line for each step that takes time
