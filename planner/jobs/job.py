"""The data type of a job and its parts.

The parts include the model, the inputs, the loss, the optimizer and the training loop.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace

from planner.jobs.fsdp import FsdpArguments

Arguments = tuple[tuple[str, Any], ...]  # keywords with their values, in the user's order; lists are tuples


class Mode(StrEnum):
    TRAIN = "train"
    INFER = "infer"  # eval mode, no gradients
    FORWARD = "forward"  # training mode with gradients recorded, but no loss, backward pass or optimizer
    GENERATE = "generate"  # eval mode, no gradients: a causal language model extends a prompt token by token
    STEP = "step"  # the user's training step runs losses, backward passes and optimizer steps


class ZeroGrad(StrEnum):
    BEFORE_FORWARD = "before-forward"
    BEFORE_BACKWARD = "before-backward"
    AFTER_STEP = "after-step"


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    MSE = "mse"
    BCE_WITH_LOGITS = "bce_with_logits"
    SUM = "sum"
    OUTPUT = "output"  # the model returns its own loss
    TRAINING_STEP = "training_step"  # of a LightningModule, whose `configure_optimizers` gives the optimizer


class Optimizer(StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    NESTEROV = "nesterov"
    ADAM = "adam"
    ADAMW = "adamw"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    ADAFACTOR = "adafactor"


class OptimizerImpl(StrEnum):
    FOREACH = "foreach"
    FOR_LOOP = "for-loop"
    FUSED = "fused"


# The optimizers of which torch has a fused implementation.
FUSED_OPTIMIZERS = frozenset(Optimizer) - {Optimizer.RMSPROP, Optimizer.ADAFACTOR}


class Precision(StrEnum):
    FP32 = "fp32"
    AMP_FP16 = "amp-fp16"  # fp32 weights, CUDA autocast to float16
    AMP_BF16 = "amp-bf16"
    FP16 = "fp16"  # the model and its floating-point inputs are converted
    BF16 = "bf16"


class MemoryFormat(StrEnum):
    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"  # weights and inputs with 4 dimensions, or with 5 (channels_last_3d)


class Checkpoint(StrEnum):
    NONE = "none"
    BLOCKS = "blocks"  # the repeated blocks of the model run again in the backward pass


class Offload(StrEnum):
    NONE = "none"
    ACTIVATIONS = "activations"  # tensors saved by autograd are kept in pinned memory, by `save_on_cpu`


class Compile(StrEnum):
    """The modes of torch.compile that are planned, which exclude modes with timed templates."""

    NONE = "none"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"  # with CUDA graphs, which share a private memory pool


class Lengths(StrEnum):
    FIXED = "fixed"  # every sample has the given size
    VARYING = "varying"  # samples are padded to the longest of their batch, at most the given size


class Batching(StrEnum):
    PADDED = "padded"  # samples in random order, padded to the largest of their batch
    GROUPED = "grouped"  # samples of similar sizes together, as by transformers' group_by_length
    TOKENS = "tokens"  # as many samples as fit into a number of tokens, padding included
    PACKED = "packed"  # samples concatenated to rows of the largest size
    SCALED = "scaled"  # one size for all samples of a batch, as drawn in multi-scale training


class ClipGradients(StrEnum):
    NONE = "none"
    NORM = "norm"  # `clip_grad_norm_` over all trained parameters before the optimizer's step
    VALUE = "value"  # `clip_grad_value_`


class TensorSpec(Struct, frozen=True):
    """The shape and dtype of a tensor in one sample.

    The batch dimension is left out. `str` gives its text: `3x224x224`, `128:int64`, `scalar:int64`,
    `input_ids=128:int64` (a keyword input), `batch.image=3x224x224` (an entry of an input;
    `planner.jobs.nested` describes the other forms), `16..1024:int64` (samples of varying sizes).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"  # name of a torch dtype
    keyword: str | None = None  # name of a keyword input, or path to a tensor in a nested input
    smallest: tuple[int, ...] = ()  # smallest sizes if samples vary, with the largest in `shape`; else empty

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest size of each dimension."""
        return tuple(zip(self.smallest or self.shape, self.shape, strict=True))

    def __str__(self) -> str:
        named = f"{self.keyword}=" if self.keyword else ""
        typed = "" if self.dtype == "float32" else f":{self.dtype}"
        sizes = [str(high) if low == high else f"{low}..{high}" for low, high in self.ranges]
        return named + ("x".join(sizes) or "scalar") + typed


class Quantize(StrEnum):
    """The kinds of quantization of linear layers, by bitsandbytes or torchao."""

    NONE = "none"
    NF4 = "nf4"
    FP4 = "fp4"
    INT8 = "int8"  # LLM.int8()
    INT8_WEIGHT_ONLY = "int8-weight-only"  # this kind and all below are implemented by torchao
    INT4_WEIGHT_ONLY = "int4-weight-only"
    INT8_TRAINING = "int8-training"  # trained INT8 weights
    INT8_MIXED = "int8-mixed"  # INT8 products of unquantized weights
    FLOAT8_TRAINING = "float8-training"  # FP8 products of unquantized weights

    @property
    def is_of_torchao(self) -> bool:
        """Return whether torchao implements this kind of quantization."""
        return "-" in self.value

    @property
    def is_trained(self) -> bool:
        """Return whether the weights of the quantized layers are trained."""
        return self in (Quantize.INT8_TRAINING, Quantize.INT8_MIXED, Quantize.FLOAT8_TRAINING)


PUBLISHED, INSTALLED, STORED = "published", "installed", "stored"  # values of `Environment.cudnn`
# Values of `Environment.cudnn` that files may give; a folder is excluded, as its library would be loaded.
CUDNN_OF_FILES = (INSTALLED, STORED, PUBLISHED)


class ModelSpec(Struct, frozen=True):
    """The module that a process builds, and the changes made to it before it runs."""

    name: str  # as given by the user: a catalogue name, SOURCE:NAME or FILE.py:NAME
    source: str = ""  # SOURCE:NAME or FILE.py:NAME of a catalogue name; empty if `name` has that form
    args: Arguments = ()  # arguments of the constructor
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    quantize: Quantize = Quantize.NONE
    quantize_arg: Arguments = ()  # arguments of transformers' BitsAndBytesConfig, or of torchao's counterpart
    prepare_kbit: bool = False  # peft's `prepare_model_for_kbit_training` is called
    peft: str = ""  # a method of peft that adapts the model, such as "lora"; empty if nothing adapts it
    peft_arg: Arguments = ()  # arguments of the peft method's configuration
    liger: bool = False  # Liger's kernels, as transformers' `use_liger_kernel` applies them
    freeze: tuple[str, ...] = ()  # patterns (fnmatch) of parameter names that are not trained
    train_only: tuple[str, ...] = ()  # patterns of the only trained parameters; empty to train all not frozen
    compile: Compile = Compile.NONE  # the model is called through torch.compile in this mode

    @property
    def origin(self) -> str:
        """Return SOURCE:NAME or FILE.py:NAME of the model, even if the user gave a catalogue name."""
        return self.source or self.name


class Samples(Struct, frozen=True):
    """The samples of a batch, and how samples of varying sizes are batched."""

    inputs: tuple[TensorSpec, ...] = ()
    target: TensorSpec | None = None
    targets: tuple[TensorSpec, ...] = ()  # the tensors of a target of several, for which `target` is None
    dataset_size: int = 0  # samples per epoch, whose last batch may be smaller; 0 if all batches are full
    lengths: Lengths | None = None  # lengths of real samples; None to infer them from the job (likeness.py)
    sizes: str = ""  # a file of samples' sizes; empty if sizes are uniform between smallest and largest
    batching: Batching = Batching.PADDED  # how samples of varying sizes are batched
    pad_to: int = 1  # sizes are padded to a multiple of this number
    run_steps: int = 1000  # optimizer steps of the run for which sizes are drawn
    seed: int = 1  # seed of the drawn sizes


class Loop(Struct, frozen=True):
    """The loop over batches: the loss, the optimizer and the order of their calls."""

    mode: Mode = Mode.TRAIN
    loss: Loss | str = Loss.CROSS_ENTROPY  # a named loss or FILE.py:NAME
    optimizer: Optimizer | str = Optimizer.SGD  # short name, torch.optim class, dotted name or FILE.py:NAME
    optimizer_impl: OptimizerImpl = OptimizerImpl.FOREACH
    optimizer_args: Arguments = ()
    zero_grad: ZeroGrad = ZeroGrad.BEFORE_FORWARD
    drop_output: bool = False  # the loop frees the model's output once it has the loss
    keep_grads: bool = False  # `zero_grad(set_to_none=False)`
    steps: int = 3
    precision: Precision = Precision.FP32
    grad_scaler: bool = False  # the loss is scaled; `merge_job` turns this on with `amp-fp16`
    backward_in_autocast: bool = False  # the backward pass runs inside the autocast region
    checkpoint: Checkpoint = Checkpoint.NONE
    offload: Offload = Offload.NONE
    accumulate: int = 1  # micro-batches, each of the batch size, per optimizer step
    clip_gradients: ClipGradients = ClipGradients.NONE
    ema: bool = False  # a moving average of parameters and buffers is kept on the device
    evaluate: bool = False  # a pass in eval mode without gradients between the steps
    eval_batch: int = 0  # batch size of the evaluation; 0 for the batch size of training
    eval_input: tuple[str, ...] = ()  # evaluation's inputs, as texts of `TensorSpec`; empty if as in training
    new_tokens: int = 0  # tokens that mode `GENERATE` adds to the prompt, which is `inputs`


class Sharding(Struct, frozen=True):
    """The distribution of a training run over ranks."""

    ddp: bool = False  # DistributedDataParallel's gradient buckets
    ddp_bucket_view: bool = False  # `gradient_as_bucket_view=True`
    fsdp: int = 0  # ranks over which FSDP2 (`fully_shard`) shards the model, block by block; 0 without FSDP2
    fsdp_arg: FsdpArguments = FsdpArguments()
    tp: int = 0  # ranks over which each layer's tensors are split, by the model's plan; 0 if not split
    world_size: int = 0  # ranks of a file with its own process group, or of DeepSpeed; 0 without both
    rank: int = 0  # the rank that is planned
    deepspeed: str = ""  # DeepSpeed's configuration as JSON; empty without DeepSpeed

    @property
    def ranks(self) -> int:
        """Return the number of ranks: `world_size` if set, else FSDP ranks times tensor parallel ranks."""
        return self.world_size or (self.fsdp or 1) * (self.tp or 1)


class Environment(Struct, frozen=True):
    """The versions and settings of the libraries that a process runs with."""

    torch: str = ""  # version of torch to plan for, such as "2.6"; empty for the newest known version
    cudnn_benchmark: bool = False  # `torch.backends.cudnn.benchmark`
    # A folder, "installed", "stored" or "published"; empty for "installed", or "stored" if cuDNN is missing.
    cudnn: str = ""
    cublas_workspace_config: str = ""  # value of CUBLAS_WORKSPACE_CONFIG; empty if it is not set


class Job(Struct, frozen=True):
    """A training or inference process, without the batch size.

    It consists of all settings that affect memory. `JOB_FIELDS` maps the names in options, YAML and JSON to
    the fields of the job's parts.
    """

    model: ModelSpec
    samples: Samples = Samples()
    loop: Loop = Loop()
    sharding: Sharding = Sharding()
    environment: Environment = Environment()

    @classmethod
    def create(cls, model: str, **values: Any) -> Self:
        """Return a job for a model, with other fields, named as in `JOB_FIELDS`, set to `values`."""
        return cls(ModelSpec(model)).replace(**values)

    def replace(self, **values: Any) -> Self:
        """Return a copy of the job with new values of fields, named as in `JOB_FIELDS`."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            field = JOB_FIELDS[name]
            changes.setdefault(field.part, {})[field.name] = value
        return replace(self, **{part: replace(getattr(self, part), **new) for part, new in changes.items()})

    def value(self, name: str) -> Any:
        """Return the value of a field, given by its name in `JOB_FIELDS`."""
        field = JOB_FIELDS[name]
        return getattr(getattr(self, field.part), field.name)

    def has_default(self, name: str) -> bool:
        """Return whether a field has its default value. `name` is the field's name in `JOB_FIELDS`."""
        return bool(self.value(name) == Job.create("").value(name))


class JobField(NamedTuple):
    """A field of a job's part: the names of the part and the field, and the field's type."""

    part: str  # name of the part, a field of `Job`
    name: str  # name of the field within the part
    annotation: Any  # type of the field


def _job_fields() -> Mapping[str, JobField]:
    renamed = {"name": "model", "args": "model_args"}
    parts = Job.__annotations__.items()
    fields = [JobField(part, *item) for part, kind in parts for item in kind.__annotations__.items()]
    return MappingProxyType({renamed.get(field.name, field.name): field for field in fields})


JOB_FIELDS = _job_fields()  # by the name in options, YAML and JSON


class CatalogueEntry(Struct, frozen=True):
    """A named job of models.yaml."""

    job: Job
    batch: int  # the batch size of its origin; the default of `estimate`
    about: str  # one sentence with the origin


class ModelName(NamedTuple):
    """A model's name, split into its source and the name within the source."""

    source: str  # one of `SOURCES`, "file", or "" for a catalogue name
    name: str  # the name within the source; FILE.py:NAME for a file


def is_cudnn_of_files(where: str) -> bool:
    """Return whether a data file may set `Environment.cudnn` to `where`, which must not be a folder."""
    return where in ("", *CUDNN_OF_FILES)
