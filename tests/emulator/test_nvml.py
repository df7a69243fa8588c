"""The emulated GPU as NVML shows it, read through NVIDIA's own bindings."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.emulator.child.libraries.build import CORE_SOURCES, SOURCES
from planner.emulator.gpu import describe_gpu
from planner.hardware.device import MIB, generic_device

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

HEAD = """
import ctypes, json, os, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # pynvml finds it by its soname
library.emu_alloc.restype = ctypes.c_void_p
import pynvml
pynvml.nvmlInit()
MIB = 2**20
card = pynvml.nvmlDeviceGetHandleByIndex(0)
def alloc(mib): return library.emu_alloc(0, ctypes.c_size_t(mib * MIB))
def used(): return pynvml.nvmlDeviceGetMemoryInfo(card).used // MIB
def mine():
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    return [[process.pid == os.getpid(), process.usedGpuMemory // MIB] for process in processes]
def show(*values): print(json.dumps(values))
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile NVML and the book of memory into one library."""
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    sources = [str(SOURCES / name) for name in (*CORE_SOURCES, "nvml.c", "nvml_readings.c")]
    flags = ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-std=gnu2x", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-Wl,-soname,libnvidia-ml.so.1", *sources, "-o", path], check=True)
    return path


def call(nvml: Path, code: str) -> Any:
    """Run code on a GPU of 1,000 MiB, whose context takes 100, and return what it shows."""
    gpu = describe_gpu(generic_device(1000), 1, 100 * MIB)
    command = [sys.executable, "-c", HEAD + code, str(nvml)]
    environment = {"PLANNER_EMULATED_GPU": gpu}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_process_is_shown_once_it_has_a_context(nvml: Path) -> None:
    """A query of NVML creates no context; from the first allocation on the process has it and its memory."""
    code = "before = mine(); alloc(2); show(before, mine())"
    assert call(nvml, code) == [[], [[True, 102]]]


def test_the_memory_in_use_rises_by_context_and_segments(nvml: Path) -> None:
    """The memory that torch does not see of the GPU is in use from the start."""
    code = "before = used(); alloc(2); show(used() - before, before)"
    rise, before = call(nvml, code)
    hidden = generic_device(1000).total.value - generic_device(1000).usable.value
    assert (rise, before) == (102, hidden // MIB)


def test_a_card_that_computes_nothing_is_idle(nvml: Path) -> None:
    """Loggers of frameworks read utilization, power, temperature and clocks."""
    code = """
load = pynvml.nvmlDeviceGetUtilizationRates(card)
show(load.gpu, load.memory, pynvml.nvmlDeviceGetPowerUsage(card), pynvml.nvmlDeviceGetTemperature(card, 0),
     pynvml.nvmlDeviceGetTotalEnergyConsumption(card), pynvml.nvmlDeviceGetClockInfo(card, 1) > 0)
"""
    assert call(nvml, code) == [0, 0, 0, 0, 0, True]


def test_the_newer_form_of_memory_shows_what_no_program_gets(nvml: Path) -> None:
    """Total is reserved, used and free."""
    code = """
memory = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
alloc(100); later = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
show(memory.total == memory.reserved + memory.used + memory.free, (later.used - memory.used) // MIB)
"""
    assert call(nvml, code) == [True, 200]  # with the context


def test_what_a_card_may_leave_open_is_not_supported(nvml: Path) -> None:
    """Programs expect that of consumer GPUs, and not that a function is missing."""
    code = """
def error(function):
    try: return str(function(card))
    except pynvml.NVMLError as error: return str(error)
names = ("EccMode", "MigMode", "FanSpeed", "Serial")
show(*{error(getattr(pynvml, "nvmlDeviceGet" + name)) for name in names})
"""
    assert call(nvml, code) == ["Not Supported"]
