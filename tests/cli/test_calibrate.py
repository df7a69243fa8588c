"""`planner tables`, `calibrate` and `verify`, and which calibrations `estimate` reads; the GPU is made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import paths, run
from planner.hardware.calibration.files import TABLES_FOLDER, load_folders
from planner.hardware.calibration.model import Fit, Point
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.planning.workload import Workload
from planner.program import TraceSource
from planner.program.events import Alloc, Category, Phase, PhaseStart, Site, Trace
from planner.program.program import AffineAlloc, Program
from planner.program.target import Target
from tests.helpers.calibrations import FIT, JOB, KEY, REFUSAL, calibration, observation, save_calibration
from tests.helpers.runs import CARD, FakeMeasure
from tests.helpers.structs import replace
from tests.helpers.traces import RunTraces, program_of, save_trace

Capture = pytest.CaptureFixture[str]
TOY = Job("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder of calibrations, which is not there yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "gpu-batch-planner" / "calibrations"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeMeasure:
    """An RTX 3060 on which runs follow a formula, and traces that follow the same."""
    measure = FakeMeasure()
    monkeypatch.setattr("calibration.calibrate.find_gpu", lambda: CARD)
    monkeypatch.setattr("calibration.calibrate.measure", measure)
    monkeypatch.setattr("calibration.calibrate._open_source", tracer)
    monkeypatch.setattr("calibration.probe.client.find_gpu", lambda: CARD)
    monkeypatch.setattr("calibration.probe.client.measure", measure)
    return measure


def toy() -> Program:
    """100 MiB and 10 MiB a sample."""
    events = (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 100 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, 0, 10 * MIB, Category.ACTIVATION, 0),
        PhaseStart(1, Phase.END),
    )
    return program_of(events, (Site("fc", "to"),))


def tracer(job: Job, capability: tuple[int, int], tell: object) -> TraceSource:
    def trace(batch: int) -> Trace:
        events = (PhaseStart(1, Phase.FORWARD), Alloc(0, (100 + 10 * batch) * MIB, Category.ACTIVATION, 0))
        return Trace(events, (Site("", "to"),), batch)

    return trace


def outcome(command: str, capsys: Capture) -> tuple[int, str, str]:
    code = run(command.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def store(folder: Path, overhead_mib: int) -> None:
    """A calibration of the toy job on an RTX 3060 12GB."""
    key = replace(KEY, job=TOY, gpu="RTX 3060 12GB")
    save_calibration(folder, calibration(key, replace(FIT, overhead_bytes=overhead_mib * MIB)))


def overhead(options: str, tmp_path: Path, capsys: Capture) -> float | None:
    """The overhead that `estimate` corrects by."""
    path = tmp_path / "toy.trace"
    save_trace(toy(), path, {"job": job_to_json(TOY), "batch": 5, "capability": [8, 6]})
    command = f"estimate --trace {path} --gpu RTX3060-12GB --json {options}"
    code, out, err = outcome(command, capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)["calibration"]
    return None if found is None else float(found["overhead_mib"])


def test_which_folder_answers(tmp_path: Path, own: Path, capsys: Capture) -> None:
    """The folders that are given come first, in their order, then the user's own; --no-calibration takes
    none.
    """
    assert overhead("", tmp_path, capsys) is None
    store(own, 700)
    assert overhead("", tmp_path, capsys) == 700
    store(tmp_path / "a", 800)
    store(tmp_path / "b", 900)
    given = f"--calibrations {tmp_path / 'b'} --calibrations {tmp_path / 'a'}"
    assert overhead(given, tmp_path, capsys) == 900
    assert overhead("--no-calibration", tmp_path, capsys) is None


def test_max_batch_reads_calibrations(tmp_path: Path, capsys: Capture) -> None:
    """More overhead leaves less for the batch: 10 MiB a sample, so 1,000 MiB are about 100 samples."""
    path = tmp_path / "toy.trace"
    save_trace(toy(), path, {"job": job_to_json(TOY), "batch": 5, "capability": [8, 6]})
    found = []
    for name, size in (("a", 700), ("b", 1_700)):
        store(tmp_path / name, size)
        command = f"max-batch --trace {path} --gpu RTX3060-12GB --json --calibrations {tmp_path / name}"
        found.append(json.loads(outcome(command, capsys)[1])["max_batch"])
    assert found[0] - found[1] in (97, 98, 99)  # by the slope of 1.02


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("tables --calibrations missing", "--calibrations missing: no such folder; make it or leave"),
        (
            "estimate --model m --calibrations . --no-calibration",
            "--calibrations and --no-calibration exclude each other",
        ),
        ("calibrate", "nothing to measure: give one of --model NAME, --campaign FILE and --import DIR"),
        ("calibrate --model m --campaign standard", "--model and --campaign: give one of --model NAME"),
        ("calibrate --campaign standard --loss mse", "--loss and --campaign: it says itself what is run"),
        ("calibrate --import . --batches 8", "--batches and --import: it says itself what is run"),
        ("calibrate --import missing", "--import missing: no such folder"),
        (
            "calibrate --import . --minutes 5",
            "--minutes and --import: records are taken over without measuring",
        ),
        ("calibrate --import . --alloc-conf x", "--alloc-conf and --import: it says itself what is run"),
        (
            "calibrate --campaign standard --cudnn-benchmark",
            "--cudnn-benchmark and --campaign: it says itself what is run; leave one",
        ),
        (
            "calibrate --campaign standard --no-grad-scaler",
            "--grad-scaler and --campaign: it says itself what is run; leave one",
        ),
        ("calibrate --model resnet50 --batches 8 --alloc-conf x", "allocator configuration: cannot read 'x'"),
        (
            "estimate --model cnn --method formula --calibrations .",
            "--calibrations and --method formula: the closed formula takes no account of it; leave it away",
        ),
        (
            "estimate --model cnn --calibrations .",
            "--calibrations: calibrations are those of a card; say which, such as --gpu L4",
        ),
        (
            "max-batch --model cnn --allocator-cap-mib 900 --calibrations .",
            "--calibrations: calibrations are those of a card; say which, such as --gpu L4",
        ),
        ("compare --model cnn --calibrations .", "--calibrations: calibrations are those of a card"),
        ("calibrate --model resnet50", "--batches is missing: give at least four batch sizes"),
        ("calibrate --model resnet50 --batches 8,x", "--batches: expected a whole number, got 'x'"),
        ("calibrate --model resnet50 --batches 8,0", "--batches: '0' is refused; use a whole number"),
        ("calibrate --model resnet50 --batches 8 --minutes x", "--minutes: expected a number, got 'x'"),
        ("calibrate --model resnet50 --batches 8 --minutes -1", "--minutes -1.0: give the minutes"),
        (
            "calibrate --model resnet50 --batches 8 --trace f",
            "--trace: calibrate runs the model itself; leave it away",
        ),
        ("verify --trace f", "--trace: verify runs the model itself; leave it away"),
    ],
)
def test_wrong_usage(command: str, line: str, tmp_path: Path, capsys: Capture) -> None:
    """What makes no sense is one line and code 2, before a GPU is looked for."""
    code, out, err = outcome(command, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"planner: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "calibrate --model resnet50 --batches 8,16,32,64",
        "calibrate --campaign standard",
        "verify --model resnet50 --batch 8",
    ],
)
def test_without_a_gpu(command: str, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Measuring without a GPU is one line and code 5, and leaves no folder behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = outcome(command, capsys)
    assert (code, out, err.count("\n"), own.exists()) == (5, "", 1, False)
    assert err.startswith("planner: no NVIDIA GPU is usable here: ")


def test_tables_that_ship(capsys: Capture) -> None:
    """Every shipped file is listed, with its line or the reason for none, in at most 100 columns."""
    code, out, err = outcome("tables", capsys)
    stored = load_folders([TABLES_FOLDER])
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(stored)} calibrations in ")
    assert out.count("refused: ") == sum(not isinstance(one.fit, Fit) for one in stored)
    assert out.count("  Line ") == len(stored)
    assert max(map(len, out.splitlines())) <= 100


def test_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """That nothing is stored is an answer: it is said where was looked, with code 0."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    code, out, _ = outcome("tables", capsys)
    assert code == 0
    assert " ".join(out.split()) == f"No calibration is stored. Looked into: {tmp_path}"


def test_tables_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A calibration in full: origin, versions, line, and each run with its distance from the line."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    died = replace(observation(30, 2_000), oom=True)
    held = replace(observation(40, 2_000), retries=1)
    known = calibration()
    more = (*known.points, Point(died, 3_000 * MIB), Point(held, 3_000 * MIB))
    save_calibration(tmp_path, replace(known, points=more, when="someday"))
    assert outcome("tables", capsys)[1].partition("\n\n")[2] == TABLE


TABLE = """\
torchvision:resnet18 with sgd on NVIDIA GeForce RTX 3060, torch 2.6.0+cu124, measured
  Job       toy = torchvision:resnet18(depth=[1, 2], rate=0.5, bias=True); training with sgd,
            cross_entropy loss; one sample: input 3x8x8, target scalar:int64
  From      measured on someday; made up
  Versions  torch 2.6.0+cu124, CUDA 12.4, cuDNN 9.1.0, driver not recorded, compute capability 8.6;
            traced with torch 2.13.0
  Line      500.0 MiB + 1.0200 x replayed peak reserved, with the context; spread 10.0 MiB, 5
            points, highest leverage 0.60, off the line: batch 16
       batch    replayed    measured   line says    residual  MiB
          10     1,000.0     1,500.0     1,520.0       -20.0
          20     2,000.0     2,520.0     2,540.0       -20.0
          30     3,000.0     2,000.0     3,560.0           -  out of memory
          40     3,000.0     2,000.0     3,560.0           -  not fitted: it was bounded
"""


def test_tables_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Scripts get the same: a refusal has its reason and no line, and its runs no residuals."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    save_calibration(tmp_path, calibration(fit=REFUSAL))
    found = json.loads(outcome("tables --json", capsys)[1])
    (table,) = found["calibrations"]
    assert (found["schema"], found["folders"], table["folder"]) == (1, [str(tmp_path)], str(tmp_path))
    assert (table["fit"], table["refused"], table["gpu"]) == (None, "3 batch sizes", KEY.gpu)
    assert (table["job"], table["versions"]["capability"]) == (job_to_json(JOB), [8, 6])
    assert table["age_days"] >= 0
    assert table["runs"][0] == {
        "batch": 10,
        "replayed_mib": 1_000.0,
        "measured_mib": 1_500.0,
        "emulated_mib": None,
        "fitted_mib": None,
        "residual_mib": None,
        "oom": False,
        "used": False,
    }


def test_a_broken_table(tmp_path: Path, capsys: Capture) -> None:
    """A broken file is one line and code 4."""
    (tmp_path / "x.yaml").write_text("kind: [")
    code, out, err = outcome(f"tables --calibrations {tmp_path}", capsys)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert err.startswith(f"planner: {tmp_path / 'x.yaml'}")


def test_calibrate(own: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """Four batches become a line in the user's own folder: the context's 420 MiB; again, nothing runs."""
    command = "calibrate --model torchvision:resnet18 --batches 8,16,32,64 --json"
    code, out, err = outcome(command, capsys)
    assert (code, err, len(gpu.asked)) == (0, "", 4)
    found = json.loads(out)
    assert (found["folder"], found["new_runs"], found["series_left"], found["failures"]) == (
        *(str(own), 4, 0, []),
    )
    (table,) = found["calibrations"]
    assert table["fit"]["overhead_mib"] == pytest.approx(420, abs=30)  # segments of 20 MiB
    assert [one.key.job.model for one in load_folders([own])] == ["torchvision:resnet18"]
    code, out, _ = outcome(command.removesuffix(" --json"), capsys)
    assert (code, len(gpu.asked)) == (0, 4)
    assert " ".join(out.split()).startswith(f"0 new runs, kept in {own}")
    assert "x replayed peak reserved, with the context; spread" in " ".join(out.split())


def test_calibrate_without_a_line(tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """Two batches make no line: the runs are kept, the reason is said, and the code is 1."""
    command = f"calibrate --model torchvision:resnet18 --batches 8,16 --out {tmp_path}"
    code, out, _ = outcome(command, capsys)
    assert code == 1
    assert "refused: 2 batch sizes with a peak of their own, at least 4 are needed" in " ".join(out.split())
    assert len(load_folders([tmp_path])) == 1


def test_calibrate_a_campaign(tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """A campaign file is run in place of a model, and the limits that it finds are said."""
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "about: a test\ngroups:\n"
        "  - {about: a cap, models: ['torchvision:resnet18'], batches: [8], caps_mib: [500]}\n"
    )
    code, out, _ = outcome(f"calibrate --campaign {path} --out {tmp_path}", capsys)
    assert code == 0
    assert "Largest batch 40: torchvision:resnet18 with sgd under 500 MiB" in out


def verified(options: str, capsys: Capture) -> tuple[int, str]:
    code, out, err = outcome(f"verify --model models.py:Fine --batch 8 {options}", capsys)
    assert err == ""
    return code, out


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of nearly no memory."""
    (tmp_path / "models.py").write_text(
        "from torch import nn\n\n\nclass Fine(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4, 4)\n"
    )
    monkeypatch.chdir(tmp_path)


JOB_OPTIONS = "--input 4 --loss sum"


@pytest.fixture
def emulated(gpu: FakeMeasure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's GPU is an emulated one."""
    gpu.name = "NVIDIA RTX 3060 12GB (emulated)"
    card = lambda: replace(CARD, name=gpu.name)  # noqa: E731
    monkeypatch.setattr("calibration.calibrate.find_gpu", card)
    monkeypatch.setattr("calibration.probe.client.find_gpu", card)


@pytest.mark.usefixtures("linear", "emulated")
def test_an_emulated_verification_is_called_that(gpu: FakeMeasure, capsys: Capture) -> None:
    """The verdict is "emulated", and nothing in the answer is called measured."""
    gpu.context_mib = 150
    code, out = verified(f"{JOB_OPTIONS} --json --confidence 0.999999", capsys)
    found = json.loads(out)
    assert (code, found["holds"], found["verdict"], found["measured"]) == (0, True, "emulated", None)
    assert found["emulated"]["peak_reserved_mib"] == 180
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.999999", capsys)
    assert out.splitlines()[0] == (
        "Emulated, not measured; there confidence 0.999999 held: batch 8 was said to fit and ran"
    )
    assert "measured" not in out.split("\n", 1)[1]


@pytest.mark.usefixtures("linear", "emulated")
def test_an_emulated_calibration_is_called_that(tmp_path: Path, capsys: Capture) -> None:
    """Its title, its origin and the column of its runs say so, and so do the files."""
    command = f"calibrate --model models.py:Fine {JOB_OPTIONS} --batches 8,16,32,64 --out {tmp_path / 'new'}"
    code, out, _ = outcome(command, capsys)
    assert f"on NVIDIA RTX 3060 12GB (emulated), torch {CARD.versions.torch}, emulated" in out
    assert "From      emulated on " in out and "replayed    emulated   line says" in out
    assert "measured" not in out
    (run, *_) = json.loads(outcome(f"{command} --json", capsys)[1])["calibrations"][0]["runs"]
    assert (run["measured_mib"], run["emulated_mib"] > 0) == (None, True)


@pytest.mark.usefixtures("linear")
def test_verify_that_did_not_hold(gpu: FakeMeasure, capsys: Capture) -> None:
    """The made-up run takes 180 MiB more than the linear layer, more than this card's bound."""
    code, out = verified(f"{JOB_OPTIONS} --json --confidence 0.6", capsys)
    found = json.loads(out)
    assert (code, found["ran"], found["agrees"], found["holds"]) == (1, True, True, False)
    assert found["measured"]["process_peak_mib"] == 600
    assert found["errors"]["process"] == pytest.approx(found["estimate"]["process_mib"] / 600 - 1, abs=1e-5)
    assert found["estimate"]["device"]["name"] == find_device("RTX 3060 12GB").name
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.6", capsys)
    assert (code, out.splitlines()[0]) == (
        1,
        "Confidence 0.6 did NOT hold: batch 8 was said to fit and ran, but took more than the upper bound",
    )


@pytest.mark.usefixtures("linear")
def test_verify_that_held(gpu: FakeMeasure, capsys: Capture) -> None:
    """Of a card with a smaller context the run holds; each peak stands beside what was said of it."""
    gpu.context_mib = 150
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.999999", capsys)
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "Confidence 0.999999 held: batch 8 was said to fit and ran")
    assert [line.split()[0] for line in lines[-4:]] == ["peak", "peak", "process", "process,"]
    assert lines[-2].split()[2] == "330.0"
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("linear")
def test_verify_runs_under_the_cap(gpu: FakeMeasure, capsys: Capture) -> None:
    """A cap is set for the run as well; here the run dies in it, though it was said to fit."""
    code, out = verified(f"{JOB_OPTIONS} --allocator-cap-mib 150", capsys)
    assert (code, gpu.asked[0].allocator_cap_bytes) == (1, 150 * MIB)
    assert out.splitlines()[0] == (
        "Confidence 0.99 did NOT hold: batch 8 was said to fit and ran out of memory"
    )


@pytest.mark.usefixtures("linear")
def test_verify_on_another_card(gpu: FakeMeasure, capsys: Capture) -> None:
    """A run here says nothing of another card."""
    code, _, err = outcome(f"verify --model models.py:Fine {JOB_OPTIONS} --batch 8 --gpu L4", capsys)
    assert (code, err) == (
        2,
        "planner: --gpu L4: this machine has NVIDIA GeForce RTX 3060; leave --gpu away\n",
    )


@pytest.mark.usefixtures("linear")
def test_verify_on_an_unknown_card(
    gpu: FakeMeasure, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A card that is in no database is taken as the driver and torch describe it."""
    monkeypatch.setattr("calibration.probe.client.find_gpu", lambda: replace(CARD, name="NVIDIA Z9"))
    device = json.loads(verified(f"{JOB_OPTIONS} --json", capsys)[1])["estimate"]["device"]
    assert (device["name"], device["total_mib"], device["usable_mib"]) == ("NVIDIA Z9", 12_288, 12_037)


def test_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$XDG_DATA_HOME counts if it is absolute, else ~/.local/share; without a home there is none."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.own_folder() == tmp_path / ".local/share/gpu-batch-planner/calibrations"

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert paths.own_folder() is None


def test_planning_imports_nothing_that_measures() -> None:
    """The commands that plan start without the package that measures."""
    code = "import sys, planner.cli.parser; print([m for m in sys.modules if m.startswith('calibration')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ones_own_folder_is_in_nobodys_way(own: Path, capsys: Capture) -> None:
    """Where calibrations cannot answer, the user's own folder is not looked into; nobody asked for it."""
    store(own, 700)
    (own / "broken.yaml").write_text("kind: [")
    for command in ("estimate --model cnn --method formula", "estimate --model cnn"):
        code, _, err = outcome(command, capsys)
        assert (code, err) == (0, "")
    code, _, err = outcome("estimate --model cnn --gpu L4", capsys)
    assert (code, err.startswith(f"planner: {own / 'broken.yaml'}")) == (4, True)


def test_compare_reads_calibrations(tmp_path: Path, capsys: Capture) -> None:
    """A stored run of the very job at this batch is what the figures are held against; the line corrects."""
    job = Job("zoo:ConvPair", inputs=(TensorSpec((1, 256, 256)),), loss=Loss.SUM)
    key = replace(KEY, job=job, gpu="RTX 3060 12GB")
    seen = replace(observation(10, 1_500, key), peak_allocated_bytes=1_000 * MIB)
    save_calibration(tmp_path, replace(calibration(key), points=(Point(seen, 1_100 * MIB),)))
    command = "compare --model zoo:ConvPair --input 1x256x256 --loss sum --gpu RTX3060-12GB --batch 10 --json"
    code, out, err = outcome(f"{command} --calibrations {tmp_path}", capsys)
    found = json.loads(out)
    assert (code, err, found["unmeasured"]) == (0, "", None)
    assert found["measured"] == {
        "printed_mib": 1_000.0,
        "kept_mib": {},
        "allocated_mib": 1_000.0,
        "reserved_mib": 1_150.0,
        "process_mib": 1_500.0,
        "source": "measured on 2026-01-02, torch 2.6.0+cu124, CUDA 12.4; GPU RTX 3060 12GB",
    }
    rows = {row["estimator"]: row for row in found["rows"]}
    reserved, process = rows["reserved"], rows["process"]
    assert (reserved["against_mib"], process["against_mib"]) == (1_150.0, 1_500.0)
    assert process["mib"] == pytest.approx(500 + 1.02 * reserved["mib"], abs=0.01)  # the line of `FIT`
    code, out, _ = outcome(f"{command} --no-calibration", capsys)
    assert (code, json.loads(out)["measured"]) == (0, None)


@pytest.mark.parametrize("options", ["", "--cudnn-benchmark", "--alloc-conf expandable_segments:True"])
def test_calibrate_under_settings(options: str, tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """The allocator's options and cuDNN's benchmark mode are those of the runs and of the calibration."""
    command = f"calibrate --model torchvision:resnet18 --batches 8,16,32,64 --out {tmp_path} {options}"
    assert outcome(command, capsys)[0] == 0
    conf = "expandable_segments:True" if "alloc" in options else ""
    expected = {("cudnn" in options, conf)}
    assert {(asked.job.cudnn_benchmark, asked.alloc_conf) for asked in gpu.asked} == expected
    (stored,) = load_folders([tmp_path])
    assert {(stored.key.job.cudnn_benchmark, stored.key.settings.alloc_conf)} == expected


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model's traces follow the formula of the made-up runs."""

    def workload(job: Job, batch: int | None, chip: Target, shelves: object) -> Workload:
        return Workload(job, batch, chip, lambda tell: RunTraces(tracer(job, chip.capability, tell)))

    monkeypatch.setattr("planner.api.request.kept_workload", workload)


LIMIT = "verify --model torchvision:resnet18 --allocator-cap-mib 1000"


@pytest.mark.usefixtures("traced")
def test_verify_the_largest_batch(gpu: FakeMeasure, capsys: Capture) -> None:
    """Under a cap of 1,000 MiB 86 is the answer with its margin: it, the next and 1.05 of it are run."""
    gpu.context_mib = 150
    code, out, err = outcome(f"{LIMIT} --json", capsys)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [(asked.batch, asked.allocator_cap_bytes) for asked in gpu.asked] == [
        (batch, 1_000 * MIB) for batch in (86, 87, 91)
    ]
    assert (found["max_batch"], found["holds"]) == (86, True)
    assert found["true_largest"] == {"at_least": 87, "at_most": 90}
    told = [(run["batch"], run["ran"], run["estimate"]["fits"]) for run in found["runs"]]
    assert told == [(86, True, "yes"), (87, True, "no"), (91, False, "no")]
    assert found["runs"][0]["errors"]["allocated"] == 0
    lines = outcome(LIMIT, capsys)[1].splitlines()
    assert lines[0] == ("Confidence 0.99 held: the largest batch was said to be 86; it lies from 87 to 90")
    assert [line for line in lines if line.startswith("Batch")] == [
        "Batch 86 was said to fit and ran",
        "Batch 87 was said not to fit and ran",
        "Batch 91 was said not to fit and ran out of memory",
    ]
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("traced")
def test_verify_a_largest_batch_that_dies(gpu: FakeMeasure, capsys: Capture) -> None:
    """Where the largest batch dies, nothing larger is run, the confidence did not hold, and the code is 1."""
    gpu.besides_mib = 100
    code, out, _ = outcome(f"{LIMIT} --json", capsys)
    found = json.loads(out)
    assert (code, [asked.batch for asked in gpu.asked]) == (1, [86])
    assert (found["holds"], found["true_largest"]) == (False, {"at_least": 0, "at_most": 85})
    assert outcome(LIMIT, capsys)[1].splitlines()[0] == (
        "Confidence 0.99 did NOT hold: the largest batch was said to be 86; it is smaller than 86"
    )


@pytest.mark.usefixtures("traced")
def test_verify_without_a_cap(gpu: FakeMeasure, capsys: Capture) -> None:
    """Without a cap the largest batch and the next are run, as far as the card has memory."""
    found = json.loads(outcome(LIMIT.partition(" --alloc")[0] + " --json", capsys)[1])
    largest = found["max_batch"]
    assert [asked.batch for asked in gpu.asked] == [largest, largest + 1]
    assert found["true_largest"] == {"at_least": largest + 1, "at_most": None}


@pytest.mark.usefixtures("traced")
def test_verify_where_nothing_fits(gpu: FakeMeasure, capsys: Capture) -> None:
    """Where not even 1 fits, 1 is run, and dies here as it was said to."""
    code, out, _ = outcome(LIMIT.replace("1000", "101"), capsys)
    assert (code, [asked.batch for asked in gpu.asked]) == (0, [1])
    assert out.splitlines()[0] == (
        "Confidence 0.99 held: the largest batch was said to be 0; it is smaller than 1"
    )
