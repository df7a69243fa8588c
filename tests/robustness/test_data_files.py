"""Files that are data, whatever they contain: nothing in them is executed, nothing takes all memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.allocator.history.snapshot_reader import load_snapshot
from planner.cli import run
from planner.errors import DataFileError

CATALOGUE = "evil:\n  source: {file}:build\n  about: Innocent.\n  inputs: ['4']\n  target: scalar:int64\n"
CAMPAIGN = "about: a\ngroups:\n  - {{about: b, models: ['{file}:build'], batches: [1, 2], input: ['4']}}\n"
PROCESS = "models: {{net: '{file}:build'}}\nsteps: [empty_cache]\n"
SWEEP = "about: a\nmodels: [{{model: '{file}:build', input: ['4']}}]\nrecipes: {{sgd: {{}}}}\ngpus: [L4]\n"
COMMANDS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "catalogue": (CATALOGUE, lambda path: ["max-batch", "--models", path, "--model", "evil", "--gpu", "L4"]),
    "campaign": (CAMPAIGN, lambda path: ["calibrate", "--campaign", path]),
    "process": (PROCESS, lambda path: ["replay", path]),
    "sweep": (SWEEP, lambda path: ["sweep", path]),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_data_file_names_no_code(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A FILE.py:NAME in a catalogue, campaign, process or sweep file is refused with exit code 4 and its
    line, and the file is not run.
    """
    text, command = COMMANDS[kind]
    code, path = tmp_path / "evil.py", tmp_path / "data.yaml"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path.write_text(text.format(file=code))
    assert run(command(str(path))) == 4
    message = capsys.readouterr().err
    assert "would run code; --allow-code lets files name code that you trust" in message
    assert message.startswith(f"planner: {path} line ") and len(message.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_allow_code_lets_a_catalogue_name_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --allow-code the same catalogue is read and its code runs."""
    code, path = tmp_path / "mine.py", tmp_path / "data.yaml"
    code.write_text("from torch import nn\ndef build():\n    return nn.Linear(4, 4)\n")
    path.write_text(CATALOGUE.format(file=code))
    command = ["max-batch", "--models", str(path), "--model", "evil", "--gpu-mib", "2000", "--json"]
    assert run([*command, "--allow-code"]) == 0
    assert json.loads(capsys.readouterr().out)["max_batch"] > 0


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system", "!!python/module:os ''"],
)
def test_yaml_tags_execute_nothing(
    tmp_path: Path, kind: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags that PyYAML's unsafe loaders would run are refused by every reader, wherever they stand."""
    text, command = COMMANDS[kind]
    path = tmp_path / "data.yaml"
    monkeypatch.chdir(tmp_path)
    for key in ("Innocent.", "{file}:build", "scalar:int64", "about: a", "[1, 2]", "empty_cache", "[L4]"):
        if key in text:
            path.write_text(text.replace(key, key.partition(": ")[0] + ": " + tag if ": " in key else tag))
            assert run(command(str(path))) in (2, 4)
    assert not (tmp_path / "ran").exists()


def test_a_snapshot_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would call something when it is loaded is refused before it does."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(DataFileError, match=r"it names os\.system, which no snapshot does"):
        load_snapshot(path)
    assert not (tmp_path / "ran").exists()
