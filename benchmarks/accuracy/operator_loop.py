"""Record the loop in which Liger measured operators: passes over the same inputs, without an optimizer.

`benchmark/scripts/utils.py` of linkedin/Liger-Kernel resets the peak, makes one pass, reads
`max_memory_allocated`, and takes the median of ten. Gradients are never cleared, so from the second pass on
they are there and are added to. Inputs, weights and whatever else the script made before stay allocated.
The speed of all providers was measured before in the same process, of which cuBLAS's workspaces stay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from planner.allocator.config import MemoryLimits
from planner.allocator.replay import replay_trace
from planner.capture.cuda.devices.translation import devices_shown, names_of_torch, planned_device
from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.capture.inductor.compiler import Compiler
from planner.capture.recorder.recorder import Recorder
from planner.capture.values.deterministic import deterministic_values
from planner.capture.values.interpreter import ValueInterpreter
from planner.program import Phase, Target, Trace

PASSES = 2  # after those that let go of all but what cuBLAS keeps
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """A measured forward pass, and a backward pass of its outputs."""

    forward: Callable[[], Tensor | Outputs]
    gradients: Callable[[Outputs], Outputs] | None = None  # of the outputs; None: those of a scalar
    mode: str = "full"  # or "forward", or "backward", of one graph that was made before
    keeps_graph: bool = False  # `backward(retain_graph=True)`
    inputs: Outputs = ()  # of `torch.autograd.grad` in place of `backward`, whose gradients nothing keeps


def peak_allocated_bytes(
    build: Callable[[], Operator], target: Target, before: Sequence[Callable[[], Operator]] = ()
) -> int:
    """Return the peak of the last pass, after passes of what else was measured before."""
    return replay_trace(record_passes(build, target, before), MemoryLimits()).step_peaks[-1].allocated_bytes


def record_passes(
    build: Callable[[], Operator], target: Target, before: Sequence[Callable[[], Operator]] = ()
) -> Trace:
    """Record the operator's inputs, made on meta by `build`, and its passes."""
    recorder = Recorder(nn.Module(), target, run=ValueInterpreter(target.capability).run)
    with (
        planned_device(capability=target.capability, has_values=True),
        deterministic_values(),
        cuda_semantics(target.capability, target.torch) as without_semantics,
        devices_shown(),
    ):

        @contextmanager
        def suspended() -> Iterator[None]:
            with without_semantics(), names_of_torch():
                yield

        with Compiler(recorder, suspended).installed(), torch.enable_grad(), recorder:
            recorder.start_phase(0, Phase.SETUP)
            for other in (*before, build):
                _pass(replace(other(), mode="full"), None, recorder, 1)
            operator = build()
            graph = _outputs(operator) if operator.mode == "backward" else None
            for step in range(2, PASSES + 2):
                _pass(operator, graph, recorder, step)
            recorder.start_phase(PASSES + 1, Phase.END)
    return recorder.finish(1)


def _pass(operator: Operator, graph: Outputs | None, recorder: Recorder, step: int) -> None:
    """Make one pass; its outputs and their gradients live until it ends."""
    recorder.start_phase(step, Phase.FORWARD)
    outputs = _outputs(operator) if graph is None else graph
    if operator.mode == "forward":
        return
    gradients = None if operator.gradients is None else operator.gradients(outputs)
    recorder.start_phase(step, Phase.BACKWARD)
    if operator.inputs:
        torch.autograd.grad(outputs, operator.inputs, gradients, retain_graph=operator.keeps_graph)
    else:
        torch.autograd.backward(outputs, gradients, retain_graph=operator.keeps_graph)


def _outputs(operator: Operator) -> Outputs:
    outputs = operator.forward()
    return (outputs,) if isinstance(outputs, Tensor) else outputs
