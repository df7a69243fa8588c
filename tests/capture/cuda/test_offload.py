"""Activations in memory of the host: they leave the GPU, come back in the backward pass, and are counted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.jobs import Job, Mode
from planner.program import pinned_bytes
from planner.program.events import Alloc, Category, Phase, PhaseStart, Trace
from planner.program.extrapolation.fit import fit_traces
from tests.helpers.models import job_of, trace_of

WIDTH = 100
ROWS = 24
ACTIVATION = ROWS * WIDTH * 4
aten = torch.ops.aten


class Steps(nn.Module):
    """Three sines of one another, each of which saves its input, under a context of the test."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.weight
        with self.context():
            return x.sin().sin().sin()


def job() -> Job:
    """One step of training on the sum of the output."""
    return job_of(str(WIDTH), mode=Mode.TRAIN)


def bytes_in(trace: Trace, phase: Phase, category: Category) -> int:
    """The bytes of this category that are allocated in a phase."""
    now, total = Phase.SETUP, 0
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.phase
        elif isinstance(event, Alloc) and now is phase and event.category is category:
            total += event.size_bytes
    return total


@pytest.mark.parametrize(("is_pinned", "pinned"), [(True, (ACTIVATION,) * 3), (False, ())])
def test_saved_tensors_come_back_in_the_backward_pass(is_pinned: bool, pinned: tuple[int, ...]) -> None:
    """None of them is kept on the GPU; the pinned ones are blocks of the host."""
    trace = trace_of(lambda: Steps(partial(save_on_cpu, pin_memory=is_pinned)), job(), ROWS)
    kept = trace_of(lambda: Steps(torch.enable_grad), job(), ROWS)
    assert (trace.pinned, kept.pinned) == (pinned, ())
    held, elsewhere = (bytes_in(one, Phase.FORWARD, Category.ACTIVATION) for one in (kept, trace))
    assert held - elsewhere == 3 * ACTIVATION
    before, after = (bytes_in(one, Phase.BACKWARD, Category.TEMPORARY) for one in (kept, trace))
    assert after - before == 3 * ACTIVATION
    assert bytes_in(trace, Phase.BACKWARD, Category.INPUT) == 0


def test_hooks_of_users_pin_as_torch_does() -> None:
    """A copy made with `pin_memory=True`, filled without waiting, and moved back to the tensor's device."""

    def pack(saved: Tensor) -> tuple[Any, Tensor]:
        copied = torch.empty_like(saved, device="cpu", pin_memory=True)
        copied.copy_(saved, non_blocking=True)
        assert not copied.is_cuda and saved.is_cuda
        return saved.device, copied

    def unpack(packed: tuple[Any, Tensor]) -> Tensor:
        return packed[1].to(packed[0], non_blocking=True)

    trace = trace_of(lambda: Steps(lambda: saved_tensors_hooks(pack, unpack)), job(), ROWS)
    assert trace.pinned == (ACTIVATION,) * 3


def test_pinned_blocks_are_fitted_to_any_batch() -> None:
    """A program of two traces gives the blocks of a third."""
    few, more, most = (
        trace_of(lambda: Steps(partial(save_on_cpu, pin_memory=True)), job(), n) for n in (2, 3, 9)
    )
    assert fit_traces(few, more).instantiate(9).pinned == most.pinned == (9 * WIDTH * 4,) * 3


def test_torch_pins_powers_of_two() -> None:
    """2.25 GiB become 4; a power of two stays."""
    assert pinned_bytes([9 * 2**28]) == 2**32
    assert pinned_bytes([2**20, 2**20 + 1]) == 3 * 2**20


class Selective(nn.Module):
    """A layer and its sine under a checkpoint that saves what the test names."""

    def __init__(self, saved: set[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            saves = op in self.saved
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        for layer in self.layers:
            run = partial(lambda layer, x: layer(x).sin(), layer)
            x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        return x


def test_a_policy_decides_what_a_checkpoint_keeps() -> None:
    """With products saved, each block keeps one more tensor and multiplies no second time."""
    none, products = (
        trace_of(lambda saved=s: Selective(saved), job(), ROWS) for s in (set(), {aten.mm.default})
    )
    kept = [bytes_in(trace, Phase.FORWARD, Category.ACTIVATION) for trace in (none, products)]
    assert kept[1] - kept[0] == 3 * ACTIVATION
    counts = [sum(trace.sites[e.site].op == "aten.mm.default" and e.category is Category.TEMPORARY
                  for e in trace.events if isinstance(e, Alloc)) for trace in (none, products)]  # fmt: skip
    assert counts[0] - counts[1] >= 3
