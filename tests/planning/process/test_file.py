"""The reader of process files: whole files in, whole processes or the line that is wrong out."""

from pathlib import Path

import pytest

from planner.errors import DataFileError, UsageError
from planner.jobs import CatalogueEntry, Job, TensorSpec, parse_tensor_spec, resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.process.file import find_process_file, read_process, shipped_processes
from planner.planning.process.model import (
    Define,
    Delete,
    EmptyCache,
    Heading,
    Leave,
    Model,
    Place,
    Print,
    Process,
    ResetPeak,
    Summary,
    Train,
)

IMAGE = parse_tensor_spec("3x8x8")
JOB = Job.create("tiny", inputs=(IMAGE,), target=parse_tensor_spec("10"), source="zoo:CNN")
CATALOGUE = {"tiny": CatalogueEntry(JOB, 16, "a job of this test")}
NET = Model("net", JOB, 16)


def read(folder: Path, text: str) -> Process:
    """The process of a file with this text."""
    path = folder / "process.yaml"
    path.write_text(text, encoding="utf-8")
    return read_process(path, CATALOGUE).process


def test_every_step(tmp_path: Path) -> None:
    """A file with each kind of step is read as it stands there."""
    text = """
models:
  net: tiny
  twin: tiny
steps:
  - heading: Tensors
  - reset_peak
  - define: var=1024x1024:float16
  - define: flag=scalar:bool
  - print: Defined
  - delete: [var, flag]
  - empty_cache
  - place: net
  - summary: {model: twin}
  - summary: {model: twin, batch: 4}
  - train: {model: net, steps_per_epoch: 4, epochs: 3}
  - leave
  - train: {model: net, batch: 8, steps_per_epoch: 1, epochs: 2, print: Train}
"""
    twin = Model("twin", JOB, 16)
    assert read(tmp_path, text) == (
        Heading("Tensors"),
        ResetPeak(),
        Define("var", TensorSpec((1024, 1024), "float16", "var")),
        Define("flag", TensorSpec((), "bool", "flag")),
        Print("Defined"),
        Delete(("var", "flag")),
        EmptyCache(),
        Place(NET),
        Summary(twin, 16),
        Summary(twin, 4),
        Train(NET, 16, 4, 3, None),
        Leave(),
        Train(NET, 8, 1, 2, "Train"),
    )


def test_a_process_without_models(tmp_path: Path) -> None:
    """The key `models` may be left out."""
    assert read(tmp_path, "steps: [empty_cache]") == (EmptyCache(),)


def test_a_model_outside_the_catalogue(tmp_path: Path) -> None:
    """A model of a source is taken with the defaults of its source, and its steps name their batch."""
    text = """
models: {net: torchvision:resnet18}
steps:
  - summary: {model: net, batch: 32}
"""
    job = resolve_job("torchvision:resnet18", {})
    assert read(tmp_path, text) == (Summary(Model("net", job, 2), 32),)


@pytest.mark.parametrize(
    ("line", "config"), [("", ":4096:8"), ('cublas_workspace_config: ":4096:2:16:8"\n', ":4096:2:16:8")]
)
def test_a_process_has_one_workspace_of_cublas(tmp_path: Path, line: str, config: str) -> None:
    """A library that sets it at its import, as MONAI does, sets it for all models; the file's line counts
    over that.
    """
    text = line + "models: {net: torchvision:resnet18, other: monai:UNet}\nsteps: [place: net, place: other]"
    models = [step.model for step in read(tmp_path, text) if isinstance(step, Place)]
    assert [model.job.environment.cublas_workspace_config for model in models] == [config, config]


HEAD = "models:\n  net: tiny\n  far: torchvision:resnet18\nsteps:\n"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", " line 1", "the file is empty"),
        ("models: {}", " line 1", "missing steps"),
        ("steps: [leave]\nstep: []", " line 2, step", "unknown key; known are steps, models, torch"),
        ("steps: leave", " line 1, steps", "expected a list, got 'leave'"),
        (
            "models:\n  net: tyni\nsteps: []",
            " line 2, models.net",
            "model 'tyni' is unknown; the catalogue has tiny",
        ),
        ("models:\n  my net: tiny\nsteps: []", " line 2, models.my net", "expected the name of a variable"),
        ("models:\n  net: 5\nsteps: []", " line 2, models.net", "expected a string, got 5"),
        (HEAD + "  - leaf", " line 5, steps[0]", "step 'leaf' is unknown; known are heading, print,"),
        (
            HEAD + "  - leave: now",
            " line 5, steps[0].leave",
            "this step takes no value; write it as '- leave'",
        ),
        (HEAD + "  - print", " line 5, steps[0]", "step 'print' needs a value, as in print: ..."),
        (HEAD + "  - sumary: {model: net}", " line 5, steps[0].sumary", "unknown step; known are heading,"),
        (HEAD + "  - {print: a, heading: b}", " line 5, steps[0]", "a step is one word, or one key"),
        (HEAD + "  - []", " line 5, steps[0]", "expected keys with values, got a list"),
        (HEAD + "  - print: 5", " line 5, steps[0].print", "expected a string, got 5; write it"),
        (HEAD + '  - print: "a\\nb"', " line 5, steps[0].print", "expected one line"),
        (HEAD + "  - define: 10x10", " line 5, steps[0].define", "expected NAME=SHAPE[:DTYPE]"),
        (
            HEAD + "  - define: x=10xten",
            " line 5, steps[0].define",
            "tensor 'x=10xten': write positive sizes",
        ),
        (
            "cublas_workspace_config: much\nsteps:\n  - empty_cache",
            " line 1, cublas_workspace_config",
            "cannot read 'much'; write :SIZE:COUNT with sizes in KiB",
        ),
        ("torch: latest\nsteps:\n  - empty_cache", " line 1, torch", "expected a version of torch"),
        (HEAD + "  - define: x=8:f32", " line 5, steps[0].define", "tensor 'x=8:f32': unknown dtype 'f32'"),
        (HEAD + "  - delete: net", " line 5, steps[0].delete", "expected a list, got 'net'"),
        (HEAD + "  - place: nets", " line 5, steps[0].place", "'models' of this file is net, far"),
        ("steps:\n  - place: net", " line 2, steps[0].place", "'models' of this file is empty"),
        (HEAD + "  - summary: net", " line 5, steps[0].summary", "expected keys with values, got 'net'"),
        (HEAD + "  - summary: {}", " line 5, steps[0].summary", "missing model"),
        (
            HEAD + "  - summary: {model: far}",
            " line 5, steps[0].summary",
            "missing batch; the catalogue has none",
        ),
        (
            HEAD + "  - summary: {model: net, batch: 0}",
            " line 5, steps[0].summary.batch",
            "expected a number from 1 to 2,147,483,648, got 0",
        ),
        (
            HEAD + "  - summary: {model: net, batch: 1.5}",
            " line 5, steps[0].summary.batch",
            "expected a whole number, got 1.5",
        ),
        (HEAD + "  - train: {model: net, epochs: 1}", " line 5, steps[0].train", "missing steps_per_epoch"),
        (
            HEAD + "  - place: net\n  - train: {model: net, steps_per_epoch: 5000, epochs: 3}",
            " line 6, steps[1].train",
            "15,000 steps are too many; at most 10,000 are played",
        ),
        (
            HEAD + "  - empty_cache\n\n  - leave",
            " line 7, steps[1]",
            "there is no loop to leave; train first",
        ),
        (HEAD + "  - reset_peak\n  - delete: [x]", " line 6, steps[1]", "nothing on the GPU is named x here"),
    ],
)
def test_errors_name_the_line_and_the_key(tmp_path: Path, text: str, where: str, what: str) -> None:
    """A file that is wrong is refused with its line, its key, and what is expected there."""
    with pytest.raises(DataFileError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'process.yaml'}{where}: ")
    assert what in message


@pytest.mark.parametrize(
    ("line", "version"), [("torch: 2.0.1\n", "2.0.1"), ("torch: 2.13.0+cu130\n", "2.13.0+cu130"), ("", "")]
)
def test_a_process_may_name_its_version_of_torch(tmp_path: Path, line: str, version: str) -> None:
    """The version decides which of equal blocks the allocator reuses; by default it is the newest."""
    path = tmp_path / "process.yaml"
    path.write_text(line + "steps:\n  - define: x=8\n  - print: End\n", encoding="utf-8")
    assert read_process(path, CATALOGUE).torch == version


@pytest.mark.parametrize("name", shipped_processes())
def test_shipped_processes_are_sound(name: str) -> None:
    """Each process that comes with the planner is read and prints something."""
    process = read_process(find_process_file(name), load_catalogue()).process
    assert any(isinstance(step, Print) for step in process)


def test_the_shipped_notebook_runs_its_models_in_the_notebooks_order() -> None:
    """The notebook's five models are trained one after the other, each for 3 epochs of 4 steps."""
    process = read_process(find_process_file("notebook"), load_catalogue()).process
    trained = [step for step in process if isinstance(step, Train)]
    assert [
        (step.model.job.model.name, step.batch, step.steps_per_epoch, step.epochs) for step in trained
    ] == [
        ("cnn", 128, 4, 3),
        ("vgg16_bn", 128, 4, 3),
        ("resnet50", 128, 4, 3),
        ("vit_b_16", 128, 4, 3),
        ("unetr", 8, 4, 3),
    ]


def test_names_and_paths(tmp_path: Path) -> None:
    """A name is that of a shipped process, anything else a path; a name that is neither is refused."""
    assert find_process_file("notebook").parent.name == "bundled"
    assert find_process_file("mine.yaml") == Path("mine.yaml")
    plain = tmp_path / "plain"
    plain.touch()
    assert find_process_file(str(plain)) == plain
    with pytest.raises(UsageError, match="process 'notbook': neither a file nor .*: notebook, variable"):
        find_process_file("notbook")
