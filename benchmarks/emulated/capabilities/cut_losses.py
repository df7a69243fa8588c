"""Apple's cut cross entropy, run by Triton on the emulated side: the package cut-cross-entropy.

Its kernels launch nothing in a plan. The emulated side is the same script, which tells how many labels there
are. Both sides need cut-cross-entropy.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/cut_losses.py"
_JOBS: tuple[tuple[int, int, str, Mapping[str, Any]], ...] = (
    (4, 256, "RTX 3090", {}),
    (8, 512, "RTX 3090", {"vocab_size": 128000}),
    (8, 256, "A100 80GB", {"reduction": "sum"}),
    (8, 256, "RTX 3090", {"reduction": "none"}),
    (4, 512, "RTX 3090", {"shift": False}),
    (4, 256, "RTX 3090", {"softcap": 30.0}),
    (8, 256, "L4", {"frozen": True}),
    (8, 256, "RTX 3090", {"dtype": "float32", "autocast": True}),
    (8, 256, "RTX 3090", {"filter_eps": None, "vocab_size": 32000}),
    (8, 256, "H100", {"accumulate": 2, "vocab_size": 128000}),
    (4, 256, "RTX 4090", {"dtype": "float16"}),
    (16, 128, "RTX 3060", {"vocab_size": 16000, "layers": 6}),
)


def _cases() -> Iterator[Case]:
    for number, (batch, tokens, gpu, given) in enumerate(_JOBS, start=1):
        options = {"input": f"{tokens}:int64", **({"model_arg": dict(given)} if given else {})}
        job = DrawnJob(number, f"{SCRIPT}:Training", batch, gpu, options)
        command = (SCRIPT, json.dumps({"batch": batch, "tokens": tokens, **given}))
        yield Case(job, command, stop_after=1000)  # it ends by itself


CAPABILITY = Capability("Apple's cut cross entropy", tuple(_cases()))
