"""Errors on the command line: one line, what, where, what to do; exit codes."""

import json
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import planner
from planner.cli import options, run
from planner.cli.ending import EndedError
from planner.errors import UnsavedError
from planner.jobs import FIELD_OPTIONS
from tests.helpers.command_line import Capture, outcome

COUNT = "is refused; use a whole number"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("max-btach", "no such command 'max-btach'. Did you mean 'max-batch'? See planner --help"),
        ("estimate --tensor-cores yes", "no such option: --tensor-cores; see planner estimate --help"),
        ("estimate 128", "got unexpected extra argument(s) (128); see planner estimate --help"),
        ("diagnose a b c", "planner diagnose takes one FILE; remove b c; see planner diagnose --help"),
        ("estimate --model", "option '--model' requires an argument; see planner estimate --help"),
        ("estimate", "--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME"),
        (
            "max-batch --model cnn",
            "no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N",
        ),
        (
            "max-batch --model cnn --gpu l4 --gpu-mib 24000",
            "--gpu and --gpu-mib: both say which GPU; give one of them",
        ),
        (
            "estimate --trace x --model cnn",
            "--model and --trace: the trace file decides that; remove one",
        ),
        (
            "estimate --trace x --optimizer-impl fused",
            "--optimizer-impl and --trace: the trace file decides that; remove one",
        ),
        (
            "estimate --model torchvision:alexnet",
            "torchvision:alexnet: no batch size is known; give one, such as --batch 32",
        ),
        (
            "estimate --model resnet5",
            "model 'resnet5' is unknown; the nearest in the catalogue: resnet50; torchvision's own is "
            "written torchvision:resnet5",
        ),
        (
            "estimate --model torchvision:resnet5 --batch 2",
            "torchvision has no model 'resnet5'; the nearest: resnet50, resnet152, resnet34",
        ),
        ("estimate --model cnn --batch 0", f"--batch: '0' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch -3", f"--batch: '-3' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch 16777217", f"--batch: '16777217' {COUNT} from 1 to 16777216"),
        ("estimate --model cnn --batch 1.5", "--batch: expected a whole number, got '1.5'"),
        ("max-batch --model cnn --gpu-mib 24GB", "--gpu-mib: expected a whole number, got '24GB'"),
        (
            "max-batch --model cnn --gpu-mib 0",
            "a GPU of 0 MiB makes no sense: give its total memory in MiB as nvidia-smi shows it, "
            "from 100 to 10000000",
        ),
        (
            "max-batch --model cnn --allocator-cap-mib 0",
            f"--allocator-cap-mib: '0' {COUNT} from 1 to 10000000",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --confidence 1",
            "--confidence 1.0: give a probability from 0.5 to below 1, such as 0.99",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --confidence sure",
            "--confidence: expected a number, got 'sure'",
        ),
        (
            "max-batch --model cnn --gpu-mib 8000 --alloc-conf expandable_segment:True",
            "allocator configuration: unknown option 'expandable_segment'; "
            "did you mean 'expandable_segments'?",
        ),
        (
            "estimate --model cnn --input 3x0",
            "tensor '3x0': a size is 0; every size of one sample must be at least 1",
        ),
        (
            "estimate --model gpt2 --new-tokens 64",
            "gpt2: --new-tokens without --mode generate: remove it, or give --mode generate",
        ),
        (
            "estimate --model cnn --cublas-workspace-config 4096:8",
            "--cublas-workspace-config: cannot read '4096:8'; write :SIZE:COUNT with sizes in KiB, such as "
            ":4096:8 or :4096:2:16:8",
        ),
    ],
)
def test_wrong_usage(capsys: Capture, command: str, line: str) -> None:
    """Wrong usage is one line, with exit code 2."""
    assert outcome(command, capsys) == (2, "", f"planner: {line}\n")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (
            "Item",
            "module 'inner' calls aten._local_scalar_dense.default (models.py:21: return x * x.sum().item())",
        ),
        (
            "NonZero",
            "module 'inner' calls aten.nonzero.default (models.py:35: return x + torch.nonzero(x).sum())",
        ),
        (
            "Nms",
            "module 'inner' calls torchvision.nms.default (models.py:49: "
            "return x[torchvision.ops.nms(x, x[:, 0], 0.5)])",
        ),
        ("Masked", "the model's own forward calls aten.index.Tensor (models.py:64: return x[x > 0])"),
    ],
)
def test_model_that_reads_values(capsys: Capture, name: str, place: str) -> None:
    """A model that reads values of tensors is answered with values drawn on the CPU; the answer notes it."""
    command = f"estimate --model models.py:{name} --input 4 --loss sum --batch 8 --json"
    code, out, err = outcome(command, capsys)
    assert (code, err) == (0, "")
    drawn = "shapes that depend on them come from values drawn at random on the CPU, not from"
    if name == "Item":
        drawn = "conditions on them are decided by random numbers on the CPU, not by"
    note = f"{place}, which reads values: {drawn} data and trained weights"
    assert note in json.loads(out)["assumptions"]


@pytest.mark.usefixtures("models")
def test_model_that_exits(capsys: Capture) -> None:
    """A model that ends the process is refused like one that raises."""
    line = (
        "the model's own forward fails at batch 8 (models.py:69: raise SystemExit(7)): it ends the process "
    )
    assert outcome("estimate --model models.py:Exits --input 4 --loss sum --batch 8", capsys) == (
        3,
        "",
        f"planner: models.py:Exits: {line}with code 7; see the traceback with --debug\n",
    )


def test_shape_that_does_not_fit(capsys: Capture) -> None:
    """An input of the wrong shape names the module where it failed; exit code 3."""
    assert outcome("estimate --model cnn --input 4x224x224 --batch 8", capsys) == (
        3,
        "",
        "planner: cnn: module 'conv' fails at batch 8 in aten.convolution.default: Invalid channel dimensions"
        "; check --input and --target\n",
    )


def test_target_that_does_not_fit(capsys: Capture) -> None:
    """A loss that fails tells the shapes of output and target."""
    code, _, line = outcome("estimate --model cnn --target 7 --loss mse --batch 8", capsys)
    assert (
        code,
        line.endswith("; the output is 8x10, the target 8x7, the batch first; check --input and --target\n"),
    ) == (3, True), line


def test_broken_catalogue(capsys: Capture, tmp_path: Path) -> None:
    """A broken models.yaml names the line and the key; exit code 4."""
    path = tmp_path / "models.yaml"
    path.write_text("mine:\n  source: zoo:ConvPair\n  about: mine\n  inputs: [1x8x8]\n  lost: sum\n")
    code, out, err = outcome(f"estimate --models {path} --model mine", capsys)
    assert (code, out) == (4, "")
    assert err == (
        f"planner: {path} line 5, mine.lost: unknown key; known are source, about, args, inputs, target, "
        f"{', '.join(FIELD_OPTIONS)}, optimizer_arg, batch\n"
    )


def test_trace_that_cannot_be_saved(capsys: Capture, tmp_path: Path) -> None:
    """A trace that cannot be written is one line and exit code 4, after the answer, which is there."""
    path = tmp_path / "missing" / "x.trace"
    for command, key in (
        ("estimate --model conv_pair", "batch"),
        ("max-batch --gpu L4 --model conv_pair", "max_batch"),
    ):
        code, out, err = outcome(f"{command} --json --save-trace {path}", capsys)
        assert (code, err) == (4, f"planner: {path}: cannot write the trace: No such file or directory\n")
        assert json.loads(out)[key] == json.loads(outcome(f"{command} --json", capsys)[1])[key]


def test_python_gets_the_answer_that_could_not_be_saved(tmp_path: Path) -> None:
    """The error holds the result, and the exit code of what went wrong."""
    with pytest.raises(UnsavedError) as caught:
        planner.estimate("conv_pair", save_trace=tmp_path / "missing" / "x.trace")
    assert isinstance(caught.value.result, planner.EstimateResult)
    assert (caught.value.result.fits, caught.value.exit_code) == ("yes", 4)


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*values: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "command",
    [
        "tables --calibrations PATH",
        "estimate --model cnn --gpu L4 --calibrations PATH",
        "explain --model cnn --batch 2 --against PATH",
        "calibrate --import PATH",
        "replay PATH",
    ],
)
def test_a_path_that_cannot_be_looked_at(capsys: Capture, command: str) -> None:
    """A name that no file can have, as a folder that may not be entered, is no error of the planner."""
    name = "x" * 5000
    code, out, err = outcome(command.replace("PATH", name), capsys)
    assert (code, out) == (4, "")
    assert err == f"planner: {name}: cannot be reached: File name too long; check the path\n"


@pytest.mark.parametrize(("command", "file"), [*product(("sweep", "replay"), (".", "/", ""))])
def test_a_folder_in_place_of_a_file(capsys: Capture, command: str, file: str) -> None:
    """A folder, or no name at all, is no file of this kind, and no default stands in for it."""
    code, (out, err) = run([command, file]), capsys.readouterr()
    assert (code, out) == (4, "")
    assert err.endswith(": not readable (Is a directory)\n")


def test_internal_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the planner itself is one line with an exit code of its own, a traceback with `--debug`."""
    monkeypatch.setattr(planner, "estimate", failing(RuntimeError("two\nlines")))
    line = "planner: internal error: RuntimeError: two lines; run with --debug and report it"
    assert outcome("estimate --model cnn", capsys) == (70, "", f"{line}\n")
    code, out, err = outcome("estimate --model cnn --debug", capsys)
    assert (code, out) == (70, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.splitlines()[-1] == line


def test_traceback_with_debug(capsys: Capture) -> None:
    """With `--debug` a user's error shows its traceback too, the line coming last."""
    code, _, err = outcome("estimate --model cnn --batch 0 --debug", capsys)
    assert (code, err.splitlines()[0]) == (2, "Traceback (most recent call last):")
    assert err.splitlines()[-1] == f"planner: --batch: '0' {COUNT} from 1 to 16777216"


def test_interrupt(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is one line and exit code 130."""
    monkeypatch.setattr(planner, "estimate", failing(KeyboardInterrupt()))
    assert outcome("estimate --model cnn", capsys) == (130, "", "planner: interrupted\n")


def test_a_signal_while_options_are_read_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The library that reads them does not swallow it, and SIGTERM is not called an interrupt."""
    settled: list[bool] = []
    ended = EndedError(signal.SIGTERM, lambda: settled.append(True))
    monkeypatch.setattr(options, "_convert", failing(ended))
    assert outcome("estimate --model cnn", capsys) == (143, "", "planner: ended by SIGTERM\n")
    assert settled == [True]
