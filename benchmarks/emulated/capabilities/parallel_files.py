"""Scripts that set up their own process group and shard their model, planned by the name of their step, or by
that of the function that makes a Trainer.
"""

from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

FILES = "benchmarks/emulated/capabilities/parallel_files"
_TOKENS = ("512:int64", "512:int64")


class _Script(NamedTuple):
    """One script, as both sides need it; `arguments` are of its class and of its command line."""

    name: str
    arguments: dict[str, Any] = {}
    ranks: int = 2
    batch: int = 8
    gpu: str = "A100 40GB"
    inputs: tuple[str, ...] = _TOKENS


def _case(number: int, script: _Script) -> Case:
    given = {"model_arg": script.arguments} if script.arguments else {}
    options = {
        **given,
        **({"input": list(script.inputs)} if script.inputs else {}),
        "world_size": script.ranks,
        **({"compile": "default"} if script.arguments.get("compiled") else {}),
    }
    drawn = DrawnJob(number, f"{FILES}/{script.name}", script.batch, script.gpu, options)
    words = [f"--{key.replace('_', '-')}" for key in script.arguments]
    texts = [word for pair in zip(words, script.arguments.values(), strict=True) for word in _words(*pair)]
    file = f"{FILES}/{script.name.partition(':')[0]}"
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(script.ranks), file)
    return Case(
        drawn, (*launch, "--batch-size", str(script.batch), *texts), stop_after=1000, ranks=script.ranks
    )


def _words(option: str, value: Any) -> tuple[str, ...]:
    return (option,) if value is True else (option, str(value))


_TITAN = "titan_like.py:Trainer"
_TRAINER = "fsdp_trainer.py:make_trainer"
_HOPPER = "H100 80GB"
_FSDP: dict[str, Any] = {"tp": 1, "dp": 2, "mixed": True}
_BOTH: dict[str, Any] = {"tp": 2, "dp": 2, "mixed": True}
_CASES = (
    _Script(_TITAN, {"tp": 2}),
    _Script(_TITAN, {"tp": 2, "gather_logits": True}, gpu="RTX 3090"),
    _Script(_TITAN, {"tp": 4}, 4),
    _Script(_TITAN, {"tp": 2, "dp": 2}, 4),
    _Script(_TITAN, {"tp": 2, "dp": 2, "mixed": True, "checkpoint": True}, 4, 16, "H100 80GB"),
    _Script(_TITAN, {"tp": 2, "checkpoint": True}, 2, 16, "RTX 4090"),
    _Script(_TRAINER, inputs=()),
    _Script(_TRAINER, {"precision": "no", "keep": True}, 4, gpu="H100 80GB", inputs=()),
    _Script(_TRAINER, {"accumulate": 2}, gpu="RTX 3090", inputs=()),
    _Script(_TRAINER, {"checkpoint": True}, 2, 16, inputs=()),
    _Script(_TITAN, {**_FSDP, "float8": "linear"}, gpu=_HOPPER),
    _Script(_TITAN, {**_FSDP, "float8": "gathered"}, gpu=_HOPPER),
    _Script(_TITAN, {**_FSDP, "dp": 4, "float8": "gathered", "checkpoint": True}, 4, gpu=_HOPPER),
    _Script(_TITAN, {**_FSDP, "compiled": True}, gpu=_HOPPER),
    _Script(_TITAN, {**_FSDP, "float8": "gathered", "compiled": True}, gpu=_HOPPER),
    _Script(_TITAN, {**_BOTH, "float8": "linear"}, 4, gpu=_HOPPER),
    _Script(_TITAN, {**_BOTH, "compiled": True}, 4, gpu=_HOPPER),
    _Script(_TITAN, {**_BOTH, "float8": "gathered", "compiled": True, "checkpoint": True}, 4, gpu=_HOPPER),
)
CAPABILITY = Capability(
    "scripts that shard their model by themselves, with tensor, sequence and loss parallel, torchao's float8 "
    "training and compiled blocks, or by a Trainer of transformers with FSDP2, under torchrun; the first "
    "rank is compared",
    tuple(_case(number, script) for number, script in enumerate(_CASES, 1)),
    {18: "two emulated runs reserved 830,472,192 bytes, which are planned, and 912,261,120"},
)
