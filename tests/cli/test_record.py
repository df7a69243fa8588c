"""`planner record`: a snapshot is shown and written without what names a person or a machine."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from planner.allocator.config import MIB
from planner.allocator.history.published_file import load_published
from tests.helpers.command_line import outcome

Capture = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parents[1] / "golden" / "record"
BASE = 0x7F00_0000_0000


def entry(action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, object]:
    stack = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 7_654_321,
        "frames": stack,
    }


def segment(address: int, size: int, device: int, *blocks: tuple[int, str]) -> dict[str, object]:
    of_segment = [{"size": one, "state": state, "frames": []} for one, state in blocks]
    place: dict[str, object] = {"device": device, "address": address, "total_size": size, "stream": 0}
    return place | {"segment_type": "large", "blocks": of_segment}


USED, FREE = "active_allocated", "inactive"
LINUX = ("/home/alice/secret-project/net/model.py", 12, "forward")
WINDOWS = ("C:\\Users\\alice\\train.py", 3, "main")
TORCH = ("/x/torch/nn/modules/conv.py", 4, "f")
SNAPSHOT = {
    "segments": [
        segment(
            BASE, 20 * MIB, 0, (3 * MIB, "inactive"), (5 * MIB, "active_allocated"), (12 * MIB, "inactive")
        ),
        segment(BASE, 4 * 2**30, 1, (4 * 2**30, USED)),
    ],
    "device_traces": [
        [
            entry("alloc", BASE + 3 * MIB, 5 * MIB, TORCH, LINUX),
            entry("free_requested", BASE, 3 * MIB, WINDOWS),
            entry("free_completed", BASE, 3 * MIB, WINDOWS),
        ],
        [entry("segment_alloc", BASE, 4 * 2**30), entry("alloc", BASE, 4 * 2**30, WINDOWS)],
    ],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "last_allocator_settings": "/home/alice"},
    "external_annotations": [{"name": "alice"}],
}


def snapshot(tmp_path: Path, devices: int = 1) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT | {"device_traces": SNAPSHOT["device_traces"][:devices]}))  # type: ignore[index]
    return path


def test_a_snapshot_is_shown(tmp_path: Path, capsys: Capture) -> None:
    """The report of two devices, letter by letter; without --out nothing is written."""
    code, text, error = outcome(f"record {snapshot(tmp_path, 2)}", capsys)
    assert (code, error) == (0, "")
    assert text == (GOLDEN / "two_devices.txt").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pickle"]


def test_what_is_written_names_nobody(tmp_path: Path, capsys: Capture) -> None:
    """Folders, users, times and notes of the snapshot are not in the file; events and lines of code are."""
    out = tmp_path / "a.json.gz"
    code, text, _ = outcome(
        f"record {snapshot(tmp_path)} --out {out} --gpu L4 --torch 2.6 --kind training --json", capsys
    )
    answer = json.loads(text)
    assert (code, answer["written"], answer["histories"][0]["difference"]) == (0, [str(out)], None)
    content = gzip.decompress(out.read_bytes()).decode()
    for private in ("alice", "secret-project", "Users", "home", "7654321", str(tmp_path)):
        assert private not in content
    published = load_published(out)
    history = published.history
    assert (published.name, published.kind, history.gpu, history.torch) == ("a", "training", "L4", "2.6")
    assert [(site.module, site.op) for site in history.sites] == [
        ("model.py:12", "forward"),
        ("train.py:3", "main"),
    ]
    assert [event.action for event in history.events] == ["alloc", "free_requested", "free_completed"]
    assert [[block.in_use for block in state.blocks] for state in history.start] == [[True, False]]


def test_each_device_has_a_file(tmp_path: Path, capsys: Capture) -> None:
    """A snapshot of several devices becomes a file each, with the number of the device."""
    code, text, _ = outcome(f"record {snapshot(tmp_path, 2)} --out {tmp_path / 'a.json.gz'} --json", capsys)
    assert (code, [Path(path).name for path in json.loads(text)["written"]]) == (
        0,
        ["a-gpu0.json.gz", "a-gpu1.json.gz"],
    )


def test_the_version_is_told_by_the_order_of_equal_blocks(tmp_path: Path, capsys: Capture) -> None:
    """The lowest of two equal blocks was taken, which lies in the newer segment: torch before 2.12."""
    old, new = BASE + 64 * MIB, BASE
    events = [
        entry("segment_alloc", old, 30 * MIB),
        entry("alloc", old, 30 * MIB),
        entry("segment_alloc", new, 30 * MIB),
        entry("alloc", new, 30 * MIB),
        entry("free_completed", old, 30 * MIB),
        entry("free_completed", new, 30 * MIB),
        entry("alloc", new, 30 * MIB),
    ]
    segments = [
        segment(new, 30 * MIB, 0, (30 * MIB, "active_allocated")),
        segment(old, 30 * MIB, 0, (30 * MIB, "inactive")),
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    code, text, _ = outcome(f"record {path} --json", capsys)
    assert (code, json.loads(text)["histories"][0]["torch"]) == (
        0,
        "2.11 or earlier, by the order of equal blocks",
    )


def test_wrong_usage(tmp_path: Path, capsys: Capture) -> None:
    """Each refusal says what to do, with the exit code of its kind."""
    assert outcome("record", capsys)[2].startswith("planner: FILE is missing: name a pickle of torch.cuda")
    path = snapshot(tmp_path)
    code, _, error = outcome(f"record {path} --out a.txt", capsys)
    assert (code, error) == (2, "planner: --out a.txt: the name of a history ends with .json.gz\n")
    path.write_bytes(b"no pickle")
    assert outcome(f"record {path}", capsys)[0] == 4
