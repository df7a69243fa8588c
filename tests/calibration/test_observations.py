"""Observations as values and as JSON."""

import json

import pytest

from calibration.observations import observation_from_json, observation_to_json
from tests.helpers.runs import RUN
from tests.helpers.structs import replace


def test_an_observation_survives_json() -> None:
    """The JSON of an observation is read back as the same observation."""
    for one in (
        RUN,
        replace(RUN, oom=True, end_allocated_bytes=None, versions=replace(RUN.versions, cuda=None)),
    ):
        assert observation_from_json(json.loads(json.dumps(observation_to_json(one)))) == one


@pytest.mark.parametrize("flag", [True, False])
def test_older_runs_have_the_benchmark_mode_among_their_settings(flag: bool) -> None:
    """cuDNN's benchmark mode stood among the settings of a run."""
    older = observation_to_json(RUN)
    older["settings"]["cudnn_benchmark"] = flag
    assert observation_from_json(older) == replace(RUN, job=RUN.job.replace(cudnn_benchmark=flag))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("batch", "32", "batch: expected a whole number of at least 1, got '32'"),
        ("batch", True, "batch: expected a whole number of at least 1, got true"),
        ("oom", 0, "oom: expected true or false, got 0"),
        ("retries", 1.5, "retries: expected a whole number of at least 0 or null, got 1.5"),
        (
            "source",
            "guessed",
            "source: expected one of contributed, emulated, measured, published, got 'guessed'",
        ),
        ("extra", 1, "extra: unknown key"),
        ("job", {"model": "x"}, "job: KeyError: 'source'"),
        ("versions", {}, "versions: missing torch"),
        ("settings", None, "settings: expected keys with values, got null"),
        ("settings", {"cudnn_benchmark": 1}, "expected true or false, got 1"),
    ],
)
def test_an_answer_that_no_probe_gives_is_refused(key: str, value: object, words: str) -> None:
    """A wrong type, an unknown key or a part that is missing is named."""
    with pytest.raises(ValueError) as error:
        observation_from_json(observation_to_json(RUN) | {key: value})
    assert words in str(error.value)
