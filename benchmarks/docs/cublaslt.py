"""Compute how workspaces of cuBLASLt inside cuDNN's plans would change peaks, for docs/cudnn.md.

    python -m benchmarks.docs.cublaslt --cudnn FOLDER

FOLDER holds a libcudnn.so.9 from 9.8 on; no GPU is needed. The stand-in of cuBLASLt names a workspace of 0;
here it names the most that cuDNN allows, up to `SIZES_MIB`. Writes two tables between the marks of the page:

1. of the convolutions of `benchmarks.docs.cudnn.MODELS`, the share whose workspace would grow;
2. the peaks at half the largest batch, and the largest batch, as they would be.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from math import prod
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import planner
from benchmarks.docs.cudnn import CAPABILITIES, convolutions, markdown, write
from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.program.kernels.convolution import Convolution

MIB = 2**20
VARIABLE = "PLANNER_EMULATED_CUBLASLT_WORKSPACE"
LIMIT_MIB = 128  # cuDNN allows a product no more
SIZES_MIB = (4, 32, LIMIT_MIB)
PLANS = ("resnet50", "vgg16", "efficientnet_b0")
CARDS = ("rtx-3090", "t4", "a100-80gb")
KINDS: dict[str, Any] = {
    "fp32": {},
    "amp-fp16, channels_last": {"precision": "amp-fp16", "memory_format": "channels_last"},
}
Capability = tuple[int, int]
Case = tuple[str, str, str]  # a model, a GPU, a kind
Peaks = tuple[float, float, int]  # allocated and reserved MiB, the largest batch


def main() -> None:
    """Query and plan with each size, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cudnn", required=True, metavar="FOLDER")
    folder = parser.parse_args().cudnn
    write({"grows": grows(folder), "cublaslt": changes(folder)})


def with_size(size_mib: int, work: Any, *arguments: Any) -> Any:
    """Return a function's result in a process whose cuDNN is told of such workspaces."""
    os.environ[VARIABLE] = str(size_mib * MIB)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# ---- convolutions


def grows(folder: str) -> str:
    """Return the table of the convolutions whose workspace would grow, by capability."""
    queries = tuple(convolutions())
    without, most = (with_size(size_mib, workspaces, folder, queries) for size_mib in (0, LIMIT_MIB))
    growths: dict[tuple[Capability, str], list[int]] = defaultdict(list)
    for (capability, query), old_bytes, new_bytes in zip(asked(queries), without, most, strict=True):
        growths[capability, kind_of(query)].append((new_bytes - old_bytes) // MIB)
    kinds = sorted({kind for _, kind in growths})
    rows = [
        [f"{major}.{minor}", *(shares(growths[(major, minor), kind]) for kind in kinds)]
        for major, minor in CAPABILITIES
    ]
    return markdown(("capability", *kinds), rows, "l" + "r" * len(kinds))


def shares(growths_mib: list[int]) -> str:
    """Return how many of the workspaces would grow by up to the least size, and by more."""
    little = sum(0 < growth <= SIZES_MIB[0] for growth in growths_mib)
    much = sum(growth > SIZES_MIB[0] for growth in growths_mib)
    return f"{little / len(growths_mib):.0%}, {much / len(growths_mib):.0%}"


def asked(queries: tuple[Convolution, ...]) -> Iterator[tuple[Capability, Convolution]]:
    """Yield each convolution on each kind of GPU."""
    for capability in CAPABILITIES:
        for query in queries:
            yield capability, query


def workspaces(folder: str, queries: tuple[Convolution, ...]) -> list[int]:
    """Return the bytes of each of `asked`."""
    library = open_cudnn_with_cublaslt(folder)
    return [
        library.workspaces(capability, CAPABILITIES[capability], query).workspace_bytes
        for capability, query in asked(queries)
    ]


def kind_of(query: Convolution) -> str:
    """Return the kind of convolution, whose products cuBLASLt may compute."""
    return f"{'1 x 1' if prod(query.w[2:]) == 1 else 'others'}, {query.direction}"


# ---- plans


def changes(folder: str) -> str:
    """Return the table of peaks and largest batches by the size that is named."""
    cases = [(model, card, kind) for model in PLANS for kind in KINDS for card in CARDS]
    with TemporaryDirectory() as cache:
        largest = with_size(0, largest_batches, folder, cache, cases)
        halves = [batch // 2 for batch in largest]
        plain, *others = (
            with_size(size_mib, peaks, folder, cache, cases, halves) for size_mib in (0, *SIZES_MIB)
        )
    rows = []
    for (model, card, kind), batch, base, *named in zip(cases, halves, plain, *others, strict=True):
        cells = [f"{base[0]:,.0f}", more(0, base, named), f"{base[1]:,.0f}", more(1, base, named)]
        rows.append([model, kind, card, f"{batch:,}", *cells, f"{base[2]:,}", more(2, base, named)])
    sizes = ", ".join(map(str, SIZES_MIB))
    head = ("model", "type", "GPU", "batch", "allocated, MiB", f"with {sizes} MiB", "reserved, MiB")
    return markdown((*head, f"with {sizes}", "largest", f"with {sizes}"), rows, "lll" + "r" * 7)


def more(place: int, base: Peaks, named: list[Peaks]) -> str:
    """Return what one figure changes by with each size."""
    differences = (round(peaks[place] - base[place]) for peaks in named)
    return ", ".join(f"{difference:+,}" if difference else "0" for difference in differences)


def largest_batches(folder: str, cache: str, cases: list[Case]) -> list[int]:
    """Return the largest batch of each case."""
    return [
        planner.max_batch(
            f"torchvision:{model}", gpu=card, cudnn=folder, cache=cache, no_calibration=True, **KINDS[kind]
        ).max_batch
        for model, card, kind in cases
    ]


def peaks(folder: str, cache: str, cases: list[Case], batches: list[int]) -> list[Peaks]:
    """Return the peaks at a batch of each case, and its largest batch."""
    largest = largest_batches(folder, cache, cases)
    results = (
        planner.estimate(f"torchvision:{model}", batch, cudnn=folder, cache=cache, gpu=card, **KINDS[kind])
        for (model, card, kind), batch in zip(cases, batches, strict=True)
    )
    answers = (result.to_dict() for result in results)
    return [
        (answer["peak_allocated_mib"], answer["peak_reserved_mib"], most)
        for answer, most in zip(answers, largest, strict=True)
    ]


if __name__ == "__main__":
    main()
