"""Query an installed cuDNN for a convolution's engines, without a GPU.

Since 9.8 cuDNN's heuristics answer for a GPU that is only described (NVIDIA's documentation of its cuDNN
Frontend, "Deviceless Ahead-of-time Compilation"). They name engines in the order in which PyTorch tries them,
and the plan of an engine states its workspace. PyTorch runs the first engine that works, or times all of them
if `torch.backends.cudnn.benchmark` is set (ATen/native/cudnn/Conv_v8.cpp). cuDNN 9.8 and newer may be
queried, whatever torch is installed; the library runs in a separate process.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from planner._support.versions import format_cudnn_version
from planner._support.worker import Worker, WorkerError
from planner.errors import UsageError
from planner.hardware.cudnn.library_files import LIBRARY, digest_library, installed_folder
from planner.hardware.cudnn.worker import OLDEST
from planner.jobs import INSTALLED
from planner.program import SM_LIMITS, Convolution, Engine, Workspaces

if TYPE_CHECKING:
    from planner.hardware.cudnn.answer_cache import AnswerCache, LibraryAnswers

# For this and newer capabilities, the answers of 9.20 do not depend on the number of multiprocessors: all
# of 3,000 answers that were compared, at 28 to 188 multiprocessors, are equal. Of 500 on 7.5, 82 are not.
SAME_FOR_ALL_COUNTS = (8, 0)
QUERIES_OF_PROCESS = 2000  # cuDNN 9.28 keeps 0.4 MB of each query until its process ends
# Once cuDNN has selected an engine for a pointwise convolution on 7.x, its process considers no TF32 on newer
# GPUs either, and selects other engines for a quarter of their convolutions. In the other order all answers
# are unaffected, and so they are within either group. This holds for 300 convolutions, with 9.8 to 9.28.
TF32_SINCE = (8, 0)


@dataclass(eq=False, slots=True)
class Cudnn:
    """A client that queries a cuDNN library in separate processes, and keeps its answers."""

    version: str
    _start: Callable[[], tuple[Worker, int]]
    _workers: dict[bool, Worker]  # by whether the GPU has TF32
    lacks: str = ""  # why engines that are built on cuBLASLt are left out; empty if they are not left out
    cached: "LibraryAnswers | None" = None  # answers in the cache file; None without a cache file
    silent: set[tuple[int, int]] = field(default_factory=set)  # capabilities whose queries end the process
    _answers: dict[tuple[Any, ...], tuple[Engine, ...]] = field(default_factory=dict)
    _asked: Counter[bool] = field(default_factory=Counter)  # number of queries to each process in `_workers`

    def workspaces(self, capability: tuple[int, int], multiprocessors: int, query: Convolution) -> Workspaces:
        """Return a convolution's workspace with `cudnn.benchmark` off, or 0 bytes if cuDNN has no engine.

        It is the workspace of the first engine of cuDNN's heuristics that PyTorch can run.
        """
        engines = self.engines(capability, multiprocessors, query, every=False)
        return Workspaces(engines[0].workspace_bytes, engine=engines[0]) if engines else Workspaces(0)

    def benchmarked(
        self, capability: tuple[int, int], multiprocessors: int, query: Convolution
    ) -> Workspaces:
        """Return a convolution's workspaces with `cudnn.benchmark` on: the first engine's and the largest.

        The largest workspace of all engines is allocated while they are timed (generate_and_filter_plans).
        The engine that the timing selects is unknown in advance, and is assumed to be the first engine of the
        heuristics. Without an engine, the workspace is 0.
        """
        engines = self.engines(capability, multiprocessors, query, every=True)
        if not engines:
            return Workspaces(0)
        first, largest = engines[0], max(engines, key=lambda engine: engine.workspace_bytes)
        return Workspaces(first.workspace_bytes, largest.workspace_bytes, first, largest)

    def engines(
        self, capability: tuple[int, int], multiprocessors: int, query: Convolution, *, every: bool
    ) -> tuple[Engine, ...]:
        """Return cuDNN's first engine for a convolution, or if `every` all engines in cuDNN's order.

        All engines are the engines that PyTorch times with `benchmark`. Returns () if cuDNN has no engine for
        the convolution.
        """
        count = multiprocessors if capability < SAME_FOR_ALL_COUNTS else 0
        key = (capability, count, query, every)
        if key not in self._answers:
            self._answers[key] = self._find(capability, multiprocessors, query, every)
        return self._answers[key]

    def _find(
        self, capability: tuple[int, int], multiprocessors: int, query: Convolution, every: bool
    ) -> tuple[Engine, ...]:
        """Return the engines for a query from the cache file or a process, () for a `silent` capability.

        New answers are cached.
        """
        if capability in self.silent:
            return ()
        same_for_all = capability >= SAME_FOR_ALL_COUNTS
        key = (describe_for_cudnn(capability, 0 if same_for_all else multiprocessors), query, every)
        cached = None if self.cached is None else self.cached.get(key)
        if cached is not None:
            return cached
        device = describe_for_cudnn(capability, multiprocessors)
        answers = self._request(capability, {**asdict(query), "every": every, "device": device})
        engines = tuple(Engine(number, tuple(notes), size) for number, notes, size in answers)
        if self.cached is not None and capability not in self.silent:
            self.cached.put(key, engines)
        return engines

    def _request(self, capability: tuple[int, int], message: dict[str, Any]) -> list[Any]:
        """Send a query to a cuDNN process, and return the answer, or [] if the query ends the process.

        The process is started if needed. If the query ends it, the capability is added to `silent`.
        """
        has_tf32 = capability >= TF32_SINCE
        if has_tf32 not in self._workers or self._asked[has_tf32] == QUERIES_OF_PROCESS:
            self._workers[has_tf32], _ = self._start()
            self._asked[has_tf32] = 0
        self._asked[has_tf32] += 1
        try:
            answers: list[Any] = self._workers[has_tf32].request(message)
        except WorkerError:
            self.silent.add(capability)
            del self._workers[has_tf32]
            return []
        return answers


CublasLt = Callable[[Path], Path | str]  # returns cuBLASLt for cuDNN's folder, or the reason if there is none


def open_cudnn(where: str, cublaslt_for: CublasLt, gpu: str, cache_folder: Path | None = None) -> Cudnn:
    """Return a client that queries the cuDNN in a folder.

    For `INSTALLED`, it is the cuDNN of the first package on Python's path. `cublaslt_for` returns the library
    that the process loads as cuBLASLt. The real cuBLASLt answers only on a machine with a GPU; without a
    stand-in, engines that are built on it drop out. Engines that cuDNN compiles at run time drop out without
    a driver, so a driver next to that library is loaded too, and given `gpu`. With both, answers are cached
    in `cache_folder`. Raises UsageError if there is no cuDNN, or if it cannot be queried without a GPU.
    """
    # A fork does not share its parent's pipes.
    return _open(where, cublaslt_for, gpu, cache_folder, os.getpid())


@cache  # a library is loaded once; its answers are always the same
def _open(where: str, cublaslt_for: CublasLt, gpu: str, cache_folder: Path | None, _process: int) -> Cudnn:
    folder = installed_folder() if where == INSTALLED else Path(where).expanduser()
    if not (folder / LIBRARY).is_file():
        raise UsageError(f"--cudnn {where}: {LIBRARY} is not there; name its folder")
    built = cublaslt_for(folder)
    cublaslt, lacks = (None, built) if isinstance(built, str) else (built, "")
    start = partial(_start, where, folder, cublaslt, gpu)
    cached = None
    if cache_folder is not None and cublaslt is not None:  # without it, the machine's driver decides too
        cached = _open_cached(cache_folder, digest_library(folder, cublaslt, gpu))
    version = None if cached is None else cached.version()
    workers: dict[bool, Worker] = {}
    if version is None:
        workers[True], version = start()
        if cached is not None:
            cached.put_version(version)
    words = format_cudnn_version(version) or "of an unknown version"
    if version < OLDEST:
        raise UsageError(f"--cudnn {where}: cuDNN {words} answers only where a GPU is; give 9.8 or newer")
    return Cudnn(words, start, workers, lacks, cached)


def open_answer_cache(folder: Path) -> "AnswerCache | None":
    """Return the cache of answers in a folder, or None if Python has no SQLite."""
    try:
        from planner.hardware.cudnn.answer_cache import AnswerCache
    except ImportError:
        return None
    return AnswerCache(folder)


def _open_cached(folder: Path, library: bytes) -> "LibraryAnswers | None":
    cache = open_answer_cache(folder)
    if cache is None:
        return None
    from planner.hardware.cudnn.answer_cache import LibraryAnswers

    return LibraryAnswers(cache, library)


def _start(where: str, folder: Path, cublaslt: Path | None, gpu: str) -> tuple[Worker, int]:
    """Start a process that loads a cuDNN library, and return the process and the library's version.

    Raises UsageError if the library cannot be loaded.
    """
    child = str(Path(__file__).with_name("worker.py"))
    stand_in = [] if cublaslt is None else [str(cublaslt), gpu]
    described = json.dumps(describe_for_cudnn((8, 0), 108))
    command = [sys.executable, "-I", "-S", child, str(folder), described, *stand_in]
    worker = Worker(command, stderr=subprocess.DEVNULL)
    try:
        reply = worker.request({})
    except WorkerError as error:
        reply = {"error": f"its process {error}"}
    if "error" in reply:
        raise UsageError(
            f"--cudnn {where}: it does not answer: {reply['error']}; it needs nvidia-cublas and "
            "nvidia-cuda-nvrtc next to it, and newer versions need libcuda.so.1, of the driver or the CUDA "
            "toolkit's stubs"
        )
    return worker, reply["version"]


def describe_for_cudnn(capability: tuple[int, int], multiprocessors: int) -> dict[str, Any]:
    """Return the JSON object that describes a GPU to cuDNN.

    A version of cuDNN that needs more fields names them in its error. On 8.x the answers of cuDNN do not
    depend on the limits. On 9.0 a few of a hundred depend on the clock rates, for which an H100 SXM's are
    given.
    """
    major, minor = capability
    shared_bytes, threads, blocks = SM_LIMITS.get((major, minor), SM_LIMITS[8, 6])
    return {
        "deviceName": f"compute capability {major}.{minor}",
        "cudaDeviceId": 0,
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": 13000,
        "multiProcessorCount": multiprocessors,
        "warpSize": 32,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "maxCtasPerSM": blocks,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": shared_bytes,
        "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
        "oversizedSharedMemoryPerBlock": 0,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": 80 * 2**30,
        "smClockRateKHz": 1_980_000,
        "memClockRateKHz": 2_619_000,
        "memoryBusWidth": 5120,
        "l2CacheSize": 50 * 2**20,
    }
