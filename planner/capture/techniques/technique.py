"""The interface between a capture and a job's techniques, such as sharding or compilation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from msgspec import Struct
from torch import Tensor, nn

from planner.capture.cuda.devices.placement import Placement
from planner.capture.cuda.operators.semantics import Suspended
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.loop.runtime import BatchLoader
from planner.capture.recorder.recorder import Recorder
from planner.jobs import Job

Notes = tuple[str, ...]


class BuiltModel(Struct, frozen=True):
    """A model of meta tensors, with the tensors that quantized modules allocate as they move to the GPU."""

    module: nn.Module
    loaded: dict[int, list[Tensor]] = {}  # by the `id` of the quantized module, in order of allocation


@dataclass(frozen=True, slots=True)
class CapturedLoop:
    """A training loop that is about to run on meta tensors, with its job, model and recorder."""

    job: Job  # with inputs in the precision of the model
    model: nn.Module
    batch: int
    recorder: Recorder
    loaded: dict[int, list[Tensor]]  # as in `BuiltModel`; emptied when the set-up is recorded
    loads_to_gpu: bool  # whether batches of a user's step are loaded on the GPU, not on the CPU
    techniques: "tuple[Technique, ...]"
    suspended: Suspended = nullcontext  # opens a context in which torch's operators are not replaced


@contextmanager
def open_nothing(*_: object) -> Iterator[None]:
    """Open a context without effect."""
    yield


@contextmanager
def without_notes(*_: object) -> Iterator[Notes]:
    """Open a context without effect, which yields an empty tuple of notes."""
    yield ()


@contextmanager
def watch_nothing(_: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    """Open a context without effect, which yields a function that returns an empty tuple of notes."""
    yield tuple


class Technique(Struct, frozen=True):
    """The functions by which one technique takes part in a capture.

    The fields are in the order of the calls. A capture calls the functions of all techniques that a job uses,
    in the order of the table (`planner/capture/techniques/table.py`). A function that is not given has no
    effect.
    """

    is_used: Callable[[Job], bool]
    # Imports libraries before functions of torch are replaced; raises UsageError for unsupported options.
    prepare: Callable[[Job], None] = lambda job: None
    # Opens contexts that the process needs before the model is built, such as a process group.
    open_process: Callable[[Job, Placement, OtherRanks], AbstractContextManager[None]] = open_nothing
    # Changes a model before it is on the GPU, without recording.
    change_model: Callable[[BuiltModel, Job], BuiltModel] = lambda model, job: model
    # Changes a model inside the context, and yields notes.
    open_model: Callable[[nn.Module, Job, Recorder], AbstractContextManager[Notes]] = without_notes
    # Opens contexts that the loop needs, and yields a function that returns notes after the loop.
    open_loop: Callable[[CapturedLoop], AbstractContextManager[Callable[[], Notes]]] = watch_nothing
    # Runs the loop and returns notes; only the first technique with this function runs its loop.
    run_loop: Callable[[CapturedLoop], Notes] | None = None
    # Changes the batch loader of a loop described by options; the job has only the micro-batches that run.
    change_loader: Callable[[BatchLoader, nn.Module, Job], BatchLoader] = lambda load, model, job: load
    # Sets categories of blocks when a phase of a loop described by options starts.
    on_phase: Callable[[Iterable[nn.Parameter], Recorder], None] = lambda parameters, recorder: None


def is_always_used(_: Job) -> bool:
    """Return True, for a technique that takes part in every capture."""
    return True
