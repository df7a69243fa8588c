"""Observations of a run of a job."""

from planner.hardware.device import MIB
from tests.helpers.calibrations import observation
from tests.helpers.structs import replace


def test_rise() -> None:
    """A process rises by its peak less its level before the first tensor."""
    assert observation(8, 1_500).rise_bytes == 1_200 * MIB


def test_recorded_rise() -> None:
    """A rise that a record gives by itself is taken as it is."""
    only = replace(
        observation(8, 1_500), process_peak_bytes=None, context_before_bytes=None, process_rise_bytes=77
    )
    assert only.rise_bytes == 77


def test_unknown_rise() -> None:
    """Without both ends there is no rise, and none is made up."""
    assert replace(observation(8, 1_500), process_peak_bytes=None).rise_bytes is None
    assert replace(observation(8, 1_500), context_before_bytes=None).rise_bytes is None
