"""The peaks of each phase of a job, as planned, beside a script's own on an emulated GPU."""

import json
from pathlib import Path

import pytest

import planner
from tests.emulator.test_emulated_training import Emulator, emulator  # noqa: F401

pytestmark = pytest.mark.emulated

# A script that evaluates between two steps, then saves what resuming needs.
SCRIPT = """
import json
from torch.nn.functional import cross_entropy

def peaks():
    found = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return found

def step():
    global x, y, output, loss
    x = y = None
    x, y = torch.empty({batch}, 3, 224, 224).cuda(), torch.zeros({batch}, dtype=torch.int64).cuda()
    optimizer.zero_grad()
    output = model(x)
    loss = cross_entropy(output, y)
    loss.backward()
    optimizer.step()

def evaluate():
    global of, to, answer, loss_of
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            of = to = None
            of, to = torch.empty({evaluated}).cuda(), torch.zeros({evaluated}[0], dtype=torch.int64).cuda()
            answer = model(of)
            loss_of = cross_entropy(answer, to)
    model.train()

model = torchvision.models.{model}().cuda()
found = dict(loading=peaks())
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
step()
found["first_step"] = peaks()
step()
later = peaks()
evaluate()
found["evaluation"] = peaks()
step()
found["later_steps"] = [*map(max, later, peaks())]
torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), "checkpoint.pt")
found["saving"] = peaks()
open("phases.json", "w").write(json.dumps(found))
"""

# What resumes from its checkpoint, on the GPU.
RESUMING = """
import json
model = torchvision.models.{model}().cuda()
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
checkpoint = torch.load("checkpoint.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
found = json.load(open("phases.json"))
found["resuming"] = [torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20]
open("phases.json", "w").write(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("model", "optimizer", "batch", "evaluated", "options"),
    [
        ("resnet18", "SGD", 8, (64, 3, 224, 224), {"eval_batch": 64}),
        ("mobilenet_v3_large", "AdamW", 16, (16, 3, 512, 512), {"eval_input": "3x512x512"}),
        ("vit_b_16", "Adam", 4, (96, 3, 224, 224), {"eval_batch": 96}),
    ],
)
def test_peaks_of_phases_are_those_of_a_script(
    emulator: Emulator,  # noqa: F811
    tmp_path: Path,
    model: str,
    optimizer: str,
    batch: int,
    evaluated: tuple[int, ...],
    options: dict[str, int | str],
) -> None:
    """Loading, steps, the evaluation, saving and resuming take the same to the byte, reserved too."""
    words = {"model": model, "optimizer": optimizer, "batch": batch, "evaluated": evaluated}
    for code in (SCRIPT, RESUMING):
        for name, value in words.items():
            code = code.replace(f"{{{name}}}", str(value))
        emulator.run(code, "--gpu", "L4")
    recorded = json.loads((tmp_path / "phases.json").read_text())
    plan = planner.estimate(
        model=f"torchvision:{model}",
        batch=batch,
        gpu="L4",
        optimizer=optimizer.lower(),
        **options,
    )
    planned = {
        phase["name"]: [phase["peak_allocated_mib"], phase["peak_reserved_mib"]]
        for phase in plan.to_dict()["phases"]
        if phase["covered"]
    }
    assert planned == {name: [round(size, 3) for size in sizes] for name, sizes in recorded.items()}
