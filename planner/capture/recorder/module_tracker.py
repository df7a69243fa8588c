"""Track the running modules of a model.

The innermost module is part of a block's site, and tells where a model failed.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import _StopRecomputationError

from planner.capture.cuda.threads import do_nothing, restrict_to_plan
from planner.program import Phase


class ModuleTracker:
    """A tracker of the running modules of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._root = getattr(type(model), "words_for_root", "the model's own forward")
        self._stack: list[tuple[int, str]] = [(0, "")]  # running modules, by `id` and name
        # Autograd sequence numbers, and the modules that make the nodes starting at each number.
        self._graph: tuple[list[int], list[str]] = ([0], [""])

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track the model's running modules inside the context."""
        enter, leave = (restrict_to_plan(one, do_nothing) for one in (self._enter, self._leave))
        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def name_in(self, phase: Phase) -> str:
        """Return the name of the innermost running module, or else of the autograd node's module, or "".

        The second is for the backward pass if no module runs: the module made the running node.
        """
        if phase is not Phase.BACKWARD or len(self._stack) > 1:
            return self._stack[-1][1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        numbers, names = self._graph
        return names[bisect_right(numbers, node._sequence_nr()) - 1]

    def place_in(self, phase: Phase) -> str:
        """Return a description of the running module, or of the phase if no module runs.

        A phase is named as the loss, the backward pass, or by its name.
        """
        if len(self._stack) > 1:
            name = self._stack[-1][1]
            return f"module '{name}'" if name else self._root
        if phase in (Phase.FORWARD, Phase.EVALUATION):
            return "the loss"
        return "the backward pass" if phase is Phase.BACKWARD else f"the loop's {phase}"

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._stack.append((id(module), self._names.get(id(module), type(module).__name__)))
        self._mark_graph()

    def _leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        error = sys.exception() if out is None else None
        if error is not None and not isinstance(error, _StopRecomputationError):
            return  # the module raised and stays, for the error message; a checkpoint only stops early
        while self._stack.pop()[0] != id(module):
            pass  # a module inside this module raised, and this module continued
        self._mark_graph()

    def _mark_graph(self) -> None:
        numbers, names = self._graph
        numbers.append(torch._C._autograd._get_sequence_nr())
        names.append(self._stack[-1][1])
