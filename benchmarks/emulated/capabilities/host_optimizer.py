"""torchao's CPUOffloadOptimizer in a step of one's own: the script runs on the emulated side."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/host_optimizer.py"
_JOBS: tuple[tuple[int, str, Mapping[str, Any]], ...] = (
    (32, "RTX 3090", {}),
    (32, "RTX 3090", {"offload_gradients": True}),
    (64, "A100 80GB", {"autocast": True}),
    (32, "RTX 4090", {"dtype": "bfloat16"}),
    (16, "L4", {"width": 512, "layers": 8, "offload_gradients": True}),
    (32, "RTX 3090", {"minimal_size": 100000}),
    (32, "RTX 3060", {"kind": "SGD", "momentum": 0.9, "lr": 0.1}),
    (16, "H100", {"width": 1024, "layers": 4, "dtype": "bfloat16", "offload_gradients": True}),
    (32, "RTX 3090", {"clip": True}),
    (8, "T4", {"kind": "Adam", "fused": True, "width": 512}),
    (32, "RTX 3090", {"keeps": True, "autocast": True, "offload_gradients": True}),
)


def _cases() -> Iterator[Case]:
    for number, (batch, gpu, given) in enumerate(_JOBS, start=1):
        inputs = [f"128x{given.get('width', 256)}", "scalar:int64"]
        options = {"input": inputs, **({"model_arg": dict(given)} if given else {})}
        job = DrawnJob(number, f"{SCRIPT}:Training", batch, gpu, options)
        yield Case(job, (SCRIPT, json.dumps({"batch": batch, **given})), stop_after=1000)


CAPABILITY = Capability("torchao's CPUOffloadOptimizer in a step of one's own", tuple(_cases()))
