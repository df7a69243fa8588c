"""Causes of the worst cases of the accuracy report, as far as is known."""

from collections.abc import Sequence

from benchmarks.accuracy.rows import DIES, LIVES, Row
from benchmarks.accuracy.rows_published import CAPS, CNNS, TRANSFORMERS, pairs
from benchmarks.published.timm_brackets import OTHER_OUTSIDE_MIB, OUTSIDE_MIB, TOTAL_MIB

SHORT_TEXTS = 10  # samples; in so small a batch the longest of the texts is often shorter than 128 tokens
NEAR_END = 0.93  # of what torch sees of a card
FULL_MIB = {"RTX 3060 12GB": 12_037, "RTX 4060 8GB": 7_933}
LARGE = 0.02


def run_of(row: Row) -> str:
    """Name the run behind a row, as its outcomes do."""
    return row.case.partition(" under ")[0]


def _job_of(row: Row) -> str:
    """Name the job of a run, without campaign and line."""
    return row.case.partition(" (")[0] + row.gpu


def cause_of_peak(row: Row, rows: Sequence[Row]) -> str:
    """Return the cause of an error of a peak."""
    error = row.error("planner") or 0.0
    if row.note:
        return row.note
    if row.source not in (CNNS, TRANSFORMERS):
        return "" if abs(error) < LARGE else "not known"
    same = [other for other in rows if other.layer == row.layer and _job_of(other) == _job_of(row)]
    figures = sorted({float(other.truth) for other in same})
    if figures[-1] / figures[0] > 1 + LARGE:
        peaks = ", ".join(f"{figure:,.0f}" for figure in figures)
        return f"repetitions of this job differ: {peaks} MiB"
    if float(row.truth) > NEAR_END * FULL_MIB[row.gpu]:
        return "at the end of the card, where cached segments are released and cuDNN takes less"
    lived = [
        other.limit_mib
        for other in rows
        if other.source == CAPS and run_of(other) == row.case and other.truth == LIVES and other.limit_mib
    ]
    below = f"; it lives under a cap of {min(lived):,.0f}" if lived and min(lived) < float(row.truth) else ""
    if row.source == CNNS:
        if error < 0:
            return f"workspaces of cuDNN's first plans, passing{below}"
        return "fewer or smaller segments than in the replay"
    if error < 0 and row.batch <= SHORT_TEXTS:
        return f"inferred: texts below 128 tokens, each new length takes segments of its own{below}"
    return f"segments fall otherwise, by lengths of texts{below}"


def cause_of_outcome(row: Row, rows: Sequence[Row]) -> str:
    """Return the cause of a wrong outcome under a cap."""
    same = [other for other in rows if other.source == CAPS and run_of(other) == run_of(row)]
    job = [other for other in rows if other.source == CAPS and _job_of(other) == _job_of(row)]
    for outcomes, whose in ((same, "this run"), (job, "a repetition")):
        opposite = DIES if row.truth == LIVES else LIVES
        limits = [other.limit_mib or 0 for other in outcomes if other.truth == opposite]
        contradicts = (
            any(limit >= (row.limit_mib or 0) for limit in limits)
            if row.truth == LIVES
            else any(limit <= (row.limit_mib or 0) for limit in limits)
        )
        if contradicts:
            return f"{whose} {opposite} under a cap that contradicts it"
    if row.family == "transformer" and row.truth == LIVES:
        return "inferred: texts below 128 tokens take less than the replay's"
    if row.family == "transformer":
        return "segments of other lengths of texts stand in the way"
    return "a workspace for which cuDNN has no smaller plan, or segments that fall otherwise"


def cause_of_bracket(trained: Row, failed: Row, rows: Sequence[Row]) -> str:
    """Return the cause of a miss of one of timm's brackets."""
    if trained.needed_mib is None or failed.needed_mib is None:
        return "no trace"
    for outside in OTHER_OUTSIDE_MIB:
        if trained.needed_mib <= TOTAL_MIB - outside < failed.needed_mib:
            return "inside with less outside the allocator"
    if trained.family == "tresnet":
        return "another model: timm 0.6 ran it with inplace_abn, which keeps less for the backward pass"
    if trained.is_right("planner"):
        return "more memory is taken than modelled: workspaces of convolutions with cudnn.benchmark on"
    return "less memory is taken than modelled: not known"


def missed_brackets(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the misses by cause, each with the memory that we need over the memory there is, less 1."""
    limit = TOTAL_MIB - OUTSIDE_MIB
    by_cause: dict[str, list[str]] = {}
    for trained, failed in pairs(list(rows)):
        if trained.is_right("planner") and failed.is_right("planner"):
            continue
        wrong = failed if trained.is_right("planner") else trained
        off = "" if wrong.needed_mib is None else f" {wrong.needed_mib / limit - 1:+.1%}"
        name = wrong.case.rpartition(" ")[0]
        by_cause.setdefault(cause_of_bracket(trained, failed, rows), []).append(f"{name}{off}")
    return dict(sorted(by_cause.items(), key=lambda item: -len(item[1])))
