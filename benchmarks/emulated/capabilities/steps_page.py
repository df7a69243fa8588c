"""Write the table of scripts in docs/training_steps.md, from the rows of `user_files.csv`.

    python -m benchmarks.emulated.capabilities.steps_page [--largest]

With --largest, first find the largest batch of each script without a row in `user_files_largest.csv`, with
`planner max-batch` on an RTX 3060.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.emulated.capabilities.case import Case
from benchmarks.emulated.capabilities.commands import FILES
from benchmarks.emulated.capabilities.registry import HERE, load_capability
from benchmarks.emulated.probe_client import ROOT
from benchmarks.emulated.rows import Row, add_row
from benchmarks.rows import read_rows
from planner._support.atomic_write import write_bytes
from planner.hardware.device import MIB

PAGE = ROOT / "docs" / "training_steps.md"
LARGEST = HERE / "user_files_largest.csv"
GPU = "RTX 3060"
MOST_SECONDS = 300  # for one answer; a script that takes longer gets none
START, END = "<!-- table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True, slots=True)
class Largest:
    """The answer of `planner max-batch` for a script."""

    number: int
    batch: int
    seconds: float  # of a processor


def main() -> None:
    """Write the table into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", action="store_true", help="find the largest batches first")
    if parser.parse_args().largest:
        known = {one.number for one in read_rows(LARGEST, Largest)}
        for case in load_capability("user_files").cases:
            if case.job.number not in known:
                try:
                    found = find_largest(case)
                    add_row(LARGEST, found)
                    print(found, flush=True)
                except subprocess.SubprocessError as error:
                    print(case.job.model, error, flush=True)
    write_bytes(PAGE, with_table(PAGE.read_text(encoding="utf-8")).encode())


def with_table(page: str) -> str:
    """Return the page with the table of today's rows."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return "".join((head, START, *(f"{line}\n" for line in table()), END, tail))


def table() -> Iterator[str]:
    """Yield the lines of the table and of what it sums up."""
    rows = {row.number: row for row in read_rows(HERE / "user_files.csv", Row)}
    largest = {one.number: one for one in read_rows(LARGEST, Largest)}
    ran = [row for row in rows.values() if not row.failure]
    same = sum(row.allocated_is_same and row.reserved_is_same for row in ran)
    seconds = sorted(one.seconds for one in largest.values())
    others = "[exactness.md](exactness.md) names the causes of larger differences."
    yield f"Both peaks are the same to the byte in {same} of {len(ran)} scripts; {others}"
    if seconds:
        rest = "; those without a figure take minutes" if len(seconds) < len(ran) else ""
        yield (
            f"`planner max-batch` took {median(seconds):.0f} seconds of a processor in the median of "
            f"{len(seconds)} scripts and {seconds[-1]:.0f} at most{rest}."
        )
    yield ""
    peaks = "MiB allocated: planned, emulated | reserved: planned, emulated"
    yield f"| after `planner estimate --model` | batch, GPU | {peaks} | largest batch on {GPU} |"
    yield "|---|---|--:|--:|--:|"
    for case in load_capability("user_files").cases:
        row = rows.get(case.job.number)
        if row is None or row.failure:
            continue
        allocated = f"{row.planned_allocated / MIB:,.1f}, {row.emulated_allocated / MIB:,.1f}"
        reserved = f"{row.planned_reserved / MIB:,.0f}, {row.emulated_reserved / MIB:,.0f}"
        best = largest.get(row.number)
        answer = "" if best is None else f"{best.batch:,}"
        yield f"| `{_shown(case)}` | {row.batch}, {row.gpu} | {allocated} | {reserved} | {answer} |"


def find_largest(case: Case) -> Largest:
    """Run `planner max-batch` for a script."""
    words = ["max-batch", "--model", case.job.model, "--gpu", GPU, "--json"]
    words += [word for text in case.job.options["input"] for word in ("--input", text)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=MOST_SECONDS,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Largest(case.job.number, json.loads(done.stdout)["answer_batch"], round(seconds, 1))


def _shown(case: Case) -> str:
    name = case.job.model.removeprefix(f"{FILES}/")
    return shlex.join([name, *(word for text in case.job.options["input"] for word in ("--input", text))])


if __name__ == "__main__":
    main()
