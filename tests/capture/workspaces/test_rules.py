"""Workspace rules: their order, their arguments, and which operators need none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.capture.workspaces._rule import positional_args
from planner.capture.workspaces.ops import Hold, KernelOp, Op, Release, ReleaseBeneath
from planner.capture.workspaces.registry import RULES, is_unknown, rule_of
from planner.jobs import Loss, Mode
from planner.program.events import validate
from planner.program.kernels.expansion import OpKind, expand_kernel
from planner.program.target import Target
from tests.capture.recorder.test_recorder import story
from tests.helpers.models import AMPERE, job_of, trace_of
from tests.helpers.workspaces import OUTPUT, REST, aten, meta


class Pool(nn.Module):
    """One operator with two outputs of 4 and 8 bytes."""

    def forward(self, x: Tensor) -> Any:
        return aten.max_pool2d_with_indices(x, [2, 2])


@pytest.mark.parametrize(
    ("written", "body"),
    [
        ((), "+4 +8"),
        ((7,), "+4 +8 +7 -7"),
        ((KernelOp(OpKind.TRY, 7),), "+4 +8 +7 -7"),
        ((Hold(7), Hold(9)), "+4 +8 +7 +9 -9 -7"),
        ((Hold(7), REST), "+7 +4 +8 -7"),
        ((OUTPUT, 7, OUTPUT, 9), "+4 +7 -7 +8 +9 -9"),
        ((OUTPUT, 7), "+4 +7 -7 +8"),
        ((Hold(7), OUTPUT, Release(1), 9, REST), "+7 +4 -7 +9 -9 +8"),
        ((Hold(7), Hold(9), Release(1), REST), "+7 +9 -9 +4 +8 -7"),
        ((Hold(0), 0), "+4 +8"),
        ((Hold(0), Release(1), 9), "+4 +8 +9 -9"),
        ((Hold(7), Hold(0), Release(1), 9), "+4 +8 +7 +9 -9 -7"),
        ((Hold(0), Hold(7), Hold(0), ReleaseBeneath(1), 9), "+4 +8 +7 -7 +9 -9"),
    ],
    ids=str,
)
def test_a_rule_orders_outputs_and_scratch(
    written: tuple[Op, ...], body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks before, between and after the outputs; those that are held go in reverse order."""
    func = aten.max_pool2d_with_indices.default
    monkeypatch.setitem(RULES, func, lambda args, out, capability: written)
    trace = trace_of(Pool, job_of("1x2x2", mode=Mode.INFER), 1)
    validate(trace)
    lines = [line.split()[0] for line in story(trace)]
    start = lines.index("forward") + 1
    assert " ".join(lines[start : lines.index("end")]) == body


class Chooses(nn.Module):
    """A layer of which no sample is chosen, and an operator on them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)[:0]).sum()


def empty_index(y: Tensor) -> Tensor:
    """Index by nothing twice."""
    nobody = torch.zeros(0, dtype=torch.int64, device=y.device)
    return y[nobody, nobody]


@pytest.mark.parametrize(
    "function",
    [
        empty_index,
        lambda y: functional.conv2d(y.view(0, 1, 8, 8), torch.ones(2, 1, 3, 3, device=y.device)),
        lambda y: functional.scaled_dot_product_attention(*[y.view(0, 2, 4, 8)] * 3),
        lambda y: y.logsumexp(1),
        lambda y: torch.linalg.det(y.view(0, 8, 8)),
        lambda y: functional.layer_norm(y, (64,)),
        lambda y: functional.embedding(torch.zeros(0, dtype=torch.int64, device=y.device), y),
    ],
)
def test_operators_on_nothing_are_planned(function: Callable[[Tensor], Tensor]) -> None:
    """A kernel whose scratch memory has no bytes, where no sample of a batch is chosen, allocates none."""
    job = job_of("64", mode=Mode.TRAIN, loss=Loss.OUTPUT)
    validate(trace_of(lambda: Chooses(function), job, 8))


def test_arguments_by_name_are_put_in_order() -> None:
    """A rule finds arguments by position, however they were given."""
    x = meta(3)
    assert positional_args(aten.sort.stable, (x,), {"stable": True, "dim": 0})[1:] == (True, 0, False)
    assert positional_args(aten.sum.dim_IntList, (x, [0]), {}) == (x, [0])


def test_states_of_operators() -> None:
    """A rule, a declaration, a tag or a view make an operator known; all else is not."""
    assert not is_unknown(aten.embedding_dense_backward.default)
    assert not is_unknown(aten.mm.default)
    assert not is_unknown(aten.gather.default)
    assert not is_unknown(aten.sin.default)
    assert not is_unknown(aten.view.default)
    assert is_unknown(aten.linalg_eig.default)


def test_a_stored_kernel_counts_blocks_of_no_bytes_as_the_recorder_does() -> None:
    """A release of the block that was taken last frees no other one where that has no bytes."""
    ops = ((OpKind.HOLD, 7), (OpKind.HOLD, 0), (OpKind.RELEASE, 1), (OpKind.TRANSIENT, 9))
    events = expand_kernel(ops, [], 0, site=0, number=0)
    assert [(type(event).__name__, event.block) for event in events] == [
        ("Alloc", 0),
        ("Alloc", 1),
        ("Free", 1),
        ("Free", 0),
    ]


def test_operators_that_fill_out_have_the_rules_of_those_that_make_their_results() -> None:
    x, indices = meta(8, 2816), meta(8, 2816, dtype=torch.int64)
    target = Target.for_capability(AMPERE)
    for func in (aten.sort.values, aten.sort.values_stable):
        rule = rule_of(func)
        stable = (True,) if func is aten.sort.values_stable else ()
        assert rule is not None
        assert rule((x, *stable, 1, False, x, indices), (x, indices), target) == (8 * 2816,)
    assert rule_of(aten.add.out) is None
