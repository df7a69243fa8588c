"""An installed torch that is too old to plan with."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import planner
from planner import capture
from planner.errors import ModelError


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    for name in capture.__all__:  # which other tests have imported
        monkeypatch.delitem(vars(capture), name, raising=False)
    capture._check_torch.cache_clear()  # type: ignore[attr-defined]
    yield
    capture._check_torch.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("old_torch")
def test_an_old_torch_is_named() -> None:
    """The error names the version, the Python that has it, and the remedy."""
    with pytest.raises(ModelError, match=r"torch 2\.6\.0\+cu124 is installed for .*: plans need torch >= "):
        planner.max_batch("torchvision:resnet18", gpu="L4")


@pytest.mark.usefixtures("old_torch")
def test_a_guarded_training_goes_on_with_an_old_torch() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.warns(UserWarning, match=r"nothing is planned or measured: torch 2\.6\.0"),
        planner.guard(model, optimizer, (torch.zeros(1, 2), torch.zeros(1, 1)), loss="mse"),
    ):
        pass


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(planner.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = re.search(r"'torch>=(\d+)\.(\d+)'", repr(project["dependencies"]))
    assert found is not None
    assert tuple(map(int, found.groups())) == capture._OLDEST_INSTALLED  # type: ignore[attr-defined]
