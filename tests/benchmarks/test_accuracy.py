"""The accuracy report and the residuals that the planner uses follow from its table."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import DataFileError
from planner.hardware.residuals import RESIDUALS_FILE, RunKind, load_residuals, quantile
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from tests.helpers.structs import replace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_residuals_are_those_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """planner/hardware/residuals.json is what benchmarks/accuracy/accuracy.csv gives, to the digit."""
    from benchmarks.accuracy import kinds as accuracy_kinds
    from benchmarks.accuracy.rows import read_rows

    path = tmp_path / "residuals.json"
    monkeypatch.setattr(accuracy_kinds, "RESIDUALS_FILE", path)
    accuracy_kinds.write_residuals(read_rows())
    assert path.read_text() == RESIDUALS_FILE.read_text()


def test_stated_probabilities_lie_within_the_observed_intervals() -> None:
    """On every kind of runs with published outcomes, judged without its model, the 95 % interval of the share
    that died holds the stated mean, in all classes of probabilities but two. These are of texts, of which
    three models are known; docs/accuracy.md explains them.
    """
    from benchmarks.accuracy.probability import JUDGED, reliability
    from benchmarks.accuracy.rows import read_rows

    by_kind = reliability(read_rows())
    assert set(by_kind) == set(JUDGED) == set(RunKind) - {RunKind.LARGE}
    outside = [(kind, group) for kind, bins in by_kind.items() for group in bins if not group.is_honest]
    assert [kind for kind, _ in outside] == [RunKind.TEXTS, RunKind.TEXTS]
    assert [(group.stated < 0.1, group.observed < group.stated) for _, group in outside] == [
        (True, False),
        (False, True),
    ]
    assert all(sum(group.outcomes for group in bins) >= 100 for bins in by_kind.values())


def test_rows_of_timm_have_the_kind_of_their_trace() -> None:
    """The kinds in the table are those that the planner gives the traces of a CNN, a ViT and a hybrid."""
    import csv

    from benchmarks.accuracy.rows import read_rows
    from benchmarks.accuracy.rows_published import TIMM
    from benchmarks.published.timm_brackets import AMPERE, BRACKETS, job_of
    from planner.capture.session import record
    from planner.hardware.likeness import kind_of

    kinds = {(row.model, row.case.split()[1]): row.kind for row in read_rows() if row.source == TIMM}
    with BRACKETS.open(newline="") as file:
        lines = [
            line
            for line in csv.DictReader(file)
            if line["model"] in ("mobilevit_xxs", "deit3_base_patch16_384_in21ft1k", "vgg13")
        ]
    assert len(lines) >= 4
    for line in lines:
        job = job_of(line)
        assert kind_of(job, record(job, 2, AMPERE)).value == kinds[line["model"], line["memory_format"]]


def test_the_page_is_that_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/accuracy.md is what the script writes from benchmarks/accuracy/accuracy.csv."""
    from benchmarks.accuracy import (
        kinds as accuracy_kinds,
        plots as accuracy_plots,
        report as accuracy_report,
    )
    from benchmarks.accuracy.rows import read_rows

    page = tmp_path / "accuracy.md"
    monkeypatch.setattr(accuracy_report, "PAGE", page)
    monkeypatch.setattr(accuracy_kinds, "RESIDUALS_FILE", tmp_path / "residuals.json")
    monkeypatch.setattr(accuracy_plots, "draw_all", lambda rows, folder: None)
    accuracy_report.write_report(read_rows())
    assert page.read_text() == (BENCHMARKS.parent / "docs" / "accuracy.md").read_text()


def test_rows_survive_their_file(tmp_path: Path) -> None:
    """A table that is written and read is the same table."""
    from benchmarks.accuracy.rows import Row, read_rows, write_rows

    rows = [
        Row(
            "a source",
            "D",
            "m",
            "case, with a comma",
            "cnn",
            "GPU",
            3,
            "100",
            {"planner": "98", "xmem": "7.25"},
        ),
        Row("other", "E", "m", "under 5", "cnn", "GPU", 3, "dies", {"planner": "lives"}, 5.0, 4.5, "why"),
    ]
    write_rows(rows, tmp_path / "table.csv")
    assert read_rows(tmp_path / "table.csv") == rows
    assert (rows[0].error("planner"), rows[0].error("dnnmem")) == (pytest.approx(-0.02), None)
    assert (rows[1].is_right("planner"), rows[1].error("planner")) == (False, None)


def test_deaths_at_the_estimate() -> None:
    """A run dies at an estimate if it died under a cap as large, lives if it lived under one as small;
    a cap between decides nothing.
    """
    from benchmarks.accuracy.rows import Row
    from benchmarks.accuracy.rows_published import CAPS, TRANSFORMERS
    from benchmarks.accuracy.stats import deaths_at_estimate

    def run(name: str, estimate: str, **caps: float) -> list[Row]:
        peak = Row(TRANSFORMERS, "D", "m", name, "transformer", "GPU", 1, "100", {"planner": estimate})
        outcomes = (
            replace(peak, source=CAPS, layer="E", case=f"{name} under {cap}", truth=truth, limit_mib=cap)
            for truth, cap in caps.items()
        )
        return [peak, *outcomes]

    rows = [
        *run("safe", "100", dies=80, lives=95),
        *run("dead", "100", dies=100, lives=120),
        *run("open", "100", dies=90, lives=110),
        *run("both", "100", dies=105, lives=95),
    ]
    assert deaths_at_estimate(rows) == {"lives": 1, "dies": 1, "either": 1, "undecided": 1}


def test_a_term_left_out() -> None:
    """Without the scratch memory of a family its blocks are gone, births and deaths, and nothing else is."""
    from benchmarks.accuracy.ablations import without

    sites = (Site("", "aten.sum.dim_IntList"), Site("fc", "aten.mm.default"))
    events = (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, MIB, Category.PARAMETER, 1),
        Alloc(1, MIB, Category.WORKSPACE, 0),
        Free(1),
        Alloc(2, MIB, Category.WORKSPACE, 1),
    )
    trace = Trace(events, sites, 1)
    assert without(trace, "no_reductions").events == (*events[:2], events[4])
    assert without(trace, "no_cublas").events == events[:4]
    assert without(trace, "no_scratch").events == events[:2]
    assert without(trace, "no_attention_scratch") is trace


def test_needed_memory() -> None:
    """A block that can be released before a larger one is allocated is not needed beside it."""
    from benchmarks.accuracy.ablations import variants, verdicts

    events = (PhaseStart(1, Phase.FORWARD), Alloc(0, 100 * MIB, Category.TEMPORARY, 0), Free(0))
    trace = Trace((*events, Alloc(1, 200 * MIB, Category.TEMPORARY, 0)), (Site("", "x"),), 1)
    by_term = variants(trace, 1)
    assert by_term["planner"].reserved_mib == 300
    assert by_term["planner"].needed_mib(1) == pytest.approx(200, abs=1)
    outcomes = verdicts(by_term, 1, 250)
    assert (outcomes["planner"], outcomes["no_retries"], outcomes["allocated"]) == ("lives", "dies", "lives")


def test_quantiles_of_ordered_values() -> None:
    """The i-th of n values is the i / (n + 1) quantile, bounded by the first and the last."""
    shares = (0.0, 0.25, 0.3, 0.5, 0.75, 0.99)
    assert [quantile((1.0, 2.0, 4.0), share) for share in shares] == [
        1.0,
        1.0,
        pytest.approx(1.2),
        2.0,
        4.0,
        4.0,
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda residuals: residuals.pop("kinds"),
        lambda residuals: residuals["kinds"]["convolutions"]["verdicts"].update(scale=0),
        lambda residuals: residuals["kinds"]["convolutions"].update(peak_ratios=[2.0, 1.0]),
        lambda residuals: residuals["kinds"]["convolutions"].update(settings={}),
        lambda residuals: residuals["doubts"]["setting"].update(scale=-1),
        lambda residuals: residuals["doubts"].pop("stored"),
    ],
)
def test_broken_residuals(tmp_path: Path, change: object) -> None:
    """A file of residuals without a distribution is refused in one line."""
    residuals = json.loads(RESIDUALS_FILE.read_text())
    change(residuals)  # type: ignore[operator]
    path = tmp_path / "residuals.json"
    path.write_text(json.dumps(residuals))
    with pytest.raises(DataFileError) as caught:
        load_residuals(path)
    assert str(caught.value) == f"{path}: broken residuals; run python -m benchmarks.accuracy --from-csv"


@pytest.mark.parametrize(
    ("operator", "swept", "value"),
    [
        ("sparsemax", "V", "8192"),
        ("swiglu", "T", "1024"),
        ("tvd", "V", "4096"),
        ("fused_add_rms_norm", "H", "1024"),
    ],
)
def test_operators_are_the_published_figure(operator: str, swept: str, value: str) -> None:
    """Peaks of single operators on real GPUs, given to a thousandth of a MiB, are met to the last digit."""
    from benchmarks.accuracy.rows_operators import is_kernel, plain_peak_bytes, published_lines

    keys = {"operator": operator, "swept": swept, "value": value}
    plain = [line for line in published_lines() if not is_kernel(line)]
    (line,) = [line for line in plain if keys.items() <= line.items()]
    assert f"{plain_peak_bytes(line) / 2**30:.6f}" == line["peak_allocated_gib"]


def test_each_published_operator_is_reproduced_or_left_out_with_a_reason() -> None:
    """The rows of the table and those that are left out are all that were transcribed."""
    from benchmarks.accuracy.rows import read_rows
    from benchmarks.accuracy.rows_operators import KERNELS, LIGER, published_lines, why_left_out

    rows = [row for row in read_rows() if row.source in (LIGER, KERNELS)]
    assert len({row.key for row in rows}) == len(rows)
    reproduced = [line for line in published_lines() if not why_left_out(line)]
    assert len(rows) == len(reproduced)


def test_plans_of_kernels_are_those_of_the_published_rows() -> None:
    """Each published row of kernels has a plan by one release, and three in four are met within 0.01 %."""
    from benchmarks.accuracy.rows_operators import is_kernel, kernel_rows, published_lines

    rows = kernel_rows()
    assert len(rows) == sum(map(is_kernel, published_lines())) == 200
    assert sum(abs(row.error("planner") or 0) <= 1e-4 for row in rows) >= 150


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(2048, "0.002"), (2560, "0.002"), (8192 * MIB + 600, "8192.001")]
)
def test_peaks_have_the_digits_of_the_published_ones(size_bytes: int, text: str) -> None:
    """MiB are rounded to float32, whose step at 8 GiB is 1 KiB, and GiB to six digits."""
    from benchmarks.accuracy.rows_operators import mib_as_published

    assert mib_as_published(size_bytes) == text


def test_estimates_of_torch_preflight_are_of_rows_of_the_table() -> None:
    """Each line of preflight.csv names a row of accuracy.csv, and all eight runs of the T4 are estimated."""
    import csv

    from benchmarks.accuracy.rows import PREFLIGHT, PREFLIGHT_TABLE, read_rows
    from benchmarks.accuracy.rows_points import T4

    rows = {row.key: row for row in read_rows()}
    with PREFLIGHT_TABLE.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert all((line["source"], line["layer"], line["case"]) in rows for line in lines)
    estimated = [row for row in rows.values() if row.source == T4 and set(PREFLIGHT) <= set(row.estimates)]
    assert len(estimated) == 8


def test_each_row_of_the_collection_is_reproduced_or_left_out_with_a_cause() -> None:
    """Of 434 published rows each has its error or its cause, and no plan stands for two of them."""
    from benchmarks.accuracy.collection import PEFT_IMAGES, collection_lines, parts
    from benchmarks.accuracy.rows import read_rows
    from benchmarks.accuracy.rows_operators import KERNELS, LIGER
    from benchmarks.accuracy.torchtitan import TORCHTITAN
    from benchmarks.accuracy.torchtune import TORCHTUNE

    rows = read_rows()
    counted = list(parts(rows))
    assert sum(part.count for part in counted) == 434
    assert all(part.count == len(part.errors) + sum(part.left_out.values()) for part in counted)
    planned = sorted(float(row.truth) for row in rows if row.source in (TORCHTUNE, TORCHTITAN))
    published = [one for one in collection_lines() if not one["left_out"] and one["source"] != PEFT_IMAGES]
    assert planned == pytest.approx(sorted(float(one["value_gib"]) * 1024 for one in published))
    operators = {row.key for row in rows if row.source in (LIGER, KERNELS)}
    assert len(operators) == len(counted[0].errors)


def test_the_least_part_of_convolutions_is_that_of_the_networks_behind_the_doubt() -> None:
    """No row covers networks whose convolutions allocate a smaller share."""
    from benchmarks.emulated.volumes import VOLUMES, VolumesRow
    from benchmarks.rows import read_rows
    from planner.hardware.likeness import LEAST_PART

    assert min(row.part for row in read_rows(VOLUMES, VolumesRow)) == LEAST_PART
