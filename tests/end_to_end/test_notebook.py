"""The first seed's notebook replayed as one process, beside every line that it printed on a real GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.api.replay import ProcessResult, replay_process
from planner.cli import run
from planner.planning.estimators.published import Figure, load_measured
from planner.planning.process.model import MemoryReading

MIB = 2**20
TITLE = "GPU memory usage for deep learning image processing (a notebook in Japanese)"
SECTIONS = {
    "Tensor variable": "tensor_1gib",
    "Convolutional Neural Network": "cnn",
    "VGG16": "vgg16_bn",
    "ResNet50": "resnet50",
    "Vision Transformer": "vit_b_16",
    "UNETR": "unetr",
}
POINTS = {
    "tensor_1gib": ("initial", "define", "delete", "release"),
    **dict.fromkeys(
        ("cnn", "vgg16_bn", "resnet50", "vit_b_16", "unetr"),
        ("initial", "model", "train 1", "train 2", "train 3", "end"),
    ),
}
# What the notebook's text has lost: it is cut inside the tables of torchinfo.
LOST = {(model, point) for model in tuple(POINTS)[2:] for point in ("initial", "model")}

Key = tuple[str, str]  # model and point


def measured(kind: str) -> dict[Key, Figure]:
    """The notebook's figures of one kind."""
    return {
        (figure.model, figure.point): figure
        for figure in load_measured().figures
        if figure.source.title == TITLE and figure.source.framework == "torch" and figure.kind == kind
    }


@pytest.fixture(scope="module")
def result() -> ProcessResult:
    """The shipped process."""
    return replay_process()


@pytest.fixture(scope="module")
def readings(result: ProcessResult) -> dict[Key, MemoryReading]:
    """Return the printed figures, by model and point."""
    keys = [(model, point) for model, points in POINTS.items() for point in points]
    printed = result.log.readings
    assert [SECTIONS[reading.section] for reading in printed] == [model for model, _ in keys]
    return dict(zip(keys, printed, strict=True))


@pytest.fixture(scope="module")
def with_workspaces() -> dict[str, MemoryReading]:
    """Return the last line of each model, with stored workspaces, on the GPU that docs/notebook.md infers."""
    log = replay_process(gpu="RTX 3090", allocator_cap_mib=20_151, cudnn="stored").log
    return {SECTIONS[reading.section]: reading for reading in log.readings}


def test_every_line_of_the_notebook_is_replayed(readings: dict[Key, MemoryReading]) -> None:
    """Each line that the notebook's text still has is among ours, and ours has those that it lost."""
    for kind in ("allocated", "reserved", "peak_allocated"):
        assert set(measured(kind)) == set(readings) - LOST


@pytest.mark.parametrize("key", measured("peak_allocated"), ids=" ".join)
def test_max_allocated(key: Key, readings: dict[Key, MemoryReading]) -> None:
    """Within 1 % of the measured line; VGG16-BN, whose peak lies in a convolution, within 4 %."""
    bar = 0.04 if key[0] == "vgg16_bn" else 0.01
    real = float(measured("peak_allocated")[key].quantity.printed)
    assert readings[key].peak_allocated_bytes / MIB == pytest.approx(real, rel=bar)


@pytest.mark.parametrize("key", measured("allocated"), ids=" ".join)
def test_allocated(key: Key, readings: dict[Key, MemoryReading]) -> None:
    """Within 2 % of the measured line, at the end of training and everywhere else."""
    real = float(measured("allocated")[key].quantity.printed)
    assert readings[key].allocated_bytes / MIB == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("model", ["vgg16_bn", "resnet50", "vit_b_16"])
def test_reserved_with_workspaces(model: str, with_workspaces: dict[str, MemoryReading]) -> None:
    """Within 0.5 % of the measured line by a newer cuDNN for an RTX 3090, and within what was left of it."""
    real = float(measured("reserved")[model, "end"].quantity.printed)
    assert (with_workspaces[model].reserved_bytes or 0) / MIB == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("model", ["tensor_1gib", "cnn"])
def test_the_variable_and_the_cnn_are_exact(model: str, readings: dict[Key, MemoryReading]) -> None:
    """All lines of these two come out to the last digit, reserved memory included."""
    for point in POINTS[model]:
        reading = readings[model, point]
        ours = (reading.allocated_bytes, reading.reserved_bytes or 0, reading.peak_allocated_bytes)
        real = [measured(kind)[model, point] for kind in ("allocated", "reserved", "peak_allocated")]
        assert [f"{figure / MIB:.1f}" for figure in ours] == [figure.quantity.printed for figure in real]


def test_text_is_the_notebooks(result: ProcessResult) -> None:
    """The text has the notebook's lines, letter for letter where the figures are the same."""
    text = str(result)
    assert text.startswith(
        "## Tensor variable\n"
        "Initial: allocated = 0.0 MiB, reserved = 0.0MiB, max allocated = 0.0 MiB\n"
        "Define: allocated = 1024.0 MiB, reserved = 1024.0MiB, max allocated = 1024.0 MiB\n"
        "Delete: allocated = 0.0 MiB, reserved = 1024.0MiB, max allocated = 1024.0 MiB\n"
        "Release: allocated = 0.0 MiB, reserved = 0.0MiB, max allocated = 1024.0 MiB\n"
        "\n"
        "## Convolutional Neural Network\n"
        "Initial: allocated = 0.0 MiB, reserved = 0.0MiB, max allocated = 0.0 MiB\n"
        "Model: allocated = 3.8 MiB, reserved = 22.0MiB, max allocated = 3.8 MiB\n"
        "Train: allocated = 97.8 MiB, reserved = 604.0MiB, max allocated = 530.9 MiB\n"
    )
    assert "\nAssumed\n  - the GPU's memory has no end\n" in text


def test_json_has_all_readings(result: ProcessResult) -> None:
    """The JSON holds each line with its section, in MiB."""
    data = json.loads(json.dumps(result.to_dict()))
    assert set(data) == {
        *(
            "schema",
            "framework",
            "device",
            "readings",
            "retries",
            "failure",
            "assumptions",
            "unknown_ops",
            "seconds",
        ),
    }
    assert (data["schema"], data["framework"], data["retries"], data["failure"]) == (1, "torch", 0, None)
    assert len(data["readings"]) == 34
    assert data["readings"][6] == {
        "section": "Convolutional Neural Network",
        "label": "Train",
        "allocated_mib": pytest.approx(97.8, abs=0.05),
        "reserved_mib": 604.0,
        "peak_allocated_mib": pytest.approx(530.9, abs=0.05),
    }
    assert set(data["seconds"]) == {"import", "trace", "replay"}


# ---- the command, with processes that need no torch

TWO_TENSORS = """
steps:
  - define: x=20x1048576:uint8
  - print: One
  - define: y=30x1048576:uint8
  - print: Two
"""


def write(folder: Path, text: str) -> str:
    path = folder / "process.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_prints_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process without headings prints its lines and what it assumes, and nothing on standard error."""
    assert run(["replay", write(tmp_path, TWO_TENSORS)]) == 0
    assert capsys.readouterr() == (
        "One: allocated = 20.0 MiB, reserved = 20.0MiB, max allocated = 20.0 MiB\n"
        "Two: allocated = 50.0 MiB, reserved = 50.0MiB, max allocated = 50.0 MiB\n"
        "\n"
        "Assumed\n"
        "  - the GPU's memory has no end\n",
        "",
    )


def test_command_says_where_memory_runs_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a cap that is too small, the lines until then are printed, then the step; the exit code is 1."""
    assert run(["replay", write(tmp_path, TWO_TENSORS), "--allocator-cap-mib", "40"]) == 1
    assert capsys.readouterr() == (
        "One: allocated = 20.0 MiB, reserved = 20.0MiB, max allocated = 20.0 MiB\n"
        "\n"
        "Out of memory at steps[2], define y: no room for 30.0 MiB\n"
        "\n"
        "Assumed\n"
        "  - torch's allocator may take 40 MiB; once it releases cached memory to stay within that\n",
        "",
    )


def test_command_gives_json_of_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a failure is an object, and the exit code is 1."""
    assert run(["replay", write(tmp_path, TWO_TENSORS), "--allocator-cap-mib", "40", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failure"] == {
        "index": 2,
        "step": "define y",
        "loop_step": None,
        "phase": None,
        "requested_mib": 30.0,
    }


def test_command_replays_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU that is too small for the tensor, the message names the memory left to the allocator."""
    assert run(["replay", "variable", "--gpu-mib", "900"]) == 1
    assert capsys.readouterr().out == (
        "## Tensor variable\n"
        "Initial: allocated = 0.0 MiB, reserved = 0.0MiB, max allocated = 0.0 MiB\n"
        "\n"
        "Out of memory at steps[3], define var_gpu: no room for 1,024.0 MiB\n"
        "\n"
        "Assumed\n"
        "  - torch's allocator may take 242 MiB, generic GPU of 900 MiB less the CUDA context and no "
        "margin;\n"
        "    once it releases cached memory to stay within that\n"
    )


def test_command_passes_the_allocators_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    """With expandable segments a tensor reserves whole pages of 20 MiB."""
    assert run(["replay", "variable", "--alloc-conf", "expandable_segments:True"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "Define: allocated = 1024.0 MiB, reserved = 1040.0MiB, max allocated = 1024.0 MiB"
    assert lines[-1] == "  - the allocator runs with expandable_segments:True"


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (
            ["notbook"],
            2,
            "process 'notbook': neither a file nor one that comes with the planner: notebook, vari",
        ),
        (["nowhere.yaml"], 4, "nowhere.yaml: not readable (No such file or directory)"),
        (
            ["variable", "--framework", "jax"],
            2,
            "--framework: unknown value 'jax'; use one of torch, tensorflow",
        ),
        (["variable", "--allocator-cap-mib", "0"], 2, "--allocator-cap-mib: '0' is refused"),
        (
            ["variable", "--allocator-cap-mib", "many"],
            2,
            "--allocator-cap-mib: expected a whole number",
        ),
        (
            ["--framework", "tensorflow", "--models", "m.yaml"],
            2,
            "--models and --framework tensorflow, which measures; remove one",
        ),
        (["variable", "--models", "none.yaml"], 4, "none.yaml: not readable"),
    ],
)
def test_command_refuses_in_one_line(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage and broken files end with one line on standard error and their exit code."""
    assert run(["replay", *arguments]) == code
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"planner: {complaint}")


def test_tensorflow_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without TensorFlow, its measurement ends with exit code 3 and the name of the extra."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert run(["replay", "--framework", "tensorflow"]) == 3
    assert capsys.readouterr() == (
        "",
        "planner: tensorflow is not installed; pip install 'gpu-batch-planner[tensorflow]'\n",
    )


def test_plain_tensors_need_no_torch() -> None:
    """A process without models is replayed without importing torch."""
    code = (
        "import sys; from planner.api.replay import replay_process; replay_process('variable'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
