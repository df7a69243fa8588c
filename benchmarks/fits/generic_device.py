"""Print the constants of the generic GPU in `planner/hardware/device.py` from their sources.

    python -m benchmarks.fits.generic_device

The driver's share: a least-squares line through `total - usable` of the cards in
`planner/hardware/devices/` that it was fitted to first, whose usable memory is known on its own account; the
line through all such cards from compute capability 7.5 on, slices left out, is printed beside it. The context
has a script of its own, cuda_context.py.
"""

from math import sqrt
from statistics import linear_regression

from planner.hardware.database import load_devices
from planner.hardware.device import MIB, Device, FigureKind, ProductLine

FITTED = (
    "A100 40GB", "A100 80GB", "H100 80GB", "H200 141GB", "L4 24GB", "RTX 3060 12GB", "RTX 3090 24GB",
    "RTX 4060 8GB", "RTX 4090 24GB", "RTX 5090 32GB", "RTX 6000 Ada 48GB", "RTX 6000 Ada 48GB with ECC",
    "RTX PRO 6000 Blackwell 96GB", "T4 16GB", "V100 16GB",
)  # fmt: skip


def fitted_cards() -> list[Device]:
    """Return the cards behind the constants in `planner/hardware/device.py`."""
    return [card for card in load_devices() if card.name in FITTED]


def recent_cards() -> list[Device]:
    """Return all whole cards from Turing on whose usable memory is published."""
    return [
        card
        for card in load_devices()
        if card.usable.kind is FigureKind.PUBLISHED
        and card.capability >= (7, 5)
        and (card.about is None or card.about.line is not ProductLine.SLICE)
    ]


def fit_driver_share(cards: list[Device]) -> tuple[float, float, float]:
    """Fit the driver's MiB of any card, its share of the total, and the deviation around that line in MiB."""
    totals = [card.total.value / MIB for card in cards]
    driver_mib = [(card.total.value - card.usable.value) / MIB for card in cards]
    line = linear_regression(totals, driver_mib)
    squares = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(totals, driver_mib, strict=True))
    return line.intercept, line.slope, sqrt(squares / (len(cards) - 2))


if __name__ == "__main__":
    for name, cards in (("as fitted", fitted_cards()), ("all from Turing on", recent_cards())):
        base, share, spread = fit_driver_share(cards)
        line = f"{base:.0f} MiB + {share:.4f} of the total, deviation {spread:.0f} MiB"
        print(f"reserved by the driver, {name} ({len(cards)} cards): {line}")
