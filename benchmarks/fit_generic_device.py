"""Where the constants of the generic card in `planner/device.py` come from; prints them.

    python benchmarks/fit_generic_device.py

What the driver keeps: a least-squares line through `total - usable` of the cards in `planner/devices/` that
it was fitted to first, whose usable memory is known on its own account; the line through all such cards from
compute capability 7.5 on, slices left out, is printed beside it. The context: the published samples below.
"""

from math import hypot, sqrt
from statistics import linear_regression, mean, stdev

from planner.device import MIB, Device, FigureKind, Line, load_devices

# Memory of a process that holds one small tensor, kernels loaded lazily, MiB. Contexts of torch <= 1.12
# (1,024 to 1,690 MiB) are left out: those versions load all kernels at once.
CONTEXTS_MIB = {
    "pytorch/pytorch#86509, torch 1.13: 287,047,680 B, less the 20 MiB segment of its 6.4 MB tensor": 254,
    "pytorch/pytorch#107667, August 2023: about 300": 300,
    "pytorch/pytorch#109888, September 2023: around 400": 400,
    "RTX 6000 Ada, torch 2.10+cu130": 426,
}
# What cuDNN and cuBLAS load in the first steps: by so much the process peaks of Stone-ResearchLife/xMem
# (torch 2.6.0+cu124) exceed peak reserved memory; taken as evenly spread.
LOADED_LATER_MIB = (20, 120)


FITTED = (
    "A100 40GB", "A100 80GB", "H100 80GB", "H200 141GB", "L4 24GB", "RTX 3060 12GB", "RTX 3090 24GB",
    "RTX 4060 8GB", "RTX 4090 24GB", "RTX 5090 32GB", "RTX 6000 Ada 48GB", "RTX 6000 Ada 48GB with ECC",
    "RTX PRO 6000 Blackwell 96GB", "T4 16GB", "V100 16GB",
)  # fmt: skip


def fitted_cards() -> list[Device]:
    """The cards that the constants in `planner/device.py` come from."""
    return [card for card in load_devices() if card.name in FITTED]


def recent_cards() -> list[Device]:
    """All whole cards from Turing on whose usable memory is published."""
    return [
        card
        for card in load_devices()
        if card.usable.kind is FigureKind.PUBLISHED
        and card.capability >= (7, 5)
        and (card.about is None or card.about.line is not Line.SLICE)
    ]


def fit_kept_by_driver(cards: list[Device]) -> tuple[float, float, float]:
    """MiB kept of any card, the share of the total on top, the standard deviation around that line in MiB."""
    totals = [card.total.value / MIB for card in cards]
    kept = [(card.total.value - card.usable.value) / MIB for card in cards]
    line = linear_regression(totals, kept)
    squares = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(totals, kept, strict=True))
    return line.intercept, line.slope, sqrt(squares / (len(cards) - 2))


def fit_context() -> tuple[float, float]:
    """Mean and standard deviation in MiB of a training process's context after its third step."""
    low, high = LOADED_LATER_MIB
    samples = list(CONTEXTS_MIB.values())
    return mean(samples) + (low + high) / 2, hypot(stdev(samples), (high - low) / sqrt(12))


if __name__ == "__main__":
    for name, cards in (("as fitted", fitted_cards()), ("all from Turing on", recent_cards())):
        base, share, spread = fit_kept_by_driver(cards)
        line = f"{base:.0f} MiB + {share:.4f} of the total, deviation {spread:.0f} MiB"
        print(f"kept by the driver, {name} ({len(cards)} cards): {line}")
    print("context: {:.0f} MiB, deviation {:.0f} MiB".format(*fit_context()))
