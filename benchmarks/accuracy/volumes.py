"""Three-dimensional networks planned without a cuDNN, beside what cuDNN requests: both computed."""

from collections.abc import Iterator, Sequence
from statistics import NormalDist

from benchmarks.accuracy.kinds import deviation_of
from benchmarks.emulated.volumes import GPU, VOLUMES, VolumesRow
from benchmarks.rows import read_rows
from planner.hardware.likeness import Departure, Likeness, Margins, margins_of
from planner.hardware.residuals import Doubt

CONFIDENCE = 0.99
TEXT = """\
MONAI's networks, torchvision's video models and networks of nnU-Net's plans, in training on an {gpu},
planned by stored answers and without any answer, beside the same plans by cuDNN 9.20: all are computed.
`stored` means that all convolutions are among the stored ones, `similar` that some are not. "At most" is the
upper end of the planned peak at confidence {confidence}. The doubts about similar volumes and about unknown
workspaces come from these rows, which therefore lie within them; they show how wide such an answer has to be.
Peaks in MiB.
"""
HEAD = (
    *("network", "sample", "batch", "precision", "answers", "by cuDNN 9.20", "by stored answers", "at most"),
    *("without any", "at most", "both cover"),
)


def volumes_lines() -> Iterator[str]:
    """Yield the section of the report."""
    rows = read_rows(VOLUMES, VolumesRow)
    yield "## Three-dimensional networks without an installed cuDNN\n"
    yield TEXT.format(gpu=GPU, confidence=CONFIDENCE)
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---|--:|---|---|--:|--:|--:|--:|--:|---|"
    yield from map(_line, rows)
    yield ""
    yield from _summary(rows)


def margins_of_row(row: VolumesRow, doubt: Doubt) -> Margins:
    """Return the margins of a plan of this row's job with one doubt about its convolutions."""
    departures = [Departure("with three-dimensional convolutions"), Departure("", doubt)]
    return margins_of(Likeness(departures=tuple(departures)))


def bounds_mib(row: VolumesRow) -> tuple[float, float]:
    """Return the upper ends of the peaks by stored answers, and without any."""
    doubt = Doubt.STORED if row.convolutions == Doubt.STORED.value else Doubt.VOLUMES
    stored, uncounted = (
        margins_of_row(row, each).peak_ratio(CONFIDENCE) for each in (doubt, Doubt.UNCOUNTED)
    )
    return stored * row.stored_peak_mib, uncounted * row.uncounted_peak_mib


def _line(row: VolumesRow) -> str:
    stored, uncounted = bounds_mib(row)
    covers = "yes" if row.library_peak_mib <= min(stored, uncounted) else "**no**"
    cells = (
        *(
            row.model.replace("tests/programs/nnunet/", ""),
            row.input,
            row.batch,
            row.precision,
        ),
        *(row.convolutions, f"{row.library_peak_mib:,}", f"{row.stored_peak_mib:,}", f"{stored:,.0f}"),
        *(f"{row.uncounted_peak_mib:,}", f"{uncounted:,.0f}", covers),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _summary(rows: Sequence[VolumesRow]) -> Iterator[str]:
    for kind in ("stored", "similar"):
        of_kind = [row for row in rows if row.convolutions == kind]
        others = [row.library_peak_mib / row.stored_peak_mib - 1 for row in of_kind]
        others = [difference for difference in others if difference]
        beside = f"; the others differ by {min(others):+.1%} to {max(others):+.1%}" if others else ""
        count = len(of_kind) - len(others)
        yield f"By {kind} answers the peak is the library's in {count} of {len(of_kind)}{beside}.\n"
    similar = [
        (row.model, row.library_peak_mib / row.stored_peak_mib)
        for row in rows
        if row.convolutions == "similar"
    ]
    uncounted = [(row.model, row.library_peak_mib / row.uncounted_peak_mib) for row in rows]
    yield (
        "By the deviation of the other networks alone, without what else widens an answer, "
        f"{_covered(similar)} of {len(similar)} peaks by similar answers and {_covered(uncounted)} of "
        f"{len(uncounted)} without any lie within.\n"
    )


def _covered(ratios: Sequence[tuple[str, float]]) -> int:
    """Return how many ratios the other networks' deviation covers at the confidence."""
    z = NormalDist().inv_cdf(CONFIDENCE)
    return sum(
        ratio <= 1 + z * deviation_of([other for name, other in ratios if name != model])
        for model, ratio in ratios
    )
