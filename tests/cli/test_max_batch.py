"""The command line as scripts meet it: exit codes, standard output and error; and the same from Python."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planner
from planner._support.versions import installed_version
from planner.cli import run
from planner.cli.output import progress
from planner.errors import UnsavedError, UsageError
from planner.jobs import FIELD_OPTIONS, Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.program import AffineAlloc, Program
from tests.helpers.structs import replace
from tests.helpers.traces import program_of, save_trace

ROOT = Path(__file__).parents[2]
MIB = 2**20

Capture = pytest.CaptureFixture[str]

# What CLI.md promises of the JSON.
ESTIMATE_KEYS = {
    *("schema", "model", "batch", "job", "device", "peak_allocated_mib", "peak_reserved_mib"),
    *("end_allocated_mib", "process_mib", "process_upper_mib", "fits", "p_out_of_memory", "retries"),
    *("failure", "breakdown_mib"),
    *("calibration", "assumptions", "unknown_ops", "seconds"),
}
MAX_BATCH_KEYS = {
    *("schema", "model", "job", "device", "confidence", "max_batch", "comfortable_batch", "at_max"),
    *("first_failure", "probes", "seconds"),
}
MODELS = """
import torch
import torchvision
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)


class Fine(Base):
    def forward(self, x):
        print("chatter of the model")
        return self.head(x)


class Picky(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Item(Base):
    def __init__(self):
        super().__init__()
        self.inner = Picky()

    def forward(self, x):
        return self.inner(self.head(x))


class Sparse(nn.Module):
    def forward(self, x):
        return x + torch.nonzero(x).sum()


class NonZero(Base):
    def __init__(self):
        super().__init__()
        self.inner = Sparse()

    def forward(self, x):
        return self.inner(self.head(x))


class Boxes(nn.Module):
    def forward(self, x):
        return x[torchvision.ops.nms(x, x[:, 0], 0.5)]


class Nms(Base):
    def __init__(self):
        super().__init__()
        self.inner = Boxes()

    def forward(self, x):
        return self.inner(self.head(x))


class Masked(Base):
    def forward(self, x):
        x = self.head(x)
        return x[x > 0]


class Exits(Base):
    def forward(self, x):
        raise SystemExit(7)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file models.py in the working directory."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def toy_trace(tmp_path: Path) -> Path:
    """A saved trace of 3 MiB and 2 MiB a sample, for any batch size; made without torch."""
    return saved(tmp_path / "toy.trace", program_of(toy_events(2 * MIB), (Site("fc", "to"),)))


def toy_events(
    per_sample_bytes: int, fixed_bytes: int = 0
) -> tuple[Alloc | AffineAlloc | Free | PhaseStart, ...]:
    return (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 3 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, fixed_bytes, per_sample_bytes, Category.ACTIVATION, 0),
        PhaseStart(1, Phase.END),
    )


def saved(path: Path, trace: Trace | Program, **about: object) -> Path:
    job = Job("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1)
    save_trace(trace, path, {"job": job_to_json(job), "batch": 5, "capability": [8, 6]} | about)
    return path


def outcome(command: str, capsys: Capture) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line without quotes."""
    code = run(command.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A fresh Python with the repository on its path."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


# ---- answers -------------------------------------------------------------------------------------


def test_max_batch(capsys: Capture) -> None:
    """`max-batch` prints a report and exits with 0."""
    code, out, err = outcome("max-batch --model conv_pair --allocator-cap-mib 100", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("Largest batch:  ")
    assert out.endswith(" s replaying\n")


def test_max_batch_as_json(capsys: Capture) -> None:
    """With `--json` standard output is one JSON object with all keys of the contract."""
    code, out, err = outcome("max-batch --model conv_pair --gpu-mib 2000 --json", capsys)
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= MAX_BATCH_KEYS
    assert said["at_max"].keys() >= ESTIMATE_KEYS
    assert said["max_batch"] == said["at_max"]["batch"] > 0
    assert dict(said["probes"])[said["max_batch"]] == said["at_max"]["fits"]
    assert said["first_failure"]["fits"] == "no"
    assert said["seconds"].keys() == {"import", "trace", "replay"}


def test_max_batch_of_nothing(capsys: Capture) -> None:
    """Where not even one sample fits, the answer is 0 and the exit code 1."""
    code, out, _ = outcome("max-batch --model vit_b_16 --gpu-mib 900 --json", capsys)
    assert (code, json.loads(out)["max_batch"]) == (1, 0)


def test_estimate_without_gpu(capsys: Capture) -> None:
    """`estimate` needs no GPU, and takes the batch size of the catalogue."""
    code, out, err = outcome("estimate --model cnn --json", capsys)
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= ESTIMATE_KEYS
    assert (said["batch"], said["fits"], said["device"]["total_mib"]) == (128, "yes", None)
    assert round(said["peak_reserved_mib"], 1) == 604.0


def test_estimate_that_does_not_fit(capsys: Capture) -> None:
    """A batch that does not fit is an answer with exit code 1, and says where it fails."""
    code, out, err = outcome("estimate --model cnn --batch 128 --allocator-cap-mib 250", capsys)
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith(
        "Batch 128 does not fit at confidence 0.99; without a limit it would take "
    )
    assert out.splitlines()[1].startswith("Fails at:       step 1, forward pass, ")


def test_options_reach_the_job(capsys: Capture) -> None:
    """Every option about the job arrives in it."""
    code, out, _ = outcome(
        "estimate --model torchvision:alexnet --model-arg num_classes=7 --input 3x128x128 --target 7 "
        "--batch 2 --loss mse --optimizer adam --optimizer-impl for-loop --zero-grad after-step --keep-grads "
        "--steps 2 --precision bf16 --memory-format channels_last --freeze features.0.* --json",
        capsys,
    )
    assert code == 0
    assert json.loads(out)["job"] == {
        "model": "torchvision:alexnet",
        "source": "",
        "model_args": {"num_classes": 7},
        "inputs": ["3x128x128"],
        "target": "7",
        "targets": [],
        "loss": "mse",
        "mode": "train",
        "optimizer": "adam",
        "optimizer_impl": "for-loop",
        "zero_grad": "after-step",
        "keep_grads": True,
        "steps": 2,
        "precision": "bf16",
        "grad_scaler": False,
        "backward_in_autocast": False,
        "memory_format": "channels_last",
        "checkpoint": "none",
        "accumulate": 1,
        "clip_gradients": "none",
        "ema": False,
        "evaluate": False,
        "eval_batch": 0,
        "ddp": False,
        "ddp_bucket_view": False,
        "freeze": ["features.0.*"],
        "train_only": [],
        "new_tokens": 0,
        "cudnn_benchmark": False,
        "lengths": None,
        "cudnn": "",
        "cublas_workspace_config": "",
        "dataset_size": 0,
    }


def test_an_option_may_follow_from_another(capsys: Capture) -> None:
    """A flag that is not given does not contradict the one that it follows from."""
    code, out, _ = outcome("estimate --model conv_pair --ddp-bucket-view --eval-batch 3 --json", capsys)
    job = json.loads(out)["job"]
    assert (code, job["ddp"], job["evaluate"], job["eval_batch"]) == (0, True, True, 3)


def test_options_reach_the_card(capsys: Capture, toy_trace: Path) -> None:
    """Every option about the GPU arrives in the plan."""
    options = (
        "--gpu l4 --allocator-cap-mib 1000 --alloc-conf expandable_segments:True --confidence 0.5 --json"
    )
    code, out, _ = outcome(f"estimate --trace {toy_trace} {options}", capsys)
    said = json.loads(out)
    assert (code, said["confidence"], said["device"]["name"]) == (0, 0.5, "L4 24GB")
    assert said["device"]["allocator"]["cap_mib"] == 1000.0
    assert said["device"]["allocator"]["limit_mib"] == 1000.0
    assert said["device"]["allocator"]["rules"]["expandable_segments"] is True


def test_other_catalogue(capsys: Capture, tmp_path: Path) -> None:
    """`--models` names another catalogue."""
    path = tmp_path / "mine.yaml"
    path.write_text("mine: {source: 'zoo:ConvPair', inputs: [1x8x8], loss: sum, batch: 3, about: mine}\n")
    code, out, _ = outcome(f"estimate --models {path} --model mine --json", capsys)
    assert (code, json.loads(out)["batch"], json.loads(out)["model"]) == (0, 3, "mine")


@pytest.mark.usefixtures("models")
def test_chatter_of_a_model_stays_off_standard_output(capsys: Capture) -> None:
    """What a model prints goes to standard error, so that the JSON stays alone."""
    code, out, err = outcome("estimate --model models.py:Fine --input 4 --loss sum --batch 2 --json", capsys)
    assert (code, json.loads(out)["model"]) == (0, "models.py:Fine")
    assert set(err.splitlines()) == {"chatter of the model"}


# ---- other methods -------------------------------------------------------------------------------


def test_estimate_by_formula_is_the_seeds(capsys: Capture) -> None:
    """`--method formula` prints the notebook's seven lines of the CNN."""
    code, out, err = outcome("estimate --model cnn --method formula", capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    first = lines.index("Batch 128                            MiB") + 1
    assert [line[:40].split() for line in lines[first : first + 7]] == [
        ["Data", "73.5"],
        ["Weight", "3.8"],
        ["Forward", "output", "240.6"],
        ["Weight", "gradient", "3.8"],
        ["Output", "gradient", "314.1"],
        ["Total", "for", "training", "635.8"],
        ["Total", "for", "inference", "317.9"],
    ]


def test_formula_inverse_agrees_with_its_estimates(capsys: Capture) -> None:
    """`max-batch --method formula`: its answer fits by `estimate --method formula`, and one more does not."""
    card = "--model vit_b_16 --optimizer adam --gpu-mib 24000 --method formula --json"
    code, out, err = outcome(f"max-batch {card}", capsys)
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= MAX_BATCH_KEYS
    assert said["at_max"].keys() >= ESTIMATE_KEYS
    largest = said["max_batch"]
    for batch, fits in ((largest, "yes"), (largest + 1, "no")):
        code, out, _ = outcome(f"estimate {card} --batch {batch}", capsys)
        assert (json.loads(out)["fits"], code) == (fits, 0 if fits == "yes" else 1)


def test_formula_of_nothing(capsys: Capture) -> None:
    """Where by the formula not even one sample fits, the answer is 0 and the exit code 1."""
    code, out, _ = outcome("max-batch --model vit_b_16 --gpu-mib 900 --method formula --json", capsys)
    assert (code, json.loads(out)["max_batch"], json.loads(out)["at_max"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("method", "total"),
    [("torchinfo", "0.57"), ("torchsummary", "0.57"), ("modelsize", "0.569"), ("memtracker", "0.472")],
)
def test_estimate_by_others(capsys: Capture, method: str, total: str) -> None:
    """Each other method answers in the same schema, with its total for the allocated peak."""
    code, out, err = outcome(f"estimate --model conv_pair --method {method} --json", capsys)
    said = json.loads(out)
    assert (code, err, said["method"]) == (0, "", method)
    assert said.keys() >= ESTIMATE_KEYS
    assert str(said["peak_allocated_mib"]) == total


def test_trace_names_its_method(capsys: Capture, toy_trace: Path) -> None:
    """The planner's own answers say that they are."""
    _, out, _ = outcome(f"max-batch --trace {toy_trace} --gpu-mib 8000 --method trace --json", capsys)
    assert (json.loads(out)["method"], json.loads(out)["at_max"]["method"]) == ("trace", "trace")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "max-batch --model cnn --gpu-mib 8000 --method torchinfo",
            "--method torchinfo: unknown here; use one of trace, formula",
        ),
        (
            "estimate --model cnn --method xmem",
            "--method xmem: unknown here; use one of trace, formula, torchinfo, torchsummary, modelsize, "
            "memtracker",
        ),
        (
            "max-batch --model cnn --method formula",
            "no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N",
        ),
        (
            "estimate --model cnn --method formula --steps 2",
            "--steps and --method formula: the closed formula takes no account of it; leave it away, or use "
            "--method trace",
        ),
        (
            "estimate --trace x --method memtracker",
            "--trace and --method memtracker: MemTracker takes no account of it; leave it away, or use "
            "--method trace",
        ),
        (
            "estimate --model cnn --method formula --optimizer adafactor",
            "optimizer adafactor: the formula counts moments the size of the weights, and adafactor keeps "
            "others; use --method trace",
        ),
        (
            "estimate --model basic_unet --method formula",
            "--mode forward: the formula knows training and inference; give --mode train or --mode infer, or "
            "use --method trace",
        ),
    ],
)
def test_wrong_use_of_methods(capsys: Capture, command: str, line: str) -> None:
    """What a method cannot do is told in one line, with exit code 2."""
    assert outcome(command, capsys) == (2, "", f"planner: {line}\n")


def test_method_that_fails_on_a_model(capsys: Capture) -> None:
    """A model that another estimator refuses is one line and exit code 3."""
    code, out, err = outcome("estimate --model vit_b_16 --batch 2 --method torchsummary", capsys)
    assert (code, out) == (3, "")
    assert err == (
        "planner: vit_b_16: torchsummary knows single tensors only, and a MultiheadAttention takes or gives "
        "something else; use --method trace\n"
    )


# ---- saved traces --------------------------------------------------------------------------------


def without_seconds(said: object) -> object:
    if isinstance(said, dict):
        return {key: without_seconds(value) for key, value in said.items() if key != "seconds"}
    return said


def test_saved_trace_plans_alike(capsys: Capture, tmp_path: Path) -> None:
    """A plan from a saved trace is the plan that was made when it was saved, up to the first failure."""
    path = tmp_path / "conv_pair.trace"
    _, first, _ = outcome(f"max-batch --model conv_pair --gpu-mib 2000 --json --save-trace {path}", capsys)
    code, second, _ = outcome(f"max-batch --trace {path} --gpu-mib 2000 --json", capsys)
    assert code == 0
    assert without_seconds(json.loads(second)) == without_seconds(json.loads(first))


def test_saved_estimate_plans_any_batch(capsys: Capture, tmp_path: Path) -> None:
    """A trace saved by `estimate` holds for its own batch size by default, and for every other."""
    path = tmp_path / "cnn.trace"
    _, first, _ = outcome(f"estimate --model cnn --batch 7 --json --save-trace {path}", capsys)
    _, again, _ = outcome(f"estimate --trace {path} --json", capsys)
    assert without_seconds(json.loads(again)) == without_seconds(json.loads(first))
    _, other, _ = outcome(f"estimate --trace {path} --batch 128 --json", capsys)
    assert round(json.loads(other)["peak_reserved_mib"], 1) == 604.0


def test_trace_plans_without_torch(toy_trace: Path) -> None:
    """A saved trace plans in a Python that has no torch, no numpy and no torchvision."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'torchvision', 'numpy', 'scipy'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from planner.cli import main\n"
        "main()\n"
    )
    card = ("--allocator-cap-mib", "300", "--confidence", "0.5")  # at even odds a cap counts in full
    done = python("-c", code, "max-batch", "--trace", str(toy_trace), *card, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "toy"
    assert json.loads(done.stdout)["max_batch"] == 140


def test_trace_of_one_batch(capsys: Capture, tmp_path: Path) -> None:
    """A trace that holds for one batch size is refused for others, and for a search."""
    trace = Trace(toy_events(0, 10 * MIB), (Site("fc", "to"),), 5)
    path = saved(tmp_path / "one.trace", trace)
    assert outcome(f"estimate --trace {path}", capsys)[0] == 0
    for command in (f"estimate --trace {path} --batch 2", f"max-batch --trace {path} --gpu-mib 8000"):
        assert outcome(command, capsys) == (
            2,
            "",
            f"planner: {path}: this trace holds for batch 5 only; capture batch 2 again\n",
        )


def test_trace_for_other_capability(capsys: Capture, toy_trace: Path) -> None:
    """Where the trace was taken for another compute capability, the answer says so."""
    note = "traced for compute capability 8.6; this GPU's kernels may take other memory"
    _, out, _ = outcome(f"estimate --trace {toy_trace} --gpu h200 --json", capsys)
    assert note in json.loads(out)["assumptions"]
    _, out, _ = outcome(f"estimate --trace {toy_trace} --gpu-mib 8000 --json", capsys)
    assert note not in json.loads(out)["assumptions"]


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"job": {}}, "KeyError: 'model'"),
        ({"job": None}, "TypeError: 'NoneType' object is not subscriptable"),
        ({"batch": "5"}, "TypeError: batch, capability and multiprocessors are integers"),
        ({"capability": [8]}, "ValueError: not enough values to unpack (expected 2, got 1)"),
    ],
)
def test_trace_with_broken_job(
    capsys: Capture, tmp_path: Path, about: dict[str, object], problem: str
) -> None:
    """A trace whose job is nonsense is a broken data file."""
    path = saved(tmp_path / "bad.trace", program_of(toy_events(MIB), (Site("fc", "to"),)), **about)
    assert outcome(f"estimate --trace {path}", capsys) == (
        4,
        "",
        f"planner: {path}: broken job of a trace: {problem}; capture it again\n",
    )


# ---- errors: one line each -----------------------------------------------------------------------

COUNT = "is refused; use a whole number"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("max-btach", "no such command 'max-btach'. Did you mean 'max-batch'? See planner --help"),
        ("estimate --tensor-cores yes", "no such option: --tensor-cores; see planner estimate --help"),
        ("estimate 128", "got unexpected extra argument(s) (128); see planner estimate --help"),
        ("estimate --model", "option '--model' requires an argument; see planner --help"),
        ("estimate", "--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME"),
        (
            "max-batch --model cnn",
            "no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N",
        ),
        (
            "max-batch --model cnn --gpu l4 --gpu-mib 24000",
            "--gpu and --gpu-mib: both say which GPU; give one of them",
        ),
        (
            "estimate --trace x --model cnn",
            "--model and --trace: the trace file says that; leave one away",
        ),
        (
            "estimate --trace x --optimizer-impl fused",
            "--optimizer-impl and --trace: the trace file says that; leave one away",
        ),
        (
            "estimate --model torchvision:alexnet",
            "torchvision:alexnet: no batch size is known; give one, such as --batch 32",
        ),
        (
            "estimate --model resnet5",
            "model 'resnet5' is unknown; the nearest in the catalogue: resnet50; torchvision's own is "
            "written torchvision:resnet5",
        ),
        (
            "estimate --model torchvision:resnet5 --batch 2",
            "torchvision has no model 'resnet5'; the nearest: resnet50, resnet152, resnet34",
        ),
        ("estimate --model cnn --batch 0", f"--batch: '0' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch -3", f"--batch: '-3' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch 16777217", f"--batch: '16777217' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch 1.5", "--batch: expected a whole number, got '1.5'"),
        ("max-batch --model cnn --gpu-mib 24GB", "--gpu-mib: expected a whole number, got '24GB'"),
        (
            "max-batch --model cnn --gpu-mib 0",
            "a GPU of 0 MiB makes no sense: give its total memory in MiB as nvidia-smi shows it, "
            "from 100 to 10000000",
        ),
        (
            "max-batch --model cnn --allocator-cap-mib 0",
            f"--allocator-cap-mib: '0' {COUNT} from 1 to 10000000",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --confidence 1",
            "--confidence 1.0: give a probability from 0.5 to below 1, such as 0.99",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --confidence sure",
            "--confidence: expected a number, got 'sure'",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --alloc-conf expandable_segment:True",
            "allocator configuration: unknown option 'expandable_segment'; "
            "did you mean 'expandable_segments'?",
        ),
        (
            "estimate --model cnn --input 3x0",
            "tensor '3x0': a size is 0; every size of one sample must be at least 1",
        ),
        (
            "estimate --model gpt2 --new-tokens 64",
            "gpt2: --new-tokens and --mode train: leave it away, or give --mode generate",
        ),
        (
            "estimate --model cnn --cublas-workspace-config 4096:8",
            "--cublas-workspace-config: cannot read '4096:8'; write :SIZE:COUNT with sizes in KiB, such as "
            ":4096:8 or :4096:2:16:8",
        ),
    ],
)
def test_wrong_usage(capsys: Capture, command: str, line: str) -> None:
    """Wrong usage is told in one line, with exit code 2."""
    assert outcome(command, capsys) == (2, "", f"planner: {line}\n")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (
            "Item",
            "module 'inner' calls aten._local_scalar_dense.default (models.py:21: return x * x.sum().item())",
        ),
        (
            "NonZero",
            "module 'inner' calls aten.nonzero.default (models.py:35: return x + torch.nonzero(x).sum())",
        ),
        (
            "Nms",
            "module 'inner' calls torchvision.nms.default (models.py:49: "
            "return x[torchvision.ops.nms(x, x[:, 0], 0.5)])",
        ),
        ("Masked", "the model's own forward calls aten.index.Tensor (models.py:64: return x[x > 0])"),
    ],
)
def test_model_that_reads_values(capsys: Capture, name: str, place: str) -> None:
    """A model that reads values of tensors is answered with values drawn on the CPU; the answer says so."""
    command = f"estimate --model models.py:{name} --input 4 --loss sum --batch 8 --json"
    code, out, err = outcome(command, capsys)
    assert (code, err) == (0, "")
    drawn = "shapes that depend on them come from values drawn at random on the CPU, not from"
    if name == "Item":
        drawn = "conditions on them are decided by random numbers on the CPU, not by"
    told = f"{place}, which reads values: {drawn} data and trained weights"
    assert told in json.loads(out)["assumptions"]


@pytest.mark.usefixtures("models")
def test_model_that_exits(capsys: Capture) -> None:
    """A model that ends the process is refused like one that raises."""
    line = (
        "the model's own forward fails at batch 8 (models.py:69: raise SystemExit(7)): it ends the process "
    )
    assert outcome("estimate --model models.py:Exits --input 4 --loss sum --batch 8", capsys) == (
        3,
        "",
        f"planner: models.py:Exits: {line}with code 7; see the traceback with --debug\n",
    )


def test_shape_that_does_not_fit(capsys: Capture) -> None:
    """An input of the wrong shape names the module where it failed; exit code 3."""
    assert outcome("estimate --model cnn --input 4x224x224 --batch 8", capsys) == (
        3,
        "",
        "planner: cnn: module 'conv' fails at batch 8 in aten.convolution.default: Invalid channel dimensions"
        "; check --input and --target\n",
    )


def test_broken_catalogue(capsys: Capture, tmp_path: Path) -> None:
    """A broken models.yaml names the line and the key; exit code 4."""
    path = tmp_path / "models.yaml"
    path.write_text("mine:\n  source: zoo:ConvPair\n  about: mine\n  inputs: [1x8x8]\n  lost: sum\n")
    code, out, err = outcome(f"estimate --models {path} --model mine", capsys)
    assert (code, out) == (4, "")
    assert err == (
        f"planner: {path} line 5, mine.lost: unknown key; known are source, about, args, inputs, target, "
        f"{', '.join(FIELD_OPTIONS)}, batch\n"
    )


def test_trace_that_cannot_be_saved(capsys: Capture, tmp_path: Path) -> None:
    """A trace that cannot be written is one line and exit code 4, after the answer, which is there."""
    path = tmp_path / "missing" / "x.trace"
    for command, key in (
        ("estimate --model conv_pair", "batch"),
        ("max-batch --gpu L4 --model conv_pair", "max_batch"),
    ):
        code, out, err = outcome(f"{command} --json --save-trace {path}", capsys)
        assert (code, err) == (4, f"planner: {path}: cannot write the trace: No such file or directory\n")
        assert json.loads(out)[key] == json.loads(outcome(f"{command} --json", capsys)[1])[key]


def test_python_gets_the_answer_that_could_not_be_saved(tmp_path: Path) -> None:
    """The error holds the result, and the exit code of what went wrong."""
    with pytest.raises(UnsavedError) as told:
        planner.estimate("conv_pair", save_trace=tmp_path / "missing" / "x.trace")
    assert isinstance(told.value.result, planner.EstimateResult)
    assert (told.value.result.fits, told.value.exit_code) == ("yes", 4)


def failing(error: BaseException) -> Callable[..., None]:
    def fail(**options: object) -> None:
        raise error

    return fail


def test_internal_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the planner itself is one line with an exit code of its own, a traceback with `--debug`."""
    monkeypatch.setattr(planner, "estimate", failing(RuntimeError("two\nlines")))
    line = "planner: internal error: RuntimeError: two lines; run with --debug and report it"
    assert outcome("estimate --model cnn", capsys) == (70, "", f"{line}\n")
    code, out, err = outcome("estimate --model cnn --debug", capsys)
    assert (code, out) == (70, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.splitlines()[-1] == line


def test_traceback_with_debug(capsys: Capture) -> None:
    """With `--debug` a user's error shows its traceback too, the line coming last."""
    code, _, err = outcome("estimate --model cnn --batch 0 --debug", capsys)
    assert (code, err.splitlines()[0]) == (2, "Traceback (most recent call last):")
    assert err.splitlines()[-1] == f"planner: --batch: '0' {COUNT} from 1 to 16777216"


def test_interrupt(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is one line and exit code 130."""
    monkeypatch.setattr(planner, "estimate", failing(KeyboardInterrupt()))
    assert outcome("estimate --model cnn", capsys) == (130, "", "planner: interrupted\n")


# ---- the process ---------------------------------------------------------------------------------


def test_process(tmp_path: Path) -> None:
    """As a process: the JSON alone on standard output, nothing on standard error, exit code 0."""
    done = python("-m", "planner", "estimate", "--model", "conv_pair", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "conv_pair"


def test_process_that_fails(tmp_path: Path) -> None:
    """As a process: an error is one line on standard error and nothing on standard output."""
    done = python("-m", "planner", "estimate", "--model", "nothing", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_reader_that_went_away(toy_trace: Path) -> None:
    """Where nobody reads standard output any more, the planner ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "planner", "estimate", "--trace", str(toy_trace)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_version_names_what_answers_hang_on(capsys: Capture) -> None:
    """The planner's own version and that of torch, in one line."""
    code, out, err = outcome("--version", capsys)
    torch = installed_version("torch")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"planner \d+\.\d+\.\d+, torch {re.escape(torch or '')}(, torchvision \S+)?\n", out)


def test_help_loads_nothing_heavy() -> None:
    """`planner max-batch --help` loads neither torch, numpy, rich nor YAML."""
    code = (
        "import sys\n"
        "from planner.cli import run\n"
        "assert run(['max-batch', '--help']) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = python("-c", code)
    assert done.returncode == 0
    assert set(done.stdout.splitlines()[-1].split()) & {"torch", "numpy", "rich", "yaml", "click"} == set()
    assert "--allocator-cap-mib" in done.stdout


class Terminal:
    """A standard error that says it is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each line of progress overwrites the one before, and the last is wiped."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress() as tell:
        tell("tracing batch 100")
        tell("tracing batch 3")
    assert terminal.written == "\rtracing batch 100\rtracing batch 3  \r               \r"


# ---- Python --------------------------------------------------------------------------------------


def test_python_gives_the_json(capsys: Capture, toy_trace: Path) -> None:
    """The functions give what the commands print."""
    _, out, _ = outcome(f"max-batch --trace {toy_trace} --gpu-mib 8000 --json", capsys)
    result = planner.max_batch(trace=toy_trace, gpu_mib=8000)
    assert without_seconds(json.loads(json.dumps(result.to_dict()))) == without_seconds(json.loads(out))
    assert (result.max_batch, result.comfortable_batch) == (json.loads(out)["max_batch"],) * 2
    _, out, _ = outcome(f"estimate --trace {toy_trace} --batch 9 --json", capsys)
    found = planner.estimate(trace=toy_trace, batch=9)
    assert without_seconds(json.loads(json.dumps(found.to_dict()))) == without_seconds(json.loads(out))
    assert found.fits == "yes"


def test_python_prints_the_report(capsys: Capture, toy_trace: Path) -> None:
    """Printed, a result is the report of the command."""
    _, out, _ = outcome(f"estimate --trace {toy_trace}", capsys)
    assert str(planner.estimate(trace=toy_trace)).splitlines()[:-1] == out.splitlines()[:-1]


def test_python_takes_a_factory() -> None:
    """A module factory is traced like any model and gives the job its name."""
    from torch import nn

    def tiny() -> nn.Module:
        return nn.Linear(1024, 1024)

    found = planner.estimate(tiny, 256, input="1024", loss="sum", optimizer="adam", steps=2).to_dict()
    assert (found["model"], found["batch"]) == ("tiny", 256)
    assert found["breakdown_mib"]["parameters"] == 4.004
    assert found["breakdown_mib"]["optimizer"] > 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimiser": "adam"}, "there is no option 'optimiser'; the nearest: optimizer, optimizer_impl"),
        ({"zzz": 3}, "there is no option 'zzz'"),
        ({"input": (3, 8, 8)}, "tensor 3: write one sample as a text, such as '3x224x224' or '128:int64'"),
        ({"target": 5}, "tensor 5: write one sample as a text, such as '3x224x224' or '128:int64'"),
    ],
)
def test_python_refuses_what_would_mean_nothing(options: dict[str, Any], told: str) -> None:
    """A misspelled option, or a shape that is no text, is told and not passed over."""
    for ask in (planner.estimate, planner.max_batch, planner.gpus, planner.explain, planner.advise):
        batch = {} if ask is planner.max_batch else {"batch": 2}
        card = {} if ask is planner.gpus else {"gpu": "L4"}
        with pytest.raises(UsageError) as caught:
            ask("torchvision:alexnet", **batch, **card, **options)
        assert str(caught.value) == told


def test_python_wants_what_builds_a_module() -> None:
    """A module that is built already is callable, but it is not what builds one."""
    from torch import nn

    with pytest.raises(UsageError, match=r"^Linear: this module is built already; give the class, or a func"):
        planner.estimate(nn.Linear(2, 2), 2, input="2", loss="sum")


def test_one_argument_of_a_constructor_needs_no_list() -> None:
    """As with other options that may be given more than once."""
    options = {"input": "3x64x64", "target": "scalar:int64", "steps": 1}
    one, several = (
        planner.estimate("torchvision:alexnet", 2, model_arg=given, **options).estimate.job
        for given in ("num_classes=7", ["num_classes=7"])
    )
    assert one == several


def test_python_takes_jobs_and_devices(toy_trace: Path) -> None:
    """A `Job` and a `Device` may be given as objects, with options over the job."""
    from planner.hardware.device import generic_device

    card: planner.Device = replace(generic_device(2000), name="mine")
    job = planner.Job("pair", source="zoo:ConvPair", inputs=(TensorSpec((1, 32, 32)),), loss=Loss.SUM)
    result = planner.max_batch(job, gpu=card, optimizer="adam").to_dict()
    assert (result["device"]["name"], result["model"]) == ("mine", "pair")
    assert result["job"]["optimizer"] == "adam"
    assert result["max_batch"] > 0


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        (lambda: 3, "<lambda>: gives a int, not an nn.Module; name a callable that returns one"),
        (
            lambda: 1 // 0,
            "<lambda>: its constructor fails: ZeroDivisionError: integer division or modulo by zero; "
            "check --model-arg, or see the traceback with --debug",
        ),
    ],
)
def test_factory_that_makes_no_model(factory: Callable[[], object], line: str) -> None:
    """A factory that fails or returns something else is a model that cannot be built."""
    from planner.errors import ModelError

    with pytest.raises(ModelError) as caught:
        planner.estimate(factory, 2, input="4", loss="sum")
    assert str(caught.value) == line


def test_unknown_name() -> None:
    """The package has its public names and no other."""
    assert sorted(planner.__all__) == [
        "AdviceResult",
        "Device",
        "EstimateResult",
        "ExplainResult",
        "GpusResult",
        "Job",
        "MaxBatchResult",
        "advise",
        "estimate",
        "explain",
        "gpus",
        "max_batch",
    ]
    assert all(getattr(planner, name) is not None for name in planner.__all__)
    with pytest.raises(AttributeError, match="module 'planner' has no attribute 'nothing'"):
        planner.nothing  # noqa: B018
