"""The page of `planner explain --html`: its figures are the replay's, and it works in a real browser."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from planner.allocator.config import MIB, UNLIMITED, AllocatorConfig, MemoryLimits
from planner.allocator.replay import replay_trace
from planner.api.explain import batch_curve
from planner.cli import run
from planner.hardware.budget import judge_budget, make_budget
from planner.hardware.database import find_device, load_devices
from planner.hardware.device import generic_device, unlimited_device
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.planning.attribution import DisplayLimits, explain
from planner.planning.batch_curve import BatchCurve, CurvePoint, SampleDensity, curve_sizes, take_curve
from planner.planning.estimate import unlimited
from planner.planning.search.max_batch import estimate_batch
from planner.program.events import (
    Alloc,
    Category,
    Free,
    Outcome,
    Phase,
    PhaseStart,
    Site,
    TensorProvenance,
    Trace,
)
from planner.program.program import AffineAlloc, Program
from planner.report.commands.explain.summary import summary_of
from planner.report.page.page import page_data, page_html
from tests.helpers.browser import axe_violations, chromium
from tests.helpers.structs import replace
from tests.helpers.traces import OneProgram, program_of, programs, save_trace, traces

NOBODY = make_budget(unlimited_device(), 0.99, AllocatorConfig())
SITES = (Site("", "aten.empty"), Site("body.0.conv", "aten.convolution.default"), Site("head", "to"))
# Weights of 300 MiB, an input of 4 MiB a sample, 40 MiB of activations a sample, gradients of 300 MiB.
EVENTS = (
    *(PhaseStart(0, Phase.SETUP), Alloc(0, 300 * MIB, Category.PARAMETER, 2)),
    *(PhaseStart(1, Phase.INPUTS), AffineAlloc(1, 0, 4 * MIB, Category.INPUT, 0)),
    *(PhaseStart(1, Phase.FORWARD), AffineAlloc(2, 0, 24 * MIB, Category.ACTIVATION, 1)),
    *(AffineAlloc(3, 0, 16 * MIB, Category.ACTIVATION, 2), Alloc(4, 5 * MIB, Category.WORKSPACE, 1), Free(4)),
    *(PhaseStart(1, Phase.BACKWARD), Alloc(5, 300 * MIB, Category.GRADIENT, 2), Free(3), Free(2)),
    *(
        PhaseStart(2, Phase.INPUTS),
        Free(1),
        AffineAlloc(6, 0, 4 * MIB, Category.INPUT, 0),
        PhaseStart(2, Phase.END),
    ),
)
TOY = program_of(EVENTS, SITES)
JOB = Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=2)

Capture = pytest.CaptureFixture[str]


class _Scripts(HTMLParser):
    """Finds the embedded data, and every address that the page names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.data = ""
        self.addresses: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self._inside = tag == "script" and named.get("id") == "planner-data"
        self.addresses += [str(named[key]) for key in ("src", "href") if key in named]

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data
            self._inside = False


def embedded(page: str) -> dict[str, Any]:
    fields = json.loads(_Scripts(page).data)
    assert isinstance(fields, dict)
    return fields


def in_bytes(levels: list[float]) -> list[int]:
    """MiB of a figure; what is no whole number of bytes stays a fraction and equals nothing."""
    return [int(level * MIB) if float(level * MIB).is_integer() else -1 for level in levels]


# ---- the curve


def test_sizes_of_a_curve() -> None:
    """Sizes are even near the top, powers of two below; the largest batch and the requested one are there."""
    coarse = SampleDensity(per_doubling=4, doublings=2)
    assert curve_sizes(274, 50, coarse) == [
        *(1, 2, 4, 8, 16, 32, 50, 64, 96, 112, 128, 160, 192, 224, 256, 274, 320, 384),
    ]
    assert curve_sizes(3, 2, coarse) == [1, 2, 3, 4]
    assert curve_sizes(0, 9, coarse) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert curve_sizes(None, 5, coarse) == [1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert curve_sizes(2**24, 1, coarse)[-2:] == [14 * 2**20, 2**24]


def test_a_point_of_a_literal_trace() -> None:
    """On a GPU of 2,000 MiB batch 8 takes 600 MiB and 44 a sample; batch 64 does not fit."""
    card = make_budget(generic_device(2000), 0.5, AllocatorConfig())
    curve = take_curve([(card, 20)], OneProgram(TOY), 64)
    points = {point.batch: point for point in curve.curves[0].points}
    context = card.device.context.value
    assert points[8] == CurvePoint(
        8, Outcome.FITS, 952 * MIB, 972 * MIB, 972 * MIB + context, points[8].process_upper_bytes
    )
    assert points[64].outcome is Outcome.DOES_NOT_FIT
    assert points[64].peak_reserved_bytes == replay_trace(TOY.instantiate(64)).peak_reserved_bytes


_budgets = st.builds(
    lambda mib, config, cap: make_budget(generic_device(mib), 0.9, config, cap),
    st.integers(500, 2000),
    st.sampled_from([AllocatorConfig(), AllocatorConfig(expandable_segments=True)]),
    st.one_of(st.none(), st.integers(2 * MIB, 600 * MIB)),
)


@settings(max_examples=40)
@given(programs(), st.lists(_budgets, min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 9))
@pytest.mark.slow
def test_each_point_is_the_estimate(program: Program, budgets: list[Any], most: int, batch: int) -> None:
    """A point equals the estimate of that batch on that GPU, for any job, GPUs and limits."""
    judged = [judge_budget(one, JOB, program.instantiate(2)) for one in (*budgets, NOBODY)]
    curve = take_curve(
        [*((one, most) for one in judged[:-1]), (judged[-1], None)], OneProgram(program), batch + 1
    )
    for card in curve.curves:
        assert [point.batch for point in card.points] == sorted({point.batch for point in card.points})
        assert batch + 1 in {point.batch for point in card.points}
        for point in card.points:
            estimate = estimate_batch(JOB, program.instantiate(point.batch), card.budget)
            assert point == CurvePoint(
                estimate.run.batch,
                estimate.outcome,
                estimate.run.peak_allocated_bytes,
                estimate.run.peak_reserved_bytes,
                estimate.process_bytes,
                estimate.process_upper_bytes,
            )


def test_pages_may_pass_the_cap() -> None:
    """With expandable segments 20 MiB and a byte fit under a cap of 23 MiB: the pages of 20 MiB pass it."""
    events = (Alloc(0, 20 * MIB + 1, Category.ACTIVATION, 0), PhaseStart(1, Phase.FORWARD))
    program = program_of(events, (Site("", "aten.empty"),))
    card = make_budget(generic_device(1100), 0.9, AllocatorConfig(expandable_segments=True), 23 * MIB)
    curve = take_curve([(card, 1)], OneProgram(program), 1)
    assert curve.curves[0].points[0].outcome is Outcome.FITS
    assert curve.curves[0].points[0].peak_reserved_bytes == 40 * MIB


def test_the_requested_card_is_chosen(tmp_path: Path) -> None:
    """Every GPU has its own largest batch; the one of the options stands among them, known or not."""
    path = saved(tmp_path)
    cards = load_devices()[-3:]
    first = batch_curve(None, 8, devices=cards, trace=path, gpu_mib=24000)
    assert first is not None
    assert sorted(card.budget.device.name for card in first.curves) == sorted(
        ["generic GPU of 24000 MiB", *(card.name for card in cards)]
    )
    assert first.curves[first.chosen].budget.device.name == "generic GPU of 24000 MiB"
    none = batch_curve(None, 8, devices=cards, trace=path)
    assert none is not None
    assert [card.max_batch is None for card in none.curves] == [True, False, False, False]
    assert none.chosen == 0
    for card in none.curves[1:]:
        outcomes = {point.batch: point.outcome for point in card.points}
        assert outcomes[card.max_batch or 0] is not Outcome.DOES_NOT_FIT
        assert card.points[-1].outcome is Outcome.DOES_NOT_FIT


def test_a_trace_of_one_batch_has_no_curve(tmp_path: Path) -> None:
    """A trace at one batch size holds for no other; the page comes without a curve."""
    path = tmp_path / "one.trace"
    save_trace(Trace(EVENTS[:2], SITES, 8), path, about(8))
    assert batch_curve(None, 8, trace=path) is None


@pytest.mark.slow
def test_a_compiled_job_has_curves_of_its_gpus_kind() -> None:
    curve = batch_curve("cnn", 2, gpu="L4", compile="default")
    assert curve is not None
    assert {one.budget.device.target for one in curve.curves} == {find_device("L4").target}
    assert batch_curve("cnn", 2, compile="default") is None


# ---- the data


def page_of(
    trace: Trace | None = None,
    batch: int = 8,
    limits: MemoryLimits = UNLIMITED,
    curve: BatchCurve | None = None,
) -> str:
    trace = trace or TOY.instantiate(batch)
    explanation = explain(trace, limits)
    summary = summary_of(estimate_batch(JOB, trace, NOBODY), explanation)
    return page_html(summary, explanation, trace, DisplayLimits(), curve)


@settings(max_examples=25)
@given(traces())
def test_all_figures_are_those_of_the_replay(trace: Trace) -> None:
    """Maxima and sums of the embedded figures equal the peaks of the replay to the byte."""
    assume(trace.events)
    assume(all(site.module == "" or all(site.module.split(".")) for site in trace.sites))  # as torch has it
    run = replay_trace(trace)
    explanation = explain(trace, unlimited(NOBODY.limits))
    summary = summary_of(estimate_batch(JOB, trace, NOBODY), explanation)
    data = json.loads(json.dumps(page_data(summary, explanation, trace, None), allow_nan=False))
    lines = {one["name"]: one for one in data["figures"]["timeline"]["data"]}
    stacked = [one for one in lines.values() if "stackgroup" in one]
    levels = [sum(column) for column in zip(*(in_bytes(one["y"]) for one in stacked), strict=True)]
    assert max(levels, default=0) == run.peak_allocated_bytes == data["peak_allocated_bytes"]
    assert in_bytes(lines["peak allocated"]["y"]) == [run.peak_allocated_bytes]
    assert max(in_bytes(lines["reserved"]["y"])) == run.peak_reserved_bytes == data["peak_reserved_bytes"]

    (modules,) = data["figures"]["modules"]["data"]
    sizes = dict(zip(modules["ids"], in_bytes(modules["values"]), strict=True))
    assert len(sizes) == len(modules["ids"])
    inside: dict[str, int] = {}
    for one, parent in zip(modules["ids"], modules["parents"], strict=True):
        inside[parent] = inside.get(parent, 0) + sizes[one]
    assert inside.pop("") == sizes["/"] == run.peak_allocated_bytes
    assert inside == {name: sizes[name] for name in inside}
    assert set(modules["parents"]) - {""} <= set(sizes)

    bars = data["figures"]["breakdown"]["data"]
    assert sum(in_bytes([one["x"][0] for one in bars])) == data["process_bytes"]
    assert sum(data["categories"].values()) == data["process_bytes"]


def test_the_curve_in_the_page_is_the_curve() -> None:
    """Every column of every GPU stands in the data in whole bytes."""
    cards = [make_budget(card, 0.99, AllocatorConfig()) for card in load_devices()[:2]]
    curve = take_curve([(card, 20) for card in cards], OneProgram(TOY), 8, chosen=1)
    data = embedded(page_of(curve=curve))
    assert data["curve"]["chosen"] == 1
    for shown, card in zip(data["curve"]["cards"], curve.curves, strict=True):
        keys = ("batch", "outcome", "allocated", "reserved", "process", "process_upper")
        assert [CurvePoint(*row) for row in zip(*(shown[key] for key in keys), strict=True)] == [*card.points]
        device = card.budget.device
        assert (shown["name"], shown["usable"]) == (device.name, device.usable.value)
    drawn = {one["meta"]["key"]: one for one in data["figures"]["curve"]["data"]}
    assert in_bytes(drawn["process"]["y"]) == data["curve"]["cards"][1]["process"]


def test_names_cannot_leave_their_place() -> None:
    """A module, operator or line of code may hold any text; the page shows it and does not run it."""
    evil = "</script><script>alert(1)</script><b>"
    details = (TensorProvenance(2, (8, 3), "float32", f"{evil}.py:7", f"x = {evil}"),)
    sites = (SITES[0], Site(evil, evil), SITES[2])
    trace = replace(TOY.instantiate(8), sites=sites, provenance=details)
    page = page_of(trace)
    assert evil not in page
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)") + page.count(
        "script\\u003ealert(1)"
    ) + page.count("\\u0026lt;script\\u0026gt;alert(1)")
    assert f"/{evil}" in embedded(page)["figures"]["modules"]["data"][0]["ids"]


def test_the_page_names_no_other_file() -> None:
    """Nothing has to be loaded, and the page forbids it."""
    page = page_of()
    assert _Scripts(page).addresses == ["data:,"]
    assert "Content-Security-Policy\" content=\"default-src 'none';" in page


def test_the_tables_say_it_without_scripts() -> None:
    """Verdict, categories, tensors, levels and assumptions stand in the page itself."""
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", page_of(), flags=re.DOTALL)
    for text in (
        "<h1>toy, batch 8</h1>",
        "Batch 8 takes 1,230.0 MiB of GPU memory",
        'parameters</td><td class="number">300.0</td><td class="number">24.4%',
        "<td>convolution<br><code>body.0.conv</code></td>",
        '<td>step 1</td><td class="number">952.0</td>',
        "nothing else runs on the GPU",
    ):
        assert text in page


# ---- the command line


def about(batch: int) -> dict[str, Any]:
    return {"job": job_to_json(JOB), "batch": batch, "capability": [8, 6]}


def saved(folder: Path) -> Path:
    save_trace(TOY, folder / "toy.trace", about(8))
    return folder / "toy.trace"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--html x.pdf", 2, "--html x.pdf: give a file that ends in .html"),
    ],
)
def test_mistakes_are_one_line(
    options: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Files that cannot be pages are one line, with the exit code of their kind."""
    command = f"explain --trace {saved(tmp_path)} {options}"
    monkeypatch.chdir(tmp_path)
    assert run(command.split()) == code
    assert capsys.readouterr() == ("", f"planner: {message}\n")


# ---- a browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that the command writes for the toy on an RTX 4090."""
    folder = tmp_path_factory.mktemp("page")
    command = f"explain --trace {saved(folder)} --gpu rtx4090 --html {folder / 'page.html'}"
    assert run(command.split()) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def opened(written: Path) -> Iterator[tuple[Any, list[str]]]:
    """Yield the page, drawn in Chromium, and all complaints and requests of the browser."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        messages: list[str] = []
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(f"error: {error}"))
        page.on("request", lambda request: messages.append(request.url.partition(":")[0]))
        page.goto(written.as_uri())
        page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
        yield page, messages


def traced(page: Any, key: str) -> dict[str, Any]:
    """x and y of a line of the curve, as they are drawn now."""
    drawn = page.evaluate(
        "key => { const one = document.getElementById('curve').data.find(t => t.meta.key === key);"
        " return {x: Array.from(one.x), y: Array.from(one.y)}; }",
        key,
    )
    assert isinstance(drawn, dict)
    return drawn


def shown(page: Any) -> tuple[str, ...]:
    ids = ("batch-text", "fits", "allocated", "reserved", "process", "process_upper", "headroom")
    return tuple(page.inner_text(f"#{one}") for one in ids)


def expected(data: dict[str, Any], card: dict[str, Any], i: int) -> tuple[str, ...]:
    sizes = [card[key][i] for key in ("allocated", "reserved", "process", "process_upper")]
    sizes.append(card["usable"] - card["process"][i])
    return (
        f"{card['batch'][i]:,}",
        data["verdicts"][card["outcome"][i]],
        *(f"{size / MIB:,.1f} MiB" for size in sizes),
    )


@pytest.mark.slow
def test_it_draws_all_plots_alone(opened: tuple[Any, list[str]], tmp_path: Path) -> None:
    """Four plots of some size, no word in the console, no request but for the file, no button for any."""
    page, messages = opened
    assert messages == ["file"]
    for name in ("breakdown", "timeline", "modules", "curve"):
        box = page.locator(f"#{name} .main-svg").first.bounding_box()
        assert box["width"] > 600
        assert box["height"] > 80
    assert page.locator("#timeline .scatterlayer .trace").count() == 7
    assert page.locator("#modules g.slice").count() > 5
    assert page.locator(".modebar-btn").count() > 4
    assert page.locator(".modebar-btn[data-title^=Share]").count() == 0
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 50_000


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 600, 720, 1000, 1280, 1600])
def test_it_is_no_wider_than_the_screen(opened: tuple[Any, list[str]], written: Path, width: int) -> None:
    """Nothing scrolls sideways but a wide table in its frame, in which code has room to be read."""
    page = opened[0].context.browser.new_page(viewport={"width": width, "height": 900})
    page.goto(written.as_uri())
    page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    narrow = (
        "[...document.querySelectorAll('td code')].filter(e => e.getBoundingClientRect().width < 120).length"
    )
    assert page.evaluate(narrow) == 0
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "light"), (1280, "dark")])
def test_axe_core_finds_nothing(
    opened: tuple[Any, list[str]], written: Path, width: int, scheme: str
) -> None:
    """It is readable by keyboard and by screen reader, as far as axe-core tells."""
    viewport = {"width": width, "height": 900}
    context = opened[0].context.browser.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(written.as_uri())
    page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
    assert axe_violations(page) == []
    context.close()


@pytest.mark.slow
def test_the_slider_moves_the_marker_and_the_figures(opened: tuple[Any, list[str]], written: Path) -> None:
    """The requested batch comes first; a step of the slider is the next batch size, up to one that fails."""
    page, messages = opened
    data = embedded(written.read_text(encoding="utf-8"))
    card = data["curve"]["cards"][data["curve"]["chosen"]]
    page.select_option("#gpu", str(data["curve"]["chosen"]))
    at = card["batch"].index(8)
    for key, i in (("", at), ("ArrowRight", at + 1), ("End", len(card["batch"]) - 1), ("Home", 0)):
        if key:
            page.press("#batch", key)
        assert shown(page) == expected(data, card, i)
        marker = traced(page, "marker")
        assert marker["x"] == [card["batch"][i]] * 3
        assert in_bytes(marker["y"]) == [card[name][i] for name in ("process", "reserved", "allocated")]
    assert card["outcome"][-1] == "no"
    page.click("#largest")
    assert shown(page) == expected(data, card, card["batch"].index(card["max_batch"]))
    assert messages == ["file"]


def test_the_gpu_moves_the_line(opened: tuple[Any, list[str]], written: Path) -> None:
    """Another GPU has its own line, curve and figures at the nearest of its batch sizes."""
    page, messages = opened
    data = embedded(written.read_text(encoding="utf-8"))
    cards = data["curve"]["cards"]
    before = traced(page, "card")["y"]
    other = next(i for i, card in enumerate(cards) if card["name"] == "T4 16GB")
    page.select_option("#gpu", str(other))
    assert in_bytes(traced(page, "card")["y"]) == [cards[other]["usable"]] * 2
    assert traced(page, "card")["y"] != before
    assert in_bytes(traced(page, "process")["y"]) == cards[other]["process"]
    assert traced(page, "process")["x"] == cards[other]["batch"]
    assert shown(page) == expected(data, cards[other], int(page.input_value("#batch")))
    assert cards[other]["name"] in page.inner_text("#card-text")
    assert messages == ["file"]


def test_it_follows_the_dark(opened: tuple[Any, list[str]]) -> None:
    """Paper and the text of the plots change places in a dark system."""
    page, _ = opened
    ink = "() => document.getElementById('timeline').layout.font.color"
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ink), page.evaluate(paper)
    assert light == ("#1b2027", "rgb(255, 255, 255)")
    for scheme, colours in (("dark", ("#e8eaee", "rgb(20, 23, 28)")), ("light", light)):
        page.emulate_media(color_scheme=scheme)
        for _ in range(100):  # the plots follow a little later
            if page.evaluate(ink) != colours[0]:
                page.wait_for_timeout(50)
        assert (page.evaluate(ink), page.evaluate(paper)) == colours
