"""The table of the accuracy report: one row for each known truth, with every estimator's answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accuracy.ablations import TERMS
from benchmarks.rows import read_lines, write_lines

TABLE = Path(__file__).with_name("accuracy.csv")
PREFLIGHT_TABLE = TABLE.with_name("preflight.csv")  # torch-preflight's answers for rows of the table
LAYERS = {
    "A": "allocator: the replay of a recorded history",
    "B": "peak allocated",
    "C": "peak reserved",
    "D": "process, as NVML or nvidia-smi shows it",
    "E": "outcome: whether a batch lives within so much memory",
}
PEERS = ("formula", "torchinfo", "memtracker")  # of this repository; they know no allocator
PREFLIGHT = (
    "preflight",
    "preflight_meta",
)  # torch-preflight's, by a name and by a run on meta (preflight.py)
PUBLISHED = ("xmem", "dnnmem", "schedtune", "llmem")  # answers that were published for the same run
LIVES, DIES = "lives", "dies"

_FIXED = (
    "source",
    "layer",
    "model",
    "case",
    "family",
    "gpu",
    "batch",
    "limit_mib",
    "needed_mib",
    "truth",
    "kind",
)
_ESTIMATES = ("planner", *TERMS, "installed", "uncalibrated", "bound_confidence", *PEERS, *PUBLISHED)


@dataclass(frozen=True, slots=True)
class Row:
    """One truth: MiB in the layers A to D, `lives` or `dies` in E."""

    source: str
    layer: str
    model: str  # for leaving a model out
    case: str  # names the row within its source and layer
    family: str  # cnn, transformer, or a module of timm
    gpu: str
    batch: int
    truth: str
    estimates: Mapping[str, str] = field(default_factory=dict)  # estimator to MiB, or to `lives` or `dies`
    limit_mib: float | None = None  # of outcomes: the memory that the allocator had
    needed_mib: float | None = None  # of outcomes: the least that our replay needs
    note: str = ""  # of a case that is known to be special
    kind: str = ""  # of published runs, as planner/hardware/likeness.py has it; "" where it plays no part

    @property
    def key(self) -> tuple[str, str, str]:
        return self.source, self.layer, self.case

    def error(self, estimator: str) -> float | None:
        """Return the signed error of an estimator's size, as a share of the truth."""
        text = self.estimates.get(estimator, "")
        return float(text) / float(self.truth) - 1 if text and self.layer != "E" else None

    def is_right(self, estimator: str) -> bool | None:
        """Return True if an estimator calls an outcome right; None without an answer."""
        text = self.estimates.get(estimator, "")
        return text == self.truth if text and self.layer == "E" else None


def mib_text(size_mib: float) -> str:
    """Format with two digits, without trailing zeros."""
    return f"{size_mib:.2f}".rstrip("0").rstrip(".")


def texts(sizes: Mapping[str, float]) -> dict[str, str]:
    """Format sizes in MiB as a row holds them."""
    return {name: mib_text(size) for name, size in sizes.items()}


def read_rows(path: Path = TABLE) -> list[Row]:
    """Read all rows of the table, with torch-preflight's answers; none if there is no table yet."""
    if not path.exists():
        return []
    others = {(line["source"], line["layer"], line["case"]): line for line in read_lines(PREFLIGHT_TABLE)}
    return [_row(line, others) for line in read_lines(path)]


def _row(line: dict[str, str], others: Mapping[tuple[str, str, str], dict[str, str]]) -> Row:
    answers = line | others.get((line["source"], line["layer"], line["case"]), {})

    def number(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    return Row(
        *(line[name] for name in ("source", "layer", "model", "case", "family", "gpu")),
        batch=int(line["batch"]),
        truth=line["truth"],
        estimates={name: answers[name] for name in (*_ESTIMATES, *PREFLIGHT) if answers.get(name)},
        limit_mib=number("limit_mib"),
        needed_mib=number("needed_mib"),
        note=line["note"],
        kind=line.get("kind", ""),
    )


def write_rows(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write the table."""
    write_lines(path, (*_FIXED, *_ESTIMATES, "note"), map(_line, rows))


def _line(row: Row) -> tuple[object, ...]:
    numbers = {
        "limit_mib": "" if row.limit_mib is None else mib_text(row.limit_mib),
        "needed_mib": "" if row.needed_mib is None else mib_text(row.needed_mib),
    }
    fixed = [numbers.get(name, getattr(row, name)) for name in _FIXED]
    return *fixed, *(row.estimates.get(name, "") for name in _ESTIMATES), row.note
