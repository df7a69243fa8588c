"""DistributedDataParallel's buckets in one process, beside the real ones of torch."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.loop.ddp import Buckets, assign_buckets
from planner.jobs import Job, Mode, ZeroGrad, merge_job
from planner.program.events import Alloc, Category, validate
from tests.helpers.models import job_of, story_of_tensors, trace_of


def layers() -> nn.Module:
    """Nine layers of 4 MiB each, and buffers of two dtypes."""
    return nn.Sequential(nn.BatchNorm1d(1024), *(nn.Linear(1024, 1024, bias=False) for _ in range(9)))


class Births(TorchDispatchMode):  # type: ignore[misc]
    """Writes down the flat tensors of float32 that are made: buckets and what broadcasts copy into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name in ("empty", "cat") and out.dtype is torch.float32 and out.dim() == 1:
            self.lines.append(f"{name} {out.numel()}")
        return out


def train(model: nn.Module, before_forward: Callable[[], None], births: Births) -> None:
    """Three steps, as scripts do them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        births.lines.append("forward")
        optimizer.zero_grad()
        before_forward()
        output = model(torch.ones(2, 1024))
        births.lines.append("backward")
        output.sum().backward()
        optimizer.step()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_are_those_of_torch(group: None, as_view: bool) -> None:
    """The rule allocates as DistributedDataParallel does when it is made and in three steps."""
    model, real = layers(), Births()
    with real:
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        train(parallel, lambda: None, real)
    emulated = Births()
    model = layers()
    with (
        emulated,
        closing(Buckets(model, job_of("1024", ddp_bucket_view=as_view), lambda _, __: None)) as ours,
    ):
        train(model, ours.before_forward, emulated)
    assert emulated.lines == real.lines
    mib = 2**18  # elements of float32
    assert real.lines == [
        f"cat {9 * 4 * mib + 4 * 1024}",  # parameters and buffers, broadcast once
        f"empty {9 * 4 * mib + 2 * 1024}",  # one bucket of all gradients
        "forward",
        "cat 2048",  # running statistics, broadcast before each forward pass
        "backward",
        "forward",
        f"empty {4 * mib}",  # at least 1 MiB
        f"empty {7 * 4 * mib}",  # at least 25 MiB
        f"empty {4 * mib + 2 * 1024}",
        "cat 2048",
        "backward",
        "forward",
        "cat 2048",
        "backward",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_lie_where_torch_puts_them(group: None, as_view: bool) -> None:
    """With `gradient_as_bucket_view` all gradients of a bucket share its storage, else each has its own."""

    def storages(model: nn.Module) -> list[int]:
        return [p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None]

    model = layers()
    train(DistributedDataParallel(model, gradient_as_bucket_view=as_view), lambda: None, Births())
    other = layers()
    with closing(Buckets(other, job_of("1024", ddp_bucket_view=as_view), lambda _, __: None)) as ours:
        train(other, ours.before_forward, Births())
    assert storages(other) == storages(model)
    mib = 2**20
    last = [4 * mib + 8192] * 3  # batch norm and the first layer
    assert storages(model) == (
        [*last, *[7 * 4 * mib] * 7, 4 * mib] if as_view else [4096, 4096, *[4 * mib] * 9]
    )


def test_buckets_fill_up_to_their_limits() -> None:
    """A bucket closes when it reaches its limit; each dtype has its own buckets and counts its own limits."""
    sizes = [100, 200, 700, 300, 900, 50]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert assign_buckets(tensors, (250, 1000)) == [[0, 1], [2, 3], [4, 5]]
    tensors[1] = torch.empty(100, dtype=torch.int16)
    assert assign_buckets(tensors, (250, 1000)) == [[0, 2], [3, 4], [1], [5]]


def job(**fields: object) -> Job:
    return job_of("5", mode=Mode.TRAIN, steps=2, ddp=True, **fields)


def linear() -> nn.Module:
    return nn.Linear(5, 7, bias=False)


def test_without_views_gradients_are_there_twice() -> None:
    """The trace of two steps of one layer: the bucket lives on beside the gradient."""
    trace = trace_of(linear, job(), 2)
    validate(trace)
    assert story_of_tensors(trace) == [
        "setup 0",
        "+140 parameters",  # one tensor is broadcast as it is
        "+140 gradients",  # the bucket
        "inputs 1",
        "+40 inputs",
        "forward 1",
        "+56 activations",
        "+4 activations",
        "backward 1",
        "+4 temporaries",
        "+140 gradients",
        "-4",
        "optimizer 1",
        "inputs 2",
        "-40",
        "+40 inputs",
        "forward 2",
        "-140",  # the gradient
        "+140 gradients",
        "+56 activations",
        "-56",
        "+4 activations",
        "-4",
        "backward 2",
        "+4 temporaries",
        "+140 gradients",
        "-140",  # the first bucket, held until the next reduction
        "-4",
        "optimizer 2",
        "end 2",
    ]


def test_with_views_the_gradient_lasts_until_it_is_copied() -> None:
    """At the end there is the bucket and no gradient beside it."""
    trace = trace_of(linear, job(ddp_bucket_view=True), 2)
    lines = story_of_tensors(trace)
    backward = lines[lines.index("backward 2") + 1 : lines.index("optimizer 2")]
    assert backward == ["+4 temporaries", "+140 temporaries", "-140", "-140", "-4"]


@pytest.mark.parametrize(("version", "is_held"), [("2.7", False), ("2.8", True), ("", True)])
def test_buckets_are_held_until_the_next_reduction_since_torch_2_8(version: str, is_held: bool) -> None:
    """Before, the first bucket is freed when the others are made."""
    lines = story_of_tensors(trace_of(linear, job(torch=version), 2))
    forward = lines[lines.index("forward 2") + 1 : lines.index("backward 2")]
    assert forward.count("-140") == 2 - is_held


def test_gradients_kept_as_views_hold_the_first_bucket_while_the_second_is_made() -> None:
    """Set to None only before the backward pass, gradients are copied from bucket to bucket."""
    trace = trace_of(linear, job(ddp_bucket_view=True, zero_grad=ZeroGrad.BEFORE_BACKWARD), 2)
    lines = story_of_tensors(trace)
    forward = lines[lines.index("forward 2") + 1 : lines.index("backward 2")]
    assert forward == ["+140 gradients", "+56 activations", "-56", "+4 activations", "-4"]


def test_frozen_parameters_have_no_place_in_buckets() -> None:
    """They are broadcast when the model is wrapped, and that is all."""
    trace = trace_of(
        lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False)),
        job(freeze=("0.*",)),
        2,
    )
    assert story_of_tensors(trace)[:6] == [
        "setup 0",
        "+80 parameters",
        "+48 parameters",
        "+128 temporaries",  # the flat copy that is broadcast
        "-128",
        "+48 gradients",
    ]
    sizes = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and event.category is Category.GRADIENT
    ]
    assert sizes == [48, 48, 48, 48]


@pytest.mark.parametrize(
    ("options", "is_parallel"),
    [
        ({"ddp_bucket_view": True}, True),
        ({"ddp_bucket_view": True, "ddp": False}, False),
        ({"ddp_bucket_view": False}, False),
        ({"ddp": True}, True),
    ],
)
def test_views_of_buckets_need_buckets(options: dict[str, bool], is_parallel: bool) -> None:
    """--ddp-bucket-view alone is --ddp as well."""
    assert merge_job(Job.create("test"), options).sharding.ddp is is_parallel
