"""`--compile` with and without a mode."""

import pytest

from planner.cli.parser import _with_mode


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--compile"], ["--compile", "default"]),
        (["--compile", "--json"], ["--compile", "default", "--json"]),
        (["--compile", "none", "--json"], ["--compile", "none", "--json"]),
        (["--compile", "--", "x", "--compile"], ["--compile", "default", "--", "x", "--compile"]),
        (["--", "x", "--compile"], ["--", "x", "--compile"]),
    ],
)
def test_compile_alone_is_its_default_mode(given: list[str], read: list[str]) -> None:
    """Arguments after `--` are those of a command of the user's."""
    assert _with_mode(given) == read
