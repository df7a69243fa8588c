"""Checkpoints that a planned script saves: the user's files stay as they are, and saved shapes are loaded."""

from pathlib import Path

import pytest
import torch

from planner.program.events import Alloc
from tests.capture.models.test_own_step import BATCH, trace_code

CODE = """
import os
import torch
from torch import nn

folder = {folder!r}
weights = os.path.join(folder, "weights.pt")
model = nn.Linear(64, 128).cuda()

def train_step(images, labels):
    model(images.cuda()).sum().backward()
{body}
"""
BODIES = {
    "saved": "torch.save(model.state_dict(), weights)\nmodel.load_state_dict(torch.load(weights))",
    "renamed": 'torch.save(model.state_dict(), "{folder}/new.pt")\nos.replace("{folder}/new.pt", weights)\n'
    "model.load_state_dict(torch.load(weights))",
    "safetensors": "from safetensors import safe_open\nfrom safetensors.torch import load_file, save_file\n"
    'save_file(model.state_dict(), "{folder}/model.safetensors")\n'
    'model.load_state_dict(load_file("{folder}/model.safetensors", device="cuda"))\n'
    'with safe_open("{folder}/model.safetensors", "pt", device="cuda:0") as file:\n'
    '    assert file.get_slice("weight")[:5].shape == (5, 64) and file.get_tensor("bias").is_cuda',
}


def run(folder: Path, kind: str) -> None:
    """Plan a step that saves and loads its model in the folder in this way."""
    lines = BODIES[kind].replace("{folder}", str(folder)).splitlines()
    code = CODE.format(folder=str(folder), body="\n".join(f"    {line}" for line in lines))
    (folder / "code").mkdir()
    trace = trace_code(folder / "code", code, "train_step", "64", "scalar:int64")
    assert trace.batch == BATCH


@pytest.mark.parametrize("kind", BODIES)
def test_files_of_the_user_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    """A planned step has no values to save, and loads the shapes that it has saved."""
    mine = {"epoch": torch.tensor(7)}
    names = ("weights.pt", "model.safetensors")
    for name in names:
        torch.save(mine, tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run(tmp_path, kind)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("kind", BODIES)
def test_files_that_a_planned_step_makes_are_deleted(tmp_path: Path, kind: str) -> None:
    """A later training run does not resume from weights without values."""
    run(tmp_path, kind)
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_weights_that_are_read_to_the_gpu_take_its_memory(tmp_path: Path) -> None:
    """Each has a block of its own beside the weights of the model."""
    body = BODIES["safetensors"].replace("{folder}", str(tmp_path)).splitlines()[:3]
    body = ["global kept", *body, f'kept = load_file("{tmp_path}/model.safetensors", device="cuda")']
    code = CODE.format(folder=str(tmp_path), body="\n".join(f"    {line}" for line in body))
    trace = trace_code(tmp_path, code, "train_step", "64", "scalar:int64")
    allocated = [event for event in trace.events if isinstance(event, Alloc)]
    copied = [event.size_bytes for event in allocated if "_to_copy" in trace.sites[event.site].op]
    weights, batch = (4 * 64 * 128, 4 * 128), 4 * BATCH * 64
    assert copied == [batch, *weights] * 3


@pytest.mark.parametrize("save", ["save_file(model.state_dict(), path)", "save_model(model, path)"])
def test_tied_weights_are_saved_as_on_a_gpu(tmp_path: Path, save: str) -> None:
    """`save_model` saves them once, and `save_file` refuses them."""
    path = str(tmp_path / "model.safetensors")
    lines = (
        "from safetensors.torch import load_model, save_file, save_model",
        f"path = {path!r}",
        "torch.nn.Module.register_parameter(model, 'tied', model.weight)",
        *("try:", f"    {save}", "except RuntimeError as error:"),
        "    assert 'share memory' in str(error) and 'save_file' in " + repr(save),
        "else:",
        "    load_model(model, path)",
    )
    code = CODE.format(folder=str(tmp_path), body="\n".join(f"    {line}" for line in lines))
    assert trace_code(tmp_path, code, "train_step", "64", "scalar:int64").batch == BATCH
