"""Any bytes in any file: a valid result or one line; no other exception, no hang, no code, bounded memory."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from planner.allocator.config import parse_alloc_conf
from planner.errors import PlannerError
from planner.jobs import parse_model_arg, parse_tensor_spec, split_model
from tests.helpers.file_readers import READERS, Reader

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 30  # of one file; the slowest takes 0.1
MOST_BYTES = 256 * 2**20  # that a reader may allocate for one file; none of them has more than a few kB
_EXECUTING = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "urllib.Request", "ctypes.dlopen", "exec"),
}
_events: list[str] = []
_active: list[bool] = []
TOKENS = [
    token.encode("utf-8", "surrogatepass")
    for token in (
        *("!!python/object/apply:os.system ['touch ran']", "!!bool maybe", "!!timestamp soon", "!!int ''"),
        *(
            "!!binary x",
            "!!set {a}",
            "&a [*a]",
            "*a",
            "<<: *a",
            "{",
            "[",
            "]",
            "}",
            ": ",
            "\n",
            "- ",
            "---\n",
        ),
        *("null", "true", "-1", "0", "1e999", ".nan", ".inf", "NaN", "Infinity", "9" * 5000, "0x10", "1:30"),
        *(
            "2024-01-01",
            '"',
            "'",
            "\\ud800",
            "\ud800",
            "\0",
            "\ufeff",
            "file.py:x",
            "hf:x",
            "1x2x3",
            "scalar",
        ),
        *("a" * 300, "," * 50, "\u2028", "\r", "\x1b[31m"),
    )
]
OPCODES = (
    b"\x80\x04\x95\x8c\x94h0()]}tubesR.cos\nsystem\nN\x88\x89KMJI\x8a\x8brqjXB\x8d\x8e\x93\x92\x81\x8fPQ"
)


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if _active and event in _EXECUTING:
        _events.append(f"{event} {str(arguments)[:100]}")


@pytest.fixture(scope="module", autouse=True)
def _recording() -> None:
    """Listen to what the interpreter executes; a hook stays until the process ends."""
    sys.addaudithook(_record)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let its body allocate `MOST_BYTES` more than the process has, if the kernel counts them (Linux)."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    allocated = next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (allocated * 1024 + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@contextmanager
def executing_nothing() -> Iterator[None]:
    """Assert that its body starts no program, opens no connection, executes no code and ends."""

    def hang(*_: object) -> None:
        raise AssertionError(f"no end in {LONGEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    _events.clear()
    _active.append(True)
    try:
        yield
    finally:
        _active.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _events == []


def read(reader: Reader, content: bytes, folder: Path) -> str:
    """The message about a file; "" where it is right."""
    path = folder / reader.name
    path.write_bytes(content)
    try:
        with executing_nothing(), limited_memory():
            reader.load(path)
    except PlannerError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return str(error)
    return ""


@st.composite
def mutated(draw: st.DrawFn, valid: bytes, tokens: list[bytes]) -> bytes:
    """A valid file with some cuts, insertions, repetitions and flipped bytes."""
    content = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        put = draw(
            st.one_of(
                st.sampled_from(tokens), st.binary(max_size=4), st.just(b""), st.just(content[start:end] * 2)
            )
        )
        content = content[:start] + put + content[end:]
    return content


def values() -> st.SearchStrategy[Any]:
    """Values that JSON and YAML can hold, the strange included."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**63, -(2**63), 2**64, 10**400, 0, -1, 1]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["", "file.py:x", "scalar:int64", "3x224x224", "zoo:CNN", "a" * 400, "\0", "é"]),
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    )


@st.composite
def with_another_value(draw: st.DrawFn, document: Any) -> Any:
    """The document with one value replaced, one key or item removed, or one added."""
    if isinstance(document, dict | list) and document and draw(st.integers(0, 5)):
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key = draw(st.sampled_from(keys))
        copied: Any = dict(document) if isinstance(document, dict) else list(document)
        turn = draw(st.integers(0, 11))
        if turn == 0:
            del copied[key]
        elif turn == 1 and isinstance(copied, dict):
            copied[draw(st.text(max_size=6))] = draw(values())
        elif turn == 1:
            copied.append(draw(values()))
        else:
            copied[key] = draw(with_another_value(document[key]))
        return copied
    return draw(values())


def is_yaml(reader: Reader) -> bool:
    return reader.name.endswith(".yaml") and reader.pack is bytes


def parse(reader: Reader) -> Any:
    """The valid file as plain data."""
    return yaml.safe_load(reader.valid) if is_yaml(reader) else json.loads(reader.valid)


def write(reader: Reader, document: Any) -> bytes:
    text = yaml.safe_dump(document) if is_yaml(reader) else json.dumps(document)
    return reader.pack(f"{text}\n".encode())


def count(runs: int) -> settings:
    return settings(max_examples=runs, database=None)


@pytest.mark.parametrize("name", READERS)
def test_the_valid_files_are_valid(name: str, tmp_path: Path) -> None:
    """The fuzzer's own valid files are read without a complaint."""
    reader = READERS[name]
    assert read(reader, reader.pack(reader.valid), tmp_path) == ""


@pytest.mark.parametrize("name", READERS)
def test_any_bytes(name: str, runs: int) -> None:
    """Random bytes, cut and spoilt files are refused in one line, or happen to be right."""
    reader = READERS[name]
    tokens = [bytes([code]) for code in OPCODES] if name == "snapshot" else TOKENS
    files = st.one_of(
        st.binary(max_size=200),
        mutated(reader.pack(reader.valid), tokens),
        mutated(reader.valid, tokens).map(reader.pack),
    )
    messages = _fuzz(reader, files, runs)
    print(f"\n{name}: {len(messages)} files, {sum(map(bool, messages))} refused in one line, 0 otherwise")


@pytest.mark.parametrize("name", [name for name in READERS if name != "snapshot"])
def test_any_values(name: str, runs: int) -> None:
    """A document in which any value is another, or missing, or too much, is refused in one line or right."""
    reader = READERS[name]
    files = with_another_value(parse(reader)).map(lambda document: write(reader, document))
    messages = _fuzz(reader, files, runs)
    print(f"\n{name}: {len(messages)} documents, {sum(map(bool, messages))} refused in one line, 0 otherwise")


def _fuzz(reader: Reader, files: st.SearchStrategy[bytes], runs: int) -> list[str]:
    messages: list[str] = []
    with TemporaryDirectory() as folder:
        read(reader, reader.pack(reader.valid), Path(folder))  # imports what it needs

        @count(runs)
        @given(files)
        def fuzz(content: bytes) -> None:
            messages.append(read(reader, content, Path(folder)))

        fuzz()
    return messages


@pytest.mark.parametrize("parse_text", [parse_alloc_conf, parse_model_arg, parse_tensor_spec, split_model])
def test_any_words_of_the_command_line(parse_text: Callable[[str], object], runs: int) -> None:
    """Small languages of options refuse any text in one line, or read it."""
    pieces = st.sampled_from(
        ["=", ":", "x", ",", "[", "]", "1", "0", "scalar", "int64", "!!", "a", "'", "\n", "é"]
    )

    @count(5 * runs)
    @given(st.one_of(st.text(), st.lists(pieces).map("".join)))
    def fuzz(text: str) -> None:
        try:
            with executing_nothing():
                parse_text(text)
        except PlannerError as error:
            assert len(str(error).splitlines()) == 1

    fuzz()


@pytest.mark.parametrize("name", [name for name in READERS if is_yaml(READERS[name])])
def test_a_yaml_bomb_is_refused_or_small(name: str, tmp_path: Path) -> None:
    """Aliases of aliases, which stand for 10**9 values, and 200,000 levels come to a quick end."""
    reader = READERS[name]
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    document = parse(reader)
    first = next(iter(document))
    for text in (
        bomb + f"{first}: *a29\n",
        f"{first}: " + "[" * 200_000 + "]" * 200_000,
        f"{first}: " + "{a: " * 200_000 + "}" * 200_000,
        f"{first}:\n" + "- " * 200_000 + "x",
        "".join(" " * level + "a:\n" for level in range(2_000)),
        reader.valid.decode().replace("args: {", f"args: {{bomb: {_nest(30)}, ", 1),
        reader.valid.decode().replace("model_arg: {", f"model_arg: {{bomb: {_nest(30)}, ", 1),
    ):
        if text != reader.valid.decode():
            assert read(reader, text.encode(), tmp_path) != ""


def _nest(depth: int) -> str:
    levels = "".join(f", &b{level} [*b{level - 1}, *b{level - 1}]" for level in range(1, depth))
    return f"[&b0 [x, x]{levels}]"


@pytest.mark.parametrize("name", [name for name in READERS if not is_yaml(READERS[name])])
def test_deep_and_huge_values_are_refused(name: str, tmp_path: Path) -> None:
    """JSON and pickles nested 200,000 deep, and a number of 5,000 digits, are no crash."""
    reader = READERS[name]
    for content in (
        b"[" * 200_000 + b"]" * 200_000 + b"\n",
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"\n",
        b'{"schema": ' + b"9" * 5_000 + b"}\n",
        b"\x80\x04" + b"(" * 200_000 + b"l" * 200_000 + b".",
        b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    ):
        read(reader, reader.pack(content), tmp_path)


@pytest.mark.slow
def test_a_coverage_guided_fuzzer_finds_nothing(runs: int) -> None:
    """Atheris, which looks for inputs that reach new code, meets nothing but results and single lines."""
    pytest.importorskip("atheris", reason="atheris is a wheel for Linux on x86-64 up to Python 3.13")
    total = 25 * runs
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.robustness.fuzz_targets",
            f"-atheris_runs={total}",
            "-seed=1",
            "-verbosity=0",
            "-rss_limit_mb=0",  # libFuzzer would count the peak of the process that starts it
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"\ncoverage-guided: {total} files, 0 otherwise than one line")
