"""Everything that can go wrong for a user, as exceptions that carry their exit code.

`planner.cli` turns them into one line on standard error in exactly one place. That a batch does not fit is a
result (`replay.Outcome`), never an exception.
"""


class PlannerError(Exception):
    """Base of all errors that a user can cause or mend; its text says what, where and what to do in one
    line.
    """

    exit_code = 1


class UsageError(PlannerError):
    """An option, a number or a name that makes no sense."""

    exit_code = 2


class ModelError(PlannerError):
    """The model cannot be built or traced."""

    exit_code = 3


class DataFileError(PlannerError):
    """A file that the planner reads (models.yaml, a device, a calibration, a saved trace) is broken."""

    exit_code = 4


class NoGpuError(PlannerError):
    """The command measures on a GPU and there is none."""

    exit_code = 5
