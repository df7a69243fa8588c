"""Account for each row of the collection of published runs on one and several GPUs: reproduced, or why not.

`finetuning_rows.csv` has the rows of peft, torchtune and torchtitan, `liger_operators.csv` those of Liger.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.rows_operators import KERNELS, LIGER, published_lines, why_left_out
from benchmarks.accuracy.torchtitan import TORCHTITAN
from benchmarks.accuracy.torchtune import TORCHTUNE
from benchmarks.rows import read_lines

ROWS = Path(__file__).parents[1] / "published" / "finetuning_rows.csv"
PEFT_PLANS = Path(__file__).with_name("peft_plans.csv")  # as peft_images.py prints them
PEFT_IMAGES = "huggingface/peft (image-gen)"
_TABLES = {"pytorch/torchtune": TORCHTUNE, "pytorch/torchtitan": TORCHTITAN}
_MIB = 1024
Line = Mapping[str, str]


class Part(NamedTuple):
    """Published rows of a source on one GPU, or on several, with the errors of those that are reproduced."""

    source: str
    gpus: str
    count: int
    errors: tuple[float, ...]
    left_out: Mapping[str, int]  # rows by reason

    @property
    def line(self) -> str:
        """Return the cells of the report's table."""
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.items())
        sizes = np.abs(self.errors)
        figures = (
            f"{np.median(sizes):.2%} | {np.quantile(sizes, 0.95):.1%} | {max(self.errors, key=abs):+.1%}"
            if self.errors
            else " |  | "
        )
        return f"{self.source} | {self.gpus} | {self.count} | {len(self.errors)} | {figures} | {reasons}"


def collection_lines() -> list[Line]:
    """Return the published rows of peft, torchtune and torchtitan."""
    return read_lines(ROWS)


def parts(rows: Sequence[Row]) -> Iterator[Part]:
    """Yield the parts of the collection; `rows` are those of accuracy.csv."""
    operators = published_lines()
    left_out = Counter(why for line in operators if (why := why_left_out(line)))
    errors = tuple(row.error("planner") or 0.0 for row in rows if row.source in (LIGER, KERNELS))
    yield Part("linkedin/Liger-Kernel", "one", len(operators), errors, left_out)
    lines = collection_lines()
    for source in dict.fromkeys(line["source"] for line in lines):
        for is_one in (True, False):
            some = [one for one in lines if one["source"] == source and (one["gpus"] == "1") is is_one]
            if some:
                reasons = Counter(one["left_out"] for one in some if one["left_out"])
                done = [one for one in some if not one["left_out"]]
                found = tuple(error_of(one, rows) for one in done)
                yield Part(source, "one" if is_one else "several", len(some), found, reasons)


def error_of(line: Line, rows: Sequence[Row]) -> float:
    """Return the signed error of a row that is reproduced. Raises LookupError where none has its figure."""
    published = float(line["value_gib"])
    if line["source"] == PEFT_IMAGES:
        return _peft_plans()[line["row"]] / published - 1
    for row in rows:
        if row.source == _TABLES[line["source"]] and abs(float(row.truth) / _MIB - published) < 1e-6:
            return row.error("planner") or 0.0
    raise LookupError(f"no row of accuracy.csv has the {published} GiB of {line['row']}")


def _peft_plans() -> dict[str, float]:
    return {line["result"]: float(line["planned_gib"]) for line in read_lines(PEFT_PLANS)}
