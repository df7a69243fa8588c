"""Options and fixtures of all tests; tests marked `gpu` are skipped, visibly, where torch sees no GPU."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from planner.program.events import Site
from tests.helpers.command_line import MIB, saved, toy_events
from tests.helpers.golden import record_golden
from tests.helpers.traces import program_of

# Examples are the same in each run and take as long as they take; `make soak` draws others.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", _UNTIMED)
settings.register_profile("check", _UNTIMED, derandomize=True)
settings.load_profile("check")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--runs N` of the counted tests, of which `make soak` takes more, and `--cudnn FOLDER`.

    `--cuda-python` is the interpreter of the emulated tests, `--distributions` a folder of built ones.
    """
    parser.addoption(
        "--runs", type=int, default=20, help="repetitions of interrupted, concurrent, fuzzed runs"
    )
    parser.addoption(
        "--cudnn", default="", help="folder of the libcudnn.so.9 that tests ask, if not an installed one"
    )
    parser.addoption(
        "--cuda-python", default="", help="a Python with the CUDA build of torch, for emulated GPUs"
    )
    parser.addoption(
        "--distributions", default="", help="a folder with the source distribution and the wheel"
    )
    parser.addoption("--record-golden", action="store_true", help="write the files of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Record golden files if that is requested, and take signals as programs of a terminal do.

    A run that a shell starts in the background ignores some, which the processes of its tests would inherit.
    """
    if config.getoption("--record-golden"):
        record_golden()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give a test run a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the marked tests; torch is imported only if there are some."""
    for item in items:
        if item.get_closest_marker("emulated") and not item.config.getoption("--cuda-python"):
            item.add_marker(pytest.mark.skip(reason="needs the CUDA build of torch: make emulated"))
        if item.get_closest_marker("release") and not item.config.getoption("--distributions"):
            item.add_marker(pytest.mark.skip(reason="needs the distributions: make release"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def toy_trace(tmp_path: Path) -> Path:
    """A saved trace of 3 MiB and 2 MiB a sample, for any batch size; made without torch."""
    return saved(tmp_path / "toy.trace", program_of(toy_events(2 * MIB), (Site("fc", "to"),)))


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    """Return the number of runs of a counted test."""
    return int(request.config.getoption("--runs"))


@pytest.fixture
def importable_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let emulated scripts import this checkout, which the CUDA environment has not installed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
