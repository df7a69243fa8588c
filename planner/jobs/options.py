"""The table of a job's options.

Each option is declared once, with its field of a `Job` and its keyword in Python. The options of the command
line, the keys of YAML files, the JSON of `job`, shell completion, and the options that each `--method`
supports follow from this table.
"""

from collections.abc import Callable, Mapping
from enum import Enum, EnumMeta, StrEnum, auto
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from planner.errors import UsageError
from planner.jobs.files.deepspeed import read_deepspeed
from planner.jobs.fsdp import FsdpArguments, parse_fsdp
from planner.jobs.job import JOB_FIELDS, Arguments, Job
from planner.jobs.optimizer_names import LIBRARY_OPTIMIZERS, TORCH_OPTIMIZERS, parse_optimizer
from planner.jobs.parse import (
    argument_texts,
    check_count,
    check_size_of_one,
    choose,
    parse_arguments,
    parse_loss,
    parse_peft_method,
    shown,
)
from planner.program import parse_torch_option, parse_workspace_config


class OptionKind(Enum):
    """The types of an option's value in Python and JSON."""

    FLAG = auto()
    COUNT = auto()  # a whole number, usually at least 1
    CHOICE = auto()
    TEXT = auto()
    PATTERNS = auto()  # several texts: patterns of parameter names, or tensors
    TENSORS = auto()
    ARGUMENTS = auto()  # keywords with values: of a constructor, a configuration or `fully_shard`


class JobOption(NamedTuple):
    """The declaration of one option of a job: its name, type, help text and limits.

    `name` is its key everywhere, with dashes on the command line.
    """

    name: str
    kind: OptionKind
    help: str
    metavar: str | None = None  # placeholder of the value on the command line; None for a flag
    choices: type[StrEnum] | None = None  # the allowed values, which shells complete; None if not an enum
    maximum: int = 0  # largest value of a count
    minimum: int = 1  # smallest value of a count
    parse: Callable[[Any], Any] | None = None  # parser of a text, or of arguments
    is_negatable: bool = False  # --no-NAME turns off a flag that another option turns on
    changes_trace: bool = True
    is_for_training: bool = False  # without effect in eval mode
    methods: tuple[str, ...] = ()  # methods that support it besides `trace`
    more_words: tuple[str, ...] = ()  # words that shells complete besides the choices

    @property
    def flag(self) -> str:
        """Return the option's name on the command line."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any, where: str = "") -> Any:
        """Check and parse a user's value, and return the value that `Job` stores.

        Raises UsageError for an invalid value; `where`, by default the flag, names the option in errors.
        """
        where = where or self.flag
        if self.kind is OptionKind.COUNT:
            return check_count(where, value, self.maximum, self.minimum)
        if self.kind is OptionKind.PATTERNS:
            patterns = [value] if isinstance(value, str) else value
            texts = tuple(_checked(where, pattern, str) for pattern in patterns)
            return texts if self.parse is None else tuple(map(self.parse, texts))
        if self.kind is OptionKind.ARGUMENTS:
            arguments = parse_arguments(value, where)
            return arguments if self.parse is None else self.parse(arguments)
        checked = _checked(where, value, bool if self.kind is OptionKind.FLAG else str)
        if self.parse is not None:
            return self.parse(checked)
        return checked if self.choices is None else choose(self.choices, checked, where)

    def write(self, value: Any) -> Any:
        """Convert a value of `Job` to the form that users give. `read` is the inverse."""
        return argument_texts(value) if self.kind is OptionKind.ARGUMENTS else value


def _checked(where: str, value: object, kind: type[bool] | type[str]) -> Any:
    if not isinstance(value, kind):
        expected = "true or false" if kind is bool else "a string"
        raise UsageError(f"{where}: expected {expected}, got {shown(str(value))}")
    return value


def _parse_cublas_config(text: str) -> str:
    if text:
        parse_workspace_config(text)
    return text


_KINDS = {
    bool: OptionKind.FLAG,
    int: OptionKind.COUNT,
    tuple[str, ...]: OptionKind.PATTERNS,
    **dict.fromkeys((Arguments, FsdpArguments), OptionKind.ARGUMENTS),
}
_STATIC = ("formula", "torchinfo", "torchsummary", "modelsize", "memtracker")  # all methods but `trace`
_RECIPE = ("formula", "memtracker")
_LOOP = ("memtracker",)


def _option(name: str, help: str, metavar: str | None = None, **more: Any) -> JobOption:
    """Return a `JobOption` for a job's field, whose annotation decides the kind and the choices."""
    hint = JOB_FIELDS[name].annotation
    choices: Any = next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, EnumMeta)), None)
    kind = _KINDS.get(hint, OptionKind.TEXT if "parse" in more else OptionKind.CHOICE)
    number = "N" if kind is OptionKind.COUNT else None
    return JobOption(name, kind, help, metavar or number, choices, **more)


def _parse_sizes(text: str) -> str:
    return "" if text == "uniform" else text


_training = partial(_option, is_for_training=True)
_varying = partial(_option, changes_trace=False)  # for inputs whose samples vary in size


JOB_OPTIONS: tuple[JobOption, ...] = (
    JobOption(
        "model_arg",
        OptionKind.ARGUMENTS,
        "An argument of the model's constructor; repeatable.",
        "KEY=VALUE",
        methods=_STATIC,
    ),
    JobOption(
        "input",
        OptionKind.TENSORS,
        "One sample of an input, without the batch dimension: 3x224x224, ids=128:int64, "
        "batch.image=3x224x224 for an entry of a dict; 16..512:int64 for samples of many sizes; repeatable.",
        "SHAPE[:DTYPE]",
        methods=_STATIC,
    ),
    JobOption(
        "target",
        OptionKind.TENSORS,
        "One sample of the target, such as 10 or scalar:int64; with names and --loss FILE.py:NAME "
        "repeatable.",
        "SHAPE[:DTYPE]",
        methods=_LOOP,
    ),
    _option(
        "loss",
        "cross_entropy, mse, bce_with_logits, sum, output: the model's own, training_step: that of a "
        "LightningModule, or FILE.py:NAME.",
        "NAME",
        parse=parse_loss,
        methods=_LOOP,
    ),
    _option(
        "mode",
        "train, infer, generate, forward: train without a backward pass, or step: FILE.py's own step.",
        "MODE",
        methods=_RECIPE,
    ),
    _option(
        "optimizer",
        "sgd, momentum, nesterov, adam, adamw, rmsprop, adagrad, adafactor, any class of torch.optim, an "
        "importable one such as bitsandbytes.optim.AdamW8bit, or FILE.py:NAME.",
        "NAME",
        parse=parse_optimizer,
        more_words=(*TORCH_OPTIMIZERS, *LIBRARY_OPTIMIZERS),
        methods=_RECIPE,
    ),
    _option("optimizer_impl", "foreach (the default, as on CUDA), for-loop or fused.", "NAME", methods=_LOOP),
    _option(
        "zero_grad", "before-forward (the default), before-backward or after-step.", "WHEN", methods=_LOOP
    ),
    _training("drop_output", "Free the model's output once the loss is known, as a Trainer does."),
    _option("keep_grads", "Plan for zero_grad(set_to_none=False): gradients stay allocated.", methods=_LOOP),
    _option("steps", "Number of traced steps; 3 by default.", maximum=100, methods=_LOOP),
    _option("precision", "fp32 (the default), amp-fp16, amp-bf16, or pure fp16 or bf16.", "NAME"),
    _training("grad_scaler", "Scale the loss; by default with amp-fp16 only.", is_negatable=True),
    _option("backward_in_autocast", "Run the backward pass inside the autocast region too."),
    _option("memory_format", "contiguous (the default) or channels_last.", "NAME"),
    _training(
        "checkpoint", "none (the default), or blocks: recompute repeated blocks in the backward pass.", "WHAT"
    ),
    _training(
        "offload",
        "none (the default), or activations: keep what autograd saves in pinned memory of the CPU, as "
        "torch's save_on_cpu does.",
        "WHAT",
    ),
    _training("accumulate", "Micro-batches per optimizer step, each of the batch size.", maximum=2**20),
    _training("clip_gradients", "none (the default), norm or value.", "HOW"),
    _training("ema", "Keep a moving average of the weights on the GPU."),
    _training("evaluate", "Evaluate without gradients between the steps, with the same batch size."),
    _training("eval_batch", "Batch size of the evaluation; implies --evaluate.", maximum=2**24),
    _training(
        "eval_input",
        "One sample of an input of the evaluation, if unlike --input; implies --evaluate; repeatable.",
        "SHAPE[:DTYPE]",
        parse=check_size_of_one,
    ),
    _training(
        "dataset_size",
        "Samples per epoch; the last batch may be smaller.",
        maximum=2**50,
        changes_trace=False,
    ),
    _option(
        "lengths",
        "Sizes of real samples: fixed, or varying: padded to the longest of their batch. Decides margins "
        "alone; by default varying for token ids.",
        "WHICH",
        changes_trace=False,
    ),
    _varying(
        "sizes",
        "With --input 16..512:int64: uniform (the default), or a file of the sizes of samples, one or more "
        "in a line, a count behind them where it has one.",
        "FILE",
        parse=_parse_sizes,
    ),
    _varying(
        "batching",
        "With such inputs: padded to the largest of the batch (the default), grouped by size, tokens (the "
        "batch size counts padded tokens), packed, or scaled: one size for each batch.",
        "HOW",
    ),
    _varying("pad_to", "With such inputs: pad to a multiple of N.", maximum=2**20),
    _varying(
        "run_steps",
        "With such inputs: steps of the run whose probability to run out of memory is asked for; 1000 by "
        "default.",
        maximum=2**40,
    ),
    _varying("seed", "With such inputs: seed of the sizes that are drawn; 1 by default.", maximum=2**50),
    _training("ddp", "Train with DistributedDataParallel's gradient buckets."),
    _training("ddp_bucket_view", "DDP with gradient_as_bucket_view=True; implies --ddp."),
    _option("freeze", "Parameters that are not trained, such as 'backbone.*'; repeatable.", "PATTERN"),
    _option("train_only", "Train only these parameters, such as '*lora*'; repeatable.", "PATTERN"),
    _option("new_tokens", "Tokens that --mode generate adds to the prompt, which is --input.", maximum=2**20),
    _option("cudnn_benchmark", "Plan for torch.backends.cudnn.benchmark = True.", changes_trace=False),
    _option(
        "cudnn",
        "Source of convolution workspaces: installed (the installed cuDNN, 9.8 or newer; the default where "
        "there is one), the folder of a libcudnn.so.9, stored (answers that come with the planner; the "
        "default elsewhere), or published (runs with versions before 9.8). None needs a GPU.",
        "WHICH",
        parse=str,
        changes_trace=False,
    ),
    _option(
        "cublas_workspace_config",
        "Value of CUBLAS_WORKSPACE_CONFIG, such as :4096:8, :16:8 or :0:0.",
        "TEXT",
        parse=_parse_cublas_config,
    ),
    _option(
        "torch",
        "Version of PyTorch that the answer stands for, from 2.4 on, such as 2.6; by default the newest.",
        "VERSION",
        parse=parse_torch_option,
    ),
    _option(
        "peft",
        "Adapt the model with a method of peft and freeze the rest: lora, dora, rslora, ia3, oft, vera, "
        "prefix_tuning and all others that it has.",
        "METHOD",
        parse=parse_peft_method,
    ),
    _option(
        "peft_arg",
        "A value of the method's configuration, such as r=16 or target_modules=[q_proj, v_proj]; repeatable.",
        "KEY=VALUE",
    ),
    _option(
        "quantize",
        "Hold the weights of linear layers as bitsandbytes (nf4, fp4, int8) or torchao does "
        "(int8-weight-only, int4-weight-only, int8-training, int8-mixed, float8-training); default none.",
        "TYPE",
    ),
    _option(
        "quantize_arg",
        "A value of transformers' BitsAndBytesConfig, such as bnb_4bit_use_double_quant=true, or of "
        "torchao's configuration, such as group_size=64; repeatable.",
        "KEY=VALUE",
    ),
    _training(
        "prepare_kbit",
        "Cast what is not quantized to float32, as peft's prepare_model_for_kbit_training does.",
    ),
    _option("liger", "Apply Liger's kernels, as transformers' use_liger_kernel does."),
    JobOption(
        "optimizer_arg",
        OptionKind.ARGUMENTS,
        "A keyword of the optimizer, such as amsgrad=true; repeatable.",
        "KEY=VALUE",
        is_for_training=True,
        methods=_LOOP,
    ),
    _option(
        "compile",
        "Call the model through torch.compile: none, default, which is the mode of --compile alone, or "
        "reduce-overhead.",
        "MODE",
    ),
    _training(
        "fsdp",
        "Ranks over which FSDP2 (fully_shard) shards the model, block by block; the batch size is a rank's.",
        "RANKS",
        maximum=2**16,
    ),
    _training(
        "fsdp_arg",
        "An argument of fully_shard or its MixedPrecisionPolicy, such as param_dtype=bf16, "
        "reshard_after_forward=false or replicas=2; repeatable.",
        "KEY=VALUE",
        parse=parse_fsdp,
    ),
    _training(
        "tp",
        "Ranks over which the tensors of each layer are split, by the model's plan in transformers; "
        "with --fsdp each of its ranks is a group of so many.",
        "RANKS",
        maximum=2**10,
    ),
    _option(
        "world_size",
        "Ranks of a FILE.py that sets up its process group and shards by itself, or of DeepSpeed.",
        "RANKS",
        maximum=2**16,
    ),
    _option(
        "rank",
        "The rank that is planned; by default the one that takes most.",
        "RANK",
        maximum=2**16,
        minimum=0,
    ),
    _training(
        "deepspeed",
        "Train with DeepSpeed's ZeRO, by its JSON; the batch size is a rank's. Needs --world-size.",
        "FILE.json",
        parse=read_deepspeed,
    ),
)
_STRUCTURED = ("input", "target", "model_arg", "optimizer_arg")
# Options named as in `JOB_FIELDS`; all others are tensors, and arguments of the model and the optimizer.
FIELD_OPTIONS: Mapping[str, JobOption] = MappingProxyType(
    {option.name: option for option in JOB_OPTIONS if option.name not in _STRUCTURED}
)


def reset_options(job: Job, *, where: Callable[[JobOption], bool]) -> Job:
    """Return the job with defaults for the options in `FIELD_OPTIONS` for which `where` is true."""
    return copy_options(Job.create(""), job, where=where)


def copy_options(source: Job, job: Job, *, where: Callable[[JobOption], bool]) -> Job:
    """Return `job` with each option in `FIELD_OPTIONS` for which `where` is true taken from `source`."""
    names = [name for name, option in FIELD_OPTIONS.items() if where(option)]
    return job.replace(**{name: source.value(name) for name in names})
