"""Traces as files: what is written comes back, whole or not at all, and nothing else is accepted."""

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
from planner.program.events import Category, Free, Phase, PhaseStart, Site, TensorProvenance
from planner.program.program import AffineAlloc, Program, ProgramEvent, validate_program
from planner.store import codec as trace_file
from planner.store.codec import load_programs, save_programs
from tests.helpers.traces import program_of, programs

EVENTS: tuple[ProgramEvent, ...] = (
    PhaseStart(0, Phase.SETUP),
    AffineAlloc(0, 37632, 0, Category.PARAMETER, 0),
    PhaseStart(1, Phase.FORWARD),
    AffineAlloc(7, -64, 802816, Category.ACTIVATION, 1),
    Free(7),
    PhaseStart(1, Phase.END),
)
SITES = (Site("", "to"), Site("conv1", "aten.convolution.default"))
PROGRAM = program_of(EVENTS, SITES, ("aten.mystery.default",), ("traced with torch 2.13",))
ABOUT = {"job": {"model": "resnet50", "steps": 3}, "batch": 128, "capability": [8, 6], "rate": 0.5}
TRACE: dict[str, Any] = {
    "batches": [2, 3],
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
        "optional": [False, False],
    },
    "free": {"block": [7]},
    "mark": {"step": [0, 1, 1], "phase": ["setup", "forward", "end"]},
}
DOCUMENT: dict[str, Any] = {
    "format": 1,
    "about": ABOUT,
    "traces": [TRACE],
    "loops": [
        {
            "outputs": [],
            "kernels": {"kind": [], "site": [], "before": [], "outputs": [], "takes_blas": []},
            "pool": [],
            "chips": {"8.6": {"blas_bytes": 0, "first": 1, "last": 2**24, "cases": []}},
        }
    ],
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


def load(content: bytes, folder: Path) -> tuple[Program, dict[str, Any]]:
    path = folder / "t.trace"
    path.write_bytes(content)
    return read(path)


def read(path: Path) -> tuple[Program, dict[str, Any]]:
    """The one program of a file, and the description of its job."""
    file = load_programs(path)
    (encoded,) = file.programs
    assert encoded.load_target((8, 6))
    return encoded.program, file.about


def refusal(content: bytes, folder: Path) -> str:
    """The refusal of a file, without its path; one line."""
    with pytest.raises(DataFileError) as caught:
        load(content, folder)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text.removeprefix(f"{folder / 't.trace'}: ")


def refusal_and_memory(content: bytes, folder: Path) -> tuple[str, int]:
    """Return the refusal, and the peak of the memory that it took."""
    (folder / "t.trace").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataFileError) as caught:
        load_programs(folder / "t.trace")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return str(caught.value).removeprefix(f"{folder / 't.trace'}: "), peak_bytes


def broken(flaw: str) -> str:
    return f"broken trace file: {flaw}; capture it again"


@given(programs(), st.dictionaries(texts, finite, max_size=4))
def test_round_trip(tmp_path_factory: Folder, program: Program, about: dict[str, Any]) -> None:
    """A saved program comes back equal, with its description."""
    path = tmp_path_factory.getbasetemp() / "round.trace"
    save_programs([program], path, about)
    assert read(path) == (program, about)


def test_layout(tmp_path: Path) -> None:
    """A file is gzip around the JSON that the module describes."""
    save_programs([PROGRAM], tmp_path / "t", ABOUT)
    assert json.loads(gzip.decompress((tmp_path / "t").read_bytes())) == DOCUMENT


def test_reads_the_layout(tmp_path: Path) -> None:
    """A file of that layout is read from any writer."""
    assert load(pack(DOCUMENT), tmp_path) == (PROGRAM, ABOUT)


def test_equal_bytes(tmp_path: Path) -> None:
    """Equal traces make equal bytes, at any hour and with any name of the file."""
    save_programs([PROGRAM], tmp_path / "one", ABOUT)
    save_programs([deepcopy(PROGRAM)], tmp_path / "other.json.gz", deepcopy(ABOUT))
    packed = (tmp_path / "one").read_bytes()
    assert packed == (tmp_path / "other.json.gz").read_bytes()
    assert packed[4:8] == bytes(4)  # gzip's time of writing


def test_saving_replaces(tmp_path: Path) -> None:
    """An older file gives way to the new one, and nothing else stays behind."""
    path = tmp_path / "t.trace"
    path.write_text("older")
    save_programs([PROGRAM], path, ABOUT)
    assert read(path) == (PROGRAM, ABOUT)
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
    ("method", "fault", "error", "message"),
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
    message: str,
) -> None:
    """If writing fails half-way, is interrupted, or the old file cannot be replaced, that stays, and no
    partial one does.
    """
    path = tmp_path / "t.trace"
    path.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, fault)
        with pytest.raises(error) as caught:
            save_programs([PROGRAM], path, ABOUT)
    assert str(caught.value) == message.format(path)
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
            save_programs([PROGRAM], tmp_path / name, ABOUT)
        assert str(caught.value) == f"{tmp_path / name}: cannot write the trace: {reason}"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a folder are refused in one line each."""
    for name, reason in (("missing", "No such file or directory"), ("", "Is a directory")):
        with pytest.raises(DataFileError) as caught:
            load_programs(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: cannot read the trace: {reason}"


WHOLE = pack(DOCUMENT)


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (b"", "it is cut short"),
        (WHOLE[:-1], "it is cut short"),
        (WHOLE[: len(WHOLE) // 2], "it is cut short"),
        (WHOLE + b"\0", "it has data after its end"),
        (WHOLE + WHOLE, "it has data after its end"),
        (b"{}", "Error -3 while decompressing data: incorrect header check"),
        (zlib.compress(b"{}"), "Error -3 while decompressing data: incorrect header check"),
        (
            WHOLE[:-5] + bytes([WHOLE[-5] ^ 1]) + WHOLE[-4:],
            "Error -3 while decompressing data: incorrect data check",
        ),
        (gzip.compress(b"", mtime=0), "Input data was truncated"),
        (
            gzip.compress(b"\xff\xfe", mtime=0),
            "JSON is malformed: invalid character (byte 0)",
        ),
        (gzip.compress(b'{"format": NaN}', mtime=0), "JSON is malformed: invalid character (byte 11)"),
        (gzip.compress(b'{"format": -Infinity}', mtime=0), "JSON is malformed: invalid character (byte 12)"),
        (gzip.compress(b'{"format": 1e999}', mtime=0), "Number out of range - at `$.format`"),
        (
            gzip.compress(b"[" * 10**6, mtime=0),
            "Expected `object`, got `array`",
        ),
        (
            gzip.compress(b'{"a":' * 10**6, mtime=0),
            "maximum recursion depth exceeded while deserializing an object",
        ),
        (pack([]), "Expected `object`, got `array`"),
        (pack(None), "Expected `object`, got `null`"),
        (pack("format"), "Expected `object`, got `str`"),
        (pack({}), "Object missing required field `format`"),
        (pack({"format": True}), "Expected `int`, got `bool` - at `$.format`"),
        (pack({"format": 1.0}), "Expected `int`, got `float` - at `$.format`"),
        (pack({"format": "1\n2"}), "Expected `int`, got `str` - at `$.format`"),
        (pack({"format": 1}), "Object missing required field `about`"),
        (pack({"format": 2}), "its format is 2, this version reads 1"),
    ],
)
def test_no_trace_file(tmp_path: Path, content: bytes, flaw: str) -> None:
    """A file without gzip around a JSON object of this format is refused in one line with the reason."""
    assert refusal(content, tmp_path).startswith(broken(flaw).removesuffix("; capture it again"))


@pytest.mark.parametrize(
    ("key", "value", "flaw"),
    [
        ("surplus", 1, "Object contains unknown field `surplus` - at `$`"),
        ("batches", 2, "Expected `array`, got `int` - at `$.batches`"),
        ("batches", [], "Expected `array` of length >= 1 - at `$.batches`"),
        ("batches", [0, 2], "batch sizes [0, 2]: not positive, or a block without bytes"),
        ("batches", ["2", "3"], "Expected `int`, got `str` - at `$.batches[0]`"),
        ("batches", [2.0, 3], "Expected `int`, got `float` - at `$.batches[0]`"),
        ("batches", [True, 3], "Expected `int`, got `bool` - at `$.batches[0]`"),
        ("batches", [2], "block 7 grows with the batch in a trace of one batch size"),
        ("unknown_ops", "aten", "Expected `array`, got `str` - at `$.unknown_ops`"),
        ("unknown_ops", {"aten": 1}, "Expected `array`, got `object` - at `$.unknown_ops`"),
        ("notes", [1], "Expected `str`, got `int` - at `$.notes[0]`"),
        ("notes", [["a"]], "Expected `str`, got `array` - at `$.notes[0]`"),
        ("sites", [["", "to"]], "Expected `object`, got `array` - at `$.sites`"),
        ("sites", {"module": ["a"], "op": ["b", "c"]}, "zip() argument 2 is longer than argument 1"),
        ("sites", {"module": ["a"], "op": ["b"]}, "event 3: there is no site 1"),
        ("kind", ["m", "a", "m", "a", "f", "m"], "Expected `str`, got `array` - at `$.kind`"),
        ("kind", "mamafx", "Expected `str` matching regex '^[aefm]*$' - at `$.kind`"),
        ("kind", "mamaf", "kind: fewer letters than events"),
        ("kind", "mamafma", "kind: 3 times 'a', but fewer such events"),
        ("kind", "", "kind: fewer letters than events"),
        ("kind", "maamfm", None),
        ("kind", "fmaamm", "event 0: block 7 is freed without being allocated"),
        ("alloc.role", ["parameters", "weights"], "Invalid enum value 'weights' - at `$.alloc.role[1]`"),
        ("alloc.role", [0, -1], "Expected `str`, got `int` - at `$.alloc.role[0]`"),
        ("alloc.role", ["parameters", ["activations"]], "Expected `str`, got `array` - at `$.alloc.role[1]`"),
        ("alloc.site", [0, -1], "event 3: there is no site -1"),
        ("alloc.site", [0], "zip() argument 5 is shorter than arguments 1-4"),
        ("alloc.site", None, "Expected `array`, got `null` - at `$.alloc.site`"),
        ("alloc.extra", [0, 1], "Object contains unknown field `extra` - at `$.alloc`"),
        ("alloc.fixed_bytes", [0, 1], "batch sizes [2, 3]: not positive, or a block without bytes"),
        (
            "alloc.fixed_bytes",
            [2**63, 1],
            "Expected `int` <= 9223372036854775807 - at `$.alloc.fixed_bytes[0]`",
        ),
        (
            "alloc.fixed_bytes",
            [1, -(10**4000)],
            "Expected `int` >= -9223372036854775807 - at `$.alloc.fixed_bytes[1]`",
        ),
        ("alloc.block", [7, 7], "event 3: block 7 is allocated twice"),
        ("free.block", [7, 7], "kind: fewer letters than events"),
        ("free.block", [0.0], "Expected `int`, got `float` - at `$.free.block[0]`"),
        ("mark.phase", ["setup", "forward", "END"], "Invalid enum value 'END' - at `$.mark.phase[2]`"),
        ("mark.step", [0, 2, 1], "event 5: step 1 comes after step 2"),
        ("mark.step", [0, 1, 1, 1], "zip() argument 2 is shorter than argument 1"),
        ("mark", None, "Expected `object`, got `null` - at `$.mark`"),
    ],
)
def test_broken_documents(tmp_path: Path, key: str, value: object, flaw: str | None) -> None:
    """A trace with one wrong value is refused in one line that names the place; None: it is read."""
    document = deepcopy(DOCUMENT)
    inner = document["traces"][0]
    *path, last = key.split(".")
    for step in path:
        inner = inner[step]
    inner[last] = value
    if flaw is None:
        load(pack(document), tmp_path)
    else:
        assert refusal(pack(document), tmp_path) == broken(flaw.replace("`$", "`$.traces[0]"))


@pytest.mark.parametrize("key", [*TRACE, *(f"alloc.{name}" for name in TRACE["alloc"] if name != "optional")])
def test_missing_keys(tmp_path: Path, key: str) -> None:
    """A trace that lacks a key is refused with its name."""
    document = deepcopy(DOCUMENT)
    trace = document["traces"][0]
    outer, _, inner = key.partition(".")
    del (trace[outer] if inner else trace)[inner or outer]
    where = f".{outer}" if inner else ""
    message = f"Object missing required field `{inner or outer}` - at `$.traces[0]{where}`"
    assert refusal(pack(document), tmp_path) == broken(message)


def test_optional_columns(tmp_path: Path) -> None:
    """Allocations that may fail, and the provenance of blocks, come back."""
    details = {"block": [7], "shape": [[1, 2]], "dtype": ["float32"], "source": ["a:1"], "code": ["x"]}
    alloc = TRACE["alloc"] | {"optional": [False, True]}
    trace = TRACE | {"alloc": alloc, "details": details}
    program, _ = load(pack(DOCUMENT | {"traces": [trace]}), tmp_path)
    assert [event.may_fail for event in program.events if isinstance(event, AffineAlloc)] == [False, True]
    assert program.provenance == (TensorProvenance(7, (1, 2), "float32", "a:1", "x"),)


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"traces": []}, "zip() argument 2 is longer than argument 1"),
        ({"loops": []}, "zip() argument 2 is shorter than argument 1"),
        ({"traces": {"kind": ""}}, "Expected `array`, got `object` - at `$.traces`"),
        ({"loops": [3]}, "Expected `object`, got `int` - at `$.loops[0]`"),
        ({"traces": [[]]}, "Expected `object`, got `array` - at `$.traces[0]`"),
        ({"traces": [DOCUMENT]}, "Object contains unknown field `format` - at `$.traces[0]`"),
        ({"about": 1}, "Expected `object`, got `int` - at `$.about`"),
        ({"kind": ""}, "Object contains unknown field `kind`"),
    ],
)
def test_broken_programs(tmp_path: Path, changes: dict[str, object], flaw: str) -> None:
    """A document's other fields are validated as strictly as its traces."""
    assert refusal(pack(DOCUMENT | changes), tmp_path) == broken(flaw)


def test_long_errors_are_cut(tmp_path: Path) -> None:
    """A long value out of the file does not fill the screen."""
    document = deepcopy(DOCUMENT)
    document["traces"][0]["alloc"]["role"] = ["parameters", "x\n" * 10**5]
    assert len(refusal(pack(document), tmp_path)) < 260


def test_bombs_do_not_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that would unfold to 64 MiB is refused within little more than the bound's memory."""
    monkeypatch.setattr(trace_file, "LARGEST_FILE_BYTES", 2**20)
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 2**17
    message, peak_bytes = refusal_and_memory(bomb, tmp_path)
    assert message == broken("it holds more than 1048576 bytes")
    assert peak_bytes < 2**23


def test_long_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the bound is read, of a file out of which nothing comes, before it is refused."""
    monkeypatch.setattr(trace_file, "LARGEST_FILE_BYTES", 2**10)
    content = WHOLE[:10] + b"\0\0\0\xff\xff" * 2**20  # empty blocks after the header
    message, peak_bytes = refusal_and_memory(content, tmp_path)
    assert message == "cannot read the trace: it is larger than 1,024 bytes"
    assert peak_bytes < 2**20


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
        program, about = read(path)
    except DataFileError as error:
        assert len(str(error).splitlines()) == 1
        return
    validate_program(program, (2, 3))
    assert not same or (program, about) == (PROGRAM, ABOUT)
    save_programs([program], path, about)
    assert read(path) == (program, about)
