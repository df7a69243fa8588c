"""The exceptions for errors that a user can cause or fix.

Each class has an exit code. `planner.cli` turns exceptions into one line on standard error in exactly one
place. That a batch does not fit is a result (`program.Outcome`); only `planner.guard` raises an exception for
it, when it refuses to start a training run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from planner._support.printable import printable, shortened


class PlannerError(Exception):
    """Base class of the errors that a user can cause or fix.

    The message is one line, and names the problem, its place and the remedy. It may quote files and names
    that others wrote, so it is shortened, and line breaks and control characters, which a terminal would
    obey, are escaped.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(shortened(message)))


class UsageError(PlannerError):
    """The error for an invalid option, number or name from the user."""

    exit_code = 2


class ModelError(PlannerError):
    """The error for a model that cannot be built, traced or run, or for a library that is missing."""

    exit_code = 3


class BatchTooLargeError(ModelError):
    """The error for a batch size at which the model reads the values of too large a tensor.

    Values of large tensors are drawn at random on the CPU, up to a size limit.
    """


class UnsupportedGpuError(ModelError):
    """The error for an operator that the planned GPU does not have."""


class DataFileError(PlannerError):
    """The error for a file that is broken, or that cannot be read or written.

    Examples are models.yaml and a saved trace.
    """

    exit_code = 4


class NoGpuError(PlannerError):
    """The error for a machine without a usable GPU, if a command needs a GPU."""

    exit_code = 5


class DoesNotFitError(PlannerError):
    """The error of `planner.guard` for a batch that most likely does not fit the GPU."""


def reason_of(error: BaseException) -> str:
    """Return an error's message as one line, after the class name unless it is a PlannerError."""
    try:
        text = " ".join(str(error).split())[:300] or "no message"
    except Exception:  # the error's own code makes the message
        text = "no message"
    return text if isinstance(error, PlannerError) else f"{type(error).__name__}: {text}"


class UnsavedError(PlannerError):
    """The error for a computed result that could not be saved.

    The attribute `result` holds the result. The message and the exit code come from the error that prevented
    saving.
    """

    def __init__(self, cause: PlannerError, result: object) -> None:
        super().__init__(str(cause))
        self.result = result
        self.exit_code = cause.exit_code


@contextmanager
def unsaved(result: object) -> Iterator[None]:
    """Convert a PlannerError raised inside the context to an UnsavedError that carries `result`."""
    try:
        yield
    except PlannerError as error:
        raise UnsavedError(error, result) from error
