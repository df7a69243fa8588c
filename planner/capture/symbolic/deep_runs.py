"""Extrapolate the runs of a deep model from runs of shallow models with the same repeated block.

If the number of blocks is an argument of the model, models with 4 and 5 blocks run instead of the whole
model, and the events and kernel calls that one more block adds are repeated. The model with 7 blocks runs
too, once for each compute capability, to check the extrapolation. At other sizes of samples and numbers of
ranks, the model with 5 blocks suffices if its events differ from the checked events in sizes alone. The whole
model runs if the check fails, if its blocks differ, or if anything but the repeated events depends on their
number.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from planner.capture.models.depth import find_depth
from planner.capture.symbolic.kernel_calls import RecordedCall, RecordedRun, at_batch, fit_arguments
from planner.errors import PlannerError
from planner.jobs import Compile, Depth, Job, split_model
from planner.program import (
    CHECKED,
    SHALLOW,
    Fact,
    NotAffineError,
    NotRepeatedError,
    Origin,
    RepeatedBlock,
    Target,
    compare_depths,
    first_divergence,
)

LEAST_DEPTH = 20  # the four or more runs for a program have 31 blocks in all in shallow models
LEAST_DEPTH_OF_RUN = 17  # a single run has 16 blocks in all in shallow models


class _ShallowRuns(NamedTuple):
    """The run of the deeper of two shallow models, and the block that it adds to the other model's run."""

    run: RecordedRun
    block: RepeatedBlock
    fitted: Mapping[int, Any]  # (arguments, result) of calls that depend on the depth, by start

    def with_more(self, blocks: int) -> RecordedRun:
        """Return the run of a model with `blocks` more blocks than the shallower model.

        Raises NotRepeatedError if the run cannot be extrapolated.
        """
        return RecordedRun(self.block.with_more(blocks), tuple(self._calls(blocks)))

    def with_sizes_of(self, run: RecordedRun) -> "_ShallowRuns":
        """Return a copy with the deeper model's run replaced by `run`.

        The two runs must differ only in sizes. Raises NotRepeatedError if more differs, or if sizes differ
        that depend on the depth.
        """
        is_alike = _without_sizes(self.run.trace) == _without_sizes(run.trace)
        if run.calls:
            is_alike &= len(self.run.calls) == len(run.calls)
            is_alike &= all(map(self._are_alike, self.run.calls, run.calls))
        if not is_alike:
            raise NotRepeatedError("more than sizes depends on the sizes of samples")
        return _ShallowRuns(run, self.block.with_sizes_of(run.trace), self.fitted)

    def _are_alike(self, one: RecordedCall, other: RecordedCall) -> bool:
        """Return whether two calls agree except in sizes.

        Sizes that are fitted to the depth must agree too.
        """
        if one.start in self.fitted and (one.args, one.out) != (other.args, other.out):
            return False
        return bool(_place_of(one) == _place_of(other))

    def _calls(self, blocks: int) -> Iterator[RecordedCall]:
        starts = {call.start: call for call in self.run.calls}
        origins = self.block.origins(blocks)
        for start, origin in enumerate(origins):
            call = starts.get(origin.event)
            if call is None:
                continue
            size = call.end - call.start
            if origins[start : start + size] != [Origin(origin.event + k, origin.block) for k in range(size)]:
                raise NotRepeatedError(f"an added block begins or ends within {call.func}")
            args, out = call.args, call.out
            if call.start in self.fitted:
                args, out = at_batch(self.fitted[call.start], SHALLOW + blocks)
            site = self.block.site(call.site, origin, blocks)
            yield RecordedCall(start, start + size, site, call.func, args, out, call.outputs, call.stream)


@dataclass(slots=True)
class DeepRuns:
    """The runs of a job with a deep model, extrapolated from runs of shallow models."""

    depth: Depth
    _latest: dict[tuple[int, int], _ShallowRuns] = field(default_factory=dict)  # by compute capability
    _refused: set[tuple[int, int]] = field(default_factory=set)  # capabilities for which the whole model runs

    def run(self, job: Job, target: Target, run: Callable[[Job], RecordedRun]) -> RecordedRun | None:
        """Return a job's run extrapolated from shallow models, or None if the whole model must run.

        `run` captures a job with a shallow model. If `run` raises an error, the whole model must run.
        """
        capability = target.capability
        if capability in self._refused:
            return None
        try:
            runs = self._shallow_runs(capability, lambda blocks: run(self.depth.at(job, blocks)))
            deep = runs.with_more(self.depth.blocks - SHALLOW)
        except (NotRepeatedError, NotAffineError, PlannerError):
            self._refused.add(capability)
            return None
        self._latest[capability] = runs
        traced = f"{SHALLOW} and {SHALLOW + 1} are traced, and what one adds is repeated"
        note = f"of its {self.depth.blocks} equal blocks {traced}"
        trace = deep.trace
        notes, facts = (*trace.notes, note), trace.facts | {Fact.REPEATED_BLOCKS}
        return replace(deep, trace=replace(trace, notes=notes, facts=facts))

    def _shallow_runs(
        self, capability: tuple[int, int], at_depth: Callable[[int], RecordedRun]
    ) -> _ShallowRuns:
        """Run two shallow models, or the deeper alone; return the deeper's run and the block that it adds.

        Only the deeper model runs if its run differs from the latest run in sizes alone. Raises
        NotRepeatedError, NotAffineError, and the errors of a capture.
        """
        latest = self._latest.get(capability)
        if latest is None:
            runs = _compare(at_depth(SHALLOW), at_depth(SHALLOW + 1))
            if not _is_same(runs.with_more(CHECKED - SHALLOW), at_depth(CHECKED)):
                raise NotRepeatedError("blocks do not repeat")
            return runs
        deep = at_depth(SHALLOW + 1)
        try:
            return latest.with_sizes_of(deep)
        except NotRepeatedError:
            return _compare(at_depth(SHALLOW), deep)


def open_deep_runs(job: Job, least: int = LEAST_DEPTH) -> DeepRuns | None:
    """Return the `DeepRuns` of a job, or None if the whole model must run.

    The whole model must run if it is compiled, or if `find_depth` gives no depth, as for models with fewer
    than `least` blocks or of libraries other than transformers. Jobs that differ in the sizes of samples or
    in the number of ranks (two or more) share their deep runs, unless the model is in a folder, whose files
    may change. Raises UsageError.
    """
    if job.model.compile is not Compile.NONE:
        return None
    if Path(split_model(job.model.origin).name).is_dir():
        return _open_deep_runs.__wrapped__(job, least)
    return _open_deep_runs(job.replace(inputs=(), targets=(), fsdp=min(job.sharding.fsdp, 2)), least)


@lru_cache(maxsize=16)
def _open_deep_runs(job: Job, least: int) -> DeepRuns | None:
    depth = find_depth(job, least)
    return None if depth is None else DeepRuns(depth)


def _compare(shallow: RecordedRun, deep: RecordedRun) -> _ShallowRuns:
    one, other = shallow.trace, deep.trace
    if _described(one) != _described(other) or one.growth_sources or one.conv_workspaces:
        raise NotRepeatedError("what is said of the model depends on its depth")
    block = compare_depths(one, other)
    return _ShallowRuns(deep, block, _fitted_arguments(shallow, deep, block))


_described = attrgetter("unknown_ops", "notes", "pinned", "facts", "conv_workspaces", "growth_sources")
_without_sizes = attrgetter("unknown_ops", "facts", "conv_workspaces", "growth_sources")  # of a trace
_place_of = attrgetter("start", "end", "site", "func", "outputs", "stream")  # of a call


def _fitted_arguments(shallow: RecordedRun, deep: RecordedRun, block: RepeatedBlock) -> dict[int, Any]:
    """Return the arguments and results, fitted to the depth, of kernel calls that differ between the runs.

    The returned dict is keyed by the call's start in the deeper model. Raises NotRepeatedError if a call has
    no events, or no counterpart in the deeper model, and NotAffineError if arguments cannot be fitted.
    """
    if any(call.start == call.end for run in (shallow, deep) for call in run.calls):
        raise NotRepeatedError("a kernel call has no events")
    counterparts = {call.start: call for call in deep.calls}
    found = {}
    for call in shallow.calls:
        other = counterparts.get(block.positions[call.start])
        if other is None or other.func is not call.func or other.outputs != call.outputs:
            raise NotRepeatedError(f"{call.func} has no counterpart in the deeper model")
        values = [(call.args, call.out), (other.args, other.out)]
        if values[0] != values[1]:
            found[other.start] = fit_arguments(values, [SHALLOW, SHALLOW + 1])
    return found


def _is_same(expected: RecordedRun, run: RecordedRun) -> bool:
    return not first_divergence(expected.trace, run.trace) and expected.calls == run.calls
