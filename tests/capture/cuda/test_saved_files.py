"""Checkpoints that a planned script saves: the user's files stay as they are, and saved shapes are loaded."""

from pathlib import Path

import pytest
import torch

from planner.capture.cuda.checkpoints.functions import replacements
from planner.capture.cuda.checkpoints.saved_files import SavedFiles
from planner.program.events import Alloc
from tests.capture.models.test_own_step import BATCH, trace_code


def before_the_capture(folder: Path) -> None:
    """Return when the clock of files has gone on since the last file was written."""
    file = folder / "clock"
    file.touch()
    written = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == written:
        file.touch()
    file.unlink()


CODE = """
import os
import torch
from torch import nn
from torch.distributed import checkpoint

folder = {folder!r}
weights = os.path.join(folder, "weights.pt")
model = nn.Linear(64, 128).cuda()

def train_step(images, labels):
    model(images.cuda()).sum().backward()
{body}
"""
BODIES = {
    "saved": "torch.save(model.state_dict(), weights)\nmodel.load_state_dict(torch.load(weights))",
    "opened": 'with open(weights, "wb") as file:\n    torch.save(model.state_dict(), file)\n'
    "model.load_state_dict(torch.load(weights))",
    "pathlib": "from pathlib import Path\nimport io\nwritten = io.BytesIO()\n"
    "torch.save(model.state_dict(), written)\nPath(weights).write_bytes(written.getvalue())\n"
    "model.load_state_dict(torch.load(weights))",
    "sharded": "state = model.state_dict()\n"
    'checkpoint.save(state, checkpoint_id="{folder}", no_dist=True)\n'
    'checkpoint.load(state, checkpoint_id="{folder}", no_dist=True)\nmodel.load_state_dict(state)',
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
    names = ("weights.pt", "model.safetensors", "__0_0.distcp")
    for name in names:
        torch.save(mine, tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    before_the_capture(tmp_path)
    run(tmp_path, kind)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("kind", BODIES)
def test_files_that_a_planned_step_makes_are_deleted(tmp_path: Path, kind: str) -> None:
    """A later training run does not resume from weights without values."""
    run(tmp_path, kind)
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


@pytest.mark.parametrize(("mode", "left"), [("w", "results"), ("a", "results000")])
def test_texts_of_the_user_are_only_appended_to(tmp_path: Path, mode: str, left: str) -> None:
    """A planned step writes to another file where training would empty one."""
    file = tmp_path / "results.csv"
    file.write_text("results")
    before_the_capture(tmp_path)
    code = CODE.format(
        folder=str(tmp_path), body=f"    with open({str(file)!r}, {mode!r}) as text: text.write('0')"
    )
    trace_code(tmp_path, code, "train_step", "64", "scalar:int64")
    assert file.read_text() == left


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


@pytest.mark.parametrize(
    ("save", "refused"), [("save_file(model.state_dict(), path)", True), ("save_model(model, path)", False)]
)
def test_tied_weights_are_saved_as_on_a_gpu(tmp_path: Path, save: str, refused: bool) -> None:
    """`save_model` saves them once, and `save_file` refuses them."""
    lines = (
        "from safetensors.torch import load_model, save_file, save_model",
        f"path = {str(tmp_path / 'model.safetensors')!r}",
        "torch.nn.Module.register_parameter(model, 'tied', model.weight)",
        "refused = False",
        *(
            "try:",
            f"    {save}",
            "except RuntimeError as error:",
            "    refused = 'share memory' in str(error)",
        ),
        f"assert refused == {refused}",
        f"refused or load_model(model, {str(tmp_path / 'model.safetensors')!r})",
    )
    code = CODE.format(folder=str(tmp_path), body="\n".join(f"    {line}" for line in lines))
    assert trace_code(tmp_path, code, "train_step", "64", "scalar:int64").batch == BATCH


MINE, OTHER = b"weights of mine", b"other weights of mine"
# How scripts save: the statements of a step. `old` and `mine` are paths of files of the user, and at the path
# `free` is no file.
CHAINS = {
    "renamed over": "torch.save(state, old); os.replace(old, mine); torch.load(mine)",
    "a temporary file renamed over": "number, name = tempfile.mkstemp(dir=folder); os.close(number); "
    "torch.save(state, name); os.replace(name, mine)",
    "copied over": "torch.save(state, free); shutil.copyfile(free, mine); torch.load(mine)",
    "copied with its times": "torch.save(state, old); shutil.copy2(old, mine)",
    "moved over": "torch.save(state, free); shutil.move(free, mine)",
    "deleted": "torch.save(state, mine); os.remove(mine); torch.save(state, mine); torch.load(mine)",
    "in a renamed folder": "os.makedirs(free); torch.save(state, os.path.join(free, 'x.pt')); "
    "os.rename(free, free + str(len(os.listdir(folder))))",
    "failed": "next(failed_saves(state, free))",
    "deleted before": "if os.path.exists(old): os.remove(old)\n    torch.save(state, old); torch.load(old)",
    "rotated": "os.replace(old, mine); torch.save(state, old); torch.load(old)",
    "rotated to a new name": "os.replace(old, free); torch.save(state, old); torch.load(old)",
    "through an open file": "file = tempfile.NamedTemporaryFile(dir=folder, delete=False)\n"
    "    torch.save(state, file); file.close(); os.replace(file.name, mine); torch.load(mine)",
    "a link renamed over": "torch.save(state, free); os.symlink(free, free + 'l')\n"
    "    os.replace(free + 'l', mine)",
    "a hard link": "torch.save(state, free); os.path.exists(free + '2') or os.link(free, free + '2')",
    "by pathlib": "torch.save(state, Path(free)); Path(free).rename(mine); Path(old).unlink()",
    "in a folder of the user": "kept = folder + '/kept'; shutil.rmtree(kept)\n"
    "    os.makedirs(kept, exist_ok=True); torch.save(state, kept + '/weights.pt'); os.rename(kept, free)",
    "saved anew": "torch.save(state, free); os.rename(free, free + '2'); torch.save(state, free)",
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_files_of_the_user_survive_however_a_script_saves(tmp_path: Path, chain: str) -> None:
    """Whatever becomes of the file that is saved, files that were there before are there, and no others."""
    (tmp_path / "code").mkdir()
    paths = {name: tmp_path / f"{name}.pt" for name in ("old", "mine")}
    paths["old"].write_bytes(OTHER)
    paths["mine"].write_bytes(MINE)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "weights.pt").write_bytes(MINE)
    code = f"""
import os, shutil, tempfile, torch
from pathlib import Path
from torch import nn

folder = {str(tmp_path)!r}
old, mine, free = (os.path.join(folder, name) for name in ("old.pt", "mine.pt", "free"))
model = nn.Linear(64, 128).cuda()

def failed_saves(state, path):
    try:
        torch.save([state, lambda: None], path)
    except Exception:
        yield

def train_step(images, labels):
    model(images.cuda()).sum().backward()
    state = model.state_dict()
    {chain}
"""
    before_the_capture(tmp_path)
    assert trace_code(tmp_path / "code", code, "train_step", "64", "scalar:int64").batch == BATCH
    assert (paths["old"].read_bytes(), paths["mine"].read_bytes()) == (OTHER, MINE)
    assert (tmp_path / "kept" / "weights.pt").read_bytes() == MINE
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert files == ["code/train.py", "kept/weights.pt", "mine.pt", "old.pt"]


def test_a_file_that_another_process_writes_meanwhile_stays(tmp_path: Path) -> None:
    """It is not the file that the plan has made."""
    files = SavedFiles()
    with files.writing(tmp_path / "new.pt") as path:
        Path(path).write_bytes(b"planned")
    (tmp_path / "new.pt").write_bytes(MINE)
    files.close()
    assert (tmp_path / "new.pt").read_bytes() == MINE


def test_functions_that_outlive_a_capture_do_what_they_did(tmp_path: Path) -> None:
    """A script that a capture has imported may hold them, as by `from os import replace`."""
    held = {name: function for _, name, function in replacements(lambda: None)}
    held["save"]({"epoch": 7}, tmp_path / "a.pt")
    held["replace"](tmp_path / "a.pt", tmp_path / "b.pt")
    held["copyfile"](tmp_path / "b.pt", tmp_path / "c.pt")
    held["remove"](tmp_path / "b.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert torch.load(tmp_path / "c.pt") == {"epoch": 7}


def test_a_file_that_a_script_opens_is_not_deleted(tmp_path: Path) -> None:
    """It may have held something before, such as what a script adds a tensor to."""
    file = tmp_path / "features.bin"
    file.write_bytes(MINE)
    code = CODE.format(
        folder=str(tmp_path), body=f"    with open({str(file)!r}, 'ab') as to:\n        torch.save(1, to)"
    )
    (tmp_path / "code").mkdir()
    trace_code(tmp_path / "code", code, "train_step", "64", "scalar:int64")
    assert file.read_bytes().startswith(MINE)
