"""Pipelines whose ranks each run their stages by one of torch's schedules, planned rank by rank."""

from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_FILE = "benchmarks/emulated/capabilities/parallel_files/pipeline.py"


class _Run(NamedTuple):
    """One rank of a run; `arguments` are of the class and of the command line."""

    arguments: dict[str, Any]
    rank: int
    ranks: int = 2
    batch: int = 8
    gpu: str = "A100 40GB"


def _case(number: int, run: _Run) -> Case:
    tokens = ["512:int64", "512:int64"]
    options = {"model_arg": run.arguments, "input": tokens, "world_size": run.ranks, "rank": run.rank}
    drawn = DrawnJob(number, f"{_FILE}:Trainer", run.batch, run.gpu, options)
    words = [
        word for key, value in run.arguments.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks), _FILE)
    command = (*launch, "--batch-size", str(run.batch), *words)
    return Case(drawn, command, stop_after=1000, ranks=run.ranks, rank=run.rank)


def _all_ranks(arguments: dict[str, Any], **others: Any) -> list[_Run]:
    return [_Run(arguments, rank, **others) for rank in range(others.get("ranks", 2))]


_RUNS = (
    *_all_ranks({"schedule": "GPipe"}),
    *_all_ranks({"schedule": "1F1B"}),
    *_all_ranks({"schedule": "Interleaved1F1B"}),
    *_all_ranks({"schedule": "ZBV"}),
    *_all_ranks({"schedule": "1F1B", "microbatches": 8}, ranks=4, batch=16),
    *_all_ranks({"schedule": "1F1B", "dp": 2}, ranks=4, batch=16, gpu="RTX 3090"),
)
CAPABILITY = Capability(
    "pipelines of `torch.distributed.pipelining` in files, under torchrun; each rank is compared; runs of "
    "row 8 (zero bubble, the second rank) differ by 0.9% allocated and 4.4% reserved, as NCCL's thread frees "
    "what was sent",
    tuple(_case(number, run) for number, run in enumerate(_RUNS, 1)),
)
