"""Networks as people write them, planned without a cuDNN, beside what cuDNN requests: both computed."""

from collections.abc import Callable, Iterator

from benchmarks.emulated.own_cnns import HARDLY_FAR, OWN_CNNS, OwnCnnRow
from benchmarks.rows import read_rows
from planner.hardware.likeness import MOSTLY, Departure, Likeness, departures_by_share, margins_of
from planner.hardware.residuals import Doubt

CONFIDENCE = 0.99
TEXT = """\
Classifiers, autoencoders, GANs, U-Nets and other networks of `benchmarks/emulated/own_networks.py`, with
drawn widths, depths, kernels, sizes, batches and GPUs, planned by stored answers beside the same plans by
cuDNN 9.20: all are computed. Networks of the same kinds with usual widths and sizes are among the stored
ones; answers for common models at other sizes, restorers and detectors were stored after these rows. A
convolution is far from the one whose answer it borrows if channels and extents differ by more than a factor
of 4 in all. `need` is the least memory in which the run does not fail, `peak` what it reserves where nothing
limits it. The doubts about similar and far convolutions come from these rows, which therefore mostly lie
within them.
"""
HEAD = (
    "convolutions | networks | same need | need by cuDNN over stored | peak by cuDNN over stored | "
    "peak covered"
)
GROUPS: tuple[tuple[str, Callable[[OwnCnnRow], bool]], ...] = (
    ("all stored", lambda row: row.convolutions == "stored"),
    ("some borrow, hardly any from far", lambda row: row.is_near and row.convolutions == "similar"),
    ("20 to 50 % from far", lambda row: HARDLY_FAR <= row.far < MOSTLY),
    ("most from far", lambda row: row.far >= MOSTLY),
    ("some without an answer", lambda row: row.far < HARDLY_FAR and not row.is_near),
)


def own_cnns_lines() -> Iterator[str]:
    """Yield the section of the report."""
    rows = read_rows(OWN_CNNS, OwnCnnRow)
    yield "## Networks as people write them, without an installed cuDNN\n"
    yield TEXT
    yield f"| {HEAD} |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, belongs in GROUPS:
        of_group = [row for row in rows if belongs(row)]
        needs = sorted(row.library_mib / row.stored_mib for row in of_group)
        peaks = sorted(row.library_peak_mib / row.stored_peak_mib for row in of_group)
        same = sum(abs(need - 1) < 0.002 for need in needs)
        covered = sum(map(is_covered, of_group))
        ranges = (f"{values[0]:.2f} to {values[-1]:.2f}" for values in (needs, peaks))
        yield f"| {name} | {len(of_group)} | {same} | {' | '.join(ranges)} | {covered} |"
    yield ""
    yield f"Same: within 0.2 %. Covered: by the upper end of the planned peak at confidence {CONFIDENCE}.\n"


def is_covered(row: OwnCnnRow) -> bool:
    """Return whether the planned peak's upper end is at least the peak by the library."""
    source = Doubt.STORED if row.convolutions == Doubt.STORED.value else Doubt.SIMILAR
    departures = (Departure("", source), *departures_by_share(row.uncounted, row.far, row.part))
    ratio = margins_of(Likeness(departures=departures)).peak_ratio(CONFIDENCE)
    return row.library_peak_mib <= ratio * row.stored_peak_mib
