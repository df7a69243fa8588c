"""The arguments that `--fsdp-arg` gives to `fully_shard`, its policies and accelerate's plugin."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from planner._support.conversion import ConversionError, convert
from planner.errors import UsageError

OF_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
OF_PLUGIN = (
    "auto_wrap_policy",
    "transformer_cls_names_to_wrap",
    "min_num_params",
    "activation_checkpointing",
)
FsdpType = Literal["bf16", "fp16", "fp32"]


class FsdpArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a job's sharding by FSDP2, as `--fsdp-arg` gives them.

    None means the default of torch, of accelerate or of the planner.
    """

    reshard_after_forward: bool | int | None = None
    replicas: Annotated[int, Meta(ge=1)] = 1  # groups of ranks, each of which holds all shards
    # Gradients are reduced after each micro-batch, or only after the last micro-batch of a step.
    gradient_sync: Literal["each", "last"] = "each"
    # The library whose rules choose the sharded modules; None to shard the repeated blocks.
    by: Literal["accelerate", "torchtitan"] | None = None
    offload: bool = False  # parameters, gradients and the optimizer's state are on the CPU
    param_dtype: FsdpType | None = None
    reduce_dtype: FsdpType | None = None
    output_dtype: FsdpType | None = None
    cast_forward_inputs: bool | None = None
    auto_wrap_policy: str | None = None  # this and all fields below are for accelerate's plugin
    transformer_cls_names_to_wrap: str | tuple[str, ...] | None = None
    min_num_params: int | None = None
    activation_checkpointing: bool | None = None

    def non_default(self, *names: str) -> dict[str, Any]:
        """Return the arguments, only of `names` if given, that differ from their defaults."""
        default = FsdpArguments()
        return {
            name: value
            for name, value in asdict(self).items()
            if value != getattr(default, name) and (not names or name in names)
        }


def parse_fsdp(arguments: Iterable[tuple[str, Any]]) -> FsdpArguments:
    """Parse the arguments of `--fsdp-arg`. Raises UsageError if a name or value is not planned."""
    try:
        parsed = convert(dict(arguments), FsdpArguments)
    except ConversionError as error:
        raise UsageError(f"--fsdp-arg {error}") from None
    of_plugin = parsed.non_default(*OF_PLUGIN)
    if of_plugin and parsed.by != "accelerate":
        raise UsageError(f"--fsdp-arg {next(iter(of_plugin))}: has an effect only with by=accelerate")
    if parsed.offload and parsed.by is not None:
        raise UsageError("--fsdp-arg offload=true: is planned only without by=")
    return parsed
