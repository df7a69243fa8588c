"""Capture the training loop of a job on the meta device as a trace."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from planner.capture.capture_memory import CaptureMemory
from planner.capture.cuda.devices.placement import Placement
from planner.capture.cuda.devices.translation import planned_device
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.loop.precision import convert_inputs
from planner.capture.models.lazy import initialise_lazy_modules
from planner.capture.models.live.kept import live_modules_restored
from planner.capture.models.offline import calling_libraries
from planner.capture.models.registry import build_model, complete_by_library
from planner.capture.process_state import global_hooks_aside, preserve_process_state
from planner.capture.recorded_loop import record_loop
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.recorder.recorder import Recorder, Run
from planner.capture.symbolic.kernel_calls import RecordedCall
from planner.capture.techniques.own_step import with_batch_on_gpu
from planner.capture.techniques.table import techniques_of
from planner.capture.techniques.technique import BuiltModel, CapturedLoop
from planner.capture.values.interpretation import Interpretation, Shapes, Values
from planner.capture.values.interpreter import DataDependentError
from planner.capture.values.reads import ReadPolicy, run_with_reads
from planner.jobs import Job, Mode, check_requirements
from planner.program import ConvWorkspaceQuery, Target, Trace, has_convolutions, torch_version_of


def record(
    job: Job,
    batch: int,
    capability: tuple[int, int],
    build: Callable[[Job], nn.Module] = build_model,
    provenance: ProvenanceCollector | None = None,
    calls: list[RecordedCall] | None = None,
    path_of: tuple[int, int] | None = None,
    sm_count: int | None = None,
    conv_workspace_query: ConvWorkspaceQuery | None = None,
    memory: CaptureMemory | None = None,
) -> Trace:
    """Return the trace of a job's first steps at one batch size.

    The trace is of a GPU of compute capability `capability`. `build` makes the model with meta parameters.
    `provenance` collects the provenance of blocks, which takes time; `calls` collects calls of operators with
    workspace rules. `path_of` replaces the capability if another capability decides which operators run.
    Without `sm_count` the GPU is the largest of its capability; without `conv_workspace_query` convolutions
    take no workspace. `memory` is shared by captures of the job at several batch sizes. Raises UsageError for
    an unknown model, and ModelError for a model that cannot be built, does not accept its inputs, or reads
    values that a run on the CPU cannot give.
    """
    target = replace(
        Target.for_capability(capability, sm_count),
        conv_workspace_query=conv_workspace_query,
        torch=torch_version_of(job.environment.torch),
    )
    memory = memory or CaptureMemory()
    session = _Session(job, target, path_of or capability, build, provenance, calls, memory, OtherRanks())
    trace = session.run(batch)
    if conv_workspace_query is not None and has_convolutions(trace):
        trace = replace(trace, conv_account=conv_workspace_query.account(capability, target.sm_count))
    if provenance is not None:
        return trace
    tracking = replace(session, provenance=ProvenanceCollector(), calls=None)  # which takes time
    return memory.with_lines(trace, lambda: tracking.run(batch))


class _Session(Struct, frozen=True):
    job: Job
    target: Target
    path_of: tuple[int, int]
    build: Callable[[Job], nn.Module]
    provenance: ProvenanceCollector | None
    calls: list[RecordedCall] | None
    memory: CaptureMemory
    other_ranks: OtherRanks
    loads_to_gpu: bool = False  # whether the user's own step gets batches on the GPU

    def run(self, batch: int) -> Trace:
        """Return the trace of the job's rank. Other ranks run first if the rank receives data from them."""

        def run_rank(rank: int) -> Trace:
            one = replace(self, job=self.job.replace(rank=rank))
            return with_batch_on_gpu(lambda on_gpu: replace(one, loads_to_gpu=on_gpu)._run(batch))

        return self.other_ranks.trace(self.job.sharding.rank, run_rank)

    @preserve_process_state()
    def _run(self, batch: int) -> Trace:
        """Return one rank's trace, captured by shapes alone, or with values if the model reads values.

        A read in an earlier capture of the job counts too.
        """
        with calling_libraries(self.job):
            check_requirements(self.job)
            job = complete_by_library(self.job)
            for technique in techniques_of(job):
                technique.prepare(job)
            first_read = self.memory.first_read
            if first_read is None:
                try:
                    return self._capture(job, batch, Shapes(self.path_of))
                except DataDependentError as error:
                    first_read = self.memory.first_read = error.with_traceback(None)

            def run_again(size: int, policy: ReadPolicy) -> Trace:
                return self._capture(job, size, Values(self.path_of, first_read, policy))

            return run_with_reads(
                batch, run_again, self.memory.logs, guesses_numbers=job.loop.mode is Mode.STEP
            )

    def _capture(self, job: Job, batch: int, interpretation: Interpretation) -> Trace:
        if self.calls is not None:
            self.calls.clear()
        with live_modules_restored(), ExitStack() as stack:
            stack.enter_context(global_hooks_aside())
            device = planned_device(None, self.path_of, interpretation.has_values, self.target.torch)
            placement = stack.enter_context(device)
            for technique in techniques_of(job):
                stack.enter_context(technique.open_process(job, placement, self.other_ranks))
            model, run = stack.enter_context(interpretation.open_model(lambda: self.build(job)))
            trace = self._record(job, batch, model, run, placement)
        return interpretation.describe(trace)

    def _record(self, job: Job, batch: int, model: nn.Module, run: Run, placement: Placement) -> Trace:
        """Apply the job's techniques to a model, and return the trace of its loop."""
        initialise_lazy_modules(model, job, batch, run)
        built, techniques = BuiltModel(model), techniques_of(job)
        for technique in techniques:
            built = technique.change_model(built, job)
        model = built.module
        blas = job.environment.cublas_workspace_config
        place = placement.host, placement.streams, self.memory.most_blocks
        recorder = Recorder(model, self.target, self.provenance, self.calls, run, blas, *place)
        placement.watch(recorder)
        with ExitStack() as stack:
            notes = [stack.enter_context(one.open_model(model, job, recorder)) for one in techniques]
            loop = CapturedLoop(
                convert_inputs(job), model, batch, recorder, built.loaded, self.loads_to_gpu, techniques
            )
            trace = record_loop(loop, self.path_of)
        return replace(trace, notes=(*trace.notes, *chain.from_iterable(notes), *placement.notes))
