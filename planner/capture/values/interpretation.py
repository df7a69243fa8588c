"""Define the two ways to run a capture's operators.

Operators run by shapes alone, or with values on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace
from torch import nn

from planner.capture.meta_kernels.run import MetaRunner
from planner.capture.recorder.recorder import Run
from planner.capture.values.deterministic import buffer_values_kept, deterministic_values
from planner.capture.values.interpreter import DataDependentError, ValueInterpreter
from planner.capture.values.reads import ReadPolicy
from planner.program import Fact, Trace


class Shapes:
    """An interpretation that runs operators by shapes alone; a read of a value fails."""

    has_values = False

    def __init__(self, capability: tuple[int, int]) -> None:
        """Set the compute capability, which determines which kernels run."""
        self._capability = capability

    @contextmanager
    def open_model(self, build: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, Run]]:
        """Build a model, and yield it with the function that runs its operators."""
        yield build(), MetaRunner(self._capability).run

    def describe(self, trace: Trace) -> Trace:
        """Return the trace unchanged."""
        return trace


class Values:
    """An interpretation that computes values on the CPU when a model reads them."""

    has_values = True

    def __init__(
        self, capability: tuple[int, int], first_read: DataDependentError, policy: ReadPolicy
    ) -> None:
        """Set the compute capability, the error that made values necessary, and the limits of reads.

        `first_read` is the error of the first read in a capture by shapes alone.
        """
        self._capability, self._first_read, self._policy = capability, first_read, policy
        self._interpreter: ValueInterpreter | None = None

    @contextmanager
    def open_model(self, build: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, Run]]:
        """Build a model whose buffers have values, and yield it with the function that runs its operators."""
        with deterministic_values():
            with buffer_values_kept() as buffers:
                model = build()
            self._interpreter = ValueInterpreter(self._capability, buffers, self._policy)
            buffers.clear()  # a tensor that the step replaces is freed
            yield model, self._interpreter.run

    def describe(self, trace: Trace) -> Trace:
        """Return the trace with notes on the values that were read.

        A fact is added if random values decided shapes.
        """
        values = self._interpreter
        assert values is not None
        facts = {Fact.RANDOM_SIZES} if values.has_random_shapes else set()
        return replace(
            trace, notes=(*trace.notes, *self._first_read.notes(values)), facts=trace.facts | facts
        )


Interpretation = Shapes | Values
