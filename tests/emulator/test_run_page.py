"""`planner run --html` and `--plot`: the memory of training scripts by phase, category and module."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.hardware.device import MIB

pytestmark = pytest.mark.emulated

SETUP = """
import torch, torchvision
torch.manual_seed(0)
def train(model, batch, steps=3, forward=None, size=64):
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        x, y = torch.empty(batch, 3, size, size).cuda(), torch.empty(batch, 10).cuda()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy((model if forward is None else forward)(x), y)
        loss.backward()
        optimizer.step()
def bytes_of(tensors):
    return sum(-(-one.untyped_storage().nbytes() // 512) * 512 for one in tensors)
"""
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return a function that runs a script and gives the JSON of `planner run`."""
    python = str(request.config.getoption("--cuda-python"))

    def run_script(code: str, *options: str, exit_code: int = 0) -> dict[str, Any]:
        script = tmp_path / "train.py"
        script.write_text(SETUP + code, encoding="utf-8")
        command = [sys.executable, "-m", "planner", "run", "--json", "--gpu", "RTX 3060", *options, "--"]
        done = subprocess.run(
            [*command, python, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == exit_code, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run_script


RESNET = "train(torchvision.models.resnet18(num_classes=10), 16)"


def test_the_breakdown_is_that_of_the_run(run: Run, tmp_path: Path) -> None:
    """Categories add up to the allocated peak to the byte, and recording moves no byte."""
    plain = run(RESNET)
    answer = run(RESNET, "--html", "page.html", "--plot", "plot.svg")
    same = ("peak_allocated_mib", "peak_reserved_mib", "process_mib")
    assert [answer[key] for key in same] == [plain[key] for key in same]
    assert answer["peak"]["allocated_bytes"] == round(answer["peak_allocated_mib"] * MIB / 512) * 512
    assert sum(answer["categories"].values()) == answer["peak"]["allocated_bytes"]
    assert answer["modules"]["size_bytes"] == answer["peak"]["allocated_bytes"]
    assert not [text for text in answer["assumptions"] if text.startswith(("peak", "not recorded"))]
    assert "train.py on RTX 3060" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_parameters_gradients_and_optimizer_state_follow_from_addresses(run: Run) -> None:
    """Blocks that are split off exactly: their sum is what the tensors of the model and of Adam hold."""
    code = """
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.empty(2, 512).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    answer = run("\n".join(line[4:] for line in code.splitlines()), "--html", "page.html")
    weights = 4 * 512 * 512 * 4
    assert answer["categories"]["parameters"] == weights
    assert answer["categories"]["optimizer"] == 2 * weights
    assert answer["categories"]["gradients"] == weights
    names = [child["name"] for child in answer["modules"]["children"]]
    assert {"0", "1", "2", "3"} <= set(names)


def test_phases_of_accumulated_gradients(run: Run) -> None:
    """Two forward and backward passes make one step; the batch follows from the copies before them."""
    code = """
model = torchvision.models.resnet18(num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    for micro in range(2):
        x = torch.empty(8, 3, 64, 64).cuda()
        torch.nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.int64).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    answer = run(code, "--html", "page.html")
    phases_there = {(row["step"], row["phase"]) for row in answer["phases"]}
    assert {(0, "setup"), (1, "forward"), (1, "backward"), (2, "inputs"), (2, "forward")} <= phases_there
    assert answer["categories"]["inputs"] >= 8 * 3 * 64 * 64 * 4
    assert not [text for text in answer["assumptions"] if text.startswith("peak")]


def test_phases_of_a_closure(run: Run) -> None:
    """Lightning's optimizers call both passes: later requests of the optimizer are its own."""
    code = """
model = torchvision.models.resnet18(num_classes=10).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.empty(8, 3, 64, 64).cuda()
def closure():
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    return loss
for step in range(2):
    optimizer.step(closure)
"""
    phases = run(code, "--html", "page.html")["phases"]
    phases_there = [row["phase"] for row in phases if row["step"] == 1]
    assert phases_there == ["forward", "backward", "optimizer"]
    ends = {row["phase"]: row["end_allocated_bytes"] for row in phases if row["step"] == 1}
    weights = 4 * 11_181_642
    assert ends["optimizer"] - ends["backward"] >= 2 * weights


def test_inputs_by_keyword_are_inputs(run: Run) -> None:
    """A model of transformers is called with keywords."""
    code = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 8)
    def forward(self, *, pixels):
        return self.layer(pixels)
net = Net().cuda()
net(pixels=torch.empty(1024, 1024, device="cuda")).sum().backward()
"""
    answer = run(code, "--html", "page.html")
    assert answer["categories"]["inputs"] == 4 * MIB


def test_a_run_out_of_memory_has_a_page_up_to_there(run: Run, tmp_path: Path) -> None:
    """Activations of the forward pass that did not end, by module; exit code 1."""
    code = "train(torchvision.models.vgg16(num_classes=10), 400, size=224)"
    answer = run(code, "--html", "page.html", exit_code=1)
    assert answer["fits"] == "no"
    assert sum(answer["categories"].values()) == answer["peak"]["allocated_bytes"]
    assert answer["categories"]["activations"] > answer["peak"]["allocated_bytes"] / 2
    assert answer["phases"][-1]["phase"] == "forward"
    assert "The command runs out of memory" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_compiled_models_run_as_without_a_page(run: Run) -> None:
    """Hooks stay out of compiled code: no byte moves, and the page states that modules are missing."""
    code = """
import gc
import torch._inductor.config
gc.disable()  # it frees cycles of the compiler's at times that hooks shift
torch._inductor.config.force_disable_caches = True  # what comes from a cache may save other tensors
model = torchvision.models.resnet18(num_classes=10)
train(model, 8, forward=torch.compile(model))
"""
    plain, answer = run(code), run(code, "--html", "page.html")
    assert answer["peak_allocated_mib"] == plain["peak_allocated_mib"]
    assert answer["peak_reserved_mib"] == plain["peak_reserved_mib"]
    assert "not recorded: modules inside of compiled code" in answer["assumptions"]
    assert "layer4" in [child["name"] for child in answer["modules"]["children"]]


def test_a_page_that_cannot_be_written_leaves_the_answer(run: Run) -> None:
    """Exit code 4, with the breakdown."""
    assert "categories" in run("torch.empty(1, device='cuda')", "--html", "/proc/none/x.html", exit_code=4)
