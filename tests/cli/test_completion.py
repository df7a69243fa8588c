"""Shell completion: the candidates, and real shells with typer's scripts."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.cli.completion import model_names, shells as completion
from planner.cli.completion.shells import answer_shell, candidates
from planner.hardware.database import find_device, load_devices

BIN = Path(sys.executable).parent
DEADLINE_SECONDS = 60  # for a shell on a busy machine; nothing is measured


def words(line: str) -> list[str]:
    """The candidates for the last word of a line."""
    *before, word = line.split(" ")
    return [candidate.word for candidate in candidates(before, word)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("e", ["estimate", "explain"]),
        ("--i", ["--install-completion"]),
        ("estimate --opt", ["--optimizer", "--optimizer-impl", "--optimizer-arg"]),
        ("gpus --no-c", ["--no-cache", "--no-calibration"]),
        ("estimate --precision amp", ["amp-fp16", "amp-bf16"]),
        ("estimate --precision=amp-b", ["--precision=amp-bf16"]),
        ("estimate --json --optimizer ada", ["adam", "adamw", "adagrad", "adafactor"]),
        ("gpus --sort m", ["max_batch", "memory"]),
        ("estimate --method mem", ["memtracker"]),
        ("estimate --model vgg", ["vgg16_bn"]),
        ("estimate --model torchvision:vit_b", ["torchvision:vit_b_16", "torchvision:vit_b_32"]),
        ("estimate --model smp:D", ["smp:DPT", "smp:DeepLabV3", "smp:DeepLabV3Plus"]),
        ("max-batch --gpu h100-n", ["H100-NVL"]),
        ("devices rtx409", ["RTX-4090"]),
        ("estimate --batch 1", []),
        ("check --fail-on ", ["tight", "risky", "out-of-memory"]),
        ("gpus --format s", ["skypilot", "slurm"]),
        ("sweep --engine ", ["local", "dask"]),
        ("replay notebook --framework t", ["torch", "tensorflow"]),
        ("estimate --model-arg ", []),
        ("no-such --", []),
        ("--help e", []),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    """Commands, options and the values of options complete as far as they are typed."""
    assert words(line) == expected


def test_every_card_completes_to_itself() -> None:
    """Without a letter all GPUs are offered, each in a spelling that `--gpu` takes for it."""
    names = completion.gpu_names("")
    assert [find_device(name).name for name in names] == [device.name for device in load_devices()]


@pytest.mark.slow
@pytest.mark.parametrize("beginning", ["rtx", "A100-80", "4090", "Quadro RTX"])
def test_cards_that_begin_so(beginning: str) -> None:
    """Each completion of a beginning is a GPU, and no two are the same GPU."""
    names = [find_device(name).name for name in completion.gpu_names(beginning)]
    assert names
    assert len(names) == len(set(names))


def test_torchvisions_names() -> None:
    """The names read from torchvision's sources are those that it lists, but for quantized models."""
    from planner.capture.models.torchvision.shim import prepare_torchvision

    prepare_torchvision()
    from torchvision import models

    listed = {name for name in models.list_models() if not name.startswith("quantized_")}
    assert set(model_names.LIBRARIES["torchvision"]()) == listed


def test_timms_names() -> None:
    """The names read from timm's sources are those that it lists."""
    timm = pytest.importorskip("timm")
    assert set(model_names.LIBRARIES["timm"]()) == set(timm.list_models())


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library its prefix is offered and no name."""
    monkeypatch.setattr(model_names, "find_spec", lambda name: None)
    assert words("estimate --model tim") == ["timm:"]
    assert words("estimate --model timm:") == []


def test_a_library_alone_goes_on_to_its_models() -> None:
    """The models of a library are offered if only its prefix fits, so that no shell ends the word there."""
    assert all(
        word.startswith("smp:") for word in words("estimate --model sm") if word != "smp_unet_resnet18"
    )
    assert "smp:Unet" in words("estimate --model smp:")


@pytest.mark.parametrize(
    ("line", "place", "expected"),
    [
        ("planner es", "1", ["estimate"]),
        ("planner estimate --model smp : Un", "5", ["Unet", "UnetPlusPlus"]),
        ("planner estimate --model smp :", "4", ["DPT", "DeepLabV3", "DeepLabV3Plus", "FPN", "Linknet"]),
        ("planner estimate --precision = amp", "4", ["amp-fp16", "amp-bf16"]),
        ("planner estimate --precision =", "3", ["fp32", "amp-fp16", "amp-bf16", "fp16", "bf16"]),
        ("planner estimate --alloc-conf expand", "3", ["expandable_segments:True"]),
        ("planner estimate --alloc-conf expandable_segments : T", "5", ["True"]),
        ('planner estimate --gpu "rtx 409', "3", ["RTX-4090"]),
        ("planner estimate --gpu rtx\\ 409", "3", ["RTX-4090"]),
        ("planner estimate --json --optimizer-impl", "4", ["foreach", "for-loop", "fused"]),
        ("planner", "1", ["max-batch", "estimate", "gpus", "devices", "advise"]),
    ],
)
def test_words_as_bash_splits_them(line: str, place: str, expected: list[str]) -> None:
    """Bash takes `:` and `=` for words of their own and puts the answer after them."""
    environment = {"_PLANNER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": place}
    answer = answer_shell(environment)
    assert answer is not None
    assert answer.splitlines()[:5] == expected


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("planner estimate --gpu rtx409", "compadd -U  -- RTX-4090"),
        ("planner estimate --trace fi", "_files"),
        (
            "planner estimate --memory",
            "local -a matches; matches=('--memory-format:contiguous (the default) or channels_last.'); "
            "_describe -V planner matches -U",
        ),
    ],
)
def test_what_zsh_evaluates(line: str, answer: str) -> None:
    """Zsh gets a call of one of its own completion functions."""
    assert answer_shell({"_PLANNER_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}) == answer


def test_other_shells_are_left_to_typer() -> None:
    """Fish and PowerShell get typer's own answers."""
    assert answer_shell({"_PLANNER_COMPLETE": "complete_fish"}) is None


def test_completion_imports_nothing_heavy() -> None:
    """A key that is pressed waits for no library but typer."""
    code = (
        "import sys; from planner.cli import run; run([]); "
        "assert not {'torch', 'numpy', 'pydantic', 'rich', 'timm'} & set(sys.modules)"
    )
    environment = {
        "_PLANNER_COMPLETE": "complete_bash",
        "COMP_WORDS": "planner gpus --model timm",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert "timm:" in done.stdout


# ---- real shells


def typed(shell: list[str], setup: str, keys: str, awaited: str, folder: Path) -> str:
    """Return the text of a shell on a terminal after keys are pressed, up to the awaited text."""
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "PS1": "ready> ",
    }
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.chdir(folder)
        os.execvpe(shell[0], shell, environment)
    try:
        shown = ""
        for text, until in ((setup, "set-up done"), (keys, awaited)):
            os.write(terminal, text.encode())
            start, shown = time.monotonic(), ""
            while until not in shown.replace("\r", "").replace("\n", ""):
                assert time.monotonic() - start < DEADLINE_SECONDS, f"{until!r} is not in {shown!r}"
                if select.select([terminal], [], [], 1)[0]:
                    shown += os.read(terminal, 65536).decode(errors="replace")
        return shown
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


CASES = [
    ("planner est\t", "planner estimate "),
    ("planner estimate --optimizer-i\t", "--optimizer-impl "),
    ("planner estimate --precision amp-b\t", "--precision amp-bf16 "),
    ("planner max-batch --gpu 409\t", "--gpu 4090 "),
    ("planner max-batch --gpu rtx409\t", "--gpu RTX-4090 "),
    ("planner max-batch --alloc-conf expandable_segments:\t", "expandable_segments:True "),
    ("planner max-batch --model torchvision:convnext_t\t", "torchvision:convnext_tiny "),
]


@pytest.mark.parametrize(("keys", "shown"), CASES)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_in_bash(keys: str, shown: str, tmp_path: Path) -> None:
    """The script that `planner --show-completion` prints completes in bash on the tab key."""
    setup = 'eval "$(planner --show-completion bash)"; bind "set bell-style none"; echo set-up "done"\n'
    line = typed(["bash", "--norc", "--noprofile", "-i"], setup, keys, shown.split()[-1], tmp_path)
    assert shown.split()[-1] in line


@pytest.mark.parametrize(("keys", "shown"), CASES)
@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_in_zsh(keys: str, shown: str, tmp_path: Path) -> None:
    """The script that `planner --show-completion` prints completes in zsh on the tab key."""
    setup = (
        "unsetopt beep; autoload -Uz compinit; compinit -u -D; "
        'eval "$(planner --show-completion zsh)"; echo set-up "done"\n'
    )
    line = typed(["zsh", "-f", "-i"], setup, keys, shown.split()[-1], tmp_path)
    assert shown.split()[-1] in line
