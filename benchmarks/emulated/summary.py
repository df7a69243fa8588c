"""Write the results of a differential campaign: the number of identical jobs, and the causes of the others.

    python -m benchmarks.emulated.summary [FILE.csv]

Writes the Markdown beside the CSV file that `differential.py` wrote.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.emulated.rows import ALLOCATOR, IDENTICAL, Row, read_rows

HERE = Path(__file__).parent
SHARES = (0.001, 0.005, 0.02)


def report(rows: Sequence[Row]) -> str:
    """Return the Markdown of these rows."""
    ran = [row for row in rows if not row.failure]
    versions = ", ".join(sorted({row.versions for row in ran}))
    parts = [
        "# The static planner beside emulated runs",
        "Written by `python -m benchmarks.emulated.summary` from the CSV beside it. Each row is a job that "
        "`jobs.py` drew: model, recipe, batch size and GPU. It is trained for three steps on an emulated "
        "GPU, with the CUDA build of PyTorch, and traced and replayed by the static planner, which queries "
        "the same cuDNN for the workspaces of convolutions. Both run the loop of "
        "`planner/capture/loop/training_loop.py`. "
        f"Emulated is not measured. Versions: {versions}; addresses of new segments fall.",
        "\n".join(_counts(rows, ran)),
        "## Causes of the first difference",
        "Events are the same if every block is allocated and freed in the same order with the same "
        "size. A cause names the operator of the first difference; a job may have several.",
        "\n".join(_causes(ran)),
        "## All causes, by the number of jobs in which they occur",
        "\n".join(_all_causes(ran)),
    ]
    failures = [row for row in rows if row.failure]
    if failures:
        parts += ["## Jobs that did not run on one side", "\n".join(_failures(failures))]
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[Row], ran: Sequence[Row]) -> Iterable[str]:
    both = [row for row in ran if row.allocated_is_same and row.reserved_is_same]
    yield "| of the jobs | number |"
    yield "|---|--:|"
    yield f"| drawn | {len(rows)} |"
    yield f"| ran on both sides | {len(ran)} |"
    yield f"| all events the same | {sum(row.cause in (IDENTICAL, ALLOCATOR) for row in ran)} |"
    yield f"| allocated identical to the byte | {sum(row.allocated_is_same for row in ran)} |"
    yield f"| reserved identical to the byte | {sum(row.reserved_is_same for row in ran)} |"
    yield f"| both identical to the byte | {len(both)} |"
    for share in SHARES:
        yield f"| both within {share:.1%} | {sum(row.error <= share for row in ran)} |"
    yield f"| the allocator's history replayed to the end | {sum(not row.allocator for row in ran)} |"


def _causes(ran: Sequence[Row]) -> Iterable[str]:
    yield "| cause | jobs | both identical | largest error | example |"
    yield "|---|--:|--:|--:|---|"
    by_cause: dict[str, list[Row]] = {}
    for row in ran:
        by_cause.setdefault(row.cause, []).append(row)
    for cause, group in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        same = sum(row.allocated_is_same and row.reserved_is_same for row in group)
        worst = max(group, key=lambda row: row.error)
        example = "" if cause == IDENTICAL else _example(worst)
        yield f"| {cause} | {len(group)} | {same} | {worst.error:.2%} | {example} |"


def _all_causes(ran: Sequence[Row]) -> Iterable[str]:
    yield "| cause | jobs | blocks |"
    yield "|---|--:|--:|"
    jobs: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for row in ran:
        for part in filter(None, row.causes.split("; ")):
            cause, _, count = part.rpartition(" (")
            jobs[cause] = jobs.get(cause, 0) + 1
            blocks[cause] = blocks.get(cause, 0) + int(count.rstrip(")"))
    for cause, number in sorted(jobs.items(), key=lambda item: (-item[1], -blocks[item[0]])):
        yield f"| {cause} | {number} | {blocks[cause]:,} |"


def _failures(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        yield f"- {_job(row)}: {row.cause}: {row.failure}"


def _example(row: Row) -> str:
    return f"{_job(row)}: {row.place}; {row.what}" if row.place else _job(row)


def _job(row: Row) -> str:
    return f"{row.number}, `{row.model}` at batch {row.batch} on {row.gpu} `{row.options}`"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "differential.csv")
    file = parser.parse_args().file
    file.with_suffix(".md").write_text(report(read_rows(file, Row)), encoding="utf-8")


if __name__ == "__main__":
    main()
