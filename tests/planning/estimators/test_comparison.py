"""All estimators side by side: rows, errors, the measured value less its residue, text, JSON and picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.api.compare import compare as compare_job
from planner.cli import run
from planner.errors import DataFileError, UsageError
from planner.hardware.budget import Budget
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes, unlimited_device
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.comparison import (
    Comparison,
    Measured,
    ResidentModel,
    compare,
    find_measured,
    resident_bytes_after,
)
from planner.planning.estimators.methods import Method
from planner.planning.estimators.published import Source, load_measured
from planner.planning.estimators.static_estimate import StaticEstimate
from planner.planning.search.max_batch import Estimate, estimate_batch
from planner.program.events import Alloc, Category, Outcome, Phase, PhaseStart, Site, Trace
from planner.report.commands.estimates.compare import comparison_document, comparison_to_json
from planner.report.plain import WIDTH, render_plain
from planner.report.plots.comparison import draw_comparison
from planner.report.units import signed_percent
from tests.helpers.golden import FOLDER, expected
from tests.helpers.structs import replace

GOLDEN = FOLDER / "compare"
JOB = Job.create("toy", source="zoo:Toy", inputs=(TensorSpec((3, 4)),), loss=Loss.SUM, steps=1)
CONTEXT = SourcedBytes(300 * MIB, "one measurement")
CARD = Device(
    name="Card 1",
    total=SourcedBytes(1024 * MIB, "nvidia-smi", kind=FigureKind.PUBLISHED),
    usable=SourcedBytes(800 * MIB, "torch's log", kind=FigureKind.PUBLISHED),
    context=CONTEXT,
    capability=(8, 6),
)
SOURCE = Source(
    "A notebook", "torch", "about", None, None, {"python": "3.10", "torch": "2.0.1", "cuda": "11.8"}
)
# 100 MiB of weights and 10 MiB of activations a sample; peak 200 MiB at batch 10.
EVENTS = (
    *(
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 100 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
    ),
    *(Alloc(1, 100 * MIB, Category.ACTIVATION, 0), PhaseStart(1, Phase.END)),
)
TRACE = Trace(EVENTS, (Site("fc", "to"),), 10)
BATCH = 10
TOTALS_MIB = {Method.FORMULA: 220, Method.TORCHINFO: 150, Method.TORCHSUMMARY: 500, Method.MEMTRACKER: 198}
REASON = "pytorch_modelsize needs one input and modules in a chain"


def no_card() -> Budget:
    return Budget(
        replace(unlimited_device(), context=CONTEXT),
        0.99,
        None,
        MemoryLimits(None, None, None, AllocatorConfig()),
    )


def card(left_mib: int) -> Budget:
    return Budget(CARD, 0.99, None, MemoryLimits(left_mib * MIB, None, None, AllocatorConfig()))


def own(budget: Budget) -> Estimate:
    return estimate_batch(JOB, TRACE, budget)


def answers(budget: Budget) -> dict[Method, StaticEstimate | str]:
    """Return the answers of the other methods: figures, and one refusal."""
    totals = {method: total * MIB for method, total in TOTALS_MIB.items()}
    return {
        method: StaticEstimate(method, JOB, BATCH, budget, (), totals[method], MIB, 0.0)
        if method in totals
        else REASON
        for method in Method
        if method is not Method.TRACE
    }


def measured(*residents: ResidentModel) -> Measured:
    """240 MiB allocated and 310 reserved, as printed."""
    return Measured(240.0 * MIB, 310.0 * MIB, residents, SOURCE)


def compared(budget: Budget, truth: Measured | str) -> Comparison:
    return compare(own(budget), answers(budget), truth, 2.5)


RESIDUE = (ResidentModel("small", 10 * MIB), ResidentModel("large", 30 * MIB))


def comparisons() -> dict[str, Comparison]:
    return {
        "residue": compared(no_card(), measured(*RESIDUE)),
        "no_residue": compared(no_card(), replace(measured(), reserved_bytes=None)),
        "unmeasured_on_a_card": compared(card(199), "no measured value is stored for toy at batch 10"),
    }


# ---- rows ----------------------------------------------------------------------------------------


def errors(comparison: Comparison) -> dict[str, float | None]:
    return {str(row.key): row.error and round(row.error, 6) for row in comparison.rows}


def test_errors_refer_to_the_measured_value_less_what_earlier_models_keep() -> None:
    """240 MiB less 40 are 200: 220 are 10 % too many; reserved 310 less 40 are 270; the process has none."""
    assert errors(comparisons()["residue"]) == {
        "formula": 0.1,
        "torchinfo": -0.25,
        "torchsummary": 1.5,
        "modelsize": None,
        "memtracker": -0.01,
        "allocated": 0.0,
        "reserved": round(200 / 270 - 1, 6),
        "process": None,
    }


def test_without_a_measured_value_differences_are_from_the_planner() -> None:
    """The planner's allocated is the yardstick of the others and has no error itself."""
    gaps = errors(comparisons()["unmeasured_on_a_card"])
    assert (gaps["formula"], gaps["memtracker"], gaps["allocated"], gaps["reserved"]) == (
        0.1,
        -0.01,
        None,
        None,
    )


def test_each_row_says_whether_it_fits_the_card() -> None:
    """The others' totals are held against what is left, the planner's verdict is its replay's."""
    rows = {str(row.key): row.fits for row in comparisons()["unmeasured_on_a_card"].rows}
    no, yes = Outcome.DOES_NOT_FIT, Outcome.FITS
    assert rows == {
        **{"formula": no, "torchinfo": yes, "torchsummary": no, "modelsize": None, "memtracker": yes},
        **{"allocated": no, "reserved": no, "process": no},
    }
    assert {row.fits for row in comparisons()["residue"].rows} == {None}


def test_residents_are_parameters_and_gradients_in_the_blocks_they_got() -> None:
    """Activations go with their names; 100 MiB of weights stay."""
    assert resident_bytes_after(TRACE) == 100 * MIB


def nothing_resident(name: str) -> ResidentModel:
    return ResidentModel(name, 0)


def test_stored_peaks_name_the_models_that_they_hold() -> None:
    """The notebook's figures of ResNet-50 hold the CNN and VGG16-BN; batch 64 has none."""
    measured = find_measured(load_measured(), "resnet50", 128, nothing_resident)
    assert measured is not None
    assert (measured.printed_bytes, measured.reserved_bytes) == (11738.2 * MIB, 12982.0 * MIB)
    assert measured.residents == (ResidentModel("cnn", 0), ResidentModel("vgg16_bn", 0))
    assert find_measured(load_measured(), "resnet50", 64, nothing_resident) is None


def test_every_model_that_is_named_resident_is_in_the_catalogue() -> None:
    """The residue of each named model can be traced."""
    names = {name for figure in load_measured().figures for name in figure.residents}
    assert names == {"cnn", "vgg16_bn", "resnet50", "vit_b_16"}
    assert names <= load_catalogue().keys()


def test_measured_is_put_together_from_figures() -> None:
    """A measured value is the printed peak less the bytes of resident models."""
    truth = find_measured(load_measured(), "cnn", 128, nothing_resident)
    assert truth is not None
    truth = replace(truth, residents=(ResidentModel("x", MIB),))
    assert (truth.allocated_bytes, truth.own_reserved_bytes) == (530.9 * MIB - MIB, 603.0 * MIB)


# ---- reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_text(name: str) -> None:
    """Each report reads, to the letter, as its golden file."""
    text = render_plain(comparison_document(comparisons()[name])) + "\n"
    assert text == expected(f"compare/{name}.txt", text)


def test_every_report_has_a_golden_file_and_fits_a_terminal() -> None:
    """No report is without a golden file, and no line is longer than 100 columns or ends in a blank."""
    assert sorted(comparisons()) == sorted(path.stem for path in GOLDEN.glob("*.txt"))
    lines = [
        line
        for comparison in comparisons().values()
        for line in render_plain(comparison_document(comparison)).splitlines()
    ]
    assert [line for line in lines if len(line) > WIDTH or line != line.rstrip()] == []


def test_an_error_of_nothing_has_no_sign() -> None:
    """Rounding leaves neither +0.0 nor -0.0."""
    assert [signed_percent(share) for share in (0.0, -0.0004, 0.0006, -0.25)] == [
        "0.0%",
        "0.0%",
        "+0.1%",
        "-25.0%",
    ]


def test_json_rows_have_their_figures_or_their_reason() -> None:
    """Every row has its size, what that is held against, the error, and what is counted; or why not."""
    fields = comparison_to_json(comparisons()["residue"])
    rows = {row["estimator"]: row for row in fields["rows"]}
    assert rows["torchinfo"] | {"counts": ""} == {
        **{"estimator": "torchinfo", "mib": 150.0, "against_mib": 200.0, "error": -0.25, "fits": None},
        **{"counts": "", "reason": None},
    }
    assert (rows["modelsize"]["mib"], rows["modelsize"]["reason"]) == (None, REASON)
    assert all(row["counts"] for row in rows.values())
    assert fields["measured"] == {
        "printed_mib": 240.0,
        "kept_mib": {"small": 10.0, "large": 30.0},
        "allocated_mib": 200.0,
        "reserved_mib": 270.0,
        "process_mib": None,
        "source": "A notebook, torch 2.0.1, CUDA 11.8; GPU unknown",
    }
    assert json.loads(json.dumps(fields))["rows"] == fields["rows"]


# ---- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residue", "no_residue", "unmeasured_on_a_card"])
def test_picture_shows_every_figure(name: str, tmp_path: Path) -> None:
    """Names, sizes, errors and refusals of all rows stand in the picture, with the measured value if any."""
    path = tmp_path / "x.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_comparison(comparisons()[name], path)
    drawn = path.read_text(encoding="utf-8")
    shown = ["closed formula", "pytorch_modelsize", "refused", "planner, process", "0.21", "+10.0%"]
    expected = {
        "residue": ["measured, this model alone: 0.20", "dotted: measured reserved"],
        "no_residue": ["measured: 0.23", "(line: measured peak allocated)"],
        "unmeasured_on_a_card": ["vs ours", "no measured value is stored"],
    }
    if name == "no_residue":
        shown.remove("+10.0%")
    assert [
        text for text in [*shown, *expected[name]] if f">{text}<" not in drawn and text not in drawn
    ] == []


def test_picture_is_a_png_where_the_name_says_so(tmp_path: Path) -> None:
    """The suffix decides."""
    path = tmp_path / "x.png"
    draw_comparison(comparisons()["residue"], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder is one line."""
    path = tmp_path / "missing" / "x.png"
    with pytest.raises(DataFileError) as caught:
        draw_comparison(comparisons()["residue"], path)
    assert str(caught.value) == f"{path}: cannot write the picture: No such file or directory"


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_shows_why_the_formula_looked_better_than_it_is() -> None:
    """ResNet-50: the printed -3.1 % of the formula are +6.3 % of this model alone; ours are at 0.0 %."""
    comparison = compare_job("resnet50", 128).comparison
    assert comparison.measured is not None
    assert round(comparison.measured.allocated_bytes / MIB, 1) == 10702.4
    shown = {str(row.key): signed_percent(row.error) for row in comparison.rows if row.error is not None}
    assert (shown["formula"], shown["torchinfo"], shown["allocated"]) == ("+6.3%", "+104.3%", "0.0%")
    sizes = {str(row.key): row.size_bytes for row in comparison.rows}
    assert signed_percent((sizes["formula"] or 0) / comparison.measured.printed_bytes - 1) == "-3.1%"


def test_compare_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` gives one object; a job outside the catalogue has a reason in place of a measured value."""
    assert run(["compare", "--model", "cnn", "--batch", "128", "--optimizer", "adam", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["measured"], fields["rows"][0]["estimator"]) == (None, "formula")
    assert fields["unmeasured"] == ("measured values are stored only for the unchanged models of models.yaml")


def test_compare_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--plot` writes the picture and the table comes all the same."""
    path = tmp_path / "cnn.png"
    assert run(f"compare --model cnn --batch 128 --plot {path}".split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "  MemTracker               514.2     -3.1%" in capsys.readouterr().out


def test_an_estimator_without_a_term_for_the_job_says_so_in_its_row() -> None:
    """Adafactor: the formula's cell carries the reason, the other rows stand."""
    comparison = compare_job("conv_pair", 2, optimizer="adafactor").comparison
    reasons = {str(row.key): row.reason for row in comparison.rows}
    assert reasons["formula"] == (
        "optimizer adafactor: the formula counts moments the size of the weights, and adafactor keeps others"
    )
    assert [reasons[key] for key in ("torchinfo", "modelsize", "allocated")] == [None, None, None]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--plot x.gif", "--plot x.gif: give a file that ends in .png, .svg or .pdf"),
        ("--trace x", "--trace: compare runs the model itself; remove it"),
        ("--save-trace x", "--save-trace: compare runs the model itself; remove it"),
        ("--batch 0", "--batch: '0' is refused; use a whole number from 1 to 16777216"),
    ],
)
def test_wrong_usage(options: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is one line before anything is run, with exit code 2."""
    assert run(f"compare --model cnn {options}".split()) == 2
    assert capsys.readouterr().err == f"planner: {line}\n"


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing extra is one line that says how to get it."""
    monkeypatch.setattr("planner.cli.paths.find_spec", lambda name: None)
    assert run(["compare", "--model", "cnn", "--plot", "x.png"]) == 2
    assert (
        capsys.readouterr().err == "planner: --plot needs matplotlib: pip install 'gpu-batch-planner[plot]'\n"
    )


@pytest.mark.slow
def test_only_a_picture_loads_matplotlib() -> None:
    """The command without `--plot` runs where matplotlib is not installed."""
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from planner.cli import run\n"
        "sys.exit(run(['compare', '--model', 'conv_pair', '--batch', '2']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_compare_needs_a_model() -> None:
    """A missing model is refused as by every command that takes one."""
    with pytest.raises(UsageError, match="--model is missing"):
        compare_job()
