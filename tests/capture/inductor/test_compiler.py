"""Compiled models: what the code allocates that torch.compile's own pipeline generates."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._inductor.utils import get_triton_attrs_descriptor_version
from torch.utils.checkpoint import checkpoint

from planner.capture.inductor.kernels import tuning_of
from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import Compile, Job, Loss, Mode, complete_job, parse_tensor_spec
from planner.program.events import Alloc, Phase, PhaseStart, Trace
from tests.helpers.compiled import BATCH, CLASSES, FLUSHED, HIDDEN, WIDTH, WORKSPACE, Broken, Gated
from tests.helpers.models import HOPPER, job_of, trace_of


def _job(**fields: object) -> Job:
    given = {"mode": Mode.TRAIN, "steps": 2, "loss": Loss.SUM, "compile": Compile.DEFAULT, **fields}
    return job_of(str(WIDTH), **given)


@cache
def _trace(model: type[nn.Module], compiled: Compile) -> Trace:
    return trace_of(model, _job(compile=compiled), BATCH)


def _born(trace: Trace, step: int, phase: Phase) -> list[int]:
    """Sizes of the blocks that are allocated in a phase, in order."""
    sizes, now = [], (0, Phase.SETUP)
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.step, event.phase
        elif isinstance(event, Alloc) and now == (step, phase):
            sizes.append(event.size_bytes)
    return sizes


def test_pointwise_operators_are_one_kernel_with_one_buffer() -> None:
    """Sigmoid, tanh and product take a buffer for the result; the product of the layers another each."""
    hidden, out = 4 * BATCH * HIDDEN, 4 * BATCH * CLASSES
    loss = 4
    assert _born(_trace(Gated, Compile.DEFAULT), 2, Phase.FORWARD) == [hidden, hidden, out, loss]
    assert _born(_trace(Gated, Compile.NONE), 2, Phase.FORWARD) == [hidden] * 4 + [out, loss]


def test_first_step_also_times_kernels_and_keeps_the_workspaces_of_cublas() -> None:
    """The first step allocates what the second does, and beside it the workspaces and what is timed."""
    trace = _trace(Gated, Compile.DEFAULT)
    forward = [size for size in _born(trace, 1, Phase.FORWARD) if size not in (WORKSPACE, FLUSHED)]
    assert forward == _born(trace, 2, Phase.FORWARD)
    assert _born(trace, 1, Phase.FORWARD).count(WORKSPACE) == 1
    assert _born(trace, 1, Phase.BACKWARD).count(WORKSPACE) == 1
    assert FLUSHED not in _born(trace, 2, Phase.FORWARD) + _born(trace, 2, Phase.BACKWARD)


class Frugal(Gated):
    """The same, whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        functorch_config.activation_memory_budget = 0.0
        super().__init__()


def test_a_budget_of_activations_holds_for_its_capture_alone() -> None:
    """The backward pass computes the hidden layer again, and the process has its own budget afterwards."""
    hidden = 4 * BATCH * HIDDEN
    kept, again = (_born(_trace(model, Compile.DEFAULT), 2, Phase.BACKWARD) for model in (Gated, Frugal))
    assert again.count(hidden) > kept.count(hidden)
    assert functorch_config.activation_memory_budget == 1.0


def test_graph_breaks_end_one_graph_and_begin_another() -> None:
    """The result of the first graph is saved as its output and as the input of the second: one block."""
    whole, broken = (_born(_trace(model, Compile.DEFAULT), 2, Phase.FORWARD) for model in (Gated, Broken))
    assert broken == whole


def test_evaluation_is_compiled_without_what_a_backward_pass_needs() -> None:
    """Without gradients the kernel writes its result over its input."""
    trace = trace_of(Gated, _job(steps=3, evaluate=True), BATCH)
    evaluated = _born(trace, 3, Phase.EVALUATION)
    hidden, out = 4 * BATCH * HIDDEN, 4 * BATCH * CLASSES
    assert evaluated[-3:] == [hidden, out, 4]  # the second batch


def test_compiling_leaves_torch_as_it_was() -> None:
    """A plain capture after a compiled one gives the same events as one before it."""
    job = _job(compile=Compile.NONE)
    before = trace_of(Gated, job, BATCH)
    trace_of(Gated, _job(), BATCH)
    assert trace_of(Gated, job, BATCH).events == before.events


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ddp": True}, "--ddp"),
        ({"torch": "2.6"}, "2.13"),
        ({"dataset_size": 100, "steps": 3}, "--dataset-size"),
        ({"evaluate": True, "eval_batch": 3, "steps": 3}, "--eval-batch"),
    ],
)
def test_jobs_whose_compiled_form_is_not_planned_are_refused(fields: dict[str, object], reason: str) -> None:
    """The message names what is not planned."""
    with pytest.raises(UsageError, match=reason):
        complete_job(_job().replace(**fields))


_KERNEL = """
import triton
@triton_heuristics.pointwise(
    size_hints={{'x': {elements}}}, filename=__file__,
    triton_meta={{'device': DeviceProperties(type='cuda', index=0, multi_processor_count=82, cc=86)}},
    inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': False}},
    min_elem_per_thread=0
)
@triton.jit
def triton_(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


def test_kernels_are_timed_where_heuristics_give_several_configurations() -> None:
    """A pointwise kernel has one configuration where it is small, two where it is large."""
    small, large = (tuning_of(_KERNEL.format(elements=count)) for count in (64, 2**20))
    assert (small.is_timed, large.is_timed) == (False, True)
    assert large.changed == {"in_out_ptr0"}
    assert large.arguments[:2] == ("in_out_ptr0", "in_ptr0")
    assert not large.spares_memory


def test_kernels_with_functions_of_their_own_are_timed_by_their_own_heuristic() -> None:
    """inductor writes the function that combines two values of a scan before the kernel."""
    helper = "@triton.jit\ndef _triton_helper_fn_add0(arg0_0, arg1_0):\n    return arg0_0 + arg1_0\n"
    kernel = _KERNEL.format(elements=64)
    assert tuning_of(helper + kernel) == tuning_of(kernel)


class Attending(nn.Module):
    """Attention of four heads between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3 * HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.second(attended.transpose(1, 2).flatten(2))


def test_attention_takes_the_fused_kernel_of_the_gpu() -> None:
    """The efficient kernel takes one sum per row in steps of 32; scores are not held."""
    rows, heads = 16, 4
    trace = trace_of(Attending, _job(inputs=(parse_tensor_spec(f"{rows}x{WIDTH}"),)), BATCH)
    forward = _born(trace, 2, Phase.FORWARD)
    assert 4 * BATCH * heads * 32 in forward
    assert 4 * BATCH * heads * rows * rows not in forward


def test_equal_steps_compile_once_though_names_of_torch_differ_between() -> None:
    """A function that a capture replaces is called in the model: the steps after the first are alike."""
    trace = trace_of(Ranged, _job(steps=3), BATCH)
    second, third = (_born(trace, step, Phase.FORWARD) for step in (2, 3))
    assert second == third
    assert FLUSHED not in second


class Ranged(Gated):
    """Makes a range of numbers on the device of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(x.shape[1], device=x.device))


class Summed(nn.Module):
    """Sums each column of many rows, which small GPUs do in other parts than large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(0)


def test_each_gpu_of_a_process_is_compiled_for_by_its_own_multiprocessors() -> None:
    """A GPU that is planned after another one has the trace that it has alone."""
    few, many, again = (trace_of(Summed, _job(), 2**16, sm_count=count) for count in (8, 128, 8))
    assert few.events == again.events
    assert few.events != many.events


def test_files_that_import_triton_are_compiled_where_it_is_missing(tmp_path: Path) -> None:
    """A kernel of Triton's that a file holds changes nothing of what else it compiles."""
    lines = ["import torch", "class Net(torch.nn.Linear):", "    def __init__(self): super().__init__(8, 4)"]
    lines.append("    def forward(self, x): return super().forward(x.sigmoid()).tanh()")
    job = job_of("8", loss=Loss.SUM, compile=Compile.DEFAULT)
    peaks = []
    for name, first in (("plain", []), ("holds", ["import triton"])):
        file = tmp_path / f"{name}.py"
        file.write_text("\n".join([*first, *lines]))
        get_triton_attrs_descriptor_version.cache_clear()
        trace = record(job.replace(model=f"{file}:Net"), 4, (8, 0), sm_count=108)
        peaks.append([event.size_bytes for event in trace.events if isinstance(event, Alloc)])
    assert peaks[0] == peaks[1]


class Attended(Attending):
    """Computes its attention again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_attention_that_is_computed_again_takes_its_results_twice() -> None:
    """The fused kernel's sums are made in the forward pass and again in the backward pass."""
    rows, heads = 16, 4
    trace = trace_of(Attended, _job(inputs=(parse_tensor_spec(f"{rows}x{WIDTH}"),)), BATCH)
    sums = 4 * BATCH * heads * 32
    assert sums in _born(trace, 2, Phase.FORWARD)
    assert sums in _born(trace, 2, Phase.BACKWARD)


def test_weights_that_torchao_casts_to_float8_are_tensors_of_one_byte() -> None:
    """A compiled layer of float8 casts its input and its weight; its product is in bfloat16."""
    float8 = pytest.importorskip("torchao.float8")
    batch, width, rows = 64, 128, 256

    def build() -> nn.Module:
        layer = nn.Sequential(nn.Linear(width, rows, bias=False)).bfloat16()
        return float8.convert_to_float8_training(layer)  # type: ignore[no-any-return]

    job = _job(inputs=(parse_tensor_spec(f"{width}:bfloat16"),))
    trace = trace_of(build, job, batch, HOPPER)
    forward = _born(trace, 2, Phase.FORWARD)
    assert {batch * width, width * rows, 2 * batch * rows} <= set(forward)
    assert 2 * width * rows not in forward
    assert not trace.unknown_ops


class MakesFirst(nn.Module):
    """A layer behind a tensor that its first operator makes, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH, device=x.device)
        return self.layer(x) * positions  # type: ignore[no-any-return]


class BreaksFirst(MakesFirst):
    """The same, run outside of any graph before a graph begins."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        positions = torch.arange(WIDTH, device=x.device)
        torch._dynamo.graph_break()
        return self.layer(x) * positions  # type: ignore[no-any-return]


class MasksOnCpu(nn.Module):
    """A layer whose result is scaled by a mask from the CPU, as window masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(WIDTH)
        mask[2:4] = 1
        return self.layer(x) * (mask + 1).to(x.device)  # type: ignore[no-any-return]


# A process of its own, in which torch's compiler is not imported yet, as in any plan.
ALONE = """
from planner.capture.session import record
from planner.capture.models.registry import construct_model
from tests.capture.inductor.test_compiler import {name}, _job
from tests.helpers.models import HOPPER
trace = record(_job(), 4, HOPPER, lambda job: construct_model(job, {name}))
print([event.size_bytes for event in trace.events if hasattr(event, "size_bytes")])
"""


@pytest.mark.parametrize("model", [MakesFirst, BreaksFirst, MasksOnCpu])
def test_what_the_first_operators_make_is_planned(model: type[nn.Module]) -> None:
    """A tensor of the first operator, on the GPU or on the CPU, compiled in a graph or run outside of one."""
    sizes = _born(trace_of(model, _job(), BATCH), 2, Phase.FORWARD)
    assert 4 * BATCH * WIDTH in sizes
    assert (4 * WIDTH in sizes) == (model is MasksOnCpu)  # the mask is copied to the GPU


@pytest.mark.slow
def test_a_compiler_that_a_plan_imports_knows_the_functions_of_torch() -> None:
    """Dynamo fills its table of torch's functions as it first compiles, while names of torch are replaced."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(name="MakesFirst")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "SMs" not in done.stderr  # nor does it pass on what inductor says of a GPU that is not there
