"""Plans of modules that the caller holds leave them as they were."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import ModelError

SAMPLES = {"input": "16"}


def make_model() -> nn.Module:
    """Return a model with buffers, tied weights and a list of tensors."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16), nn.Linear(16, 32))
    model[3].weight = model[0].weight
    model.anchors = [torch.arange(4.0), torch.arange(8.0)]
    return model


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Check that a module's tensors, values, gradients and modes are the same objects on exit."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = copy.deepcopy(model.state_dict())
    grads = {name: one.grad for name, one in model.named_parameters()}
    modes = [one.training for one in model.modules()]
    yield
    after = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensors[name] for name in tensors)
    assert all(one.device.type == "cpu" for one in after.values())
    assert all(torch.equal(one, values[name]) for name, one in model.state_dict().items())
    assert all(one.grad is grads[name] for name, one in model.named_parameters())
    assert [one.training for one in model.modules()] == modes


def peak(factory: Callable[[], object], **options: object) -> int:
    """Return the planned peak of eight samples in bytes."""
    options = SAMPLES | {"loss": "sum"} | options
    return planner.estimate(factory, batch=8, gpu="L4", **options).estimate.run.peak_allocated_bytes


def test_a_plan_leaves_the_weights_of_a_live_module() -> None:
    live = make_model()
    expected = peak(make_model)
    with unchanged(live):
        assert peak(lambda: live) == expected
    assert [one.tolist() for one in live.anchors] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    live(torch.rand(4, 16)).sum().backward()
    with unchanged(live):
        assert planner.max_batch(lambda: live, gpu="L4", loss="sum", **SAMPLES).to_dict()["max_batch"]


def test_a_plan_searches_the_process_for_live_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[list[object]] = []

    def get_objects() -> list[object]:
        searches.append(found := [model])
        return found

    model = make_model()
    monkeypatch.setattr(gc, "get_objects", get_objects)
    captures: list[str] = []
    planner.max_batch(lambda: model, gpu="L4", loss="sum", on_progress=captures.append, **SAMPLES)
    assert len([line for line in captures if line.startswith("tracing")]) > 1
    assert len(searches) == 1


def test_a_plan_leaves_the_weights_of_a_live_part() -> None:
    encoder = make_model()

    def build() -> nn.Module:
        return nn.Sequential(encoder, nn.Linear(32, 8))

    with unchanged(encoder):
        whole = peak(build)
    assert whole == peak(lambda: nn.Sequential(make_model(), nn.Linear(32, 8)))


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"compile": "default"}, {"freeze": ["0.*"]}])
def test_a_technique_that_changes_the_model_leaves_a_live_module(options: dict[str, object]) -> None:
    live = make_model()
    expected = peak(make_model, **options)
    with unchanged(live):
        assert peak(lambda: live, **options) == expected


def test_a_plan_leaves_the_model_and_the_optimizer_of_a_live_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(4, 16)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())

    def step(samples: Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        model(samples).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with unchanged(model):
        first = peak(lambda: step, mode="step", loss=None)
        assert peak(lambda: step, mode="step", loss=None) == first
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    for number, moments in state["state"].items():
        assert all(torch.equal(after["state"][number][name], one) for name, one in moments.items())


def test_a_read_of_values_leaves_the_values_of_a_live_module() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()
            self.register_buffer("count", torch.tensor(3))

        def forward(self, samples: Tensor) -> Tensor:
            self.count += 1
            self.inner[0].weight.data.mul_(2)
            return self.inner(samples)[:, : int(self.count)]

    live = Reads()
    expected = peak(Reads)
    with unchanged(live):
        assert peak(lambda: live) == expected


def test_a_failing_plan_leaves_the_weights_of_a_live_module() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, samples: Tensor) -> Tensor:
            kept = self.inner(samples)
            raise ArithmeticError(str(kept.shape))

    live = Fails()
    with unchanged(live), pytest.raises(ModelError, match="ArithmeticError"):
        peak(lambda: live)


@pytest.mark.parametrize("method", ["torchinfo", "formula"])
def test_other_methods_leave_the_weights_of_a_live_module(method: str) -> None:
    live = make_model()
    with unchanged(live):
        planner.estimate(lambda: live, batch=8, gpu="L4", **SAMPLES, method=method)


def test_a_plan_leaves_what_another_thread_changes_in_modules_that_are_not_planned() -> None:
    beside = nn.Linear(4, 4)

    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, samples: Tensor) -> Tensor:
            beside.eval()
            return self.linear(samples)

    assert peak(Trains)
    assert not beside.training
