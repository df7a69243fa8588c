"""The thresholds of `ImageWise` (planner/hardware/cudnn/published.py), fitted to published peaks.

    python -m benchmarks.fits.convolution_workspaces

Reads the CNN runs of benchmarks/published/runs_torch26.csv. Peaks of MNASNet and MobileNetV2 on the RTX 3060
lie 13 to 19 % above the replay without workspaces at batches 200 to 323, and within 4 % from 377 on; on the
RTX 4060 none does. Both networks end in a pointwise convolution from 320 to 1,280 channels over 3 x 3
positions, at whose weight gradient the allocated peak stands, and what is missing there is the batch size
times its weights. Runs are traced once with that workspace at every pointwise convolution; for each choice of
the three thresholds those that it rules out are removed again, and the robust sum of squares of the missing
bytes is compared (Huber's loss beyond 2 % of the peak). SciPy's `brute` walks the grid. Prints

1. the best thresholds, and along each of them, the others at their best, the range within which the loss is
   within a tenth of the least, which is the precision of the data;
2. the missing bytes of each run without the term and with it, in MiB and in per cent of the peak;
3. the same for the RTX 4060, where the term must not be;
4. for each model the thresholds that the runs of the other models alone give, and its runs' peaks with them,
   which it writes to convolution_workspaces.csv: the term's errors on runs that it was not fitted to.

What stays missing on either card, 0 to 100 MiB, is loaded lazily and lies outside the allocator.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from scipy.optimize import brute
from scipy.special import huber

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, job_of, set_up_bytes, trace_run
from planner.capture.models.registry import construct_model, find_constructor
from planner.hardware.cudnn.published import IMAGE_WISE, ImageWise, PublishedWorkspaces
from planner.hardware.database import find_device
from planner.program.events import Alloc, Free, Trace

WEIGHTS_KIB = (128, 256, 448, 576, 800, 1024, 1280, 1536, 1792)
POSITIONS = (4, 9, 36, 121, 484)
LIMITS_MIB = (0, 128, 256, 384, 448, 512, 576, 640, 768, 1024, 2048)
AXES = {"least weights, KiB": WEIGHTS_KIB, "most positions": POSITIONS, "limit, MiB": LIMITS_MIB}
LEFT_OUT = Path(__file__).with_name("convolution_workspaces.csv")
TOLERANCE = 0.02  # of a peak: the error of fragmentation without workspaces


@dataclass(frozen=True, slots=True)
class Run:
    """A published run and its trace with the workspace at every pointwise convolution."""

    line: int  # of runs_torch26.csv
    model: str
    name: str
    batch: int
    measured_bytes: int  # the rise, and the memory before it
    trace: Trace
    positions: dict[str, int]  # of the output, by module

    def missing_bytes(self, term: ImageWise) -> int:
        """Return measured less replayed."""
        return self.measured_bytes - replay_published(self._with(term), self.batch).peak_reserved_bytes

    def _with(self, term: ImageWise) -> Trace:
        removed = {
            event.block
            for event in self.trace.events
            if isinstance(event, Alloc) and event.may_fail and not self._takes(event, term)
        }
        events = (e for e in self.trace.events if not (isinstance(e, Alloc | Free) and e.block in removed))
        return replace(self.trace, events=tuple(events))

    def _takes(self, event: Alloc, term: ImageWise) -> bool:
        positions = self.positions[self.trace.sites[event.site].module]
        return term.workspace_bytes(self.batch, event.size_bytes // self.batch, positions) > 0


def main() -> None:
    """Fit and print."""
    runs = list(read_runs("RTX 3060"))
    cells = losses(runs)
    best = min(cells, key=cells.__getitem__)
    least = cells[best]
    print(f"{len(runs)} runs on the RTX 3060; loss {least:.1f}, without the term {cells[(0, 0, 0)]:.1f}")
    for number, (name, axis) in enumerate(AXES.items()):
        best_of = [min(loss for cell, loss in cells.items() if cell[number] == i) for i in range(len(axis))]
        good = [value for value, loss in zip(axis, best_of, strict=True) if loss <= 1.1 * least]
        table = ", ".join(f"{value}: {loss:.1f}" for value, loss in zip(axis, best_of, strict=True))
        print(f"{name}: best {axis[best[number]]}, as good from {min(good)} to {max(good)} ({table})")
    in_use = next(iter(IMAGE_WISE.values()))
    print(f"in use: {in_use}, loss {sum_of(runs, in_use):.1f}")
    for card in ("RTX 3060", "RTX 4060"):
        print_runs(card, runs if card == "RTX 3060" else list(read_runs(card)), in_use)
    write_left_out(runs)


def losses(runs: list[Run]) -> dict[tuple[int, ...], float]:
    """Return the loss at each place of the grid."""
    cells: dict[tuple[int, ...], float] = {}

    def loss(places: np.ndarray) -> float:
        cell = tuple(int(place) for place in places)
        if cell not in cells:
            cells[cell] = sum_of(runs, term_at(cell))
        return cells[cell]

    brute(loss, tuple(slice(0, len(axis), 1) for axis in AXES.values()), finish=None)
    return cells


def write_left_out(runs: list[Run]) -> None:
    """Write each model's peaks with the thresholds that the other models alone give."""
    lines = []
    for model in sorted({run.model for run in runs}):
        cells = losses([run for run in runs if run.model != model])
        term = term_at(min(cells, key=cells.__getitem__))
        print(f"{model} left out: {term}")
        for run in runs:
            if run.model == model:
                peak = (run.measured_bytes - run.missing_bytes(term)) / MIB
                lines.append((run.line, run.name, run.batch, f"{peak:.2f}"))
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("line", "run", "batch", "replayed_mib"))
        writer.writerows(sorted(lines))


def term_at(cell: tuple[int, ...]) -> ImageWise:
    """Return the term at a place of the grid."""
    weights, positions, limit = (axis[place] for axis, place in zip(AXES.values(), cell, strict=True))
    return ImageWise(weights * 1024, positions, limit * MIB)


def sum_of(runs: list[Run], term: ImageWise) -> float:
    """Return the loss of one term."""
    return float(sum(huber(1, run.missing_bytes(term) / run.measured_bytes / TOLERANCE) for run in runs))


def print_runs(card: str, runs: list[Run], term: ImageWise) -> None:
    """Print the missing bytes of each run, without and with the term."""
    never = ImageWise(0, 0, 0)
    print(f"\n{card}: missing without the term, with it")
    for run in sorted(runs, key=lambda run: (run.name, run.batch)):
        parts = [run.missing_bytes(which) for which in (never, term)]
        cells = ", ".join(f"{part / MIB:5.0f} MiB {part / run.measured_bytes:+6.1%}" for part in parts)
        print(f"  {run.name:24} {run.batch:4} {cells}")


def read_runs(card: str) -> Iterator[Run]:
    """Yield the runs of a card with pointwise convolutions in them, traced anew."""
    with RUNS.open(newline="") as file:
        rows = [
            (line, row)
            for line, row in enumerate(csv.DictReader(file), start=2)
            if row["library"] == "torchvision" and card in row["gpu"]
        ]
    everywhere = ImageWise(0, sys.maxsize, sys.maxsize)
    for line, row in rows:
        if not row["peak_nvml_delta_mib"] or row["oom_on_full_gpu"] == "True":
            continue
        capability = find_device(row["gpu"]).target.capability
        trace = trace_run(row, PublishedWorkspaces({capability: everywhere}))
        if any(isinstance(event, Alloc) and event.may_fail for event in trace.events):
            batch = int(row["batch"])
            measured = round(float(row["peak_nvml_delta_mib"]) * MIB) + set_up_bytes(trace, batch)
            name = f"{row['model'].partition('(')[0]} {row['optimizer']}"
            yield Run(line, row["model"], name, batch, measured, trace, output_positions(row))


def output_positions(row: dict[str, str]) -> dict[str, int]:
    """Return height times width of each module's output, by the module's name."""
    import torch

    job = job_of(row)
    model = construct_model(job, find_constructor(job))
    positions: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):

            def note(_: object, __: object, out: torch.Tensor, name: str = name) -> None:
                positions[name] = out.shape[2] * out.shape[3]

            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.empty(2, *job.inputs[0].shape, device="meta"))
    return positions


if __name__ == "__main__":
    main()
