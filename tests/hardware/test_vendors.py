"""GPUs of other makers: what is said of them, and what is refused."""

import re

import pytest

import planner
from planner.emulator.gpu import describe_gpu
from planner.errors import UsageError
from planner.hardware.database import (
    device_key,
    find_device,
    load_devices,
    load_other_devices,
    search_devices,
)
from planner.hardware.device import MIB, Device, FigureKind, Vendor
from planner.hardware.vendors import NOT_MODELLED

OTHERS = load_other_devices()


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.name)
def test_figures_have_origins_and_wide_contexts(device: Device) -> None:
    """No context was measured, so that each is a guess with a wide spread."""
    assert device.vendor is not Vendor.NVIDIA and device.about is not None
    assert 0.9 * device.total.value < device.usable.value < device.total.value
    assert device.context.spread >= 300 * MIB and device.context.kind is FigureKind.UNVERIFIED
    assert device.usable.kind is not FigureKind.DERIVED or device.usable.spread > 0
    assert device.capability_source.startswith("assumed")
    match = re.search(r"total less (\d+) MiB", device.usable.source)
    assert match is None or device.total.value - device.usable.value == int(match[1]) * MIB


def test_no_name_is_that_of_two_gpus() -> None:
    keys = [
        {device_key(name) for name in (device.name, *device.aliases)} for device in (*load_devices(), *OTHERS)
    ]
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_answers_name_what_is_not_modelled() -> None:
    """Nothing shows how such runs differ from a replay: no probability, and wider margins than elsewhere."""
    estimate = planner.estimate("resnet50", 8, gpu="MI210").to_dict()
    assert NOT_MODELLED[Vendor.AMD] in estimate["assumptions"]
    assert estimate["p_out_of_memory"] is None
    card = find_device("A100-80").name
    known = planner.estimate("resnet50", 8, gpu=card).to_dict()
    widths = [one["process_upper_mib"] - one["process_mib"] for one in (estimate, known)]
    assert widths[0] > widths[1] and NOT_MODELLED[Vendor.AMD] not in known["assumptions"]


@pytest.mark.slow
def test_other_makers_are_compared_where_they_are_chosen() -> None:
    """The table of all GPUs stays with NVIDIA's."""
    rows = planner.gpus("cnn", 8, filter="intel").to_dict()
    assert {row["gpu"] for row in rows["rows"]} == {
        device.name for device in OTHERS if device.vendor is Vendor.INTEL
    }
    assert rows["assumptions"][0] == NOT_MODELLED[Vendor.INTEL]
    assert not {row["gpu"] for row in planner.gpus("cnn", 8).to_dict()["rows"]} & {one.name for one in OTHERS}
    assert not any(device.vendor is Vendor.AMD for device in search_devices(OTHERS, ["8.0"]))


@pytest.mark.parametrize("name", ["M1", "Apple M2 Max", "m3 ultra", "M4 Pro", "mps"])
def test_apple_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match="Apple's GPUs are not planned: torch's MPS allocator"):
        find_device(name)


def test_only_nvidia_is_emulated_and_connected() -> None:
    with pytest.raises(UsageError, match="MI300X 192GB: only GPUs of NVIDIA are emulated"):
        describe_gpu(find_device("MI300X"))
    with pytest.raises(UsageError, match="GPUs of other makers, whose communication is not modelled"):
        planner.clusters("cnn", global_batch=8, filter="amd")
