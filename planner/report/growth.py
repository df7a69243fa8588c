"""Memory that grows from step to step, in words and as JSON."""

from typing import Any

from planner.hardware import MIB
from planner.planning import StepLimit
from planner.program import GrowingSite, Growth
from planner.report.describe import short_op
from planner.report.units import attributes, mib

_MOST_SITES = 3  # that a sentence names


def growth_text(growth: Growth, limit: StepLimit | None) -> str:
    """Return what each step keeps, who makes it, and after how many steps it no longer fits."""
    made = "; ".join(_site_text(site) for site in growth.sites[:_MOST_SITES])
    more = len(growth.sites) - _MOST_SITES
    others = f" and {more} other place" + "s" * (more > 1) if more > 0 else ""
    held = (
        ", held by reference cycles until Python's garbage collector runs (it is off in the trace)"
        if growth.is_garbage
        else ""
    )
    text = (
        f"memory grows: each step keeps {size_text(growth.bytes_per_step)} more, made by {made}{others}{held}"
        f"; the answer is for {growth.steps} steps"
    )
    if limit is None:
        return text
    steps = f"{'' if limit.is_exact else 'about '}{limit.steps:,} step" + "s" * (limit.steps != 1)
    return f"{text}: after {steps} it no longer fits (--steps N plans for N)"


def growth_to_json(growth: Growth | None, limit: StepLimit | None) -> dict[str, Any] | None:
    """Return the value of `growth` in the object of an estimate."""
    if growth is None:
        return None
    return {
        **attributes(growth, "bytes_per_step", "steps"),
        "steps_that_fit": None if limit is None else limit.steps,
        **attributes(limit, "is_exact"),
        "garbage": growth.is_garbage,
        "sites": [_site_to_json(site) for site in growth.sites],
    }


def size_text(size_bytes: int) -> str:
    """Return a size in MiB, or where that would be nothing in bytes."""
    return f"{mib(size_bytes, 1):,} MiB" if size_bytes >= MIB // 10 else f"{size_bytes:,} bytes"


def _site_text(one: GrowingSite) -> str:
    where = f"module {one.site.module}" if one.site.module else "the loop or the model's own forward"
    source = f", {one.source.source}" if one.source is not None and one.source.source else ""
    return f"{where} ({short_op(one.site.op)}{source})"


def _site_to_json(one: GrowingSite) -> dict[str, Any]:
    known = one.source
    return {
        **attributes(one.site, "module", "op"),
        "bytes_per_step": one.bytes_per_step,
        "source": None if known is None else known.source or None,
        "code": None if known is None else known.code or None,
        "garbage": None if known is None else known.is_garbage,
    }
