"""Scripts that train in DistributedDataParallel, with its options, planned by the name of their step."""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.capabilities.commands import FOLDER, case_of
from benchmarks.emulated.jobs import DrawnJob

# Arguments of the class and of the command line, ranks, GPU.
_RUNS: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({}, 2, "A100 40GB"),
    ({"static_graph": True, "arch": "resnet50"}, 2, "A100 40GB"),
    ({"find_unused": True}, 2, "RTX 3090"),
    ({"bucket_view": True, "accumulate": 2}, 4, "A100 40GB"),
    ({"accumulate": 2, "amp": True}, 2, "A100 40GB"),
    ({"bucket_cap_mb": 5, "arch": "convnext_tiny"}, 4, "A100 40GB"),
    ({"amp": True, "arch": "resnet50"}, 2, "H100 80GB"),
    ({"no_buffers": True, "bucket_view": True, "static_graph": True}, 2, "RTX 4090"),
    ({"bucket_view": True, "amp": True, "bucket_cap_mb": 10}, 4, "A100 40GB"),
    ({"find_unused": True, "accumulate": 3, "bucket_cap_mb": 1}, 2, "A100 40GB"),
)


def _cases() -> Iterator[Case]:
    for number, (arguments, ranks, gpu) in enumerate(_RUNS, 1):
        given = {"model_arg": arguments} if arguments else {}
        options = {**given, "input": ["3x128x128", "scalar:int64"], "world_size": ranks}
        yield case_of(DrawnJob(number, f"{FOLDER}/parallel_files/ddp_vision.py:Trainer", 32, gpu, options))


CAPABILITY = Capability(
    "scripts with DistributedDataParallel: its options and no_sync, under torchrun; the "
    "first rank is compared",
    tuple(_cases()),
)
