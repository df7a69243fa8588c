"""Traces as files: what is written comes back, whole or not at all, and nothing else is believed."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from planner.errors import DataFileError
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace, check
from planner.store import codec as trace_file
from planner.store.codec import Saved, load_saved, load_trace, save_loops, save_trace
from tests.helpers.traces import UNTIMED, traces

EVENTS: tuple[Event, ...] = (
    PhaseStart(0, Phase.SETUP),
    Alloc(0, 37632, 0, Category.PARAMETER, 0),
    PhaseStart(1, Phase.FORWARD),
    Alloc(7, -64, 802816, Category.ACTIVATION, 1),
    Free(7),
    PhaseStart(1, Phase.END),
)
SITES = (Site("", "to"), Site("conv1", "aten.convolution.default"))
TRACE = Trace(EVENTS, SITES, (2, 3, 128), ("aten.mystery.default",), ("traced with torch 2.13",))
ABOUT = {"job": {"model": "resnet50", "steps": 3}, "batch": 128, "capability": [8, 6], "rate": 0.5}
DOCUMENT: dict[str, Any] = {
    "format": 1,
    "about": ABOUT,
    "batches": [2, 3, 128],
    "unknown_ops": ["aten.mystery.default"],
    "notes": ["traced with torch 2.13"],
    "sites": {"module": ["", "conv1"], "op": ["to", "aten.convolution.default"]},
    "kind": "mamafm",
    "alloc": {
        "block": [0, 7],
        "fixed_bytes": [37632, -64],
        "per_sample_bytes": [0, 802816],
        "role": ["parameters", "activations"],
        "site": [0, 1],
    },
    "free": {"block": [7]},
    "mark": {"step": [0, 1, 1], "phase": ["setup", "forward", "end"]},
}

Folder = pytest.TempPathFactory
texts = st.text(max_size=10)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    texts,
    st.sampled_from([*Category, *Phase, "afm"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)
finite = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


def pack(document: object) -> bytes:
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def load(content: bytes, folder: Path) -> tuple[Trace, dict[str, Any]]:
    path = folder / "t.trace"
    path.write_bytes(content)
    return load_trace(path)


def refusal(content: bytes, folder: Path) -> str:
    """What is said of a file that is not believed, without its path; one line."""
    with pytest.raises(DataFileError) as caught:
        load(content, folder)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text.removeprefix(f"{folder / 't.trace'}: ")


def refusal_and_memory(content: bytes, folder: Path) -> tuple[str, int]:
    """The same, and the peak of the memory that it took to say so."""
    (folder / "t.trace").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataFileError) as caught:
        load_trace(folder / "t.trace")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return str(caught.value).removeprefix(f"{folder / 't.trace'}: "), peak_bytes


def broken(flaw: str) -> str:
    return f"broken trace file: {flaw}; trace anew"


@UNTIMED
@given(traces(), st.dictionaries(texts, finite, max_size=4))
def test_round_trip(tmp_path_factory: Folder, trace: Trace, about: dict[str, Any]) -> None:
    """What is saved comes back equal, trace and description."""
    path = tmp_path_factory.getbasetemp() / "round.trace"
    save_trace(trace, path, about)
    assert load_trace(path) == (trace, about)


def test_layout(tmp_path: Path) -> None:
    """A file is gzip around the JSON that the module describes."""
    save_trace(TRACE, tmp_path / "t", ABOUT)
    assert json.loads(gzip.decompress((tmp_path / "t").read_bytes())) == DOCUMENT


def test_reads_the_layout(tmp_path: Path) -> None:
    """A file of that layout is read whoever wrote it."""
    assert load(pack(DOCUMENT), tmp_path) == (TRACE, ABOUT)


def test_equal_bytes(tmp_path: Path) -> None:
    """The same trace makes the same bytes, whatever the hour and the name of the file."""
    save_trace(TRACE, tmp_path / "one", ABOUT)
    save_trace(deepcopy(TRACE), tmp_path / "other.json.gz", deepcopy(ABOUT))
    packed = (tmp_path / "one").read_bytes()
    assert packed == (tmp_path / "other.json.gz").read_bytes()
    assert packed[4:8] == bytes(4)  # gzip's time of writing


def test_saving_replaces(tmp_path: Path) -> None:
    """An older file gives way to the new one, and nothing else stays behind."""
    path = tmp_path / "t.trace"
    path.write_text("older")
    save_trace(TRACE, path, ABOUT)
    assert load_trace(path) == (TRACE, ABOUT)
    assert list(tmp_path.iterdir()) == [path]


def half_written(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(28, "No space left on device")


def interrupted(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise KeyboardInterrupt


def forbidden(path: Path, target: Path) -> Path:
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("method", "fault", "error", "said"),
    [
        ("write_bytes", half_written, DataFileError, "{}: cannot write the trace: No space left on device"),
        ("write_bytes", interrupted, KeyboardInterrupt, ""),
        ("replace", forbidden, DataFileError, "{}: cannot write the trace: Operation not permitted"),
    ],
)
def test_failing_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    fault: Callable[..., object],
    error: type[BaseException],
    said: str,
) -> None:
    """Where writing fails half-way, is interrupted, or the old file cannot be replaced, that stays, and no
    partial one does.
    """
    path = tmp_path / "t.trace"
    path.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, fault)
        with pytest.raises(error) as caught:
            save_trace(TRACE, path, ABOUT)
    assert str(caught.value) == said.format(path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("t.trace", "older")]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder, a file taken for a folder and a folder that is missing are refused in one line each."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("older")
    for name, reason in (
        ("folder", "Is a directory"),
        ("file/t.trace", "Not a directory"),
        ("missing/t.trace", "No such file or directory"),
    ):
        with pytest.raises(DataFileError) as caught:
            save_trace(TRACE, tmp_path / name, ABOUT)
        assert str(caught.value) == f"{tmp_path / name}: cannot write the trace: {reason}"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def test_flawed_traces_are_not_saved(tmp_path: Path) -> None:
    """No file is written that could not be read again."""
    with pytest.raises(ValueError, match="block 0 dies without living"):
        save_trace(Trace((Free(0),), SITES, (2,)), tmp_path / "t", {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_trace(TRACE, tmp_path / "t", {"rate": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a folder are refused in one line each."""
    for name, reason in (("missing", "No such file or directory"), ("", "Is a directory")):
        with pytest.raises(DataFileError) as caught:
            load_trace(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: cannot read the trace: {reason}"


WHOLE = pack(DOCUMENT)


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (b"", "it is cut short"),
        (WHOLE[:-1], "it is cut short"),
        (WHOLE[: len(WHOLE) // 2], "it is cut short"),
        (WHOLE + b"\0", "something stands behind its end"),
        (WHOLE + WHOLE, "something stands behind its end"),
        (b"{}", "Error -3 while decompressing data: incorrect header check"),
        (zlib.compress(b"{}"), "Error -3 while decompressing data: incorrect header check"),
        (
            WHOLE[:-5] + bytes([WHOLE[-5] ^ 1]) + WHOLE[-4:],
            "Error -3 while decompressing data: incorrect data check",
        ),
        (gzip.compress(b"", mtime=0), "Expecting value: line 1 column 1 (char 0)"),
        (
            gzip.compress(b"\xff\xfe", mtime=0),
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (gzip.compress(b'{"format": NaN}', mtime=0), "NaN is no finite number"),
        (gzip.compress(b'{"format": -Infinity}', mtime=0), "-Infinity is no finite number"),
        (gzip.compress(b'{"format": 1e999}', mtime=0), "1e999 is no finite number"),
        (
            gzip.compress(b"[" * 10**6, mtime=0),
            "maximum recursion depth exceeded while decoding a JSON array",
        ),
        (
            gzip.compress(b'{"a":' * 10**6, mtime=0),
            "maximum recursion depth exceeded while decoding a JSON object",
        ),
        (pack([]), "it names no format"),
        (pack(None), "it names no format"),
        (pack("format"), "it names no format"),
        (pack({}), "it names no format"),
        (pack({"format": True}), "it names no format"),
        (pack({"format": 1.0}), "it names no format"),
        (pack({"format": "1\n2"}), "it names no format"),
        (pack({"format": 8}), "its format is 8, this version reads 1 to 7"),
        (pack({"format": 1}), "the document: about is missing"),
    ],
)
def test_no_trace_file(tmp_path: Path, content: bytes, flaw: str) -> None:
    """What is no gzip around a JSON object of this format is refused in one line that says why."""
    assert refusal(content, tmp_path).startswith(broken(flaw).removesuffix("; trace anew"))


@pytest.mark.parametrize(
    ("key", "value", "flaw"),
    [
        ("surplus", 1, "the document: unknown key 'surplus'"),
        ("about", [["batch", 8]], "about: no mapping"),
        ("batches", 2, "batches: no list"),
        ("batches", [], "batch sizes () are no positive numbers"),
        ("batches", [0, 2], "batch sizes (0, 2) are no positive numbers"),
        ("batches", ["2", "3"], "batches: str found, int wanted"),
        ("batches", [2.0, 3], "batches: float found, int wanted"),
        ("batches", [True, 3], "batches: bool found, int wanted"),
        ("batches", [2], "event 3: sizes per sample in a trace of one batch size"),
        ("unknown_ops", "aten", "unknown_ops: no list"),
        ("unknown_ops", {"aten": 1}, "unknown_ops: no list"),
        ("notes", [1], "notes: int found, str wanted"),
        ("notes", [["a"]], "notes: list found, str wanted"),
        ("sites", [["", "to"]], "sites: no mapping"),
        ("sites", {"module": ["a"], "op": ["b", "c"]}, "sites: columns of unequal length"),
        ("sites", {"module": ["a"], "op": ["b"]}, "event 3: there is no site 1"),
        ("kind", ["m", "a", "m", "a", "f", "m"], "kind: no text of the letters a, f and m"),
        ("kind", "mamafx", "kind: no text of the letters a, f and m"),
        ("kind", "mamaf", "kind: 2 times m, but 3 of such events"),
        ("kind", "mamafma", "kind: 3 times a, but 2 of such events"),
        ("kind", "", "kind: 0 times a, but 2 of such events"),
        ("kind", "maamfm", None),
        ("kind", "fmaamm", "event 0: block 7 dies without living"),
        ("alloc.role", ["parameters", "weights"], "alloc.role: 'weights' is not a valid Role"),
        ("alloc.role", [0, -1], "alloc.role: int found, str wanted"),
        ("alloc.role", ["parameters", ["activations"]], "alloc.role: list found, str wanted"),
        ("alloc.site", [0, -1], "event 3: there is no site -1"),
        ("alloc.site", [0], "alloc: columns of unequal length"),
        ("alloc.site", None, "alloc.site: no list"),
        ("alloc.extra", [0, 1], "alloc: unknown key 'extra'"),
        ("alloc.fixed_bytes", [0, 1], "event 1: block 0 has no positive size"),
        ("alloc.fixed_bytes", [2**63, 1], "alloc.fixed_bytes: a number beyond 9223372036854775807"),
        ("alloc.fixed_bytes", [1, -(10**4000)], "alloc.fixed_bytes: a number beyond 9223372036854775807"),
        ("alloc.block", [7, 7], "event 3: block 7 is born twice"),
        ("free.block", [7, 7], "kind: 1 times f, but 2 of such events"),
        ("free.block", [0.0], "free.block: float found, int wanted"),
        ("mark.phase", ["setup", "forward", "END"], "mark.phase: 'END' is not a valid Phase"),
        ("mark.step", [0, 2, 1], "event 5: step 1 comes after step 2"),
        ("mark.step", [0, 1, 1, 1], "mark: columns of unequal length"),
        ("mark", None, "mark: no mapping"),
    ],
)
def test_broken_documents(tmp_path: Path, key: str, value: object, flaw: str | None) -> None:
    """A document with one wrong value is refused in one line that names the place; None: it is read."""
    document = deepcopy(DOCUMENT)
    inner = document
    *path, last = key.split(".")
    for step in path:
        inner = inner[step]
    inner[last] = value
    if flaw is None:
        load(pack(document), tmp_path)
    else:
        assert refusal(pack(document), tmp_path) == broken(flaw)


@pytest.mark.parametrize("key", [*DOCUMENT, *(f"alloc.{name}" for name in DOCUMENT["alloc"])])
def test_missing_keys(tmp_path: Path, key: str) -> None:
    """A document that lacks a key is refused with its name."""
    document = deepcopy(DOCUMENT)
    outer, _, inner = key.partition(".")
    if inner:
        del document[outer][inner]
        assert refusal(pack(document), tmp_path) == broken(f"{outer}: {inner} is missing")
    else:
        del document[outer]
        said = "it names no format" if key == "format" else f"the document: {key} is missing"
        assert refusal(pack(document), tmp_path) == broken(said)


def of_loops(**changes: object) -> dict[str, Any]:
    """A document of format 4: the same events, and loops that are not looked at here."""
    own = {key: DOCUMENT[key] for key in DOCUMENT if key not in ("format", "about")}
    own = {**own, "alloc": {**own["alloc"], "optional": [False, False]}}
    own["details"] = {name: [] for name in ("block", "shape", "dtype", "source", "code")}
    return {"format": 4, "about": ABOUT, "traces": [own], "loops": [{"chips": {}}]} | changes


def test_loops_round_trip(tmp_path: Path) -> None:
    """Loops come back as they were written, and a reader of one trace refuses them."""
    path = tmp_path / "t.trace"
    save_loops([(TRACE, {"chips": {}}), (TRACE, {"chips": {"8.6": 1}})], path, ABOUT)
    assert load_saved(path) == Saved((TRACE, TRACE), ({"chips": {}}, {"chips": {"8.6": 1}}), ABOUT)
    assert refusal(path.read_bytes(), tmp_path) == (
        "holds loops in place of one trace; plan from it with --trace"
    )
    save_loops([(TRACE, {"chips": {}})], path, ABOUT)
    assert json.loads(gzip.decompress(path.read_bytes())) == of_loops()


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"traces": []}, "traces and loops are no lists of one length"),
        ({"loops": []}, "traces and loops are no lists of one length"),
        ({"traces": [], "loops": []}, "traces and loops are no lists of one length"),
        ({"traces": {"kind": ""}}, "traces and loops are no lists of one length"),
        ({"loops": [3]}, "loops: no mapping"),
        ({"traces": [[]]}, "traces: no mapping"),
        ({"traces": [DOCUMENT]}, "traces: details is missing"),
        ({"about": 1}, "about: no mapping"),
        ({"kind": ""}, "the document: unknown key 'kind'"),
    ],
)
def test_broken_loops(tmp_path: Path, changes: dict[str, object], flaw: str) -> None:
    """A document of loops is read as strictly as one of a trace."""
    assert refusal(pack(of_loops(**changes)), tmp_path) == broken(flaw)


def test_long_errors_are_cut(tmp_path: Path) -> None:
    """A long value out of the file does not fill the screen."""
    document = deepcopy(DOCUMENT)
    document["alloc"]["role"] = ["parameters", "x\n" * 10**5]
    assert len(refusal(pack(document), tmp_path)) < 260


def test_bombs_do_not_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that would unfold to 64 MiB is refused within little more than the bound's memory."""
    monkeypatch.setattr(trace_file, "LARGEST_FILE_BYTES", 2**20)
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 2**17
    said, peak_bytes = refusal_and_memory(bomb, tmp_path)
    assert said == broken("it holds more than 1048576 bytes")
    assert peak_bytes < 2**23


def test_long_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file out of which nothing comes, no more than the bound is read before it is refused."""
    monkeypatch.setattr(trace_file, "LARGEST_FILE_BYTES", 2**10)
    content = WHOLE[:10] + b"\0\0\0\xff\xff" * 2**20  # empty blocks after the header
    said, peak_bytes = refusal_and_memory(content, tmp_path)
    assert said == broken("it holds more than 1024 bytes")
    assert peak_bytes < 2**20


@UNTIMED
@given(st.data())
def test_damaged_bytes(tmp_path_factory: Folder, data: st.DataObject) -> None:
    """A file with flipped, lost or surplus bytes is refused in one line or reads as before."""
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "drop"])):
            case "flip":
                content[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[max(place, 1) :]
            case "insert":
                content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case _ if len(content) > 1:
                del content[place]
    outcome_of(bytes(content), tmp_path_factory.getbasetemp(), same=True)


@UNTIMED
@example([], {"format": 1})
@given(st.lists(st.integers(0, 10**6), max_size=3), values)
def test_damaged_documents(tmp_path_factory: Folder, turns: list[int], value: object) -> None:
    """A document with any value at any place is refused in one line or reads as a trace without a flaw."""
    root: dict[Any, Any] = {"root": deepcopy(DOCUMENT)}
    outer: Any = root
    key: Any = "root"
    for turn in turns:
        inner = outer[key]
        if isinstance(inner, dict | list) and inner:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            outer, key = inner, keys[turn % len(keys)]
    outer[key] = value
    outcome_of(pack(root["root"]), tmp_path_factory.getbasetemp(), same=False)


def outcome_of(content: bytes, folder: Path, same: bool) -> None:
    path = folder / "damaged.trace"
    path.write_bytes(content)
    try:
        trace, about = load_trace(path)
    except DataFileError as error:
        assert len(str(error).splitlines()) == 1
        return
    check(trace)
    assert not same or (trace, about) == (TRACE, ABOUT)
    save_trace(trace, path, about)
    assert load_trace(path) == (trace, about)
