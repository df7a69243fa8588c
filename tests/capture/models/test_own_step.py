"""Training steps of the user's own are traced as they run: phases, batches, optimizers and their state."""

import importlib
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import planner
from planner.capture.session import record
from planner.capture.techniques.own_step import BATCH_ON_GPU_NOTE
from planner.errors import ModelError
from planner.jobs import Job, Mode, parse_tensor_spec, resolve_job
from planner.program import find_growth
from planner.program.events import GRAPH_POOL, Alloc, Category, Free, Phase, PhaseStart, Trace, validate
from tests.helpers.models import AMPERE, born, story

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def net():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)

"""
STEP = """
class Training:
    def __init__(self):
        self.net = net()
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def step(self, batch):
        images, labels = batch
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""
GLOBALS = """
model = net()
optimizer = torch.optim.Adam(model.parameters())

def train_step(images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
"""
BATCH = 32
PARAMETERS = 4 * (64 * 128 + 128 + 128 * 8 + 8)


def job_of_code(folder: Path, code: str, name: str, *inputs: str, **options: object) -> Job:
    """Return the job of a user's file with this code."""
    file = folder / "train.py"
    file.write_text(HEAD + code)
    specs = [parse_tensor_spec(text) for text in (inputs or ("64", "scalar:int64"))]
    return resolve_job(f"{file}:{name}", {}, inputs=specs, **options)


def trace_code(folder: Path, code: str, name: str, *inputs: str, **options: object) -> Trace:
    """Return the trace of a user's step."""
    trace = record(job_of_code(folder, code, name, *inputs, **options), BATCH, AMPERE)
    validate(trace)
    return trace


def bytes_of(trace: Trace, category: Category) -> int:
    """Return the bytes of all blocks of a category."""
    return sum(e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is category)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "name"), [(STEP, "Training"), (GLOBALS, "train_step")])
def test_a_step_takes_what_it_makes(tmp_path: Path, code: str, name: str) -> None:
    """Parameters once, two moments once, gradients and a copy of the batch in each of three steps."""
    trace = trace_code(tmp_path, code, name)
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS
    assert bytes_of(trace, Category.GRADIENT) == 3 * PARAMETERS
    assert bytes_of(trace, Category.INPUT) == 3 * BATCH * (64 * 4 + 8)


def test_a_second_capture_starts_anew(tmp_path: Path) -> None:
    """Models and optimizers that are globals of the file are made again: no state is left from before."""
    job = job_of_code(tmp_path, GLOBALS, "train_step")
    assert record(job, BATCH, AMPERE) == record(job, BATCH, AMPERE)


def test_phases_follow_backward_passes_and_optimizers(tmp_path: Path) -> None:
    """A gradient penalty runs two backward passes in one step, in which the optimizer follows."""
    code = """
class Penalty:
    def __init__(self):
        self.net = net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x):
        x = x.to(device).requires_grad_()
        out = self.net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.norm()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
    trace = trace_code(tmp_path, code, "Penalty", "64", steps=1)
    phases = [event.phase for event in trace.events if isinstance(event, PhaseStart)]
    middle = [Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER, Phase.FORWARD]
    assert phases == [Phase.SETUP, Phase.INPUTS, Phase.FORWARD, *middle, Phase.END]


def test_a_batch_that_is_not_moved_is_planned_on_the_gpu(tmp_path: Path) -> None:
    """A step for a loader that moves batches: the batch is there, and the answer says so."""
    code = GLOBALS.replace(".cuda()", "")
    trace = trace_code(tmp_path, code, "train_step")
    assert bytes_of(trace, Category.INPUT) == 3 * BATCH * (64 * 4 + 8)
    assert BATCH_ON_GPU_NOTE in trace.notes


def test_a_logged_loss_is_not_computed(tmp_path: Path) -> None:
    """A number of a batch that no CPU holds is read, as scripts log it: it is finite, positive and small."""
    code = STEP.replace("loss.backward()\n", "loss.backward()\n        assert 0 < loss.item() < 0.01\n")
    logged = record(job_of_code(tmp_path, code, "Training"), 2**34, AMPERE)
    silent = record(job_of_code(tmp_path, STEP, "Training"), 2**34, AMPERE)
    assert logged.events == silent.events
    assert any("numbers of large tensors that are read are taken as 0.0010" in note for note in logged.notes)


def test_work_on_the_cpu_takes_no_memory(tmp_path: Path) -> None:
    """What is computed of the batch before it is moved, and what is brought back, lies on the CPU."""
    code = STEP.replace(
        "images, labels = batch\n",
        "images, labels = (batch[0] * 2 + 1).flip(1), batch[1]\n"
        "        assert images.device.type == 'cpu' and not images.is_cuda\n",
    ).replace("loss.backward()\n", "loss.backward()\n        kept = self.net[0].weight.detach().cpu() * 2\n")
    assert trace_code(tmp_path, code, "Training").events == trace_code(tmp_path, STEP, "Training").events


def test_what_a_step_makes_on_the_cpu_meets_its_batch_there(tmp_path: Path) -> None:
    """A tensor without a device is one of the CPU, as the batch is before it is moved."""
    code = STEP.replace(
        "images, labels = batch\n",
        "images, labels = batch\n        images = torch.cat([images, torch.zeros(32, 64)], 1)[:, 64:]\n",
    )
    trace = trace_code(tmp_path, code, "Training")
    assert bytes_of(trace, Category.INPUT) == 3 * BATCH * (64 * 4 + 8)


@pytest.mark.parametrize(
    "rows", ["torch.arange(32)", "batch[1]"], ids=["made on the CPU", "of the batch, which is on the CPU"]
)
def test_indices_of_the_cpu_are_moved(tmp_path: Path, rows: str) -> None:
    """A tensor on the GPU may be indexed by one of the CPU, which takes a block there for as long as that."""
    code = STEP.replace(
        "loss.backward()\n", f"kept = labels[{rows}]\n        del kept\n        loss.backward()\n"
    )
    there = code.replace(f"labels[{rows}]", f"labels[{rows.replace('batch[1]', 'labels')}]")
    there = there.replace("torch.arange(32)", "torch.arange(32, device=device)")
    on_gpu, on_cpu = (trace_code(tmp_path, one, "Training") for one in (there, code))
    assert born(on_cpu, "index") == [8 * BATCH, 8 * BATCH] * 3
    assert born(on_gpu, "index") == [8 * BATCH] * 3


def test_results_of_the_gpu_may_be_written_into_a_tensor_of_the_cpu(tmp_path: Path) -> None:
    """A step may fill a tensor of the CPU with labels of the GPU, as assigners of detectors do."""
    code = """
model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train_step(images, labels):
    images, labels = images.to(device), labels.to(device)
    scores = model(images)
    PLACES
    optimizer.zero_grad()
    scores[places[0], places[1]].mean().backward()
    optimizer.step()
"""
    made = "places = torch.zeros(2, len(labels), dtype=torch.long); "
    filled = made + "places[0] = torch.arange(len(labels)); places[1] = labels"
    listed = made + "places = torch.stack([torch.arange(len(labels)), labels.cpu()])"
    expected = trace_code(tmp_path, code.replace("PLACES", listed), "train_step")
    found = trace_code(tmp_path, code.replace("PLACES", filled), "train_step")
    assert born(found) == born(expected)


def test_operators_that_run_on_the_cpu_need_no_known_workspace(tmp_path: Path) -> None:
    """Mixing weights that a step draws on the CPU take no scratch memory of the GPU; on the GPU they may."""
    code = """
model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train_step(images, labels):
    weight = torch.distributions.Dirichlet(torch.ones(2PLACE)).sample()[0]
    (weight.to(device) * F.cross_entropy(model(images.to(device)), labels.to(device))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert not trace_code(tmp_path, code.replace("PLACE", ""), "train_step").unknown_ops
    on_gpu = trace_code(tmp_path, code.replace("PLACE", ", device=device"), "train_step")
    assert on_gpu.unknown_ops == ("aten._sample_dirichlet.default",)


AUGMENTED = """
model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train_step(images, labels):
    window = torch.ones(64, 64) @ torch.ones(64, 64)
    images = READ
    F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "read",
    [
        "torch.from_numpy(images.numpy() * 2)",
        "torch.from_numpy(images.data.cpu().numpy()[:, ::-1].copy())",
        "torch.tensor(images.numpy(force=True))",
        "torch.as_tensor(__import__('numpy').asarray(images))",
    ],
)
def test_a_step_may_change_its_batch_with_numpy(tmp_path: Path, read: str) -> None:
    """Augmentations read the batch on the CPU; neither they nor products there take memory of the GPU."""
    trace = trace_code(tmp_path, AUGMENTED.replace("READ", read), "train_step")
    plain = AUGMENTED.replace("READ", "images").replace(" @ torch.ones(64, 64)", "")
    assert born(trace) == born(trace_code(tmp_path, plain, "train_step"))


def test_an_array_of_a_tensor_on_the_gpu_is_refused_as_on_a_gpu(tmp_path: Path) -> None:
    """torch asks for a copy to the CPU first."""
    with pytest.raises(ModelError, match="copy it with .cpu.. first"):
        trace_code(tmp_path, AUGMENTED.replace("READ", "images.to(device).numpy()"), "train_step")


WEIGHTED = """
weights = MADE
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train_step(images, labels):
    if weights.min() < 0:
        raise ValueError("weights are negative")
    F.cross_entropy(model(images.to(device)), labels.to(device), weights).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("made", ["torch.full((8,), 0.5).to(device)", "torch.full((8,), 0.5).cuda()"])
def test_constants_that_the_code_moves_to_the_gpu_keep_their_values(tmp_path: Path, made: str) -> None:
    """A check of weights that a file makes itself is decided by their values."""
    trace_code(tmp_path, WEIGHTED.replace("MADE", made), "train_step")
    with pytest.raises(ModelError, match="weights are negative"):
        trace_code(tmp_path, WEIGHTED.replace("MADE", made.replace("0.5", "-0.5")), "train_step")


AVERAGED = """
from copy import deepcopy
model = net().to(device)
average = deepcopy(model).MOVE
optimizer = torch.optim.Adam(model.parameters())

def train_step(images, labels):
    F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for own, new in zip(average.parameters(), model.parameters()):
            own.lerp_(new.to("cpu"), 0.1)
"""


@pytest.mark.parametrize("move", ["cpu()", "to('cpu')", "to(device=torch.device('cpu'))"])
def test_modules_that_the_code_moves_to_the_cpu_take_no_memory(tmp_path: Path, move: str) -> None:
    """An average of the weights that is kept on the CPU is updated there, with copies of the weights."""
    trace = trace_code(tmp_path, AVERAGED.replace("MOVE", move), "train_step")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS


def test_a_module_that_leaves_the_cpu_again_is_on_the_gpu(tmp_path: Path) -> None:
    """`to_empty` puts a module on the GPU that was moved to the CPU before."""
    code = AVERAGED.replace("net().to(device)", "net().cpu().to_empty(device=device)")
    trace = trace_code(tmp_path, code.replace("MOVE", "cpu()"), "train_step")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS


def test_a_step_whose_modules_are_all_on_the_cpu_is_refused(tmp_path: Path) -> None:
    """Such a step takes no memory of the GPU, which is not what was asked for."""
    code = AVERAGED.replace("net().to(device)", "net().to('cpu')").replace("MOVE", "cpu()")
    with pytest.raises(ModelError, match="moves its modules to the CPU; name the device cuda"):
        trace_code(tmp_path, code, "train_step")


def test_tensors_of_both_sides_do_not_meet(tmp_path: Path) -> None:
    """As on a GPU, a product of a tensor there and one on the CPU fails."""
    code = STEP.replace(
        "images.to(device), labels.to(device)", "images.to(device) * images, labels.to(device)"
    )
    code = code.replace("self.net = net()", "self.net = net().to(device); self.table = torch.ones(64).cpu()")
    code = code.replace("* images,", "* (images.cpu() * 2),")
    with pytest.raises(ModelError, match="tensors of CPU and GPU meet"):
        trace_code(tmp_path, code, "Training")


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("def step(self, batch):\n        assert isinstance(batch, list) and len(batch) == 2", ("64", "8")),
        ("def step(self, x):\n        assert x.shape == (32, 64)", ("64",)),
        ("def step(self, batch):\n        assert batch.keys() == {'ids', 'mask'}", ("ids=64", "mask=64")),
        ("def step(self, batch):\n        (x,) = batch\n        assert x.shape == (32, 64)", ("64",)),
        ("def step(self, mask, ids):\n        assert ids.shape == (32, 8)", ("ids=8", "mask=64")),
        ("def step(self, batch):\n        assert batch['a'].shape == (32, 8)", ("batch.a=8", "batch.b=64")),
    ],
)
def test_a_batch_is_passed_as_a_loader_gives_it(tmp_path: Path, body: str, passed: tuple[str, ...]) -> None:
    """One argument takes a tensor, a list or a dict; several take the tensors in order, or by their names."""
    code = f"class Training:\n    def __init__(self):\n        self.net = net()\n\n    {body}\n"
    assert "no optimizer of torch.optim stepped" in trace_code(tmp_path, code, "Training", *passed).notes[0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "class T:\n    def step(self, x): ...",
            "its step takes x and holds no nn.Module or optimizer that can be found",
        ),
        ("def make():\n    return 3", "gives an int without step"),
        (STEP.replace("step(self, batch)", "step(self, a, b, c)"), "takes a, b, c; 2 tensors are given"),
    ],
)
def test_what_is_no_step_is_refused(tmp_path: Path, code: str, message: str) -> None:
    """In one line that says what is missing."""
    name = code.partition("def make")[1].removeprefix("def ") or code.split("class ")[1].partition(":")[0]
    with pytest.raises(planner.errors.PlannerError, match=message):
        trace_code(tmp_path, code, name, mode="step")


LIGHTNING = """
import lightning.pytorch as pl

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch, index):
        images, labels = batch
        assert self.trainer.current_epoch == 0
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
"""


def test_a_lightning_module_trains_as_the_loop_does(tmp_path: Path) -> None:
    """It allocates what the same network, loss and optimizer do in the planner's loop, in the same order.

    Scalars are left out, since Lightning divides its loss.
    """
    ours = HEAD.replace("def net()", "def build()").replace(".to(device)", "")
    (tmp_path / "plain.py").write_text(ours)
    plain = resolve_job(
        f"{tmp_path / 'plain.py'}:build", {}, inputs=[parse_tensor_spec("64")],
        target=parse_tensor_spec("scalar:int64"), optimizer="adam", zero_grad="before-backward",
    )  # fmt: skip
    made, expected = trace_code(tmp_path, LIGHTNING, "Classifier"), record(plain, BATCH, AMPERE)
    assert [size for size in born(made) if size > 4] == [size for size in born(expected) if size > 4]


METRIC = """
class Metric(nn.Module):
    # As torchmetrics writes it: states are plain attributes, which `_apply` moves with the model.
    def __init__(self):
        super().__init__()
        self._defaults = {"total": torch.zeros(1000)}
        self.total = self._defaults["total"].clone()

    def _apply(self, fn, *args):
        super()._apply(fn, *args)
        self._defaults = {key: fn(value) for key, value in self._defaults.items()}
        self.total = fn(self.total)
        return self

    def forward(self, value):
        self.total = self._defaults["total"].clone().to(self.total.device) + value

class Measured(Classifier):
    def __init__(self):
        super().__init__()
        self.metric = Metric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.metric(loss.detach())
        return loss
"""


def test_states_that_a_module_moves_by_itself_are_on_the_gpu(tmp_path: Path) -> None:
    """The states and defaults of a metric are moved with the model, and meet its losses on the GPU."""
    plain = trace_code(tmp_path, LIGHTNING, "Classifier")
    trace = trace_code(tmp_path, LIGHTNING + METRIC, "Measured")
    assert bytes_of(trace, Category.PARAMETER) == bytes_of(plain, Category.PARAMETER) + 2 * 4000


def test_lightning_evaluates_without_the_gradients(tmp_path: Path) -> None:
    """They are released before, with the training's batch; the evaluation's batch is released after it."""
    trace = trace_code(tmp_path, LIGHTNING, "Classifier", evaluate=True)
    alive: dict[int, Category] = {}
    found = {}
    for event in trace.events:
        if isinstance(event, PhaseStart):
            found[event.phase] = {*alive.values()}
        elif isinstance(event, Alloc):
            alive[event.block] = event.category
        else:
            alive.pop(event.block)
    assert Category.GRADIENT in found[Phase.END] and Category.GRADIENT not in found[Phase.EVALUATION]
    assert Category.INPUT not in found[Phase.INPUTS]  # as the last batch is loaded


def test_optimization_by_hand_is_run_by_lightning(tmp_path: Path) -> None:
    """`self.optimizers()` and `manual_backward` are Lightning's own, and the batch is on the GPU."""
    trace = trace_code(tmp_path, LIGHTNING, "Manual")
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS
    assert bytes_of(trace, Category.INPUT) == 3 * BATCH * (64 * 4 + 8)
    assert born(trace, "mm")


PREPARED = """
class Training:
    def __init__(self):
        {start}
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.net, self.optimizer = {prepare}(net, torch.optim.Adam(net.parameters()))

    def step(self, batch):
        images, labels = [one.to({device}) for one in batch]
        assert {device}.type == "cuda"
        loss = F.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        {backward}(loss)
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    "words",
    [
        {
            "start": "from accelerate import Accelerator; self.accelerator = Accelerator()",
            "prepare": "self.accelerator.prepare",
            "backward": "self.accelerator.backward",
            "device": "self.accelerator.device",
        },
        {
            "start": "from lightning.fabric import Fabric; self.fabric = Fabric(accelerator='cuda')",
            "prepare": "self.fabric.setup",
            "backward": "self.fabric.backward",
            "device": "self.fabric.device",
        },
    ],
    ids=["accelerate", "fabric"],
)
def test_libraries_of_loops_find_the_planned_gpu(tmp_path: Path, words: dict[str, str]) -> None:
    """A step on accelerate or Fabric takes what the plain one does, and leaves no state of a GPU behind."""
    trace = trace_code(tmp_path, PREPARED.format(**words), "Training")
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS
    assert bytes_of(trace, Category.INPUT) == 3 * BATCH * (64 * 4 + 8)
    from accelerate.state import PartialState

    assert PartialState._shared_state == {}


def test_objects_are_told_apart_as_names_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with a step is planned as its name is; a function that is a step has its models already."""
    code = f"{HEAD}{STEP}".replace("(device)", "('cuda')")
    (tmp_path / "objects_of_a_test.py").write_text(f"{code}\n\ndef train_step(images):\n    ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("objects_of_a_test")
    result = planner.estimate(module.Training, BATCH, input="64", target="scalar:int64")
    assert result.estimate.job.loop.mode is Mode.STEP
    with pytest.raises(
        planner.errors.UsageError, match=r"a training step as objects_of_a_test\.py:train_step"
    ):
        planner.estimate(module.train_step, BATCH, input="64")


def test_a_file_may_parse_its_arguments_at_its_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's command line has no arguments, whatever that of the process has."""
    code = f"""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
lr = parser.parse_args().lr
{GLOBALS}
"""
    monkeypatch.setattr(sys, "argv", ["planner", "estimate", "--batch", "32"])
    assert bytes_of(trace_code(tmp_path, code, "train_step"), Category.PARAMETER) == PARAMETERS
    assert sys.argv == ["planner", "estimate", "--batch", "32"]


@pytest.mark.slow
def test_a_tensor_that_an_optimizer_holds_is_trained(tmp_path: Path) -> None:
    """A tensor on the GPU without a module has gradients and state, also where the constructor reads it."""
    code = """
class Temperature:
    def __init__(self):
        self.net = net()
        self.log_alpha = torch.zeros(1, requires_grad=True, device=device)
        self.alpha = self.log_alpha.exp().item()
        self.optimizer = torch.optim.SGD([self.log_alpha], lr=0.1, momentum=0.9)

    def step(self, x):
        loss = (self.log_alpha.exp() * self.net(x.to(device)).detach()).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.alpha = self.log_alpha.exp().item()
"""
    trace = trace_code(tmp_path, code, "Temperature", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 4
    assert bytes_of(trace, Category.GRADIENT) == 3 * 4
    assert bytes_of(trace, Category.OPTIMIZER) == 4


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["", "; float(self.zebra.weight.sum())"])
def test_parameters_come_in_the_order_in_which_the_code_moves_them(tmp_path: Path, reads: str) -> None:
    """Neither the names of modules nor their order in the step decide it; nor that values are read."""
    code = f"""
class Two:
    def __init__(self):
        self.aardvark = nn.Linear(64, 8, bias=False)
        self.zebra = nn.Linear(64, 16, bias=False).to(device)
        self.aardvark.to(device){reads}

    def step(self, x):
        x = x.to(device)
        (self.aardvark(x).sum() + self.zebra(x).sum()).backward()
"""
    trace = trace_code(tmp_path, code, "Two", "64")
    sizes = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    assert sizes == [64 * 16 * 4, 64 * 8 * 4]


def test_what_the_gpu_has_only_while_the_code_builds_is_freed(tmp_path: Path) -> None:
    """A model that is moved and then converted is there in both types, one tensor after another."""
    code = """
class Converted:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 8, bias=False))
        self.net = self.net.cuda().bfloat16()

    def step(self, x):
        self.net(x.to(device).bfloat16()).sum().backward()
"""
    events = trace_code(tmp_path, code, "Converted", "64").events
    alloc = {e.block: e.size_bytes for e in events if isinstance(e, Alloc)}
    setup = events[: next(n for n, e in enumerate(events) if isinstance(e, PhaseStart) and e.step == 1)]
    moves = [
        -alloc[e.block] if isinstance(e, Free) else e.size_bytes
        for e in setup
        if not isinstance(e, PhaseStart)
    ]
    assert moves == [4096, 512, 2048, -4096, 256, -512]


def test_a_view_is_moved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    """`hann_window` makes one value more than it shows, which stays on the CPU."""
    code = """
class Windowed:
    def __init__(self):
        self.net = nn.Linear(64, 8, bias=False)
        self.net.register_buffer("window", torch.hann_window(64))
        self.net.to(device)

    def step(self, x):
        self.net(x.to(device) * self.net.window).sum().backward()
"""
    trace = trace_code(tmp_path, code, "Windowed", "64")
    assert bytes_of(trace, Category.PARAMETER) == 64 * 8 * 4 + 64 * 4


def test_values_that_a_parameter_gets_may_be_read(tmp_path: Path) -> None:
    """Weights that a script draws by itself, where the step reads a value of its loss."""
    code = """
class Drawn:
    def __init__(self):
        self.net = nn.Linear(64, 8, bias=False)
        self.net.weight.data = torch.tensor([[0.5] * 64] * 8)
        self.net.to(device)

    def step(self, x):
        loss = self.net(x.to(device)).sum()
        loss.backward()
        return loss.detach().cpu().numpy()
"""
    assert bytes_of(trace_code(tmp_path, code, "Drawn", "64"), Category.PARAMETER) == 64 * 8 * 4


def test_parameters_in_a_list_are_those_of_their_modules(tmp_path: Path) -> None:
    """A list of what is trained, as scripts keep for optimizer and clipping, leaves parameters on the GPU."""
    code = """
class Adapted:
    def __init__(self):
        self.net = net()
        self.net.requires_grad_(False)
        self.adapter = nn.Linear(8, 4, bias=False).to(device)
        self.trained = [one for one in self.adapter.parameters()]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1)

    def step(self, x):
        self.adapter(self.net(x.to(device))).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
    trace = trace_code(tmp_path, code, "Adapted", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 4 * 8 * 4
    assert bytes_of(trace, Category.GRADIENT) == 3 * 4 * 8 * 4


@pytest.mark.parametrize(
    "copy", ["one.clone().detach()", "one.detach().clone()", "torch.clone(one).to(device)"]
)
def test_copies_of_parameters_lie_on_the_gpu_too(tmp_path: Path, copy: str) -> None:
    """A moving average that a list holds takes as much as the parameters, and meets them on the GPU."""
    code = f"""
class Averaged:
    def __init__(self):
        self.net = net()
        self.shadow = [{copy} for one in self.net.parameters()]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x):
        self.net(x.to(device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(self.shadow, self.net.parameters()):
                old.lerp_(new, 0.1)
"""
    trace = trace_code(tmp_path, code, "Averaged", "64")
    assert bytes_of(trace, Category.PARAMETER) == 2 * PARAMETERS


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        "torch.tensor([1.0] * 1024, device=device).view(32, 32)",
        "torch.ones(1024).to(device) * 2",
        "torch.cumprod(1 - torch.ones(32, 32, device='cuda'), 0)",
    ],
)
@pytest.mark.parametrize("reads", ["", "float(torch.ones(1))"])
def test_what_is_made_of_tensors_on_the_gpu_lies_there(tmp_path: Path, made: str, reads: str) -> None:
    """Constants of a script are moved once and computed with; each takes its memory before the first step."""
    code = f"""
{reads}
scale = {made}
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(x):
    (model(x.to(device)).sum() * scale.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 4 * 1024


def test_a_method_is_a_step(tmp_path: Path) -> None:
    """FILE.py:CLASS.METHOD takes what a class with `step` takes."""
    named = STEP.replace("def step", "def learn")
    trace = trace_code(tmp_path, named, "Training.learn")
    assert trace.events == trace_code(tmp_path, STEP, "Training").events


def test_a_method_needs_an_object(tmp_path: Path) -> None:
    """A constructor with arguments is refused in words of the options."""
    code = STEP.replace("__init__(self)", "__init__(self, config)").replace("def step", "def learn")
    with pytest.raises(ModelError, match="missing 1 required.*'config'; give it by --model-arg, or name a"):
        trace_code(tmp_path, code, "Training.learn")


CAPTURED = """
class Captured:
    def __init__(self):
        self.net = net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), capturable=True)
        self.graph = None
        BEFORE

    def update(self):
        loss = self.net(self.x).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def capture(self, x):
        self.x = x.to(device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.update()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            assert torch.cuda.is_current_stream_capturing()
            self.update()

    def step(self, x):
        if self.graph is None:
            self.capture(x)
        self.x.copy_(x)
        self.graph.replay()
"""
GRAPHED = """
class Graphed:
    def __init__(self):
        self.net, self.head = net(), nn.Linear(8, 8).to(device)
        self.optimizer = torch.optim.SGD([*self.net.parameters(), *self.head.parameters()], lr=0.1)
        self.graphed = None

    def step(self, x):
        x = x.to(device)
        if self.graphed is None:
            self.graphed = torch.cuda.make_graphed_callables(self.net, (torch.randn_like(x),))
        self.optimizer.zero_grad()
        self.head(self.graphed(x)).sum().backward()
        self.optimizer.step()
"""


def allocations_by_step(trace: Trace) -> dict[int, list[Alloc]]:
    """Return the allocations of each step."""
    steps: dict[int, list[Alloc]] = {}
    step = 0
    for event in trace.events:
        step = event.step if isinstance(event, PhaseStart) else step
        if isinstance(event, Alloc):
            steps.setdefault(step, []).append(event)
    return steps


def test_a_captured_graph_keeps_a_pool_and_replays_without_allocating(tmp_path: Path) -> None:
    """Captured blocks lie in a pool of their own; the graph's two numbers on the default stream."""
    steps = allocations_by_step(trace_code(tmp_path, CAPTURED.replace("BEFORE", ""), "Captured", "64"))
    assert steps.keys() == {0, 1}
    streams = {event.stream for event in steps[1]}
    assert {stream for stream in streams if stream >= GRAPH_POOL} == {GRAPH_POOL + 1}
    assert [e.size_bytes for e in steps[1] if e.stream == 0] == [4 * 64 * BATCH, 8, 8]


def test_graphed_callables_share_a_pool(tmp_path: Path) -> None:
    """The forward and backward graph of a module have one pool, which later steps do not touch."""
    steps = allocations_by_step(trace_code(tmp_path, GRAPHED, "Graphed", "64"))
    pools = [{event.stream for event in steps[one] if event.stream >= GRAPH_POOL} for one in (1, 2, 3)]
    assert pools == [{GRAPH_POOL + 1}, set(), set()]


def test_a_graph_before_the_first_step_is_refused(tmp_path: Path) -> None:
    """In one line with the line that captures it; nothing records what a constructor runs."""
    code = CAPTURED.replace("BEFORE", "self.capture(torch.zeros(8, 64))")
    for given in (code, code.replace(", capturable=True", "")):
        with pytest.raises(ModelError, match=r"train.py:\d+ captures a CUDA graph before the first step"):
            trace_code(tmp_path, given, "Captured", "64")


COMPILED = """
model = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Tanh(), nn.Linear(128, 8)).to(device)
compiled = torch.compile(model, mode=MODE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(images):
    compiled(images.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_step_that_compiles_is_planned_compiled_where_the_job_says_so(tmp_path: Path) -> None:
    """Sigmoid and tanh are one kernel then; with CUDA graphs, in the mode of the file, in their pool."""
    eager, plain, graphs = (
        trace_code(tmp_path, COMPILED.replace("MODE", mode), "train_step", "64", compile=compiled)
        for mode, compiled in (("None", "none"), ("None", "default"), ("'reduce-overhead'", "default"))
    )
    hidden = 4 * BATCH * 128
    born_later = [[size for size in _forward_of(trace, 2) if size == hidden] for trace in (eager, plain)]
    assert [len(sizes) for sizes in born_later] == [3, 2]
    assert any(isinstance(event, Alloc) and event.stream == GRAPH_POOL for event in graphs.events)
    assert not any(isinstance(event, Alloc) and event.stream == GRAPH_POOL for event in plain.events)


def _forward_of(trace: Trace, step: int) -> list[int]:
    """Return the sizes of the blocks that the forward pass of a step allocates."""
    sizes, now = [], (0, Phase.SETUP)
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.step, event.phase
        elif isinstance(event, Alloc) and now == (step, Phase.FORWARD):
            sizes.append(event.size_bytes)
    return sizes


def generation_trace(**arguments: object) -> Trace:
    script = Path(__file__).parents[3] / "tests/programs/scripts/generate.py"
    inputs = [parse_tensor_spec("16:int64")]
    job = resolve_job(f"{script}:Generation", {}, inputs=inputs, model_args=list(arguments.items()), steps=1)
    return record(job, 4, AMPERE)


def test_generation_of_transformers_is_a_step() -> None:
    """A static cache holds keys and values of prompt and answer in each layer: 2 heads of 32 numbers."""
    pytest.importorskip("transformers")
    trace = generation_trace(layers=2, new_tokens=3, cache_implementation="static")
    cache = 4 * 2 * (16 + 3 - 1) * 32 * 2  # the last token is never read
    zeros = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and trace.sites[event.site].op == "aten.zeros.default"
    ]
    assert zeros.count(cache) == 2 * 2


def test_an_offloaded_cache_comes_back_on_a_stream_of_its_own() -> None:
    """A layer's keys and values come back while the layer before runs: of 16, 17 and 18 tokens."""
    pytest.importorskip("transformers")
    trace = generation_trace(layers=3, new_tokens=3, cache_implementation="offloaded")
    fetched = [event.size_bytes for event in trace.events if isinstance(event, Alloc) and event.stream]
    token = 4 * 2 * 32 * 2
    assert set(fetched) == {16 * token, 17 * token, 18 * token}


OFFLOADED = """
from torchao.optim import CPUOffloadOptimizer

class Training:
    def __init__(self):
        self.net = net()
        self.optimizer = CPUOffloadOptimizer(self.net.parameters())

    def step(self, batch):
        images, labels = (one.to(device) for one in batch)
        F.cross_entropy(self.net(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


def test_an_optimizer_on_the_host_is_pinned(tmp_path: Path) -> None:
    """Of a weight of 8,192 numbers two pinned copies and its moments are on the host, of others nothing."""
    pytest.importorskip("torchao")
    trace = trace_code(tmp_path, OFFLOADED, "Training")
    assert trace.pinned == (4 * 64 * 128, 4 * 64 * 128)
    small = 4 * (128 + 128 * 8 + 8)
    state = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.OPTIMIZER]
    assert sum(size for size in state if size > 4) == 2 * small
    assert any(f"{8 * 64 * 128 + 4:,} bytes of state" in note for note in trace.notes)
    assert any("CPUOffloadOptimizer" in note for note in trace.notes)


def test_globals_that_methods_of_its_class_use_are_counted(tmp_path: Path) -> None:
    """A table of the file, on the GPU since its import, is read by a function that a method calls."""
    code = f"""
table = torch.ones(100, 64).to(device)

def weigh(images):
    return images * table[:1]
{STEP.replace("self.net(images)", "self.net(weigh(images))")}"""
    trace = trace_code(tmp_path, code, "Training")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 4 * 100 * 64


def test_a_tensor_that_its_step_replaces_is_freed(tmp_path: Path) -> None:
    """A queue of the constructor's dies when the first step assigns another, with and without values."""
    code = STEP.replace("self.net = net()", "self.net, self.queue = net(), torch.zeros(5000, 8).to(device)")
    code += "        self.queue = self.queue + 1\n"
    for more in ("", "        loss.item()\n"):
        trace = trace_code(tmp_path, code + more, "Training")
        queues = [one for one in trace.events if isinstance(one, Alloc) and one.size_bytes == 4 * 5000 * 8]
        freed = {event.block for event in trace.events if isinstance(event, Free)}
        assert len(queues) == 4
        assert [queue.block in freed for queue in queues] == [True, True, True, False]


WITHOUT_GRADIENTS = """
class Scoring:
    def __init__(self):
        self.net = net()

    def step(self, images, labels):
        with torch.{mode}():
            hidden = self.net[0](images.to(device))
            mixed = torch.einsum("bi,bj->ij", hidden, hidden)
            mixed = torch.where(mixed > 0, mixed, 0.5).transpose(0, 1).reshape(2, 64, 128)
            mixed = F.scaled_dot_product_attention(mixed, mixed, mixed)
            mixed += 1
            self.scores = self.net[2](F.dropout(hidden + mixed.sum()))
"""


def test_inference_mode_allocates_as_without_gradients(tmp_path: Path) -> None:
    """Compositions are the same operators in both, and none of them is unknown."""
    traces = [
        trace_code(tmp_path, WITHOUT_GRADIENTS.format(mode=mode), "Scoring", steps=2)
        for mode in ("no_grad", "inference_mode")
    ]
    assert traces[1].events == traces[0].events
    assert traces[1].sites == traces[0].sites
    assert traces[1].unknown_ops == ()


IN_A_CLASS_OF_TENSORS = """
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return score(args[0].inner)


def score(x):
    copies = x.t().contiguous(), x.t().flatten(), x.double()
    square = torch.matmul(x, x.t().reshape(-1).view(x.shape[1], -1))
    return F.linear(square, square, square[0])


class Scoring:
    def __init__(self):
        self.net = net()

    def step(self, images, labels):
        with torch.no_grad():
            x = images.to(device)
            self.scores = {call}
"""


@pytest.mark.parametrize("method", ["__tensor_flatten__", "flattened"])
def test_composites_in_a_class_of_tensors_allocate_as_outside_it(tmp_path: Path, method: str) -> None:
    """The class is called beneath autograd, where nothing takes composites apart."""
    calls = ("score(x)", "torch.relu(Wrapper(x))")
    named = IN_A_CLASS_OF_TENSORS.replace("__tensor_flatten__", method)
    code = (named.replace("{call}", call) for call in calls)
    plain, wrapped = (trace_code(tmp_path, one, "Scoring", steps=2) for one in code)
    assert wrapped.events == plain.events
    assert wrapped.sites == plain.sites
    assert wrapped.unknown_ops == ()


@pytest.mark.parametrize(("mode", "casts"), [("no_grad", 1), ("inference_mode", 3)])
def test_inference_mode_keeps_no_casts_of_weights(tmp_path: Path, mode: str, casts: int) -> None:
    """Autocast casts a weight once in a region, but again for each product in inference mode."""
    code = f"""
class Scoring:
    def __init__(self):
        self.layer = nn.Linear(1000, 500, bias=False).to(device)

    def step(self, batch):
        with torch.{mode}(), torch.autocast("cuda", torch.bfloat16):
            for _ in range(3):
                self.scores = self.layer(batch.to(device))
"""
    trace = trace_code(tmp_path, code, "Scoring", "1000", steps=1)
    made = [one for one in trace.events if isinstance(one, Alloc) and one.size_bytes == 2 * 1000 * 500]
    assert len(made) == casts


@pytest.mark.parametrize(("options", "counters"), [("", 0), (", fused=True", 4)])
def test_state_that_an_optimizer_makes_at_once_has_its_counters_on_the_cpu(
    tmp_path: Path, options: str, counters: int
) -> None:
    """Adagrad makes a sum for each parameter; its counters of steps are on the GPU only where it is fused."""
    code = STEP.replace("optim.Adam(self.net.parameters()", f"optim.Adagrad(self.net.parameters(){options}")
    trace = trace_code(tmp_path, code, "Training")
    assert bytes_of(trace, Category.OPTIMIZER) == PARAMETERS + 4 * counters


def test_an_optimizer_that_calls_the_model_reads_what_comes_of_it(tmp_path: Path) -> None:
    """LBFGS ends at gradients of zero, else it calls its closure again, and keeps what each step changed."""
    code = """
class Training:
    def __init__(self):
        self.net = net()
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), max_iter=2)

    def step(self, images, labels):
        images, labels = images.to(device), labels.to(device)

        def closure():
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(images), labels)
            loss.backward()
            return loss

        self.optimizer.step(closure)
"""
    trace = trace_code(tmp_path, code, "Training", steps=4)
    calls = [size for size in born(trace, "relu") if size == 4 * BATCH * 128]
    assert len(calls) == 2 * 4
    growth = find_growth(trace)
    assert growth is not None
    assert growth.bytes_per_step >= 2 * PARAMETERS  # a change of the gradient and one of the parameters


def test_a_step_may_train_tensors_without_a_module(tmp_path: Path) -> None:
    """As planes of features or pixels, which an optimizer holds."""
    code = """
planes = torch.nn.Parameter(torch.randn(64, 100, device=device))
optimizer = torch.optim.Adam([planes])

def train_step(images, labels):
    optimizer.zero_grad()
    F.cross_entropy(images.to(device) @ planes, labels.to(device)).backward()
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step", steps=3)
    kinds = Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER
    assert [bytes_of(trace, kind) // (4 * 6400) for kind in kinds] == [1, 3, 2]


def test_an_optimizer_that_its_step_makes_is_freed_with_its_state(tmp_path: Path) -> None:
    """As an inversion of images does for each batch: two moments in each step, and no growth."""
    code = """
model = net()

def train_step(images, labels):
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.zero_grad()
    F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step", steps=3)
    states = {e.block for e in trace.events if isinstance(e, Alloc) and e.category is Category.OPTIMIZER}
    assert states <= {e.block for e in trace.events if isinstance(e, Free)}
    assert bytes_of(trace, Category.OPTIMIZER) >= 3 * 2 * PARAMETERS and find_growth(trace) is None


def test_optimizer_state_that_its_step_replaces_is_freed(tmp_path: Path) -> None:
    """The first moments of an optimizer that makes them at once end in the first step, the last one too."""
    code = """
class Moments(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        for one in self.param_groups[0]["params"]:
            self.state[one]["moment"] = torch.zeros_like(one)

    def step(self):
        for one in self.param_groups[0]["params"]:
            self.state[one]["moment"] = 0.9 * self.state[one]["moment"] + one.grad

class Training:
    def __init__(self):
        self.net = net()
        self.optimizer = Moments(self.net.parameters())

    def step(self, images, labels):
        self.net.zero_grad()
        F.cross_entropy(self.net(images.to(device)), labels.to(device)).backward()
        self.optimizer.step()
"""
    trace = trace_code(tmp_path, code, "Training", steps=2)
    states = [
        event.block
        for event in trace.events[: trace.events.index(PhaseStart(1, Phase.FORWARD))]
        if isinstance(event, Alloc) and event.category is Category.OPTIMIZER
    ]
    assert len(states) == 4
    second = trace.events.index(PhaseStart(2, Phase.FORWARD))
    assert {event.block for event in trace.events[:second] if isinstance(event, Free)} >= {*states}


def test_gradients_of_each_sample_are_planned(tmp_path: Path) -> None:
    """Wrappers of torch.func have no storage: vmap of grad gives 32 gradients of the weights in each step."""
    code = """
from torch.func import functional_call, grad, vmap

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(parameters, image, label):
    return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

def train_step(images, labels):
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, images.to(device), labels.to(device))
    for name, one in model.named_parameters():
        one.grad = each[name].mean(0)
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step")
    assert born(trace, "bmm").count(BATCH * 4 * 64 * 128) == 3


def setup_of(trace: Trace) -> list[int]:
    """Return the sizes of the blocks before the first step, negative where they are freed there."""
    sizes: dict[int, int] = {}
    moves = []
    for event in trace.events:
        if isinstance(event, PhaseStart) and event.phase is not Phase.SETUP:
            return moves
        if isinstance(event, Alloc):
            sizes[event.block] = event.size_bytes
            moves.append(event.size_bytes)
        elif isinstance(event, Free):
            moves.append(-sizes[event.block])
    return moves


SETUP = """
class Training:
    def __init__(self):
        self.net = nn.Linear(64, 32, bias=False).to(device)
        {line}
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x):
        self.net(x.to(device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
WEIGHT = 64 * 32 * 4
MASK = [WEIGHT // 4] * 3 + [-WEIGHT // 4] * 2  # of what lies beyond two bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("self.net.to(torch.float64).to(torch.float32)", [WEIGHT, 2 * WEIGHT, -WEIGHT, WEIGHT, -2 * WEIGHT]),
        ("torch.empty(100, device=device)", [WEIGHT, 400, -400]),
        ("self.kept = torch.empty(100, device=self.net.weight.device)", [WEIGHT, 400]),
        ("self.net.weight.detach().clone().cpu()", [WEIGHT, WEIGHT, -WEIGHT]),
        ("self.net.cpu(); self.net.to(device)", [WEIGHT, -WEIGHT, WEIGHT]),
        ("self.best = float((self.net.weight.detach() * 2).amax())", [WEIGHT, WEIGHT, 4, -WEIGHT, -4]),
        (
            "scale = nn.Parameter(torch.empty(100, device=device)); float(scale.detach().amax()); "
            "self.all = nn.ParameterList([scale])",
            [WEIGHT, 400, 4, -4],
        ),
        (
            "nn.init.orthogonal_(self.net.weight)",  # by Q, R, the factors of reflections and two statuses
            [WEIGHT, WEIGHT, WEIGHT, 4096, 128, 4, -4, 4, -4, -128, 128, 128, -WEIGHT, -WEIGHT, -4096]
            + [-128, -128],
        ),
        (  # the weights lie so far inside the bounds that none is drawn anew
            "nn.init.trunc_normal_(self.net.weight, std=0.02)",
            [WEIGHT, *MASK, 1, -1, -(WEIGHT // 4)],
        ),
    ],
    ids=[
        *("cast", "for a moment", "where the weights are", "copied to the CPU", "moved away", "values"),
        *("registered after its values are read", "orthogonal weights", "truncated"),
    ],
)
def test_what_a_constructor_frees_again_is_recorded(tmp_path: Path, line: str, moves: list[int]) -> None:
    """Blocks that come and go on the GPU before the first step are in the trace, in their order."""
    trace = trace_code(tmp_path, SETUP.format(line=line), "Training", "64")
    assert setup_of(trace) == moves


@pytest.mark.parametrize(
    ("std", "quarters"),
    [
        (0.5, 4 + 3),  # none of 2,048 weights lies beyond the bounds, at 4 deviations
        (0.6, 4 + 1 + 8),  # 1.8 do, and are drawn anew: candidates, and the weights with them
        (1.0, 4 + 1 + 12),  # 93 do, and 4 of those drawn anew: two copies with candidates
        (20.0, 4 + 3 + 12),  # drawn evenly between the bounds: two buffers, and a copy with those drawn anew
    ],
)
def test_truncated_weights_are_drawn_anew(tmp_path: Path, std: float, quarters: int) -> None:
    """Beside the weights are copies of the same size, and masks, a quarter of it."""
    line = f"nn.init.trunc_normal_(self.net.weight, std={std})"
    trace = trace_code(tmp_path, SETUP.format(line=line), "Training", "64")
    moves = setup_of(trace)
    assert max(accumulate(moves)) == quarters * WEIGHT // 4
    assert sum(moves) == WEIGHT


def test_truncated_weights_of_older_versions_are_drawn_once(tmp_path: Path) -> None:
    """Before torch 2.13 `trunc_normal_` works in place, without a tensor of its own."""
    line = "nn.init.trunc_normal_(self.net.weight)"
    trace = trace_code(tmp_path, SETUP.format(line=line), "Training", "64", torch="2.12")
    assert setup_of(trace) == [WEIGHT]


ACCUMULATES = """
class Accumulate:
    def __init__(self):
        self.net = net()

    def step(self, images, labels):
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(self.net(images.to(device)), labels.to(device))
        loss.backward()
"""


def test_gradients_are_gradients_without_an_optimizer(tmp_path: Path) -> None:
    """A step without an optimizer keeps its gradients, those of later steps are added to them in place."""
    trace = trace_code(tmp_path, ACCUMULATES, "Accumulate")
    assert bytes_of(trace, Category.GRADIENT) == PARAMETERS


CONVERTED = """
def layers():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

class Converted:
    def __init__(self):
        {making}
        self.net = made.to(torch.float64).to(torch.bfloat16)

    def step(self, images, labels):
        return self.net(images.to(device, torch.bfloat16))
"""
MAKING = (
    'made = net().to("cuda")',
    'with torch.device("cuda"):\n            made = layers()',
    'torch.set_default_device("cuda")\n        made = net()\n        torch.set_default_device(None)',
    'with torch.device("meta"):\n            made = layers()\n        made = made.to_empty(device="cuda")',
)


@pytest.mark.slow
@pytest.mark.parametrize("making", MAKING)
def test_a_model_that_is_converted_on_the_gpu_takes_each_of_its_types(tmp_path: Path, making: str) -> None:
    """However it came onto the GPU: float32 first, then twice as much, then half of it."""
    trace = trace_code(tmp_path, CONVERTED.format(making=making), "Converted")
    setup = [e for e in trace.events[: _start_of_loop(trace)] if isinstance(e, Alloc)]
    sizes = [64 * 128, 128, 128 * 8, 8]
    assert [e.size_bytes for e in setup] == [width * size for width in (4, 8, 2) for size in sizes]


def _start_of_loop(trace: Trace) -> int:
    return next(at for at, e in enumerate(trace.events) if isinstance(e, PhaseStart) and e.step == 1)


def _held_at_the_end(trace: Trace) -> int:
    """Return the bytes that the set-up leaves on the GPU."""
    sizes: dict[int, int] = {}
    for event in trace.events[: _start_of_loop(trace)]:
        if isinstance(event, Alloc):
            sizes[event.block] = event.size_bytes
        elif isinstance(event, Free):
            sizes.pop(event.block, None)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("kept", "size_bytes"),
    [
        ("validation = torch.zeros(1024, 1024, device=device)", 1024 * 1024 * 4),
        ("data = torch.utils.data.TensorDataset(torch.zeros(512, 64, device=device))", 512 * 64 * 4),
        ("halves = [torch.zeros(512, 64, device=device).chunk(2)]", 512 * 64 * 4),
        ("prior = torch.distributions.Normal(*torch.ones(512, 64, device=device).chunk(2))", 512 * 64 * 4),
    ],
)
@pytest.mark.parametrize("result", ["", "    return loss.item()\n"])
def test_what_a_file_keeps_on_the_gpu_stays_there(
    tmp_path: Path, kept: str, size_bytes: int, result: str
) -> None:
    """A tensor that the step does not name is there too, also if the step reads values."""
    trace = trace_code(tmp_path, f"{GLOBALS}{result}\n{kept}\n", "train_step")
    assert _held_at_the_end(trace) == PARAMETERS + size_bytes


def test_tensors_of_a_distribution_stay_on_the_gpu(tmp_path: Path) -> None:
    """Its parameters are views of one tensor, and a step that reads values computes with them there."""
    code = """
class Prior:
    def __init__(self):
        self.loc, self.scale = torch.rand(32, 128, device=device).chunk(2, 1)

torch.distributions.Prior = Prior
Prior.__module__ = "torch.distributions"
prior = torch.distributions.Prior()
model = net()
optimizer = torch.optim.Adam(model.parameters())

def train_step(images):
    drawn = prior.loc + prior.scale * torch.randn(prior.scale.shape, device=prior.loc.device)
    loss = model(drawn).sum()
    loss.backward()
    optimizer.step()
    return RESULT
"""
    plain = trace_code(tmp_path, code.replace("RESULT", "loss"), "train_step", "64")
    read = trace_code(tmp_path, code.replace("RESULT", "float(loss)"), "train_step", "64")
    assert [size for size in born(plain) if size >= 8192] == [size for size in born(read) if size >= 8192]


@pytest.mark.parametrize("reads", ["", ".item()"])
def test_models_of_a_module_beside_the_file_are_made_for_each_capture(tmp_path: Path, reads: str) -> None:
    """Parameters that the module puts on the GPU when it is imported are counted at each batch size."""
    (tmp_path / "networks.py").write_text(
        "from torch import nn\nmodel = nn.Linear(64, 8).cuda()\nfrozen = nn.Linear(64, 64).cuda()\n"
    )
    code = f"""
from networks import model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(images):
    loss = model(images.cuda()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss{reads}
"""
    job = job_of_code(tmp_path, code, "train_step", "64")
    for batch in (BATCH, 2 * BATCH):
        assert _held_at_the_end(record(job, batch, AMPERE)) == 4 * (64 * 8 + 8 + 64 * 64 + 64)


@pytest.mark.parametrize(
    "moved",
    [
        "torch.as_tensor(x, dtype=torch.float32, device=device)",
        "torch.asarray(x, device=device).float()",
        "model.weight.new_tensor(x)",
        "torch.empty_like(x, device=device).copy_(x).float()",
        "torch.full_like(x, 1, device=device).copy_(x).float()",
        "x.to(0).float()",
    ],
)
@pytest.mark.parametrize("place", ["device", "0", "device=0"])
def test_a_batch_moves_in_any_way(tmp_path: Path, moved: str, place: str) -> None:
    """The batch is planned on the CPU until the step moves it, by a factory or by another tensor."""
    code = f"""
model = nn.Linear(64, 8).to({place})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(x):
    model({moved}).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = trace_code(tmp_path, code, "train_step", "64:uint8")
    assert BATCH_ON_GPU_NOTE not in trace.notes


def test_attention_before_the_first_step_runs_the_gpus_kernel(tmp_path: Path) -> None:
    """Embeddings that a file makes beforehand take what the fused kernel takes, not all scores."""
    code = f"""{GLOBALS}
with torch.no_grad():
    rows = torch.zeros(2, 4, 256, 64, device=device)
    kept = F.scaled_dot_product_attention(rows, rows, rows).mean(2)
"""
    assert 2 * 4 * 256 * 256 * 4 not in born(trace_code(tmp_path, code, "train_step"))


LOADED = """
model = nn.Linear(64, 512).to(device)
optimizer = torch.optim.AdamW(model.parameters())
kept = LOAD
model.load_state_dict(kept["model"])
optimizer.load_state_dict(kept["optimizer"])

def train_step(images):
    loss = model(images.cuda()).sum()
    loss.backward()
    optimizer.step()
    return RESULT
"""


@pytest.mark.parametrize(
    "location", ["device", "'cuda:0'", "{'cpu': 'cuda'}", "lambda storage, saved: storage.cuda(0)", "'cpu'"]
)
@pytest.mark.parametrize("result", ["loss", "loss.item()"])
def test_a_checkpoint_is_loaded_where_the_file_says(tmp_path: Path, location: str, result: str) -> None:
    """A checkpoint that is kept on the GPU adds its weights; the optimizer uses the state as loaded."""
    model = torch.nn.Linear(64, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    path = tmp_path / "saved.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    code = LOADED.replace("LOAD", f"torch.load({str(path)!r}, map_location={location})", 1)
    trace = trace_code(tmp_path, code.replace("RESULT", result), "train_step", "64")
    weights = 4 * (64 * 512 + 512)
    counts = 2 * 4  # of steps, which AdamW keeps on the GPU if they are loaded there
    assert _held_at_the_end(trace) == (3 * weights if location == "'cpu'" else 4 * weights + counts)


@pytest.mark.parametrize(
    ("location", "is_on_gpu"),
    [
        ("'cpu'", False),
        ("{'cuda:0': 'cpu'}", False),
        ("lambda storage, saved: storage", False),
        ("device", True),
        ("None", True),
    ],
)
@pytest.mark.parametrize("result", ["loss", "loss.item()"])
def test_a_checkpoint_that_the_step_saves_is_loaded_where_the_file_says(
    tmp_path: Path, location: str, is_on_gpu: bool, result: str
) -> None:
    """Tensors loaded to the CPU take memory once they are moved, tensors loaded to the GPU at once."""
    path = str(tmp_path / "saved.pt")
    code = f"""
model = nn.Linear(64, 512).to(device)
kept = []

def train_step(images):
    loss = model(images.cuda()).sum()
    loss.backward()
    if not kept:
        torch.save(model.state_dict(), {path!r})
        kept.append(torch.load({path!r}, map_location={location}))
        kept.extend({{name: one.to(device) for name, one in kept[0].items()}} for _ in range(2))
    return {result}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    weights_and_gradients = 1 + 3
    assert born(trace).count(4 * 64 * 512) == weights_and_gradients + (1 if is_on_gpu else 2)


def test_a_model_that_the_step_replaces_is_freed(tmp_path: Path) -> None:
    """Old weights, gradients and state leave with their model, as in a resumed run or the next fold."""
    code = """
def fresh():
    global model, optimizer
    model = nn.Linear(64, 512).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

fresh()

def train_step(images):
    model(images.cuda()).sum().backward()
    optimizer.step()
    fresh()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    weight = 4 * 64 * 512
    held: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            held[event.block] = event.size_bytes
        elif isinstance(event, Free):
            held.pop(event.block, None)
        most = max(most, [*held.values()].count(weight))
    assert born(trace).count(weight) >= 1 + 3 * 4 and most <= 2 + 3 + 1


def test_weights_that_share_a_storage_are_loaded_once(tmp_path: Path) -> None:
    """Tied weights are one block, as in the file."""
    path = tmp_path / "saved.pt"
    tied = torch.zeros(64, 64)
    torch.save({"in": tied, "out": tied}, path)
    code = f"{GLOBALS}\nkept = torch.load({str(path)!r}, map_location=device)\n"
    assert _held_at_the_end(trace_code(tmp_path, code, "train_step")) == PARAMETERS + 64 * 64 * 4


@pytest.mark.parametrize("result", ["loss", "loss.item()"])
def test_a_tensor_of_a_library_object_is_copied_to_the_gpu(tmp_path: Path, result: str) -> None:
    """The object keeps it on the CPU, as a noise scheduler does its tables, and the step moves it."""
    code = f"""
model = nn.Linear(64, 8).cuda()
table = torch.utils.data.TensorDataset(torch.zeros(4096, 64))

def train_step(x):
    rows = table.tensors[0].to(x.device if x.is_cuda else "cuda")
    loss = model(x.cuda() * rows.sum(0)).sum()
    loss.backward()
    return {result}
"""
    assert born(trace_code(tmp_path, code, "train_step", "64", steps=1)).count(4096 * 64 * 4) == 1


def test_a_step_that_works_through_its_batch_in_parts_has_a_largest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.planning.search.by_runs._MOST_EVENTS", 2_000)
    code = f"""{GLOBALS}
def train_in_parts(images, labels):
    for part in zip(images.split(4), labels.split(4)):
        train_step(*part)
"""
    (tmp_path / "train.py").write_text(HEAD + code)
    result = planner.max_batch(
        f"{tmp_path / 'train.py'}:train_in_parts", input=["64", "scalar:int64"], gpu="L4", cache=None
    )
    assert result.max_batch is not None and result.max_batch > 8
    assert f"{result.max_batch}, the largest that is planned" in str(result)
    assert "works through its batch in parts" in str(result)


@pytest.mark.parametrize("read", ["", ".item()"])
def test_modules_that_a_file_leaves_on_the_cpu_take_no_memory(tmp_path: Path, read: str) -> None:
    code = f"""
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.table = net(), nn.EmbeddingBag(1000, 64)
        self.register_buffer("bank", torch.zeros(500, 500))

    def forward(self, rows):
        return self.net(self.table(rows.view(-1, 1)).to(device))

model = Rows()
optimizer = torch.optim.Adam(model.parameters())

def train_step(rows, labels):
    loss = F.cross_entropy(model(rows), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "scalar:int64", "scalar:int64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS
    assert bytes_of(trace, Category.GRADIENT) == 3 * PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
def test_the_gradient_of_a_loss_on_the_cpu_is_copied_to_the_gpu(tmp_path: Path, read: str) -> None:
    code = GLOBALS.replace("images.cuda()), labels.cuda())", f"images.cuda()).cpu(), labels)\n    loss{read}")
    trace = trace_code(tmp_path, code, "train_step")
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, BATCH * 8 * 4]


@pytest.mark.parametrize("read", ["", ".item()"])
def test_copies_of_weights_on_the_cpu_take_memory_once_they_are_moved(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()
saved = [one.detach().cpu() for one in model.parameters()]

def train_step(images):
    model(images.cuda()).sum(){read}
    moved = [one.cuda() for one in saved]
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    copied = [4 * count for count in (64 * 128, 128, 128 * 8, 8)]
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, *copied]


def test_a_copy_of_a_model_on_the_meta_device_takes_no_memory(tmp_path: Path) -> None:
    code = GLOBALS.replace(
        "def train_step", 'import copy\nshape = copy.deepcopy(model).to("meta")\ndef train_step'
    )
    assert bytes_of(trace_code(tmp_path, code, "train_step"), Category.PARAMETER) == PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_step_may_move_its_model_to_the_cpu_and_back(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()
optimizer = torch.optim.Adam(model.parameters())

def train_step(images):
    loss = model(images.cuda()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss{read}
    model.cpu()
    model.cuda()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    moved = [4 * count for count in (64 * 128, 128, 128 * 8, 8) for _ in ("parameter", "gradient")]
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, *moved]
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
@pytest.mark.parametrize(
    "made",
    [
        "torch.ones(300, 300).type_as(weight)",
        "torch.ones(300, 300).to(weight)",
        "weight.new(300, 300).fill_(1)",
        "torch.load(FILE, map_location='cuda').pop('one')",
        "torch.load(FILE, map_location=lambda storage, place: storage.cuda()).pop('one')",
        "torch.load(FILE).pop('one')",
        "pickle.loads(pickle.dumps(torch.ones(300, 300, device='cuda')))",
        "weight.new_tensor([[1.0] * 300] * 300)",
    ],
)
def test_what_is_made_as_a_tensor_of_the_gpu_is_there(tmp_path: Path, made: str, read: str) -> None:
    file = str(tmp_path / "saved.pt")
    code = f"""
import pickle
torch.save({{"one": torch.ones(300, 300, device="cuda")}}, {file!r})
model = net()
weight = model[0].weight
model.register_buffer("mask", {made.replace("FILE", repr(file))})

def train_step(images):
    loss = model(images.cuda()).sum() + model.mask.sum()
    loss.backward()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 300 * 300 * 4


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_copy_into_a_module_on_the_cpu_leaves_it_there(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()
average = nn.Linear(64, 128)
with torch.no_grad():
    average.weight.copy_(model[0].weight)
scale = torch.ones(8)

def train_step(images):
    loss = (model(images.cuda()) * scale.type_as(model[0].weight)).sum()
    loss.backward()
    average.weight.data.mul_(0.9).add_(model[0].weight.data.cpu(), alpha=0.1)
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, 8 * 4]


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_gradient_has_the_type_of_its_parameter_on_the_cpu(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()
shift = nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([*model.parameters(), shift], lr=0.1)

def train_step(images):
    loss = (model(images.cuda()) + shift.to("cuda", torch.float16)).sum()
    loss.backward()
    optimizer.step()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, 8 * 2, 8 * 2]


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_copy_of_a_model_that_was_on_the_gpu_when_pickled_is_on_the_gpu(tmp_path: Path, read: str) -> None:
    code = f"""
import pickle
model = net()
average = pickle.loads(pickle.dumps(model))

def train_step(images):
    loss = model(images.cuda()).sum()
    loss.backward()
    for one, other in zip(average.parameters(), model.parameters()):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == 2 * PARAMETERS
    assert BATCH_ON_GPU_NOTE not in trace.notes


def test_tensors_that_a_file_has_read_are_unpickled_where_they_were(tmp_path: Path) -> None:
    code = """
import pickle
model = net()
mean = torch.ones(300, 300, device="cuda")
assert mean[0, 0].item() > 0
kept = pickle.loads(pickle.dumps(mean))

def train_step(images):
    (model(images.cuda()).sum() + kept.sum()).backward()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 2 * 300 * 300 * 4


@pytest.mark.parametrize("read", ["", ".item()"])
def test_torch_may_average_a_model_on_the_cpu(tmp_path: Path, read: str) -> None:
    code = f"""
from torch.optim.swa_utils import AveragedModel
model = net()
average = AveragedModel(model, device="cpu")

def train_step(images):
    loss = model(images.cuda()).sum()
    loss.backward()
    average.update_parameters(model)
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4]


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_scaler_checks_gradients_on_the_cpu_there(tmp_path: Path, read: str) -> None:
    code = f"""
model, table = net(), nn.Embedding(1000, 64)
optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")

def train_step(rows):
    loss = model(table(rows).cuda()).sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "scalar:int64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
@pytest.mark.parametrize(
    "default",
    [
        "torch.set_default_tensor_type('torch.cuda.FloatTensor')",
        "torch.set_default_tensor_type(torch.cuda.FloatTensor)",
        "torch.set_default_device('cuda')",
    ],
)
def test_a_file_may_make_the_gpu_its_default(tmp_path: Path, default: str, read: str) -> None:
    code = f"""
{default}
model = net()
model.register_buffer("mask", torch.ones(300, 300))
model.register_buffer("scale", torch.tensor(8 * [0.5]))

def train_step(images):
    shift = torch.tensor(8 * [0.1]) + torch.tensor(8 * [1.0], device="cpu").cuda()
    loss = (model(images.cuda()) * model.scale + shift).sum() + torch.zeros(200, 200).sum()
    loss.backward()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS + 300 * 300 * 4 + 8 * 4
    assert born(trace, "_to_copy") == 3 * [8 * 4, 8 * 4, BATCH * 64 * 4]
    assert born(trace, "zeros").count(200 * 200 * 4) == 3


def test_a_file_may_make_the_cpu_its_default_again(tmp_path: Path) -> None:
    code = """
torch.set_default_tensor_type(torch.cuda.HalfTensor)
model = net()
torch.set_default_tensor_type(torch.FloatTensor)

def train_step(images):
    model(images.cuda().half()).sum().backward()
    torch.zeros(200, 200)
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS // 2
    assert not born(trace, "zeros")


@pytest.mark.parametrize("read", ["", ".item()"])
def test_numbers_that_a_step_puts_on_the_gpu_are_copied(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()

def train_step(images):
    loss = (model(images.cuda()) * torch.tensor(8 * [0.5], device="cuda")).sum()
    loss.backward()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert born(trace, "_to_copy") == 3 * [BATCH * 64 * 4, 8 * 4]


@pytest.mark.parametrize("read", ["", ".item()"])
@pytest.mark.parametrize(
    "first",
    [
        "",
        "optimizer = torch.optim.Adam(model.parameters())",
        "with torch.no_grad():\n    model(torch.zeros(2, 64, device=device))",
    ],
)
def test_lazy_layers_get_their_shapes_on_the_gpu(tmp_path: Path, first: str, read: str) -> None:
    code = f"""
model = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.LazyLinear(8)).to(device)
optimizer = None
{first}

def train_step(images):
    global optimizer
    loss = model(images.cuda()).sum()
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert (born(trace, "empty.memory_format") + born(trace, "to")).count(4 * 64 * 128) == 1
    assert bytes_of(trace, Category.GRADIENT) == 3 * PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS


def test_lazy_layers_on_the_cpu_take_no_memory(tmp_path: Path) -> None:
    code = """
model = net()
head = nn.LazyLinear(300)

def train_step(images):
    head(model(images.cuda()).cpu()).sum().backward()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert not born(trace, "empty")
    assert bytes_of(trace, Category.GRADIENT) == PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
@pytest.mark.parametrize("made", ["images", "torch.randn(32, 64)"])
@pytest.mark.parametrize("layer", ["LSTM(32, 128, 2, dropout=0.1)", "GRU(32, 128, bidirectional=True)"])
def test_recurrent_layers_on_the_cpu_take_no_memory(tmp_path: Path, layer: str, made: str, read: str) -> None:
    code = f"""
model = net()
rnn = nn.{layer}
optimizer = torch.optim.Adam([*model.parameters(), *rnn.parameters()])

def train_step(images):
    states, _ = rnn({made}.view(32, 2, 32))
    loss = model(images.cuda()).sum() + states.mean().cuda()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert not born(trace, "rnn")
    assert bytes_of(trace, Category.PARAMETER) == PARAMETERS
    assert bytes_of(trace, Category.GRADIENT) == 3 * PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
def test_a_step_may_train_tensors_without_an_optimizer_either(tmp_path: Path, read: str) -> None:
    code = f"""
weight = torch.zeros(64, 8, device="cuda", requires_grad=True)

def train_step(images):
    loss = (images.cuda() @ weight).sum()
    loss.backward()
    with torch.no_grad():
        weight.sub_(0.1 * weight.grad)
    weight.grad = None
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.PARAMETER) == 64 * 8 * 4
    assert born(trace, "mul") == 3 * [64 * 8 * 4]


@pytest.mark.parametrize("read", ["", ".item()"])
@pytest.mark.parametrize("made", ["trace(net(), torch.zeros(2, 64, device=device))", "script(net())"])
def test_modules_that_torch_compiles_to_scripts_are_trained(tmp_path: Path, made: str, read: str) -> None:
    code = f"""
model = torch.jit.{made}
optimizer = torch.optim.Adam(model.parameters())

def train_step(images):
    loss = model(images.cuda()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert bytes_of(trace, Category.GRADIENT) == 3 * PARAMETERS
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * PARAMETERS


@pytest.mark.parametrize("read", ["", ".item()"])
def test_the_gradient_of_a_batch_on_the_cpu_is_differentiated(tmp_path: Path, read: str) -> None:
    code = f"""
model = net()

def train_step(images):
    images.requires_grad_()
    (slope,) = torch.autograd.grad(model(images.cuda()).sum(), images, create_graph=True)
    loss = slope.pow(2).mean()
    loss.backward()
    loss{read}
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert BATCH_ON_GPU_NOTE not in trace.notes
    assert born(trace, "_to_copy") == 6 * [BATCH * 64 * 4]  # the batch, and the gradient of its gradient


@pytest.mark.parametrize("read", ["", ".item()"])
def test_results_that_fill_an_empty_tensor_take_its_memory(tmp_path: Path, read: str) -> None:
    code = f"""
weight = torch.ones(300, 64, device="cuda")
optimizer = torch.optim.SGD([weight], lr=0.1)

def train_step(images):
    made = torch.mm(images.cuda(), weight.t(), out=torch.empty(0, device="cuda"))
    turned = torch.abs(torch.complex(made, made), out=torch.empty(0, device="cuda"))
    torch.abs(made, out=turned).sum(){read}
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert born(trace, "mm.out").count(BATCH * 300 * 4) == 3
    assert born(trace, "abs.out") == 3 * [BATCH * 300 * 4, BATCH * 300 * 8]


def test_weights_leave_for_a_buffer_that_is_there_already(tmp_path: Path) -> None:
    """A recurrent layer that goes to the GPU takes its weights' buffer before they are freed one by one."""
    code = """
layer = nn.GRU(64, 8).cuda()

def train_step(images):
    layer(images.cuda()[None])[0].sum().backward()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    weights = [4 * 24 * 64, 4 * 24 * 8, 4 * 24, 4 * 24]
    assert story(trace)[1:10] == [
        *(f"+{size} temporaries" for size in weights),
        f"+{sum(weights)} parameters",
        *(f"-{size}" for size in weights),
    ]


@pytest.mark.parametrize(
    ("when", "calls"), [("step % 2 == 0", 4), ("step % 5 == 0", 10), ("step == 2", 12), ("step % 8 == 0", 12)]
)
def test_a_step_is_called_until_its_optimizer_has_stepped_twice(
    tmp_path: Path, when: str, calls: int
) -> None:
    code = f"""
model = net()
optimizer = torch.optim.Adam(model.parameters())
step = 0

def train_step(images):
    global step
    step += 1
    model(images.cuda()).sum().backward()
    if {when}:
        optimizer.step()
        optimizer.zero_grad()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert born(trace, "_to_copy") == calls * [BATCH * 64 * 4]
    says_more = any("not all parameters were updated twice" in note for note in trace.notes)
    assert says_more is (calls == 12)


def test_parameters_of_several_optimizers_are_updated_twice_each(tmp_path: Path) -> None:
    """Two optimizers alternate, as in WGANs. A third holds the parameters of the first, as wrappers do."""
    code = """
model, critic = net(), net()
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, critic, model)]
step = 0

def train_step(images):
    global step
    step += 1
    model(images.cuda()).sum().backward()
    critic(images.cuda()).sum().backward()
    optimizers[0].step()
    if step % 3 == 0:
        optimizers[1].step()
"""
    trace = trace_code(tmp_path, code, "train_step", "64")
    assert born(trace, "_to_copy") == 2 * 6 * [BATCH * 64 * 4]
    assert "its own step runs SGD: 8 optimizer steps in 6 calls" in trace.notes


def test_a_module_that_cannot_be_traced_on_meta_is_planned_itself(tmp_path: Path) -> None:
    """Sizes are tensors in a trace, which meta kernels of convolutions refuse; the plan says so."""
    code = """
layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(180, 2)).cuda()
traced = torch.jit.trace(layers, torch.zeros(2, 3, 8, 8).cuda())
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

def train_step(images):
    traced(images.cuda()).sum().backward()
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step", "3x8x8")
    assert born(trace, "convolution").count(BATCH * 5 * 6 * 6 * 4) == 3
    assert any("traces a module for TorchScript" in note for note in trace.notes)


def test_packed_sequences_of_a_recurrent_layer_on_the_cpu_stay_there(tmp_path: Path) -> None:
    """Of three steps, the GPU sees what the last outputs are copied to, and nothing of the layer."""
    code = """
from torch.nn.utils.rnn import pack_padded_sequence as pack, pad_packed_sequence as pad

layer, head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3).cuda()
optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)

def train_step(texts):
    packed = pack(input=texts, lengths=torch.full((len(texts),), 5), batch_first=True, enforce_sorted=False)
    output, _ = pad(layer(packed)[0], batch_first=True)
    head(output[:, -1].cuda()).sum().backward()
    optimizer.step()
"""
    trace = trace_code(tmp_path, code, "train_step", "5x8")
    assert BATCH_ON_GPU_NOTE not in trace.notes
    assert bytes_of(trace, Category.PARAMETER) == (6 + 1) * 3 * 4
    assert born(trace, "_to_copy").count(BATCH * 6 * 4) == 3
    assert not born(trace, "_cudnn_rnn") and not born(trace, "_pack_padded_sequence")
