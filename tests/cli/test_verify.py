"""`verify` on the command line, with a GPU whose runs a trace answers."""

import json

import pytest

from calibration.verify import LimitCheck
from planner.allocator.config import AllocatorConfig
from planner.hardware.budget import make_budget
from planner.hardware.database import find_device
from planner.hardware.device import MIB, generic_device
from planner.jobs import Job
from planner.planning.estimate import Seconds
from planner.planning.search.boundary import Search
from planner.planning.search.max_batch import Plan
from planner.report.commands.calibrations.verify import limit_document, limit_to_json
from planner.report.plain import render_plain
from tests.helpers.calibrating import JOB_OPTIONS, tracer
from tests.helpers.command_line import Capture, outcome
from tests.helpers.runs import CARD, JOB, FakeMeasure
from tests.helpers.structs import replace
from tests.helpers.traces import RunTraces


def verified(options: str, capsys: Capture) -> tuple[int, str]:
    code, out, err = outcome(f"verify --model models.py:Fine --batch 8 {options}", capsys)
    assert err == ""
    return code, out


@pytest.mark.usefixtures("linear", "emulated")
def test_an_emulated_verification_is_called_that(gpu: FakeMeasure, capsys: Capture) -> None:
    """The verdict is "emulated", and nothing in the answer is called measured."""
    gpu.context_mib = 150
    code, out = verified(f"{JOB_OPTIONS} --json --confidence 0.999999", capsys)
    fields = json.loads(out)
    assert (code, fields["holds"], fields["verdict"], fields["measured"]) == (0, True, "emulated", None)
    assert fields["emulated"]["peak_reserved_mib"] == 180
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.999999", capsys)
    assert out.splitlines()[0] == (
        "Emulated, not measured; there confidence 0.999999 held: batch 8 was predicted to fit and ran"
    )
    assert "measured" not in out.split("\n", 1)[1]


@pytest.mark.usefixtures("linear")
def test_verify_that_did_not_hold(gpu: FakeMeasure, capsys: Capture) -> None:
    """The made-up run takes 180 MiB more than the linear layer, more than this GPU's bound."""
    code, out = verified(f"{JOB_OPTIONS} --json --confidence 0.6", capsys)
    fields = json.loads(out)
    assert (code, fields["ran"], fields["agrees"], fields["holds"]) == (1, True, True, False)
    assert fields["measured"]["process_peak_mib"] == 600
    assert fields["errors"]["process"] == pytest.approx(fields["estimate"]["process_mib"] / 600 - 1, abs=1e-5)
    assert fields["estimate"]["device"]["name"] == find_device("RTX 3060 12GB").name
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.6", capsys)
    assert (code, out.splitlines()[0]) == (
        1,
        "Confidence 0.6 did NOT hold: batch 8 was predicted to fit and ran, but exceeded the upper bound",
    )


@pytest.mark.usefixtures("linear")
def test_verify_that_held(gpu: FakeMeasure, capsys: Capture) -> None:
    """A run on a GPU with a smaller context holds; each peak stands beside its prediction."""
    gpu.context_mib = 150
    code, out = verified(f"{JOB_OPTIONS} --confidence 0.999999", capsys)
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "Confidence 0.999999 held: batch 8 was predicted to fit and ran")
    assert [line.split()[0] for line in lines[-4:]] == ["peak", "peak", "process", "process,"]
    assert lines[-2].split()[2] == "330.0"
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("linear")
def test_verify_runs_under_the_cap(gpu: FakeMeasure, capsys: Capture) -> None:
    """A cap is set for the run as well; here the run dies in it, though it was predicted to fit."""
    code, out = verified(f"{JOB_OPTIONS} --allocator-cap-mib 150", capsys)
    assert (code, gpu.requests[0].allocator_cap_bytes) == (1, 150 * MIB)
    assert out.splitlines()[0] == (
        "Confidence 0.99 did NOT hold: batch 8 was predicted to fit and ran out of memory"
    )


@pytest.mark.usefixtures("linear")
def test_verify_on_another_card(gpu: FakeMeasure, capsys: Capture) -> None:
    """A run here is no proof for another GPU."""
    code, _, err = outcome(f"verify --model models.py:Fine {JOB_OPTIONS} --batch 8 --gpu L4", capsys)
    assert (code, err) == (
        2,
        "planner: --gpu L4: this machine has NVIDIA GeForce RTX 3060; remove --gpu\n",
    )


@pytest.mark.usefixtures("linear")
def test_verify_on_an_unknown_card(
    gpu: FakeMeasure, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A GPU that no database lists is taken as the driver and torch describe it."""
    monkeypatch.setattr("calibration.probe.client.find_gpu", lambda: replace(CARD, name="NVIDIA Z9"))
    device = json.loads(verified(f"{JOB_OPTIONS} --json", capsys)[1])["estimate"]["device"]
    assert (device["name"], device["total_mib"], device["usable_mib"]) == ("NVIDIA Z9", 12_288, 12_037)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model's traces follow the formula of the made-up runs."""

    def programs(job: Job, on_progress: object, *rest: object) -> RunTraces:
        return RunTraces(tracer(job, (8, 6), on_progress))

    monkeypatch.setattr("planner.api.request.request.open_programs", programs)


LIMIT = "verify --model torchvision:resnet18 --allocator-cap-mib 1000"


@pytest.mark.usefixtures("traced")
def test_verify_the_largest_batch(gpu: FakeMeasure, capsys: Capture) -> None:
    """Under a cap of 1,000 MiB 87 is the answer with its margin: it, the next and 1.05 of it are run."""
    gpu.context_mib = 150
    code, out, err = outcome(f"{LIMIT} --json", capsys)
    fields = json.loads(out)
    assert (code, err) == (0, "")
    assert [(request.batch, request.allocator_cap_bytes) for request in gpu.requests] == [
        (batch, 1_000 * MIB) for batch in (87, 88, 92)
    ]
    assert (fields["max_batch"], fields["holds"]) == (87, True)
    assert fields["true_largest"] == {"at_least": 88, "at_most": 91}
    runs = [(run["batch"], run["ran"], run["estimate"]["fits"]) for run in fields["runs"]]
    assert runs == [(87, True, "yes"), (88, True, "no"), (92, False, "no")]
    assert fields["runs"][0]["errors"]["allocated"] == 0
    lines = outcome(LIMIT, capsys)[1].splitlines()
    assert lines[0] == ("Confidence 0.99 held: the largest batch was predicted to be 87; it is from 88 to 91")
    assert [line for line in lines if line.startswith("Batch")] == [
        "Batch 87 was predicted to fit and ran",
        "Batch 88 was predicted not to fit and ran",
        "Batch 92 was predicted not to fit and ran out of memory",
    ]
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("traced")
def test_verify_a_largest_batch_that_dies(gpu: FakeMeasure, capsys: Capture) -> None:
    """A largest batch that dies ends the runs; the confidence did not hold, and the code is 1."""
    gpu.besides_mib = 100
    code, out, _ = outcome(f"{LIMIT} --json", capsys)
    fields = json.loads(out)
    assert (code, [request.batch for request in gpu.requests]) == (1, [87])
    assert (fields["holds"], fields["true_largest"]) == (False, {"at_least": 0, "at_most": 86})
    assert outcome(LIMIT, capsys)[1].splitlines()[0] == (
        "Confidence 0.99 did NOT hold: the largest batch was predicted to be 87; it is smaller than 87"
    )


@pytest.mark.usefixtures("traced")
def test_verify_without_a_cap(gpu: FakeMeasure, capsys: Capture) -> None:
    """Without a cap the largest batch and the next are run, as far as the GPU has memory."""
    fields = json.loads(outcome(LIMIT.partition(" --alloc")[0] + " --json", capsys)[1])
    largest = fields["max_batch"]
    assert [request.batch for request in gpu.requests] == [largest, largest + 1]
    assert fields["true_largest"] == {"at_least": largest + 1, "at_most": None}


@pytest.mark.usefixtures("traced")
def test_verify_where_nothing_fits(gpu: FakeMeasure, capsys: Capture) -> None:
    """A largest batch of 0 makes 1 run, which dies here as predicted."""
    code, out, _ = outcome(LIMIT.replace("1000", "101"), capsys)
    assert (code, [request.batch for request in gpu.requests]) == (0, [1])
    assert out.splitlines()[0] == (
        "Confidence 0.99 held: the largest batch was predicted to be 0; it is smaller than 1"
    )


def test_verify_that_can_run_nothing() -> None:
    """If not even a batch of 1 can be captured, no run is made and no GPU is named."""
    budget = make_budget(generic_device(8_000), 0.99, AllocatorConfig())
    plan = Plan(JOB, budget, Search(0, 0, None, ()), None, None, Seconds(0, 0))
    fields = limit_to_json(LimitCheck(plan, ()), 0.0)
    assert (fields["gpu"], fields["runs"], fields["max_batch"]) == (None, [], 0)
    assert fields["true_largest"] == {"at_least": 0, "at_most": None}
    assert "nothing was tried" in render_plain(limit_document(LimitCheck(plan, ())))
