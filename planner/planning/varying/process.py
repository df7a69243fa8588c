"""Replay a process that trains on batches of several shapes through one allocator.

Each step is taken from a trace of the job at the shape of its batch. A block that outlives its batch (of a
gradient, or of a variable of the loop) is the same variable in the traces of all shapes, and is freed when a
later batch frees this variable.
"""

from collections.abc import Callable, Sequence

from planner.allocator import MemoryLimits, Player, Replay
from planner.errors import ModelError
from planner.jobs import BatchShape, Job, Mode
from planner.program import (
    KernelWorkspaces,
    NextWorkspaces,
    NotJoinedError,
    Piece,
    Program,
    ProgramPiece,
    cut_program,
)

Specialize = Callable[[BatchShape], tuple[Program, KernelWorkspaces]]


class BatchSource:
    """A cache of the events of a job's batches, by shape and step."""

    def __init__(self, job: Job, specialize: Specialize, next_workspaces: NextWorkspaces | None) -> None:
        """Create the cache of a job's events. `specialize` returns the program at each shape."""
        self.next_workspaces = next_workspaces
        self.usual_step = job.loop.steps - 1 if job.loop.mode is Mode.FORWARD else job.loop.steps
        self._specialize = specialize
        self._parts: dict[int, tuple[Program, list[list[ProgramPiece]]]] = {}  # by the program's identity
        self._made: dict[tuple[BatchShape, int], list[Piece]] = {}

    def batches(self, shape: BatchShape, step: int) -> list[Piece]:
        """Return the pieces of a step, one for each of its batches, which all have the shape `shape`.

        Step 0 is the set-up. There are several batches only if the job accumulates gradients. Steps that are
        not traced repeat the last usual step.
        """
        step = min(step, self.usual_step)
        if (shape, step) not in self._made:
            program, workspaces = self._specialize(shape)
            if id(program) not in self._parts:
                self._parts[id(program)] = program, cut_program(program)
            _, parts = self._parts[id(program)]
            self._made[shape, step] = [part.at(shape.batch, workspaces) for part in parts[step]]
        return self._made[shape, step]

    def forget(self) -> None:
        """Clear the cached events. The next batch size does not need them."""
        self._made.clear()


class VaryingProcess:
    """The replay of a process that trains on batches of several shapes."""

    def __init__(self, source: BatchSource, limits: MemoryLimits, first: BatchShape) -> None:
        """Replay the set-up of a process whose first batch has the shape `first`."""
        self._source = source
        self._player = Player(limits, source.next_workspaces)
        self.steps = 0
        (setup,) = source.batches(first, 0)
        self.is_alive = self._play(setup)

    def step(self, shapes: Sequence[BatchShape]) -> bool:
        """Replay a step with batches of `shapes`, and return whether all steps so far fit in memory."""
        self.steps += 1
        of_shape = [self._source.batches(shape, self.steps) for shape in shapes]
        for number, batches in enumerate(of_shape):
            if self.is_alive:
                self.is_alive = self._play(batches[min(number, len(batches) - 1)])
        return self.is_alive

    def copy(self) -> "VaryingProcess":
        """Return an independent copy of the process in its current state."""
        twin = object.__new__(VaryingProcess)
        twin.__dict__.update(self.__dict__)
        twin._player = self._player.copy()
        return twin

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator reserves after the last replayed step."""
        return self._player.process.allocator.reserved_bytes

    def replay(self, batch: int) -> Replay:
        """Return a `Replay`, labelled with `batch`, of the peaks, retries and failure of all steps."""
        return self._player.process.result(batch)

    def _play(self, batch: Piece) -> bool:
        try:
            return self._player.play(batch, self.steps)
        except NotJoinedError:
            raise ModelError(
                "the model goes through batches of other sizes in another way, so that a run of several "
                "sizes cannot be planned; give one size"
            ) from None
