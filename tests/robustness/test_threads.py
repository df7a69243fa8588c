"""Threads beside a plan: a training goes on undisturbed, and plans of several threads queue.

`--runs N` sets how many plans are made beside a training.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from planner import estimate, max_batch
from planner.capture.cuda.threads import restrict_to_plan

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())
"""


def plan(file: Path, inputs: int = 16) -> int:
    return max_batch(f"{file}:Net", input=str(inputs), target="scalar:int64", gpu_mib=2000).max_batch


@contextmanager
def training() -> Iterator[list[str]]:
    """Train a small model in a thread while open; yields what its loop finds wrong."""
    problems: list[str] = []
    has_begun, is_over = threading.Event(), threading.Event()
    torch.manual_seed(1)

    def train() -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(net.parameters())
        while not is_over.is_set():
            try:
                step(net, optimizer)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            has_begun.set()

    thread = threading.Thread(target=train)
    thread.start()
    has_begun.wait()  # so that imports of the first step are done
    try:
        yield problems
    finally:
        is_over.set()
        thread.join()


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    images, labels = torch.randn(4, 8), torch.randint(0, 4, (4,))
    images[0, 1:3] = 2.0
    assert images.device.type == "cpu" and not images.is_cuda
    assert float(images[0, 1:3].sum()) == 4.0
    loss = cross_entropy(net(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert loss.isfinite()


def test_a_training_goes_on_beside_a_plan(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Neither the training nor the plans see each other: no error, and the answers of a quiet process."""
    file = tmp_path / "net.py"
    file.write_text(NET)
    quiet = plan(file)
    runs = max(3, int(request.config.getoption("--runs")) // 20)
    with training() as problems:
        answers = [plan(file) for _ in range(runs)]
    assert problems == []
    assert answers == [quiet] * runs
    print(f"\n{runs} plans beside a training thread, 0 errors in either")


def test_plans_of_several_threads_queue(tmp_path: Path) -> None:
    """Eight threads that plan at once all get the answer of one."""
    file = tmp_path / "net.py"
    file.write_text(NET)
    quiet = plan(file)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: plan(file), range(8))) == [quiet] * 8


STEP = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class Training:
    def __init__(self):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.net = nn.Linear(16, 4).to(self.device)
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def step(self, x, y):
        x, y = x.to(self.device), y.to(self.device)
        assert x.is_cuda
        self.optimizer.zero_grad()
        cross_entropy(self.net(x), y).backward()
        self.optimizer.step()
"""


def test_a_step_is_planned_alike_beside_a_thread(tmp_path: Path) -> None:
    """Code that asks torch for its GPU is answered as the planned one, whichever threads run."""
    file = tmp_path / "train.py"
    file.write_text(STEP)

    def peak() -> int:
        made = estimate(f"{file}:Training", 8, mode="step", input=["16", "scalar:int64"], gpu_mib=2000)
        return made.estimate.process_bytes

    quiet = peak()
    with training() as problems:
        assert peak() == quiet
    assert problems == []


def test_an_object_in_place_of_a_function_stays_itself() -> None:
    """A stand-in with attributes, such as a kernel that takes a grid, is not wrapped for other threads."""

    class Kernel:
        def __call__(self) -> None: ...

    kernel, end = Kernel(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert restrict_to_plan(kernel, print) is kernel
        assert restrict_to_plan(print, input) is not print
    finally:
        end.set()
        thread.join()
