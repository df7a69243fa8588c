"""Regenerates the accuracy report: docs/accuracy.md, its pictures, and the residuals that the planner uses.

    python -m benchmarks.accuracy                        # everything anew, some minutes on two cores
    python -m benchmarks.accuracy --only "xMem's CNNs"   # one source anew, the rest from accuracy.csv
    python -m benchmarks.accuracy --from-csv             # report and pictures from accuracy.csv, seconds

Every case with a known truth that the repository has is traced and replayed, with each term of the model
and with each of them left out; what comes out stands in benchmarks/accuracy/accuracy.csv. What the closed
formula, torchinfo and MemTracker say of xMem's runs is taken from the table, since no change of the planner
changes it; --peers asks them again, which takes longer than all the rest. Needs the extra `all`.
"""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from benchmarks.accuracy import rows_points as points, rows_published as published
from benchmarks.accuracy.rows import PEERS, Row, read_rows, write_rows
from benchmarks.accuracy.rows_calibrated import CALIBRATED, calibrated_rows
from planner.allocator.config import AllocatorConfig
from planner.hardware.budget import make_budget
from planner.hardware.device import MIB, unlimited_device
from planner.jobs import Job
from planner.planning.estimators.methods import Method

XMEM = (published.CNNS, published.TRANSFORMERS)
SEEDS = {
    points.NOTEBOOK: points.notebook_rows,
    points.THREAD: points.thread_rows,
    points.T4: points.t4_rows,
    CALIBRATED: calibrated_rows,
}
SOURCES = (*XMEM, published.TIMM, *SEEDS, "points")
Task = published.Published | str
Known = dict[tuple[str, str, str], dict[str, str]]  # what other estimators said, by a row's key


def ask(job: Job, batch: int) -> dict[str, float]:
    """The closed formula, torchinfo and MemTracker, in MiB; those that fail on the model are left out."""
    from planner.errors import PlannerError
    from planner.planning.estimators.run import open_builder, run_estimator

    budget = make_budget(unlimited_device(), 0.5, AllocatorConfig())
    build = open_builder(job, None, lambda line: None)
    said = {}
    for name in PEERS:
        try:
            answer = run_estimator(Method(name), job, batch, budget, build, lambda line: None)
        except PlannerError:
            continue
        said[name] = answer.total_bytes / MIB
    return said


def ask_nobody(job: Job, batch: int) -> dict[str, float]:
    """In place of `ask` where the answers are known."""
    return {}


def take(task: Task, known: Known | None) -> list[Row]:
    """The rows of a task; other estimators' answers from `known`, or asked for where that is None."""
    if task == "points":
        return points.point_rows()
    if isinstance(task, str):
        return SEEDS[task]()
    if task.kind == published.TIMM:
        return published.timm_rows(task, ask_nobody)
    if task.kind == published.TRANSFORMERS:
        from planner.capture.models.registry import import_transformers

        import_transformers()
    rows = published.xmem_rows(task, ask if known is None else ask_nobody)
    return (
        rows if known is None else [replace(row, said={**row.said, **known.get(row.key, {})}) for row in rows]
    )


def tasks_of(only: str | None) -> list[Task]:
    """What is to be done, the longest first."""
    found: list[Task] = []
    for source in SOURCES:
        if only not in (None, source):
            continue
        if source in XMEM:
            found += published.xmem_tasks(source)
        elif source == published.TIMM:
            found += published.timm_tasks()
        else:
            found.append(source)
    return found


def gather(only: str | None, before: list[Row], jobs: int, known: Known | None) -> list[Row]:
    """All rows: of the sources asked for anew, of the others as they stood."""
    tasks = tasks_of(only)
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs) as pool:
        for number, found in enumerate(pool.map(partial(take, known=known), tasks), start=1):
            rows += found
            if sys.stderr.isatty() or number % 20 == 0:
                print(f"{number}/{len(tasks)}", file=sys.stderr, flush=True)
    new = {row.key for row in rows}
    kept = [] if only is None else [row for row in before if row.key not in new]
    return sorted([*kept, *rows], key=_place)


def _place(row: Row) -> tuple[int, str]:
    """Sources in the order of the report; within one, rows as they came."""
    order = (
        published.CNNS, published.TRANSFORMERS, published.CAPS, published.CARD, published.TIMM,
        CALIBRATED, points.NOTEBOOK, points.THREAD, points.VIT_L, points.BERT,
        points.T4,
    )  # fmt: skip
    return order.index(row.source), row.layer


def compare_tables(before: Iterable[Row], after: Iterable[Row]) -> str:
    """How many answers of the planner moved since the table was last written."""
    old = {row.key: row.said.get("planner") for row in before}
    moved = [row for row in after if old.get(row.key) not in (None, row.said.get("planner"))]
    shown = ", ".join(f"{row.case}: {old[row.key]} -> {row.said.get('planner')}" for row in moved[:5])
    return f"{len(moved)} answers moved{': ' if moved else ''}{shown}"


def main() -> None:
    """Gather, write, report."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", choices=SOURCES, help="this source anew, the others from the table")
    parser.add_argument("--from-csv", action="store_true", help="trace nothing; report what the table holds")
    parser.add_argument("--peers", action="store_true", help="ask the other estimators again")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 where left out")
    options = parser.parse_args()
    before = read_rows()
    rows = before
    if not options.from_csv:
        known = {row.key: {who: row.said[who] for who in PEERS if who in row.said} for row in before}
        rows = gather(options.only, before, options.jobs, None if options.peers else known)
        write_rows(rows)
        print(compare_tables(before, rows))
    if not rows:
        parser.error("accuracy.csv is not there: leave --from-csv away")
    from benchmarks.accuracy.report import write_report

    print(write_report(rows))


if __name__ == "__main__":
    main()
