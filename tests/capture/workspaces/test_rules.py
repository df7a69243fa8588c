"""Workspace rules: their order, their arguments, and which operators need none."""

from typing import Any

import pytest
from torch import Tensor, nn

from planner.capture.workspaces._rule import positional_args
from planner.capture.workspaces.ops import Hold, KernelOp, Op, Release
from planner.capture.workspaces.registry import RULES, is_unknown
from planner.jobs import Mode
from planner.program.events import validate
from planner.program.kernel import OpKind
from tests.capture.recorder.test_recorder import story
from tests.helpers.models import job_of, trace_of
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
    assert is_unknown(aten._linalg_svd.default)
