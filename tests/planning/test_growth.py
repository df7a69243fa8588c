"""Memory that grows from step to step: detected and named, and never where nothing grows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.capture.capture_memory import CaptureMemory
from planner.capture.session import record
from planner.jobs import ClipGradients, Job, Mode, Optimizer, ZeroGrad
from planner.program.events import GrowthSource
from planner.program.growth import find_growth
from tests.helpers.models import job_of, trace_of
from tests.helpers.traces import load_trace, save_trace

FILE = Path(__file__).name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 10)
        self.kept: Any = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]


def with_hook() -> nn.Module:
    net = Net()
    net.first.register_forward_hook(lambda module, args, out: net.kept.append(out))
    return net


class Concatenating(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.kept = torch.cat([*self.kept, hidden.detach()]).split(10**9)
        return self.second(hidden)  # type: ignore[no-any-return]


class Cyclic(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        cycle: dict[str, Any] = {"hidden": hidden}
        cycle["itself"] = cycle
        return self.second(hidden)  # type: ignore[no-any-return]


class Lazy(Net):
    """Makes a buffer in the first step, and another in the second."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.kept) < 2:
            self.kept.append(torch.zeros(1000, device=x.device))
        return self.second(self.first(x))  # type: ignore[no-any-return]


def growth_of(build: Callable[[], nn.Module], batch: int = 8, **fields: Any) -> Any:
    job = job_of("256", **({"mode": Mode.TRAIN, "steps": 3} | fields))
    return find_growth(trace_of(build, job, batch))


@pytest.mark.parametrize("steps", [3, 6])
@pytest.mark.parametrize("batch", [8, 32])
def test_a_hook_that_keeps_activations_is_named(steps: int, batch: int) -> None:
    """Each step keeps one activation of every sample, made by the module at the line that calls it."""
    growth = growth_of(with_hook, batch, steps=steps)
    (site,) = growth.sites
    assert (growth.bytes_per_step, growth.steps) == (256 * 4 * batch, steps)
    assert (site.site.module, Path(site.source.source.partition(":")[0]).name) == ("first", FILE)
    assert "self.first(x)" in site.source.code
    assert not growth.is_garbage


def test_the_line_behind_growing_memory_is_found_once() -> None:
    """A second run finds it at the first batch size; at others of the job one run does."""
    built: list[nn.Module] = []

    def build(job: Job) -> nn.Module:
        with torch.device("meta"):
            built.append(with_hook())
        return built[-1]

    job, memory = job_of("256", mode=Mode.TRAIN, steps=3), CaptureMemory()
    first, second = (record(job, batch, (8, 6), build, memory=memory) for batch in (8, 16))
    assert first.growth_sources == second.growth_sources
    assert "self.first(x)" in second.growth_sources[0].code
    assert len(built) == 3


def test_a_buffer_that_is_concatenated_to_grows() -> None:
    """The block is a new one in each step, and larger by one batch."""
    growth = growth_of(Concatenating)
    assert growth.bytes_per_step == 256 * 4 * 8
    assert [site.site.op for site in growth.sites] == ["aten.cat.default"]


def test_reference_cycles_are_distinguished() -> None:
    """Memory that only cycles hold grows until the collector runs, and is named garbage."""
    growth = growth_of(Cyclic)
    assert growth.is_garbage
    assert growth.bytes_per_step == 256 * 4 * 8


@pytest.mark.parametrize(("mode", "modules"), [(Mode.INFER, ["first"]), (Mode.FORWARD, ["", "first"])])
def test_it_grows_without_training_too(mode: Mode, modules: list[str]) -> None:
    """Forward passes keep what a hook keeps, with gradients recorded also the input that its graph holds."""
    assert sorted(one.site.module for one in growth_of(with_hook, mode=mode).sites) == modules


@pytest.mark.parametrize(
    "fields",
    [
        *({"optimizer": optimizer} for optimizer in Optimizer),
        *({"zero_grad": when} for when in ZeroGrad),
        {"keep_grads": True},
        {"ema": True},
        {"evaluate": True},
        {"evaluate": True, "eval_batch": 64},
        {"accumulate": 3},
        {"ddp": True},
        {"clip_gradients": ClipGradients.NORM},
        {"steps": 7, "ddp": True, "ema": True, "optimizer": Optimizer.ADAM},
        {"mode": Mode.INFER},
        {"mode": Mode.FORWARD},
    ],
    ids=str,
)
def test_state_is_no_growth(fields: dict[str, Any]) -> None:
    """Optimizer state, averages, buckets, gradients and the names of an evaluation stay as they are."""
    assert growth_of(Net, **fields) is None


def test_buffers_made_late_are_no_growth() -> None:
    """A buffer of the first step and one of the second are there for good, and no third is made."""
    assert growth_of(Lazy) is None


def test_two_steps_show_nothing() -> None:
    """The second step may make what stays; only a third shows that it does not stop."""
    assert growth_of(with_hook, steps=2) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        *("torchvision:densenet121", "torchvision:googlenet", "torchvision:swin_t", "torchvision:maxvit_t"),
        *("torchvision:segmentation.lraspp_mobilenet_v3_large", "torchvision:video.r3d_18"),
        *("timm:resnet18", "timm:vit_tiny_patch16_224", "timm:convnext_atto"),
        *("hf:BertForSequenceClassification", "hf:GPT2LMHeadModel", "hf:T5ForConditionalGeneration"),
    ],
)  # fmt: skip
def test_models_of_the_libraries_do_not_grow(model: str) -> None:
    """Neither do models of torchvision, timm and transformers."""
    assert planner.estimate(model, 2).to_dict()["growth"] is None


LEAK = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.losses = []

    def forward(self, x):
        out = self.layer(x)
        self.losses.append(out)
        return out
"""


@pytest.fixture
def leak(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(LEAK)
    return f"{tmp_path / 'net.py'}:Net"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["fresh", "kept", "saved"])
def test_the_last_step_that_fits_is_the_last_step_that_fits(leak: str, source: str, tmp_path: Path) -> None:
    """The answer names a number of steps; so many fit, one more does not, whatever the trace comes from."""
    card: dict[str, Any] = {"allocator_cap_mib": 200}
    options: dict[str, Any] = {"input": "256", "loss": "sum"}
    if source == "kept":
        options["cache"] = tmp_path / "kept"
        planner.estimate(leak, 8192, **card, **options)
    saved = tmp_path / "leak.trace"
    fields = planner.estimate(leak, 8192, **card, **options, save_trace=saved).to_dict()
    if source == "saved":
        fields = planner.estimate(trace=saved, batch=8192, **card).to_dict()
    growth = fields["growth"]
    assert growth["bytes_per_step"] == 8 * 2**20
    assert growth["sites"][0]["source"].endswith("net.py:12")
    assert growth["is_exact"]
    last = growth["steps_that_fit"]
    sentence = fields["assumptions"][1]
    assert f"the answer is for 3 steps: after {last} steps it no longer fits" in sentence
    assert "each step keeps 8.0 MiB more, made by module layer (addmm, " in sentence
    assert planner.estimate(leak, 8192, steps=last, **card, **options).fits == "yes"
    assert planner.estimate(leak, 8192, steps=last + 1, **card, **options).fits == "no"


@pytest.mark.slow
def test_more_steps_are_planned_with_their_growth(leak: str) -> None:
    """The largest batch falls with the steps, and the table of GPUs gives the reason."""
    options: dict[str, Any] = {"input": "256", "loss": "sum"}
    few, many = (planner.max_batch(leak, gpu="L4", steps=steps, **options).max_batch for steps in (3, 30))
    assert many < few / 5
    table = planner.gpus(leak, filter="L4", **options).to_dict()
    assert "memory grows: each step keeps" in table["assumptions"][0]


def test_explain_says_it_from_its_own_trace(leak: str) -> None:
    """An explanation has the details of blocks already and names the same line."""
    result = planner.explain(leak, 64, input="256", loss="sum")
    assert result.to_dict()["estimate"]["growth"]["sites"][0]["code"] == "out = self.layer(x)"
    assert "memory grows: each step keeps 65,536 bytes more" in str(result).replace("\n    ", " ")


def test_a_trace_file_keeps_the_sources(tmp_path: Path) -> None:
    """A trace is read as it was written, with the sources of what grows."""
    job = job_of("256", mode=Mode.TRAIN, steps=3)
    taken = trace_of(with_hook, job, 8)
    assert [type(source) for source in taken.growth_sources] == [GrowthSource]
    save_trace(taken, tmp_path / "a.trace", {})
    assert load_trace(tmp_path / "a.trace")[0] == taken


STREAMS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def train_step(x):
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = model(x.cuda()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_streams_of_a_pool_are_used_again(tmp_path: Path) -> None:
    """Each step has a stream of its own with workspaces of cuBLAS, up to the 32 of torch's pool."""
    (tmp_path / "train.py").write_text(STREAMS)
    step = f"{tmp_path}/train.py:train_step"
    result = planner.estimate(step, 8, input=["64"], gpu="RTX 3090")
    growth = result.to_dict()["growth"]
    assert (growth["last_step"], growth["steps_that_fit"]) == (32, None)
    assert "until step 32 (--steps 32 plans for all of it)" in str(result).replace("\n    ", " ")
    reserved = [
        planner.estimate(step, 8, input=["64"], gpu="RTX 3090", steps=steps).to_dict()["peak_reserved_mib"]
        for steps in (3, 32, 34)
    ]
    assert reserved[0] < reserved[1] == reserved[2]
