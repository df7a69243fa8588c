"""Traces and replays without one of the model's terms.

The accuracy report names the error with each term left out. The operator of a scratch block decides its term;
which operators belong to which term follows `planner/capture/workspaces`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from benchmarks.published.allocator import replay_published
from planner.allocator.replay import Replay
from planner.hardware.device import MIB
from planner.program.bounds import live_bytes_bound
from planner.program.events import Alloc, Category, Event, Free, Outcome, Trace

LOADED_LATER_MIB = (
    70  # the middle of 20 to 120, which others inferred for these runs; see planner/hardware/context.py
)

# Columns of accuracy.csv: the model with one term left out, or changed, and what that means.
SCRATCH_TERMS: Mapping[str, str] = {
    "no_convolution_scratch": "without what convolutions take beside their tensors",
    "no_cublas": "without cuBLAS's workspaces and copies of operands",
    "no_reductions": "without the buffers of sums, norms and losses",
    "no_attention_scratch": "without the scratch of attention kernels",
    "no_other_scratch": "without the scratch of sorting, indexing and the rest",
    "no_scratch": "without any scratch memory",
}
OTHER_TERMS: Mapping[str, str] = {
    "allocated": "allocated instead of reserved memory: no allocator",
    "no_retries": "without releasing cached segments where memory is short",
    "no_set_up": "without taking the memory of model and optimizer off, which the first sample holds",
    "loaded_later": f"with {LOADED_LATER_MIB} MiB added for what CUDA loads lazily",
}
TERMS = {**SCRATCH_TERMS, **OTHER_TERMS}


def scratch_families() -> Mapping[str, str]:
    """Map operators, by their names in sites, to the term of their scratch memory."""
    from planner.capture.operator_table import operator_table
    from planner.capture.workspaces.nn import attention, convolution, losses, norms
    from planner.capture.workspaces.tensor import gemm, reductions

    families = {
        "no_reductions": operator_table({**reductions.RULES, **norms.RULES, **losses.RULES}),
        "no_attention_scratch": operator_table(attention.RULES),
        "no_cublas": {*gemm.BLAS_OPS, *operator_table(gemm.RULES)},
        "no_convolution_scratch": operator_table(convolution.RULES),
    }
    return {str(op): term for term, ops in families.items() for op in ops}


def without(trace: Trace, term: str) -> Trace:
    """Return the trace without the scratch memory of this term."""
    families = scratch_families()

    def is_left_out(event: Event) -> bool:
        if not isinstance(event, Alloc) or event.category is not Category.WORKSPACE:
            return False
        return term in ("no_scratch", families.get(trace.sites[event.site].op, "no_other_scratch"))

    blocks = {event.block for event in trace.events if isinstance(event, Alloc) and is_left_out(event)}
    if not blocks:
        return trace
    events = (
        event for event in trace.events if not isinstance(event, Alloc | Free) or event.block not in blocks
    )
    return replace(trace, events=tuple(events))


@dataclass(frozen=True, slots=True)
class Variant:
    """A trace with its run on a card without end."""

    trace: Trace
    run: Replay
    least_mib: float  # what its tensors take, without a kernel's blocks that it can do without

    @property
    def reserved_mib(self) -> float:
        return self.run.peak_reserved_bytes / MIB

    def holds(self, batch: int, limit_mib: float) -> bool:
        """Return True if the replay does not fail within this memory."""
        if self.run.peak_reserved_bytes <= limit_mib * MIB:
            return True
        if self.least_mib > limit_mib:
            return False
        return replay_published(self.trace, batch, int(limit_mib * MIB)).outcome is not Outcome.DOES_NOT_FIT

    def needed_mib(self, batch: int, step_mib: float = 1) -> float:
        """Return the least memory in which the replay does not fail, at most `step_mib` too high."""
        low, high = self.least_mib, self.reserved_mib
        while high - low > step_mib:
            middle = (low + high) / 2
            low, high = (low, middle) if self.holds(batch, middle) else (middle, high)
        return high


def variants(trace: Trace, batch: int) -> dict[str, Variant]:
    """Replay the trace under the name "planner", and without each kind of scratch memory."""
    whole = _variant(trace, batch)
    by_term = {"planner": whole}
    for term in SCRATCH_TERMS:
        reduced = without(trace, term)
        by_term[term] = whole if reduced is trace else _variant(reduced, batch)
    return by_term


def _variant(trace: Trace, batch: int) -> Variant:
    return Variant(trace, replay_published(trace, batch), live_bytes_bound(trace.events)(batch) / MIB)


def peaks(by_term: Mapping[str, Variant]) -> dict[str, float]:
    """Return peak reserved in MiB, of the whole model and of each that lacks a term."""
    whole = by_term["planner"]
    reserved = {name: variant.reserved_mib for name, variant in by_term.items()}
    return reserved | {
        "allocated": whole.run.peak_allocated_bytes / MIB,
        "loaded_later": whole.reserved_mib + LOADED_LATER_MIB,
    }


def verdicts(by_term: Mapping[str, Variant], batch: int, limit_mib: float) -> dict[str, str]:
    """Return `lives` or `dies` within this memory, of the whole model and of each that lacks a term."""
    whole = by_term["planner"]
    lives = {name: variant.holds(batch, limit_mib) for name, variant in by_term.items()} | {
        "allocated": whole.least_mib <= limit_mib,
        "no_retries": whole.run.peak_reserved_bytes <= limit_mib * MIB,
    }
    return {name: "lives" if alive else "dies" for name, alive in lives.items()}
