"""The documentation's snippets run as a reader runs them, each in a process of its own.

Jobs of the catalogue (`vit_b_16`, `resnet50`, `unetr`) with their default recipes are answered from the
included traces, without torch; every other line traces its model. A line that occurs twice runs once.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / "docs" / name for name in ("usage.md", "recipes.md", "devices.md", "catalogue.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
REMARK = re.compile(r"\s{3,}(#|[A-Za-z]).*")  # three spaces behind a command, or more

NEED_A_GPU = {"planner devices auto"}
# Options of lines that fail where a package is missing: the package, the exit code, the message.
NEED_A_PACKAGE = {
    "--cudnn installed": ("nvidia.cudnn", 2, "no package brings cuDNN"),
    "nnunet:": ("dynamic_network_architectures", 3, "dynamic_network_architectures is not installed"),
}
_DECODER = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
_NETWORK = {
    **{"n_stages": 2, "features_per_stage": [8, 16], "conv_op": "torch.nn.modules.conv.Conv3d"},
    **{"kernel_sizes": [[3, 3, 3]] * 2, "strides": [[1, 1, 1], [2, 2, 2]], "n_conv_per_stage": [1, 1]},
    **{"n_conv_per_stage_decoder": [1], "nonlin": "torch.nn.ReLU"},
}
_ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": _NETWORK,
    "_kw_requires_import": ["conv_op", "nonlin"],
}
_IMAGES = {"spacing": [1.0, 1.0, 1.0], "median_image_size_in_voxels": [64.0, 64.0, 64.0]}
_PLANS = {
    "3d_fullres": {"patch_size": [32, 32, 32], "batch_size": 2, **_IMAGES, "architecture": _ARCHITECTURE}
}
# Files of others that the pages name.
DATA = {
    "FOLDER/config.json": _DECODER,
    "DRAFT/config.json": _DECODER,
    "nnUNetPlans.json": {"configurations": _PLANS},
    "dataset.json": {"channel_names": {"0": "CT"}, "labels": {"background": 0, "organ": 1}},
}
# In the schema of SkyPilot's catalogues; the prices are invented.
PRICES = """InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region
one,L4,1,0.80,0.30,here
eight,H100,8,30.00,12.00,here
"""


def blocks(language: str, pages: list[Path]) -> list[str]:
    """Return the fenced blocks of a language on these pages."""
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return [body for text in texts for kind, body in BLOCK.findall(text) if kind == language]


def command_lines() -> list[str]:
    """Return every `planner ...` line of a plain block, once, without remarks."""
    lines = [line for block in blocks("", PAGES) for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(REMARK.sub("", line) for line in lines if line.startswith("planner ")))


def files() -> dict[str, str]:
    """Return the contents of the blocks that begin with the name of a file, by name."""
    bodies = [body for kind in ("python", "yaml") for body in blocks(kind, PAGES)]
    return {name[1]: body for body in bodies if (name := FILE.match(body))}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, whose parent may be missing too."""
    parent = package.partition(".")[0]
    return find_spec(parent) is not None and find_spec(package) is not None


def has_gpu() -> bool:
    """Return whether the driver shows a GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder that holds the files which the pages show."""
    here = tmp_path_factory.mktemp("snippets")
    for name, body in files().items():
        (here / name).write_text(body, encoding="utf-8")
    for name, content in DATA.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(json.dumps(content), encoding="utf-8")
    (here / "vms.csv").write_text(PRICES, encoding="utf-8")
    yield here


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with the environment's folder of programs on the path, and nothing of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in command_lines() if line not in NEED_A_GPU])
def test_commands_run(line: str, folder: Path) -> None:
    """A command that the pages show ends with 0; one for which a package is missing names the package."""
    done = run(["bash", "-c", line], folder)
    code, message = 0, ""
    for option, (package, failure, text) in NEED_A_PACKAGE.items():
        if option in line and not is_installed(package):
            code, message = failure, text
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("line", sorted(NEED_A_GPU))
def test_commands_that_need_a_gpu(line: str, folder: Path) -> None:
    """A command of the list stands on the pages and ends with 5 where there is no GPU."""
    assert line in command_lines()
    assert run(shlex.split(line), folder).returncode == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks("python", PAGES))))
def test_python_runs(number: int, folder: Path) -> None:
    """A block of Python runs as a script."""
    script = folder / f"snippet_{number}.py"
    script.write_text(blocks("python", PAGES)[number], encoding="utf-8")
    done = run([sys.executable, script.name], folder)
    assert done.returncode == 0, done.stderr


def test_shown_output_is_the_output(folder: Path) -> None:
    """The README shows below a prompt what the command prints; `...` stands for lines left out."""
    block, *emulated = blocks("console", [README])
    assert all(one.startswith("$ planner run ") for one in emulated)  # tests/emulator holds what those print
    prompt, *shown = block.splitlines()
    printed = iter(run(shlex.split(prompt.removeprefix("$ ")), folder).stdout.splitlines())
    assert [line for line in shown if line != "..." and line not in printed] == []


def test_the_first_screen_has_the_answer() -> None:
    """Within 40 lines the README has a command with its output and the way to install."""
    head = README.read_text(encoding="utf-8").splitlines()[:40]
    assert "```console" in head and "## Install" in head
