"""Techniques of every capture: accelerate's state, assumed values and padding, and notes on operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.capture.cuda.backend_settings import notes_on_settings
from planner.capture.cuda.devices.placement import Placement
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.models.accelerate_state import own_accelerate_state
from planner.capture.models.library_versions import notes_on_versions
from planner.capture.models.transformers.build import is_padded, notes_of
from planner.capture.models.transformers.masks import assume_padding
from planner.capture.techniques.technique import CapturedLoop, Notes, Technique, is_always_used
from planner.capture.values.packed_lengths import full_lengths
from planner.capture.values.python_random import watch_python_random
from planner.capture.workspaces.tensor.fft import notes_on_transforms
from planner.capture.workspaces.tensor.linalg import notes_on_factorizations
from planner.jobs import Job, Mode


@contextmanager
def _keep_accelerate_state(job: Job, placement: Placement, other_ranks: OtherRanks) -> Iterator[None]:
    with own_accelerate_state(is_cleared=job.loop.mode is Mode.STEP):
        yield


@contextmanager
def _assume_padding(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    with assume_padding(is_padded(loop.job)):
        yield lambda: notes_of(loop.job, loop.model)


@contextmanager
def _assume_values(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    with full_lengths() as lengths, watch_python_random() as notes_on_random:
        yield lambda: (*lengths, *notes_on_random())


@contextmanager
def _watch_operators(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    def notes() -> Notes:
        operators = loop.recorder.operators()
        settings = notes_on_settings(loop.job)
        of_operators = (*notes_on_transforms(operators), *notes_on_factorizations(operators))
        return (*of_operators, *settings, *notes_on_versions())

    yield notes


ACCELERATE = Technique(is_always_used, open_process=_keep_accelerate_state)
PADDING = Technique(is_always_used, open_loop=_assume_padding)
VALUES = Technique(is_always_used, open_loop=_assume_values)
OPERATORS = Technique(is_always_used, open_loop=_watch_operators)
