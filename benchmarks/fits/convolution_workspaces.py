"""The one constant of `MOST_TERMS` (planner/hardware/cudnn/published.py), bracketed by published peaks.

    python -m benchmarks.fits.convolution_workspaces

Reads the CNN runs of benchmarks/published/runs_torch26.csv. Peaks of MNASNet and MobileNetV2 on the RTX 3060
lie 13 to 19 % above the replay without workspaces at batches 200 to 323, and within 4 % from 377 on; on the
RTX 4060 none does. Both networks end in a pointwise convolution from 320 to 1,280 channels over 3 x 3
positions, at whose weight gradient the allocated peak stands, and what is missing there is the batch size
times its weights: cuDNN's engine that takes such gradients image by image. Where cuDNN 9.8 selects it,
batch x positions, the length of the sums, is below a bound (docs/cudnn.md); of 9.1 the runs show that bound.

A run has reach if it has such convolutions: the shortest of their sums. It is replayed with the workspace up
to its reach and without, and decides something if the two peaks differ by a tenth, more than replays of other
CNNs are off: it shows the workspace if the peak with it is nearer to the measured one. The bound lies between
the longest reach of a run that shows it and the shortest of one that does not; the constant is the middle.
Any share from 3.3 to 12 % in place of the tenth gives the same bracket. Prints

1. for each card the runs, and the bracket that they leave;
2. for each model of the RTX 3060 the bracket that the other models leave. Its runs' peaks with the middle of
   that go to convolution_workspaces.csv: the term's errors on runs that it was not fitted to.

What stays missing on either card, 0 to 100 MiB, is loaded lazily and lies outside the allocator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, set_up_bytes, trace_run
from benchmarks.rows import read_lines, write_lines
from planner.hardware.cudnn.published import PublishedWorkspaces, image_wise_terms
from planner.hardware.database import find_device
from planner.program import Capability, Convolution, ConvWorkspaceSource, WorkspaceAccount, Workspaces

LEFT_OUT = Path(__file__).with_name("convolution_workspaces.csv")
FITTED, OTHER = "RTX 3060", "RTX 4060"
DECISIVE = 0.1  # of the measured peak


@dataclass(slots=True)
class Reach:
    """Answers that convolutions take nothing, and keeps the lengths of sums that may be taken by image."""

    terms: list[int] = field(default_factory=list)
    name: str = "reach"

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        terms = image_wise_terms(convolution)
        self.terms += [] if terms is None else [terms]
        return Workspaces(0)

    def account(self, capability: Capability, sm_count: int) -> WorkspaceAccount:
        """Return that published runs answer."""
        return WorkspaceAccount(ConvWorkspaceSource.PUBLISHED)


@dataclass(frozen=True, slots=True)
class Run:
    """A published run with such convolutions, replayed without the workspace and with it."""

    line: int  # of runs_torch26.csv
    row: dict[str, str]
    reach: int
    measured_bytes: int  # the rise, and the memory before it
    without_bytes: int
    with_bytes: int

    @property
    def name(self) -> str:
        """Return model and optimizer."""
        return f"{self.row['model'].partition('(')[0]} {self.row['optimizer']}"

    @property
    def shows(self) -> bool | None:
        """Return whether the peak shows the workspace; None where it is nearly the same with it."""
        if abs(self.with_bytes - self.without_bytes) < DECISIVE * self.measured_bytes:
            return None
        missing, excess = self.measured_bytes - self.without_bytes, self.with_bytes - self.measured_bytes
        return abs(excess) < abs(missing)


Bracket = tuple[int | None, int | None]  # the longest reach with the workspace, the shortest without


def main() -> None:
    """Replay, print, write."""
    runs = list(read_runs(FITTED))
    for card, of_card in ((FITTED, runs), (OTHER, list(read_runs(OTHER)))):
        print_runs(card, of_card)
    lines = []
    for model in sorted({run.row["model"] for run in runs}):
        bracket = bracket_of([run for run in runs if run.row["model"] != model])
        terms = middle_of(bracket)
        print(f"{model.partition('(')[0]} left out: {bracket}, middle {terms}")
        for run in runs:
            if run.row["model"] == model:
                batch = int(run.row["batch"])
                peak = peak_bytes(run.row, terms) / MIB
                lines.append((run.line, run.name, batch, f"{peak:.2f}"))
    write_lines(LEFT_OUT, ("line", "run", "batch", "replayed_mib"), sorted(lines))


def bracket_of(runs: Sequence[Run]) -> Bracket:
    """Return the sums between which the bound lies."""
    shown = [run.reach for run in runs if run.shows]
    absent = [run.reach for run in runs if run.shows is False]
    return max(shown, default=None), min(absent, default=None)


def middle_of(bracket: Bracket) -> int:
    """Return the middle of a bracket; raises ValueError where the runs leave it open or contradict it."""
    longest, shortest = bracket
    if longest is None or shortest is None or longest >= shortest:
        raise ValueError(f"expected a bound between two sums, got {bracket}")
    return (longest + shortest) // 2


def print_runs(card: str, runs: Sequence[Run]) -> None:
    """Print the missing bytes of each run without and with the workspace, and the bracket."""
    print(f"\n{card}, {len(runs)} runs by reach: missing without the workspace, with it")
    for run in sorted(runs, key=lambda run: run.reach):
        parts = [run.measured_bytes - of for of in (run.without_bytes, run.with_bytes)]
        cells = ", ".join(f"{part / MIB:5.0f} MiB {part / run.measured_bytes:+6.1%}" for part in parts)
        verdict = {True: "shows it", False: "does not", None: "open"}[run.shows]
        print(f"  {run.reach:6,} {run.name:24} {run.row['batch']:>4} {cells}  {verdict}")
    print(f"the bound lies between {bracket_of(runs)}")


def read_runs(card: str) -> Iterator[Run]:
    """Yield the runs of a card that have such convolutions."""
    rows = [
        (line, row)
        for line, row in enumerate(read_lines(RUNS), start=2)
        if row["library"] == "torchvision" and card in row["gpu"]
    ]
    for line, row in rows:
        if not row["peak_nvml_delta_mib"] or row["oom_on_full_gpu"] == "True":
            continue
        reached, batch = Reach(), int(row["batch"])
        trace = trace_run(row, reached)
        if reached.terms:
            reach = min(reached.terms)
            measured_bytes = round(float(row["peak_nvml_delta_mib"]) * MIB) + set_up_bytes(trace, batch)
            without_bytes = replay_published(trace, batch).peak_reserved_bytes
            yield Run(line, row, reach, measured_bytes, without_bytes, peak_bytes(row, reach))


def peak_bytes(row: dict[str, str], most_terms: int) -> int:
    """Return the replayed peak with the workspace for sums of up to so many terms."""
    query = PublishedWorkspaces({find_device(row["gpu"]).target.capability: most_terms})
    return replay_published(trace_run(row, query), int(row["batch"])).peak_reserved_bytes


if __name__ == "__main__":
    main()
