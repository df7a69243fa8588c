"""Answers of `max-batch` and `estimate` as scripts read them: text, JSON, exit codes."""

import json
from pathlib import Path

import pytest

from tests.helpers.command_line import ESTIMATE_KEYS, MAX_BATCH_KEYS, Capture, outcome


def test_max_batch(capsys: Capture) -> None:
    """`max-batch` prints a report and exits with 0."""
    code, out, err = outcome("max-batch --model conv_pair --allocator-cap-mib 100", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("Largest batch:  ")
    assert out.endswith(" s replaying\n")


def test_max_batch_as_json(capsys: Capture) -> None:
    """With `--json` standard output is one JSON object with all keys of the contract."""
    code, out, err = outcome("max-batch --model conv_pair --gpu-mib 2000 --json", capsys)
    fields = json.loads(out)
    assert (code, err) == (0, "")
    assert fields.keys() >= MAX_BATCH_KEYS
    assert fields["at_max"].keys() >= ESTIMATE_KEYS
    assert fields["max_batch"] == fields["at_max"]["batch"] > 0
    assert dict(fields["probes"])[fields["max_batch"]] == fields["at_max"]["fits"]
    assert fields["first_failure"]["fits"] == "no"
    assert fields["seconds"].keys() == {"import", "trace", "replay"}


def test_max_batch_of_nothing(capsys: Capture) -> None:
    """The answer is 0 and the exit code 1 if not even one sample fits."""
    code, out, _ = outcome("max-batch --model vit_b_16 --gpu-mib 900 --json", capsys)
    assert (code, json.loads(out)["max_batch"]) == (1, 0)


def test_estimate_without_gpu(capsys: Capture) -> None:
    """`estimate` needs no GPU, and takes the batch size of the catalogue."""
    code, out, err = outcome("estimate --model cnn --json", capsys)
    fields = json.loads(out)
    assert (code, err) == (0, "")
    assert fields.keys() >= ESTIMATE_KEYS
    assert (fields["batch"], fields["fits"], fields["device"]["total_mib"]) == (128, "yes", None)
    assert round(fields["peak_reserved_mib"], 1) == 604.0


def test_estimate_that_does_not_fit(capsys: Capture) -> None:
    """A batch that does not fit is an answer with exit code 1, and names the failing phase."""
    code, out, err = outcome("estimate --model cnn --batch 128 --allocator-cap-mib 250", capsys)
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith("Batch 128 does not fit; without a limit it would take ")
    assert out.splitlines()[1].startswith("Fails at:       step 1, forward pass, ")


def test_options_reach_the_job(capsys: Capture) -> None:
    """Every option about the job arrives in it."""
    code, out, _ = outcome(
        "estimate --model torchvision:alexnet --model-arg num_classes=7 --input 3x128x128 --target 7 "
        "--batch 2 --loss mse --optimizer adam --optimizer-impl for-loop --zero-grad after-step --keep-grads "
        "--steps 2 --precision bf16 --memory-format channels_last --freeze features.0.* --json",
        capsys,
    )
    assert code == 0
    assert json.loads(out)["job"] == {
        "model": "torchvision:alexnet",
        "source": "",
        "model_args": {"num_classes": 7},
        "inputs": ["3x128x128"],
        "target": "7",
        "targets": [],
        "loss": "mse",
        "mode": "train",
        "optimizer": "adam",
        "optimizer_impl": "for-loop",
        "zero_grad": "after-step",
        "keep_grads": True,
        "drop_output": False,
        "steps": 2,
        "precision": "bf16",
        "grad_scaler": False,
        "backward_in_autocast": False,
        "memory_format": "channels_last",
        "checkpoint": "none",
        "offload": "none",
        "accumulate": 1,
        "clip_gradients": "none",
        "ema": False,
        "evaluate": False,
        "eval_batch": 0,
        "eval_input": [],
        "ddp": False,
        "ddp_bucket_view": False,
        "freeze": ["features.0.*"],
        "train_only": [],
        "new_tokens": 0,
        "cudnn_benchmark": False,
        "lengths": None,
        "cudnn": "",
        "cublas_workspace_config": "",
        "torch": "",
        "dataset_size": 0,
        "sizes": "",
        "batching": "padded",
        "pad_to": 1,
        "run_steps": 1000,
        "seed": 1,
        "peft": "",
        "peft_arg": [],
        "quantize": "none",
        "quantize_arg": [],
        "prepare_kbit": False,
        "liger": False,
        "optimizer_args": {},
        "compile": "none",
        "fsdp": 0,
        "fsdp_arg": [],
        "tp": 0,
        "world_size": 0,
        "rank": 0,
        "deepspeed": "",
    }


def test_an_option_may_follow_from_another(capsys: Capture) -> None:
    """A flag that is not given does not contradict the one that it follows from."""
    code, out, _ = outcome("estimate --model conv_pair --ddp-bucket-view --eval-batch 3 --json", capsys)
    job = json.loads(out)["job"]
    assert (code, job["ddp"], job["evaluate"], job["eval_batch"]) == (0, True, True, 3)


def test_options_reach_the_card(capsys: Capture, toy_trace: Path) -> None:
    """Every option about the GPU arrives in the plan."""
    options = (
        "--gpu l4 --allocator-cap-mib 1000 --alloc-conf expandable_segments:True --confidence 0.5 --json"
    )
    code, out, _ = outcome(f"estimate --trace {toy_trace} {options}", capsys)
    fields = json.loads(out)
    assert (code, fields["confidence"], fields["device"]["name"]) == (0, 0.5, "L4 24GB")
    assert fields["device"]["allocator"]["cap_mib"] == 1000.0
    assert fields["device"]["allocator"]["limit_mib"] == 1000.0
    assert fields["device"]["allocator"]["rules"]["expandable_segments"] is True


def test_other_catalogue(capsys: Capture, tmp_path: Path) -> None:
    """`--models` names another catalogue."""
    path = tmp_path / "mine.yaml"
    path.write_text("mine: {source: 'zoo:ConvPair', inputs: [1x8x8], loss: sum, batch: 3, about: mine}\n")
    code, out, _ = outcome(f"estimate --models {path} --model mine --json", capsys)
    assert (code, json.loads(out)["batch"], json.loads(out)["model"]) == (0, 3, "mine")


@pytest.mark.usefixtures("models")
def test_chatter_of_a_model_stays_off_standard_output(capsys: Capture) -> None:
    """Prints of a model go to standard error, so that the JSON stays alone."""
    code, out, err = outcome("estimate --model models.py:Fine --input 4 --loss sum --batch 2 --json", capsys)
    assert (code, json.loads(out)["model"]) == (0, "models.py:Fine")
    assert set(err.splitlines()) == {"chatter of the model"}
