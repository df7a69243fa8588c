"""Optimizers by name take on meta what their classes take on real tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.capture.loop.named_optimizers import build_named, state_tensors
from planner.errors import PlannerError, UsageError
from planner.jobs import Job, Mode, OptimizerImpl
from planner.jobs.optimizer_names import TORCH_OPTIMIZERS, parse_optimizer
from planner.program.events import Alloc, Category, Trace
from tests.helpers.models import job_of, trace_of

CLOSURES = ("LBFGS", "SparseAdam", "Muon")  # each with a test of its own
PLAIN = [name for name in TORCH_OPTIMIZERS if name not in CLOSURES]


class Net(nn.Module):
    """A matrix that 8-bit state is worth for, one of another size, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(90, 100))
        self.small = nn.Parameter(torch.zeros(100, 7))
        self.vector = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.large @ self.small + self.vector


def job(optimizer: str, impl: str = "foreach", **arguments: Any) -> Job:
    """Two steps of training."""
    return job_of(
        "90",
        mode=Mode.TRAIN,
        steps=2,
        optimizer=parse_optimizer(optimizer),
        optimizer_impl=OptimizerImpl(impl),
        optimizer_args=tuple(arguments.items()),
    )


def state_sizes(trace: Trace) -> list[int]:
    """The sizes of the blocks of optimizer state."""
    allocs = [event for event in trace.events if isinstance(event, Alloc)]
    return sorted(one.size_bytes for one in allocs if one.category is Category.OPTIMIZER)


def real_sizes(job: Job) -> list[int]:
    """The sizes of the state that the class itself makes on the CPU, but for counters kept there."""
    model = Net()
    optimizer = build_named(job, model, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in state_tensors(optimizer)}
    return sorted(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", PLAIN)
def test_state_of_torchs_classes(name: str, impl: str) -> None:
    """All tensors of the state are on the GPU, but for counters of steps and products of single numbers."""
    planned, real = state_sizes(trace_of(Net, job(name, impl), 2)), real_sizes(job(name, impl))
    assert [size for size in planned if size > 8] == [size for size in real if size > 8]


@pytest.mark.parametrize("name", PLAIN)
def test_no_operator_is_unknown(name: str) -> None:
    """Each operator of a step has a rule or is declared free of scratch memory."""
    assert trace_of(Net, job(name), 2).unknown_ops == ()


def test_arguments() -> None:
    """Keywords go to the class: AMSGrad has a third tensor, and counters may be on the GPU."""
    plain, more = (state_sizes(trace_of(Net, job("adamw", **one), 2)) for one in ({}, {"amsgrad": True}))
    assert sorted(plain + plain[::2]) == more
    counted = state_sizes(trace_of(Net, job("adamw", capturable=True), 2))
    assert sorted(plain + [4, 4, 4]) == counted


FILE = """
import torch
from torch import nn

class Own(torch.optim.Adam):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(10, 20), nn.Linear(20, 5)
    def forward(self, x):
        return self.b(self.a(x)).sum()

def two(model, lr=0.1):
    assert isinstance(model, Net), type(model)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if one.ndim < 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.SGD(rest)]

def of_parameters(params):
    made = torch.optim.SGD(params, momentum=0.9)
    return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.StepLR(made, 1)}

def number(params):
    return 3

three = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a model and optimizers."""
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def own(file: Path, name: str, **fields: Any) -> Job:
    """The job of the file's model with one of its optimizers."""
    return job(f"{file}:{name}", **fields).replace(model=f"{file}:Net", inputs=job_of("10").samples.inputs)


def test_a_file_makes_several_optimizers(file: Path) -> None:
    """Muon keeps one momentum of each matrix, SGD nothing; the model is an instance of the file's class."""
    from planner.capture.session import record

    trace = record(own(file, "two", lr=0.2), 2, (8, 6))
    assert state_sizes(trace) == [4 * 5 * 20, 4 * 20 * 10]


@pytest.mark.parametrize(("name", "moments"), [("Own", 2), ("of_parameters", 1)])
def test_a_file_has_a_class_or_a_function_of_parameters(file: Path, name: str, moments: int) -> None:
    """Schedulers beside an optimizer are left alone."""
    from planner.capture.session import record

    sizes = sorted(moments * [4 * 5, 4 * 20, 4 * 5 * 20, 4 * 20 * 10])
    assert state_sizes(record(own(file, name), 2, (8, 6))) == sizes


@pytest.mark.parametrize(
    ("optimizer", "impl", "line"),
    [
        (
            "Muon",
            "foreach",
            "--optimizer torch.optim.Muon: ValueError: Muon only supports 2D parameters whereas we found a "
            "parameter with size: torch.Size([7]); name a function of several optimizers, FILE.py:NAME",
        ),
        (
            "LBFGS",
            "foreach",
            "--optimizer torch.optim.LBFGS: LBFGS calls the loss several times in a step, as often as values "
            "decide, which no plan knows; plan another, or use planner run",
        ),
        ("NAdam", "fused", "--optimizer-impl fused: torch.optim.NAdam has no such choice; remove it"),
        (
            "no_such_package.Lion",
            "foreach",
            "--optimizer no_such_package.Lion: no_such_package is not installed; pip install no_such_package",
        ),
        (
            "torch.optim.Adem",
            "foreach",
            "torch.optim has no optimizer 'Adem'; the nearest: Adam, ",
        ),
        (
            "torch.optim.lr_scheduler.StepLR",
            "foreach",
            "--optimizer torch.optim.lr_scheduler.StepLR: is no subclass of torch.optim.Optimizer; name one",
        ),
        (
            "FILE:number",
            "foreach",
            "--optimizer FILE:number: gives an int; return an optimizer or several",
        ),
        (
            "FILE:three",
            "foreach",
            "--optimizer FILE:three: is an int; name a class or a function of the parameters or the model",
        ),
        (
            "FILE:of_parameters",
            "fused",
            "--optimizer-impl fused: FILE:of_parameters chooses by itself; remove it",
        ),
    ],
)
def test_refusals(file: Path, optimizer: str, impl: str, line: str) -> None:
    """What cannot be made, or needs a closure, is refused in one line."""
    with pytest.raises(UsageError) as caught:
        trace_of(Net, job(optimizer.replace("FILE", str(file)), impl), 2)
    assert str(caught.value).replace(str(file), "FILE").startswith(line)


def test_wrong_arguments_are_refused() -> None:
    """A keyword that the class does not take is named."""
    with pytest.raises(PlannerError, match="--optimizer adam: TypeError: .*momentum.*check --optimizer-arg"):
        trace_of(Net, job("adam", momentum=0.9), 2)


# ---- torchao


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "Adam8bit"])
def test_state_of_torchao(name: str) -> None:
    """State is as large as on the CPU: codes, scales and maps from 4,096 numbers in whole blocks on."""
    pytest.importorskip("torchao")

    class Whole(Net):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Parameter(torch.zeros(90, 128))
            self.small = nn.Parameter(torch.zeros(128, 7))

    optimizer = job(f"torchao.optim.{name}")
    planned = state_sizes(trace_of(Whole, optimizer, 2))
    block = 128 if "4" in name else 256
    numbers = 90 * 128
    quantized = 2 * [numbers // (2 if "4" in name else 1), 4 * numbers // block]
    maps = [16 * 4, 16 * 4] if "4" in name else [256 * 4, 256 * 4]
    assert planned == sorted(quantized + maps + 2 * [4 * 128 * 7, 4 * 7])


def test_state_on_the_host_is_told_apart() -> None:
    """Parameters of 4,096 numbers or more take no state on the GPU; a note has the bytes on the host."""
    pytest.importorskip("torchao")
    trace = trace_of(Net, job("torchao.optim.CPUOffloadOptimizer"), 2)
    assert state_sizes(trace) == sorted([4, 4] + 2 * [4 * 700] + 2 * [4 * 7])
    assert trace.pinned == (36_000, 36_000)  # a parameter and its gradient
    (note,) = (note for note in trace.notes if "of the host" in note)
    assert f"{2 * 36_000 + 4:,} bytes of state" in note


# ---- bitsandbytes


@pytest.mark.parametrize(
    "name",
    ["AdamW8bit", "Adam", "Lion8bit", "RMSprop8bit", "AdEMAMix8bit", "PagedAdamW8bit", "Adagrad8bit"],
)
def test_state_of_bitsandbytes(name: str) -> None:
    """State is as large as on the CPU: bytes, with a scale for 256 of them, from 4,096 numbers on."""
    pytest.importorskip("bitsandbytes")
    optimizer = f"bitsandbytes.optim.{name}"
    trace = trace_of(Net, job(optimizer), 2)
    assert (state_sizes(trace), trace.unknown_ops) == (real_sizes(job(optimizer)), ())


def test_paged_state_is_told_apart() -> None:
    """State of 100,000 numbers or more is managed memory: no block, but a note with its bytes."""
    pytest.importorskip("bitsandbytes")

    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.huge = nn.Parameter(torch.zeros(400, 500))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum() + self.huge.sum()

    paged, plain = (
        trace_of(Large, job(f"bitsandbytes.optim.{one}"), 2) for one in ("PagedAdamW8bit", "AdamW8bit")
    )
    assert [size for size in state_sizes(plain) if size not in state_sizes(paged)] == 2 * [400 * 500]
    (note,) = (note for note in paged.notes if "paged" in note)
    assert note.startswith("0.4 MiB of optimizer state is paged (CUDA managed memory)")
    assert not any("paged" in note for note in plain.notes)


def test_kernels_that_bitsandbytes_lacks_are_refused() -> None:
    """CUDA has no blockwise kernel for LAMB, so that its first step would fail."""
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match="bitsandbytes has no 8-bit kernel of lamb on CUDA"):
        trace_of(Net, job("bitsandbytes.optim.LAMB8bit"), 2)


def test_overrides_do_not_outlive_a_capture() -> None:
    """Overrides of single parameters are global to the process; those of a capture go with it."""
    optim = pytest.importorskip("bitsandbytes").optim

    class Overridden(Net):
        def __init__(self) -> None:
            super().__init__()
            manager = optim.GlobalOptimManager.get_instance()
            manager.register_module_override(self, "large", {"optim_bits": 32})

    name = "bitsandbytes.optim.AdamW8bit"
    before = state_sizes(trace_of(Net, job(name), 2))
    assert state_sizes(trace_of(Overridden, job(name), 2)) == sorted(2 * [4 * 7, 4 * 700, 4 * 9000])
    assert state_sizes(trace_of(Net, job(name), 2)) == before
