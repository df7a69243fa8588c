"""Write the stored answers of a cuDNN: `planner/hardware/cudnn/stored`, for machines that have none.

    python tools/store_convolutions.py CUDNN_FOLDER [--models FILE] [--kind float32-contiguous ...]
        [--capability 8.6 ...] [--to FOLDER]

The convolutions are those of torchvision's classifiers (or of the models that FILE names, a line each),
trained in float32 and float16 autocast, contiguous and channels_last. Files that are there gain what they
lack, so that a run that was interrupted goes on; without them everything is asked anew, which takes hours.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import msgspec
from msgspec.structs import asdict

from planner._support.atomic_write import save
from planner._support.gzip_text import pack
from planner._support.versions import format_cudnn_version
from planner.api.request import make_job
from planner.capture import record
from planner.emulator.compiled import SOME_MIB, cublaslt_for
from planner.emulator.gpu import describe_gpu
from planner.errors import PlannerError
from planner.hardware import generic_device
from planner.hardware.cudnn import describe_for_cudnn
from planner.hardware.cudnn.stored import (
    FOLDER,
    Curve,
    StoredFile,
    StoredGpus,
    file_name,
    fit_curve,
    key_of,
    read_stored,
)
from planner.hardware.cudnn.worker import Library, engines
from planner.program import Capability, Convolution, ConvWorkspaceSource, Target, Workspaces

RECIPES = {  # type of convolutions and whether they are in channels_last -> recipe that has them
    ("float32", False): {},
    ("float16", False): {"precision": "amp-fp16"},
    ("float16", True): {"precision": "amp-fp16", "memory_format": "channels_last"},
    ("float32", True): {"memory_format": "channels_last"},
}
CAPABILITIES: tuple[Capability, ...] = ((8, 6), (8, 0), (8, 9), (9, 0), (7, 5), (12, 0), (10, 0))
SM_COUNTS = {(7, 5): (40, 68)}  # of a T4 and an RTX 2080 Ti: there alone answers depend on it
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MOST_ELEMENTS = 2**35  # of the larger operand


class Collector:
    """Collects the convolutions of a run, by what decides their answers but the batch size."""

    name = "collector"

    def __init__(self) -> None:
        self.seen: dict[tuple[str, bool, str], Convolution] = {}

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Note a convolution."""
        key = convolution.dtype, convolution.channels_last, key_of(convolution)
        self.seen.setdefault(key, convolution)
        return Workspaces(0)

    def source(self, capability: Capability) -> ConvWorkspaceSource:
        """Return none."""
        return ConvWorkspaceSource.NONE

    def notes(self, capability: Capability) -> tuple[str, ...]:
        """Return none."""
        return ()


def collect(models: Sequence[str], recipes: Iterable[Mapping[str, str]]) -> Collector:
    """Return the convolutions of all models and recipes."""
    collector = Collector()
    for model in models:
        for recipe in recipes:
            try:
                job, _, _ = make_job(model, {**recipe, "steps": 1})  # type: ignore[typeddict-item]
                record(job, 2, (8, 0), conv_workspace_query=collector)
            except PlannerError as error:
                print(f"{model}: {error}", flush=True)
                break
    return collector


def torchvision_classifiers() -> list[str]:
    """Return the names of torchvision's classifiers."""
    from planner.capture import prepare_torchvision

    prepare_torchvision()
    import torchvision

    return [f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)]


def at_batch(convolution: Convolution, batch: int) -> Convolution:
    """Return a convolution at another batch size."""
    x, y = (batch, *convolution.x[1:]), (batch, *convolution.y[1:])
    return msgspec.structs.replace(convolution, x=x, y=y)


def batches_of(convolution: Convolution) -> Iterator[int]:
    """Yield the batch sizes to ask for: all whose tensors a GPU may hold."""
    elements = max(_per_sample(convolution.x), _per_sample(convolution.y))
    yield from (batch for batch in BATCHES if batch <= 2 or batch * elements <= MOST_ELEMENTS)


def _per_sample(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes[1:]:
        count *= size
    return count


def load_library(folder: Path) -> Library:
    """Load cuDNN into this process, with the stand-ins of cuBLASLt and the driver."""
    stand_in = cublaslt_for(folder)
    if isinstance(stand_in, str):
        raise SystemExit(f"{folder}: cuDNN's engines on cuBLASLt would be left out: {stand_in}")
    os.environ["PLANNER_EMULATED_GPU"] = describe_gpu(generic_device(SOME_MIB))
    return Library(folder, str(stand_in))


def ask(
    folder: Path, gpus: StoredGpus, convolutions: Mapping[str, Convolution], stored: StoredFile | None
) -> StoredFile:
    """Return the answers of the library in a folder for such GPUs, beside those stored."""
    library = load_library(folder)
    version = str(format_cudnn_version(library.version))
    if stored is not None and stored.cudnn != version:
        raise SystemExit(f"{folder}: cuDNN {version}, but the stored answers are of {stored.cudnn}")
    sm_count = gpus.sm_count or Target.for_capability(gpus.capability).sm_count
    device = describe_for_cudnn(gpus.capability, sm_count)
    curves: dict[Curve, int] = {}
    numbers: dict[str, int] = {}
    if stored is not None:
        curves = {curve: number for number, curve in enumerate(stored.curves)}
        numbers = dict(stored.convolutions)

    def workspace_bytes(convolution: Convolution, batch: int) -> int:
        query = {**asdict(at_batch(convolution, batch)), "every": False, "device": device}
        return next((size for _, _, size in engines(library, query)), 0)

    for key, convolution in sorted(convolutions.items()):
        curve = fit_curve(partial(workspace_bytes, convolution), list(batches_of(convolution)))
        numbers[key] = curves.setdefault(curve, len(curves))
    return StoredFile(version, list(curves), dict(sorted(numbers.items())))


def gpus_of(capabilities: Iterable[Capability]) -> Iterator[StoredGpus]:
    """Yield the GPUs to ask for."""
    for capability in capabilities:
        yield from (StoredGpus(capability, count) for count in SM_COUNTS.get(capability, (None,)))


def main() -> int:
    """Ask for what is missing, and write it."""
    kinds = {f"{dtype}-{'channels_last' if last else 'contiguous'}": (dtype, last) for dtype, last in RECIPES}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cudnn")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--kind", action="append", choices=kinds)
    parser.add_argument("--capability", action="append")
    parser.add_argument("--to", type=Path, default=FOLDER)
    options = parser.parse_args()
    models = torchvision_classifiers() if options.models is None else options.models.read_text().split()
    recipes = [RECIPES[kinds[name]] for name in options.kind or kinds]
    collected = collect(models, recipes).seen
    named = [tuple(map(int, text.split("."))) for text in options.capability or ()]
    options.to.mkdir(exist_ok=True)
    for dtype, last in RECIPES:  # some models change the layout, so that a recipe has several kinds
        of_kind = {key: one for (*kind, key), one in collected.items() if kind == [dtype, last]}
        for gpus in gpus_of(named or CAPABILITIES):
            path = options.to / file_name(gpus, dtype, last)
            stored = read_stored(path) if path.is_file() else None
            missing = {
                key: one for key, one in of_kind.items() if not stored or key not in stored.convolutions
            }
            if not missing:
                continue
            start = perf_counter()
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # cuDNN keeps memory of each query
                folder = Path(options.cudnn).expanduser()
                file = pool.submit(ask, folder, gpus, missing, stored).result()
            save(path, pack(msgspec.json.encode(file).decode()), "the answers")
            counts = f"{len(file.convolutions)} convolutions, {len(file.curves)} curves"
            size, seconds = path.stat().st_size, perf_counter() - start
            print(f"{path.name}: {counts}, {size} bytes, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
