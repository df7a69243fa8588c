"""Users' files that name the GPU are traced as if it were there."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import planner
from planner.capture.cuda.devices.translation import planned_device
from planner.capture.session import record
from planner.errors import ModelError
from planner.jobs import Job, Loss, Mode, parse_tensor_spec, resolve_job
from planner.program.events import Alloc, Category, Free, Trace, validate
from tests.helpers.models import AMPERE, born

WIDE = 1024 * 1024 * 4  # bytes of the tensor that most of the models below make
HEAD = """
import torch
from torch import nn, ones

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = torch.device("cuda", 0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).sum() + self.more(x).sum()

"""


def trace_file(folder: Path, body: str, capability: tuple[int, int] = AMPERE) -> Trace:
    """The trace of `Net`, a subclass of `Base` with this body, in a user's file."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    file = folder / "net.py"
    file.write_text(f"{HEAD}\nclass Net(Base):\n{lines}\n")
    inputs = (parse_tensor_spec("8"),)
    job = Job.create(f"{file}:Net", inputs=inputs, mode=Mode.TRAIN, loss=Loss.OUTPUT, steps=1)
    return record(job, 4, capability)


@pytest.mark.parametrize(
    "made",
    [
        'torch.ones(1024, 1024, device="cuda")',
        "torch.ones(1024, 1024, device=DEVICE)",
        "torch.ones(1024, 1024, device=GPU)",
        "torch.ones(1024, 1024, device=0)",
        "torch.ones(1024, 1024, device=x.device)",
        "ones(1024, 1024, device=GPU)",
        "torch.ones(1024, 1024).cuda()",
        'torch.ones(1024, 1024).to("cuda:0", non_blocking=True)',
        "torch.ones(1024, 1024).pin_memory().to(GPU, torch.float32)",
        "torch.ones(1024, 1024).to(x)",
        'x.new_ones(1024, 1024, device="cuda")',
        'torch.zeros_like(torch.ones(1024, 1024), device="cuda")',
        "torch.as_tensor([1.0], device=DEVICE).expand(1024, 1024).clone()",
        'torch.randn(1024, 1024, device="cuda", generator=torch.Generator("cuda"))',
        "torch.ones(1024, 1024, device=torch.accelerator.current_accelerator())",
    ],
)
def test_tensors_on_the_gpu_take_memory_there(tmp_path: Path, made: str) -> None:
    """A tensor on the GPU is born once, whichever way a forward pass requests it."""
    trace = trace_file(tmp_path, f"def more(self, x):\n    return {made}")
    validate(trace)
    assert born(trace).count(WIDE) == 1


def test_tensors_on_the_gpu_stay_where_they_are(tmp_path: Path) -> None:
    """Moving to the GPU what is there already is no copy, and gives the same tensor."""
    body = """
def more(self, x):
    wide = torch.ones(1024, 1024, device="cuda")
    assert wide.cuda() is wide and wide.to(GPU) is wide and wide.to("cuda") is wide
    self.to(DEVICE).cuda()
    return wide
"""
    assert born(trace_file(tmp_path, body)).count(WIDE) == 1


@pytest.mark.parametrize("made", ["torch.ones(1024, 1024, device=GPU)", "torch.ones(1024, 1024).cuda()"])
def test_plain_attributes_on_the_gpu_live_as_long_as_the_model(tmp_path: Path, made: str) -> None:
    """A tensor that the constructor puts on the GPU is there from the start, registered or not."""
    body = f"""
def __init__(self):
    super().__init__()
    self.wide = {made}

def more(self, x):
    return self.wide * x.mean()
"""
    trace = trace_file(tmp_path, body)
    sizes = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    assert sizes.count(WIDE) == 1


@pytest.mark.parametrize("moved", ["self.wide.cuda()", "self.wide.to(x.device)", "self.wide.to(x)"])
def test_plain_attributes_on_the_cpu_are_copied(tmp_path: Path, moved: str) -> None:
    """A tensor that `Module.to` leaves on the CPU takes memory on the GPU for each of its copies."""
    body = f"""
def __init__(self):
    super().__init__()
    self.wide = torch.ones(1024, 1024)

def more(self, x):
    return {moved}
"""
    assert born(trace_file(tmp_path, body), "_to_copy").count(WIDE) == 1


def test_code_for_the_gpu_is_what_runs(tmp_path: Path) -> None:
    """At import, in the constructor and in the forward pass, conditions on the device hold."""
    body = """
assert DEVICE == "cuda"

def __init__(self):
    super().__init__()
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (8, 6)
    self.device = torch.device("cuda:0")
    self.to(self.device)

def more(self, x):
    assert torch.cuda.is_available() and x.is_cuda and x.device.type == "cuda" and x.get_device() == 0
    assert x.device == self.device and self.fc.weight.device == self.device
    assert not torch.ones(1).is_cuda
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.device(torch.cuda.current_device()):
        x.record_stream(side)
        return x
"""
    validate(trace_file(tmp_path, body))


@pytest.mark.parametrize(
    "region", ['torch.autocast("cuda")', "torch.autocast(x.device.type)", "torch.amp.autocast(DEVICE)"]
)
def test_autocast_of_the_gpu_counts(tmp_path: Path, region: str) -> None:
    """Regions of mixed precision cast the weight: 8 x 8 halves."""
    trace = trace_file(tmp_path, f"def more(self, x):\n    with {region}:\n        return self.fc(x)")
    assert 8 * 8 * 2 in born(trace, "_to_copy")


@pytest.mark.parametrize("before", ["", "torch.ones(1024, 1024, device='cuda'); "])
def test_a_model_that_empties_the_cache_is_followed(tmp_path: Path, before: str) -> None:
    """It is emptied once, where the model says so, after the tensor that was freed just before."""
    trace = trace_file(tmp_path, f"def more(self, x):\n    {before}torch.cuda.empty_cache()\n    return x")
    (emptied,) = [event for event in trace.events if isinstance(event, Free) and event.empties_cache]
    (freed,) = [e for e in trace.events if isinstance(e, Alloc) and e.block == emptied.block]
    assert not before or freed.size_bytes == WIDE


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("torch.backends.cudnn.benchmark = True", "planned with --cudnn-benchmark alone"),
        ("torch.backends.cudnn.deterministic = True", "cudnn.deterministic is set"),
        ("torch.backends.cudnn.enabled = False", "cuDNN is switched off"),
        ("torch.backends.cudnn.allow_tf32 = False", "allow_tf32 is False"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms are asked for"),
        ("torch.backends.cudnn.benchmark = False", ""),
    ],
)
def test_settings_that_are_not_planned_are_named(tmp_path: Path, setting: str, words: str) -> None:
    """A file's own switches of torch's backends change memory, so the answer names them; none is left set."""
    notes = trace_file(tmp_path, f"{setting}\ndef more(self, x):\n    return x").notes
    assert any(words in note for note in notes) if words else not notes
    assert torch.backends.cudnn.enabled and not torch.backends.cudnn.benchmark


def test_blocks_belong_to_the_stream_of_their_operator(tmp_path: Path) -> None:
    """Work on a side stream, and the backward pass of its operators, takes blocks of that stream."""
    body = """
def more(self, x):
    side = torch.cuda.Stream()
    assert side != torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        y = self.fc(x[:1].expand(1024, 8)).sin()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    return y * 3
"""
    trace = trace_file(tmp_path, body)
    validate(trace)
    allocs = [event for event in trace.events if isinstance(event, Alloc)]
    wide = [one for one in allocs if one.size_bytes == 1024 * 8 * 4 and one.category is Category.TEMPORARY]
    # The sine and the gradient before it are of the side stream, what follows the sine is of the default.
    operators = [(trace.sites[event.site].op.split(".")[1], event.stream) for event in wide]
    assert operators == [("sin", 1), ("mul", 0), ("mul", 0), ("cos", 1), ("mul", 1)]
    assert {one.stream for one in allocs if one.size_bytes > 2**22} == {0, 1}  # each has a cuBLAS workspace
    assert any("calls Tensor.record_stream" in note for note in trace.notes)


def test_streams_come_from_a_pool(tmp_path: Path) -> None:
    """The 33rd stream of a priority is the first one again."""
    body = """
def more(self, x):
    made = [torch.cuda.Stream() for _ in range(33)]
    assert made[32] == made[0] != made[1] != torch.cuda.Stream(priority=-1)
    return x
"""
    validate(trace_file(tmp_path, body))


def test_autocast_that_was_made_at_import_counts(tmp_path: Path) -> None:
    """A decorator is made while the file is imported, and works in the forward pass."""
    trace = trace_file(tmp_path, '@torch.autocast("cuda")\ndef more(self, x):\n    return self.fc(x)')
    assert 8 * 8 * 2 in born(trace, "_to_copy")


def test_default_device_is_the_gpu(tmp_path: Path) -> None:
    """`torch.set_default_device("cuda")` holds until the trace ends."""
    body = """
def __init__(self):
    torch.set_default_device("cuda")
    super().__init__()

def more(self, x):
    return torch.ones(1024, 1024)
"""
    assert born(trace_file(tmp_path, body)).count(WIDE) == 1
    assert torch.get_default_device().type == "cpu"


def test_values_that_were_put_on_the_gpu_are_known(tmp_path: Path) -> None:
    """A mask that the constructor made and moved keeps three columns of eight."""
    body = """
def __init__(self):
    super().__init__()
    self.columns = (torch.arange(8) < 3).cuda()

def more(self, x):
    return x[:, self.columns]
"""
    assert born(trace_file(tmp_path, body), "index.Tensor")[-1] == 4 * 3 * 4


def test_what_depends_on_the_run_is_named(tmp_path: Path) -> None:
    """Answers that a trace can only invent, and other GPUs, are among the assumptions."""
    body = """
def more(self, x):
    torch.cuda.memory_allocated()
    torch.cuda.get_device_name()
    return x.to("cuda:1")
"""
    assert trace_file(tmp_path, body).notes == (
        "net.py:20 calls torch.cuda.memory_allocated, whose result depends on the run: the trace takes 0",
        "net.py:21 calls torch.cuda.get_device_name: the trace takes 'NVIDIA GPU'",
        "net.py:22 uses cuda:1: each GPU stands for the planned one",
    )


@pytest.mark.parametrize(
    "query",
    [
        '1 / torch.cuda.memory_stats()["reserved_bytes.all.peak"]',
        'torch.cuda.memory_stats()["num_alloc_retries"] + 1',
        "torch.cuda.max_memory_allocated() / torch.cuda.max_memory_reserved()",
        "torch.cuda.memory.memory_allocated() / torch.cuda.memory.memory_reserved()",
        'max(segment["total_size"] for segment in torch.cuda.memory_snapshot())',
        "torch.cuda.memory._record_memory_history(max_entries=1000)",
        'torch.cuda.memory._dump_snapshot("FOLDER/snapshot.pickle")',
        'torch.cuda.memory._snapshot()["segments"][0]["blocks"]',
        "torch.cuda.cudart().cudaProfilerStart()",
        "torch.cuda.profiler.start()",
        "torch.random.fork_rng(devices=[0]).__enter__()",
        "torch.cuda.get_per_process_memory_fraction() * torch.cuda.temperature()",
    ],
)
def test_queries_of_the_allocator_change_nothing(tmp_path: Path, query: str) -> None:
    """A model may log, divide or dump what the allocator says; the plan has none of it."""
    body = "def more(self, x):\n    QUERY\n    return torch.ones(1024, 1024, device=x.device)"
    code = body.replace("QUERY", query.replace("FOLDER", str(tmp_path)))
    assert born(trace_file(tmp_path, code)).count(WIDE) == 1
    assert not (tmp_path / "snapshot.pickle").exists()


def test_torchscript_compiles_as_ever(tmp_path: Path) -> None:
    """Functions that a file compiles may call what is replaced meanwhile."""
    body = """
@staticmethod
@torch.jit.script
def more_of(x: torch.Tensor):
    return torch.ones(1024, 1024, device=x.device)

def more(self, x):
    return self.more_of(x)
"""
    assert born(trace_file(tmp_path, body)).count(WIDE) == 1


def test_torchscript_finds_the_names_of_a_class_that_it_compiles() -> None:
    """A class may call functions of the scope that compiles it, as torch's own optimizers do."""

    def doubled(x: Tensor) -> Tensor:
        return x + x

    class Scripted:
        def __init__(self) -> None:
            self.factor = 2

        def run(self, x: Tensor) -> Tensor:
            return doubled(x)

    with planned_device():
        assert torch.jit.script(Scripted)


def test_everything_is_as_it_was_afterwards(tmp_path: Path) -> None:
    """Names of torch are restored, also after an error, and the GPU is gone."""
    holders = (torch, torch.cuda, torch.accelerator, torch.jit, torch.fft, torch.cuda.nvtx, Tensor)
    before = [dict(vars(holder)) for holder in holders]
    with pytest.raises(ModelError, match="stop"):
        trace_file(tmp_path, 'def more(self, x):\n    raise ValueError("stop")')
    assert [dict(vars(holder)) for holder in holders] == before
    assert not torch.cuda.is_available()


def test_names_that_a_module_imports_during_a_plan_are_plain_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions and classes that the module bound, and `torch.jit.script`, then act as in any process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    (tmp_path / "imported_late.py").write_text(
        "from torch import ones\n"
        "from torch.cuda import Stream, empty_cache, is_available, memory_allocated, synchronize\n"
        "from torch.jit import script\n"
    )
    trace_file(
        tmp_path,
        "def more(self, x):\n    import imported_late as late\n    return late.ones(8, device=GPU) + x",
    )
    names = sys.modules.pop("imported_late")
    query = torch.cuda.memory_allocated
    names.script(_doubled)
    assert not (names.is_available() or torch.cuda.is_available())
    assert torch.cuda.memory_allocated is query
    names.empty_cache()
    assert names.memory_allocated() == 0
    assert names.ones(3, device="meta").is_meta
    for unavailable in (names.synchronize, names.Stream):
        with pytest.raises((AssertionError, RuntimeError)):
            unavailable()


def _doubled(x: Tensor) -> Tensor:
    return x + x


def test_isolated_models_have_the_gpu_too(tmp_path: Path) -> None:
    """In a process of its own a model is planned as in this one."""
    file = tmp_path / "net.py"
    body = "    def more(self, x):\n        return torch.ones(1024, 1024, device=DEVICE)\n"
    file.write_text(f"{HEAD}\nclass Net(Base):\n{body}")
    here, apart = (
        planner.estimate(f"{file}:Net", 4, input="8", loss="output", isolate=isolate).to_dict()
        for isolate in (False, True)
    )
    assert here["peak_allocated_mib"] == apart["peak_allocated_mib"] > 4


def test_code_may_choose_by_the_compute_capability(tmp_path: Path) -> None:
    """A branch on the compute capability is that of the GPU that is planned for."""
    body = """
def more(self, x):
    if torch.cuda.get_device_capability() >= (8, 0):
        return torch.ones(1024, 1024, device="cuda")
    return x
"""
    assert born(trace_file(tmp_path, body, (8, 6))).count(WIDE) == 1
    assert born(trace_file(tmp_path, body, (7, 5))).count(WIDE) == 0


def test_libraries_see_one_and_the_same_gpu() -> None:
    """A library that queries a tensor for its device and then the device for its capability gets both."""
    pytest.importorskip("transformers")
    sizes = ("num_hidden_layers", 1), ("hidden_size", 64), ("intermediate_size", 64), ("vocab_size", 99)
    job = resolve_job("hf:MixtralForCausalLM", {}, model_args=sizes, inputs=[parse_tensor_spec("16:int64")])
    validate(record(job, 2, AMPERE))
