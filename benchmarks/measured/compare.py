"""Hold what `run.py` recorded on a GPU against the static plan of the same jobs, event by event.

    mkdir RECORDS; tar -xJf benchmarks/measured/h200/records.tar.xz -C RECORDS
    python -m benchmarks.measured.compare RECORDS --gpu "H200 141GB" --cudnn FOLDER --torch 2.11.0

Rows are those of `benchmarks.emulated.differential`, with the recorded run in place of the emulated one. Jobs
that have a row are left out, unless --again CAUSE names the beginning of theirs; processes with another
--part may run at the same time.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

from benchmarks.emulated.both_sides import plan_statically, side_of
from benchmarks.emulated.differential import row_of, with_causes
from benchmarks.emulated.jobs import DrawnJob, options_of
from benchmarks.emulated.rows import EMULATED_FAILS, STATIC_FAILS, Row, add_row
from benchmarks.measured.jobs import HERE, PLANNED, Planned, job_of
from benchmarks.rows import read_rows
from planner.allocator.history.check import check_history
from planner.allocator.history.file import load_history
from planner.allocator.history.lifetimes import recording_of
from planner.hardware.database import find_device

COMPARED = HERE / "h200" / "compared.csv"


def compare(planned: Planned, folder: Path, gpu: str, cudnn: str, torch: str) -> Row:
    """Plan one job and hold it against its record."""
    start = perf_counter()
    history = folder / f"{planned.number}.history.gz"
    drawn = DrawnJob(planned.number, planned.model, planned.batch, gpu, options_of(planned.options))
    recorded = side_of(json.loads((folder / f"{planned.number}.json").read_bytes()), history)
    job = job_of(planned, cudnn, torch)
    side, trace = plan_statically(job, planned.batch, find_device(gpu))
    if recorded.failure or trace is None:
        cause = EMULATED_FAILS if recorded.failure else STATIC_FAILS
        return row_of(drawn, recorded, side, cause, start)
    seen = load_history(history)
    allocator = check_history(seen).difference or ""
    return with_causes(drawn, recorded, side, trace, recording_of(seen, "measured"), allocator, start)


def main() -> None:
    """Compare the jobs without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="RECORDS")
    parser.add_argument("--gpu", required=True, help="the GPU that was measured")
    parser.add_argument("--cudnn", required=True, metavar="FOLDER", help="the cuDNN that ran")
    parser.add_argument("--torch", required=True, metavar="VERSION", help="the torch that ran")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each N-th job from the K-th")
    parser.add_argument("--again", metavar="CAUSE", help="also compare the jobs of this cause")
    parser.add_argument("--to", type=Path, default=COMPARED, metavar="FILE")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    jobs = [
        job for job in read_rows(PLANNED, Planned) if (options.folder / f"{job.number}.history.gz").exists()
    ]
    for planned in jobs[part - 1 :: parts]:
        earlier = {row.number: row for row in read_rows(options.to, Row)}.get(planned.number)
        if earlier is not None and (options.again is None or not earlier.cause.startswith(options.again)):
            continue
        row = compare(planned, options.folder, options.gpu, options.cudnn, options.torch)
        add_row(options.to, row)
        print(row.number, row.model, row.cause, row.what[:150], flush=True)


if __name__ == "__main__":
    sys.exit(main())
