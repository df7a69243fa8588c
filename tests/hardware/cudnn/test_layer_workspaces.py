"""Workspaces of convolutions, layer by layer: from a made-up library to text, JSON, page and file."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import planner
import planner.hardware.cudnn.client
from planner.api.explain import ExplainResult
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.session import record
from planner.emulator.convolution_workspaces import CudnnWorkspaces
from planner.hardware.cudnn.workspace_breakdown import LayerWorkspace, Part, Term, layer_workspaces
from planner.jobs import Job, Loss, TensorSpec
from planner.planning.epoch import with_last_batch
from planner.planning.programs import CaptureMode, open_programs
from planner.program.events import Trace, validate
from planner.program.extrapolation.fit import fit_traces
from planner.program.kernels.convolution import (
    Convolution,
    ConvWorkspace,
    Direction,
    Engine,
    WorkspaceAccount,
    Workspaces,
)
from planner.program.source import ignore_progress
from planner.program.target import Target
from planner.report.commands.explain.workspaces import parts_text, workspace_text
from tests.helpers.models import AMPERE, on_meta
from tests.helpers.structs import replace
from tests.helpers.traces import load_trace, save_trace

MIB = 2**20
SURE_OF_LIBRARY = (
    "Exact for the queried version and compute capability 8.6, as PyTorch runs the first engine of "
    "cuDNN's heuristics that works; where memory is refused, PyTorch goes on to the next engine. What a part "
    "is for is inferred from its size; x, w and y are input, weights and output, or their gradients."
)


@dataclass(eq=False)
class Copying:
    """A library whose engine 7 copies x and y, and takes 48 bytes more; engine 9 copies x once more."""

    version: str = "9.99.0"
    lacks = ""
    silent: frozenset[tuple[int, int]] = frozenset()

    def workspaces(self, capability: tuple[int, int], multiprocessors: int, query: Convolution) -> Workspaces:
        size_bytes = _bytes_of(query.x) + _bytes_of(query.y) + 48
        return Workspaces(size_bytes, engine=Engine(7, ("tensor cores",), size_bytes))

    def benchmarked(
        self, capability: tuple[int, int], multiprocessors: int, query: Convolution
    ) -> Workspaces:
        answer = self.workspaces(capability, multiprocessors, query)
        assert answer.engine is not None
        most = answer.workspace_bytes + _bytes_of(query.x)
        return Workspaces(answer.workspace_bytes, most, answer.engine, Engine(9, (), most))


def _bytes_of(sizes: tuple[int, ...]) -> int:
    total = 4
    for size in sizes:
        total *= size
    return total


class Net(nn.Module):
    """The first convolution runs twice a step; the second is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.second = nn.ConvTranspose2d(4, 8, 2, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.first(x)))
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Copying:
    """Replace any library that is opened, and return the replacement."""
    library = Copying()
    monkeypatch.setattr("planner.emulator.compiled.open_cudnn", lambda *_: library)
    return library


JOB = Job.create("net", inputs=(TensorSpec((4, 32, 32)),), loss=Loss.SUM, steps=2, cudnn="anywhere")


def detailed(job: Job = JOB, batch: int = 8) -> Trace:
    query = CudnnWorkspaces(Copying(), job.environment.cudnn_benchmark)  # type: ignore[arg-type]
    return record(job, batch, AMPERE, on_meta(Net), ProvenanceCollector(), conv_workspace_query=query)


def pairs(layers: tuple[LayerWorkspace, ...]) -> list[tuple[str, Direction, int]]:
    return [(one.module, one.direction, one.size_bytes) for one in layers]


def test_each_layer_and_direction_once(library: Copying) -> None:
    """Repeated runs are one entry, the largest first; a transposed convolution runs forward as a data
    gradient. The first call of the first layer has no data gradient, the second has.
    """
    small = 8 * 4 * 32 * 32 * 4
    first, second = 2 * small + 48, small + 8 * small + 48
    layers = layer_workspaces(detailed())
    assert pairs(layers) == [
        ("second", Direction.DATA, second),
        ("second", Direction.FORWARD, second),
        ("second", Direction.WEIGHT, second),
        ("first", Direction.FORWARD, first),
        ("first", Direction.DATA, first),
        ("first", Direction.WEIGHT, first),
    ]
    assert {(one.engine, one.notes, one.searched) for one in layers} == {(7, "tensor cores", False)}
    assert layers[3].parts == (
        Part(Term.COPY, "x", 1, small),
        Part(Term.COPY, "y", 1, small),
        Part(Term.UNNAMED, "", 1, 48),
    )


def test_the_search_is_a_row_of_its_own(library: Copying) -> None:
    """The search stands with the engine that takes most, before that of the heuristics' first."""
    layers = layer_workspaces(detailed(JOB.replace(cudnn_benchmark=True)))
    forward = [one for one in layers if (one.module, one.direction) == ("first", Direction.FORWARD)]
    assert [(one.searched, one.engine, one.notes) for one in forward] == [
        (True, 9, ""),
        (False, 7, "tensor cores"),
    ]


def test_traces_name_the_convolutions_of_workspaces(library: Copying) -> None:
    """Without a library nothing is taken, and nothing named; a fit of two traces has the second's."""
    assert record(JOB, 8, AMPERE, on_meta(Net)).conv_workspaces == ()
    second = detailed(batch=3)
    fitted = fit_traces(detailed(batch=2), second)
    assert [row.convolution for row in fitted.conv_workspaces] == [
        row.convolution for row in second.conv_workspaces
    ]


def test_an_epoch_has_those_of_both_batch_sizes(library: Copying) -> None:
    """Blocks have other numbers in a trace that is put together."""
    job = JOB.replace(dataset_size=11, steps=3)
    full = {one.size_bytes for one in layer_workspaces(detailed(job, 8))}
    smaller = {one.size_bytes for one in layer_workspaces(detailed(job, 3))}
    both = with_last_batch(job, 8, lambda batch: detailed(job, batch))
    validate(both)
    assert {one.size_bytes for one in layer_workspaces(both)} == full | smaller


def test_a_file_keeps_them(library: Copying, tmp_path: Path) -> None:
    """Each workspace is whole; rows of blocks without an allocation are refused."""
    trace, path = replace(detailed(), conv_account=WorkspaceAccount()), tmp_path / "x.trace"
    save_trace(trace, path, {})
    assert load_trace(path) == (trace, {})
    with pytest.raises(ValueError, match="blocks that are allocated"):
        validate(replace(trace, conv_workspaces=(replace(trace.conv_workspaces[0], block=10**6),)))
    save_trace(replace(trace, conv_workspaces=()), path, {})
    assert load_trace(path)[0].conv_workspaces == ()


def test_a_row_gives_back_its_convolution() -> None:
    """The flat columns of a file are a convolution again."""
    x = (1, 2, 3, 4)
    query = Convolution(
        Direction.DATA, "float16", x, (5, 2, 1, 1), (1, 5, 3, 4), True, (0, 0), (1, 1), (1, 1)
    )
    row = ConvWorkspace.from_query(3, query, Engine(4, ("a", "b"), 9), searched=False)
    assert isinstance(row, ConvWorkspace)
    assert (row.convolution, row.block, row.engine, row.notes) == (query, 3, 4, "a, b")
    assert ConvWorkspace.from_query(3, query, None, searched=False).engine == -1


# ---- reports


def explained(**options: Any) -> ExplainResult:
    return planner.explain(Net, 8, input="4x32x32", loss="sum", steps=2, gpu="rtx-3060", top=2, **options)


def test_the_text(library: Copying) -> None:
    """The largest with engine and parts, then how sure that is."""
    lines = str(explained(cudnn="anywhere")).splitlines()
    start = lines.index("Largest of the 6 workspaces of convolutions")
    section = lines[start : lines.index("", start)]
    assert section[1:5] == [
        "        1.1 MiB  data gradient in second, engine 7 (tensor cores)",
        "                 copies of x and y",
        "        1.1 MiB  forward in second, engine 7 (tensor cores)",
        "                 copies of x and y",
    ]
    assert " ".join(line.strip() for line in section[5:]) == SURE_OF_LIBRARY


def test_the_json(library: Copying) -> None:
    """The JSON has the workspaces in whole bytes that add up."""
    answer = explained(cudnn="anywhere").to_dict()["workspaces"]
    assert (answer["told_by"], answer["sure"], answer["in_all"]) == ("cuDNN", SURE_OF_LIBRARY, 6)
    assert len(answer["convolutions"]) == 2
    assert answer["convolutions"][0] == {
        "module": "second",
        "direction": "data gradient",
        "size_bytes": 1_179_696,
        "while_timing": False,
        "engine": 7,
        "notes": ["tensor cores"],
        "consists_of": [
            {"term": "copy", "of": "x", "times": 1, "size_bytes": 1_048_576},
            {"term": "copy", "of": "y", "times": 1, "size_bytes": 131_072},
            {"term": "unnamed", "of": "", "times": 1, "size_bytes": 48},
        ],
    }


def test_of_published_runs_the_fitted_term_is_shown() -> None:
    """MobileNetV2's last convolution on an RTX 3060, and that all others are assumed to need nothing."""
    options = {"input": "3x86x86", "gpu": "rtx-3060", "steps": 1, "cudnn": "published"}
    result = planner.explain("torchvision:mobilenet_v2", 323, **options)
    answer = result.to_dict()["workspaces"]
    assert answer["told_by"] == "fitted term"
    assert "All other convolutions are assumed to need nothing" in answer["sure"]
    first = answer["convolutions"][0]
    assert (first["module"], first["engine"]) == ("features.18.0", None)
    assert first["consists_of"] == [
        {"term": "image-wise sums", "of": "w", "times": 323, "size_bytes": 323 * 1280 * 320 * 4}
    ]


def test_unknown_workspaces_are_not_shown() -> None:
    """A net that the fitted term does not concern shows no workspaces."""
    result = explained(cudnn="published")
    assert not re.search("Largest of the [0-9]+ workspaces", str(result))
    assert result.to_dict()["workspaces"] == {
        "told_by": None, "sure": "", "in_all": 0, "convolutions": [],
    }  # fmt: skip


def test_the_page(library: Copying, tmp_path: Path) -> None:
    """A table with the same rows; none where there is nothing to report."""
    pytest.importorskip("plotly")
    path = tmp_path / "x.html"
    explained(cudnn="anywhere").save_page(path)
    page = path.read_text(encoding="utf-8")
    assert "<h2>Largest of the 6 workspaces of convolutions</h2>" in page
    assert (
        "<td>data gradient<br><code>second</code></td><td>7 tensor cores</td><td>copies of x and y</td>"
        in page
    )
    explained(cudnn="published").save_page(path)
    assert "workspaces of convolutions</h2>" not in path.read_text(encoding="utf-8")


def test_parts_in_words() -> None:
    """MiB stand where there are several; less than a twentieth of one is left out."""

    def words(*parts: Part) -> str:
        return parts_text(LayerWorkspace("m", Direction.WEIGHT, 0, False, 7, "", parts))

    copies = Part(Term.COPY, "y", 1, 3 * MIB), Part(Term.COPY, "w", 1, MIB), Part(Term.COPY, "x", 1, 2 * MIB)
    sums, rest = Part(Term.SUMS, "w", 5, MIB), Part(Term.UNNAMED, "", 1, 99)
    assert words(*copies, rest) == "copies of x, w and y"
    assert words(*copies, sums, rest) == "copies of x, w and y 6.0 + 5 x w of partial sums 1.0"
    filled = Part(Term.FILLED, "x", 1, 8 * MIB)
    assert words(filled, copies[1]) == "copy of w 1.0 + copy of x with channels filled up 8.0"
    assert words(Part(Term.UNNAMED, "", 1, 99)) == "unnamed"
    timed = LayerWorkspace("", Direction.DATA, 9, True, 7, "a, b", ())
    assert workspace_text(timed) == "data gradient, while engines are timed, engine 7 (a, b)"


@pytest.mark.slow
def test_a_model_in_a_process_of_its_own_has_them(tmp_path: Path) -> None:
    """Workspaces from another process are those of this one."""
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Conv2d(320, 1280, 1))\n"
    )
    job = Job.create(f"{file}:Net", inputs=(TensorSpec((320, 2, 2)),), loss=Loss.MSE, steps=1)
    job = job.replace(target=TensorSpec((1280, 2, 2)), cudnn="published")
    target = Target.for_capability((8, 6))
    programs = open_programs(job, ignore_progress, mode=CaptureMode.WITH_PROVENANCE, limit_seconds=600)
    (row,) = programs.trace(4, target).conv_workspaces
    assert (row.engine, row.direction, row.x, row.w) == (
        -1,
        Direction.WEIGHT,
        (4, 320, 2, 2),
        (1280, 320, 1, 1),
    )
