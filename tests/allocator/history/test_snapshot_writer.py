"""The snapshot of a simulated run, opened by what torch itself opens snapshots with."""

import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.cuda import _memory_viz

from planner.allocator.config import MIB, UNLIMITED, AllocatorConfig, MemoryLimits
from planner.allocator.history.snapshot_writer import make_snapshot, save_snapshot
from planner.allocator.replay import replay_trace
from planner.allocator.segments import TOP_ADDRESS
from planner.errors import DataFileError
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, TensorProvenance, Trace
from tests.helpers.traces import traces

# The opcodes that torch/utils/viz/MemoryViz.js of torch 2.13 reads.
JS_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
}
SITES = (Site("a.conv", "aten.convolution.default"), Site("", "aten.empty"))
EVENTS = (
    *(PhaseStart(0, Phase.SETUP), Alloc(0, 3 * MIB, Category.PARAMETER, 0)),
    *(
        PhaseStart(1, Phase.FORWARD),
        Alloc(1, 700, Category.INPUT, 1),
        Free(1),
        Alloc(2, 30 * MIB, Category.ACTIVATION, 0),
    ),
    PhaseStart(1, Phase.END),
)
DETAILS = (TensorProvenance(2, (8, 3), "float32", "net/model.py:7", "x = self.conv(x)"),)
LITERAL = Trace(EVENTS, SITES, 8, provenance=DETAILS)


def batch_of(trace: Trace) -> int:
    return trace.batch


def size_after(text: str, name: str) -> str:
    match = re.search(rf"{name}: ([0-9.]+[KMGT]?i?B)", text)
    assert match
    return match[1]


def walk(snapshot: dict[str, Any]) -> tuple[int, int, int, dict[int, int], dict[int, int]]:
    """Highest requested and reserved bytes of the events, their number, and the blocks and segments left."""
    live: dict[int, int] = {}
    segments: dict[int, int] = {}
    requested = reserved = 0
    (entries,) = snapshot["device_traces"]
    for entry in entries:
        action, address, size = entry["action"], entry.get("addr"), entry["size"]
        if action == "alloc":
            live[address] = size
        elif action == "free_completed":
            assert live.pop(address) == size
        elif action in ("segment_alloc", "segment_map"):
            segments[address] = segments.get(address, 0) + size
        elif action in ("segment_free", "segment_unmap"):
            segments[address] = segments.get(address, 0) - size
        requested = max(requested, sum(live.values()))
        reserved = max(reserved, sum(segments.values()))
    return requested, reserved, len(entries), live, segments


def test_the_events_of_a_literal_trace() -> None:
    """Segments come before the blocks that need them; sizes as requested, both halves of a free, the end."""
    snapshot = make_snapshot(LITERAL, UNLIMITED)
    (entries,) = snapshot["device_traces"]
    top = TOP_ADDRESS
    assert [
        (entry["action"], top - entry["addr"], entry["size"], entry["category"]) for entry in entries
    ] == [
        ("segment_alloc", 20 * MIB, 20 * MIB, "unknown"),
        ("alloc", 20 * MIB, 3 * MIB, "parameters"),
        ("segment_alloc", 22 * MIB, 2 * MIB, "unknown"),
        ("alloc", 22 * MIB, 700, "inputs"),
        ("free_requested", 22 * MIB, 700, "inputs"),
        ("free_completed", 22 * MIB, 700, "inputs"),
        ("segment_alloc", 52 * MIB, 30 * MIB, "unknown"),
        ("alloc", 52 * MIB, 30 * MIB, "activations"),
        ("snapshot", top, 0, "unknown"),
    ]
    assert [entry["time_us"] for entry in entries] == list(range(9))


def test_frames_are_modules() -> None:
    """The operator in its module, the line of code, the modules around it, the phase; innermost first."""
    (entries,) = make_snapshot(LITERAL, UNLIMITED)["device_traces"]
    assert entries[7]["frames"] == [
        {"filename": "a.conv", "line": 7, "name": "aten.convolution.default"},
        {"filename": "net/model.py", "line": 7, "name": "x = self.conv(x)"},
        {"filename": "a", "line": 0, "name": "forward"},
        {"filename": "training loop", "line": 0, "name": "step 1 forward"},
    ]
    assert entries[3]["frames"] == [
        {"filename": "training loop", "line": 0, "name": "aten.empty"},
        {"filename": "training loop", "line": 0, "name": "step 1 forward"},
    ]


def test_a_segment_in_full() -> None:
    """A segment holds what is in use, what was requested, and its blocks by rising address."""
    snapshot = make_snapshot(LITERAL, UNLIMITED)
    first = snapshot["segments"][-1]  # the oldest lies highest
    base = TOP_ADDRESS - 20 * MIB
    frames = first["blocks"][0].pop("frames")
    assert frames[0]["name"] == "aten.convolution.default"
    assert first == {
        "device": 0,
        "address": base,
        "total_size": 20 * MIB,
        "allocated_size": 3 * MIB,
        "active_size": 3 * MIB,
        "requested_size": 3 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {"address": base, "size": 3 * MIB, "requested_size": 3 * MIB, "state": "active_allocated"},
            {
                "address": base + 3 * MIB,
                "size": 17 * MIB,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            },
        ],
    }


def test_torch_counts_what_we_count(tmp_path: Path) -> None:
    """`torch.cuda._memory_viz` reads the file; its sums of reserved and requested memory are ours."""
    path = tmp_path / "x.pickle"
    save_snapshot(LITERAL, UNLIMITED, path)
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    summary = _memory_viz.segsum(snapshot)  # type: ignore[no-untyped-call]
    assert "segments: 3\n" in summary
    assert size_after(summary, "total_reserved") == "52.0MiB"
    assert size_after(summary, "total_allocated") == "33.0MiB"
    assert [_memory_viz.calc_active(one) for one in snapshot["segments"]] == [30 * MIB, 0, 3 * MIB]  # type: ignore[no-untyped-call]
    listed = _memory_viz.trace(snapshot)  # type: ignore[no-untyped-call]
    assert f"9 entries\na = cudaMalloc({TOP_ADDRESS - 20 * MIB}, 20.0MiB)\nb = a[0:3.0MiB]\n" in listed
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "add_local_files(local_files" in plot(snapshot)
    lines = _memory_viz.memory(snapshot, format_flamegraph=str)  # type: ignore[no-untyped-call]
    origin = (
        "step 1 forward;a:0:forward;model.py:7:x = self.conv(x);a.conv:7:aten.convolution.default 31457280"
    )
    assert f"training loop:0:{origin}\n" in lines


def test_the_browser_can_read_it(tmp_path: Path) -> None:
    """The pickle has only what torch's viewer in the browser knows, and `unknown` among its categories."""
    path = tmp_path / "x.pickle"
    save_snapshot(LITERAL, UNLIMITED, path)
    content = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= JS_OPCODES
    assert content[:2] == b"\x80\x04"
    (entries,) = pickle.loads(content)["device_traces"]
    assert "unknown" in {entry["category"] for entry in entries}


def test_a_run_out_of_memory_ends_with_it() -> None:
    """The request that fails is an `oom` with its size, and what the GPU had left."""
    (entries,) = make_snapshot(LITERAL, MemoryLimits(capacity_bytes=45 * MIB))["device_traces"]
    released, failed, _ = entries[-3:]
    assert (released["action"], released["size"]) == ("segment_free", 2 * MIB)
    assert (failed["action"], failed["size"], failed["device_free"]) == ("oom", 30 * MIB, 25 * MIB)
    assert "addr" not in failed


_all_limits = st.one_of(
    st.just(UNLIMITED),
    st.integers(1, 100).map(lambda size: MemoryLimits(capacity_bytes=size * MIB)),
    st.integers(100, 400).map(
        lambda size: MemoryLimits(size * MIB, config=AllocatorConfig(expandable_segments=True))
    ),
)


@given(traces(), _all_limits)
def test_events_and_segments_agree(trace: Trace, limits: MemoryLimits) -> None:
    """The events lead to the segments and blocks that are left, and to the replay's reserved peak."""
    snapshot = make_snapshot(trace, limits)
    _, reserved, count, live, segments = walk(snapshot)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    used = {
        block["address"]: block["requested_size"] for block in blocks if block["state"] == "active_allocated"
    }
    assert used == live
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == sum(segments.values())
    assert reserved == replay_trace(trace, limits).peak_reserved_bytes
    assert [entry["time_us"] for entry in snapshot["device_traces"][0]] == list(range(count))
    assert "Summary of segments" in _memory_viz.segsum(snapshot)  # type: ignore[no-untyped-call]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that is not there is reported in one line."""
    path = tmp_path / "missing" / "x.pickle"
    with pytest.raises(DataFileError) as caught:
        save_snapshot(LITERAL, UNLIMITED, path)
    assert str(caught.value) == f"{path}: cannot write the snapshot: No such file or directory"
