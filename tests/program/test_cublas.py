"""Workspaces of cuBLAS for each thread, by GPU and by CUBLAS_WORKSPACE_CONFIG."""

from pathlib import Path

import pytest
from torch import Tensor, nn

from planner import estimate, max_batch
from planner.errors import UsageError
from planner.jobs import Mode
from planner.jobs.codec import job_from_json, job_to_json
from planner.program.events import Alloc, Category, Free, Trace
from planner.program.kernels.cublas import parse_workspace_config, workspace_bytes
from planner.store.fingerprint import fingerprint_of
from tests.helpers.models import AMPERE, HOPPER, job_of, trace_of

KIB = 1024


@pytest.mark.parametrize(
    ("text", "kib"),
    [
        (":4096:8", 32_768),
        (":16:8", 128),
        (":4096:2:16:8", 8_320),
        (":0:0", 0),
        (":007:1", 7),
    ],
)
def test_pairs_of_size_and_count_are_added_up(text: str, kib: int) -> None:
    """Sizes are in KiB, whatever the GPU."""
    assert parse_workspace_config(text) == kib * KIB
    assert workspace_bytes(HOPPER, text) == workspace_bytes(AMPERE, text) == kib * KIB


@pytest.mark.parametrize(
    ("capability", "mib"),
    [((7, 5), 8.125), ((8, 9), 8.125), ((9, 0), 32), ((10, 0), 32), ((10, 3), 32), ((12, 0), 32)],
)
def test_hopper_and_blackwell_keep_more_by_default(capability: tuple[int, int], mib: float) -> None:
    """:4096:2:16:8 up to Ada, 32 MiB from Hopper on."""
    assert workspace_bytes(capability) == mib * 2**20


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("4096:8", "cannot read '4096:8'; write :SIZE:COUNT with sizes in KiB, such as :4096:8 or :4096:2:"),
        (":4096", "cannot read ':4096'; write :SIZE"),
        (":4096:8,:16:8", "cannot read ':4096:8,:16:8'; write :SIZE"),
        (":-1:8", "cannot read ':-1:8'"),
        (":1:" + "9" * 5000, "more than a tebibyte for one workspace; make it smaller"),
        (":1073741825:1", "more than a tebibyte"),
    ],
)
def test_what_torch_would_read_in_part_is_refused(text: str, complaint: str) -> None:
    """Torch takes what pairs it finds, or the default with a warning; a plan asks for whole texts."""
    with pytest.raises(UsageError, match=r"^--cublas-workspace-config: ") as refused:
        parse_workspace_config(text)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


class Product(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def workspace_sizes(trace: Trace) -> list[int]:
    """Workspaces that never die."""
    dead = {event.block for event in trace.events if isinstance(event, Free)}
    return [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE and event.block not in dead
    ]


@pytest.mark.parametrize(("text", "kib"), [("", 8_320), (":4096:8", 32_768), (":16:8", 128)])
@pytest.mark.slow
def test_each_thread_keeps_as_much_as_the_text_says(text: str, kib: int) -> None:
    """The forward pass's and autograd's."""
    job = job_of("64", mode=Mode.TRAIN, steps=2, cublas_workspace_config=text)
    assert workspace_sizes(trace_of(Product, job, 2)) == [kib * KIB] * 2


def test_no_workspace_is_no_block() -> None:
    """:0:0 asks the allocator for nothing, and all other blocks are as ever."""
    without, usual = (
        trace_of(Product, job_of("64", mode=Mode.TRAIN, cublas_workspace_config=text), 2)
        for text in (":0:0", "")
    )
    sizes = [
        [event.size_bytes for event in one.events if isinstance(event, Alloc)] for one in (without, usual)
    ]
    assert workspace_sizes(without) == []
    assert sizes[0] == [size for size in sizes[1] if size != 8_320 * KIB]


FILE = """
from torch import nn

def Net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""
JOB = {"input": "64", "target": "scalar:int64", "optimizer": "adam", "gpu": "RTX 3060"}


@pytest.fixture
def net(tmp_path: Path) -> str:
    """A model that may be cached."""
    (tmp_path / "net.py").write_text(FILE)
    return f"{tmp_path}/net.py:Net"


def test_cached_traces_are_distinguished(net: str, tmp_path: Path) -> None:
    """Fresh, cached, and read again, an answer is that of its own text; the workspaces are the difference."""
    peaks = {}
    for text in ("", ":4096:8", ":0:0"):
        replays = [
            estimate(net, 32, cublas_workspace_config=text, cache=cache, **JOB).estimate.run
            for cache in (None, tmp_path / "kept", tmp_path / "kept")
        ]
        assert replays[0] == replays[1] == replays[2]
        peaks[text] = replays[0].end_allocated_bytes
    assert peaks[""] - peaks[":0:0"] == 2 * 8_320 * KIB
    assert peaks[":4096:8"] - peaks[":0:0"] == 2 * 32_768 * KIB


@pytest.mark.slow
def test_the_plan_follows_from_loops_as_from_runs(net: str, tmp_path: Path) -> None:
    """The largest batch is the same from fitted, cached and single traces, and less with more workspace."""
    card = {**JOB, "gpu": None, "gpu_mib": 1400}
    batches = {}
    for text in (":0:0", "", ":65536:1"):
        plans = [
            max_batch(net, cublas_workspace_config=text, cache=cache, **card)
            for cache in (None, tmp_path / "kept")
        ]
        assert plans[0].max_batch == plans[1].max_batch
        batches[text] = plans[0].max_batch
    assert batches[":0:0"] > batches[""] > batches[":65536:1"] > 0


def test_the_text_goes_into_the_job_its_key_and_back() -> None:
    """JSON holds it, a job of before has none, and what is no such text is refused."""
    job = job_of("64", cublas_workspace_config=":16:8", model="torchvision:resnet18")
    parts = job_to_json(job)
    assert parts["cublas_workspace_config"] == ":16:8"
    assert job_from_json(parts) == job
    older = {name: value for name, value in parts.items() if name != "cublas_workspace_config"}
    assert job_from_json(older).environment.cublas_workspace_config == ""
    assert fingerprint_of(job) != fingerprint_of(job_from_json(older))
    with pytest.raises(UsageError, match="cannot read 'x'"):
        job_from_json(parts | {"cublas_workspace_config": "x"})
