"""Files that are data, whatever they contain: nothing in them is executed, nothing takes all memory."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.allocator.history.snapshot_reader import load_snapshot
from planner.cli import run
from planner.errors import DataFileError
from planner.jobs import Job, job_from_json, job_to_json, load_catalogue, parse_tensor_spec
from planner.store.cache_dir import CacheDirectory
from planner.store.store import UserCache

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


# ---- libraries: no file names one


LIBRARY_FILES: dict[str, tuple[str, str, list[str]]] = {  # file name, content, command with FILE
    "catalogue": (
        "models.yaml",
        "net:\n  source: torchvision:resnet18\n  about: a\n  inputs: [3x64x64]\n  cudnn: '{folder}'\n",
        ["max-batch", "--models", "FILE", "--model", "net", "--gpu", "L4"],
    ),
    "campaign": (
        "campaign.yaml",
        "about: a\ngroups:\n"
        "  - {{about: b, models: ['torchvision:resnet18'], batches: [1, 2], cudnn: '{folder}'}}\n",
        ["calibrate", "--campaign", "FILE"],
    ),
    "sweep, a model": (
        "sweep.yaml",
        "about: a\nmodels: [{{model: 'torchvision:resnet18', cudnn: '{folder}'}}]\n"
        "recipes: {{sgd: {{}}}}\ngpus: [L4]\n",
        ["sweep", "FILE"],
    ),
    "sweep, a recipe": (
        "sweep.yaml",
        "about: a\nmodels: ['torchvision:resnet18']\nrecipes: {{sgd: {{cudnn: '{folder}'}}}}\ngpus: [L4]\n",
        ["sweep", "FILE"],
    ),
    "check": (
        "pyproject.toml",
        '[tool.planner.jobs.a]\nmodel = "torchvision:resnet18"\nbatch = 2\n'
        'gpus = ["L4"]\ncudnn = "{folder}"\n',
        ["check", "--config", "FILE"],
    ),
}


@pytest.mark.parametrize("allow", [[], ["--allow-code"]])
@pytest.mark.parametrize("kind", LIBRARY_FILES)
def test_a_data_file_names_no_library(
    tmp_path: Path, kind: str, allow: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a cuDNN in a file is refused in one line with its place, even beside --allow-code."""
    name, text, command = LIBRARY_FILES[kind]
    path = tmp_path / name
    path.write_text(text.format(folder=tmp_path))
    assert run([str(path) if word == "FILE" else word for word in command] + allow) in (2, 4)
    message = capsys.readouterr().err
    assert message.startswith(f"planner: {path} line ") and len(message.splitlines()) == 1
    assert "whose library would be loaded, is given on the command line alone: --cudnn FOLDER" in message


@pytest.mark.parametrize("where", ["installed", "stored", "published"])
def test_a_data_file_names_what_answers(tmp_path: Path, where: str) -> None:
    """A file may say that the installed cuDNN, stored answers or published runs are meant."""
    path = tmp_path / "models.yaml"
    path.write_text(LIBRARY_FILES["catalogue"][1].format(folder=where))
    assert load_catalogue(path)["net"].job.environment.cudnn == where


def test_a_trace_names_no_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved trace whose job names the folder of a cuDNN is planned with another source alone."""
    path, planted = tmp_path / "net.trace", tmp_path / "planted.trace"
    words = ["--gpu-mib", "2000", "--json"]
    assert run(["max-batch", "--model", "conv_pair", "--save-trace", str(path), *words]) == 0
    answer = json.loads(capsys.readouterr().out)["max_batch"]
    file = json.loads(gzip.decompress(path.read_bytes()))
    file["about"]["job"]["cudnn"] = str(tmp_path)
    planted.write_bytes(gzip.compress(json.dumps(file).encode()))
    assert run(["max-batch", "--trace", str(planted), *words]) == 4
    message = capsys.readouterr().err
    assert message.startswith(f"planner: {planted}: its job names the cuDNN in ")
    assert len(message.splitlines()) == 1
    assert run(["max-batch", "--trace", str(planted), "--cudnn", "stored", *words]) == 0
    assert json.loads(capsys.readouterr().out)["max_batch"] == answer


def test_a_cached_job_names_no_other_model(tmp_path: Path) -> None:
    """A cache entry that another account planted cannot make a plan run code: it is ignored with a line."""
    lines: list[str] = []
    job = Job.create("timm:resnet18")
    cache = UserCache(CacheDirectory(tmp_path, lines.append))
    cache.put_job(job, job.replace(inputs=(parse_tensor_spec("3x9x9"),)))
    assert cache.get_job(job) == job.replace(inputs=(parse_tensor_spec("3x9x9"),))
    for planted in (job.replace(model="evil.py:x"), job.replace(loss="evil.py:x")):
        lines.clear()
        cache = UserCache(CacheDirectory(tmp_path, lines.append))
        cache.put_job(job, planted)
        assert cache.get_job(job) is None
        assert len(lines) == 1 and "a cached job is broken: it has another" in lines[0]


# ---- paths: no file names one, unless the user allows it


PATHS = {
    "sizes": "{{model: 'hf:bert', input: ['input_ids=16..64:int64'], sizes: '{path}'}}",
    "deepspeed": "{{model: 'torchvision:resnet18', deepspeed: '{path}'}}",
    "hf": "'hf:{path}'",
    "diffusers": "'diffusers:{path}'",
    "nnunet": "'nnunet:{path}'",
}


@pytest.mark.parametrize("kind", PATHS)
def test_a_data_file_names_no_path(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A path in a sweep is refused with its line, and what lies there is not read."""
    path, secret = tmp_path / "sweep.yaml", tmp_path / "secret"
    os.mkfifo(secret)  # whoever opens it waits
    model = PATHS[kind].format(path=secret)
    path.write_text(f"about: a\nmodels: [{model}]\nrecipes: {{sgd: {{}}}}\ngpus: [L4]\n")
    assert run(["sweep", str(path)]) == 4
    message = capsys.readouterr().err
    assert message.startswith(f"planner: {path} line 2, ") and len(message.splitlines()) == 1
    assert "is a path; --allow-code lets files name paths that you trust" in message


def test_allow_code_lets_a_file_name_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --allow-code the file of sizes is read."""
    path, sizes = tmp_path / "models.yaml", tmp_path / "sizes.txt"
    sizes.write_text("none at all\nnone\n")
    path.write_text(
        f"a: {{source: 'hf:bert', about: a, inputs: ['input_ids=16..64:int64'], sizes: '{sizes}'}}\n"
    )
    words = ["max-batch", "--models", str(path), "--model", "a", "--gpu", "L4"]
    assert run(words) == 4
    assert "is a path" in capsys.readouterr().err
    assert run([*words, "--allow-code"]) == 2
    assert f"--sizes {sizes}, line 2: expected one size" in capsys.readouterr().err


def test_a_saved_job_names_no_path() -> None:
    """What a trace or a result says of DeepSpeed is a configuration, and no path to one."""
    document = job_to_json(Job.create("zoo:CNN", source="zoo:CNN"))
    assert job_from_json(document).model.name == "zoo:CNN"
    with pytest.raises(TypeError, match="deepspeed: expected a configuration, no path"):
        job_from_json(document | {"deepspeed": "/etc/passwd"})
