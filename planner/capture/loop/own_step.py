"""Run a user's own training step, and mark its phases.

The phases are backward passes and optimizer steps. The loop is `for batch in loader: result = step(batch)`.
The batch is on the CPU, as from a data loader, and the step moves it. If a step does not move its batch, it
gets the batch on the GPU, as from a loader that moves batches.
"""

from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.capture.cuda.names import Names
from planner.capture.cuda.threads import do_nothing, restrict_to_plan
from planner.capture.loop.precision import take_all_steps
from planner.capture.loop.runtime import BatchLoader, PhaseHook
from planner.capture.loop.training_loop import MOST_MICRO_BATCHES
from planner.capture.models.transformers.own_trainer import TrainerModule
from planner.capture.models.user_code.step import StepModule
from planner.jobs import Job
from planner.program import FEWEST_STEPS, Phase

_MOST_CALLS = 12  # enough for an optimizer that steps in every sixth call


def run_own_steps(
    model: StepModule, job: Job, load_batch: BatchLoader, on_phase: PhaseHook
) -> tuple[str, ...]:
    """Call the user's step on at least `job.loop.steps` batches, and return notes on its optimizer steps.

    A job of three or more steps goes on until each optimizer has made two steps, for `_MOST_CALLS` calls at
    most. It may make one every few calls, and only after the first does it hold its state. The last result is
    still alive in the phase `END`.
    """
    result = None  # like a variable of a script, which keeps a loss alive
    phases = _Phases(on_phase, model.optimizers)
    step, most = 0, _MOST_CALLS if job.loop.steps >= FEWEST_STEPS else 0
    with torch.enable_grad(), phases.watching(), take_all_steps():
        while step < job.loop.steps or (step < most and phases.waits_for_optimizers()):
            step += 1
            phases.start(step, Phase.INPUTS)
            args, kwargs, target = load_batch()
            phases.start(step, Phase.FORWARD)
            result = model(args, kwargs, target)
            del args, kwargs, target
        phases.start(step, Phase.END)
    del result
    return phases.notes(step)


def run_trainer(model: TrainerModule, job: Job, batch: int, on_phase: PhaseHook) -> tuple[str, ...]:
    """Run a user's trainer for the job's steps; return notes on its optimizer steps, and its own notes."""
    phases = _Phases(on_phase, model.optimizers)
    steps = count(1)
    with torch.enable_grad(), phases.watching(), take_all_steps():
        phases.start(1, Phase.INPUTS)
        notes = model.run(
            batch,
            job.loop.steps,
            MOST_MICRO_BATCHES,
            lambda: phases.start(next(steps), Phase.INPUTS),
            phases.continue_with,
        )
    return (*phases.notes(job.loop.steps), *notes)


class _Phases:
    """A tracker that calls `on_phase` at each change of phase in a user's steps.

    Code outside backward passes and optimizer steps is in the phase `FORWARD`.
    """

    def __init__(self, on_phase: PhaseHook, optimizers: MutableMapping[int, optim.Optimizer]) -> None:
        self._on_phase = on_phase
        self._optimizers = optimizers
        self._step = 0
        self._running: list[Phase] = []
        self._stepped: dict[str, None] = {}  # names of the classes of optimizers that stepped
        self._updates: Counter[int] = Counter()  # by the id of the optimizer

    def start(self, step: int, phase: Phase) -> None:
        self._step, self._running = step, [phase]
        self._on_phase(step, phase)

    def continue_with(self, phase: Phase) -> None:
        """Start a phase without starting a new step."""
        self.start(self._step, phase)

    def waits_for_optimizers(self) -> bool:
        """Return whether some parameter belongs to no optimizer that has made two steps."""
        parameters = {key: set(map(id, parameters_of(one))) for key, one in self._optimizers.items()}
        updated = [parameters[key] for key in parameters if self._updates[key] > 1]
        return not set().union(*parameters.values()) <= set().union(*updated)

    def notes(self, calls: int) -> tuple[str, ...]:
        """Return a note that tells which optimizers stepped and how often, or that no optimizer did."""
        more = "if one steps in every Nth call only, give twice N as --steps"
        updates = self._updates.total()
        if not updates:
            return (f"no optimizer of torch.optim stepped in {calls} calls of the step; {more}",)
        plural = "" if updates == 1 else "s"
        each = f"{updates} optimizer step{plural} in {calls} calls"
        few = f"; not all parameters were updated twice: {more}" if self.waits_for_optimizers() else ""
        return (f"its own step runs {', '.join(self._stepped)}: {each}{few}",)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark backward passes and optimizer steps as phases inside the context.

        An optimizer step with a closure has the phase `FORWARD`.
        """
        names = Names(
            (torch.autograd, name, self._as_backward(getattr(torch.autograd, name)))
            for name in ("backward", "grad")
        )
        hooks = (
            register_optimizer_step_pre_hook(restrict_to_plan(self._before_update, do_nothing)),
            register_optimizer_step_post_hook(restrict_to_plan(self._after_update, do_nothing)),
        )
        names.replace()
        try:
            yield
        finally:
            names.restore()
            for hook in hooks:
                hook.remove()

    def _enter(self, phase: Phase) -> None:
        self._running.append(phase)
        self._on_phase(self._step, phase)

    def _leave(self) -> None:
        self._running.pop()
        after = self._running[-1]
        self._on_phase(self._step, Phase.FORWARD if after is Phase.INPUTS else after)

    def _as_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(Phase.BACKWARD)
            try:
                return plain(*args, **kwargs)
            finally:
                self._leave()

        return run

    def _before_update(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._stepped[type(optimizer).__name__] = None
        self._updates[id(optimizer)] += 1
        # A closure runs the model, and the optimizer reads its result: values of updates are unknown.
        has_closure = any(map(callable, (*args, *kwargs.values())))
        self._enter(Phase.FORWARD if has_closure else Phase.OPTIMIZER)

    def _after_update(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave()


def parameters_of(optimizer: optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of an optimizer."""
    for group in getattr(optimizer, "param_groups", ()):  # wrappers of optimizers may have none
        yield from group["params"]
