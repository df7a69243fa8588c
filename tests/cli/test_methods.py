"""Other estimators on the command line."""

import json
from pathlib import Path

import pytest

from tests.helpers.command_line import ESTIMATE_KEYS, MAX_BATCH_KEYS, Capture, outcome


def test_estimate_by_formula_is_the_seeds(capsys: Capture) -> None:
    """`--method formula` prints the notebook's seven lines of the CNN."""
    code, out, err = outcome("estimate --model cnn --method formula", capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    first = lines.index("Batch 128                            MiB") + 1
    assert [line[:40].split() for line in lines[first : first + 7]] == [
        ["Data", "73.5"],
        ["Weight", "3.8"],
        ["Forward", "output", "240.6"],
        ["Weight", "gradient", "3.8"],
        ["Output", "gradient", "314.1"],
        ["Total", "for", "training", "635.8"],
        ["Total", "for", "inference", "317.9"],
    ]


def test_formula_inverse_agrees_with_its_estimates(capsys: Capture) -> None:
    """`max-batch --method formula`: its answer fits by `estimate --method formula`, and one more does not."""
    card = "--model vit_b_16 --optimizer adam --gpu-mib 24000 --method formula --json"
    code, out, err = outcome(f"max-batch {card}", capsys)
    fields = json.loads(out)
    assert (code, err) == (0, "")
    assert fields.keys() >= MAX_BATCH_KEYS
    assert fields["at_max"].keys() >= ESTIMATE_KEYS
    largest = fields["max_batch"]
    for batch, fits in ((largest, "yes"), (largest + 1, "no")):
        code, out, _ = outcome(f"estimate {card} --batch {batch}", capsys)
        assert (json.loads(out)["fits"], code) == (fits, 0 if fits == "yes" else 1)


@pytest.mark.parametrize("method", ["formula", "torchinfo", "torchsummary", "modelsize"])
def test_a_model_of_ones_own_needs_no_target(method: str, capsys: Capture, tmp_path: Path) -> None:
    """These methods take no account of the loss, so that --input is all that they need."""
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\ndef build(): return nn.Sequential(nn.Conv2d(3, 8, 3))\n")
    command = f"--model {file}:build --input 3x16x16 --method {method} --json"
    code, out, err = outcome(f"estimate {command} --batch 4", capsys)
    assert (code, err, json.loads(out)["method"]) == (0, "", method)
    if method == "formula":
        assert outcome(f"max-batch {command} --gpu-mib 8000", capsys)[0] == 0


def test_formula_of_nothing(capsys: Capture) -> None:
    """The answer is 0 and the exit code 1 if by the formula not even one sample fits."""
    code, out, _ = outcome("max-batch --model vit_b_16 --gpu-mib 900 --method formula --json", capsys)
    assert (code, json.loads(out)["max_batch"], json.loads(out)["at_max"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("method", "total"),
    [("torchinfo", "0.57"), ("torchsummary", "0.57"), ("modelsize", "0.569"), ("memtracker", "0.472")],
)
def test_estimate_by_others(capsys: Capture, method: str, total: str) -> None:
    """Each other method answers in the same schema, with its total for the allocated peak."""
    code, out, err = outcome(f"estimate --model conv_pair --method {method} --json", capsys)
    fields = json.loads(out)
    assert (code, err, fields["method"]) == (0, "", method)
    assert fields.keys() >= ESTIMATE_KEYS
    assert str(fields["peak_allocated_mib"]) == total


def test_trace_names_its_method(capsys: Capture, toy_trace: Path) -> None:
    """The planner's own answers name the method `trace`."""
    _, out, _ = outcome(f"max-batch --trace {toy_trace} --gpu-mib 8000 --method trace --json", capsys)
    assert (json.loads(out)["method"], json.loads(out)["at_max"]["method"]) == ("trace", "trace")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "max-batch --model cnn --gpu-mib 8000 --method torchinfo",
            "--method torchinfo: unknown here; use one of trace, formula",
        ),
        (
            "estimate --model cnn --method xmem",
            "--method xmem: unknown here; use one of trace, formula, torchinfo, torchsummary, modelsize, "
            "memtracker",
        ),
        (
            "max-batch --model cnn --method formula",
            "no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N",
        ),
        (
            "estimate --model cnn --method formula --steps 2",
            "--steps and --method formula: the closed formula takes no account of it; remove it, or use "
            "--method trace",
        ),
        (
            "estimate --trace x --method memtracker",
            "--trace and --method memtracker: MemTracker takes no account of it; remove it, or use "
            "--method trace",
        ),
        (
            "estimate --model cnn --method formula --optimizer adafactor",
            "optimizer adafactor: the formula counts moments the size of the weights, and adafactor keeps "
            "others; use --method trace",
        ),
        (
            "estimate --model basic_unet --method formula",
            "--mode forward: the formula knows training and inference; give --mode train or --mode infer, or "
            "use --method trace",
        ),
    ],
)
def test_wrong_use_of_methods(capsys: Capture, command: str, line: str) -> None:
    """Wrong use of a method is one line, with exit code 2."""
    assert outcome(command, capsys) == (2, "", f"planner: {line}\n")


def test_method_that_fails_on_a_model(capsys: Capture) -> None:
    """A model that another estimator refuses is one line and exit code 3."""
    code, out, err = outcome("estimate --model vit_b_16 --batch 2 --method torchsummary", capsys)
    assert (code, out) == (3, "")
    assert err == (
        "planner: vit_b_16: torchsummary knows single tensors only, and a MultiheadAttention takes or gives "
        "something else; use --method trace\n"
    )
