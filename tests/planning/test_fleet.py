"""One job on many GPUs: the same answers as GPU by GPU, and their table."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from planner import gpus, max_batch
from planner.allocator.config import AllocatorConfig, MemoryLimits, max_reserved_bytes
from planner.allocator.replay import replay_trace
from planner.api.fleet.gpus import GpusResult
from planner.cli import run
from planner.errors import UnsupportedGpuError, UsageError
from planner.hardware.budget import Budget, make_budget
from planner.hardware.database import find_device, load_devices
from planner.hardware.device import MIB, Device, FigureKind, ProductInfo, ProductLine, SourcedBytes
from planner.jobs import Job
from planner.planning.search.boundary import boundary_from_guess, largest
from planner.planning.search.fleet import DeviceFit, FleetTable, fit_devices
from planner.planning.search.max_batch import Seconds
from planner.program.bounds import live_bytes_bound
from planner.program.events import Alloc, Category, Free, Outcome, Trace
from planner.program.program import AffineAlloc, Program
from planner.program.target import Target
from tests.helpers.golden import expected
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace
from tests.helpers.traces import OneProgram, program_of, programs

SEVEN = tuple(find_device(name) for name in ("p40", "v100-16", "t4", "a100-80", "4090", "h100", "5090"))


class Small(nn.Module):
    """Reductions whose scratch memory follows no straight line, a normalisation and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 96, 3), nn.GroupNorm(8, 96), nn.ReLU(), nn.Conv2d(96, 64, 3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Forking(nn.Module):
    """Another layer from batch 3 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4096, 4096), nn.Linear(4096, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if len(x) < 3 else self.second(self.first(x))


JOB = {"input": "3x64x64", "target": "scalar:int64", "loss": "cross_entropy", "optimizer": "adam"}


@pytest.mark.slow
def test_each_card_as_if_it_were_alone() -> None:
    """On every GPU the largest batches and the process are those of `max_batch`, though this job's batches
    fit here and there above some that do not.
    """
    result = gpus(Small, devices=SEVEN, **JOB)
    assert len(result.fits) == len(SEVEN)
    for fit in result.fits:
        alone = max_batch(Small, gpu=fit.budget.device, **JOB)
        at_max = alone.plan.at_max
        assert at_max is not None
        assert fit.comfortable_batch == alone.comfortable_batch, fit.budget.device.name
        assert (fit.max_batch, fit.process_bytes, fit.process_upper_bytes) == (
            alone.max_batch,
            at_max.process_bytes,
            at_max.process_upper_bytes,
        ), fit.budget.device.name


@pytest.mark.slow
def test_margins_are_those_of_each_card() -> None:
    """Stored answers of cuDNN are exact for some GPUs, and borrowed from others for the rest."""
    cards = [find_device(name) for name in ("T4", "Quadro RTX 6000", "V100 16GB", "B200")]
    result = gpus("torchvision:resnet18", devices=cards, cudnn="stored")
    margins = {fit.budget.likeness for fit in result.fits}
    assert len(result.fits) == 4 and len(margins) > 1
    for fit in result.fits:
        alone = max_batch("torchvision:resnet18", gpu=fit.budget.device, cudnn="stored").plan
        assert alone.at_max is not None and alone.at_max.budget.likeness == fit.budget.likeness
        assert (fit.max_batch, fit.comfortable_batch) == (alone.search.largest, alone.search.comfortable)


@pytest.mark.slow
def test_an_answer_has_the_margins_of_its_own_batch() -> None:
    """The share of convolutions whose workspaces are not known is another at batch 2 than at the answer."""
    plan = max_batch("hf:whisper", gpu="L4", optimizer="adamw", cudnn="stored").plan
    assert plan.at_max is not None and plan.first_failure is not None
    assert plan.budget == plan.at_max.budget
    assert plan.at_max.outcome is not Outcome.DOES_NOT_FIT
    assert plan.first_failure.outcome is Outcome.DOES_NOT_FIT


@pytest.mark.slow
def test_a_model_that_changes_with_the_batch() -> None:
    """Traces without a program for all batch sizes are recorded one by one, with the same answers."""
    options = {"input": "4096", "loss": "sum", "allocator_cap_mib": 700}
    cards = SEVEN[2:4]
    alone = {card.name: max_batch(Forking, gpu=card, **options).max_batch for card in cards}
    together = gpus(Forking, devices=cards, **options)
    assert {fit.budget.device.name: fit.max_batch for fit in together.fits} == alone
    assert min(alone.values()) > 3


JOB_WITHOUT_EPOCHS = Job.create("made up")


def budget_with(room_mib: int, capability: tuple[int, int] = AMPERE) -> object:
    """Return the budget of a GPU that leaves so much to the allocator, or a little less."""
    exact = SourcedBytes(room_mib * MIB, "made up", kind=FigureKind.MEASURED)
    nothing = SourcedBytes(0, "made up", kind=FigureKind.MEASURED)
    card = Device(f"card of {room_mib}", exact, exact, nothing, capability)
    return make_budget(card, 0.99, AllocatorConfig())


@pytest.mark.slow
@given(programs(), st.lists(st.integers(2, 300), min_size=1, max_size=8, unique=True))
def test_any_trace_on_any_cards(program: Program, rooms: list[int]) -> None:
    """Both answers fit, the one without retries, and their successors do not, with as much room as there may
    be; the larger one is that of `largest` where islands are absent.
    """
    budgets = [budget_with(room) for room in rooms]
    for fit in fit_devices(JOB_WITHOUT_EPOCHS, budgets, OneProgram(program)):  # type: ignore[arg-type]
        limits = fit.budget.limits

        def outcome(batch: int, limits=limits) -> Outcome:  # type: ignore[no-untyped-def]
            return replay_trace(program.instantiate(batch), limits).outcome

        def fits_everywhere(batch: int, all_limits=fit.budget.all_limits) -> bool:  # type: ignore[no-untyped-def]
            return all(outcome(batch, room) is not Outcome.DOES_NOT_FIT for room in all_limits)

        if fit.max_batch:
            assert outcome(fit.max_batch) is not Outcome.DOES_NOT_FIT
            assert fit.outcome is outcome(fit.batch)
        if fit.max_batch < 2**24:
            assert not fits_everywhere(fit.max_batch + 1)
        if fit.comfortable_batch:
            assert outcome(fit.comfortable_batch) is Outcome.FITS
        if fit.comfortable_batch < fit.max_batch:
            assert outcome(fit.comfortable_batch + 1) is not Outcome.FITS
        alone = largest(outcome).largest
        failing = [batch for batch in range(1, min(alone + 1, 400)) if not fits_everywhere(batch)]
        if not failing and outcome(alone + 1) is Outcome.DOES_NOT_FIT:
            assert fit.max_batch >= alone or alone > 400


class Bumpy(OneProgram):
    """A block of 2 MiB for each sample, and one of 999 MiB beside it at batches 101 and 102."""

    def __init__(self) -> None:
        super().__init__(program_of((AffineAlloc(0, 0, 2 * MIB, Category.ACTIVATION, 0),)))

    def trace(self, batch: int, target: Target) -> Trace:
        more = (Alloc(1, 999 * MIB, Category.WORKSPACE, 0),) if batch in (101, 102) else ()
        plain = self.program.instantiate(batch)
        return replace(plain, events=(*plain.events, *more))


class Wavy(OneProgram):
    """A block of 2 MiB for each sample, and beside it a workspace that rises and falls with the batch."""

    def __init__(self, period: int, high_mib: int) -> None:
        super().__init__(program_of((AffineAlloc(0, 0, 2 * MIB, Category.ACTIVATION, 0),)))
        self.period, self.high_mib = period, high_mib

    def trace(self, batch: int, target: Target) -> Trace:
        size = (batch * self.high_mib // self.period) % (self.high_mib + 1) * MIB
        more = (Alloc(1, size, Category.WORKSPACE, 0, may_fail=True), Free(1)) if size else ()
        plain = self.program.instantiate(batch)
        return replace(plain, events=(*plain.events, *more))


@given(
    st.builds(Wavy, st.integers(2, 40), st.integers(1, 200)),
    st.lists(st.integers(20, 900), min_size=2, max_size=12, unique=True),
)
def test_no_card_changes_the_answer_of_another(traces: Wavy, rooms: list[int]) -> None:
    """Beside others a GPU has the answer that it has by itself."""
    budgets: list[Any] = [budget_with(room) for room in rooms]
    together = fit_devices(JOB_WITHOUT_EPOCHS, budgets, traces)
    alone = [fit_devices(JOB_WITHOUT_EPOCHS, [budget], traces) for budget in budgets]
    assert sorted(together, key=str) == sorted((fit for (fit,) in alone), key=str)


@pytest.mark.parametrize("room_mib", range(190, 330))
def test_what_fits_close_above_is_found(room_mib: int) -> None:
    """Above a batch that does not fit the next ones are looked at, as `largest` does."""
    budget = budget_with(room_mib)
    (fit,) = fit_devices(JOB_WITHOUT_EPOCHS, [budget], Bumpy())  # type: ignore[arg-type]
    most = (max_reserved_bytes(budget.limits) or 0) // (2 * MIB)  # type: ignore[attr-defined]
    assert fit.max_batch == (100 if most in (101, 102) else most)


@given(programs(), st.integers(1, 200))
def test_the_bound_is_one(program: Program, batch: int) -> None:
    """No replay takes less than the bound."""
    trace = program.instantiate(batch)
    assert live_bytes_bound(program.events)(batch) <= replay_trace(trace).peak_allocated_bytes


@given(st.integers(0, 300), st.integers(0, 400), st.integers(0, 300))
def test_a_boundary_from_any_guess(boundary: int, guess: int, more: int) -> None:
    """If outcomes only worsen, the boundary is found from any guess, in three probes from a near one."""
    limit = boundary + more
    probed: set[int] = set()

    def fits(batch: int) -> bool:
        assert 1 <= batch <= limit
        probed.add(batch)
        return batch <= boundary

    assert boundary_from_guess(fits, guess, limit) == boundary
    if abs(guess - boundary) <= 1:
        assert len(probed) <= 3


def test_probes_are_few() -> None:
    """GPUs of one kind cost a few traces each, and GPUs of one memory those of one."""
    from planner.program.events import Alloc, Category, Phase, PhaseStart, Site

    events = (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 300 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, 0, 3 * MIB + 12345, Category.ACTIVATION, 0),
        PhaseStart(1, Phase.END),
    )
    traces = OneProgram(program_of(events, (Site("", "to"),)))
    rooms = [*range(4000, 24000, 1000), *[24000] * 10]
    fits = fit_devices(JOB_WITHOUT_EPOCHS, [budget_with(room) for room in rooms], traces)  # type: ignore[arg-type]
    assert len(fits) == len(rooms)
    assert traces.trace_count <= 3 * len(set(rooms))


def test_a_batch_on_every_card() -> None:
    """With a batch, only the GPUs that run it are listed, with the memory of that batch."""
    every = gpus("cnn", devices=SEVEN, sort="memory")
    batch = every.fits[3].max_batch
    some = gpus("cnn", batch, devices=SEVEN, sort="memory")
    assert [fit.budget.device.name for fit in some.fits] == [
        fit.budget.device.name for fit in every.fits if fit.max_batch >= batch
    ]
    assert some.table.left_out == len(SEVEN) - len(some.fits) > 0
    assert len({fit.batch for fit in some.fits}) == 1
    assert all(fit.headroom_bytes > 0 for fit in some.fits)


def test_orders() -> None:
    """Each order is by its key; the default is by the largest batch."""
    fits = {key: gpus("cnn", devices=SEVEN, sort=key).fits for key in (None, "memory", "name", "headroom")}
    batches = [fit.max_batch for fit in fits[None]]
    assert batches == sorted(batches, reverse=True)
    totals = [fit.budget.device.total.value for fit in fits["memory"]]
    assert totals == sorted(totals)
    names = [fit.budget.device.name.lower() for fit in fits["name"]]
    assert names == sorted(names)
    room = [fit.headroom_bytes for fit in fits["headroom"]]
    assert room == sorted(room, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort": "beauty"}, "--sort beauty: give one of max_batch, memory, name, process, headroom"),
        ({"gpu": "4090"}, "--gpu: all GPUs are planned for; choose with --filter"),
        ({"filter": "voodoo"}, "--filter: no GPU matches 'voodoo'"),
        ({"filter": "consummer ada"}, "--filter: no GPU matches 'consummer'; the nearest: consumer"),
        ({"filter": "h100 l4"}, "no GPU of the database is left: loosen --filter, --min-mib or --max-mib"),
        ({"min_mib": 10, "max_mib": 5}, "no GPU of the database is left: loosen --filter, --min-mib or"),
        ({"max_mib": 0}, "no GPU of the database is left: loosen --filter, --min-mib or"),
        ({"batch": 0}, "--batch"),
        ({"compile": "default"}, "--compile: several batch sizes are compiled for each kind of GPU, for 8"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    """Wrong usage is refused in one line before anything is traced."""
    with pytest.raises(UsageError) as caught:
        gpus("cnn", **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_filters() -> None:
    """Words and bounds choose among the GPUs of the database."""
    result = gpus("cnn", filter=["consumer", "8.9"], min_mib=16_000, max_mib=20_000)
    names = {fit.budget.device.name for fit in result.fits}
    assert names == {
        "RTX 4060 Ti 16GB",
        "RTX 4070 Ti SUPER 16GB",
        "RTX 4080 16GB",
        "RTX 4080 SUPER 16GB",
    }


# ---- the reports


def made_up() -> GpusResult:
    """Three GPUs with round figures: one that runs nothing, a slice, and a rented one."""

    def card(name: str, total_mib: int, kind: FigureKind, about: ProductInfo) -> Device:
        total = SourcedBytes(total_mib * MIB, "nvidia-smi", kind=FigureKind.PUBLISHED)
        usable = SourcedBytes((total_mib - 400) * MIB, "a log", kind=kind)
        return Device(name, total, usable, SourcedBytes(400 * MIB, "somewhere"), AMPERE, (), "a table", about)

    cards = (
        card("Tiny 1GB", 1000, FigureKind.PUBLISHED, ProductInfo(ProductLine.CONSUMER)),
        card("Big 40GB MIG 2g.10gb", 10_000, FigureKind.DERIVED, ProductInfo(ProductLine.SLICE)),
        card(
            "Big 40GB",
            40_000,
            FigureKind.PUBLISHED,
            ProductInfo(ProductLine.DATACENTER, instances=("AWS x1", "GCP y")),
        ),
    )
    events, job = taken(), Job.create("made-up", source="zoo:Identity")
    fits = fit_devices(job, [with_margin(one) for one in cards], OneProgram(events))  # type: ignore[arg-type]
    table = FleetTable(
        job=job,
        batch=None,
        confidence=0.99,
        fits=tuple(sorted(fits, key=lambda fit: -fit.max_batch)),
        left_out=0,
        notes=("traced by hand",),
        unknown_ops=("aten.made_up",),
        import_seconds=1.0,
        seconds=Seconds(trace=0.5, replay=0.25),
        programs=OneProgram(events),  # type: ignore[arg-type]
    )
    return GpusResult(table)


def with_margin(card: Device) -> Budget:
    """A budget with a margin of its own: the reports read the same for any published runs."""
    limits = MemoryLimits(int((card.usable.value - card.context.value) / 1.0233))
    return replace(make_budget(card, 0.99, AllocatorConfig()), limits=limits, larger_limits=())


def taken() -> Program:
    from planner.program.events import Alloc, Category, Phase, PhaseStart, Site

    return program_of(
        (
            PhaseStart(0, Phase.SETUP),
            Alloc(0, 600 * MIB, Category.PARAMETER, 0),
            PhaseStart(1, Phase.FORWARD),
            AffineAlloc(1, 0, 50 * MIB, Category.ACTIVATION, 0),
            PhaseStart(1, Phase.END),
        ),
        (Site("", "to"),),
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("table.txt", lambda: str(made_up())),
        ("table.csv", lambda: made_up().to_csv()),
        ("table.json", lambda: json.dumps(made_up().to_dict(), indent=1)),
    ],
)
def test_golden(name: str, text: Callable[[], str]) -> None:
    """The table as people, spreadsheets and programs read it."""
    output = text() + "\n"
    assert output == expected(f"gpus/{name}", output)


def test_json_keeps_its_contract() -> None:
    """The keys that other programs rely on, with their types."""
    fields = made_up().to_dict()
    assert {"schema", "model", "job", "rows"} <= set(fields)
    for row in fields["rows"]:
        assert {"gpu", "total_mib", "max_batch", "process_mib", "calibrated", "source"} <= set(row)
        assert type(row["calibrated"]) is bool


def test_csv_is_the_json() -> None:
    """Each cell has the value of the JSON."""
    rows = list(csv.DictReader(io.StringIO(made_up().to_csv())))
    for row, fields in zip(rows, made_up().to_dict()["rows"], strict=True):
        assert row["gpu"] == fields["gpu"]
        assert int(row["max_batch"]) == fields["max_batch"]
        assert row["process_mib"] == ("" if fields["process_mib"] is None else str(fields["process_mib"]))


def test_csv_without_a_row_has_the_same_columns() -> None:
    """A batch that no GPU runs leaves an empty table, which programs read as any other."""
    table = made_up().table
    empty = GpusResult(replace(table, fits=())).to_csv()
    assert empty == made_up().to_csv().splitlines()[0]


def test_the_table_fits_a_terminal() -> None:
    """No line is wider than 100 columns, on the whole database."""
    result = made_up()
    cards = [replace(result.fits[0].budget, device=device) for device in load_devices()]
    wide = GpusResult(replace(result.table, fits=fit_devices(result.table.job, cards, result.table.programs)))
    assert max(map(len, str(wide).splitlines())) <= 100


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 and one JSON object; CSV on request; both at once are refused."""
    assert run(["gpus", "--model", "cnn", "--filter", "l40s", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert [row["gpu"] for row in fields["rows"]] == ["L40S 48GB"]
    assert run(["gpus", "--model", "cnn", "--filter", "l40s", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("L40S 48GB,46068.0,")
    assert run(["gpus", "--model", "cnn", "--json", "--csv"]) == 2
    assert run(["gpus", "--model", "cnn", "--filter", "l40s", "--batch", "9999999"]) == 1


def test_devices_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`planner devices` lists, searches, shows sources, and exits with 1 without a match."""
    assert run(["devices"]) == 0
    listing = capsys.readouterr().out
    assert max(map(len, listing.splitlines())) <= 100
    assert all(device.name in listing for device in load_devices())
    assert run(["devices", "4090"]) == 0
    assert "ultralytics" in capsys.readouterr().out
    assert run(["devices", "h200", "--json"]) == 0
    names = [card["name"] for card in json.loads(capsys.readouterr().out)["devices"]]
    assert names == ["H200 141GB MIG 1g.18gb", "H200 141GB MIG 3g.71gb", "H200 141GB"]
    assert run(["devices", "voodoo"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_exit_code_5(capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpu auto` without a GPU is one line and exit code 5."""
    assert run(["max-batch", "--model", "cnn", "--gpu", "auto"]) == 5
    error = capsys.readouterr().err
    assert error.startswith("planner: --gpu auto: no NVIDIA GPU here (")
    assert error.count("\n") == 1


def test_picture(tmp_path: Path) -> None:
    """The picture is drawn; nothing to draw and a place that cannot be written to are errors."""
    from planner.errors import DataFileError

    pytest.importorskip("matplotlib")
    result = made_up()
    result.draw(str(tmp_path / "gpus.svg"))
    drawn = (tmp_path / "gpus.svg").read_text(encoding="utf-8")
    assert drawn.count("<!-- Big 40GB") == 2
    assert "Tiny" not in drawn
    with pytest.raises(DataFileError):
        result.draw(tmp_path / "nowhere" / "gpus.png")
    none = [fit for fit in result.fits if not fit.max_batch]
    with pytest.raises(UsageError, match="no GPU runs the job"):
        GpusResult(replace(result.table, fits=tuple(none))).draw(tmp_path / "none.png")


@pytest.mark.parametrize("outcome", [Outcome.FITS, Outcome.FITS_WITH_RETRIES])
def test_a_picture_says_what_a_dot_beside_the_curve_is(tmp_path: Path, outcome: Outcome) -> None:
    """The legend names each kind of dot; with retries a process reserves less than the curve has there."""
    pytest.importorskip("matplotlib")
    table = made_up().table
    fits = tuple(replace(fit, outcome=outcome) for fit in table.fits if fit.max_batch)
    GpusResult(replace(table, fits=fits)).draw(tmp_path / "gpus.svg")
    drawn = (tmp_path / "gpus.svg").read_text(encoding="utf-8")
    texts = ["on a GPU at the right, with its own CUDA context", "on a GPU at the right, with retries:"]
    shown = [f"<!-- {text} -->" in drawn or f"<!-- {text}\n" in drawn for text in texts]
    assert shown == [outcome is Outcome.FITS, outcome is Outcome.FITS_WITH_RETRIES]
    assert "<!-- on a GPU with memory to spare -->" in drawn


def test_dots_stand_at_the_batch_that_they_are_of() -> None:
    """With `--batch` the figures are of that batch, and not of the largest."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from planner.report.plots.gpus import draw_on

    table = made_up().table
    fits = [replace(fit, batch=3, process_bytes=2**30) for fit in table.fits if fit.max_batch > 3]
    axes = Figure().add_subplot()
    draw_on(axes, table, fits)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == len(fits) > 0
    assert {(float(x), float(y)) for dot in dots for x, y in dot.get_xydata()} == {(3.0, 1.0)}


def test_a_picture_names_cards_that_people_know() -> None:
    """The names of the whole database stand apart, hold the ends, and are those of common whole GPUs."""
    from planner.report.plots.gpus import named_gpus

    fits = [
        DeviceFit(make_budget(card, 0.99, AllocatorConfig()), 1, 1, Outcome.FITS, 1, 1, 1)
        for card in load_devices()
    ]
    named = [fit.budget.device for fit in named_gpus(fits)]
    assert [card.name for card in named] == [
        "GTX 1660 Ti 6GB", "RTX 5080 16GB", "RTX 4090 24GB", "RTX 5090 32GB", "L40 48GB", "H100 80GB",
        "GH200 96GB", "H200 141GB", "B200 180GB", "B300 288GB",
    ]  # fmt: skip
    assert named_gpus(fits[:3]) == fits[:3]


class Fp8(nn.Module):
    """A layer whose product is of FP8."""

    def forward(self, x: Tensor) -> Tensor:
        a, one = x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
        return torch._scaled_mm(a, a.new_empty(16, 16).t(), one, one, out_dtype=torch.bfloat16)


def test_cards_without_an_operator_are_left_out_and_named() -> None:
    """FP8 needs compute capability 8.9: an A100 has no row, and the note says why."""
    table = gpus(Fp8, input="16", mode="infer", filter="40gb").table
    assert {fit.budget.device.name for fit in table.fits}.isdisjoint({"A100 40GB"})
    assert any("GPUs are left out: torch._scaled_mm: products of FP8 need" in note for note in table.notes)
    with pytest.raises(UnsupportedGpuError, match="products of FP8 need compute capability 8.9"):
        gpus(Fp8, input="16", mode="infer", filter="a100")
