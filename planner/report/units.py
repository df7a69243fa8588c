"""The numbers of every report: the breakdown of a process, MiB, and rounding under which sums stay sums."""

from collections.abc import Iterator, Mapping

from planner.hardware import ENDLESS_BYTES, MIB, SourcedBytes
from planner.planning import Estimate
from planner.program import Category


def breakdown(estimate: Estimate) -> dict[str, int]:
    """Bytes of the process by category, in the order of the reports; they add up to `process_bytes`.

    Tensors and workspaces as they stand at the allocated peak; `fragmentation` is what the allocator has
    reserved beyond that, at its own peak. What a calibration adds counts as workspaces, which is what the
    replay does not know of; what it takes off is taken from the fragmentation, then from the context.
    """
    run = estimate.run
    context = estimate.budget.device.context.value
    fragmentation = run.peak_reserved_bytes - run.peak_allocated_bytes
    change = estimate.process_bytes - context - run.peak_reserved_bytes
    less_fragmentation = min(max(0, -change), fragmentation)
    parts = {
        "context": context + min(0, change) + less_fragmentation,
        **{role.value: size_bytes for role, size_bytes in estimate.at_peak.items()},
        "fragmentation": fragmentation - less_fragmentation,
    }
    parts[Category.WORKSPACE.value] += max(0, change)
    return parts


def mib(size_bytes: int, digits: int = 3) -> float:
    """Bytes as MiB, rounded."""
    return round(size_bytes / MIB, digits)


def mib_parts(parts: Mapping[str, int], digits: int = 3) -> dict[str, float]:
    """Bytes as MiB, rounded so that the parts add up to the rounded sum: steps of the running sum."""
    rounded: dict[str, float] = {}
    sum_bytes, before = 0, 0.0
    for name, size_bytes in parts.items():
        sum_bytes += size_bytes
        now = mib(sum_bytes, digits)
        rounded[name] = round(now - before, digits)
        before = now
    return rounded


def shares(parts: Mapping[str, int], digits: int) -> Iterator[tuple[str, float, float]]:
    """Yield what a process consists of, without what takes nothing: name, rounded MiB, share of the whole."""
    total = sum(parts.values())
    for name, rounded in mib_parts(parts, digits).items():
        if parts[name]:
            yield name, rounded, parts[name] / total


def is_endless(figure: SourcedBytes) -> bool:
    """Whether this is the memory of a card that never runs out."""
    return figure.value >= ENDLESS_BYTES


def chance_text(chance: float) -> str:
    """A probability in percent, no more exact than it can be known.

    >>> chance_text(0.00004), chance_text(0.0123), chance_text(0.62), chance_text(0.9999)
    ('below 0.1 %', '1.2 %', '62 %', 'above 99.9 %')
    """
    percent = 100 * chance
    if percent < 0.1:
        return "below 0.1 %"
    if percent > 99.9:
        return "above 99.9 %"
    return f"{percent:.0f} %" if 10 <= percent <= 90 else f"{percent:.1f} %"
