"""Write docs/measured.md from the tables and records of one session on an H200.

python -m benchmarks.measured.report
"""

import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from benchmarks.accuracy.addresses import Placement
from benchmarks.emulated.rows import Row
from benchmarks.measured.compare import COMPARED
from benchmarks.measured.jobs import HERE, PLANNED, Planned
from benchmarks.rows import read_lines, read_rows
from planner._support.atomic_write import write_bytes

RECORDS = HERE / "h200" / "records.tar.xz"
PAGE = HERE.parents[1] / "docs" / "measured.md"
MIB = 1 << 20
WIDTH = 108  # of a line
# Peak reserved of the largest batch, in MiB, as `planner max-batch --gpu H200 --torch 2.11` had it before.
EDGE = (("vit_b_16", 1108, 1164, 140110), ("resnet50", 3228, 3390, 140832), ("gpt2", 633, 665, 136796))
OPTIONS = {
    "vit_b_16": "ViT-B/16, SGD, float32",
    "resnet50": "ResNet-50, momentum, amp-fp16, channels last",
    "gpt2": "GPT-2 at 128 tokens, AdamW, amp-bf16",
}
KINDS = ("fp32", "amp-bf16", "amp-fp16", "bf16")


def observations(folder: str = ".") -> dict[str, dict[str, Any]]:
    """Return the observations of a folder of the records, by their names."""
    found = {}
    with tarfile.open(RECORDS) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".json" and str(path.parent) == folder:
                file = archive.extractfile(member)
                assert file is not None
                found[path.stem] = json.load(file)
    return found


def page() -> str:
    """Return the page."""
    seen = observations()
    planned = [row for row in read_rows(PLANNED, Planned) if str(row.number) in seen]
    before = [(row.allocated, row.reserved, seen[str(row.number)]) for row in planned]
    compared = read_rows(COMPARED, Row)
    after = [(row.planned_allocated, row.planned_reserved, seen[str(row.number)]) for row in compared]
    return "\n".join(
        [
            *_HEAD.splitlines(),
            *_edge(observations("edge")),
            *_ALLOCATOR.splitlines(),
            *_addresses(),
            *_JOBS.format(jobs=len(planned)).splitlines(),
            *_errors("as planned before the run", before),
            *_errors("planned today", after),
            "",
            "Planned today, by precision:",
            "",
            *_HEADINGS,
            *_by_precision(compared, seen),
            "",
            *_MENDED.splitlines(),
            *_parting(compared),
            *_context(seen.values()),
            *_scripts(observations("scripts")),
            *_phases(),
            *_LEFT.splitlines(),
            "",
        ]
    )


def _edge(seen: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield ""
    yield "| job | planned largest | peak reserved, planned and measured (MiB) | 1.05 times as large |"
    yield "|---|--:|--:|---|"
    for name, largest, beyond, reserved in EDGE:
        ran, died = seen[f"{name}-{largest}"], seen[f"{name}-{beyond}"]
        figures = f"{reserved:,} and {ran['peak_reserved_bytes'] / MIB:,.0f}"
        outcome = "out of memory" if died["oom"] else "ran"
        state = "out of memory" if ran["oom"] else "ran"
        yield f"| {OPTIONS[name]} | {largest:,}: {state} | {figures} | {beyond:,}: {outcome} |"


_HEADINGS = (
    "| | jobs | allocated: equal to the byte | median | 90 % within | 95 % within | largest error "
    "| reserved: equal | 90 % within | 95 % within | largest error |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def _errors(label: str, rows: Sequence[tuple[int, int, dict[str, Any]]]) -> Iterable[str]:
    figures = [str(len(rows))]
    for place, key in enumerate(("peak_allocated_bytes", "peak_reserved_bytes")):
        signed = [row[place] / row[2][key] - 1 for row in rows]
        errors = sorted(map(abs, signed))
        share = [errors[min(len(errors) - 1, int(part * len(errors)))] for part in (0.9, 0.95)]
        figures.append(str(errors.count(0)))
        figures += [f"{median(errors):.2%}"] if place == 0 else []
        figures += [*(f"{one:.2%}" for one in share), f"{max(signed, key=abs):+.1%}"]
    yield f"| {label} | {' | '.join(figures)} |".replace("%", " %")


def _by_precision(compared: Sequence[Row], seen: dict[str, dict[str, Any]]) -> Iterable[str]:
    for kind in KINDS:
        words = [(row, row.options.split()) for row in compared]
        of_kind = [
            row
            for row, given in words
            if (given[given.index("--precision") + 1] if "--precision" in given else "fp32") == kind
        ]
        yield from _errors(
            kind, [(row.planned_allocated, row.planned_reserved, seen[str(row.number)]) for row in of_kind]
        )


def _parting(compared: Sequence[Row]) -> Iterable[str]:
    causes = Counter(row.cause for row in compared)
    yield ""
    yield "| first event that differs, planned today | jobs |"
    yield "|---|--:|"
    for cause, count in causes.most_common():
        if count > 2:
            yield f"| {cause.replace('identical', 'none')} | {count} |"
    yield f"| others | {sum(count for count in causes.values() if count <= 2)} |"


def _context(seen: Iterable[dict[str, Any]]) -> Iterable[str]:
    runs = list(seen)
    bare = {run["context_before_bytes"] // MIB for run in runs}
    rest = sorted((run["process_peak_bytes"] - run["peak_reserved_bytes"]) // MIB for run in runs)
    low, high = rest[int(0.05 * len(rest))], rest[int(0.95 * len(rest))]
    yield from ("", "## What the process takes beside the allocator", "")
    yield from wrap(
        f"By NVML {min(bare)} MiB once CUDA is initialized, in all {len(runs)} processes (driver 580.159.04)."
        f" At the peak it was {median(rest):.0f} MiB in the middle and {low} to {high} in nine of ten: the "
        "kernels and libraries that a job loads decide it. Published out-of-memory messages had 525 and 680. "
        "The planner now has the measured figure for this card, with a spread of 60.",
        WIDTH,
    )


def _addresses() -> Iterable[str]:
    rows = read_rows(HERE / "h200" / "addresses.csv", Placement)
    near = sum(abs(row.falling_bytes / row.recorded_bytes - 1) < 0.005 for row in rows)
    falling, rising = (
        sum(row.recorded_bytes == peak(row) for row in rows)
        for peak in (lambda row: row.falling_bytes, lambda row: row.rising_bytes)
    )
    above, below = (sum(getattr(row, side) for row in rows) for side in ("above", "below"))
    yield ""
    yield from wrap(
        f"Of {above + below:,} new segments {above:,} lie above the one before and {below:,} below. In the "
        "run that was read closely CUDA opens ranges of 32 MiB, each below the last, and fills what is left "
        "in them, and gaps that others left, from below. With the planner's addresses, which only fall, the "
        f"same requests reserve what was recorded in {falling} of {len(rows)} runs, and within 0.5 % of it "
        f"in {near}; with rising ones in {rising}.",
        WIDTH,
    )


def _phases() -> Iterable[str]:
    yield from (*_PHASES.splitlines(), "")
    yield "| script | phase | allocated: planned | recorded | reserved: planned | recorded |"
    yield "|---|---|--:|--:|--:|--:|"
    for line in read_lines(HERE / "h200" / "phases.csv"):
        figures = (
            f"{float(line[f'{side}_{what}']):,.{digits}f}"
            for what, digits in (("allocated", 3), ("reserved", 0))
            for side in ("planned", "recorded")
        )
        yield f"| `{line['script']}.py` | {line['phase']} | {' | '.join(figures)} |"


def _scripts(seen: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from (*_SCRIPTS.splitlines(), "")
    yield "| script | peak allocated | peak reserved | process beside reserved |"
    yield "|---|--:|--:|--:|"
    for name, run in sorted(seen.items()):
        peaks = [run["peak_allocated_bytes"] / MIB, run["peak_reserved_bytes"] / MIB]
        rest = (run["process_peak_bytes"] - run["peak_reserved_bytes"]) / MIB
        yield f"| `{name}.py` | {peaks[0]:,.1f} | {peaks[1]:,.0f} | {rest:,.0f} |"


_HEAD = """\
# Measured on an H200

Written by `python -m benchmarks.measured.report`. On 2026-11-27 this project had a GPU for the first time,
for a quarter of an hour: one H200 (143,771 MiB, compute capability 9.0, driver 580.159.04) with torch
2.11.0+cu130 and cuDNN 9.19. Everything on this page was measured there, by us. All that was recorded is in
`benchmarks/measured/h200`.

## The largest batch of the whole card

`planner max-batch --gpu H200 --torch 2.11`, with the cuDNN of that torch, was asked first; it had by then
the card's context and the corrections that the first 204 runs below had led to. The answers then ran, and
1.05 times as much:
"""
_ALLOCATOR = """
Under a cap of 24,000 MiB (`planner verify --model vit_b_16 --allocator-cap-mib 24000`) the largest batch at
confidence 0.99 was predicted to be 183; 183 and 184 ran with the predicted 23,376.0 and 23,550.0 MiB
reserved, and 193 ran out of memory.

## The allocator

Each run left the allocator's history. The simulated allocator follows 372 of 373 to the last event, with
every block at the recorded address: 360 runs of jobs, six of them at the edge of the card with cached
memory given back and out-of-memory errors, and 12 of 13 whole scripts (below). The other one has CUDA
graphs, whose memory pools a history does not name (`tests/benchmarks/test_measured.py`).
"""
_JOBS = """\

## Plans of jobs

Jobs drawn at random (model of torchvision, timm, transformers, MONAI or segmentation-models-pytorch,
recipe, batch size; as [exactness](exactness.md) has them, from another seed) and 21 that were chosen were
planned, for an H100, which has the same processors and less memory, and then run for three steps on the
H200: {jobs} ran before the time was over, and were unseen. Several ran at a time; none ran out of memory.
Errors are (planned - measured) / measured.
"""
_JOBS += "\n" + "\n".join(_HEADINGS)
_MENDED = """\
What differed and was mended, so that the second row has seen these runs:

- vision transformers of transformers before 5.23 got an attention mask that they do not make (up to +47 %);
- before torch 2.13 a batch of outer products, as Adafactor has it, takes cuBLAS's workspace of 32 MiB (down
  to -14 %);
- cuDNN's batch norm in channels last has a workspace, by a rule that gives all 8,316 sizes that the library
  answered;
- fused Adagrad does not run on CUDA before torch 2.12, and is refused.

Two faults were of the measurement: at its default scale a gradient scaler skips the first steps, so that
the optimizer had no state yet; and a mask that masks nothing was dropped by models. 75 runs were measured
again without them, and stand in both rows.

What still differs, by what the library answered about 706 convolutions of eight of the jobs: asked with a
handle of the GPU, cuDNN picks the same engine as for a GPU that is only described, in all of them; in 127 the
engine then splits its work in another way and takes up to 8 MiB more or less. In 202, all of them 1 x 1, the
engine is built on cuBLASLt and adds what that names: up to 512 bytes in 95, up to 28 MiB in the others, and
none here. The errors of reserved memory above come from there, since a few MiB can move where blocks fit, and
from CUDA's choice of addresses, which matters before torch 2.12. In mixed precision the steps of two jobs had
infinite gradients whatever the scale.
"""
_SCRIPTS = """\

## Whole scripts

Thirteen training scripts of our own (`benchmarks/measured/scripts`): transformers' Trainer with evaluation
and checkpoints, Lightning, accelerate, own loops with resuming, generation, expandable segments, retries,
torch.compile, CUDA graphs, DDP and FSDP2 in a group of one. MiB:
"""
_PHASES = """
The Trainers were then planned without a GPU, from the very files (`planner estimate --gpu H200 --torch 2.11
--model trainer_gpt2.py:make`). What belongs to an evaluation, the Python lines of each allocation tell. MiB:
"""
_LEFT = """
Eight of them were run on an emulated H200 with the same torch: allocated within 0.5 %, reserved within 6.6 %;
accelerate and the U-Net have exactly the allocated bytes. The own loop of the ViT ended there when it went on
from its checkpoint: `map_location="cuda"` puts Adam's count of steps on the GPU, where it read as zero. That
has been mended: on an emulated H200 with torch 2.13 the loop now ends, with 3,730.3 MiB allocated and 4,198
reserved.

Of `tests/gpu` 95 tests ran before they were cut off, and 28 of them failed; which ones was not kept. By what
is said above of cuDNN and cuBLASLt, tests of the workspaces of convolutions cannot all pass on this card.

One card, one version of torch, three steps: what other cards and versions do is not measured. The
calibrations are [included](calibration.md#included-tables).
"""


if __name__ == "__main__":
    write_bytes(PAGE, page().encode())
