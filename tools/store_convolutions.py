"""Write the stored answers of a cuDNN, `planner/hardware/cudnn/answers.bin`, for machines that have none.

    python tools/store_convolutions.py CUDNN_FOLDER [--jobs classifiers volumes own sized]
        [--capability 8.6 ...] [--from FILE] [--to FILE]

The convolutions are those of a file of answers, and those of more jobs: torchvision's classifiers, trained
in float32 and float16 autocast, contiguous and channels_last; three-dimensional networks, networks as people
write them, and common models at other sizes, contiguous (`stored_jobs.py`). If the file holds answers of the
same version, only what it lacks is asked, so that a run that was interrupted goes on; those of another
version are asked anew, which takes hours.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from math import prod
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec.structs import asdict
from stored_jobs import classifier_jobs, own_jobs, sized_jobs, volume_jobs

from planner._support.versions import format_cudnn_version
from planner.api.request.request import make_job
from planner.capture import record
from planner.emulator.compiled import SOME_MIB, cublaslt_for
from planner.emulator.gpu import describe_gpu
from planner.errors import PlannerError
from planner.hardware import generic_device
from planner.hardware.cudnn import describe_for_cudnn
from planner.hardware.cudnn.answers_file import (
    ANSWERS_FILE,
    AnswersFile,
    CurveByKey,
    Kind,
    StoredGpus,
    open_answers,
    write_answers,
)
from planner.hardware.cudnn.curves import Curve, fit_curve
from planner.hardware.cudnn.keys import convolution_of, key_of
from planner.hardware.cudnn.worker import Library, engines
from planner.program import Capability, Convolution, Target, WorkspaceAccount, Workspaces

# Options that make the convolutions of a job those of a kind; some models change the layout themselves.
RECIPES: dict[Kind, dict[str, Any]] = {
    Kind("float32", False): {},
    Kind("float16", False): {"precision": "amp-fp16"},
    Kind("float16", True): {"precision": "amp-fp16", "memory_format": "channels_last"},
    Kind("float32", True): {"memory_format": "channels_last"},
}
JOBS = {
    "classifiers": (classifier_jobs, tuple(RECIPES)),
    "volumes": (volume_jobs, tuple(RECIPES)[:2]),
    "own": (own_jobs, tuple(RECIPES)[:2]),
    "sized": (sized_jobs, tuple(RECIPES)[:2]),
}
CAPABILITIES: tuple[Capability, ...] = ((8, 6), (8, 0), (8, 9), (9, 0), (7, 5), (12, 0))
SM_COUNTS = {(7, 5): (40, 68)}  # of a T4 and an RTX 2080 Ti: there alone answers depend on it
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MOST_VOLUMES = 256  # of a batch
MOST_ELEMENTS = 2**35  # of the larger operand
PROCESSES = 2
CONVOLUTIONS_OF_PROCESS = 500  # cuDNN keeps memory of each query until its process ends


class Collector:
    """Collects the convolutions of a run, by what decides their answers but the batch size."""

    name = "collector"

    def __init__(self) -> None:
        self.keys: dict[Kind, set[str]] = {}

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Note a convolution."""
        kind = Kind(convolution.dtype, convolution.channels_last)
        self.keys.setdefault(kind, set()).add(key_of(convolution))
        return Workspaces(0)

    def account(self, capability: Capability, sm_count: int) -> WorkspaceAccount:
        """Return none."""
        return WorkspaceAccount()


def collect(names: Iterable[str]) -> dict[Kind, set[str]]:
    """Return the keys of all jobs' convolutions, by kind."""
    collector = Collector()
    for name in names:
        jobs, kinds = JOBS[name]
        for model, own in jobs():
            for kind in kinds:
                try:
                    job, _, _ = make_job(model, {**own, **RECIPES[kind], "steps": 1})  # type: ignore[typeddict-item]
                    record(job, 2, (8, 0), conv_workspace_query=collector)
                except PlannerError as error:
                    print(f"{model}: {error}", flush=True)
                    break
    return collector.keys


def batches_of(key: str) -> list[int]:
    """Return the batch sizes to ask for: all whose tensors a GPU may hold."""
    one = convolution_of(key, "float32", channels_last=False, batch=1)
    elements = max(prod(one.x), prod(one.y))
    most = MOST_VOLUMES if len(one.x) == 5 else BATCHES[-1]
    return [batch for batch in BATCHES if batch <= 2 or (batch <= most and batch * elements <= MOST_ELEMENTS)]


def load_library(folder: Path) -> Library:
    """Load cuDNN into this process, with the stand-ins of cuBLASLt and the driver."""
    stand_in = cublaslt_for(folder)
    if isinstance(stand_in, str):
        raise SystemExit(f"{folder}: cuDNN's engines on cuBLASLt would be left out: {stand_in}")
    os.environ["PLANNER_EMULATED_GPU"] = describe_gpu(generic_device(SOME_MIB))
    return Library(folder, str(stand_in))


def version_of(folder: Path) -> str:
    """Return the version of the library in a folder."""
    return str(format_cudnn_version(load_library(folder).version))


def ask(folder: Path, kind: Kind, gpus: StoredGpus, keys: Sequence[str]) -> dict[str, Curve]:
    """Return the answers of the library in a folder for such GPUs."""
    library = load_library(folder)
    sm_count = gpus.sm_count or Target.for_capability(gpus.capability).sm_count
    device = describe_for_cudnn(gpus.capability, sm_count)

    def workspace_bytes(key: str, batch: int) -> int:
        one = convolution_of(key, *kind, batch=batch)
        query = {**asdict(one), "every": False, "device": device}
        return next((size for _, _, size in engines(library, query)), 0)

    return {key: fit_curve(partial(workspace_bytes, key), batches_of(key)) for key in keys}


def gpus_of(capabilities: Iterable[Capability]) -> Iterator[StoredGpus]:
    """Yield the GPUs to ask for."""
    for capability in capabilities:
        yield from (StoredGpus(capability, count) for count in SM_COUNTS.get(capability, (None,)))


def main() -> int:
    """Ask for what is missing, and write it."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("cudnn", type=Path)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[])
    parser.add_argument("--capability", action="append")
    parser.add_argument("--from", type=Path, default=ANSWERS_FILE, dest="source")
    parser.add_argument("--to", type=Path, default=ANSWERS_FILE)
    options = parser.parse_args()
    named = [tuple(map(int, text.split("."))) for text in options.capability or ()]
    stored = open_answers(options.source) if options.source.is_file() else None
    keys = collect(options.jobs)
    for kind in () if stored is None else stored.kinds:
        keys.setdefault(kind, set()).update(stored.keys(kind))
    add_missing(options.cudnn.expanduser(), options.to, keys, stored, tuple(gpus_of(named or CAPABILITIES)))
    return 0


def add_missing(
    folder: Path,
    path: Path,
    keys: Mapping[Kind, set[str]],
    stored: AnswersFile | None,
    gpus_to_ask: Sequence[StoredGpus],
) -> None:
    """Ask the library in a folder for what is not stored, and write the file anew after each GPU."""
    start_processes = partial(ProcessPoolExecutor, PROCESSES, get_context("spawn"), max_tasks_per_child=1)
    with start_processes() as pool:
        version = pool.submit(version_of, folder).result()
    tables: dict[Kind, dict[StoredGpus, CurveByKey]] = {}
    if stored is not None and stored.cudnn == version:
        tables = {kind: dict(by_gpus) for kind, by_gpus in stored.tables().items()}
    for (kind, of_kind), gpus in product(sorted(keys.items()), gpus_to_ask):
        known = dict(tables.setdefault(kind, {}).get(gpus, {}))
        missing = sorted(of_kind - known.keys())
        if not missing:
            continue
        start = perf_counter()
        size = CONVOLUTIONS_OF_PROCESS
        parts = [missing[place : place + size] for place in range(0, len(missing), size)]
        with start_processes() as pool:
            for answers in pool.map(partial(ask, folder, kind, gpus), parts):
                known.update(answers)
        tables[kind][gpus] = known
        write_answers(path, version, tables)
        seconds, size = perf_counter() - start, path.stat().st_size
        print(f"{kind}, {gpus}: {len(missing)} more, {size} bytes in all, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
