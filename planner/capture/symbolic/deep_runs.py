"""Extrapolate the runs of a deep model from runs of shallow models with the same repeated block.

If the number of blocks is an argument of the model, models with 4 and 5 blocks run in place of the whole
model, and the events and kernel calls that one more block adds are repeated. The model with 7 blocks runs
too, once for each compute capability, to check the extrapolation, which then holds for all sizes of samples
and numbers of ranks. The whole model runs if the check fails, if its blocks differ, or if anything but the
repeated events depends on their number.
"""

from collections.abc import Callable, Iterator
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

LEAST_DEPTH = 28  # a program is fitted in four runs or more, of 43 blocks in all from shallow models
LEAST_DEPTH_OF_RUN = 17  # a single run takes 16 blocks from shallow models


class _Pair(NamedTuple):
    """The runs of the two shallow models, and what the deeper one adds."""

    runs: tuple[RecordedRun, RecordedRun]
    block: RepeatedBlock

    def with_more(self, blocks: int) -> RecordedRun:
        """Return the run of a model with `blocks` more blocks than the shallower model.

        Raises NotRepeatedError.
        """
        return RecordedRun(self.block.with_more(blocks), tuple(self._calls(blocks)))

    def _calls(self, blocks: int) -> Iterator[RecordedCall]:
        arguments = self._arguments(blocks)
        starts = {call.start: call for call in self.runs[1].calls}
        origins = self.block.origins(blocks)
        for start, origin in enumerate(origins):
            call = starts.get(origin.event)
            if call is None:
                continue
            size = call.end - call.start
            if origins[start : start + size] != [Origin(origin.event + k, origin.block) for k in range(size)]:
                raise NotRepeatedError(f"an added block begins or ends within {call.func}")
            args, out = arguments.get(call.start, (call.args, call.out))
            site = self.block.site(call.site, origin, blocks)
            yield RecordedCall(start, start + size, site, call.func, args, out, call.outputs, call.stream)

    def _arguments(self, blocks: int) -> dict[int, tuple[Any, Any]]:
        """Return arguments and result, in the deep model, of calls in which they depend on the depth.

        The keys are the starts of calls in the deeper of the two runs.
        """
        shallow, deep = self.runs
        if any(call.start == call.end for run in self.runs for call in run.calls):
            raise NotRepeatedError("a kernel call has no events")
        counterparts = {call.start: call for call in deep.calls}
        found = {}
        for call in shallow.calls:
            other = counterparts.get(self.block.positions[call.start])
            if other is None or other.func is not call.func or other.outputs != call.outputs:
                raise NotRepeatedError(f"{call.func} has no counterpart in the deeper model")
            if (call.args, call.out) != (other.args, other.out):
                values = [(call.args, call.out), (other.args, other.out)]
                fitted = fit_arguments(values, [SHALLOW, SHALLOW + 1])
                found[other.start] = at_batch(fitted, SHALLOW + blocks)
        return found


@dataclass(slots=True)
class DeepRuns:
    """The runs of a job whose model is deep, each extrapolated from runs of shallow models."""

    depth: Depth
    _is_repeated: dict[tuple[int, int], bool] = field(default_factory=dict)  # by compute capability

    def run(self, job: Job, target: Target, run: Callable[[Job], RecordedRun]) -> RecordedRun | None:
        """Return the run of a job, extrapolated from those that `run` returns for shallower jobs.

        None if the whole model must run. Raises no error of a shallow model.
        """
        if self._is_repeated.get(target.capability) is False:
            return None
        try:
            deep = self._extrapolate(job, target, run)
        except (NotRepeatedError, NotAffineError, PlannerError):
            deep = None
        self._is_repeated[target.capability] = deep is not None
        return deep

    def _extrapolate(self, job: Job, target: Target, run: Callable[[Job], RecordedRun]) -> RecordedRun | None:
        def at_depth(blocks: int) -> RecordedRun:
            return run(self.depth.at(job, blocks))

        pair = _compare(at_depth(SHALLOW), at_depth(SHALLOW + 1))
        is_checked = target.capability in self._is_repeated
        if not is_checked and not _is_same(pair.with_more(CHECKED - SHALLOW), at_depth(CHECKED)):
            return None
        deep = pair.with_more(self.depth.blocks - SHALLOW)
        traced = f"{SHALLOW} and {SHALLOW + 1} are traced, and what one adds is repeated"
        note = f"of its {self.depth.blocks} equal blocks {traced}"
        trace = deep.trace
        notes, facts = (*trace.notes, note), trace.facts | {Fact.REPEATED_BLOCKS}
        return replace(deep, trace=replace(trace, notes=notes, facts=facts))


def open_deep_runs(job: Job, least: int = LEAST_DEPTH) -> DeepRuns | None:
    """Return the deep runs of a job, or None if its whole model must run or has fewer than `least` blocks.

    Jobs that differ in the sizes of samples or in the number of ranks share them, unless their model is in a
    folder, whose files may change. Raises UsageError.
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


def _compare(shallow: RecordedRun, deep: RecordedRun) -> _Pair:
    one, other = shallow.trace, deep.trace
    if _described(one) != _described(other) or one.growth_sources or one.conv_workspaces:
        raise NotRepeatedError("what is said of the model depends on its depth")
    return _Pair((shallow, deep), compare_depths(one, other))


_described = attrgetter("unknown_ops", "notes", "pinned", "facts", "conv_workspaces", "growth_sources")


def _is_same(expected: RecordedRun, run: RecordedRun) -> bool:
    return not first_divergence(expected.trace, run.trace) and expected.calls == run.calls
