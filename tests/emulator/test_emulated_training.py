"""Training scripts, unmodified, on emulated GPUs: real CUDA builds of torch on the stand-in libraries.

Figures of whole models hold for torch 2.6 with cuDNN 9.8, 2.9 with 9.10, 2.11 and 2.13 with 9.19 and 9.20,
whose heuristics decide the workspaces of convolutions.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.emulated

LOOP = """
import sys, torch, torchvision
def train(model, batch, steps=3, optimizer=None, size=224):
    model = model.cuda()
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    for _ in range(steps):
        x, y = torch.empty(batch, 3, size, size), torch.empty(batch, 10)
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
"""


class Emulator:
    """`planner run` with the Python that has the CUDA build."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self._folder = python, folder

    def start(
        self, code: str, *options: str, before: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        """Run a script with these options of `planner run`; `before` stands before it, such as torchrun."""
        script = self._folder / "train.py"
        script.write_text(LOOP + code, encoding="utf-8")
        command = [*(before or (self.python,)), str(script)]
        return subprocess.run(
            [sys.executable, "-m", "planner", "run", "--json", *options, "--", *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._folder,
        )

    def run(
        self, code: str, *options: str, exit_code: int = 0, before: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the JSON of a run."""
        done = self.start(code, *options, before=before)
        assert done.returncode == exit_code, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def emulator(request: pytest.FixtureRequest, tmp_path: Path) -> Emulator:
    """Return the emulator in an empty folder."""
    return Emulator(str(request.config.getoption("--cuda-python")), tmp_path)


# MiB allocated and reserved at the peak of three steps at batch 128 on an RTX 3090, by version of torch.
# torch 2.9 and 2.11 keep a workspace of 1 MiB for cuBLASLt; 2.6 gave it back after each product, and in 2.13
# cuBLASLt shares that of cuBLAS (pytorch/pytorch#168175).
PEAKS = {
    "torchvision.models.resnet50(num_classes=10)": {
        "2.6": (10707.036, 12396.0),
        "2.9": (10708.036, 12398.0),
        "2.11": (10708.036, 12396.0),
        "2.13": (10707.036, 12396.0),
    },
    "torchvision.models.vit_b_16(num_classes=10)": {
        "2.6": (15982.618, 16224.0),
        "2.9": (15983.618, 16224.0),
        "2.11": (15983.618, 16224.0),
        "2.13": (15982.618, 16224.0),
    },
    "CNN()": {
        "2.6": (530.944, 604.0),
        "2.9": (531.944, 604.0),
        "2.11": (531.944, 604.0),
        "2.13": (530.944, 604.0),
    },
}


def peaks_of(model: str, answer: dict[str, Any]) -> tuple[float, float]:
    """Return the peaks that are known with the torch of this run."""
    version = ".".join(answer["versions"]["torch"].split(".")[:2])
    if version not in PEAKS[model]:
        pytest.skip(f"figures of torch {version} are not known")
    return PEAKS[model][version]


@pytest.mark.parametrize("model", [model for model in PEAKS if model != "CNN()"])
def test_whole_models(emulator: Emulator, model: str) -> None:
    """The allocator, cuDNN's heuristics and the models of each version."""
    answer = emulator.run(f"train({model}, 128)", "--gpu", "RTX 3090")
    assert (answer["peak_allocated_mib"], answer["peak_reserved_mib"]) == peaks_of(model, answer)
    assert (answer["fits"], answer["retries"], answer["emulated"]) == ("yes", 0, True)


def test_the_cnn_of_the_notebook_as_measured(emulator: Emulator) -> None:
    """The notebook measured 530.9 MiB allocated and 604.0 reserved on a real GPU."""
    code = """
class CNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = torch.nn.Conv2d(3, 8, 3), torch.nn.AvgPool2d(2, 2)
        self.fc = torch.nn.Linear(8 * 111 * 111, 10)
    def forward(self, x):
        x = self.pool(self.conv(x))
        return self.fc(x.view(x.size(0), -1))
train(CNN(), 128)
"""
    answer = emulator.run(code, "--gpu", "RTX 3090")
    assert (answer["peak_allocated_mib"], answer["peak_reserved_mib"]) == peaks_of("CNN()", answer)


def test_out_of_memory_names_module_and_line(emulator: Emulator) -> None:
    """The answer is no, exit code 1; the command's own code stands beside it."""
    answer = emulator.run(
        "train(torchvision.models.vgg16(num_classes=10), 400)", "--gpu", "RTX 3060", exit_code=1
    )
    assert (answer["fits"], answer["exit_code"]) == ("no", 1)
    failure = answer["failure"]
    assert (failure["step"], failure["module"]) == (1, "features.4")
    assert failure["line"].endswith("train.py:10")  # where the model is called
    assert failure["requested_mib"] == 1226.0


def test_out_of_memory_in_the_backward_pass_is_reported(emulator: Emulator) -> None:
    """Autograd's thread has no line of the script: the main thread's is named."""
    code = """
x = torch.empty(2**28, device="cuda", requires_grad=True)
loss = x.sum()
loss.backward()
"""
    answer = emulator.run(code, "--gpu-mib", "2200", exit_code=1)
    assert (answer["failure"]["phase"], answer["failure"]["requested_mib"]) == ("backward", 1024.0)
    assert answer["failure"]["line"].endswith("train.py:17")


def test_a_script_that_survives_out_of_memory_fits(emulator: Emulator) -> None:
    """Batch-size finders try until it fits."""
    code = """
try:
    torch.empty(2**40, device="cuda")
except torch.cuda.OutOfMemoryError:
    torch.empty(2**20, device="cuda")
"""
    answer = emulator.run(code, "--gpu", "L4")
    assert (answer["fits"], answer["failure"], answer["peak_allocated_mib"]) == ("with_retries", None, 4.0)
    caught = answer["ranks"][0]["failure"]
    assert (caught["reached_script"], caught["requested_mib"]) == (True, 4 * 2**20)


def test_a_script_that_fails_for_another_reason_is_no_answer(emulator: Emulator) -> None:
    """Exit code 3: the command fails, and not for want of memory."""
    done = emulator.start("torch.empty(1, device='cuda'); sys.exit(7)", "--gpu", "L4")
    assert (done.returncode, done.stdout) == (3, "")
    assert "ended with exit code 7, and not for want of GPU memory" in done.stderr


def test_the_command_ends_after_the_requested_steps(emulator: Emulator) -> None:
    """A script of a thousand steps takes as long as three."""
    code = "train(torchvision.models.resnet18(num_classes=10), 8, steps=1000)"
    answer = emulator.run(code, "--gpu", "L4", "--stop-after", "3")
    assert (answer["exit_code"], answer["ranks"][0]["step_count"], answer["steps"][-1]["last"]) == (0, 3, 3)


def test_what_the_script_reads_of_memory_is_what_it_would_read_without_the_recorder(
    emulator: Emulator,
) -> None:
    """A script reads its peaks since its own resets, while each step's peaks are recorded."""
    code = """
def hold(mib):
    torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
peaks = []
def step(mib):
    hold(mib)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    peaks.append(torch.cuda.max_memory_allocated() // 2**20)
step(100)
step(50)
torch.cuda.reset_peak_memory_stats()
step(30)
step(40)
print("peaks", peaks, file=sys.stderr)
"""
    done = emulator.start(code, "--gpu", "L4")
    assert "peaks [100, 100, 30, 40]" in done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [int(step["peak_allocated_mib"]) for step in steps] == [100, 50, 30, 40]


def test_libraries_are_loaded_whatever_uses_a_gpu_first(emulator: Emulator) -> None:
    """NVML's Python binding sees the described GPU without torch."""
    code = """
sys.modules.pop("torch")
import pynvml
pynvml.nvmlInit()
memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
assert memory.total == 24564 * 2**20, memory.total
"""
    script = "torch.empty(1, device='cuda')\n" + code.replace('sys.modules.pop("torch")\n', "")
    assert emulator.run(script, "--gpu", "RTX 4090")["gpu"] == "RTX 4090 24GB"


def test_limits_and_options_of_the_allocator_are_torchs_own(emulator: Emulator) -> None:
    """A fraction of the GPU; expandable segments, which map pages of 20 MiB as they need them."""
    code = """
torch.cuda.set_per_process_memory_fraction(0.1)
torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
"""
    assert emulator.run(code, "--gpu", "L4", exit_code=1)["fits"] == "no"
    code = "a = torch.empty(30 * 2**20, dtype=torch.uint8, device='cuda')"
    answer = emulator.run(code, "--gpu", "L4", "--alloc-conf", "expandable_segments:True")
    assert answer["peak_reserved_mib"] == 40.0


def test_two_ranks_of_ddp(emulator: Emulator) -> None:
    """Each rank has a GPU of its own; when the first buckets are freed is up to NCCL's watchdog thread."""
    code = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10).cuda(), device_ids=[rank])
train(model, 16)
dist.destroy_process_group()
"""
    torchrun = str(Path(emulator.python).with_name("torchrun"))
    answer = emulator.run(code, "--gpu", "L4", "--gpus", "2", before=(torchrun, "--nproc-per-node", "2"))
    first, second = answer["ranks"]
    assert (first["rank"], second["rank"], first["gpu"], second["gpu"]) == (0, 1, 0, 1)
    assert first["peak_reserved_mib"] == second["peak_reserved_mib"] == 726.0
    assert first["step_count"] == second["step_count"] == 3


STRAY = """
import os
import torch.distributed as dist
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
on_host = dist.new_group(backend="gloo")  # whose barriers wait for the other rank, as no kernel does here
stray = torch.zeros({elements}, device="cuda") if rank else None  # on the first GPU
dist.barrier(on_host)
torch.cuda.set_device(rank)
train(torchvision.models.resnet18(num_classes=10).cuda(), 16)
dist.barrier(on_host)
dist.destroy_process_group()
"""


def test_a_rank_on_the_gpu_of_another_is_named(emulator: Emulator) -> None:
    """What was made before a rank chose its GPU lies on the first one, beside a context of its own."""
    torchrun = str(Path(emulator.python).with_name("torchrun"))
    options = ("--gpu", "L4", "--gpus", "2")
    before = (torchrun, "--nproc-per-node", "2")
    answer = emulator.run(STRAY.replace("{elements}", "50 * 2**20"), *options, before=before)
    ranks = [(one["rank"], one["gpu"], one["peak_reserved_mib"]) for one in answer["ranks"]]
    (shared,) = answer["shared_gpus"]
    assert ranks[1] == (1, 0, 200.0) and (shared["gpu"], shared["ranks"]) == (0, [0, 1])
    lines = (LOOP + STRAY).splitlines()
    first = [lines[int(one["first_line"].rpartition(":")[2]) - 1].strip() for one in answer["ranks"]]
    assert first[1].startswith("stray = ") and first[2] == "torch.cuda.set_device(rank)"
    both = answer["ranks"][0]["process_mib"] + answer["ranks"][1]["process_mib"]
    assert shared["process_mib"] == both


def test_ranks_on_one_gpu_share_its_memory(emulator: Emulator) -> None:
    """22,016 MiB of rank 1 leave rank 0 too little of an L4; the answer says whose they are."""
    torchrun = str(Path(emulator.python).with_name("torchrun"))
    options = ("--gpu", "L4", "--gpus", "2")
    before = (torchrun, "--nproc-per-node", "2")
    code = STRAY.replace("{elements}", "86 * 2**26")
    answer = emulator.run(code, *options, before=before, exit_code=1)
    (other,) = answer["failure"]["others"]
    assert answer["fits"] == "no" and other["rank"] == 1 and other["process_mib"] > 22016


def test_spawned_processes_have_the_ranks_of_their_group(emulator: Emulator, tmp_path: Path) -> None:
    """No launcher sets RANK here; the second process takes most, and its snapshot is found."""
    code = """
import torch.distributed as dist

def main(rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://localhost:29531", rank=rank, world_size=2)
    train(torchvision.models.resnet18(num_classes=10).cuda(), 4 + 4 * rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
"""
    snapshot = tmp_path / "largest.pickle"
    answer = emulator.run(code, "--gpu", "L4", "--gpus", "2", "--snapshot", str(snapshot))
    assert [(one["rank"], one["gpu"]) for one in answer["ranks"]] == [(0, 0), (1, 1)]
    assert answer["ranks"][0]["peak_reserved_mib"] < answer["ranks"][1]["peak_reserved_mib"]
    assert snapshot.is_file()


def test_ddp_of_one_bucket(emulator: Emulator) -> None:
    """The number of parameters in the only bucket, 4 bytes that the ranks agree on, reads as it was sent."""
    code = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[rank])
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
dist.destroy_process_group()
"""
    torchrun = str(Path(emulator.python).with_name("torchrun"))
    answer = emulator.run(code, "--gpu", "L4", "--gpus", "2", before=(torchrun, "--nproc-per-node", "2"))
    assert answer["exit_code"] == 0


def test_values_read_back_are_zero(emulator: Emulator) -> None:
    """Kernels compute nothing: a loss is 0, and a scaler takes each step."""
    code = """
x = torch.ones(4, device="cuda", requires_grad=True)
scaler = torch.amp.GradScaler()
optimizer = torch.optim.SGD([x], lr=0.1)
with torch.autocast("cuda", dtype=torch.float16):
    loss = (x * x).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
assert loss.item() == 0
"""
    assert emulator.run(code, "--gpu", "L4")["ranks"][0]["step_count"] == 1


def test_small_tensors_of_the_script_read_back_as_they_were(emulator: Emulator) -> None:
    """A framework puts sizes on the GPU, gathers and reads them; results of kernels are 0."""
    code = """
sizes = torch.tensor([8, 2]).cuda()
assert sizes.clone().cpu().tolist() == [8, 2]
assert torch.tensor(7).cuda().item() == 7
labels = torch.full((32,), -100).cuda()
del labels
loss = torch.nn.functional.mse_loss(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
assert loss.item() == 0
"""
    emulator.run(code, "--gpu", "L4")
    emulator.run("assert torch.tensor(7).cuda().item() == 0", "--gpu", "L4", "--copy-bytes", "0")


def test_an_optimizer_resumed_on_the_gpu_takes_steps(emulator: Emulator) -> None:
    """Optimizers divide by what they compute from their count of steps, which is on the GPU."""
    code = """
def resumed(name):
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    for step in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer.load_state_dict(torch.load("state.pt", map_location="cuda"))
for name in ("Adam", "Adamax", "RAdam", "Adafactor"): resumed(name)
"""
    assert emulator.run(code, "--gpu", "RTX 3090")["steps"][-1]["last"] == 12


def test_a_script_that_ends_by_an_exception_ends_by_that_one(emulator: Emulator) -> None:
    """Tensors that go while the exception travels leave it alone."""
    code = """
def fail():
    x = torch.ones(4, device="cuda")
    raise KeyError("mine")
try:
    fail()
except KeyError as error:
    assert error.args == ("mine",)
"""
    emulator.run(code, "--gpu", "L4")


def test_the_history_is_one_that_torch_reads(emulator: Emulator, tmp_path: Path) -> None:
    """`planner explain --against` and torch's memory_viz take it."""
    path = tmp_path / "history.pickle"
    emulator.run(
        "train(torchvision.models.resnet18(num_classes=10), 8)", "--gpu", "L4", "--snapshot", str(path)
    )
    from planner.allocator.history.snapshot_reader import load_snapshot

    actions = [event.action for event in load_snapshot(path).events]
    assert actions[0] == "segment_alloc" and actions.count("alloc") > 500


def test_a_history_that_cannot_be_written_leaves_the_answer(emulator: Emulator, tmp_path: Path) -> None:
    """Exit code 4, the answer, and one line that names the file."""
    code = "torch.empty(1, device='cuda')"
    done = emulator.start(code, "--gpu", "L4", "--snapshot", "/proc/none/history.pickle")
    assert (done.returncode, json.loads(done.stdout)["fits"]) == (4, "yes")
    assert "/proc/none/history.pickle: cannot be written" in done.stderr.splitlines()[-1]


def largest_batch(emulator: Emulator, script: Path, *options: str, exit_code: int = 0) -> dict[str, Any]:
    """Return the JSON of a search for the largest batch of a script, which gets it as its argument."""
    command = [emulator.python, str(script), "{batch}"]
    done = subprocess.run(
        [sys.executable, "-m", "planner", "max-batch", "--json", *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


EVALUATES = """
model = torch.nn.Linear(1024, 1024).cuda()
model = MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(2):
        model(torch.empty(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.empty(16384, 1024, device="cuda"))
"""


@pytest.mark.parametrize("model", ["model", "torch.compile(model, fullgraph=True)"])
def test_evaluations_have_peaks_of_their_own(emulator: Emulator, model: str) -> None:
    """Inputs and outputs of 64 MiB, beside weights, gradients and two workspaces of cuBLAS."""
    done = emulator.start(EVALUATES.replace("MODEL", model), "--gpu", "L4")
    record = json.loads(done.stdout)["ranks"][0]
    evaluation = record["evaluation"]
    weights = 4 * (1024 * 1024 + 1024) / 2**20
    assert evaluation["peak_allocated_mib"] == pytest.approx(2 * (64 + weights + 8.125), abs=1e-3)
    assert evaluation == record["after_steps"] and "global hooks" not in done.stderr
    assert max(step["peak_allocated_mib"] for step in record["steps"]) == evaluation["peak_allocated_mib"]


SAVES = """
def copies(tensors):
    return [tensor.clone() for tensor in tensors]

model = torch.nn.Linear(4096, 4096, bias=False).cuda()
copies([*model.parameters()] * LOADED)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.empty(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        copies([*model.parameters()] * 3)
"""


def test_loading_and_saving_have_peaks_of_their_own(emulator: Emulator) -> None:
    """Weights of 64 MiB are loaded with one copy, and saved with three and two workspaces of cuBLAS."""
    done = emulator.start(SAVES.replace("LOADED", "1"), "--gpu", "L4")
    record = json.loads(done.stdout)["ranks"][0]
    peaks = [record[name]["peak_allocated_mib"] for name in ("loading", "between_steps")]
    assert peaks == [2 * 64, 4 * 64 + 2 * 8.125]
    assert record["evaluation"] is None


def test_what_a_script_keeps_of_its_variables_stays(emulator: Emulator) -> None:
    """A function's `locals()` outlive the first use of the GPU, and a refused request."""
    code = """
def train(rate):
    kept = locals()
    torch.zeros(1, device="cuda")
    try:
        torch.empty(2**40, device="cuda")
    except torch.OutOfMemoryError:
        print(kept["rate"])

train(0.5)
"""
    done = emulator.start(code, "--gpu", "L4")
    assert done.returncode == 0 and "0.5" in done.stderr


def test_a_failure_while_loading_says_so(emulator: Emulator) -> None:
    """4,000 copies of the weights do not fit; no module has run before."""
    done = emulator.start(SAVES.replace("LOADED", "4000"), "--gpu", "L4")
    failure = json.loads(done.stdout)["failure"]
    assert (failure["phase"], failure["step"]) == ("loading", 1)


def test_the_largest_batch_survives_the_evaluation(emulator: Emulator, tmp_path: Path) -> None:
    """An evaluation on larger inputs than the training's decides, in the batch's proportion or alone."""
    script = tmp_path / "train.py"
    code = """
import sys, torch
model, batch = torch.nn.Linear(1024, 1024).cuda(), int(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(4):
        model(torch.empty(batch, 1024).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.empty(ROWS, 1024, device="cuda"))
"""
    script.write_text(code.replace("ROWS", "64 * batch"), encoding="utf-8")
    answer = largest_batch(emulator, script, "--gpu-mib", "2000", "--multiple-of", "64")
    record = answer["at_comfortable"]["ranks"][0]
    assert record["step_count"] == 5
    assert answer["covered"].startswith("5 optimizer steps, and the evaluation after step 4")
    assert dict(answer["confirmed"])[answer["max_batch"] + 64] == "no"
    assert len(answer["notes"]) == 1 and "in what follows them" in answer["notes"][0]
    assert answer["runs"] <= 10
    script.write_text(code.replace("ROWS", "2 ** 20"), encoding="utf-8")
    answer = largest_batch(emulator, script, "--gpu-mib", "2000", "--multiple-of", "64", exit_code=1)
    assert (answer["max_batch"], answer["first_failure"]["failure"]["line"]) == (0, f"{script}:11")
    assert answer["runs"] <= 5


def test_the_largest_batch_of_a_script(emulator: Emulator, tmp_path: Path) -> None:
    """Runs at a few batch sizes lead to one that fits and whose successor does not."""
    script = tmp_path / "train.py"
    loop = "train(torchvision.models.resnet18(num_classes=10), int(sys.argv[1]), steps=1000)"
    script.write_text(LOOP + loop, encoding="utf-8")
    options = ["--gpu-mib", "3000", "--confidence", "0.5", "--stop-after", "3"]
    answer = largest_batch(emulator, script, *options)
    outcomes = dict(answer["probes"])
    assert outcomes[answer["max_batch"]] in ("yes", "with_retries")
    assert outcomes[answer["max_batch"] + 1] == "no"
    assert outcomes[answer["comfortable_batch"]] == "yes"
    assert answer["at_max"]["command"][-1] == str(answer["max_batch"])
    assert (answer["emulated"], answer["at_max"]["steps"][-1]["last"]) == (True, 3)
    ran = dict(answer["confirmed"])
    assert {answer["max_batch"], answer["max_batch"] + 1, answer["comfortable_batch"] + 1} <= ran.keys()
    assert len(answer["replayed"]) == 2


def test_a_batch_that_a_script_makes_smaller_does_not_fit(emulator: Emulator, tmp_path: Path) -> None:
    """The answer is the largest batch that trains, not the largest with which a batch-size finder begins."""
    script = tmp_path / "train.py"
    code = """
import sys, torch
model, batch = torch.nn.Linear(4096, 4096).cuda(), int(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(batch):
    model(torch.empty(batch, 4096, device="cuda")).sum().backward()
    optimizer.step()
while batch:
    try:
        train(batch)
        break
    except torch.cuda.OutOfMemoryError:
        batch //= 2
"""
    script.write_text(code, encoding="utf-8")
    finder = largest_batch(emulator, script, "--gpu-mib", "2000", "--multiple-of", "1024")
    script.write_text(code.replace("batch //= 2", "raise"), encoding="utf-8")
    plain = largest_batch(emulator, script, "--gpu-mib", "2000", "--multiple-of", "1024")
    assert finder["max_batch"] == plain["max_batch"] > 0
    assert finder["first_failure"]["failure"] == plain["first_failure"]["failure"]


def test_a_replayed_history_is_the_run(emulator: Emulator, tmp_path: Path) -> None:
    """The simulator's peaks are torch's, with a scaler, accumulation and validation."""
    from planner.allocator.config import UNLIMITED
    from planner.allocator.replay import replay_trace
    from planner.emulator.compiled import compiled_dir
    from planner.emulator.history import trace_of
    from planner.emulator.launch import RunOptions, run_emulated
    from planner.hardware.database import find_device

    script = tmp_path / "train.py"
    script.write_text(
        """
import torch, torchvision
model = torchvision.models.resnet18(num_classes=10).cuda()
optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler()
for step in range(3):
    for _ in range(2):
        x, y = torch.empty(24, 3, 224, 224).cuda(), torch.zeros(24, dtype=torch.long).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
""",
        encoding="utf-8",
    )
    options = RunOptions(find_device("RTX 3090"), keeps_histories=True)
    run = run_emulated([emulator.python, str(script)], options, compiled_dir(), print)
    (history,) = run.histories
    answer = replay_trace(trace_of(history, 24), UNLIMITED)
    peak = run.largest.peak
    assert (answer.peak_allocated_bytes, answer.peak_reserved_bytes) == (
        peak.allocated_bytes,
        peak.reserved_bytes,
    )
    assert [end.step for end in history.step_ends] == [1, 2, 3]


@pytest.mark.parametrize("start", ["os.fork", "multiprocessing"])
def test_processes_forked_before_cuda_starts_train_and_are_recorded(emulator: Emulator, start: str) -> None:
    """A launcher that forks, such as a notebook's, uses the GPU in its children alone."""
    code = """
import multiprocessing, os
def work():
    train(torchvision.models.resnet18(num_classes=10), 8)
"""
    forks = {
        "os.fork": """
if not (process := os.fork()):
    work()
    sys.exit()
os.waitpid(process, 0)
""",
        "multiprocessing": """
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
""",
    }
    answer = emulator.run(code + forks[start], "--gpu", "L4")
    assert [rank["step_count"] for rank in answer["ranks"]] == [3]
    assert answer["ranks"][0]["after_steps"] is not None  # the record was closed


def test_a_process_that_aborts_at_its_end_is_reported(emulator: Emulator) -> None:
    """What modules free is freed after the handlers of atexit, when the record is whole."""
    code = """
class Last:
    def __del__(self, os=__import__("os")):
        os.abort()
last = Last()
train(torchvision.models.resnet18(num_classes=10), 8)
"""
    answer = emulator.run(code, "--gpu", "L4")
    assert (answer["fits"], answer["exit_code"], answer["crash"]) == ("yes", -6, "SIGABRT")
    assert answer["ranks"][0]["step_count"] == 3


def test_a_script_may_end_with_a_backward_pass(emulator: Emulator) -> None:
    """A thread of autograd that still releases its state when the script ends does not cost the report."""
    code = """
x = torch.ones(4, device="cuda", requires_grad=True)
(x * 2).sum().backward()
"""
    answer = emulator.run(code, "--gpu", "T4")
    assert (answer["fits"], answer["ranks"][0]["peak_allocated_mib"]) == ("yes", 0.002)


def test_kernels_take_equally_long(emulator: Emulator) -> None:
    """Events count the kernels between them, so that what torch chooses by timing depends on no clock."""
    code = """
import time
start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
x = torch.ones(1024, device="cuda")
start.record()
y = (x * 2 + 1).relu()
time.sleep(0.02)
end.record()
last.record()
assert (start.elapsed_time(end), end.elapsed_time(last)) == (3.0, 1.0)
"""
    assert emulator.run(code, "--gpu", "L4")["fits"] == "yes"


def test_data_parallel_in_one_process(emulator: Emulator) -> None:
    """nn.DataParallel reduces and broadcasts with buffers that only the root has."""
    code = """
model = torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda())
model(torch.empty(4, 8).cuda()).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
    answer = emulator.run(code, "--gpu", "RTX 2080 Ti", "--gpus", "2")
    assert (answer["fits"], [rank["gpu"] for rank in answer["ranks"]]) == ("yes", [0, 1])


def test_a_signal_before_the_first_step_is_named(emulator: Emulator) -> None:
    """A process that used the GPU and died says so, by the name of the signal."""
    done = emulator.start("torch.empty(1, device='cuda'); __import__('os').abort()", "--gpu", "L4")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].endswith(": it was ended by SIGABRT before its first optimizer step")


def test_a_thread_that_lives_on_does_not_outlive_the_last_step(emulator: Emulator) -> None:
    """Loggers and uploaders wait for the end of the script, which --stop-after ends with its record whole."""
    code = """
import threading
threading.Thread(target=threading.Event().wait).start()
train(torchvision.models.resnet18(num_classes=10), 8, steps=5)
"""
    answer = emulator.run(code, "--gpu", "L4", "--stop-after", "2")
    assert answer["ranks"][0]["step_count"] == 2
    assert answer["ranks"][0]["after_steps"] is not None


def test_memory_of_a_long_run_does_not_grow_with_its_steps(emulator: Emulator) -> None:
    """The recorder and the stand-in libraries free the host memory of each step."""
    code = """
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def host_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def steps(count):
    for _ in range(count):
        model(torch.empty(8, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
steps(500)
before = host_bytes()
steps(2000)
print("grown", host_bytes() - before, file=sys.stderr)
"""
    done = emulator.start(code, "--gpu", "L4")
    grown_bytes = next(int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("grown "))
    assert grown_bytes < 2000 * 512  # less than any object of a step


def test_kernels_compile_at_run_time(emulator: Emulator) -> None:
    """NVRTC finds its builtins, without which cuDNN would pass over the engines that it compiles."""
    code = """
import ctypes, nvidia
from pathlib import Path
path = next(path for folder in nvidia.__path__ for path in Path(folder).glob("*/lib/libnvrtc.so.*"))
nvrtc, program = ctypes.CDLL(str(path)), ctypes.c_void_p()
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), b"__global__ void f() {}", None, 0, None, None) == 0
assert nvrtc.nvrtcCompileProgram(program, 0, None) == 0
torch.zeros(1, device="cuda")
"""
    assert emulator.run(code, "--gpu", "L4")["exit_code"] == 0
