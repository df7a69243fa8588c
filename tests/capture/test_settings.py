"""Process-wide settings: those that a model changes are restored, and decide the key where they have to."""

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from planner import max_batch
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.session import record
from planner.capture.settings import Setting, changed_settings, reapplied_settings, restored_settings
from planner.errors import ModelError
from planner.jobs import Job, parse_tensor_spec

AMPERE = (8, 6)

MODEL = """
import gc, locale, logging, os, random, resource, signal, socket, sys, threading
import numpy
import torch
import torch._functorch.config
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        change()

    def forward(self, x):
        return self.head(x)

def change():
    {line}
"""
# What a model does to each setting.
CHANGES = {
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": 'torch.set_default_device("cpu")',
    "gradients": "torch.set_grad_enabled(False)",
    "anomaly detection": "torch.autograd.set_detect_anomaly(True)",
    "autocast": 'torch.set_autocast_enabled("cuda", True)',
    "threads": "torch.set_num_threads(7)",
    "float32 matmul precision": 'torch.set_float32_matmul_precision("medium")',
    "deterministic algorithms": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "cudnn.enabled": "torch.backends.cudnn.enabled = False",
    "cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = True",
    "cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "float32 precisions": 'torch.backends.fp32_precision = "tf32"',
    "flash attention": "torch.backends.cuda.enable_flash_sdp(False)",
    "memory-efficient attention": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "math attention": "torch.backends.cuda.enable_math_sdp(False)",
    "cuDNN attention": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "reduced math attention": "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "attention order": "torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])",
    "linear algebra": 'torch.backends.cuda.preferred_linalg_library("magma")',
    "blas": 'torch.backends.cuda.preferred_blas_library("cublaslt")',
    "fp16 reduction": "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "bf16 reduction": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "fp16 accumulation": "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "fill of uninitialized memory": "torch.utils.deterministic.fill_uninitialized_memory = False",
    "mkldnn": "torch.backends.mkldnn.enabled = False",
    "activation budget": "torch._functorch.config.activation_memory_budget = 0.5",
    "sys.path": 'sys.path.insert(0, "/nowhere")',
    "sys.argv": 'sys.argv.append("word")',
    "recursion limit": "sys.setrecursionlimit(4321)",
    "environment": 'os.environ["HOSTILE"] = "1"; os.environ.pop("PATH", None)',
    "working directory": 'os.chdir("/")',
    "sys.stdin": "sys.stdin = None",
    "sys.stdout": "sys.stdout = None",
    "sys.stderr": "sys.stderr = None",
    "sys.excepthook": "sys.excepthook = print",
    "sys.displayhook": "sys.displayhook = print",
    "sys.unraisablehook": "sys.unraisablehook = print",
    "sys.dont_write_bytecode": "sys.dont_write_bytecode = not sys.dont_write_bytecode",
    "threading.excepthook": "threading.excepthook = print",
    "trace function": "sys.settrace(lambda *_: None)",
    "profile function": "sys.setprofile(lambda *_: None)",
    "switch interval": "sys.setswitchinterval(0.5)",
    "digits of integers": "sys.set_int_max_str_digits(10_000)",
    "random": "random.seed(5)",
    "torch random": "torch.manual_seed(5)",
    "numpy random": "numpy.random.seed(5)",
    "gc": "gc.disable(); gc.set_threshold(7)",
    "umask": "os.umask(0o777)",
    "logging": "logging.disable(50); logging.getLogger().addHandler(logging.NullHandler())",
    "socket timeout": "socket.setdefaulttimeout(9)",
    "locale": 'locale.setlocale(locale.LC_ALL, "C")',
    "signal mask": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})",
    "signal handlers": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "timers": "signal.setitimer(signal.ITIMER_REAL, 1000)",
    "resource limits": "resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(4)[1]))",
}
ATTENTION = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        x = self.project(x).view(x.shape[0], x.shape[1], 4, 16).transpose(1, 2)
        return scaled_dot_product_attention(x, x, x).sum((1, 2, 3))

class Changing(Net):
    def forward(self, x):
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        return super().forward(x)
"""


def settings() -> tuple[Setting, ...]:
    return (*reapplied_settings(), *restored_settings())


def values() -> dict[str, object]:
    return {one.name: one.read() for one in settings()}


def job_of(file: Path, name: str = "Net") -> Job:
    return Job.create(
        f"{file}:{name}", inputs=(parse_tensor_spec("4"),), target=parse_tensor_spec("scalar:int64")
    )


@contextmanager
def standing(name: str) -> Iterator[None]:
    """Give settings that a fresh process may lack, such as a locale, a value to be restored."""
    before = values()
    if name == "resource limits":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        yield
    finally:
        for one in settings():
            if one.name == name and one.read() != before[name]:
                one.write(before[name])


def test_each_setting_has_a_test() -> None:
    """A setting that joins the list joins the test below."""
    assert {one.name for one in settings()} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_leaves_the_setting(tmp_path: Path, name: str) -> None:
    """What a constructor sets for the whole process is as before when its capture has ended."""
    import numpy.random  # noqa: F401, ICN001  # so that there is a state to restore
    import torch._functorch.config

    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(MODEL).format(line=CHANGES[name]))
    before = values()
    constructor = find_constructor(job_of(file))
    with suppress(ModelError):  # with some of it the model itself fails, as it would on a GPU
        record(job_of(file), 2, AMPERE, lambda job: construct_model(job, constructor))
    after = values()
    assert after == before
    assert torch.zeros(1).device == torch.device("cpu")


@pytest.mark.parametrize("name", [one.name for one in reapplied_settings() if one.defaults])
def test_a_changed_setting_is_part_of_the_key(name: str, tmp_path: Path) -> None:
    """Each setting that decides traces is named where it differs from that of a fresh process."""
    import torch._functorch.config

    assert changed_settings() == {}
    before = values()
    try:
        exec(CHANGES[name], {"torch": torch})
    except RuntimeError as error:  # a library that this build of torch lacks
        pytest.skip(str(error))
    else:
        assert name in changed_settings()
    finally:
        for one in reapplied_settings():
            if one.read() != before[one.name]:
                one.write(before[one.name])
    assert changed_settings() == {}


def test_plans_around_a_model_that_switches_attention(tmp_path: Path) -> None:
    """A model between two plans of another one changes neither its answer nor its cached traces."""
    file = tmp_path / "net.py"
    file.write_text(ATTENTION)

    def plan(name: str, cache: str | None) -> int:
        return max_batch(f"{file}:{name}", input="512x64", loss="sum", gpu_mib=4000, cache=cache).max_batch

    fresh = plan("Net", None)
    switched = plan("Changing", None)
    assert switched < fresh
    assert plan("Net", None) == fresh
    cache = str(tmp_path / "cache")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert plan("Net", cache) == switched
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert plan("Net", cache) == fresh


@pytest.mark.parametrize(
    "line",
    ["os._exit(0)", 'os.execv(sys.executable, [sys.executable, "-c", ""])', 'os.execlp("true", "true")'],
)
def test_a_model_ends_no_process_without_an_answer(tmp_path: Path, line: str) -> None:
    """A model that ends or replaces the process is an error in one line, not an exit with its own code."""
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(MODEL).format(line=line))
    constructor = find_constructor(job_of(file))
    with pytest.raises(ModelError, match=r"its constructor fails: (SystemExit|PermissionError)"):
        record(job_of(file), 2, AMPERE, lambda job: construct_model(job, constructor))
    assert os._exit is not None and sys.modules["os"]._exit.__name__ == "_exit"


def test_a_plan_calls_no_hook_on_all_modules_or_optimizers() -> None:
    """Hooks of a training in this process, such as a profiler's, are not called by a plan, and stay."""
    from torch import nn
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    called: list[str] = []
    hooks = [
        modules.register_module_forward_pre_hook(lambda module, args: called.append("before a module")),
        modules.register_module_forward_hook(lambda module, args, out: called.append("after a module")),
        modules.register_module_full_backward_hook(lambda module, grad, out: called.append("backward")),
        optimizers.register_optimizer_step_pre_hook(lambda *_: called.append("before a step")),
        optimizers.register_optimizer_step_post_hook(lambda *_: called.append("after a step")),
    ]
    try:
        max_batch(lambda: nn.Linear(4, 4), input=["4"], loss="sum", gpu_mib=2000)
        assert not called
        layer = nn.Linear(4, 4)
        layer(torch.ones(1, 4, requires_grad=True)).sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
        assert len(called) == len(hooks)
    finally:
        for hook in hooks:
            hook.remove()


def test_hooks_that_a_model_registers_are_gone_after_the_plan() -> None:
    """A hook on all modules that a model registers is called once for each module, also after a read."""
    from torch import nn
    from torch.nn.modules import module as modules

    called: list[int] = []

    class Hooked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            modules.register_module_forward_hook(lambda *_: called.append(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.clear()
            out = super().forward(x)
            assert out.sum().item() < 1e9
            return out

    before = dict(modules._global_forward_hooks)
    max_batch(Hooked, input=["4"], loss="sum", gpu_mib=2000)
    assert len(called) == 1
    assert modules._global_forward_hooks == before
