"""Compiled code: planned as eager code, and every answer notes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.capture.models.live.job import read_live_model
from planner.jobs import Mode
from tests.helpers.models import job_of, trace_of

INPUT = "8"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class WithFunction(Net):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


class CompiledInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.compile(torch.relu)(self.first(x)))  # type: ignore[no-any-return]


class CompiledMethod(Net):
    @torch.compile
    def middle(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x)))  # type: ignore[no-any-return]


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x) * torch.relu(x)


def compiled_submodule() -> nn.Module:
    net = Net()
    net.first.compile()
    return net


def notes_of(build: Callable[[], Any]) -> str:
    return " ".join(trace_of(build, job_of(INPUT, mode=Mode.TRAIN), 2).notes)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: torch.compile(Net()), "Net"),
        (compiled_submodule, "Linear"),
        (lambda: WithFunction(torch.compile(squared_relu)), "squared_relu"),
        (CompiledInForward, "relu"),
        (CompiledMethod, "CompiledMethod.middle"),
    ],
)
def test_what_torch_compile_compiles_is_named(build: Callable[[], Any], name: str) -> None:
    """Wherever a model keeps compiled code, the trace notes that it is planned as eager code."""
    assert f"torch.compile is planned as eager code ({name})" in notes_of(build)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: torch.jit.script(Net()), "Net"),
        (lambda: torch.jit.trace(Net(), torch.zeros(2, 8, device="meta"), check_trace=False), "Net"),
        (lambda: WithFunction(torch.jit.script(squared_relu)), "squared_relu"),
    ],
)
def test_torchscript_is_named(build: Callable[[], Any], name: str) -> None:
    """Scripted and traced code is noted as planned operator by operator."""
    assert f"TorchScript is planned operator by operator ({name})" in notes_of(build)


def test_code_that_is_not_compiled_is_not_named() -> None:
    """Neither an eager model nor one that excludes its code from compilation has such a note."""
    assert "planned" not in notes_of(Net)
    assert "planned" not in notes_of(lambda: WithFunction(torch.compiler.disable(squared_relu)))


def test_a_copy_of_a_live_module_is_compiled_as_the_module_is() -> None:
    """The copy of a module that frameworks train keeps what `Module.compile` compiled."""
    module = compiled_submodule()
    live = read_live_model(module, torch.zeros(2, 8), lambda module, batch: module(batch).sum())
    assert "planned as eager code (Linear)" in notes_of(live.build)


def test_cached_and_saved_traces_carry_the_note(tmp_path: Path) -> None:
    """A plan from a cached trace and one from a saved trace carry the note as well."""
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    return torch.nn.Sequential("
        "nn.Linear(8, 8), nn.ReLU(), torch.jit.script(nn.Linear(8, 8)))\n"
    )
    options: dict[str, Any] = {"input": INPUT, "loss": "sum", "cache": tmp_path / "kept"}
    saved = tmp_path / "net.trace"
    for _ in range(2):
        notes = planner.estimate(f"{file}:build", 4, save_trace=saved, **options).to_dict()["assumptions"]
        assert any("(Linear)" in sentence for sentence in notes)
    notes = planner.estimate(trace=saved, batch=4).to_dict()["assumptions"]
    assert any("TorchScript is planned operator by operator (Linear)" in sentence for sentence in notes)
