"""Weights of torchao: what they consist of, what quantizing them on the GPU takes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4_TORCH_FUNCTIONS

from planner.capture.models.live.job import copy_weightless
from planner.capture.models.registry import find_constructor
from planner.capture.session import record
from planner.capture.wrapped import parts
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Optimizer, Quantize, parse_tensor_spec
from planner.program.events import Alloc, Category, Free, PhaseStart, Trace
from tests.helpers.models import AMPERE

WIDTH, BATCH = 128, 4
FILE = """
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4


class Nf4(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.empty(256, 128, dtype=torch.bfloat16)), requires_grad=False)

    def forward(self, x):
        return linear_nf4(x, self.weight)


def linear():
    return nn.Sequential(nn.Linear(128, 128, bias=False, dtype=torch.bfloat16))


def before():
    model = linear()
    quantize_(model, Int8WeightOnlyConfig())
    return model.cuda()


def after():
    model = linear().cuda()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def nf4():
    return nn.Sequential(Nf4()).cuda().cuda()
"""


def job_of(model: str, **options: Any) -> Job:
    options = {"mode": "infer", **options}
    return Job.create(model, inputs=(parse_tensor_spec(f"{WIDTH}:bfloat16"),), loss="sum", **options)


def trace_of(job: Job) -> Trace:
    find_constructor(job)
    return record(job, BATCH, AMPERE)


def setup_events(trace: Trace) -> list[Alloc | Free]:
    starts = [number for number, event in enumerate(trace.events) if isinstance(event, PhaseStart)]
    return [event for event in trace.events[starts[0] : starts[1]] if isinstance(event, Alloc | Free)]


def held_bytes(trace: Trace) -> list[int]:
    """Return the bytes of the tensors that are there once the model is on the GPU, by their order."""
    held: dict[int, int] = {}
    for event in setup_events(trace):
        if isinstance(event, Alloc):
            held[event.block] = event.size_bytes
        else:
            del held[event.block]
    return list(held.values())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.py"
    path.write_text(FILE)
    return path


TWO = "nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16), "
INT8 = [WIDTH * WIDTH, 4 * WIDTH, WIDTH]  # the values, a scale for each row, and its zero


def test_a_weight_is_as_large_as_the_tensors_that_it_consists_of(file: Path) -> None:
    trace = trace_of(job_of(f"{file}:before"))
    assert held_bytes(trace) == INT8
    assert not any(isinstance(event, Free) for event in setup_events(trace))


def test_quantizing_on_the_gpu_takes_the_weight_and_what_its_code_makes(file: Path) -> None:
    """The weight is there first, and goes once its quantization is done."""
    trace = trace_of(job_of(f"{file}:after"))
    first, *others = setup_events(trace)
    assert isinstance(first, Alloc) and first.size_bytes == 2 * WIDTH * WIDTH
    assert Free(first.block) in others
    assert sorted(held_bytes(trace)) == sorted(INT8)
    kept = {event.category for event in setup_events(trace) if isinstance(event, Alloc)}
    assert Category.PARAMETER in kept


def test_nf4_dequantizes_in_each_product(file: Path) -> None:
    """Two numbers a byte, a scale for 64 and a factor for 256 of those, their mean, and 16 values."""
    size = 256 * WIDTH
    blocks = size // 64
    held = [size // 2, 2, 2 * blocks // 256, blocks, 2 * 16]
    trace = trace_of(job_of(f"{file}:nf4"))
    assert held_bytes(trace) == held
    assert any(isinstance(event, Alloc) and event.size_bytes == 2 * size for event in trace.events)
    assert torch.Tensor.to in NF4_TORCH_FUNCTIONS  # as it was before the capture


def test_a_module_in_use_is_copied_with_its_weights() -> None:
    live = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    quantize_(live, int8_weight_only_quantized_training())
    copied = copy_weightless(live)
    weight: Any = copied[0].weight  # type: ignore[index]
    assert isinstance(weight, nn.Parameter) and type(weight) is type(live[0].weight)
    assert weight.requires_grad
    assert [(one.device.type, one.nbytes) for one in parts(weight)] == [
        ("meta", WIDTH * WIDTH),
        ("meta", 4 * WIDTH),
    ]


def test_trained_weights_take_no_multi_tensor_kernels(file: Path) -> None:
    """torch chooses them for plain parameters alone, and these weights have no such operators."""
    file.write_text(FILE.replace("nn.Sequential(", TWO))
    options: dict[str, Any] = {"mode": "train", "optimizer": Optimizer.ADAM}
    trace = trace_of(job_of(f"{file}:linear", quantize=Quantize.INT8_TRAINING, **options))
    sites = {trace.sites[event.site].op for event in trace.events if isinstance(event, Alloc)}
    assert not any("_foreach" in op for op in sites)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantize": Quantize.INT8_WEIGHT_ONLY, "quantize_arg": (("group", 8),)}, "the nearest: group_size"),
    ],
)
def test_what_torchao_cannot_do_is_refused(file: Path, options: dict[str, Any], problem: str) -> None:
    file.write_text(FILE.replace("nn.Sequential(", TWO))
    with pytest.raises(UsageError, match=problem):
        trace_of(job_of(f"{file}:linear", **options))


def test_a_model_without_inner_layers_has_nothing_to_quantize(file: Path) -> None:
    """The last layer stays as it is."""
    with pytest.raises(ModelError, match="no linear layer"):
        trace_of(job_of(f"{file}:linear", quantize=Quantize.INT8_WEIGHT_ONLY))
