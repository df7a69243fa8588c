"""Run the cases of a capability on emulated GPUs and by the static planner.

    python -m benchmarks.emulated.capabilities NAME --python PYTHON [--jobs 1-4] [--again]

PYTHON is that of `benchmarks.emulated.differential`. Each case is a row of `NAME.csv` in this folder; cases
that have one are left out without --again. `--add "hf:gpt2,8,RTX 3090,--precision bf16"` runs one more job,
in the words of a row, and adds its row.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.emulated.both_sides import Emulator, cudnn_of, torch_of
from benchmarks.emulated.capabilities.commands import case_of
from benchmarks.emulated.capabilities.registry import HERE, capability_names, load_capability
from benchmarks.emulated.capabilities.run import compare_case
from benchmarks.emulated.differential import numbers_of
from benchmarks.emulated.jobs import DrawnJob, options_of
from benchmarks.emulated.rows import Row, add_row
from benchmarks.rows import read_rows


def main() -> None:
    """Run the cases without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("name", choices=list(capability_names()))
    parser.add_argument("--python", required=True, help="a Python with the CUDA build of torch")
    parser.add_argument("--jobs", metavar="FIRST-LAST", help="numbers of cases; by default all")
    parser.add_argument("--again", action="store_true", help="also run cases that have a row")
    parser.add_argument("--to", type=Path, metavar="FILE")
    parser.add_argument(
        "--add", metavar="MODEL,BATCH,GPU,OPTIONS", help="run this job alone, and add its row"
    )
    options = parser.parse_args()
    to = options.to or HERE / f"{options.name}.csv"
    libraries = {"cudnn": cudnn_of(options.python), "torch": torch_of(options.python)}
    done = set() if options.again else {row.number for row in read_rows(to, Row)}
    wanted = None if options.jobs is None else set(numbers_of(options.jobs))
    cases = load_capability(options.name).cases
    if options.add:
        model, batch, gpu, words = options.add.split(",", 3)
        number = max(case.job.number for case in cases) + 1
        cases = (case_of(DrawnJob(number, model, int(batch), gpu, options_of(words))),)
    with TemporaryDirectory(prefix="capabilities-") as temporary:
        emulator = Emulator(options.python, Path(temporary))
        try:
            for case in sorted(cases, key=lambda case: case.job.gpu):
                number = case.job.number
                if number in done or (wanted is not None and number not in wanted):
                    continue
                row = compare_case(case, emulator, libraries)
                add_row(to, row)
                error = f"{row.error:.3%}" if not row.failure else row.failure[:200]
                print(
                    f"{number} {row.model} {row.batch} {row.gpu}: {error} {row.cause} {row.place}", flush=True
                )
        finally:
            emulator.close()


if __name__ == "__main__":
    sys.exit(main())
