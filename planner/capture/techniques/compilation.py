"""Techniques for compiled models (torch.compile), and for eager models, whose modules are tracked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.capture.compiled import CompiledCalls, watch_compiled
from planner.capture.cuda.devices.translation import names_of_torch
from planner.capture.techniques.technique import CapturedLoop, Notes, Technique
from planner.jobs import Compile, Job


def _is_eager(job: Job) -> bool:
    return job.model.compile is Compile.NONE


@contextmanager
def _track_modules(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    calls = CompiledCalls()
    with loop.recorder.modules.tracking(), watch_compiled(calls):
        yield calls.notes


@contextmanager
def _compile(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    """Make torch.compile work on meta tensors in the context; yield a function that returns notes on it.

    Modules are not tracked, since compiled code calls no modules.
    """

    @contextmanager
    def suspended() -> Iterator[None]:
        with loop.suspended(), names_of_torch():
            yield

    with suspended():  # dynamo and inductor remember torch's functions by identity
        from planner.capture.inductor.compiler import Compiler, learn_names_of_torch  # takes seconds

        learn_names_of_torch()
    compiler = Compiler(loop.recorder, suspended)
    with compiler.installed():
        yield compiler.notes


EAGER = Technique(_is_eager, open_loop=_track_modules)
COMPILED = Technique(lambda job: not _is_eager(job), open_loop=_compile)
