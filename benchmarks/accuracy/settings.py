"""Headlines given twice: with what is fitted to their rows left out, and with the product's own settings."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.rows_published import CNNS, pairs
from benchmarks.accuracy.stats import inside_at
from benchmarks.accuracy.texts import HELD_OUT, TWICE
from benchmarks.fits.cuda_context import Libraries, loading_of, published_size
from benchmarks.published.timm_brackets import OUTSIDE_MIB, TOTAL_MIB
from benchmarks.rows import read_lines
from planner.allocator.config import AllocatorConfig
from planner.hardware.budget import make_budget
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.hardware.likeness import Likeness
from planner.hardware.residuals import RunKind

LEFT_OUT = Path(__file__).parents[1] / "fits" / "convolution_workspaces.csv"
CARD, TORCH = "RTX 3090", "1.12.0+cu113"


def refitted_errors(rows: Sequence[Row]) -> list[float]:
    """Return the errors of CNNs with the fitted workspace as the other models' runs alone give it."""
    peaks = {int(line["line"]): float(line["replayed_mib"]) for line in read_lines(LEFT_OUT)}
    errors = []
    for row in rows:
        if row.source == CNNS:
            match = re.search(r"line (\d+)", row.case)
            ours = float(row.estimates["planner"])
            set_up = float(row.estimates["no_set_up"]) - ours
            whole = peaks.get(int(match[1])) if match else None
            errors.append((ours if whole is None else whole - set_up) / float(row.truth) - 1)
    return errors


def own_answers(rows: Sequence[Row], confidence: float) -> tuple[int, int, int]:
    """Return brackets inside, failing batches predicted to fit, and trained ones that are refused."""
    card, counts = find_device(CARD), [0, 0, 0]
    for trained, failed in pairs(list(rows)):
        if trained.needed_mib is None or failed.needed_mib is None:
            continue
        budget = make_budget(card, confidence, AllocatorConfig(), likeness=Likeness(RunKind(trained.kind)))
        room = (budget.limits.capacity_bytes or 0) / MIB
        counts[0] += trained.needed_mib <= room < failed.needed_mib
        counts[1] += failed.needed_mib <= room
        counts[2] += trained.needed_mib > room
    return counts[0], counts[1], counts[2]


def settings_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the section of the report."""
    yield "## The headlines twice\n"
    yield TWICE
    yield "| CNNs' peaks | n | median absolute error | 95th percentile | worst |"
    yield "|---|--:|--:|--:|--:|"
    cnns = [row for row in rows if row.source == CNNS]
    for label, errors in (
        ("as the product has it", [row.error("planner") or 0.0 for row in cnns]),
        ("the term fitted to the other models' runs", refitted_errors(rows)),
        (
            "without it (on an RTX 4060 there is none)",
            [row.error("no_convolution_scratch") or 0.0 for row in cnns],
        ),
    ):  # fmt: skip
        sizes = np.abs(errors)
        yield (
            f"| {label} | {len(errors)} | {np.median(sizes):.2%} | {np.quantile(sizes, 0.95):.1%} | "
            f"{max(sizes):.1%} |"
        )
    yield from _brackets(rows)
    yield HELD_OUT


def _brackets(rows: Sequence[Row]) -> Iterator[str]:
    brackets = list(pairs(list(rows)))
    count = len(brackets)
    if not count:
        return
    card = find_device(CARD)
    sms = 82 if card.about is None or card.about.multiprocessors is None else card.about.multiprocessors.value
    eager = published_size((card.capability, round(sms)), loading_of(TORCH), Libraries.TRAINING).mib
    widths = sorted(failed.batch / trained.batch for trained, failed in brackets)
    yield (
        f"\ntimm's {count} brackets; the next larger candidate is {widths[0]:.2f} to {widths[-1]:.2f} times "
        "the batch that trained.\n"
    )
    yield "| settings | inside | failing batches predicted to fit | trained batches refused |"
    yield "|---|--:|--:|--:|"
    for outside, label in (
        (OUTSIDE_MIB, f"{OUTSIDE_MIB:,} MiB outside the allocator, measured by others on that stack"),
        (
            eager,
            f"{eager:,} MiB, as planner/hardware/context.py has it for torch 1.12, which loads all kernels",
        ),
        (415, "415 MiB, the product's context before it followed the multiprocessors"),
    ):
        limit = TOTAL_MIB - outside
        bad = sum((failed.needed_mib or 0) <= limit for _, failed in brackets)
        refused = sum((trained.needed_mib or 0) > limit for trained, _ in brackets)
        yield f"| {label} | {inside_at(rows, limit) / count:.1%} | {bad} | {refused} |"
    context = card.context.value / MIB
    for confidence in (0.5, 0.99):
        held, bad, refused = own_answers(rows, confidence)
        yield (
            f"| the product's own: {context:.0f} MiB (today's torch), confidence {confidence:g}, margins "
            f"of the kind | {held / count:.1%} | {bad} | {refused} |"
        )
    yield ""
