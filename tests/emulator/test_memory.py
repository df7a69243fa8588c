"""The emulated GPU's book of memory, compiled and called as the stand-in libraries call it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.emulator.child.libraries.build import CORE_SOURCES, SOURCES
from planner.emulator.gpu import describe_gpu
from planner.errors import UsageError
from planner.hardware.database import find_device
from planner.hardware.device import MIB, generic_device

THREADS = Path(__file__).parents[1] / "programs" / "core_threads.c"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

HEAD = """
import ctypes, json, sys
core = ctypes.CDLL(sys.argv[1])
for name in ("emu_alloc", "emu_reserve", "emu_host_alloc"):
    getattr(core, name).restype = ctypes.c_void_p
for name in ("emu_used", "emu_peak", "emu_pinned_bytes"):
    getattr(core, name).restype = ctypes.c_size_t
for name in ("emu_free", "emu_take", "emu_context_active", "emu_is_pinned", "emu_host_free"):
    getattr(core, name).restype = ctypes.c_bool
MIB = 2**20
def alloc(mib, device=0): return core.emu_alloc(device, ctypes.c_size_t(int(mib * MIB)))
def free(at): return core.emu_free(ctypes.c_void_p(at))
def used(device=0): return core.emu_used(device) / MIB
def copied(to, at, size):
    core.emu_copy(to, ctypes.c_void_p(at) if isinstance(at, int) else at, ctypes.c_size_t(size))
def show(*values): print(json.dumps(values))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the part that needs none of NVIDIA's headers."""
    path = tmp_path_factory.mktemp("core") / "core.so"
    sources = [str(SOURCES / name) for name in CORE_SOURCES]
    command = ["gcc", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-std=gnu2x", "-fPIC", "-shared", *sources]
    subprocess.run([*command, "-o", str(path), "-lpthread"], check=True)
    return path


def call(core: Path, code: str, gpu: str, **variables: str) -> Any:
    """Run code in a process of its own, which reads the description once, and return what it shows."""
    environment = {"PLANNER_EMULATED_GPU": gpu, **variables}
    command = [sys.executable, "-I", "-c", HEAD + code, str(core)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def small_gpu(context_mib: int = 0, count: int = 1) -> str:
    """Describe a GPU of 1,000 MiB, of which torch sees all but 400 and its share."""
    return describe_gpu(generic_device(1000), count, context_mib * MIB)


USABLE_MIB = generic_device(1000).usable.value / MIB


def test_memory_is_what_the_runtime_shows_less_the_context(core: Path) -> None:
    """A segment fits exactly while context and segments fit into what torch sees of the GPU."""
    code = "show(used(), bool(alloc(2)), used(), bool(alloc(1000)), used())"
    assert call(core, code, small_gpu(context_mib=100)) == [0, True, 102, False, 102]


def test_the_context_is_taken_once_by_each_gpu(core: Path) -> None:
    """A second allocation finds the context there; a GPU that nobody used has none."""
    code = "alloc(2); alloc(2); show(used(0), used(1), core.emu_context_active(1))"
    assert call(core, code, small_gpu(context_mib=100, count=2)) == [104, 0, False]


def test_large_segments_are_whole_pages(core: Path) -> None:
    """The driver hands out pages of 2 MiB."""
    assert call(core, "alloc(3); show(used())", small_gpu()) == [4]


def test_addresses_fall_and_gaps_are_used_again(core: Path) -> None:
    """A new segment lies below all others, unless a gap above is large enough."""
    code = """
a, b, c = alloc(4), alloc(4), alloc(4); free(b)
d, e = alloc(2), alloc(6); show(a > b > c, c < d < a, e < c)
"""
    assert call(core, code, small_gpu()) == [True, True, True]


def test_addresses_can_rise(core: Path) -> None:
    """Some machines hand them out from below."""
    code = """
a, b, c = alloc(4), alloc(4), alloc(4); free(b)
d, e = alloc(2), alloc(6); show(a < b < c, a < d < c, e > c)
"""
    assert call(core, code, small_gpu(), PLANNER_EMULATED_ADDRESSES="rising") == [True, True, True]


def test_what_is_freed_is_free_again(core: Path) -> None:
    """Only the address of a segment frees it, and only once."""
    code = "a = alloc(4); show(free(a + 512), free(a), free(a), used())"
    assert call(core, code, small_gpu()) == [False, True, False, 0]


def test_the_peak_is_the_most_since_it_was_reset(core: Path) -> None:
    """Each step reads the peak of its own span."""
    code = """
a = alloc(100); free(a); first = core.emu_peak(0); core.emu_reset_peak(0)
alloc(20); show(first / MIB, core.emu_peak(0) / MIB)
"""
    assert call(core, code, small_gpu()) == [100, 20]


def test_device_memory_reads_as_zeros(core: Path) -> None:
    """Nothing is kept there, so that a copy to the host gives zeros."""
    code = """
at = alloc(2); host = ctypes.create_string_buffer(b"data", 4)
copied(ctypes.c_void_p(at), host, 4); copied(host, at, 4); show(list(host.raw))
"""
    assert call(core, code, small_gpu()) == [[0, 0, 0, 0]]


COPIES = """
at = alloc(2)
def write(text, offset=0):
    copied(ctypes.c_void_p(at + offset), ctypes.create_string_buffer(text.encode(), len(text)), len(text))
def read(size, offset=0):
    back = ctypes.create_string_buffer(b"-" * size, size); copied(back, at + offset, size)
    return back.raw.decode().replace("\\0", "0")
"""


def copies(core: Path, code: str) -> Any:
    """Return what the code shows of copies to and from a GPU that keeps those of up to 8 bytes."""
    return call(core, COPIES + code, small_gpu(), PLANNER_EMULATED_COPY_BYTES="8")


def test_what_was_copied_to_the_gpu_reads_back_as_it_was(core: Path) -> None:
    """A tensor of sizes that a script puts on the GPU and reads from there, as long as it is small."""
    assert copies(core, "write('number'); show(read(6))") == ["number"]
    assert copies(core, "write('too large'); show(read(9))") == ["0" * 9]


def test_a_read_of_something_else_than_whole_copies_gives_zeros(core: Path) -> None:
    """A kernel's result in a block that was used before is not the number that once stood there."""
    assert copies(core, "write('labels'); show(read(5), read(8), read(5, 1))") == ["0" * 5, "0" * 8, "0" * 5]


def test_a_number_of_four_bytes_reads_as_zero(core: Path) -> None:
    """A loss, a flag, a count of elements: kernels write these, wherever an old one stood."""
    assert copies(core, "write('loss'); show(read(4))") == ["0000"]


def test_a_number_reads_as_copied_as_often_as_allowed(core: Path) -> None:
    """A broadcast size reads once, an optimizer's count of steps until its step ends."""
    code = """
def allow(reads): core.emu_allow_reads(ctypes.c_void_p(at), ctypes.c_size_t(4), reads)
write('3333'); allow(1); once = read(4), read(4); allow(2**32 - 1); during = read(4), read(4); allow(0)
show(once, during, read(4))
"""
    assert copies(core, code) == [["3333", "0000"], ["3333", "3333"], "0000"]


def test_several_copies_read_as_one(core: Path) -> None:
    """Pieces that ranks gather, one of each, are read as one."""
    assert copies(core, "write('abc'); write('def', 3); show(read(6))") == ["abcdef"]


def test_a_later_copy_replaces_what_it_covers(core: Path) -> None:
    """A copy in the middle of an earlier one, or over its end, replaces that part; a large copy clears it."""
    assert copies(core, "write('abcdef'); write('XY', 2); show(read(6))") == ["abXYef"]
    assert copies(core, "write('abcd'); write('XYZ', 3); show(read(6))") == ["abcXYZ"]
    assert copies(core, "write('abcdef'); write('0123456789'); show(read(6))") == ["000000"]


def test_contents_go_along_with_copies_on_the_gpu(core: Path) -> None:
    """A clone reads as its original; a copy of unknown bytes is unknown."""
    code = """
write('known'); write('other', 16)
core.emu_copy(ctypes.c_void_p(at + 8), ctypes.c_void_p(at), ctypes.c_size_t(5))
core.emu_copy(ctypes.c_void_p(at + 16), ctypes.c_void_p(at + 100), ctypes.c_size_t(5))
show(read(5, 8), read(5, 16))
"""
    assert copies(core, code) == ["known", "00000"]


def test_a_segment_that_is_freed_takes_its_contents_along(core: Path) -> None:
    """The next one at its address begins with zeros."""
    assert copies(core, "write('known'); free(at); show(alloc(2) == at, read(5))") == [True, "00000"]


def test_fills_are_copies_of_one_value(core: Path) -> None:
    """A fill is read as its one value, as torch makes zeros and flags."""
    code = "core.emu_fill(ctypes.c_void_p(at), 65, ctypes.c_size_t(5)); show(read(5))"
    assert copies(core, code) == ["AAAAA"]


def test_pinned_memory_is_counted_and_real(core: Path) -> None:
    """Data loaders write into it."""
    code = """
at = core.emu_host_alloc(ctypes.c_size_t(5000)); ctypes.memset(at, 1, 5000)
pinned = core.emu_pinned_bytes(); freed = core.emu_host_free(ctypes.c_void_p(at))
show(pinned, freed, core.emu_pinned_bytes())
"""
    assert call(core, code, small_gpu()) == [8192, True, 0]


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,0", 2), ("", 0), ("0,7,1", 1), ("-1", 0), ("GPU-1", 0)]
)
def test_visible_devices_are_the_first_valid_ones(core: Path, visible: str, count: int) -> None:
    """The first index that is none ends the list, as CUDA's documentation says."""
    code = """
class Gpu(ctypes.Structure): _fields_ = [("name", ctypes.c_char * 128), ("count", ctypes.c_int)]
core.emu_gpu.restype = ctypes.POINTER(Gpu); show(core.emu_gpu().contents.count)
"""
    assert call(core, code, small_gpu(count=2), CUDA_VISIBLE_DEVICES=visible) == [count]


@pytest.mark.parametrize(
    ("gpu", "images", "image"),
    [
        ("RTX 4090", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 86),
        ("RTX 3090", "sm_75 sm_80 sm_90", 80),
        ("H100 80GB", "sm_80 sm_90 sm_90a", 90),
        ("T4", "sm_80 sm_90", 75),
    ],
)
def test_the_kernel_image_is_the_newest_that_the_gpu_runs(
    core: Path, gpu: str, images: str, image: int
) -> None:
    """CUB compares it with what it was compiled for; a GPU without any keeps its own."""
    code = f"core.emu_set_kernel_images({images.encode()!r}); show(core.emu_kernel_image())"
    assert call(core, code, describe_gpu(find_device(gpu))) == [image]


def test_attributes_are_those_of_the_described_gpu(core: Path) -> None:
    """Attributes follow the numbers of cudaDeviceAttr: multiprocessors, threads of one, capability."""
    code = """
def attribute(number):
    value = ctypes.c_int(); core.emu_attribute(number, 0, ctypes.byref(value)); return value.value
show(*map(attribute, (16, 39, 75, 76)))
"""
    assert call(core, code, describe_gpu(find_device("RTX 3090"))) == [82, 1536, 8, 6]


def test_a_count_out_of_range_is_refused() -> None:
    """The book has room for so many."""
    with pytest.raises(UsageError, match="--gpus 65: give a number from 1 to 64"):
        describe_gpu(find_device("L4"), 65)


def test_a_gpu_whose_limits_are_not_known_is_refused() -> None:
    """Capability 6.1 is older than what torch's CUDA builds run on."""
    with pytest.raises(UsageError, match=r"compute capability 6\.1 is not emulated; known are 7\.0"):
        describe_gpu(find_device("GTX 1080"))


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_share_the_core_without_a_race(sanitizer: str, tmp_path: Path) -> None:
    """The sanitizers of gcc find nothing while threads use the core, which then holds the contexts alone."""
    program = tmp_path / "threads"
    sources = [str(SOURCES / name) for name in CORE_SOURCES]
    command = ["gcc", "-g", "-O1", "-std=gnu2x", "-Wno-unknown-pragmas", f"-fsanitize={sanitizer}", *sources]
    subprocess.run([*command, f"-I{SOURCES}", str(THREADS), "-o", str(program), "-lpthread"], check=True)
    gpu = small_gpu(context_mib=100, count=2)
    variables = {"PLANNER_EMULATED_GPU": gpu, "PLANNER_EMULATED_COPY_BYTES": "4096"}
    done = subprocess.run([str(program)], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SEVERAL = """
import os
def child(code):  # a fork that holds what it allocated until it is told to end, or its parent ends
    ready, told = os.pipe(), os.pipe()
    if not os.fork():
        os.close(told[1]); exec(code); os.write(ready[1], b"."); os.read(told[0], 1); os._exit(0)
    os.read(ready[0], 1)
    return told[1]
def taken(device=0): return core.emu_taken(device) / MIB
core.emu_taken.restype = ctypes.c_size_t
"""


def test_processes_share_the_memory_of_a_gpu(core: Path, tmp_path: Path) -> None:
    """What one takes the others cannot, until it ends; GPU 1 has its own."""
    code = f"""{SEVERAL}
told = child("alloc(300)")
shared = taken(), used(), bool(alloc(400)), bool(alloc(2)), bool(alloc(400, 1))
os.write(told, b"."); os.wait()
show(*shared, bool(alloc(400)), taken(), taken(1))
"""
    found = call(core, code, small_gpu(100, 2), PLANNER_EMULATED_RECORDS=str(tmp_path))
    assert found == [400, 0, False, True, True, True, 502, 500]


def test_a_killed_process_gives_its_memory_back(core: Path, tmp_path: Path) -> None:
    """A zombie has none, as with NVIDIA's driver."""
    code = f"""{SEVERAL}
child("alloc(300); open('pid', 'w').write(str(os.getpid()))")
os.kill(int(open('pid').read()), 9)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
show(taken())
"""
    code = code.replace("'pid'", repr(str(tmp_path / "pid")))
    assert call(core, code, small_gpu(), PLANNER_EMULATED_RECORDS=str(tmp_path)) == [0]


def test_visible_devices_are_those_of_the_machine(core: Path, tmp_path: Path) -> None:
    """GPU 0 of a process that sees GPU 1 alone is GPU 1 of the others."""
    code = f"""{SEVERAL}
child("os.environ['CUDA_VISIBLE_DEVICES'] = '1'; alloc(300, 0)")
show(taken(0), taken(1))
"""
    assert call(core, code, small_gpu(count=2), PLANNER_EMULATED_RECORDS=str(tmp_path)) == [0, 300]
