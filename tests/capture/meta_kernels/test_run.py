"""Outputs that are computed once for each call: they are what torch's meta kernels give."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from planner.capture.meta_kernels.calls import release_importing_frames
from planner.capture.meta_kernels.operand_dtypes import find_check
from planner.capture.meta_kernels.run import MetaRunner
from planner.program import Phase
from tests.capture.meta_kernels.test_pointwise import operands
from tests.helpers.meta_kernels import layout, torchs
from tests.helpers.models import AMPERE

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def run(runner: MetaRunner, func: Any, *args: Any, **kwargs: Any) -> Any:
    return runner.run(func, args, kwargs, Phase.FORWARD)


def checked(func: Any) -> Any:
    """Return a function that calls an operator unless CUDA refuses the dtypes of its operands."""
    check = find_check(func)

    def call(*args: Any) -> Any:
        if check is not None:
            check(args)
        return func(*args)

    return call


UNARY: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.clone.default, ()),
    (aten.zeros_like.default, ()),
    (aten._softmax.default, (-1, False)),
    (aten.sum.dim_IntList, ([-1],)),
    (aten.mean.dim, ([0], True)),
    (aten.linalg_vector_norm.default, ()),
    (aten.relu_.default, ()),
    (aten.erf.default, ()),
]


@pytest.mark.parametrize(("func", "rest"), UNARY, ids=str)
@settings(max_examples=100)
@given(tensors=operands(1))
def test_outputs_of_one_tensor(func: Any, rest: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """A repeated call gives what the first does, which is what torch gives or raises."""
    runner, expected = MetaRunner(AMPERE), torchs(checked(func), *tensors, *rest)
    for _ in range(2):
        assert torchs(lambda: run(runner, func, *tensors, *rest)) == expected


@pytest.mark.parametrize("func", [aten.atan2.default, aten.mm.default, aten.copy_.default], ids=str)
@settings(max_examples=100)
@given(tensors=operands(2))
def test_outputs_of_two_tensors(func: Any, tensors: list[Tensor]) -> None:
    """Shapes that do not fit together raise each time, and so do dtypes that CUDA does not multiply."""
    one, other = tensors
    multiplies = one.dtype.is_floating_point or one.dtype.is_complex or not (one.numel() and other.numel())
    is_refused = func is aten.mm.default and not (one.dtype is other.dtype and multiplies)
    runner, expected = MetaRunner(AMPERE), "raises" if is_refused else torchs(checked(func), *tensors)
    for _ in range(2):
        assert torchs(lambda: run(runner, func, *tensors)) == expected


LISTS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.cat.default, ([meta(2, 3), meta(2, 5)], 1)),
    (aten.stack.default, ([meta(2, 3)] * 4, 1)),
    (aten._foreach_sqrt.default, ([meta(2, 3), meta(4)],)),
    (aten._foreach_add.List, ([meta(2, 3), meta(4)], [meta(2, 3), meta(4)])),
    (aten.native_dropout.default, (meta(2, 3), 0.5, True)),
    (aten.native_group_norm.default, (meta(2, 6, 4), meta(6), None, 2, 6, 4, 3, 1e-5)),
]


@pytest.mark.parametrize(("func", "args"), LISTS, ids=str)
def test_several_outputs(func: Any, args: tuple[Any, ...]) -> None:
    """Lists stay lists and tuples stay tuples."""
    runner, expected = MetaRunner(AMPERE), func(*args)
    for _ in range(2):
        out = run(runner, func, *args)
        assert type(out) is type(expected)
        assert layout(out) == layout(expected)


def test_numbers_of_other_types_are_other_calls() -> None:
    """1, 1.0 and True promote differently, and so does the default dtype."""
    runner, x = MetaRunner(AMPERE), meta(3, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
        for _ in range(2):
            assert run(runner, aten.add.Tensor, x, number).dtype is dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert run(runner, aten.add.Tensor, x, 1.0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_changes_in_place_return_their_argument() -> None:
    """A call in place gives the tensor itself; over lists it gives nothing."""
    runner, x, y = MetaRunner(AMPERE), meta(2, 3), meta(2, 3)
    for _ in range(2):
        assert run(runner, aten.mul_.Tensor, x, y) is x
        assert run(runner, aten.mul_.Tensor, y, x) is y
        assert run(runner, aten.hardswish_.default, x) is x
        assert run(runner, aten._foreach_add_.List, [x], [y]) is None
    assert run(runner, aten.unsqueeze_.default, x, 0) is x
    assert run(runner, aten.unsqueeze_.default, x, 0).shape == (1, 1, 2, 3)


def test_lists_on_the_cpu_are_changed() -> None:
    """Step counts of optimizers have values."""
    step = torch.tensor(1.0)
    run(MetaRunner(AMPERE), aten._foreach_add_.Scalar, [step], 1)
    assert step.item() == 2


def test_views_share_the_storage_of_their_argument() -> None:
    """An output in an argument's storage is no new tensor."""
    runner, x = MetaRunner(AMPERE), meta(2, 3)
    for _ in range(2):
        view = run(runner, aten._unsafe_view.default, x, [3, 2])
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_values_on_the_cpu_are_computed() -> None:
    """Real tensors are computed with each time."""
    runner = MetaRunner(AMPERE)
    for number in (1.0, 2.0):
        assert run(runner, aten.exp2.default, torch.tensor(number)).item() == 2**number


def test_a_module_imported_within_an_operator_keeps_no_tensor() -> None:
    """`torch.fx.wrap` at the top of a module keeps the frames below it, until they are released."""

    def importing() -> "weakref.ref[Tensor]":
        tensor = meta(3)
        exec(compile("import torch\ntorch.fx.wrap('len')", "a_module", "exec"), {})
        return weakref.ref(tensor)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        kept = importing()
        assert kept() is not None
        release_importing_frames()
        assert kept() is None
    finally:
        if was_enabled:
            gc.enable()
