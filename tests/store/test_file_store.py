"""A file that `--save-trace` wrote plans as the job itself, for any batch size and GPU, without torch."""

import gzip
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from planner import estimate, explain, gpus, max_batch
from planner.errors import DataFileError, ModelError, UsageError
from planner.hardware.database import find_device
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.target import Target
from planner.store.codec import load_programs
from planner.store.file_store import open_saved
from planner.store.saving import save_job
from tests.helpers.traces import RunTraces, load_trace

ROOT = Path(__file__).parents[2]
MOBILENET = "torchvision:mobilenet_v2"


class Encoder(nn.Module):
    """A transformer's layer over words, and a convolution whose gradient takes sums for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.conv(x).transpose(1, 2)).mean(1))
        return y


class Forking(nn.Module):
    """Another path for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.few(x) if len(x) < 50 else self.many(self.few(x))
        return y


class Fixed(nn.Module):
    """Accepts batches of 8 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).view(8, 64)


class Paired(nn.Module):
    """Refuses a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


WORDS: dict[str, Any] = {"input": "64x128", "target": "scalar:int64"}
FLAT: dict[str, Any] = {"input": "64", "target": "scalar:int64"}


def untimed(value: Any) -> Any:
    """JSON without the time that something took."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key != "seconds"}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def json_of(result: Any) -> Any:
    """The JSON of an answer without the time that it took."""
    return untimed(result.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "cards"),
    [
        (MOBILENET, {}, ("RTX 3060", "RTX 4060", "T4")),
        (Encoder, WORDS | {"optimizer": "adamw"}, ("RTX 4060", "RTX 3060", "H100")),
        (Encoder, WORDS | {"precision": "amp-fp16"}, ("RTX 3060", "V100 16GB")),
    ],
)
def test_a_saved_plan_is_the_plan(
    model: Any, options: dict[str, Any], cards: tuple[str, ...], tmp_path: Path
) -> None:
    """On the GPU that it was saved for and on others, and at batch sizes that were not requested then, among
    them one, a saved file gives the plan of the job, to the byte.
    """
    path = tmp_path / "x.trace"
    saved = json_of(max_batch(model, gpu=cards[0], **options, save_trace=path))
    assert json_of(max_batch(gpu=cards[0], trace=path)) == saved
    for card in cards[1:]:
        assert json_of(max_batch(gpu=card, trace=path)) == json_of(max_batch(model, gpu=card, **options))
    for batch in (1, 5, 61, 137):
        again = estimate(None, batch, gpu=cards[1], trace=path)
        assert json_of(again) == json_of(estimate(model, batch, gpu=cards[1], **options))


@pytest.mark.slow
def test_all_cards_from_a_file(tmp_path: Path) -> None:
    """The table of GPUs is that of the job, whichever GPU the file was saved for."""
    path = tmp_path / "x.trace"
    estimate(Encoder, 8, gpu="T4", **WORDS, save_trace=path)
    cards = [find_device(name) for name in ("T4", "RTX 3060", "A10", "RTX 4060", "H100", "P100 16GB")]
    assert json_of(gpus(devices=cards, trace=path)) == json_of(gpus(Encoder, devices=cards, **WORDS))


@pytest.mark.slow
def test_every_way_saves_the_same(tmp_path: Path) -> None:
    """An estimate, an explanation, and a plan whose traces are cached write what plans alike."""
    job: dict[str, Any] = {"input": "3x32x32", "mode": "infer", "gpu": "RTX 3060"}
    estimate(MOBILENET, 9, **job, save_trace=tmp_path / "estimate")
    explain(MOBILENET, 9, **job, save_trace=tmp_path / "explain")
    estimate(MOBILENET, 9, **job, cache=tmp_path / "cache", save_trace=tmp_path / "kept")
    estimate(MOBILENET, 9, **job, cache=tmp_path / "cache", save_trace=tmp_path / "again")
    plain = json_of(max_batch(MOBILENET, **job))
    for name in ("estimate", "explain", "kept", "again"):
        assert json_of(max_batch(gpu="RTX 3060", trace=tmp_path / name)) == plain


@pytest.mark.slow
def test_a_saved_file_needs_no_torch(tmp_path: Path) -> None:
    """If neither torch nor numpy can be imported, the answer is the same."""
    path = tmp_path / "x.trace"
    max_batch(Encoder, gpu="RTX 3060", **WORDS, save_trace=path)
    plain = json_of(max_batch(Encoder, gpu="RTX 4060", **WORDS))
    code = (
        "import sys\n"
        "for name in ('torch', 'torchvision', 'numpy', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "from planner.cli import run\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "max-batch", "--trace", str(path), "--gpu", "RTX 4060", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert untimed(json.loads(done.stdout)) == json.loads(json.dumps(plain))


def test_a_forking_model_is_saved_as_a_trace(tmp_path: Path) -> None:
    """A job without a loop is saved as before: for its batch size alone where it forks below that; else for
    all, with a note on scratch memory.
    """
    above, below = tmp_path / "above", tmp_path / "below"
    estimate(Forking, 60, **FLAT, save_trace=above)
    assert load_trace(above)[0].batch == 60
    direct = estimate(Forking, 20, **FLAT, save_trace=below).estimate
    again = estimate(None, 20, trace=below).estimate
    note = "scratch memory of kernels is as traced at batches 2 and 20; at others it may differ"
    assert (again.run.peak_reserved_bytes, again.notes) == (
        direct.run.peak_reserved_bytes,
        (*direct.notes, note),
    )
    with pytest.raises(UsageError, match="holds for batch 60 only; capture batch 2 again"):
        max_batch(gpu_mib=500, trace=above)


def test_a_model_of_one_batch_size_is_saved_as_a_trace(tmp_path: Path) -> None:
    """A job that can be planned can be saved, though its model refuses the batch sizes of a program."""
    path = tmp_path / "x.trace"
    direct = estimate(Fixed, 8, input="64", loss="sum", mode="infer", save_trace=path)
    assert json_of(estimate(None, trace=path)) == json_of(direct)
    with pytest.raises(UsageError, match="holds for batch 8 only; capture batch 9 again"):
        estimate(None, 9, trace=path)


def test_a_job_with_a_library_is_saved_as_one_trace(tmp_path: Path) -> None:
    """A job whose workspaces come from a library is saved as lines with the scratch memory of two batch
    sizes, with a note; nothing builds its programs.
    """
    job = Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1, cudnn="installed")

    def traced(batch: int) -> Trace:
        events = (
            PhaseStart(1, Phase.FORWARD),
            Alloc(0, 512 * batch, Category.ACTIVATION, 0),
            PhaseStart(1, Phase.END),
        )
        return Trace(events, (Site("fc", "mm"),), batch)

    save_job(job, 5, Target((8, 6), 28), RunTraces(traced), tmp_path / "x.trace")
    note = "scratch memory of kernels is as traced at batches 2 and 5; at others it may differ"
    assert scratch(tmp_path / "x.trace", 7, Target((8, 6), 28)) == ([7 * 512], (note,))


def test_a_refused_sample_is_noted(tmp_path: Path) -> None:
    """A file notes its limits: a batch of one that the model refuses has the kernels of two."""
    path = tmp_path / "x.trace"
    estimate(Paired, 2, **FLAT, save_trace=path)
    with pytest.raises(ModelError):
        estimate(Paired, 1, **FLAT)
    notes = estimate(None, 1, trace=path).estimate.notes
    unknown = [note for note in notes if "the file does not know" in note]
    assert unknown == [
        "the file does not know what all kernels take at batch 1 on 84 multiprocessors; some are given what "
        "they take at batch 2 on 84 multiprocessors"
    ]
    assert not any("the file does not know" in note for note in estimate(None, 2, trace=path).estimate.notes)


# ---- files that were written by hand

JOB = job_to_json(Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1))
OWN: dict[str, Any] = {
    "batches": [2, 3],
    "unknown_ops": [],
    "notes": [],
    "sites": {"module": ["fc"], "op": ["mm"]},
    "kind": "mamam",
    "alloc": {
        "block": [0, 1],
        "fixed_bytes": [4096, 0],
        "per_sample_bytes": [0, 1024],
        "role": ["parameters", "activations"],
        "site": [0, 0],
    },
    "free": {"block": []},
    "mark": {"step": [0, 1, 1], "phase": ["setup", "forward", "end"]},
}
# One kernel, which makes the activation: up to 7 samples 512 bytes for each multiprocessor, from 8 to 90 2048
# for each sample.
NODES = ["mcb*c", [0, 512, 0, 0, 8], [0, 0, 0, 1, 0]]
LOOP: dict[str, Any] = {
    "outputs": ["1"],
    "kernels": {"kind": [0], "site": [0], "before": [3], "outputs": [0], "takes_blas": []},
    "pool": [
        [2, 100, *NODES, "<", [2, 4, 1], "h", [3]],
        [2, 90, "bc*", [0, 2048, 0], [0, 0, 1], "", [], "h", [2]],
    ],
    "chips": {"8.6": {"blas_bytes": 0, "first": 2, "last": 100, "cases": [[0, 1]]}},
}
ABOUT = {"job": JOB, "batch": 5, "capability": [8, 6]}
LOOPS: dict[str, Any] = {
    "format": 1,
    "about": ABOUT | {"multiprocessors": 28},
    "traces": [
        OWN
        | {"alloc": OWN["alloc"] | {"optional": [False, False]}}
        | {"details": {name: [] for name in ("block", "shape", "dtype", "source", "code")}}
    ],
    "loops": [LOOP],
}


def written(folder: Path, document: object) -> Path:
    path = folder / "hand.trace"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def scratch(path: Path, batch: int, chip: Target) -> tuple[list[int], tuple[str, ...]]:
    trace = open_saved(path).trace(batch, chip)
    taken = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    return taken, trace.notes


def test_a_program_of_one_batch_size_holds_for_no_other(tmp_path: Path) -> None:
    """A program whose sizes do not grow with the batch plans the batch size that it was captured at."""
    alloc = OWN["alloc"] | {"per_sample_bytes": [0, 0], "fixed_bytes": [1, 2]}
    chip = {"blas_bytes": 0, "first": 5, "last": 5, "cases": []}
    loop = LOOP | {"kernels": {name: [] for name in LOOP["kernels"]}, "chips": {"8.6": chip}}
    single = LOOPS | {"traces": [OWN | {"batches": [5], "alloc": alloc}], "loops": [loop]}
    path = written(tmp_path, single)
    assert not open_saved(path).covers_batches
    assert scratch(path, 5, Target((8, 6), 28)) == ([1, 2], ())
    with pytest.raises(UsageError, match="this trace holds for batch 5 only; capture batch 6 again"):
        scratch(path, 6, Target((8, 6), 28))


def test_a_program_depends_on_batch_and_multiprocessors(tmp_path: Path) -> None:
    """Kernels take the bytes of their terms, in the case that answers."""
    path = written(tmp_path, LOOPS)
    assert scratch(path, 7, Target((8, 6), 28)) == ([4096, 7168, 28 * 512], ())
    assert scratch(path, 7, Target((8, 6), 40)) == ([4096, 7168, 40 * 512], ())
    assert scratch(path, 8, Target((8, 6), 40)) == ([4096, 8192, 8 * 2048], ())
    trace = open_saved(path).trace(7, Target((8, 6), 28))
    assert trace == Trace(
        (
            *(
                PhaseStart(0, Phase.SETUP),
                Alloc(0, 4096, Category.PARAMETER, 0),
                PhaseStart(1, Phase.FORWARD),
            ),
            *(Alloc(1, 7168, Category.ACTIVATION, 0), Alloc(3, 14336, Category.WORKSPACE, 0), Free(3)),
            PhaseStart(1, Phase.END),
        ),
        (Site("fc", "mm"),),
        7,
    )


def test_the_limits_of_a_program_are_noted(tmp_path: Path) -> None:
    """A program beyond its batch sizes and its GPUs gives its nearest values, and a note."""
    path = written(tmp_path, LOOPS)
    lack = (
        "the file does not know what all kernels take at batch {} on {} multiprocessors; some are given what "
    )
    at = "they take at batch {} on {} multiprocessors"
    assert scratch(path, 1, Target((8, 6), 40)) == (
        [4096, 1024, 40 * 512],
        (lack.format(1, 40) + at.format(2, 40),),
    )
    assert scratch(path, 200, Target((8, 6), 40)) == (
        [4096, 204800, 81 * 2048],
        (
            lack.format(200, 40) + at.format(81, 40),
            "the file's program was validated against runs up to batch 100 only",
        ),
    )
    note = "traced for compute capability 8.6; this GPU's kernels may take other memory"
    assert scratch(path, 9, Target((9, 0), 132)) == ([4096, 9216, 9 * 2048], (note,))


@pytest.mark.parametrize(
    ("place", "value", "flaw"),
    [
        (
            "about.multiprocessors",
            "28",
            "broken job of a trace: TypeError: batch, capability and multiprocessors are integers",
        ),
        ("about.capability", [9, 0], "broken programs of a trace: none is of the GPU that was planned for"),
        ("about.batch", -5, "broken job of a trace: ValueError: batch -5; capture it again"),
        ("about.batch", 2**62, f"broken job of a trace: ValueError: batch {2**62}; capture it again"),
        ("loops.0", {}, "broken trace file: Object missing required field `outputs` - at `$.loops[0]`"),
        (
            "loops.0.chips.8~6.first",
            0,
            "broken programs of a trace: ValueError: batch sizes 0 to 100, 0 bytes for cuBLAS",
        ),
        (
            "loops.0.chips.8~6.last",
            1,
            "broken programs of a trace: ValueError: batch sizes 2 to 1, 0 bytes for cuBLAS",
        ),
        (
            "loops.0.chips.8~6.blas_bytes",
            -1,
            "broken programs of a trace: ValueError: batch sizes 2 to 100, -1 bytes for cuBLAS",
        ),
        ("loops.0.chips.8~6.cases", [[7]], "broken programs of a trace: IndexError: list index out of range"),
        ("loops.0.chips.8~6.cases", [[-1]], "broken programs of a trace: IndexError: index -1"),
        ("loops.0.chips.8~6.cases", [], "broken programs of a trace: IndexError: list index out of range"),
        (
            "loops.0.chips.8~6.more",
            1,
            "broken trace file: Object contains unknown field `more` - at `$.loops[0].chips[...]`",
        ),
        ("loops.0.kernels.before", [9], "broken trace file: kernel calls out of order"),
        ("loops.0.kernels.before", [2], "broken trace file: the output of a kernel call is no allocation"),
        ("loops.0.kernels.outputs", [-1], "broken trace file: index -1"),
        (
            "loops.0.kernels.kind",
            [0.0],
            "broken trace file: Expected `int`, got `float` - at `$.loops[0].kernels.kind[0]`",
        ),
        (
            "loops.0.outputs",
            ["x"],
            "broken trace file: Expected `str` matching regex '^[01]*$' - at `$.loops[0].o",
        ),
        (
            "loops.0.outputs",
            ["0" * 2**24 + "1"],
            "broken programs of a trace: ValueError: more than 16777216 events of kernels",
        ),
        (
            "loops.0.pool.0.5",
            "<<",
            "broken programs of a trace: ValueError: zip() argument 2 is shorter than argument 1",
        ),
        (
            "loops.0.pool.0.6",
            [2, 4],
            "broken programs of a trace: ValueError: zip() argument 3 is shorter than arguments 1-2",
        ),
        ("loops.0.pool.0.7", "x", "broken programs of a trace: ValueError: 'x' is not a valid OpKind"),
        (
            "loops.0.pool.0.7",
            ["pt"],
            "broken trace file: Expected `str`, got `array` - at `$.loops[0].pool[0][7]`",
        ),
        (
            "loops.0.chips.8~6.cases",
            [[0] * 2**18],
            "broken programs of a trace: ValueError: 1835008 nodes are too many to evaluate",
        ),
        (
            "loops.0.pool.0.3",
            [0, 2**62, 0, 0, 8],
            "broken programs of a trace: a workspace exceeds 2**63 bytes",
        ),
    ],
)
def test_broken_loops_are_refused(tmp_path: Path, place: str, value: object, flaw: str) -> None:
    """One wrong value is refused in one line, without work that grows with what a file claims."""
    document = deepcopy(LOOPS)
    inner: Any = document
    *steps, last = (int(step) if step.isdigit() else step.replace("~", ".") for step in place.split("."))
    for step in steps:
        inner = inner[step]
    inner[last] = value
    path = written(tmp_path, document)
    with pytest.raises(DataFileError) as caught:
        open_saved(path).trace(7, Target((8, 6), 28))
    assert str(caught.value).startswith(f"{path}: {flaw}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_a_file_of_loops_is_small(tmp_path: Path) -> None:
    """Loops of all compute capabilities share their own events: a transformer's layer in a few KiB."""
    path = tmp_path / "x.trace"
    estimate(Encoder, 8, gpu="RTX 3060", **WORDS, save_trace=path)
    assert path.stat().st_size < 2**15
    programs = load_programs(path).programs
    for capability in ((6, 0), (7, 5), (8, 6), (9, 0), (12, 0)):
        assert any(encoded.load_target(capability) for encoded in programs)
