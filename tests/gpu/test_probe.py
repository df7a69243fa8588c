"""Probes, a calibration and its verification on an NVIDIA GPU. Nothing else may use it meanwhile."""

from pathlib import Path

import pytest

from calibration.calibrate import calibrate
from calibration.observations import load_observation
from calibration.probe.client import ProbeRequest, find_gpu, measure
from calibration.verify import verify
from planner.allocator.config import MIB, AllocatorConfig
from planner.capture.session import record
from planner.hardware.budget import make_budget
from planner.hardware.calibration.files import load_folders
from planner.hardware.calibration.model import Fit
from planner.hardware.device import Device, FigureKind, SourcedBytes
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.search.max_batch import estimate_batch, find_max_batch
from planner.program.events import Outcome
from tests.helpers.traces import RunTraces

pytestmark = pytest.mark.gpu
BATCHES = (16, 32, 64, 128)
RESNET50 = load_catalogue()["resnet50"].job
# With the workspaces that the installed cuDNN takes, so that the replays of its batch sizes lie on a line.
WITH_WORKSPACES = RESNET50.replace(cudnn="installed")


def this_card() -> Device:
    """The GPU of this machine with a context of 500 MiB."""
    gpu = find_gpu()
    total, usable = gpu.versions.nvml_total_bytes, gpu.versions.torch_total_bytes
    assert usable is not None
    return Device(
        gpu.name,
        SourcedBytes(total or usable, "NVML", kind=FigureKind.MEASURED),
        SourcedBytes(usable, "torch", kind=FigureKind.MEASURED),
        SourcedBytes(500 * MIB, "assumed", kind=FigureKind.UNVERIFIED),
        gpu.versions.capability,
    )


def test_the_gpu_says_what_it_is() -> None:
    """Name, versions and both totals are known, and NVML's is the larger."""
    gpu = find_gpu()
    assert gpu.name and gpu.versions.cuda and gpu.versions.cudnn and gpu.versions.driver
    assert gpu.versions.torch_total_bytes is not None and gpu.versions.nvml_total_bytes is not None
    assert gpu.versions.nvml_total_bytes >= gpu.versions.torch_total_bytes


def test_a_run_shows_all_its_figures_in_their_order() -> None:
    """end <= allocated <= reserved < process, and loading kernels only adds to the context."""
    seen = measure(ProbeRequest(RESNET50, 16))
    assert not seen.oom and seen.retries == 0
    allocated, reserved, process = (
        seen.peak_allocated_bytes,
        seen.peak_reserved_bytes,
        seen.process_peak_bytes,
    )
    before, after = seen.context_before_bytes, seen.context_after_bytes
    assert seen.end_allocated_bytes is not None and allocated is not None and reserved is not None
    assert process is not None and before is not None and after is not None
    assert 0 < seen.end_allocated_bytes <= allocated <= reserved < process
    assert 0 < before <= after <= process - reserved + 2 * MIB


def test_a_run_is_repeatable_to_the_byte() -> None:
    """Two fresh processes make the same requests to the allocator."""
    one, other = (measure(ProbeRequest(RESNET50, 16)) for _ in range(2))
    assert one.peak_allocated_bytes == other.peak_allocated_bytes
    assert one.peak_reserved_bytes == other.peak_reserved_bytes


def test_no_memory_is_a_value_on_the_gpu() -> None:
    """Under a cap of 1 GiB batch 128 dies, and the peak stays under the cap."""
    seen = measure(ProbeRequest(RESNET50, 128, allocator_cap_bytes=1024 * MIB))
    assert seen.oom and seen.end_allocated_bytes is None
    assert seen.peak_reserved_bytes is not None and seen.peak_reserved_bytes <= 1024 * MIB


def test_a_calibration_is_measured_fitted_and_stored(tmp_path: Path) -> None:
    """Four batches give a fit near slope 1 whose file reads back; a second call measures nothing."""
    lines: list[str] = []
    result = calibrate(WITH_WORKSPACES, BATCHES, tmp_path, 5, lines.append)
    assert (result.campaign.new, result.campaign.remaining, result.failures) == (4, 0, ())
    (calibration,) = result.calibrations
    assert isinstance(calibration.fit, Fit)
    assert 0.9 < calibration.fit.slope < 1.3
    assert load_folders([tmp_path]) == (calibration,)
    assert {run.batch for run in map(load_observation, (tmp_path / "runs").glob("*.json"))} == set(BATCHES)
    assert calibrate(WITH_WORKSPACES, BATCHES, tmp_path, 5, lines.append).campaign.new == 0


def test_the_largest_batch_runs_under_the_cap_and_a_twentieth_more_does_not() -> None:
    """`verify` at the planned largest batch of a 4 GiB cap lives; 1.05 times that dies."""
    budget = make_budget(this_card(), 0.99, AllocatorConfig(), 4096 * MIB)
    capability = budget.device.capability
    plan = find_max_batch(RESNET50, budget, RunTraces(lambda batch: record(RESNET50, batch, capability)))
    assert plan.at_max is not None
    held = verify(plan.at_max, "", measure)
    assert held.ran and held.agrees
    assert abs(held.errors["allocated"]) < 0.05
    beyond = -(-plan.search.largest * 105 // 100)
    estimate = estimate_batch(RESNET50, record(RESNET50, beyond, capability), budget)
    assert estimate.outcome is Outcome.DOES_NOT_FIT
    assert not verify(estimate, "", measure).ran
