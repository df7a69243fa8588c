"""Replay the first seed's notebook with the workspaces that versions of cuDNN request, for docs/notebook.md.

    python -m benchmarks.docs.notebook_workspaces --cudnn FOLDER [--cudnn FOLDER ...]

Each FOLDER holds the libcudnn.so.9 of one version from 9.8 on; no GPU is needed. Writes two tables between
the marks of the page:

1. peaks and reserved memory of the whole process within the notebook's GPU, measured and by each library: the
   first for each of `CAPABILITIES`, the others for the first of these alone;
2. of the convolutions of VGG16-BN, how large a workspace the measured peak leaves room for, and what each
   library requests there.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from itertools import takewhile

from msgspec.structs import replace

from benchmarks.docs.cudnn import Answering, Query, markdown
from benchmarks.docs.notebook import (
    CARD_MIB,
    MIB,
    PAGE,
    error,
    outside_mib,
    printed,
    readings_of,
    replace_tables,
)
from benchmarks.published.allocator import PUBLISHED
from planner.capture.session import record
from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.hardware.cudnn import Cudnn
from planner.jobs import Job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.process.file import find_process_file, read_process
from planner.planning.process.model import Heading, Process
from planner.planning.process.run import JobTracer
from planner.program.events import Trace
from planner.program.kernels.convolution import Convolution, Workspaces

TORCH = "2.4"  # the oldest whose rules are known; the notebook's is 2.0.1
CAPABILITIES = {(8, 6): 82, (8, 9): 128, (7, 5): 72}  # cards of 24 GB, with their multiprocessors
MODELS = ("vgg16_bn", "resnet50", "vit_b_16", "unetr")
AFTER_VGG = Heading("ResNet50")
MARKER_BYTES = 2**45  # a workspace that is the peak wherever it stands
CLOSEST = 6  # rows of the second table

Capability = tuple[int, int]


def main() -> None:
    """Replay with each library, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cudnn", action="append", required=True, metavar="FOLDER")
    libraries = [open_cudnn_with_cublaslt(folder) for folder in parser.parse_args().cudnn]
    process = read_process(find_process_file("notebook"), load_catalogue()).process
    tables = {"workspaces": peaks_table(process, libraries), "room": room_table(process, libraries)}
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replace_tables(text, tables), encoding="utf-8")


def tracer_of(answer: Answering, capability: Capability) -> JobTracer:
    """Return the tracer of jobs whose convolutions get these workspaces."""

    @cache
    def trace(job: Job, batch: int) -> Trace:
        count = CAPABILITIES[capability]
        old = job.replace(torch=TORCH)
        return record(old, batch, capability, sm_count=count, conv_workspace_query=Query(answer))

    return trace


# ---- the whole process


def peaks_table(process: Process, libraries: Sequence[Cudnn]) -> str:
    """Return the table of the memory after each model, measured and computed."""
    first, capability = libraries[0], next(iter(CAPABILITIES))
    runs: list[tuple[str, Answering, Capability]] = [("none", no_workspace, capability)]
    runs += [(first.version, first.workspaces, each) for each in CAPABILITIES]
    runs += [(library.version, library.workspaces, capability) for library in libraries[1:]]
    real = [printed(kind) for kind in ("peak_allocated", "reserved")]
    figures = [of[model, "end"] for model in MODELS for of in real]
    rows = [["measured", "", *(f"{figure:,.1f}" for figure in figures)]]
    limits = replace(PUBLISHED, limit_bytes=(CARD_MIB - round(outside_mib())) * MIB)
    for version, answer, of in runs:
        log = readings_of(process, tracer_of(answer, of), limits)
        ends = [log[model, "end"] for model in MODELS]
        ours = [size for end in ends for size in (end.peak_allocated_bytes, end.reserved_bytes or 0)]
        errors = (error(size / MIB, figure) for size, figure in zip(ours, figures, strict=True))
        cells = [f"{size / MIB:,.0f} ({off})" for size, off in zip(ours, errors, strict=True)]
        rows.append([version, "" if version == "none" else f"{of[0]}.{of[1]}", *cells])
    head = [f"{model} {kind}" for model in MODELS for kind in ("allocated", "reserved")]
    return markdown(("cuDNN", "capability", *head), rows, "ll" + "r" * len(head)) + "\n"


def no_workspace(_capability: Capability, _sm_count: int, _convolution: Convolution) -> Workspaces:
    """Return that no workspace is requested."""
    return Workspaces(0)


# ---- VGG16-BN


def room_table(process: Process, libraries: Sequence[Cudnn]) -> str:
    """Return the table of the convolutions whose workspaces would be the peak soonest."""
    until = tuple(takewhile(lambda step: step != AFTER_VGG, process))
    measured = printed("peak_allocated")["vgg16_bn", "end"]
    capability, count = next(iter(CAPABILITIES.items()))
    rooms = {query: measured - live_mib(until, query) for query in convolutions_of(until)}
    rows = []
    for query, room in sorted(rooms.items(), key=lambda pair: pair[1])[:CLOSEST]:
        requests = (library.workspaces(capability, count, query).workspace_bytes for library in libraries)
        shape = f"{query.x[1]} to {query.w[0]} channels at {query.x[2]} x {query.x[3]}"
        cells = [f"{size / MIB:,.1f}" for size in requests]
        rows.append([f"{query.direction}, {shape}", f"{room:,.0f}", *cells])
    head = ("convolution", "room", *(library.version for library in libraries))
    return markdown(head, rows, "l" + "r" * (len(head) - 1)) + "\n"


def convolutions_of(process: Process) -> dict[Convolution, None]:
    """Return the convolutions of the process's last model."""
    seen: dict[Convolution, None] = {}

    def note(_capability: Capability, _sm_count: int, query: Convolution) -> Workspaces:
        seen[query] = None
        return Workspaces(0)

    readings_of(process, tracer_of(note, next(iter(CAPABILITIES))), PUBLISHED)
    return {query: None for query in seen if query.w[2:] == (3, 3) and query.w[0] >= 64}


def live_mib(process: Process, marked: Convolution) -> float:
    """Return the most memory beside the workspace of this convolution."""

    def mark(_capability: Capability, _sm_count: int, query: Convolution) -> Workspaces:
        return Workspaces(MARKER_BYTES if query == marked else 0)

    log = readings_of(process, tracer_of(mark, next(iter(CAPABILITIES))), PUBLISHED)
    return (log["vgg16_bn", "end"].peak_allocated_bytes - MARKER_BYTES) / MIB


if __name__ == "__main__":
    main()
