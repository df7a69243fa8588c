"""Campaigns: runs, their order, their files, and the rest for the next time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from calibration.calibrate import calibrate, calibrate_campaign, keep_observations
from calibration.campaign import (
    CampaignResult,
    Limit,
    MeasurementSetup,
    describe,
    find_limit,
    guess_limit,
    run_campaign,
)
from calibration.campaign_file import BatchSeries, load_campaign
from calibration.observations import load_observation, observation_path, save_observation
from calibration.probe.client import ProbeRequest
from calibration.verify import Verification, verify, verify_limit
from planner._support.atomic_write import write_bytes
from planner.allocator.config import MIB, AllocatorConfig
from planner.errors import DataFileError, ModelError, NoGpuError, UsageError
from planner.hardware.budget import make_budget
from planner.hardware.calibration.files import load_folders
from planner.hardware.calibration.model import Fit, Observation, Point
from planner.hardware.device import generic_device
from planner.jobs import Job, Mode, Optimizer
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.epoch import check_batch
from planner.planning.estimate import Estimate, Seconds, estimate_batch
from planner.planning.search.boundary import Search
from planner.planning.search.max_batch import Plan
from planner.program import TraceSource
from planner.program.events import Event, Outcome, Phase, PhaseStart, Site, Trace
from planner.program.target import Target
from tests.helpers.runs import CARD, JOB, OTHER_JOB, RUN, FakeMeasure
from tests.helpers.structs import replace
from tests.helpers.traces import alloc

SERIES = (BatchSeries(JOB, (8, 16)), BatchSeries(OTHER_JOB, (4,)))


def run(
    folder: Path,
    measure: Callable[[ProbeRequest, float], Observation],
    series: tuple[BatchSeries, ...] = SERIES,
    seconds: float = 1000,
    lines: list[str] | None = None,
) -> CampaignResult:
    now = measure if isinstance(measure, FakeMeasure) else FakeMeasure()
    progress = (lines if lines is not None else []).append
    return run_campaign(series, MeasurementSetup(CARD, folder, measure, lambda: seconds - now.now, progress))


def test_a_campaign_runs_in_order_and_writes_each_run(tmp_path: Path) -> None:
    """Every batch of a job before the next job; each run is a file and one line."""
    measure = FakeMeasure()
    lines: list[str] = []
    result = run(tmp_path, measure, lines=lines)
    assert [(each.job, each.batch) for each in measure.requests] == [(JOB, 8), (JOB, 16), (OTHER_JOB, 4)]
    assert (result.new, result.remaining, result.failures) == (3, 0, [])
    assert set(map(load_observation, tmp_path.glob("*.json"))) == set(result.observations)
    assert all(observation_path(tmp_path, one).exists() for one in result.observations)
    assert lines[0] == ("torchvision:resnet18 batch 8: allocated 180 MiB, reserved 180 MiB, process 600 MiB")


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    """A second call runs only what the first did not, and gives all runs."""
    first = run(tmp_path, FakeMeasure())
    measure = FakeMeasure()
    second = run(tmp_path, measure, (*SERIES, BatchSeries(JOB, (32,))))
    assert [one.batch for one in measure.requests] == [32]
    assert second.observations[:3] == first.observations


def test_runs_that_differ_in_any_option_are_different_runs(tmp_path: Path) -> None:
    """Optimizer, allocator options, benchmark, cap, GPU and torch: each makes a run of its own."""
    series = [
        BatchSeries(JOB, (8,)),
        BatchSeries(JOB.replace(optimizer=Optimizer.ADAM), (8,)),
        BatchSeries(JOB, (8,), alloc_conf="expandable_segments:True"),
        BatchSeries(JOB.replace(cudnn_benchmark=True), (8,)),
    ]
    assert run(tmp_path, FakeMeasure(), tuple(series)).new == 4
    newer = replace(CARD, versions=replace(CARD.versions, torch="2.14.0"))
    for gpu in (newer, replace(CARD, name="NVIDIA L4")):
        setup = MeasurementSetup(gpu, tmp_path, FakeMeasure(), lambda: 1000, lambda line: None)
        assert run_campaign(series[:1], setup).new == 1


def test_a_campaign_ends_with_its_time_and_goes_on_the_next_time(tmp_path: Path) -> None:
    """With less than a probe's time left no run begins; a later call makes the rest."""
    result = run(tmp_path, FakeMeasure(seconds_each=30), seconds=44)
    assert (result.new, result.remaining) == (1, 2)
    assert run(tmp_path, FakeMeasure()).new == 2


def test_a_run_that_the_end_of_the_time_stops_is_no_failure(tmp_path: Path) -> None:
    """A probe that is stopped because the time is over counts as left; nothing of it is stored."""
    fake = FakeMeasure(seconds_each=50)

    def stopped(request: ProbeRequest, timeout_seconds: float) -> Observation:
        fake(request, timeout_seconds)
        raise ModelError("a probe gave no answer")

    setup = MeasurementSetup(CARD, tmp_path, stopped, lambda: 20 - fake.now, lambda line: None)
    result = run_campaign(SERIES, setup)
    assert (result.new, result.remaining, result.failures) == (0, 2, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [ModelError("monai is not installed"), UsageError("torch has no fused lion")]
)
def test_a_job_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, error: Exception) -> None:
    """The failure is one line and does not stop the campaign."""
    fake = FakeMeasure()

    def fails(request: ProbeRequest, timeout_seconds: float) -> Observation:
        if request.job == JOB:
            raise error
        return fake(request, timeout_seconds)

    result = run(tmp_path, fails)
    assert (result.new, result.failures) == (1, [str(error)])


def test_a_gpu_that_goes_away_ends_the_campaign(tmp_path: Path) -> None:
    """NoGpuError is not taken for a failure of the job."""

    def gone(request: ProbeRequest, timeout_seconds: float) -> Observation:
        raise NoGpuError("no NVIDIA GPU is usable here")

    with pytest.raises(NoGpuError):
        run(tmp_path, gone)


def test_histories_are_kept_beside_their_runs(tmp_path: Path) -> None:
    """Only the named batches record one, in a file that is named like the run's."""
    measure = FakeMeasure()
    run(tmp_path, measure, (BatchSeries(JOB, (8, 16), histories=(16,)),))
    first, second = measure.requests
    assert first.history is None and second.history is not None
    run_file = next(path for path in tmp_path.glob("*.json") if load_observation(path).batch == 16)
    assert second.history == tmp_path / f"{run_file.stem}.history.json.gz"


def test_a_limit_is_found_from_runs_and_from_their_files_again(tmp_path: Path) -> None:
    """Under 500 MiB 40 samples fit; a second call needs no run for that; a cap above the GPU is left."""
    series = (BatchSeries(JOB, (8, 16), caps_bytes=(500 * MIB, 2**40)),)
    measure, lines = FakeMeasure(), list[str]()
    result = run(tmp_path, measure, series, lines=lines)
    assert [(limit.cap_bytes, limit.limit) for limit in result.limits] == [(500 * MIB, Limit(40, 41))]
    assert sorted(one.batch for one in measure.requests) == [8, 16, 40, 41]
    assert lines[-2:] == [
        "torchvision:resnet18 under 500 MiB: the largest batch is 40",
        "torchvision:resnet18: a cap of 1,048,576 MiB is more than this GPU has; left out",
    ]
    again = FakeMeasure()
    assert run(tmp_path, again, series).limits == result.limits
    assert again.requests == []


def test_runs_without_a_cap_guess_the_limit(tmp_path: Path) -> None:
    """Earlier measurements of the campaign save the runs from which the search would start."""
    measure = FakeMeasure()
    run(tmp_path, measure, (BatchSeries(JOB, (8, 16)), BatchSeries(JOB, (2, 4), caps_bytes=(500 * MIB,))))
    assert sorted(one.batch for one in measure.requests if one.allocator_cap_bytes) == [40, 41]


@given(st.integers(0, 5000), st.integers(-3, 9000))
def test_the_limit_is_exact_whatever_the_guess(true_limit: int, guess: int) -> None:
    """Gallop and bisection end at the boundary, and probe no batch twice."""
    batches: list[int] = []

    def lives(batch: int) -> bool:
        batches.append(batch)
        return batch <= true_limit

    limit = find_limit(lives, guess)
    assert (limit.largest, limit.first_oom, limit.is_exact) == (true_limit, true_limit + 1, True)
    assert len(set(batches)) == len(batches) <= 30 and min(batches) >= 1


@pytest.mark.parametrize("guess", [990, 1010])
def test_a_good_guess_saves_runs(guess: int) -> None:
    """One per cent off on either side: the boundary takes at most seven runs."""
    batches: list[int] = []
    find_limit(lambda batch: batches.append(batch) or batch <= 1000, guess)  # type: ignore[func-returns-value]
    assert len(batches) <= 7


def test_a_limit_without_an_end_is_not_exact() -> None:
    """A job that lives at every batch has no limit."""
    assert find_limit(lambda batch: True, 8) == Limit(2**20, None)


def test_a_guess_needs_two_runs_that_lived_and_grew() -> None:
    """One batch, the dead, and a peak that does not grow make no line."""
    small, large = replace(RUN, batch=10), replace(RUN, batch=20, peak_allocated_bytes=1900 * MIB)
    assert guess_limit([small, large], 2900 * MIB) == 30
    assert guess_limit([small], 2900 * MIB) is None
    assert guess_limit([small, replace(large, oom=True)], 2900 * MIB) is None
    assert guess_limit([small, replace(large, peak_allocated_bytes=900 * MIB)], 2900 * MIB) is None


def test_a_run_that_died_is_named_as_such() -> None:
    """No memory is a result and reads like one."""
    dead = replace(RUN, oom=True, settings=replace(RUN.settings, allocator_cap_bytes=8192 * MIB))
    assert describe(dead) == "torchvision:resnet18 batch 32 under 8,192 MiB: out of memory"


def test_the_campaign_that_ships_is_whole() -> None:
    """The shipped campaign names existing jobs, begins with runs without caps, and has four batches a job."""
    series, about = load_campaign(load_catalogue())
    free = [one for one in series if not one.caps_bytes]
    assert about and list(series[: len(free)]) == free
    assert all(len(one.batches) >= 4 for one in free)
    capped = {cap // MIB for one in series for cap in one.caps_bytes}
    assert capped == {8192, 12288, 16384, 24576, 40960, 81920}
    assert {one.job for one in series if one.caps_bytes} <= {one.job for one in free}
    names = {one.job.model.name for one in free}
    assert {"cnn", "vgg16_bn", "resnet50", "vit_b_16", "unetr", "torchvision:swin_t"} <= names
    assert {one.job.loop.optimizer for one in free} >= {Optimizer.SGD, Optimizer.ADAM, Optimizer.ADAMW}
    assert Mode.INFER in {one.job.loop.mode for one in free}


GROUP = "about: x\ngroups:\n  - about: y\n    models: [{models}]\n    batches: [{batches}]\n{more}"


@pytest.mark.parametrize(
    ("models", "batches", "more", "words"),
    [
        ("resnet51", "8", "", "line 4, groups[0].models[0]: model 'resnet51' is unknown; the nearest"),
        ("resnet50", "8, 8", "", "line 5, groups[0].batches: expected different values"),
        (
            "resnet50",
            "0",
            "",
            "line 5, groups[0].batches[0]: expected a whole number from 1 to 1,048,576, got 0",
        ),
        ("resnet50", "2.5", "", "line 5, groups[0].batches[0]: expected a whole number from 1 to "),
        ("", "8", "", "line 4, groups[0].models: the list is empty"),
        (
            "resnet50",
            "8",
            "    history: [9]\n",
            "line 6, groups[0].history: expected some of the group's batches",
        ),
        (
            "resnet50",
            "8",
            "    optimizer: lion\n",
            "line 6, groups[0].optimizer: unknown value 'lion'; ",
        ),
        (
            "resnet50",
            "8",
            "    alloc_conf: a\n",
            "line 6, groups[0].alloc_conf: allocator configuration: cannot read",
        ),
        (
            "resnet50",
            "8",
            "    dtype: bf16\n",
            "line 6, groups[0].dtype: unknown key; known are about",
        ),
        (
            "resnet50",
            "8",
            "    cudnn_benchmark: maybe\n",
            "line 6, groups[0].cudnn_benchmark: expected true or false",
        ),
    ],
)
def test_a_broken_campaign_names_line_and_key(
    tmp_path: Path, models: str, batches: str, more: str, words: str
) -> None:
    """Each mistake is one line with its place."""
    path = tmp_path / "campaign.yaml"
    path.write_text(GROUP.format(models=models, batches=batches, more=more))
    with pytest.raises(DataFileError) as error:
        load_campaign(load_catalogue(), path)
    assert str(error.value).startswith(f"{path} {words}") and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", '{"batch": 1}', "\udc80"])
def test_a_broken_run_is_one_line_and_stays(tmp_path: Path, content: str) -> None:
    """A file in the folder that is no run stops the campaign with its path; it is left untouched."""
    run(tmp_path, FakeMeasure())
    path = sorted(tmp_path.glob("*-b8-*.json"))[0]
    raw = content.encode(errors="surrogateescape")
    path.write_bytes(raw)
    with pytest.raises(DataFileError) as error:
        run(tmp_path, FakeMeasure())
    assert str(error.value).startswith(f"{path}: broken observation: ") and "\n" not in str(error.value)
    assert path.read_bytes() == raw


def test_a_run_in_a_file_is_the_run(tmp_path: Path) -> None:
    """Save and load are inverse, and nothing else is left in the folder."""
    save_observation(RUN, tmp_path / "deep" / "one.json")
    assert load_observation(tmp_path / "deep" / "one.json") == RUN
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.json"]
    assert json.loads((tmp_path / "deep" / "one.json").read_text())["batch"] == 32


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A folder in the way of a file, or a file in the way of a folder."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "one.json"):
        with pytest.raises(DataFileError, match=r"cannot be written: .*; check the folder"):
            write_bytes(path, b"")
    assert [path.name for path in tmp_path.parent.iterdir()].count(tmp_path.name) == 1


def line(job: Job, chip: Target, on_progress: object) -> TraceSource:
    """Traces of a job of 100 MiB and 10 MiB a sample."""

    def trace(batch: int) -> Trace:
        events: tuple[Event, ...] = (
            PhaseStart(1, Phase.FORWARD),
            alloc(0, 100 * MIB),
            alloc(1, 10 * MIB * batch),
        )
        return Trace(events, (Site("", "to"),), batch)

    return trace


def test_runs_become_a_calibration_that_the_planner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are put beside their replays, fitted and stored; a job that cannot be traced is reported."""
    measure = FakeMeasure()
    observations = run(
        tmp_path / "runs", measure, (BatchSeries(JOB, (8, 16, 32, 64)), SERIES[1])
    ).observations

    def tracer(job: Job, chip: Target, on_progress: object) -> TraceSource:
        assert chip == Target((8, 6), 28)
        if job == OTHER_JOB:
            raise ModelError("vgg11: fails")
        return line(job, chip, on_progress)

    monkeypatch.setattr("calibration.calibrate.open_traces", tracer)
    calibrations, failures = keep_observations(observations, tmp_path, lambda line: None)
    assert failures == ("vgg11: fails",)
    assert load_folders([tmp_path]) == calibrations
    (calibration,) = calibrations
    assert calibration.points == tuple(
        Point(observation, (100 + 10 * observation.batch) * MIB) for observation in observations[:4]
    )
    assert isinstance(calibration.fit, Fit)
    assert calibration.fit.overhead_bytes == pytest.approx(420 * MIB, abs=MIB)


def test_an_allocator_that_is_not_simulated_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of another backend of the allocator are reported, and those of others are kept."""
    monkeypatch.setattr("calibration.calibrate.open_traces", line)
    settings = replace(RUN.settings, alloc_conf="backend:cudaMallocAsync")
    other = replace(RUN, settings=settings)
    calibrations, (failure,) = keep_observations([other, RUN], tmp_path, lambda line: None)
    assert [one.key.settings for one in calibrations] == [RUN.settings]
    assert "cudaMallocAsync" in failure


@pytest.mark.slow
def test_calibrating_without_a_gpu_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoGpuError comes first, and the folder stays as it was."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoGpuError):
        calibrate(JOB, (8, 16), tmp_path, 1, lambda line: None)
    with pytest.raises(NoGpuError):
        calibrate_campaign(tmp_path, 1, lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("batches", "minutes"), [((), 1.0), ((0, 8), 1.0), ((8,), 0.0), ((8,), float("nan"))]
)
def test_calibrating_nothing_is_refused(tmp_path: Path, batches: tuple[int, ...], minutes: float) -> None:
    """No batches, a batch of 0 and no time are wrong usage, refused before a search for a GPU."""
    with pytest.raises(UsageError, match="--batches|--minutes"):
        calibrate(JOB, batches, tmp_path, minutes, lambda line: None)


def verified(batch: int, cap_mib: int, **seen: object) -> Verification:
    """Verify the job of 100 MiB and 10 MiB a sample under a cap, on a GPU with made-up readings."""
    tracer = line(JOB, (8, 6), None)
    budget = make_budget(generic_device(12_288), 0.99, AllocatorConfig(), cap_mib * MIB)
    estimate = estimate_batch(JOB, tracer(batch), budget)
    requests: list[ProbeRequest] = []

    def probe(request: ProbeRequest, timeout_seconds: float) -> Observation:
        requests.append(request)
        return replace(RUN, batch=request.batch, **seen)  # type: ignore[arg-type]

    check = verify(estimate, "", probe)
    assert requests == [ProbeRequest(JOB, batch, cap_mib * MIB)]
    return check


def test_a_verification_says_how_far_off_the_estimate_was() -> None:
    """Signed errors of each peak, positive where too much was estimated; the bound held."""
    check = verified(40, 600, peak_allocated_bytes=400 * MIB, peak_reserved_bytes=625 * MIB)
    assert check.errors == pytest.approx({"allocated": 0.25, "reserved": -0.2, "process": 758 / 1420 - 1})
    assert (check.ran, check.agrees) == (True, True)


@pytest.mark.parametrize(
    ("batch", "seen", "agrees", "holds"),
    [
        (40, {"process_peak_bytes": 900 * MIB}, True, True),
        (40, {"process_peak_bytes": 9000 * MIB}, True, False),  # more than the upper bound
        (40, {"process_peak_bytes": None}, True, True),  # no reading of NVML
        (40, {"oom": True}, False, False),  # predicted to fit, and died
        (60, {"oom": True}, True, True),  # predicted not to fit, and died
        (60, {}, False, True),  # predicted not to fit with this confidence, and ran
    ],
)
def test_a_verification_shows_whether_the_confidence_held(
    batch: int, seen: dict[str, object], agrees: bool, holds: bool
) -> None:
    """The confidence is broken by a death, or a process beyond its bound, of a batch predicted to fit."""
    check = verified(batch, 600, **seen)
    assert (check.agrees, check.holds) == (agrees, holds)
    assert (check.estimate.outcome is Outcome.DOES_NOT_FIT) == (batch == 60)
    assert bool(check.errors) == (not seen.get("oom"))


def test_no_batch_is_run_that_the_epoch_does_not_fill() -> None:
    """Under a cap a run beyond the largest batch follows, but none of more samples than there are."""
    tracer = line(JOB, (8, 6), None)
    budget = make_budget(generic_device(12_288), 0.99, AllocatorConfig(), 600 * MIB)
    at_max, failure = (estimate_batch(JOB, tracer(batch), budget) for batch in (40, 41))

    def plan(dataset_size: int) -> Plan:
        job, search = JOB.replace(dataset_size=dataset_size), Search(40, 40, 41, ())
        return Plan(job, budget, search, at_max, failure, Seconds(0, 0))

    def batches(plan: Plan) -> list[int]:
        def estimate_at(batch: int) -> Estimate:
            check_batch(plan.job, batch)
            return failure

        check = verify_limit(
            plan, estimate_at, "", print, lambda request, _: replace(RUN, batch=request.batch)
        )
        return [run.observation.batch for run in check.runs]

    assert batches(plan(0)) == [40, 41, 41]
    assert batches(plan(41)) == [40, 41]
