"""Scripts that train in DistributedDataParallel, with its options, planned by the name of their step."""

from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_FILE = "benchmarks/emulated/capabilities/parallel_files/ddp_vision.py"


class _Run(NamedTuple):
    """One run; `arguments` are of the class and of the command line."""

    arguments: dict[str, Any] = {}
    ranks: int = 2
    batch: int = 32
    gpu: str = "A100 40GB"


def _case(number: int, run: _Run) -> Case:
    options = {
        **({"model_arg": run.arguments} if run.arguments else {}),
        "input": ["3x128x128", "scalar:int64"],
        "world_size": run.ranks,
    }
    drawn = DrawnJob(number, f"{_FILE}:Trainer", run.batch, run.gpu, options)
    words: list[str] = []
    for key, value in run.arguments.items():
        option = f"--{key.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks), _FILE)
    return Case(drawn, (*launch, "--batch-size", str(run.batch), *words), stop_after=1000, ranks=run.ranks)


_RUNS = (
    _Run(),
    _Run({"static_graph": True, "arch": "resnet50"}),
    _Run({"find_unused": True}, gpu="RTX 3090"),
    _Run({"bucket_view": True, "accumulate": 2}, 4),
    _Run({"accumulate": 2, "amp": True}),
    _Run({"bucket_cap_mb": 5, "arch": "convnext_tiny"}, 4),
    _Run({"amp": True, "arch": "resnet50"}, gpu="H100 80GB"),
    _Run({"no_buffers": True, "bucket_view": True, "static_graph": True}, gpu="RTX 4090"),
    _Run({"bucket_view": True, "amp": True, "bucket_cap_mb": 10}, 4),
    _Run({"find_unused": True, "accumulate": 3, "bucket_cap_mb": 1}),
)
CAPABILITY = Capability(
    "scripts with DistributedDataParallel: its options and no_sync, under torchrun; the "
    "first rank is compared",
    tuple(_case(number, run) for number, run in enumerate(_RUNS, 1)),
)
