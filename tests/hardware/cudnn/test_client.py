"""Workspaces that a library reports. cuDNN itself answers where one is at hand: that of pytest's option
`--cudnn FOLDER`, or one that a package brings.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict
from torch import Tensor, nn

import planner
import planner._support.worker
import planner.hardware.cudnn.client
from planner.capture.session import record
from planner.capture.symbolic.builder import ProgramBuilder
from planner.capture.workspaces.ops import KernelOp, Op, Output, answer_convolutions
from planner.capture.workspaces.registry import RULES
from planner.emulator.compiled import SOME_MIB, cublaslt_for, open_cudnn_with_cublaslt
from planner.emulator.convolution_workspaces import CudnnWorkspaces, default_source, open_convolutions
from planner.emulator.gpu import describe_gpu
from planner.errors import UsageError
from planner.hardware import generic_device
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.cudnn.client import Cudnn, describe_for_cudnn, open_cudnn
from planner.hardware.cudnn.library_files import installed_folder
from planner.hardware.database import find_device
from planner.jobs import INSTALLED, PUBLISHED, STORED, Job, Mode, Optimizer
from planner.planning.programs import CaptureMode, open_programs
from planner.program import ignore_progress
from planner.program.diff import first_divergence
from planner.program.events import Alloc, Category, Free, Trace
from planner.program.kernels.convolution import Convolution, Direction, Engine, Workspaces
from planner.program.kernels.expansion import OpKind
from planner.program.target import Target
from planner.store.fingerprint import fingerprint_of
from tests.helpers.models import AMPERE, job_of, on_meta
from tests.helpers.structs import replace

aten = torch.ops.aten
OUTPUT = Output()
HALF = torch.float16


@dataclass(eq=False)
class FakeCudnn:
    """A library that takes 4 bytes for each number of x, and records its queries."""

    version: str = "9.99.0"
    lacks: str = ""
    silent: frozenset[tuple[int, int]] = frozenset()
    engine: Engine | None = Engine(1, (), 0)
    queries: list[Convolution] = field(default_factory=list)

    def workspaces(self, capability: tuple[int, int], multiprocessors: int, query: Convolution) -> Workspaces:
        self.queries.append(query)
        return Workspaces(_bytes_of(query.x), engine=self.engine)

    def benchmarked(
        self, capability: tuple[int, int], multiprocessors: int, query: Convolution
    ) -> Workspaces:
        return Workspaces(_bytes_of(query.x), 10 * _bytes_of(query.x), engine=self.engine)


def answers_of(fake: FakeCudnn, *, benchmark: bool) -> CudnnWorkspaces:
    """Return the library as what answers for a job's convolutions."""
    return CudnnWorkspaces(fake, benchmark)  # type: ignore[arg-type]


def _bytes_of(sizes: tuple[int, ...]) -> int:
    total = 4
    for size in sizes:
        total *= size
    return total


def meta(*sizes: int, dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    made = torch.empty(sizes, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def forward(x: Tensor, weight: Tensor, *options: object) -> list[Convolution]:
    """Return the queries of a forward pass with these strides, padding, dilation, transposed, groups."""
    stride, padding, dilation, transposed, groups = options
    args = (x, weight, None, stride, padding, dilation, transposed, [0, 0], groups)
    out = aten.convolution.default(*args)
    return queries_of(RULES[aten.convolution.default](args, out, Target(AMPERE, 28)))


def queries_of(ops: Sequence[Op]) -> list[Convolution]:
    """Return the convolutions for which a library answers."""
    return [op.convolution for op in ops if isinstance(op, KernelOp) and op.convolution is not None]


def test_a_forward_pass_is_queried_as_cudnn_sees_it() -> None:
    """Shapes, type, layout and geometry; a row is an image of height 1."""
    one = forward(meta(2, 3, 8, 6), meta(4, 3, 3, 1), [2, 1], [1, 0], [1, 1], False, 1)
    assert one == [
        Convolution(
            Direction.FORWARD,
            "float32",
            (2, 3, 8, 6),
            (4, 3, 3, 1),
            (2, 4, 4, 6),
            False,
            (1, 0),
            (2, 1),
            (1, 1),
        )
    ]
    (row,) = forward(meta(2, 3, 9), meta(4, 3, 3), [2], [1], [1], False, 1)
    assert (row.x, row.w, row.y) == ((2, 3, 1, 9), (4, 3, 1, 3), (2, 4, 1, 5))
    assert (row.padding, row.stride, row.dilation) == ((0, 1), (1, 2), (1, 1))


def test_channels_last_as_soon_as_input_or_weight_is() -> None:
    """But never in double precision (ConvUtils.h)."""
    geometry = ([1, 1], [0, 0], [1, 1], False, 1)
    assert not forward(meta(2, 4, 5, 5), meta(8, 4, 3, 3), *geometry)[0].channels_last
    assert forward(meta(2, 4, 5, 5, last=True), meta(8, 4, 3, 3), *geometry)[0].channels_last
    assert forward(meta(2, 4, 5, 5), meta(8, 4, 3, 3, last=True), *geometry)[0].channels_last
    double = meta(2, 4, 5, 5, dtype=torch.float64, last=True), meta(8, 4, 3, 3, dtype=torch.float64)
    assert not forward(*double, *geometry)[0].channels_last


def test_a_transposed_convolution_is_anothers_data_gradient() -> None:
    """The query is of the convolution from its output to its input, never of PyTorch's depthwise kernel."""
    (query,) = forward(meta(2, 6, 5, 5), meta(6, 1, 3, 3), [2, 2], [1, 1], [1, 1], True, 6)
    assert query.direction is Direction.DATA
    assert (query.x, query.w, query.y) == ((2, 6, 9, 9), (6, 1, 3, 3), (2, 6, 5, 5))


@pytest.mark.parametrize(
    ("batch", "channels", "width", "kernel", "stride", "dtype", "last", "of_cudnn"),
    [
        (8, 64, 28, 3, 1, torch.float32, False, False),
        (8, 64, 28, 3, 1, torch.float32, True, True),
        (8, 64, 28, 3, 1, HALF, False, True),
        (8, 64, 28, 7, 1, HALF, False, False),
        (8, 16, 28, 3, 1, HALF, False, False),
        (8, 64, 6, 3, 1, HALF, False, False),
        (8, 64, 28, 3, 2, HALF, False, False),
        (8, 512, 28, 3, 2, HALF, False, True),
        (8, 256, 28, 3, 2, HALF, False, True),
        (1, 64, 28, 3, 2, HALF, False, True),
        (8, 64, 28, 3, 1, torch.bfloat16, False, False),
    ],
)
def test_depthwise_convolutions_that_pytorch_runs_itself(
    batch: int,
    channels: int,
    width: int,
    kernel: int,
    stride: int,
    dtype: torch.dtype,
    last: bool,
    of_cudnn: bool,
) -> None:
    """Contiguous ones, but for half precision with kernels and widths that cuDNN is good at."""
    x = meta(batch, channels, width, width, dtype=dtype, last=last)
    weight = meta(channels, 1, kernel, kernel, dtype=dtype)
    pad = kernel // 2
    query = forward(x, weight, [stride, stride], [pad, pad], [1, 1], False, channels)
    assert bool(query) == of_cudnn


def backward(mask: list[bool], *, transposed: bool = False) -> tuple[tuple[Op, ...], list[Convolution]]:
    x, weight = meta(2, 4, 5, 5), meta(4, 4, 3, 3)
    grad = meta(2, 4, 5, 5)
    geometry = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    args = (grad, x, weight, [4], *geometry, mask)
    out = aten.convolution_backward.default(*args)
    target = Target(AMPERE, 28, answers_of(FakeCudnn(), benchmark=False))
    ops = RULES[aten.convolution_backward.default](args, out, target)
    return answer_convolutions(ops, target), queries_of(ops)


def test_gradients_are_made_one_after_the_other() -> None:
    """Gradients of data, weights and bias come in turn, each beside the workspace of its own kernel."""
    trial = KernelOp(OpKind.TRY, 4 * 2 * 4 * 5 * 5)
    steps, query = backward([True, True, True])
    assert [one.direction for one in query] == [Direction.DATA, Direction.WEIGHT]
    assert steps[:5] == (OUTPUT, trial, OUTPUT, trial, OUTPUT)
    steps, query = backward([False, True, False])
    assert (steps, [one.direction for one in query]) == ((OUTPUT, trial), [Direction.WEIGHT])
    assert [one.direction for one in backward([True, True, False], transposed=True)[1]] == [
        Direction.FORWARD,
        Direction.WEIGHT,
    ]


class Twins(nn.Module):
    """Two convolutions of the same shape, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(4, 8, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((1, 2, 3))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    """Replace any library that is opened, and return the replacement."""
    library = FakeCudnn()
    monkeypatch.setattr("planner.emulator.compiled.open_cudnn", lambda *_: library)
    return library


def training(*, benchmark: bool) -> Job:
    plain = job_of("4x16x16", mode=Mode.TRAIN, steps=3, optimizer=Optimizer.ADAM)
    return plain.replace(cudnn="anywhere", cudnn_benchmark=benchmark)


def workspaces_of(taken: Trace) -> list[int]:
    """Return workspaces in samples of the input, 4 x 16 x 16 numbers; other kernels' are below one."""
    batch = taken.batch
    births = [event for event in taken.events if isinstance(event, Alloc)]
    taken_bytes = [
        event.size_bytes for event in births if event.category is Category.WORKSPACE and event.may_fail
    ]
    return [size // (4 * 4 * 16 * 16 * batch) for size in taken_bytes]


@pytest.mark.parametrize("benchmark", [False, True])
def test_programs_are_what_runs_record(benchmark: bool) -> None:
    """Programs equal runs at any batch size, searches included."""
    job, query = training(benchmark=benchmark), answers_of(FakeCudnn(), benchmark=benchmark)
    chip = replace(Target.for_capability(AMPERE), conv_workspace_query=query)
    (program,) = ProgramBuilder(job, on_meta(Twins), ignore_progress).programs(chip)
    traces = [program.specialize(batch, chip) for batch in (7, 50)]
    for one, batch in zip(traces, (7, 50), strict=True):
        run = record(job, batch, AMPERE, on_meta(Twins), sm_count=chip.sm_count, conv_workspace_query=query)
        assert one is not None and first_divergence(one, run) == ""
        assert run.unknown_ops == ()


def test_a_program_holds_whatever_answers() -> None:
    """One program gives the traces of a library, of another one, and of none."""
    job, bare = training(benchmark=False), Target.for_capability(AMPERE)
    (program,) = ProgramBuilder(job, on_meta(Twins), ignore_progress).programs(bare)
    for query in (None, answers_of(FakeCudnn(), benchmark=False), answers_of(FakeCudnn(), benchmark=True)):
        one = program.specialize(50, replace(bare, conv_workspace_query=query))
        run = record(job, 50, AMPERE, on_meta(Twins), sm_count=bare.sm_count, conv_workspace_query=query)
        assert one is not None and first_divergence(one, run) == ""


def test_engines_are_timed_once_for_each_shape() -> None:
    """Ten times the workspace before the first call of each, and never again: the twins share theirs. Of the
    first layer there is no data gradient, so its backward pass is of another kind.
    """
    once = [10, 1, 1, 10, 1]
    gradients = [10, 1, 10, 1, 10, 1, 10, 1, 10, 1]
    later = [1, 1, 1, 1, 1, 1, 1, 1]
    query = answers_of(FakeCudnn(), benchmark=True)
    run = record(training(benchmark=True), 8, AMPERE, on_meta(Twins), conv_workspace_query=query)
    assert workspaces_of(run) == [*once, *gradients, *later, *later]


def test_the_cache_is_emptied_after_engines_are_timed() -> None:
    """PyTorch gives back what timing took, the block itself included, and nothing at any other time."""
    query = answers_of(FakeCudnn(), benchmark=True)
    run = record(training(benchmark=True), 8, AMPERE, on_meta(Twins), conv_workspace_query=query)
    sizes = {event.block: event.size_bytes for event in run.events if isinstance(event, Alloc)}
    emptying = [event.block for event in run.events if isinstance(event, Free) and event.empties_cache]
    timed = [size for size in workspaces_of(run) if size == 10]
    assert [sizes[block] // (4 * 4 * 16 * 16 * 8) for block in emptying] == timed
    plain = replace(query, benchmark=False)
    untimed = record(training(benchmark=False), 8, AMPERE, on_meta(Twins), conv_workspace_query=plain)
    assert not any(event.empties_cache for event in untimed.events if isinstance(event, Free))


def test_programs_are_cached_without_a_librarys_answers() -> None:
    """The key of a job is the same whatever answers for its convolutions."""
    job = Job.create("torchvision:alexnet", cudnn="installed", cudnn_benchmark=True)
    assert fingerprint_of(job) == fingerprint_of(Job.create("torchvision:alexnet")) is not None


def test_a_plan_holds_the_workspaces_and_says_so(fake: FakeCudnn) -> None:
    """Workspaces stand in the peak (what one leaves free serves others), the assumptions and the job."""
    plain = planner.estimate("torchvision:alexnet", batch=64, gpu="rtx-3060", cudnn="published")
    query = planner.estimate("torchvision:alexnet", batch=64, gpu="rtx-3060", cudnn="anywhere")
    assert query.to_dict()["peak_reserved_mib"] != plain.to_dict()["peak_reserved_mib"]
    assert query.to_dict()["job"]["cudnn"] == "anywhere"
    assert "convolutions take the workspaces that cuDNN 9.99.0 requests" in query.to_dict()["assumptions"]
    assert query.to_dict()["unknown_ops"] == []
    assert plain.to_dict()["job"]["cudnn"] == "published"


@pytest.mark.slow
def test_cached_traces_do_not_replace_a_library(fake: FakeCudnn, tmp_path: Path) -> None:
    """With a folder of cached traces the plan is the one without, on one GPU and on many."""
    options = {"input": "3x64x64", "cudnn": "anywhere"}
    alone = planner.max_batch("torchvision:alexnet", gpu="rtx-3060", **options).plan
    beside = planner.max_batch("torchvision:alexnet", gpu="rtx-3060", cache=tmp_path, **options).plan
    assert (beside.search, beside.at_max and beside.at_max.run) == (
        alone.search,
        alone.at_max and alone.at_max.run,
    )
    assert alone.at_max is not None and alone.at_max.unknown_ops == ()
    cards = [find_device("rtx-3060"), find_device("l4")]
    fits = planner.gpus("torchvision:alexnet", devices=cards, **options).fits
    assert planner.gpus("torchvision:alexnet", devices=cards, cache=tmp_path, **options).fits == fits


def test_a_table_says_for_which_gpus_the_library_is_silent(fake: FakeCudnn) -> None:
    """Whichever GPU's trace stands for all of them."""
    fake.silent = frozenset({(8, 9)})
    cards = [find_device("rtx-3060"), find_device("l4")]
    answer = planner.gpus("torchvision:alexnet", devices=cards, input="3x64x64", cudnn="anywhere").to_dict()
    assert [note for note in answer["assumptions"] if "cuDNN" in note] == [
        "convolutions take the workspaces that cuDNN 9.99.0 requests",
        "cuDNN 9.99.0 does not answer for compute capability 8.9: no workspaces of convolutions are counted",
    ]


def without_cublaslt(_folder: Path) -> str:
    return "none was given"


def test_folders_without_a_library(tmp_path: Path) -> None:
    """One line that states what is missing, or that it does not load."""
    with pytest.raises(UsageError, match=r"libcudnn\.so\.9 is not there; name its folder"):
        open_cudnn(str(tmp_path), without_cublaslt, "")
    (tmp_path / "libcudnn.so.9").write_bytes(b"no library")
    with pytest.raises(UsageError, match="it does not answer") as caught:
        open_cudnn(str(tmp_path), without_cublaslt, "")
    assert "\n" not in str(caught.value)


def test_no_package_brings_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`installed` without such a package states what to install."""
    monkeypatch.setattr(planner.hardware.cudnn.client.sys, "path", [str(tmp_path)])
    planner.hardware.cudnn.client._open.cache_clear()
    with pytest.raises(UsageError, match="install nvidia-cudnn-cu12"):
        open_cudnn("installed", without_cublaslt, "")


# ---- cuDNN itself


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[Cudnn]:
    """Open the library of `--cudnn`, or an installed one."""
    try:
        yield open_cudnn_with_cublaslt(request.config.getoption("--cudnn") or "installed")
    except UsageError as error:
        pytest.skip(f"no cuDNN to ask: {error}")


def convolution_of(direction: Direction, dtype: str = "float32", *, last: bool = False) -> Convolution:
    """128 images of 128 channels of 28 x 28 onto as many, 3 x 3."""
    x, w = (128, 128, 28, 28), (128, 128, 3, 3)
    return Convolution(direction, dtype, x, w, x, last, (1, 1), (1, 1), (1, 1))


def test_tensor_cores_want_contiguous_images_in_another_order(library: Cudnn) -> None:
    """On an Ampere GPU a forward pass in half precision copies x and y, or x alone, and weights at most; in
    channels_last nothing of the size of x is copied.
    """
    copy_bytes = 2 * 128 * 128 * 28 * 28
    engine = library.workspaces(AMPERE, 28, convolution_of(Direction.FORWARD, "float16")).engine
    assert engine is not None and "tensor cores" in engine.notes
    assert round(engine.workspace_bytes / copy_bytes, 1) in (1.0, 2.0)
    engine = library.workspaces(AMPERE, 28, convolution_of(Direction.FORWARD, "float16", last=True)).engine
    assert engine is not None and engine.workspace_bytes < copy_bytes / 2


def test_what_is_timed_holds_what_would_be_run(library: Cudnn) -> None:
    """The first engine is among all, and none converts its inputs to a narrower type."""
    for direction in Direction:
        engines = library.engines(AMPERE, 28, convolution_of(direction), every=True)
        assert engines[0] == library.workspaces(AMPERE, 28, convolution_of(direction)).engine
        assert all("down-converts" not in engine.notes for engine in engines)


def test_a_configuration_names_the_workspace_of_its_plan(
    request: pytest.FixtureRequest, library: Cudnn
) -> None:
    """So that no plan has to be made, which compiles kernels for some engines. One can be made of each."""
    if library.lacks:
        pytest.skip(f"cuBLASLt has no stand-in: {library.lacks}")
    where = request.config.getoption("--cudnn") or "installed"
    folder = installed_folder() if where == "installed" else Path(where)
    described = {"every": True, "device": describe_for_cudnn(AMPERE, 28)}
    kinds = product(Direction, ("float32", "float16"), (False, True))
    queries = [{**asdict(convolution_of(one, dtype, last=last)), **described} for one, dtype, last in kinds]
    script = Path(__file__).parents[2] / "helpers" / "cudnn_plans.py"
    gpu = describe_gpu(generic_device(SOME_MIB))
    command = [sys.executable, "-I", str(script), str(folder), str(cublaslt_for(folder)), gpu]
    run = subprocess.run(command, input=json.dumps(queries), stdout=subprocess.PIPE, text=True, check=True)
    pairs = json.loads(run.stdout)
    assert len(pairs) > len(queries)
    assert [named for named, _ in pairs] == [made for _, made in pairs]


def test_engines_of_wrong_results_are_left_out(library: Cudnn) -> None:
    """PyTorch passes over the two first configurations of this data gradient, so that an emulated GPU takes
    23,429,871 bytes with cuDNN 9.20. In two dimensions the engine runs.
    """
    x, w, ones = (2, 512, 6, 6, 6), (512, 512, 3, 3, 3), (1, 1, 1)
    query = Convolution(Direction.DATA, "bfloat16", x, w, x, False, ones, ones, ones)
    engines = library.engines(AMPERE, 28, query, every=True)
    assert engines and 23 not in {engine.number for engine in engines}
    if library.version == "9.20.0":
        assert library.workspaces(AMPERE, 28, query).workspace_bytes == 23_429_871
    flat = convolution_of(Direction.DATA, "float16")
    assert 23 in {engine.number for engine in library.engines(AMPERE, 28, flat, every=True)}


def test_what_cudnn_does_not_do(library: Cudnn) -> None:
    """Pascal computes nothing in bfloat16."""
    assert library.workspaces((6, 1), 20, convolution_of(Direction.FORWARD, "bfloat16")).engine is None


def test_engines_that_are_built_on_cublaslt_answer_too(
    request: pytest.FixtureRequest, library: Cudnn
) -> None:
    """With the stand-in of cuBLASLt no engine is lost, and some are there that drop out without it."""
    if library.lacks:
        pytest.skip(f"cuBLASLt has no stand-in: {library.lacks}")
    where = request.config.getoption("--cudnn") or "installed"
    bare = open_cudnn(where, without_cublaslt, "")
    added = 0
    for direction in Direction:
        for dtype in ("float32", "float16"):
            query = convolution_of(direction, dtype)
            every = [engine.number for engine in library.engines(AMPERE, 28, query, every=True)]
            fewer = [engine.number for engine in bare.engines(AMPERE, 28, query, every=True)]
            assert [number for number in every if number in fewer] == fewer
            added += len(every) - len(fewer)
    assert added > 0


@pytest.mark.parametrize(
    ("channels", "extent", "block_bytes"),
    [(64, 56, 116_195_328), (256, 14, 47_185_920), (512, 7, 56_623_104)],
)
def test_cublaslt_takes_no_workspace_for_winograd(
    library: Cudnn, channels: int, extent: int, block_bytes: int
) -> None:
    """The blocks that PyTorch took on a V100: kineto's trace in benchmarks/published/cudnn_workspaces.csv."""
    if library.lacks:
        pytest.skip(f"cuBLASLt has no stand-in: {library.lacks}")
    x, w = (32, channels, extent, extent), (channels, channels, 3, 3)
    query = Convolution(Direction.WEIGHT, "float32", x, w, x, False, (1, 1), (1, 1), (1, 1))
    assert library.workspaces((7, 5), 40, query).workspace_bytes == block_bytes


def test_a_cudnn_without_cublaslt_says_why(fake: FakeCudnn) -> None:
    """The answer names what is left out beside the version that was queried."""
    fake.lacks = "gcc is missing"
    answer = planner.estimate("torchvision:alexnet", batch=8, gpu="rtx-3060", cudnn="anywhere").to_dict()
    left_out = "cuDNN's engines that are built on cuBLASLt are left out: gcc is missing"
    assert left_out in answer["assumptions"]


def test_a_convolution_without_an_engine_is_named(fake: FakeCudnn) -> None:
    """PyTorch fails where cuDNN runs a convolution at no batch size, and the answer says so."""
    fake.engine = None
    answer = planner.estimate("torchvision:alexnet", batch=8, gpu="rtx-3060", cudnn="anywhere").to_dict()
    assert answer["assumptions"][-1] == (
        "this training fails: on compute capability 8.6 cuDNN 9.99.0 has no engine for 14 of 14 "
        "convolutions, such as that of x 3 x 224 x 224 and w 64 x 3 x 11 x 11 (forward, float32, contiguous)"
    )


def test_bfloat16_before_ampere_has_no_depthwise_engine(library: Cudnn) -> None:
    """Emulated runs of torch 2.13 with cuDNN 9.20 fail at the forward pass of such a convolution."""
    query = CudnnWorkspaces(library, benchmark=False)
    depthwise = replace(convolution_of(Direction.FORWARD, "bfloat16", last=True), w=(128, 1, 3, 3))
    for capability, count in (((7, 5), 40), (AMPERE, 28)):
        query(capability, count, depthwise)
    assert "this training fails" in query.account((7, 5), 40).notes[-1]
    assert "this training fails" not in query.account(AMPERE, 28).notes[-1]


def test_workspaces_of_the_engines_behind(library: Cudnn) -> None:
    """Those that the heuristics rank behind the first follow in their order, each size once."""
    query = convolution_of(Direction.WEIGHT)
    engines = [one.workspace_bytes for one in library.engines(AMPERE, 28, query, every=True)]
    following = CudnnWorkspaces(library, benchmark=False).following(AMPERE, 28, query, engines[0])
    assert following == tuple(dict.fromkeys(size for size in engines if size != engines[0]))
    assert following


def test_benchmark_halves_what_is_refused(fake: FakeCudnn) -> None:
    """Engines that need more than what could be allocated are not timed (generate_and_filter_plans)."""
    query = convolution_of(Direction.FORWARD)
    searched = fake.benchmarked(AMPERE, 28, query).searched_bytes
    halves = answers_of(fake, benchmark=True).following(AMPERE, 28, query, searched)
    assert halves is not None and halves[:2] == (searched // 2, searched // 4) and halves[-1] == 0


def test_programs_know_the_convolutions_of_workspaces(fake: FakeCudnn) -> None:
    """Those of a program's trace are those that a run of the model at that batch size records."""
    job = training(benchmark=True)
    target = Target(AMPERE, 28)
    shared = open_programs(job, ignore_progress, Twins)
    runs = open_programs(job, ignore_progress, Twins, mode=CaptureMode.WITH_PROVENANCE)
    traced, run = shared.trace(4, target), runs.trace(4, target)
    assert traced.next_workspaces is not None
    of_run = {row.block: row.convolution for row in run.conv_workspaces}
    assert [*traced.convolutions.values()] == [*of_run.values()]
    for trace, convolutions in ((traced, traced.convolutions), (run, of_run)):
        optional = {one.block for one in trace.events if isinstance(one, Alloc) and one.may_fail}
        assert set(convolutions) == optional


def test_a_gpu_that_ends_the_library_gets_no_answer(library: Cudnn) -> None:
    """Others still do, from a new process, and the trace states what was not counted."""
    fresh = replace(library, silent=set(), _answers={})
    fresh._workers[True]._process.kill()
    assert fresh.workspaces(AMPERE, 28, convolution_of(Direction.FORWARD)).engine is None
    assert fresh.silent == {AMPERE}
    assert fresh.workspaces((8, 9), 24, convolution_of(Direction.FORWARD)).engine is not None
    assert fresh.workspaces(AMPERE, 28, convolution_of(Direction.WEIGHT)).engine is None
    assert CudnnWorkspaces(fresh, benchmark=False).account(AMPERE, 28).notes == (
        f"cuDNN {library.version} does not answer for compute capability 8.6: no workspaces of convolutions "
        "are counted",
    )


def test_a_gpu_without_tf32_does_not_decide_for_others(library: Cudnn) -> None:
    """cuDNN selects engines without TF32 for 8.6 in a process that it selected some in for 7.5."""
    query = convolution_of(Direction.FORWARD)
    pointwise = replace(query, direction=Direction.WEIGHT, w=(128, 128, 1, 1), padding=(0, 0))
    expected = replace(library, _workers={}, _answers={}).workspaces(AMPERE, 28, query)
    assert expected.engine is not None and "tensor cores" in expected.engine.notes
    fresh = replace(library, _workers={}, _answers={})
    assert fresh.workspaces((7, 5), 40, pointwise).engine is not None
    assert fresh.workspaces(AMPERE, 28, query) == expected


def test_a_process_does_not_grow_without_end(library: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process answers after so many queries, since cuDNN keeps memory of each; the answers stay."""
    monkeypatch.setattr("planner.hardware.cudnn.client.QUERIES_OF_PROCESS", 2)
    queries = [convolution_of(direction) for direction in Direction]
    fresh = replace(library, _answers={}, _asked=Counter())
    processes, answers = [], []
    for query in queries:
        answers.append(fresh.workspaces(AMPERE, 28, query))
        processes.append(fresh._workers[True])
    assert processes[0] is processes[1] is not processes[2]
    assert answers == [library.workspaces(AMPERE, 28, query) for query in queries]


def test_an_answer_that_was_left_unread_is_no_other_questions(library: Cudnn) -> None:
    """An interrupted query leaves no answer to the next one."""
    one, other = (convolution_of(Direction.FORWARD, dtype) for dtype in ("float32", "float64"))
    fresh = replace(library, _answers={})
    expected = fresh.engines(AMPERE, 28, other, every=True)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner._support.worker.json, "loads", _interrupt)
        fresh.engines(AMPERE, 28, one, every=True)
    assert replace(fresh, _answers={}).engines(AMPERE, 28, other, every=True) == expected


def _interrupt(line: str) -> None:
    raise KeyboardInterrupt


def test_versions_before_2_8_have_the_workspaces_of_published_runs() -> None:
    old, new = job_of("4x16x16", torch="2.6"), job_of("4x16x16")
    assert default_source(old) == PUBLISHED
    assert isinstance(open_convolutions(old), PublishedWorkspaces)
    assert default_source(new) in (INSTALLED, STORED)
