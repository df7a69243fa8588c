"""Regenerate the accuracy report: docs/accuracy.md, its pictures, and the residuals that the planner uses.

    python -m benchmarks.accuracy                        # everything anew, some minutes on two cores
    python -m benchmarks.accuracy --only "xMem's CNNs"   # one source anew, the rest from accuracy.csv
    python -m benchmarks.accuracy --from-csv             # report and pictures from accuracy.csv, seconds

Every case with a known truth that the repository has is traced and replayed, with each term of the model
and with each of them left out; benchmarks/accuracy/accuracy.csv holds the results. The estimates of the
closed formula, torchinfo and MemTracker for xMem's runs are read from the table, since no change of the
planner changes them; --peers runs them again, which takes longer than all the rest. Those of torch-preflight
stand in preflight.csv (preflight.py), the plans of Liger's kernels by its releases in liger_kernels.csv
(liger_releases.py). Needs the extras `all` and `optimizers`.
"""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from benchmarks.accuracy import rows_points as points, rows_published as published
from benchmarks.accuracy.peers import peer_estimates
from benchmarks.accuracy.rows import PEERS, Row, read_rows, write_rows
from benchmarks.accuracy.rows_calibrated import CALIBRATED, calibrated_rows
from benchmarks.accuracy.rows_operators import KERNELS, LIGER, kernel_rows, operator_rows
from benchmarks.accuracy.torchtitan import TORCHTITAN, torchtitan_rows
from benchmarks.accuracy.torchtune import TORCHTUNE, torchtune_rows
from planner.jobs import Job

XMEM = (published.CNNS, published.TRANSFORMERS)
SEEDS = {
    points.NOTEBOOK: points.notebook_rows,
    points.THREAD: points.thread_rows,
    points.T4: points.t4_rows,
    LIGER: operator_rows,
    KERNELS: kernel_rows,
    TORCHTUNE: torchtune_rows,
    TORCHTITAN: torchtitan_rows,
    CALIBRATED: calibrated_rows,
}
SOURCES = (*XMEM, published.TIMM, *SEEDS, "points")
Task = published.Published | str
PeerEstimates = dict[tuple[str, str, str], dict[str, str]]  # other estimators' figures, by a row's key


def no_estimates(job: Job, batch: int) -> dict[str, float]:
    """Return no estimates, where those of the table are used."""
    return {}


def rows_of(task: Task, previous: PeerEstimates | None) -> list[Row]:
    """Return the rows of a task, other estimators' answers from `previous`, or computed if that is None."""
    if task == "points":
        return points.point_rows()
    if isinstance(task, str):
        return SEEDS[task]()
    if task.kind == published.TIMM:
        return published.timm_rows(task, no_estimates)
    if task.kind == published.TRANSFORMERS:
        from planner.capture.models.registry import import_transformers

        import_transformers()
    if previous is None:
        return published.xmem_rows(task, peer_estimates)
    rows = published.xmem_rows(task, no_estimates)
    return [replace(row, estimates={**row.estimates, **previous.get(row.key, {})}) for row in rows]


def tasks_of(only: str | None) -> list[Task]:
    """List the tasks, the longest first."""
    tasks: list[Task] = []
    for source in SOURCES:
        if only not in (None, source):
            continue
        if source in XMEM:
            tasks += published.xmem_tasks(source)
        elif source == published.TIMM:
            tasks += published.timm_tasks()
        else:
            tasks.append(source)
    return tasks


def gather(only: str | None, before: list[Row], jobs: int, previous: PeerEstimates | None) -> list[Row]:
    """Return all rows: those of the requested sources anew, the others as in the table."""
    tasks = tasks_of(only)
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs) as pool:
        for number, task_rows in enumerate(pool.map(partial(rows_of, previous=previous), tasks), start=1):
            rows += task_rows
            if sys.stderr.isatty() or number % 20 == 0:
                print(f"{number}/{len(tasks)}", file=sys.stderr, flush=True)
    new = {row.key for row in rows}
    others = [] if only is None else [row for row in before if row.key not in new]
    return sorted([*others, *rows], key=_place)


def _place(row: Row) -> tuple[int, str]:
    """Order sources as in the report, and the rows of one by layer."""
    order = (
        published.CNNS, published.TRANSFORMERS, published.CAPS, published.CARD, published.TIMM,
        CALIBRATED, points.NOTEBOOK, points.THREAD, points.VIT_L, points.BERT,
        points.T4, LIGER, KERNELS, TORCHTUNE, TORCHTITAN,
    )  # fmt: skip
    return order.index(row.source), row.layer


def compare_tables(before: Iterable[Row], after: Iterable[Row]) -> str:
    """Count the answers of the planner that differ from those of the table before."""
    old = {row.key: row.estimates.get("planner") for row in before}
    moved = [row for row in after if old.get(row.key) not in (None, row.estimates.get("planner"))]
    shown = ", ".join(f"{row.case}: {old[row.key]} -> {row.estimates.get('planner')}" for row in moved[:5])
    return f"{len(moved)} answers moved{': ' if moved else ''}{shown}"


def main() -> None:
    """Gather, write, report."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", choices=SOURCES, help="this source anew, the others from the table")
    parser.add_argument("--from-csv", action="store_true", help="trace nothing; report what the table holds")
    parser.add_argument("--peers", action="store_true", help="run the other estimators again")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 where left out")
    options = parser.parse_args()
    before = read_rows()
    rows = before
    if not options.from_csv:
        previous = {
            row.key: {name: row.estimates[name] for name in PEERS if name in row.estimates} for row in before
        }
        rows = gather(options.only, before, options.jobs, None if options.peers else previous)
        write_rows(rows)
        rows = read_rows()
        print(compare_tables(before, rows))
    if not rows:
        parser.error("accuracy.csv is not there: remove --from-csv")
    from benchmarks.accuracy.report import write_report

    print(write_report(rows))


if __name__ == "__main__":
    main()
