"""Everything that can go wrong for a user, as exceptions that carry their exit code.

`planner.cli` turns them into one line on standard error in exactly one place. That a batch does not fit is a
result (`replay.Outcome`), and an exception only where `planner.guard` refuses to begin a training.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from planner._support.printable import printable, shortened


class PlannerError(Exception):
    """Base of all errors that a user can cause or mend; its text names the problem, its place and the remedy
    in one line.

    What others wrote into files and names may stand in it, so line breaks and control characters, which a
    terminal would obey, are spelled out.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(shortened(message)))


class UsageError(PlannerError):
    """An option, a number or a name that makes no sense."""

    exit_code = 2


class ModelError(PlannerError):
    """The model cannot be built or traced."""

    exit_code = 3


class BatchTooLargeError(ModelError):
    """A batch size at which the model reads more values than a run on the CPU shall hold."""


class DataFileError(PlannerError):
    """A file that the planner reads (models.yaml, a device, a calibration, a saved trace) is broken."""

    exit_code = 4


class NoGpuError(PlannerError):
    """The command measures on a GPU and there is none."""

    exit_code = 5


class DoesNotFitError(PlannerError):
    """The batch of a training that is about to start most likely does not fit its GPU (`planner.guard`)."""


def reason_of(error: BaseException) -> str:
    """Return why something failed in one line; for an error of somebody else's code, with its class."""
    try:
        text = " ".join(str(error).split())[:300] or "no message"
    except Exception:  # its own code makes the message
        text = "no message"
    return text if isinstance(error, PlannerError) else f"{type(error).__name__}: {text}"


class UnsavedError(PlannerError):
    """The answer is there, in `result`, but could not be saved; text and exit code are those of the error
    that came in between.
    """

    def __init__(self, cause: PlannerError, result: object) -> None:
        super().__init__(str(cause))
        self.result = result
        self.exit_code = cause.exit_code


@contextmanager
def unsaved(result: object) -> Iterator[None]:
    """Pass an answer on with the error of a file that cannot be written. Raises UnsavedError."""
    try:
        yield
    except PlannerError as error:
        raise UnsavedError(error, result) from error
