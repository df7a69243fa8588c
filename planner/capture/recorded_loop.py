"""Run a job's training loop on the meta device, and return its trace.

Operators behave as on the planned GPU.
"""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec.structs import replace

from planner.capture.cuda.checkpoints.sharded import sharded_without_files
from planner.capture.cuda.devices.translation import devices_shown
from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.capture.failure_reasons import explain, source_line
from planner.capture.process_state import foreign_errors
from planner.capture.recorder.growth_sources import growth_sources
from planner.capture.techniques.technique import CapturedLoop, Notes
from planner.errors import BatchTooLargeError
from planner.program import Trace


def record_loop(loop: CapturedLoop, capability: tuple[int, int]) -> Trace:
    """Run a loop on the meta device and return its trace.

    `capability` is the compute capability of the planned GPU. Raises ModelError, DataDependentError or
    BatchTooLargeError with the place in the loop if the loop fails.
    """
    job, batch, recorder = loop.job, loop.batch, loop.recorder
    try:
        with (
            foreign_errors(partial(explain, job, batch, recorder)),
            cuda_semantics(capability, recorder.target.torch) as suspended,
            devices_shown(),
            sharded_without_files(),
            _without_garbage_collection(),
            ExitStack() as stack,
        ):
            trace = recorder.finish(batch, _run(dataclasses.replace(loop, suspended=suspended), stack))
            return replace(trace, growth_sources=growth_sources(trace, recorder))
    except BatchTooLargeError as error:
        where = f"{job.model.name}: {recorder.place()} at batch {batch}{source_line(error)}"
        raise BatchTooLargeError(f"{where}: {error}; take that call out of the traced path") from error


def _run(loop: CapturedLoop, stack: ExitStack) -> Notes:
    """Run the loop, and return the notes of all techniques for the trace.

    The first technique that defines `run_loop` runs the loop. The notes are in the order of the techniques.
    Contexts of the techniques (`open_loop`) are entered on `stack`.
    """
    readers = [stack.enter_context(one.open_loop(loop)) for one in loop.techniques]
    run = next(one.run_loop for one in loop.techniques if one.run_loop is not None)
    of_loop = run(loop)
    notes: list[str] = []
    for technique, read in zip(loop.techniques, readers, strict=True):
        notes += (*read(), *(of_loop if technique.run_loop is run else ()))
    return tuple(notes)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable automatic garbage collection inside the context.

    The collector would free cycles at times that differ between traces. Objects that exist already are
    frozen, so that an explicit collection inside the context skips torch's million objects.
    """
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
