"""Write the results of `largest.py`: how many answers the emulated runs bear out, by GPU, and why not others.

    python -m benchmarks.emulated.largest_summary [FILE.csv]

Writes the Markdown beside the CSV file.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.emulated.largest import CONFIDENT, DIES_CONFIDENT, LEFT_OUT, RIGHT, LargestRow
from benchmarks.emulated.rows import read_rows

HERE = Path(__file__).parent


def report(rows: Sequence[LargestRow]) -> str:
    """Return the Markdown of these rows."""
    ran = [row for row in rows if row.verdict != LEFT_OUT]
    versions = ", ".join(sorted({row.versions for row in ran}))
    with_share = sum(row.share > 0 for row in ran)
    parts = [
        "# Largest batch sizes beside emulated runs",
        "Written by `python -m benchmarks.emulated.largest_summary` from the CSV beside it. Each row is a "
        "job that `jobs.py` drew. The planner answers at confidence 0.5 and at 0.99, with the cuDNN that the "
        "runs use; the job is then trained for three steps on the emulated GPU at the answer and at the next "
        "batch size, and at the answer of 0.99. `largest.py` states what the allocator may take. "
        f"Emulated is not measured. Versions: {versions}; addresses of new segments fall.",
        "\n".join(_counts(rows, ran)),
        f"For {with_share} jobs the planner leaves a share of the need beside the context at confidence 0.5 "
        "as well, which is the location of published residuals of their kind (2 % in mixed precision with "
        "convolutions, 0.4 % with attention); the emulated GPU is smaller by as much.",
        "## By GPU",
        "\n".join(_by_gpu(ran)),
    ]
    wrong = [row for row in ran if row.verdict != RIGHT]
    if wrong:
        parts += ["## Wrong answers, with the first event that differs", "\n".join(map(_wrong, wrong))]
    left_out = [row for row in rows if row.verdict == LEFT_OUT]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {_job(row)}: {row.failure}" for row in left_out)]
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[LargestRow], ran: Sequence[LargestRow]) -> Iterable[str]:
    lives = [row for row in ran if row.at_largest != "dies"]
    exact = [row for row in lives if row.at_next == "dies"]
    yield "| of the jobs | number |"
    yield "|---|--:|"
    yield f"| drawn | {len(rows)} |"
    yield f"| ran | {len(ran)} |"
    yield f"| live at the answer of confidence 0.5 | {len(lives)} |"
    yield f"| live there and die at the next batch size | {len(exact)} |"
    retried = sum(row.at_largest == "retries" for row in exact)
    yield f"| of these, with retries at the answer | {retried} |"
    died = sum(row.at_confident == "dies" for row in ran)
    yield f"| die at the answer of confidence {CONFIDENT} | {died} |"


def _by_gpu(ran: Sequence[LargestRow]) -> Iterable[str]:
    yield "| GPU | jobs | right | die at 0.99 |"
    yield "|---|--:|--:|--:|"
    for gpu in sorted({row.gpu for row in ran}):
        group = [row for row in ran if row.gpu == gpu]
        right = sum(row.verdict == RIGHT for row in group)
        yield f"| {gpu} | {len(group)} | {right} | {sum(row.verdict == DIES_CONFIDENT for row in group)} |"


def _wrong(row: LargestRow) -> str:
    runs = f"{row.largest} {row.at_largest}, {row.largest + 1} {row.at_next}"
    runs += f", at {CONFIDENT} {row.confident} {row.at_confident}"
    return f"- {_job(row)}: {row.verdict} ({runs}): {row.cause}; {row.place}; {row.what}"


def _job(row: LargestRow) -> str:
    return f"{row.number}, `{row.model}` on {row.gpu} `{row.options}`"


def main() -> None:
    """Write the file."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "largest.csv")
    file = parser.parse_args().file
    file.with_suffix(".md").write_text(report(read_rows(file, LargestRow)), encoding="utf-8")


if __name__ == "__main__":
    main()
