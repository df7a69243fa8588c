"""Compare the convolution workspaces of cuDNN's heuristics with published figures, for docs/cudnn.md.

    python -m benchmarks.docs.cudnn --cudnn FOLDER [--cudnn FOLDER ...]

Each FOLDER holds the libcudnn.so.9 of one version from 9.8 on; no GPU is needed. `--only images` and `--only
stored` write the last tables alone. Writes seven tables between the marks of docs/cudnn.md:

1. published workspaces of GPUs of compute capability 8.0 and newer (published/cudnn_workspaces.csv) that a
   heuristic chose, beside the answers of the versions at hand;
2. a fit of the answers: over the convolutions of `MODELS`, by direction, type and layout, the non-negative
   coefficients of x, y, w and batch x w (SciPy's `nnls`, rows weighted by their bytes), and the share of
   bytes that they leave unexplained;
3. the share of answers in which versions agree, and the bytes by which the others differ;
4. errors on the published peaks of CNNs, which ran with an older version, by the oldest version at hand;
5. plans by the newest version: peak and largest batch without and with it, over models, cards, types;
6. the sums over batch x positions for which the oldest version at hand takes a weight gradient by image;
7. peaks by the stored answers beside those of the library whose answers they are, which is the first FOLDER,
   written with `--only stored`.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

import planner
from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import RUNS, set_up_bytes, trace_run
from benchmarks.rows import read_lines
from planner.capture.session import record
from planner.capture.symbolic.kernel_calls import RecordedCall
from planner.capture.workspaces.ops import kind_and_size
from planner.capture.workspaces.registry import RULES
from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.errors import ModelError
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.cudnn.client import Cudnn
from planner.jobs import resolve_job
from planner.program.kernels.convolution import (
    Convolution,
    ConvWorkspaceSource,
    Direction,
    WorkspaceAccount,
    Workspaces,
)
from planner.program.kernels.expansion import OpKind
from planner.program.target import Target

PUBLISHED = Path(__file__).parents[1] / "published" / "cudnn_workspaces.csv"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cudnn.md"
MIB = 2**20
WIDENING, IMAGE_SIDES = (320, 1280), (2, 3, 4, 5, 7)  # the last convolution of MNASNet and MobileNetV2
STORED_CARDS, STORED_SIZES, STORED_BATCHES = ("rtx-3090", "a100-80gb", "h100-80gb"), (224, 208), (8, 50, 96)
MODELS = (
    *(
        "resnet50",
        "vgg16_bn",
        "densenet121",
        "mobilenet_v2",
        "mnasnet1_0",
        "efficientnet_b0",
        "convnext_tiny",
    ),
    *("regnet_y_1_6gf", "inception_v3", "googlenet"),
)
BATCHES = (2, 24, 96, 333)
CAPABILITIES = {(7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132}  # and multiprocessors
KINDS = (("float32", False), ("float32", True), ("float16", False), ("float16", True))  # type, channels last
PLANS = ("resnet50", "vgg16_bn", "mobilenet_v2", "convnext_tiny", "densenet121")
CARDS = ("rtx-3060", "rtx-4090", "a100-40gb", "h100-80gb")
OPERATIONS = {"fwd": Direction.FORWARD, "dgrad": Direction.DATA, "wgrad": Direction.WEIGHT}
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one version for one convolution on one kind of GPU."""

    convolution: Convolution
    capability: tuple[int, int]
    engine: int | None
    workspace_bytes: int


def main() -> None:
    """Query, compare, write."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cudnn", action="append", required=True, metavar="FOLDER")
    parser.add_argument("--only", choices=("images", "stored"))
    options = parser.parse_args()
    folders = options.cudnn
    if options.only == "stored":
        write({"stored": stored(folders[0])})
        return
    libraries = sorted(
        ((folder, open_cudnn_with_cublaslt(folder)) for folder in folders),
        key=lambda pair: number_of(pair[1].version),
    )
    if options.only == "images":
        write({"images": images(libraries[0][1])})
        return
    queries = tuple(convolutions())
    by_version = {library.version: answers(library, queries) for _, library in libraries}
    newest = libraries[-1][1].version
    tables = {
        "published": published([library for _, library in libraries]),
        "terms": terms(by_version[newest]),
        "versions": versions(by_version),
        "peaks": peaks(libraries[0][1]),
        "images": images(libraries[0][1]),
        "plans": plans(libraries[-1][0]),
        "queries": f"{len(queries):,} convolutions of {len(MODELS)} models of torchvision at batches "
        f"{', '.join(map(str, BATCHES))}, with cuDNN {', '.join(by_version)}. Tables of\n"
        f"one version show {newest}.",
    }
    write(tables)


def write(tables: dict[str, str]) -> None:
    """Put each table between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, count = re.subn(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", page, flags=re.S)  # noqa: B023
        if count != 1:
            sys.exit(f"{PAGE.name}: expected the marks of {name} once, got {count}")
    PAGE.write_text(page, encoding="utf-8")


def number_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# ---- published figures


def published(libraries: Sequence[Cudnn]) -> str:
    """Return the table of workspaces that a heuristic chose on a GPU of 8.0 or newer."""
    rows = []
    for row in read_lines(PUBLISHED):
        if re.match(r"[89]\.", row["capability"]) and row["n"] and was_chosen(row):
            rows.append([*description_cells(row), *(workspace_cell(row, library) for library in libraries)])
    head = (
        "source",
        "GPU",
        "cuDNN",
        "convolution",
        "published",
        *(library.version for library in libraries),
    )
    return markdown(head, rows, "llllr" + "r" * len(libraries))


def was_chosen(row: dict[str, str]) -> bool:
    """True for a heuristic's choice: without timing, or first in an ordered list of a version from 9 on."""
    return row["benchmark"] == "false" or (row["cudnn"][:2] == "9." and "place 1 in the order" in row["note"])


def description_cells(row: dict[str, str]) -> list[str]:
    x, w, y = sizes_of(row)
    shape = f"{row['dtype']} {row['operation']}, x {times(x)}, w {times(w)}, y {times(y)}"
    return [
        row["source"].split(" in ")[0],
        row["gpu"],
        row["cudnn"] or "?",
        shape,
        f"{int(row['workspace_bytes']):,}",
    ]


def workspace_cell(row: dict[str, str], library: Cudnn) -> str:
    major, minor = map(int, row["capability"].split("."))
    x, w, y = sizes_of(row)
    space = len(x) - 2
    padding, stride, dilation = ((int(row[name]),) * space for name in ("pad", "stride", "dilation"))
    last = row["layout"].endswith("C")
    direction = OPERATIONS[row["operation"]]
    convolution = Convolution(direction, TYPES[row["dtype"]], x, w, y, last, padding, stride, dilation)
    engine = library.workspaces((major, minor), CAPABILITIES[major, minor], convolution).engine
    return "-" if engine is None else f"{engine.workspace_bytes:,}"


def sizes_of(row: dict[str, str]) -> tuple[tuple[int, ...], ...]:
    extents = [int(row[name]) for name in "dhw" if row[name]]
    kernel = [int(row[name]) for name in "trs" if row[name]]
    pad, stride = int(row["pad"]), int(row["stride"])
    out = [(size + 2 * pad - reach) // stride + 1 for size, reach in zip(extents, kernel, strict=True)]
    n, c, k = int(row["n"]), int(row["c"]), int(row["k"])
    return (n, c, *extents), (k, c // int(row["groups"]), *kernel), (n, k, *out)


# ---- convolutions of models


def convolutions() -> Iterator[Convolution]:
    """Return the distinct queries of the models' training, in both layouts and types."""
    seen: dict[Convolution, None] = {}
    for model in MODELS:
        job = resolve_job(f"torchvision:{model}", {}).replace(steps=1)
        for batch in BATCHES:
            calls: list[RecordedCall] = []
            record(job, batch, (8, 6), calls=calls)
            for call in calls:
                if "convolution" in call.site.op:
                    for kind, last in KINDS:
                        args, out = as_tensors(call.args, kind, last), as_tensors(call.out, kind, last)
                        ops = map(kind_and_size, RULES[call.func](args, out, Target((8, 6), 82)))
                        seen |= {query: None for op, query in ops if op is OpKind.CONVOLUTION}
    return iter(seen)


def as_tensors(value: Any, kind: str, last: bool) -> Any:
    import torch

    from planner.capture.symbolic.kernel_calls import TensorMeta

    if isinstance(value, TensorMeta):
        tensor = torch.empty(value.sizes, dtype=getattr(torch, kind), device="meta")
        return tensor.to(memory_format=torch.channels_last) if last and len(value.sizes) == 4 else tensor
    if isinstance(value, tuple):
        return tuple(as_tensors(item, kind, last) for item in value)
    return value


def answers(library: Cudnn, queries: Iterable[Convolution]) -> list[Answer]:
    """Return the answers for all convolutions on all kinds of GPUs."""
    result = []
    for convolution in queries:
        for capability, multiprocessors in CAPABILITIES.items():
            engine = library.workspaces(capability, multiprocessors, convolution).engine
            workspace_bytes = 0 if engine is None else engine.workspace_bytes
            result.append(
                Answer(convolution, capability, None if engine is None else engine.number, workspace_bytes)
            )
    return result


def terms(of_version: Sequence[Answer]) -> str:
    """Return the table of coefficients of the workspace's parts."""
    groups: dict[tuple[str, ...], list[Answer]] = defaultdict(list)
    for answer in of_version:
        layout = "channels last" if answer.convolution.channels_last else "contiguous"
        major, minor = answer.capability
        groups[
            f"{major}.{minor}", answer.convolution.dtype, layout, str(answer.convolution.direction)
        ].append(answer)
    rows = []
    for key, members in sorted(groups.items()):
        parts = np.array([parts_of(answer.convolution) for answer in members], dtype=float) / MIB
        workspaces = np.array([answer.workspace_bytes for answer in members], dtype=float) / MIB
        if workspaces.sum() < 1:
            rows.append([*key, str(len(members)), "0", *[""] * 5])
            continue
        coefficients, _ = nnls(parts, workspaces)
        off = np.abs(parts @ coefficients - workspaces).sum() / workspaces.sum()
        whole = parts[:, :2].sum()
        shares = [f"{value:.2f}" if value >= 0.005 else "" for value in coefficients]
        rows.append([*key, str(len(members)), f"{workspaces.sum() / whole:.2f}", *shares, f"{off:.0%}"])
    head = (
        "capability",
        "type",
        "layout",
        "direction",
        "n",
        "of x and y",
        "x",
        "y",
        "w",
        "batch x w",
        "residual",
    )
    return markdown(head, rows, "llll" + "r" * 7)


def parts_of(convolution: Convolution) -> tuple[int, ...]:
    """Return the bytes of x, y, w in float32, and of one w for each image."""
    size = 4 if convolution.dtype == "float32" else 2
    weights = 4 * prod(convolution.w)
    return prod(convolution.x) * size, prod(convolution.y) * size, weights, weights * convolution.x[0]


def versions(by_version: dict[str, list[Answer]]) -> str:
    """Return the table of neighbouring versions' agreement."""
    rows = []
    for (old, first), (new, second) in pairwise(by_version.items()):
        for capability in CAPABILITIES:
            pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.capability == capability]
            engines = np.mean([a.engine == b.engine for a, b in pairs])
            same = np.mean([close(a.workspace_bytes, b.workspace_bytes) for a, b in pairs])
            before, after = (sum(pair[place].workspace_bytes for pair in pairs) for place in (0, 1))
            moved = sum(abs(a.workspace_bytes - b.workspace_bytes) for a, b in pairs)
            name = ".".join(map(str, capability))
            change = f"{after / before - 1:+.1%}" if before else ""
            share = f"{moved / max(before, after):.1%}" if before or after else ""
            rows.append([f"{old} to {new}", name, f"{engines:.0%}", f"{same:.0%}", change, share])
    head = ("versions", "capability", "same engine", "same workspace", "all bytes", "bytes that moved")
    return markdown(head, rows, "llrrrr")


def close(a: int, b: int) -> bool:
    """True if both differ by at most 1 MiB or 1 %."""
    return abs(a - b) <= max(MIB, 0.01 * max(a, b))


# ---- published peaks

Answering = Callable[[tuple[int, int], int, Convolution], Workspaces]


@dataclass(frozen=True, slots=True)
class Query:
    """A function as what answers for convolutions."""

    answer: Answering
    name: str = "variant"

    def __call__(self, capability: tuple[int, int], sm_count: int, convolution: Convolution) -> Workspaces:
        return self.answer(capability, sm_count, convolution)

    def account(self, capability: tuple[int, int], sm_count: int) -> WorkspaceAccount:
        """Return that a library answers."""
        return WorkspaceAccount(ConvWorkspaceSource.LIBRARY)


def peaks(library: Cudnn) -> str:
    """Return the table of errors on xMem's CNNs, with more and more of the library's answers."""
    runs = [
        run
        for run in read_lines(RUNS)
        if run["library"] == "torchvision" and run["peak_nvml_delta_mib"] and run["oom_on_full_gpu"] != "True"
    ]
    directions_of: dict[str, tuple[Direction, ...]] = {
        "the fitted term alone": (),
        "and forward passes": (Direction.FORWARD,),
        "and forward passes and data gradients": (Direction.FORWARD, Direction.DATA),
        "and all other convolutions": tuple(Direction),
    }
    variants: dict[str, Answering] = {name: fitted_or(library, of) for name, of in directions_of.items()}
    variants["the library alone"] = library.workspaces
    rows = []
    for name, answer in variants.items():
        errors = np.array([error_of(run, answer) for run in runs])
        off = np.abs(errors)
        figures = (np.median(errors), np.median(off), np.quantile(off, 0.95), errors[off.argmax()])
        rows.append([name, str(len(runs)), *(f"{figure:.2%}" for figure in figures)])
    head = (f"workspaces, from {library.version}", "n", "median", "absolute", "95th", "worst")
    return markdown(head, rows, "lrrrrr")


def fitted_or(library: Cudnn, directions: Collection[Direction]) -> Answering:
    """Return a query by the fitted term if it applies, else by the library for these directions."""

    def answer(capability: tuple[int, int], multiprocessors: int, convolution: Convolution) -> Workspaces:
        fitted = PublishedWorkspaces()(capability, multiprocessors, convolution)
        if fitted.workspace_bytes or convolution.direction not in directions:
            return fitted
        return library.workspaces(capability, multiprocessors, convolution)

    return answer


def error_of(run: dict[str, str], answer: Answering) -> float:
    """Return (replayed - measured) / measured, with the memory of model and optimizer in both."""
    trace = trace_run(run, Query(answer))
    batch = int(run["batch"])
    measured_bytes = float(run["peak_nvml_delta_mib"]) * MIB + set_up_bytes(trace, batch)
    return replay_published(trace, batch).peak_reserved_bytes / measured_bytes - 1


# ---- weight gradients image by image


def images(library: Cudnn) -> str:
    """Return the table of the sums for which a library takes the gradient of `WIDENING` image by image."""
    rows = []
    for capability in CAPABILITIES:
        if capability < (8, 0):
            continue
        spans = [span_of_images(library, capability, side) for side in IMAGE_SIDES]
        rows.append([".".join(map(str, capability)), *spans])
    head = (f"capability, {library.version}", *(f"{side} x {side}" for side in IMAGE_SIDES))
    return markdown(head, rows, "l" + "r" * len(IMAGE_SIDES))


def span_of_images(library: Cudnn, capability: tuple[int, int], side: int) -> str:
    """Return the spans of batch x positions that are taken image by image, up to 4,000."""
    inside, outside = WIDENING
    batches = range(2, 4000 // side**2 + 1)
    spans: list[list[int]] = []
    for batch in batches:
        x, w, y = (batch, inside, side, side), (outside, inside, 1, 1), (batch, outside, side, side)
        query = Convolution(Direction.WEIGHT, "float32", x, w, y, False, (0, 0), (1, 1), (1, 1))
        size_bytes = library.workspaces(capability, CAPABILITIES[capability], query).workspace_bytes
        if size_bytes != batch * 4 * prod(w):
            continue
        if spans and spans[-1][1] == batch - 1:
            spans[-1][1] = batch
        else:
            spans.append([batch, batch])
    return ", ".join(f"{first * side**2:,} to {last * side**2:,}" for first, last in spans) or "none"


# ---- stored answers


def stored(folder: str) -> str:
    """Return the table of peaks by the stored answers beside those of the library."""
    rows = []
    for card in STORED_CARDS:
        for size in STORED_SIZES:
            errors = [
                error
                for model in MODELS
                for batch in STORED_BATCHES
                for error in stored_errors(f"torchvision:{model}", batch, size, card, folder)
            ]
            off = np.abs(np.array(errors).reshape(-1, 2))
            cells = [
                cell
                for column in off.T
                for cell in (
                    f"{np.mean(column == 0):.0%}",
                    f"{np.mean(column <= 0.01):.0%}",
                    f"{column.max():.1%}",
                )
            ]
            rows.append([card, f"{size} x {size}", str(len(off)), *cells])
    each = ("the same", "within 1 %", "worst")
    head = ("GPU", "images", "n", *(f"{of} {word}" for of in ("allocated", "reserved") for word in each))
    return markdown(head, rows, "ll" + "r" * 7)


def stored_errors(model: str, batch: int, size: int, card: str, folder: str) -> list[float]:
    """Return the errors of allocated and reserved peak; none where the batch does not fit, or the size."""
    peaks = []
    for source in ("stored", folder):
        try:
            result = planner.estimate(model, batch, gpu=card, input=f"3x{size}x{size}", cudnn=source)
        except ModelError:
            return []
        answer = result.to_dict()
        if answer["fits"] != "yes":
            return []
        peaks.append((answer["peak_allocated_mib"], answer["peak_reserved_mib"]))
    return [ours / theirs - 1 for ours, theirs in zip(*peaks, strict=True)]


# ---- plans


def plans(folder: str) -> str:
    """Return the table of peaks and largest batches, without and with a library."""
    rows = []
    for model in PLANS:
        for precision, memory_format in (("fp32", ""), ("amp-fp16", ""), ("amp-fp16", "channels_last")):
            name = ", ".join(filter(None, (precision, memory_format)))
            rows += [
                [model, name, card, *planned(model, precision, memory_format, card, folder)] for card in CARDS
            ]
    head = (
        *("model", "type", "GPU", "batch", "reserved, MiB", "with --cudnn", ""),
        *("largest", "with --cudnn", "without retries"),
    )
    return markdown(head, rows, "lll" + "r" * 7)


def planned(model: str, precision: str, memory_format: str, card: str, folder: str) -> list[str]:
    """Plan half the largest batch and the largest batches, without and with the library's answers."""
    options: Any = {"gpu": card, "precision": precision, "no_calibration": True}
    options["memory_format"] = memory_format or None
    name = f"torchvision:{model}"
    plain = planner.max_batch(name, **options).to_dict()
    with_library = planner.max_batch(name, cudnn=folder, **options).to_dict()
    half = max(1, plain["max_batch"] // 2)
    published_mib, library_mib = (
        planner.estimate(name, batch=half, cudnn=cudnn, **options).to_dict()["peak_reserved_mib"]
        for cudnn in ("published", folder)
    )
    largest = (plain["max_batch"], with_library["max_batch"], with_library["comfortable_batch"])
    return [
        f"{half:,}",
        f"{published_mib:,.0f}",
        f"{library_mib:,.0f}",
        f"{library_mib / published_mib - 1:+.1%}",
        *(f"{b:,}" for b in largest),
    ]


def times(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], alignment: str) -> str:
    """Format a table; `alignment` has l or r for each column."""
    rule = ["---" if side == "l" else "--:" for side in alignment]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


if __name__ == "__main__":
    main()
