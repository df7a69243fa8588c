"""The accuracy report: what it says follows from its table, as do the residuals that the planner uses."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import DataFileError
from planner.events import Alloc, Free, Mark, Phase, Role, Site, Trace
from planner.job import Job, TensorSpec
from planner.residuals import RESIDUALS_FILE, Kind, kind_of, load_residuals, quantile

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_residuals_are_those_of_the_table() -> None:
    """planner/residuals.json is what benchmarks/accuracy.csv gives, to the digit."""
    from accuracy_probability import FAMILIES, fit_spread, outcomes_of, peak_ratios
    from accuracy_rows import read_rows

    rows = read_rows()
    for kind, (family, source) in FAMILIES.items():
        stored = load_residuals(kind)
        assert stored.verdicts == fit_spread(outcomes_of(rows, family))
        assert stored.peak_ratios == tuple(round(ratio, 4) for ratio in peak_ratios(rows, source))


def test_the_page_is_that_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/accuracy.md is what the script writes from benchmarks/accuracy.csv."""
    import accuracy_plots
    import accuracy_probability
    import accuracy_report
    from accuracy_rows import read_rows

    page = tmp_path / "accuracy.md"
    monkeypatch.setattr(accuracy_report, "PAGE", page)
    monkeypatch.setattr(accuracy_probability, "RESIDUALS_FILE", tmp_path / "residuals.json")
    monkeypatch.setattr(accuracy_plots, "draw_all", lambda rows, folder: None)
    accuracy_report.write_report(read_rows())
    assert page.read_text() == (BENCHMARKS.parent / "docs" / "accuracy.md").read_text()


def test_rows_survive_their_file(tmp_path: Path) -> None:
    """A table that is written and read is the same table."""
    from accuracy_rows import Row, read_rows, write_rows

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
    """A run dies at an estimate if it died under a cap as large, lives if it lived under one as small; of
    what lies between no cap tells.
    """
    from accuracy_published import CAPS, TRANSFORMERS
    from accuracy_rows import Row
    from accuracy_stats import deaths_at_estimate

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
    assert deaths_at_estimate(rows) == {"lives": 1, "dies": 1, "either": 1, "not told": 1}


def test_a_term_left_out() -> None:
    """Without the scratch memory of a family its blocks are gone, births and deaths, and nothing else is."""
    from accuracy_terms import without

    sites = (Site("", "aten.sum.dim_IntList"), Site("fc", "aten.mm.default"))
    events = (
        Mark(0, Phase.SETUP),
        Alloc(0, MIB, 0, Role.PARAMETER, 1),
        Alloc(1, MIB, 0, Role.WORKSPACE, 0),
        Free(1),
        Alloc(2, MIB, 0, Role.WORKSPACE, 1),
    )
    trace = Trace(events, sites, (1,))
    assert without(trace, "no_reductions").events == (*events[:2], events[4])
    assert without(trace, "no_cublas").events == events[:4]
    assert without(trace, "no_scratch").events == events[:2]
    assert without(trace, "no_attention_scratch") is trace


def test_needed_memory() -> None:
    """A block that can be released before a larger one is asked for is not needed beside it."""
    from accuracy_terms import variants, verdicts

    events = (Mark(1, Phase.FORWARD), Alloc(0, 100 * MIB, 0, Role.TEMPORARY, 0), Free(0))
    trace = Trace((*events, Alloc(1, 200 * MIB, 0, Role.TEMPORARY, 0)), (Site("", "x"),), (1,))
    found = variants(trace, 1)
    assert found["planner"].reserved_mib == 300
    assert found["planner"].needed_mib(1) == pytest.approx(200, abs=1)
    said = verdicts(found, 1, 250)
    assert (said["planner"], said["no_retries"], said["allocated"]) == ("lives", "dies", "lives")


def test_a_quantile_is_what_a_further_value_stays_within() -> None:
    """The i-th of n values is the i / (n + 1) quantile; nothing is said beyond the first and the last."""
    shares = (0.0, 0.25, 0.3, 0.5, 0.75, 0.99)
    assert [quantile((1.0, 2.0, 4.0), share) for share in shares] == [
        1.0,
        1.0,
        pytest.approx(1.2),
        2.0,
        4.0,
        4.0,
    ]


def test_kinds_of_jobs() -> None:
    """Whole numbers as inputs are tokens."""
    image, tokens = TensorSpec((3, 8, 8)), TensorSpec((128,), "int64", "input_ids")
    kinds = [kind_of(Job("m", inputs=inputs)) for inputs in ((image,), (tokens,), (image, tokens), ())]
    assert kinds == [Kind.FIXED, Kind.TEXTS, Kind.TEXTS, Kind.FIXED]


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.pop("kinds"),
        lambda said: said["kinds"]["fixed"]["verdicts"].update(scale=0),
        lambda said: said["kinds"]["fixed"].update(peak_ratios=[2.0, 1.0]),
        lambda said: said["kinds"]["fixed"].update(peak_ratios=[]),
    ],
)
def test_broken_residuals(tmp_path: Path, change: object) -> None:
    """A file of residuals that says no distribution is refused in one line."""
    said = json.loads(RESIDUALS_FILE.read_text())
    change(said)  # type: ignore[operator]
    path = tmp_path / "residuals.json"
    path.write_text(json.dumps(said))
    with pytest.raises(DataFileError) as caught:
        load_residuals(Kind.FIXED, path)
    assert str(caught.value) == f"{path}: broken residuals; run benchmarks/accuracy.py --from-csv"
