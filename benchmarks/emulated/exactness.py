"""Write docs/exactness.md: how often planned and emulated peaks are the same, and the causes of the others.

    python -m benchmarks.emulated.exactness

Reads the tables beside it: `differential.csv` (`differential.py`), `defaults.csv` (the same with --cnns
--cudnn stored) and `largest.csv` (`largest.py`), and those of `capabilities/`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.emulated.capabilities.page import capability_parts
from benchmarks.emulated.largest import CONFIDENT, DIES_CONFIDENT, LEFT_OUT, RIGHT, LargestRow
from benchmarks.emulated.rows import ALLOCATOR, EMULATED_FAILS, IDENTICAL, STATIC_FAILS, Row
from benchmarks.rows import read_rows

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "exactness.md"
SHARES = (0.001, 0.005, 0.02)
DEFAULT_SHARES = (0.001, 0.005, 0.01, 0.02, 0.05)
SOURCES = {
    "library": "the installed cuDNN",
    "stored": "stored answers for all convolutions",
    "similar": "stored answers, for some of similar convolutions",
    "published": "stored answers, some convolutions have none",
    "": "no convolution",
}
KNOWN_LARGEST = {
    198: "mean and variance of more than 2 GiB of floats are taken in two halves, with a buffer beside them "
    "(ATen/native/cuda/Reduce.cuh), which the planner does not follow",
}
HEAD = """\
# How exact the planner is

Written by `python -m benchmarks.emulated.exactness` from the tables in benchmarks/emulated. Each row there
is a job that `benchmarks/emulated/jobs.py` drew at random: model (torchvision, timm, transformers, MONAI,
segmentation-models-pytorch), recipe, batch size and one of ten GPUs. It is trained for three steps on an
[emulated GPU](emulator.md), with the CUDA build of PyTorch, and traced and replayed by the static planner.
Both run the loop of `planner/capture/loop/training_loop.py`. Emulated is not measured: what a real GPU adds
is in [accuracy.md](accuracy.md). Addresses of new segments fall.
"""
JOBS = """\
## Peaks and events

The planner queries the very cuDNN that the emulated run uses. Events are the same if every block is
allocated and freed in the same order with the same size. An error is (planned - emulated) / emulated. The
rows were run while the planner was worked on, more than half of them (among them all of A10, A100, H100
and L4) at its last state; of the others, those that had parted were run again after each mechanism was found.
"""
PARTED = """\
### Jobs whose peaks differ

With the first event that differs: step, phase, operator and module, then the block and the order in which
others come.
"""
SAME = """\
### Events that differ without a difference of the peaks

Causes of the first difference, by operator.
"""
DEFAULTS = """\
## Without a cuDNN

Convolutional classifiers of torchvision and timm in float32, with torch's defaults and at their own size,
planned by the [stored answers](cudnn.md) alone, as on a machine that has no cuDNN. With an installed one
the planner queries it, and the table above holds. Reserved memory; what differs is in workspaces of
convolutions.
"""
LARGEST = f"""\
## Largest batch sizes

The planner answers at confidence 0.5 and at {CONFIDENT}, with the cuDNN that the runs use; the job is then
trained on the emulated GPU at the answer and at the next batch size, and at the answer of {CONFIDENT} with
a context and usable memory drawn from the planner's distributions. `largest.py` states what the allocator
may take.
"""


def report(jobs: Sequence[Row], defaults: Sequence[Row], largest: Sequence[LargestRow]) -> str:
    """Return the page."""
    ran = [row for row in jobs if not row.failure]
    parts = [HEAD, JOBS, _table(_counts(jobs, ran))]
    parted = [row for row in ran if not (row.allocated_is_same and row.reserved_is_same)]
    if parted:
        parts += [PARTED, _table(_parted(parted))]
    same = [row for row in ran if row not in parted and row.cause not in (IDENTICAL, ALLOCATOR)]
    if same:
        parts += [SAME, _table(_causes(same))]
    failed = [row for row in jobs if row.failure]
    if failed:
        parts += ["### Jobs that did not run on one side", _table(_failures(failed))]
    with_answers = [row for row in defaults if not row.failure]
    if with_answers:
        parts += [DEFAULTS, _table(_by_source(with_answers)), _table(_worst(with_answers))]
    if largest:
        parts += [LARGEST, *_largest(largest)]
    parts += capability_parts()
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _counts(rows: Sequence[Row], ran: Sequence[Row]) -> Iterable[str]:
    versions = Counter(row.versions for row in ran)
    same = [row for row in ran if row.allocated_is_same and row.reserved_is_same]
    counts = {
        "all events the same": sum(row.cause in (IDENTICAL, ALLOCATOR) for row in ran),
        "allocated identical to the byte": sum(row.allocated_is_same for row in ran),
        "reserved identical to the byte": sum(row.reserved_is_same for row in ran),
        "both identical to the byte": len(same),
        **{f"both within {share:.1%}": sum(row.error <= share for row in ran) for share in SHARES},
        "the allocator's history replayed to the end": sum(not row.allocator for row in ran),
    }
    yield "| of the jobs | number | share |"
    yield "|---|--:|--:|"
    yield f"| drawn | {len(rows)} | |"
    yield f"| ran on both sides ({', '.join(sorted(versions))}) | {len(ran)} | |"
    for what, count in counts.items():
        yield f"| {what} | {count} | {count / len(ran):.1%} |"


def _parted(rows: Sequence[Row]) -> Iterable[str]:
    yield "| job | allocated | reserved | first difference |"
    yield "|---|--:|--:|---|"
    for row in sorted(rows, key=lambda row: -row.error):
        allocated = row.planned_allocated / row.emulated_allocated - 1
        reserved = row.planned_reserved / row.emulated_reserved - 1
        where = "; ".join(filter(None, (row.cause, row.place, row.what)))
        yield f"| {_job(row)} | {allocated:+.3%} | {reserved:+.3%} | {where} |"


def _causes(rows: Sequence[Row]) -> Iterable[str]:
    yield "| cause | jobs | of them, by number |"
    yield "|---|--:|---|"
    by_cause: dict[str, list[Row]] = {}
    for row in rows:
        by_cause.setdefault(row.cause, []).append(row)
    for cause, group in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        numbers = ", ".join(str(row.number) for row in group[:8])
        yield f"| {cause} | {len(group)} | {numbers}{' ...' if len(group) > 8 else ''} |"


def _failures(rows: Sequence[Row]) -> Iterable[str]:
    yield "| side | why | jobs | example |"
    yield "|---|---|--:|---|"
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        reason = (
            row.failure.rpartition(": ")[2] if row.cause in (STATIC_FAILS, EMULATED_FAILS) else row.failure
        )
        groups.setdefault((row.cause, reason), []).append(row)
    for (side, reason), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"| {side} | {reason} | {len(group)} | {_job(group[0])} |"


def _by_source(rows: Sequence[Row]) -> Iterable[str]:
    head = " | ".join(f"within {share:.1%}" for share in DEFAULT_SHARES)
    yield f"| what answers | jobs | identical | {head} | worst |"
    yield f"|---|--:|--:|{'--:|' * len(DEFAULT_SHARES)}--:|"
    by_source = {words: [row for row in rows if row.convolutions == name] for name, words in SOURCES.items()}
    for words, group in (by_source | {"all": list(rows)}).items():
        if group:
            errors = [row.planned_reserved / row.emulated_reserved - 1 for row in group]
            shares = " | ".join(
                f"{sum(abs(error) <= share for error in errors) / len(group):.0%}" for share in DEFAULT_SHARES
            )
            same = sum(error == 0 for error in errors) / len(group)
            yield f"| {words} | {len(group)} | {same:.0%} | {shares} | {max(errors, key=abs):+.1%} |"


def _worst(rows: Sequence[Row]) -> Iterable[str]:
    yield "| job | reserved | what answers | first difference |"
    yield "|---|--:|---|---|"
    ordered = sorted(rows, key=lambda row: -abs(row.planned_reserved / row.emulated_reserved - 1))
    for row in ordered[:10]:
        error = row.planned_reserved / row.emulated_reserved - 1
        yield f"| {_job(row)} | {error:+.2%} | {SOURCES[row.convolutions]} | {row.place}; {row.what} |"


def _largest(rows: Sequence[LargestRow]) -> Iterable[str]:
    ran = [row for row in rows if row.verdict != LEFT_OUT]
    lives = [row for row in ran if row.at_largest != "dies"]
    exact = [row for row in lives if row.at_next == "dies"]
    counts = {
        "drawn": len(rows),
        "ran": len(ran),
        "live at the answer of confidence 0.5": len(lives),
        "live there and die at the next batch size": len(exact),
        "of these, with retries at the answer": sum(row.at_largest == "retries" for row in exact),
        f"die at the answer of confidence {CONFIDENT}": sum(row.at_confident == "dies" for row in ran),
    }
    yield _table(("| of the jobs | number |", "|---|--:|", *(f"| {k} | {v} |" for k, v in counts.items())))
    yield _table(_by_gpu(ran))
    wrong = [row for row in ran if row.verdict != RIGHT]
    if wrong:
        yield "### Wrong answers, with the first event that differs"
        yield _table(map(_wrong, wrong))
    left_out = [row for row in rows if row.verdict == LEFT_OUT]
    if left_out:
        yield "### Left out"
        yield _table(f"- {_named(row)}: {row.failure}" for row in left_out)


def _by_gpu(ran: Sequence[LargestRow]) -> Iterable[str]:
    yield f"| GPU | jobs | right | die at {CONFIDENT} |"
    yield "|---|--:|--:|--:|"
    for gpu in sorted({row.gpu for row in ran}):
        group = [row for row in ran if row.gpu == gpu]
        right = sum(row.verdict == RIGHT for row in group)
        yield f"| {gpu} | {len(group)} | {right} | {sum(row.verdict == DIES_CONFIDENT for row in group)} |"


def _wrong(row: LargestRow) -> str:
    runs = f"{row.largest} {row.at_largest}, {row.largest + 1} {row.at_next}"
    runs += f", at {CONFIDENT} {row.confident} {row.at_confident}"
    where = "; ".join(filter(None, (row.cause, row.place, row.what, KNOWN_LARGEST.get(row.number))))
    return f"- {_named(row)}: {row.verdict} ({runs}): {where}"


def _job(row: Row) -> str:
    return f"{row.number}, `{row.model}` at {row.batch} on {row.gpu} `{row.options}`"


def _named(row: LargestRow) -> str:
    return f"{row.number}, `{row.model}` on {row.gpu} `{row.options}`"


def main() -> None:
    """Write the page."""
    tables = (read_rows(HERE / f"{name}.csv", Row) for name in ("differential", "defaults"))
    PAGE.write_text(report(*tables, read_rows(HERE / "largest.csv", LargestRow)), encoding="utf-8")


if __name__ == "__main__":
    main()
