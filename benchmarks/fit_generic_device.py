"""Where the constants of the generic card in `planner/device.py` come from; prints them.

    python benchmarks/fit_generic_device.py

What the driver keeps: a least-squares line through `total - usable` of all cards in `planner/devices/` whose
usable memory is known on its own account. The context: the published samples below.
"""

from math import hypot, sqrt
from statistics import linear_regression, mean, stdev

from planner.device import MIB, FigureKind, load_devices

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


def fit_kept_by_driver() -> tuple[float, float, float]:
    """MiB kept of any card, the share of the total on top, the standard deviation around that line in MiB."""
    cards = [card for card in load_devices() if card.usable.kind is FigureKind.PUBLISHED]
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
    base, share, spread = fit_kept_by_driver()
    print(f"kept by the driver: {base:.0f} MiB + {share:.4f} of the total, deviation {spread:.0f} MiB")
    print("context: {:.0f} MiB, deviation {:.0f} MiB".format(*fit_context()))
