"""Replay a sequence of pieces of traces in one simulated process."""

from planner.allocator.config import UNLIMITED, MemoryLimits
from planner.allocator.replay import ReplayedProcess
from planner.program import Joiner, NextWorkspaces, Piece


class Player:
    """A simulated process that replays pieces of traces in sequence.

    Variables and memory are kept between the pieces.
    """

    def __init__(
        self, limits: MemoryLimits = UNLIMITED, next_workspaces: NextWorkspaces | None = None
    ) -> None:
        """Create a process without memory; the parameters are as for `ReplayedProcess`."""
        self.process = ReplayedProcess(limits, next_workspaces)
        self._joiner = Joiner()

    def play(self, piece: Piece, step: int) -> bool:
        """Replay a piece as a part of step `step`, and return False if a request has failed until now.

        Failures in earlier pieces count. Raises NotJoinedError if the piece frees a variable that no earlier
        piece holds.
        """
        return self.process.play(self._joiner.join(piece, step))

    def copy(self) -> "Player":
        """Return an independent copy in the same state."""
        twin = object.__new__(Player)
        twin.process, twin._joiner = self.process.copy(), self._joiner.copy()
        return twin
