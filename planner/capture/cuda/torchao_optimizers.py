"""Steps of torchao's optimizers as CUDA runs them."""

from contextlib import ExitStack

from planner.capture.cuda.outside_memory import OutsideMemory


def watch(outside: OutsideMemory, stack: ExitStack) -> None:
    """Apply the rules until the stack closes."""
