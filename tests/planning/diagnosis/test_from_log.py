"""Out-of-memory messages as torch and its libraries word them, and the causes that their figures decide."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planner.planning.diagnosis import Cause, Diagnosis, Held, Place, diagnose_log

GIB, MIB = 2**30, 2**20
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already "
    "allocated; {} free; "
    "{} reserved in total by PyTorch)"
)
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of "
    "{} of which {} "
    "is free. {}Including non-PyTorch memory, this process has {} memory in use. Of the allocated "
    "memory {} is "
    "allocated by PyTorch, and {} is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def diagnosis_of(text: str) -> Diagnosis:
    """Return the diagnosis of a log, which must have a message."""
    found = diagnose_log(text.splitlines(keepends=True))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "cause", "mib"),
    [
        (
            NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.50 GiB", "21.90 GiB", "100.00 MiB"),
            Cause.TOO_LARGE,
            (2048, 22425.6, 22525.6, 24258.6),
        ),
        (
            NEW.format("2.00 GiB", "23.69 GiB", "100.00 MiB", "", "23.30 GiB", "19.00 GiB", "3.90 GiB"),
            Cause.FRAGMENTATION,
            (2048, 19456, 23449.6, 24258.6),
        ),
        (
            NEW.format(
                "512.00 MiB",
                "79.15 GiB",
                "9.00 MiB",
                "Process 7 has 40.00 GiB memory in use. ",
                "38.90 GiB",
                "38.00 GiB",
                "200.00 MiB",
            ),
            Cause.OTHER_PROCESS,
            (512, 38912, 39112, 81049.6),
        ),
        # the neighbour has less than what this process reserved and does not use
        (
            NEW.format(
                "2.00 MiB",
                "139.81 GiB",
                "1.88 MiB",
                "Process 7 has 612.00 MiB memory in use. ",
                "139.20 GiB",
                "2.05 GiB",
                "136.64 GiB",
            ),
            Cause.FRAGMENTATION,
            (2, 2099.2, 142018.6, 143165.4),
        ),
        (
            NEW.format("30.00 GiB", "23.69 GiB", "20.00 GiB", "", "3.00 GiB", "2.50 GiB", "10.00 MiB"),
            Cause.ONE_REQUEST,
            (30720, 2560, 2570, 24258.6),
        ),
        (
            NEW.format("12.00 GiB", "23.69 GiB", "10.00 GiB", "", "13.30 GiB", "11.00 GiB", "0 bytes"),
            Cause.ONE_REQUEST,
            (12288, 11264, 11264, 24258.6),
        ),
        (
            OLD.format("20.00 MiB", "7.93 GiB", "7.11 GiB", "10.31 MiB", "7.13 GiB"),
            Cause.TOO_LARGE,
            (20, 7280.6, 7301.1, 8120.3),
        ),
        (
            OLD.format("64.00 MiB", "7.93 GiB", "7.31 GiB", "10.31 MiB", "7.32 GiB"),
            Cause.TOO_LARGE,
            (64, 7485.4, 7495.7, 8120.3),
        ),
        (
            OLD.format("20.00 MiB", "23.69 GiB", "2.10 GiB", "10.31 MiB", "2.20 GiB"),
            Cause.OTHER_PROCESS,
            (20, 2150.4, 2252.8, 24258.6),
        ),
        # a page more was not free, so that the GPU was full: the context or another process has most of it
        (
            "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 1.96 GiB total capacity; 135.84 MiB "
            "already allocated; 2.88 MiB free; 168.50 KiB cached)",
            Cause.OTHER_PROCESS,
            (2, 135.8, 136, 2007),
        ),
        (
            NEW.format(
                "2.00 MiB",
                "79.18 GiB",
                "2.50 MiB",
                "Process 7 has 6.40 GiB memory in use. ",
                "72.71 GiB",
                "65.47 GiB",
                "147.00 MiB",
            ),
            Cause.OTHER_PROCESS,
            (2, 67041.3, 67188.3, 81080.3),
        ),
        (
            NEW.format("20.00 MiB", "23.69 GiB", "21.69 MiB", "", "23.60 GiB", "23.30 GiB", "4.00 MiB"),
            Cause.TOO_LARGE,
            (20, 23859.2, 23863.2, 24258.6),
        ),
        # 2.4 % of what is reserved is unused, and 6.5 %
        (
            OLD.format("98.00 MiB", "10.76 GiB", "9.43 GiB", "42.56 MiB", "9.66 GiB"),
            Cause.TOO_LARGE,
            (98, 9656.3, 9891.8, 11018.2),
        ),
        (
            OLD.format("98.00 MiB", "10.76 GiB", "9.03 GiB", "42.56 MiB", "9.66 GiB"),
            Cause.FRAGMENTATION,
            (98, 9246.7, 9891.8, 11018.2),
        ),
        # outside of torch 1,136 and 1,587 MiB: CUDA contexts of such a torch, which loads all kernels
        (
            OLD.format("2.00 MiB", "3.82 GiB", "2.70 GiB", "539.00 KiB", "2.71 GiB"),
            Cause.TOO_LARGE,
            (2, 2764.8, 2775, 3911.7),
        ),
        (
            OLD.format("256.00 MiB", "79.20 GiB", "77.60 GiB", "0 bytes", "77.65 GiB"),
            Cause.TOO_LARGE,
            (256, 79462.4, 79513.6, 81100.8),
        ),
        # 1 GiB outside of torch, within the figures' rounding
        (
            NEW.format("8.00 MiB", "23.69 GiB", "1.00 MiB", "", "22.68 GiB", "22.00 GiB", "1.00 MiB"),
            Cause.TOO_LARGE,
            (8, 22528, 22529, 24258.6),
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 823.50 MiB (GPU 0; 15.90 GiB total "
            "capacity; "
            "14.83 GiB already allocated; 15.88 MiB free; 312.31 MiB cached)",
            Cause.TOO_LARGE,
            (823.5, 15185.9, 15498.2, 16281.6),
        ),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.00 GiB. GPU 0 has a "
            "total capacity of "
            "15.98 GiB of which 1.20 GiB is free. Of the allocated memory 13.00 GiB is allocated by "
            "PyTorch, and "
            "900.00 MiB is reserved by PyTorch but unallocated.",
            Cause.TOO_LARGE,
            (4096, 13312, 14212, 16363.5),
        ),
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 17.62 GB, other allocations: "
            "384.00 KB, max "
            "allowed: 18.13 GB). Tried to allocate 768.00 MB on private pool.",
            Cause.TOO_LARGE,
            (768, 18042.9, 18042.9, 18565.1),
        ),
    ],
)
def test_the_figures_of_a_message_decide(message: str, cause: Cause, mib: tuple[float, ...]) -> None:
    """Sizes are those of the message, in the units that it has; reserved counts unallocated memory."""
    found = diagnosis_of(message)
    sizes = found.requested_bytes, found.allocated_bytes, found.reserved_bytes, found.total_bytes
    assert (found.cause, tuple(round((size or 0) / MIB, 1) for size in sizes)) == (cause, mib)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: out of memory",
        "torch.distributed.DistBackendError: NCCL error: Cuda failure 2 'out of memory'",
        "Error out of memory at line 380 in file /src/bitsandbytes/csrc/pythonInterface.c",
        "[rank3]: Failed to CUDA calloc async 24 bytes",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        "RuntimeError: CUDA out of memory",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory.",
        "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "torch.OutOfMemoryError: Allocation on device",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
        "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "hipErrorOutOfMemory: out of memory",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "[TRT] [E] 1: [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "ERROR - HIP out of memory. Skipping batch",
    ],
)
def test_a_status_alone_decides_nothing(line: str) -> None:
    """Without sizes the cause is unknown, and the reason says so."""
    found = diagnosis_of(line)
    assert (found.cause, found.requested_bytes) == (Cause.UNKNOWN, None)
    words = re.match(r"(.+) names no sizes", found.reason)
    assert words is not None and re.search(rf"(?<!\w){re.escape(words[1])}", line) and words[1][-1] != "."


@pytest.mark.parametrize(
    ("line", "words", "requested_bytes"),
    [
        ("[enforce fail] DefaultCPUAllocator: you tried to allocate 4096 bytes.", "fewer workers", 4096),
        (
            "_ArrayMemoryError: Unable to allocate 1.5 GiB for an array with shape",
            "host ran out",
            3 * GIB // 2,
        ),
        ("DataLoader worker (pid 28917) is killed by signal: Killed.", "fewer workers", None),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch.",
            "more memory of the host",
            None,
        ),
        (
            "Unexpected bus error. This might be caused by insufficient shared memory (shm).",
            "--shm-size",
            None,
        ),
        ("      Reason:       OOMKilled", "more memory of the host", None),
        ("Task was killed due to the node running low on memory.", "more memory of the host", None),
        ("Memory cgroup out of memory: Killed process 71 (python)", "more memory of the host", None),
        ("slurmstepd: error: Exceeded job memory limit", "more memory of the host", None),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "more memory of the host", None),
        ("=>> PBS: job killed: mem 133kb exceeded limit 131kb", "more memory of the host", None),
        ("OutOfMemoryError: Container killed due to memory usage", "more memory of the host", None),
        ("$ Torch: not enough memory: you tried to allocate 16GB. Buy new RAM!", "less at once", 16 * GIB),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/a'", "--shm-size", None),
        ("MemoryError", "fewer workers", None),
        ("OSError: [Errno 12] Cannot allocate memory", "fewer workers", None),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "fewer workers", None),
        ("RuntimeError: unable to mmap 4096 bytes from file </a>: Cannot allocate memory (12)", "less", 4096),
        ("OSError: [WinError 1455] The paging file is too small", "fewer workers", None),
        ("unable to write to file </torch_9_8_0>: No space left on device (28)", "--shm-size", None),
        ("RuntimeError: DataLoader worker (pid(s) 7, 9) exited unexpectedly", "num_workers=0", None),
    ],
)
def test_memory_of_the_host_is_told_apart(line: str, words: str, requested_bytes: int | None) -> None:
    """A process that ended for want of host memory says nothing of a GPU; the reason names the remedy."""
    found = diagnosis_of(line)
    assert (found.cause, found.is_of_host) == (Cause.UNKNOWN, True)
    assert (found.requested_bytes, words in found.reason) == (requested_bytes, True)


@pytest.mark.parametrize(
    "line",
    [
        "  traceback : Signal 9 (SIGKILL) received by PID 3021",
        "./run.sh: line 3: 12345 Killed                  python train.py",
        "Killed",
        "Epoch 3:  45%|####5     | 45/100 [00:10<00:12,  4.4it/s]Killed",
        "srun: error: n01: task 0: Killed",
        "    Exit Code:    137",
        "command terminated with exit code 137",
        "Process exited with code 137",
        "The replica master 0 exited with a non-zero status of 137.",
        "[launch.py:347:sigkill_handler] exits with return code = -9",
        "['python', 'a.py']' died with <Signals.SIGKILL: 9>.",
    ],
)
def test_a_killed_process_does_not_say_why(line: str) -> None:
    """Signal 9 comes for want of host memory, and for other reasons: neither is claimed."""
    found = diagnosis_of(line)
    assert (found.cause, found.is_of_host) == (Cause.UNKNOWN, False)
    assert "killed from outside" in found.reason and "for other reasons" in found.reason


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("OSError: [Errno 28] No space left on device: '/scratch/a.pt'", "full disk"),
        ('SafetensorError: IoError(Os { code: 28, kind: StorageFull, message: "No space" })', "full disk"),
        ("[enforce fail at inline_container.cc:603] . unexpected pos 6912 vs 6802", "full disk"),
        (
            "unable to open shared memory object </torch_9_8> in read-write mode: Too many open files (24)",
            "ulimit",
        ),
        (
            "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please "
            "increase the limit using `ulimit -n` in the shell",
            "ulimit",
        ),
        ("RuntimeError: received 0 items of ancdata", "set_sharing_strategy"),
    ],
)
def test_what_is_not_memory_is_said(line: str, words: str) -> None:
    """A process also ends if the disk is full or too many files are open, in an evaluation too."""
    found = diagnosis_of(TRACEBACK.format(call="evaluate()", function="evaluate") + line)
    assert (found.cause, found.is_of_host, words in found.reason) == (Cause.NO_FAILURE, False, True)


@pytest.mark.parametrize(
    ("line", "is_request"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("_ArrayMemoryError: Unable to allocate 1.5 GiB for an array with shape", True),
        ("RuntimeError: DataLoader worker (pid 513) is killed by signal: Bus error.", False),
        ("RuntimeError: DataLoader worker (pid 513) is killed by signal: Killed.", False),
        ("RuntimeError: DataLoader worker (pid(s) 7, 9) exited unexpectedly", False),
        ("  traceback : Signal 9 (SIGKILL) received by PID 4851", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("RuntimeError: received 0 items of ancdata", False),
        ("RuntimeError: No executable batch size found, reached zero.", False),
    ],
)
def test_code_that_asked_for_memory_is_named_only_if_some_did(line: str, is_request: bool) -> None:
    """The traceback of a launcher, a handler of signals or a writer of files is of no request."""
    found = diagnosis_of(TRACEBACK.format(call="fit()", function="fit") + line)
    assert bool(found.site.line) is is_request


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 256x10)",
        "RuntimeError: The size of tensor a (7) must match the size of tensor b (9) at dimension 1",
        "RuntimeError: shape '[8, -1, 3]' is invalid for input of size 100",
        "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 9, 9] to have 3",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
    ],
)
@pytest.mark.parametrize("after", ["", "\nexitcode  : -9 (pid: 7)\n"])
def test_an_error_of_the_code_is_told_apart_from_want_of_memory(line: str, after: str) -> None:
    """The reason has it, also if the launcher then kills the other ranks; a message of memory counts more."""
    found = diagnosis_of(line + after)
    assert (found.cause, found.is_of_host) == (Cause.NO_FAILURE, False)
    head, _, error = found.reason.partition(": ")
    assert head == "the job ended by an error of its code, and not for want of memory"
    assert error in line and len(error) > 25
    assert diagnosis_of(f"{MESSAGE}\n\n{line}\n").cause is Cause.TOO_LARGE


def test_a_limit_of_time_is_no_failed_request() -> None:
    """Slurm then kills the tasks."""
    found = diagnosis_of(
        "slurmstepd: error: *** JOB 7 ON n01 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
        "srun: error: n01: task 0: Killed\n"
    )
    assert (found.cause, "limit of time" in found.reason) == (Cause.NO_FAILURE, True)


@pytest.mark.parametrize(
    "line",
    [
        "OutOfMemoryError: Out of memory allocating 80,000,000 bytes (allocated so far: 512 bytes).",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.",
        "MemoryError: std::bad_alloc: out_of_memory: CUDA error (failed to allocate 8 bytes) at: rmm/mr.hpp",
        "JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device",
        "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824",
        "ggml_backend_cuda: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        "Out of memory error on GPU 0. Cannot allocate 1.500000GB memory on GPU 0",
        "OOM when allocating tensor with shape[64,256] and type float on /job:localhost/device:GPU:0",
    ],
)
def test_figures_of_other_allocators_are_not_read(line: str) -> None:
    """CuPy, RMM, JAX and TensorFlow have allocators of their own, of a GPU's memory."""
    found = diagnosis_of(line)
    assert (found.cause, found.is_of_host, "no figures are read" in found.reason) == (
        Cause.UNKNOWN,
        False,
        True,
    )


def test_a_warning_of_torch_is_no_failure_yet() -> None:
    """torch 2.13 warns whenever CUDA refuses, also before it releases cached memory and asks again."""
    warning = (
        "[W1130 01:46:23.07 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 "
        "while trying to allocate 20971520 bytes (free: 2915041, total: 1047296737).\n"
    )
    found = diagnosis_of(warning)
    assert (found.cause, found.requested_bytes) == (Cause.UNKNOWN, 20 * MIB)
    assert "whether the request failed is in the error" in found.reason
    assert diagnosis_of(2 * warning + MESSAGE).notes == diagnosis_of(MESSAGE).notes


@pytest.mark.parametrize(
    "line",
    [
        '[INFO] To avoid "CUDA out of memory" use a smaller --batch-size',
        "if you see CUDA out of memory errors, lower the batch",
        "CUDA out of memory errors are retried",
    ],
)
def test_advice_on_a_message_is_none(line: str) -> None:
    """The words alone are no error."""
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: bad shape'
    assert diagnose_log(f"{line}\nepoch 1 done\n{error}\n".splitlines()) is None


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        "RuntimeError: GET was unable to find an engine to execute this computation",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ],
)
def test_a_library_that_hides_the_cause_is_no_verdict(line: str) -> None:
    """cuDNN words a missing workspace like an unsupported convolution; a batch of one tells them apart."""
    found = diagnosis_of(line)
    assert (found.cause, found.is_of_host, "batch of one" in found.reason) == (Cause.UNKNOWN, False, True)


def test_a_request_smaller_than_what_was_free_has_another_cause() -> None:
    """With 1,331 MiB free, a request of 734 MiB fails for a limit, or for a reason that is not known."""
    text = OLD.format("734.00 MiB", "10.00 GiB", "5.20 GiB", "1.30 GiB", "6.12 GiB")
    found = diagnosis_of(text)
    assert (found.cause, "1,331.2 MiB were free" in found.reason) == (Cause.UNKNOWN, True)
    limited = diagnosis_of(text.replace("1.30 GiB free;", "1.30 GiB free; 6.50 GiB allowed;"))
    assert (limited.cause, "may take 6,656.0 MiB" in limited.reason) == (Cause.TOO_LARGE, True)


@pytest.mark.parametrize(
    ("asked", "free", "cause"),
    [
        ("2.00 MiB", "2.19 MiB", Cause.TOO_LARGE),
        ("2.00 MiB", "4.00 MiB", Cause.UNKNOWN),
        ("20.00 MiB", "21.69 MiB", Cause.TOO_LARGE),
        ("20.00 MiB", "24.69 MiB", Cause.UNKNOWN),
        ("823.50 MiB", "825.00 MiB", Cause.TOO_LARGE),
        ("823.50 MiB", "826.00 MiB", Cause.UNKNOWN),
    ],
)
def test_a_gpu_is_full_if_it_has_less_than_a_page_more_than_was_asked_for(
    asked: str, free: str, cause: Cause
) -> None:
    """CUDA gives whole pages of 2 MiB; what is free may be parts of them."""
    found = diagnosis_of(OLD.format(asked, "10.00 GiB", "9.50 GiB", free, "9.50 GiB"))
    is_noted = found.notes[0].startswith("the GPU was full, although")
    assert (found.cause, is_noted) == (cause, cause is Cause.TOO_LARGE)


def test_a_full_gpu_without_further_figures_is_said_to_be_full() -> None:
    """A message that was cut off after the free bytes does not say who had the memory."""
    found = diagnosis_of(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB.\n"
        "GPU 1 has a total capacity of 79.15 GiB of which 2.19 MiB is free."
    )
    assert (found.cause, found.reason.startswith("the GPU was full")) == (Cause.UNKNOWN, True)


def test_an_mps_message_has_neither_other_processes_nor_cuda_s_settings() -> None:
    """Allocations of Metal belong to this process, and PYTORCH_ALLOC_CONF does not set its allocator."""
    found = diagnosis_of(
        "MPS backend out of memory (MPS allocated: 17.50 GB, other allocations: 2.00 GB, max allowed: "
        "20.00 GB). Tried to allocate 1.00 GB on private pool."
    )
    live = [(held.what.split(" of PyTorch")[0], held.size_bytes) for held in found.live]
    assert live == [("tensors and workspaces", 35 * GIB // 2), ("allocations of Metal outside", 2 * GIB)]
    assert found.would_help == ()


def test_what_is_missing_is_what_was_free_less_than_asked_for() -> None:
    """Apple's message tells what was free by its limit; Intel's does not tell it, and nothing is claimed."""
    mps = (
        "MPS backend out of memory (MPS allocated: 17.50 GB, other allocations: 2.00 GB, max allowed: "
        "20.00 GB). Tried to allocate 1.00 GB on private pool."
    )
    assert "512.0 MiB were missing" in diagnosis_of(mps).reason
    xpu = diagnosis_of(
        "XPU out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 15.91 GiB. Of the "
        "allocated memory 14.10 GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert (xpu.cause, xpu.would_help) == (Cause.TOO_LARGE, ())
    assert "does not say how much of the GPU was free" in xpu.reason and "missing" not in xpu.reason


@pytest.mark.parametrize(
    ("line", "cause", "words"),
    [
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
            "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
            Cause.KERNEL,
            "a smaller batch does not help",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine.",
            Cause.TOO_LARGE,
            "planner serve",
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
            Cause.TOO_LARGE,
            "max_num_seqs",
        ),
        ("RuntimeError: No executable batch size found, reached zero.", Cause.TOO_LARGE, "no batch fit"),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154',
            Cause.UNKNOWN,
            "the sizes are lost",
        ),
        (
            "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that "
            "can be stored in KV cache (57824).",
            Cause.TOO_LARGE,
            "max_model_len",
        ),
    ],
)
def test_libraries_say_what_was_too_small(line: str, cause: Cause, words: str) -> None:
    """Triton means a multiprocessor's shared memory, vLLM what is left for its cache."""
    found = diagnosis_of(line)
    assert (found.cause, found.is_of_host, words in found.reason) == (cause, False, True)


def test_a_thread_that_pins_batches_may_lack_memory_of_the_host() -> None:
    """CUDA's status is the same, whether the host or the GPU has no memory for it."""
    text = (
        "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/opt/torch/utils/data/_utils/pin_memory.py", line 34, in do_one_step\n'
        "    data = pin_memory(data, device)\n"
        "RuntimeError: CUDA error: out of memory\n"
    )
    found = diagnosis_of(text)
    assert (found.cause, "pin_memory=False" in found.reason) == (Cause.UNKNOWN, True)


@pytest.mark.parametrize("after", ["Killed", "    Exit Code:    137", "exitcode  : -9 (pid: 7)"])
def test_a_process_that_was_killed_is_the_answer_only_without_another(after: str) -> None:
    """A launcher kills the other ranks once one has failed."""
    found = diagnosis_of(f"RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED\n{after}\n")
    assert (found.is_of_host, "names no sizes" in found.reason) == (False, True)
    host = diagnosis_of(f"      Reason:       OOMKilled\n{after}\n")
    assert "more memory of the host" in host.reason


def test_a_container_lists_its_own_process() -> None:
    """If the message names no process as its own, one of those listed is this one."""
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of "
        "which 1.00 GiB is "
        "free. Process 4242 has 22.69 GiB memory in use. Of the allocated memory 22.10 GiB is "
        "allocated by PyTorch, "
        "and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    found = diagnosis_of(text)
    assert found.cause is Cause.TOO_LARGE
    assert [(held.what.split(":")[0], round(held.size_bytes / GIB, 2)) for held in found.live] == [
        ("tensors and workspaces of PyTorch", 22.1),
        ("reserved by PyTorch and unused", 0.1),
        ("this process outside of PyTorch", 0.49),
    ]


TRACEBACK = """\
Epoch 3:  12%|#2        | 120/1000 [00:40<04:50]\r\x1b[31mTraceback (most recent call last):\x1b[0m
  File "/home/u/train.py", line 60, in main
    {call}
  File "/home/u/train.py", line 33, in {function}
    out = model(x)
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/conv.py", line 420, in _conv_forward
    return F.conv2d(input, weight, self.bias, self.stride,
"""


NOTEBOOK = """\
OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 12
     11     x, y = x.to(device), y.to(device)
---> 12     {call}
     13     loss = criterion(out, y)

File ~/nets/unet.py:33, in UNet.{function}(self, x)
     32 b = self.mid(a)
---> 33 return self.up(torch.cat([a, b], 1))

File /opt/lib/python3.10/site-packages/torch/nn/modules/conv.py:456, in Conv2d._conv_forward(self, input)
--> 456 return F.conv2d(input, weight, bias, self.stride,
    457                 self.padding, self.dilation, self.groups)

"""
COLAB = """\
OutOfMemoryError                          Traceback (most recent call last)
{cell} in <cell line: 0>()
      3 for i in range(10):
----> 4     trainer.{function}()

/usr/local/lib/python3.12/dist-packages/torch/_tensor.py in backward(self, gradient, retain_graph)
    647         torch.autograd.backward(
--> 648             self, gradient, retain_graph, create_graph, inputs=inputs

"""


@pytest.mark.parametrize(
    ("head", "site"),
    [
        (
            NOTEBOOK.format(call="out = model(x)", function="forward"),
            Place("~/nets/unet.py:33, in forward", "F.conv2d"),
        ),
        (
            "Input In [5], in <cell line: 3>()\n      2 x = x.cuda()\n----> 3 y = net(x)\n\n",
            Place("Input In [5]:3, in <cell line: 3>", "net"),
        ),
        (
            COLAB.format(cell="<ipython-input-15-3435b262f1ae>", function="train"),
            Place("<ipython-input-15-3435b262f1ae>:4, in <cell line: 0>", "backward"),
        ),
        (
            COLAB.format(cell="/tmp/ipython-input-1-2345.py", function="train"),
            Place("/tmp/ipython-input-1-2345.py:4, in <cell line: 0>", "backward"),
        ),
    ],
)
def test_a_traceback_of_a_notebook_names_the_cell_and_the_operator(head: str, site: Place) -> None:
    """IPython marks the line that failed by an arrow, and wrote frames in three ways over the years."""
    message = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "22.0 GiB", "0 bytes")
    found = diagnosis_of(head + message)
    assert (found.cause, found.site) == (Cause.TOO_LARGE, site)


def test_an_evaluation_of_a_notebook_is_the_cause() -> None:
    """Names of functions count as in a traceback of Python."""
    head = NOTEBOOK.format(call="scores = validate(model)", function="validation_step")
    message = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "22.0 GiB", "0 bytes")
    assert diagnosis_of(head + message).cause is Cause.EVALUATION


def test_a_traceback_of_rich_names_the_line_and_the_operator(tmp_path: Path) -> None:
    """Command lines and Lightning print it in a box."""
    file = tmp_path / "train.py"
    file.write_text("def fit(why):\n    return step(why)\n\n\ndef step(why):\n    raise MemoryError(why)\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    printed = StringIO()
    try:
        namespace["fit"]("CUDA out of memory. Tried to allocate 20.00 MiB")
    except MemoryError:
        Console(file=printed, width=200).print_exception()
    found = diagnosis_of(printed.getvalue())
    assert (found.site, found.requested_bytes) == (Place(f"{file}:6, in step", "MemoryError"), 20 * MIB)


def test_a_traceback_names_the_line_and_the_operator() -> None:
    """The line is the user's innermost, the operator the call of the innermost line."""
    head = TRACEBACK.format(call="fit(model)", function="fit")
    found = diagnosis_of(
        head + NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "22.0 GiB", "0 bytes")
    )
    assert (found.cause, found.site) == (Cause.TOO_LARGE, Place("/home/u/train.py:33, in fit", "F.conv2d"))


@pytest.mark.parametrize(
    "function", ["validate", "validation_step", "evaluate", "run_evaluation", "generate"]
)
def test_a_function_that_evaluates_is_the_cause(function: str) -> None:
    """A request of an evaluation fails because of it, if memory was not merely in pieces."""
    head = TRACEBACK.format(call=f"{function}(model)", function=function)
    message = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "22.0 GiB", "0 bytes")
    assert diagnosis_of(head + message).cause is Cause.EVALUATION


LIBRARY = "/x/site-packages/"


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([("main.py", "main", "test(model)"), ("main.py", "test", "model(x)")], Cause.EVALUATION),
        (
            [("main.py", "main", "fit()"), (LIBRARY + "lightning/s.py", "validation_step", "x")],
            Cause.EVALUATION,
        ),
        # within a model's forward pass
        (
            [
                (LIBRARY + "sam/decoder.py", "forward", "x"),
                (LIBRARY + "sam/decoder.py", "predict_masks", "y"),
            ],
            Cause.TOO_LARGE,
        ),
        (
            [(LIBRARY + "yolo/tasks.py", "forward", "x"), (LIBRARY + "yolo/tasks.py", "predict", "y")],
            Cause.TOO_LARGE,
        ),
        # checks of arguments
        ([(LIBRARY + "torch/distributions/d.py", "_validate_sample", "x")], Cause.TOO_LARGE),
        # an evaluation within training, and training within an evaluation
        ([("main.py", "train", "test()"), ("main.py", "validate", "model(x)")], Cause.EVALUATION),
        ([(LIBRARY + "ax/loop.py", "evaluate_arm", "f(p)"), ("main.py", "train_arm", "y")], Cause.TOO_LARGE),
        # training
        ([("main.py", "train", "fake()"), ("main.py", "generate", "net(z)")], Cause.TOO_LARGE),
        ([("main.py", "train", "x"), (LIBRARY + "sb3/p.py", "evaluate_actions", "y")], Cause.TOO_LARGE),
        ([(LIBRARY + "torch/optim/lbfgs.py", "_directional_evaluate", "closure()")], Cause.TOO_LARGE),
        ([(LIBRARY + "hf/trainer.py", "_maybe_log_save_evaluate", "save()")], Cause.TOO_LARGE),
        (
            [
                (LIBRARY + "hf/trainer.py", "_maybe_log_save_evaluate", "evaluate()"),
                (LIBRARY + "hf/trainer.py", "evaluate", "y"),
            ],
            Cause.EVALUATION,
        ),
        ([("main.py", "train_and_evaluate", "train()"), ("main.py", "train_epoch", "x")], Cause.TOO_LARGE),
        (
            [
                ("main.py", "evaluate_loss", "loss.backward()"),
                (LIBRARY + "torch/_tensor.py", "backward", "x"),
            ],
            Cause.TOO_LARGE,
        ),
    ],
)
def test_functions_that_train_or_are_of_a_model_evaluate_nothing(
    frames: list[tuple[str, str, str]], cause: Cause
) -> None:
    """A name such as `predict` says that a loop evaluates only outside of a model's forward pass."""
    lines = [f'  File "{file}", line 7, in {function}\n    {code}\n' for file, function, code in frames]
    assert diagnosis_of("".join(["Traceback (most recent call last):\n", *lines, MESSAGE])).cause is cause


@pytest.mark.parametrize(
    ("file", "function", "words"),
    [
        ("torch/serialization.py", "_cuda_deserialize", 'map_location="cpu"'),
        ("torch/serialization.py", "_deserialize", 'map_location="cpu"'),
        (r"torch\serialization.py", "_deserialize", 'map_location="cpu"'),
        ("torch/optim/optimizer.py", "_process_value_according_to_param_policy", "optimizer with less state"),
        ("torch/_tensor.py", "__deepcopy__", "on the CPU"),
        ("torch/nn/parallel/distributed.py", "_ddp_init_helper", "gradient_as_bucket_view=True"),
        ("torch/nn/parallel/distributed.py", "_pre_forward", "gradient_as_bucket_view=True"),
        ("torch/optim/adam.py", "_multi_tensor_adam", "foreach=False"),
        ("torch/distributed/fsdp/_state_dict_utils.py", "_full_pre_state_dict_hook", "offload_to_cpu=True"),
        ("torch/distributed/_state_dict_utils.py", "_gather_state_dict", "cpu_offload=True"),
        ("torch/nn/modules/module.py", "convert", "in bfloat16 or quantized"),
        ("torch/nn/modules/module.py", "cuda", "in bfloat16 or quantized"),
        ("transformers/modeling_utils.py", "caching_allocator_warmup", "in bfloat16 or quantized"),
        ("transformers/models/llama/modeling_llama.py", "eager_attention_forward", '"sdpa"'),
        ("diffusers/models/autoencoders/autoencoder_kl.py", "decode", "enable_tiling()"),
        ("torch/nn/functional.py", "cross_entropy", "by a fused kernel"),
        ("transformers/trainer_pt_utils.py", "nested_concat", "eval_accumulation_steps=1"),
        ("transformers/cache_utils.py", "update", 'cache_implementation="offloaded"'),
        ("accelerate/utils/operations.py", "_convert_to_fp32", "without logits"),
    ],
)
def test_what_a_library_takes_on_the_gpu_is_advised_against(file: str, function: str, words: str) -> None:
    """Loading, copying, gathering and buckets take memory that a step may not need."""
    head = 'Traceback (most recent call last):\n  File "a.py", line 7, in main\n    f(x)\n'
    found = diagnosis_of(f'{head}  File "{LIBRARY}{file}", line 9, in {function}\n    g(x)\n{MESSAGE}\n')
    assert (found.cause, words in found.notes[0]) == (Cause.TOO_LARGE, True)


def test_the_copy_that_an_old_optimizer_makes_of_a_state_is_spared_by_loading_to_the_cpu() -> None:
    """Before torch 2.1 load_state_dict called copy.deepcopy; another function of that name does not count."""
    frame = f'  File "{LIBRARY}{{}}", line 9, in {{}}\n    g(x)\n'
    copies = frame.format("torch/_tensor.py", "__deepcopy__")
    head = 'Traceback (most recent call last):\n  File "a.py", line 7, in main\n    f(x)\n'
    for file, advice in (("torch/optim/optimizer.py", "before torch 2.1"), ("x/model.py", "copy.deepcopy")):
        found = diagnosis_of(f"{head}{frame.format(file, 'load_state_dict')}{copies}{MESSAGE}\n")
        assert advice in found.notes[0]
    other = diagnosis_of(f"{head}{frame.format('msgs/wire.py', '_deserialize')}{MESSAGE}\n")
    assert not any("torch.load" in note for note in other.notes)


def test_an_evaluation_is_noted_beside_another_cause() -> None:
    """Memory in pieces is the cause, and the evaluation that met it is a note."""
    head = TRACEBACK.format(call="validate(model)", function="validate")
    message = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "19.0 GiB", "3.00 GiB")
    found = diagnosis_of(head + message)
    assert found.cause is Cause.FRAGMENTATION
    assert found.notes[0].startswith("it happened in validate, an evaluation")


def test_few_pieces_are_noted_beside_what_the_code_did() -> None:
    """Less than 5 % of what was reserved is unused: the evaluation needs more, whatever is in pieces."""
    head = TRACEBACK.format(call="validate(model)", function="validate")
    message = NEW.format("172.00 MiB", "23.69 GiB", "8.00 MiB", "", "22.7 GiB", "22.2 GiB", "433.00 MiB")
    found = diagnosis_of(head + message)
    assert (found.cause, found.notes[0].startswith("433.0 MiB were reserved")) == (Cause.EVALUATION, True)


def test_another_process_is_noted_beside_larger_pieces() -> None:
    """The larger of two amounts that would have been enough is the cause, the other one a note."""
    neighbour = "Process 7 has {} memory in use. "
    message = NEW.format("2.00 MiB", "23.69 GiB", "1.00 MiB", neighbour, "18.0 GiB", "15.0 GiB", "3.00 GiB")
    small, large = diagnosis_of(message.format("1.00 GiB")), diagnosis_of(message.format("5.60 GiB"))
    assert (small.cause, large.cause) == (Cause.FRAGMENTATION, Cause.OTHER_PROCESS)
    assert small.notes[0].startswith("other processes hold 1,024.0 MiB of the GPU")


def test_state_of_the_optimizer_is_the_first_step() -> None:
    """Optimizers of torch allocate their state in the first step alone."""
    head = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/u/train.py", line 70, in main\n[rank1]:     optimizer.step()\n'
        '[rank1]:   File "/x/site-packages/torch/optim/adamw.py", line 130, in _init_group\n'
        "[rank1]:     state['exp_avg'] = torch.zeros_like(\n[rank1]: "
    )
    message = NEW.format("96.00 MiB", "23.69 GiB", "10.00 MiB", "", "23.0 GiB", "22.5 GiB", "0 bytes")
    found = diagnosis_of(head + message)
    assert (found.cause, found.site) == (
        Cause.FIRST_STEP,
        Place("/home/u/train.py:70, in main", "torch.zeros_like"),
    )


def test_the_most_detailed_message_counts() -> None:
    """Several ranks write one log; a status, or a message with fewer figures, does not hide one with more."""
    message = OLD.format("64.00 MiB", "7.93 GiB", "7.31 GiB", "10.31 MiB", "7.32 GiB")
    found = diagnosis_of(f"{message}\n\nRuntimeError: CUDA error: out of memory\n")
    assert (found.cause, found.notes[0]) == (
        Cause.TOO_LARGE,
        "the log has 2 such messages; this is the most detailed, the last if several are",
    )
    again = diagnosis_of(f"{message}\n\nTrainerError: CUDA out of memory. Tried to allocate 64.00 MiB\n")
    assert again.allocated_bytes == found.allocated_bytes


def test_the_last_of_two_failures_counts() -> None:
    """Figures that only one of them has, such as those of CUDA graphs, do not make it the answer."""
    first = NEW.format("1.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "21.9 GiB", "0 bytes").replace(
        "PyTorch, and", "PyTorch, with 300.00 MiB allocated in private pools (e.g., CUDA Graphs), and"
    )
    last = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.5 GiB", "22.0 GiB", "0 bytes")
    assert diagnosis_of(f"{first}\n\n{last}\n").requested_bytes == 2 * GIB


def test_a_later_message_of_the_host_is_noted() -> None:
    """A trainer may go on after an error of the GPU, and be killed for want of host memory in the end."""
    message = OLD.format("64.00 MiB", "7.93 GiB", "7.31 GiB", "10.31 MiB", "7.32 GiB")
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch."
    notes = diagnosis_of(f"{message}\n\nepoch 2\n{killed}\n").notes
    assert any(note.startswith(f"a later message is of the host: {killed}") for note in notes)
    assert not any("of the host" in note for note in diagnosis_of(f"{killed}\n\n{message}\n").notes)


MESSAGE = NEW.format("2.00 GiB", "23.69 GiB", "1.00 GiB", "", "22.50 GiB", "21.90 GiB", "100.00 MiB")


@pytest.mark.parametrize(
    ("message", "end"),
    [
        (MESSAGE, " is allocated by PyTorch"),
        (MESSAGE.replace("Including non-PyTorch memory, this process", "Process 7"), " and 100.0"),
        (OLD.format("1.17 GiB", "23.70 GiB", "20.50 GiB", "5.8 MiB", "22.9 GiB"), "free; 22.9"),
    ],
)
def test_a_message_that_was_cut_off_does_not_say_what_was_reserved(message: str, end: str) -> None:
    """A missing figure is not taken as 0 bytes: it decides neither the cause nor a setting."""
    found = diagnosis_of(message[: message.index(end) + len(end)])
    assert (found.cause, found.reserved_bytes, found.would_help) == (Cause.UNKNOWN, None, ())
    assert "cut off" in found.reason


@pytest.mark.parametrize(
    "holder", ["Process 7 has {} memory in use. ", "this process has {} memory in use. "]
)
def test_a_size_that_the_driver_does_not_know_is_left_out(holder: str) -> None:
    """NVML has no size of a process under Windows and in some containers, and torch prints 2^64 bytes."""
    text = NEW.format("128.00 MiB", "8.00 GiB", "0 bytes", "", "X", "7.10 GiB", "123.00 MiB")
    unknown = holder.format("17179869184.00 GiB")
    found = diagnosis_of(
        text.replace("Including non-PyTorch memory, this process has X memory in use. ", unknown)
    )
    assert (found.cause, "17,179" in f"{found}") == (Cause.TOO_LARGE, False)
    assert sum(held.size_bytes for held in found.live) <= 8 * GIB


@pytest.mark.parametrize("width", [79, 80, 81, 120])
def test_a_terminal_may_cut_a_message_within_words(width: int) -> None:
    """Its lines then have the terminal's width, and their ends are no spaces."""
    lines = [MESSAGE[at : at + width] for at in range(0, len(MESSAGE), width)]
    assert diagnosis_of("\n".join(lines)) == diagnosis_of(MESSAGE)


def test_a_hint_of_torch_continues_its_message() -> None:
    """It names the status of CUDA again, and is no message of its own without a traceback."""
    error = "torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://\n"
    found = diagnosis_of(TRACEBACK.format(call="fit(model)", function="fit") + error)
    assert (found.site.line, found.notes) == ("/home/u/train.py:33, in fit", ())


@pytest.mark.parametrize("end", ["\r\r\n", "\r 10%|#         | 1/10 [00:01<00:09]\r\n", "\n"])
def test_a_message_is_found_whatever_ends_its_line(end: str) -> None:
    """Windows' terminals double carriage returns, and a progress bar may follow on the same line."""
    found = diagnose_log([f" 0%|          | 0/10\r{MESSAGE}{end}"])
    assert found is not None and found.cause is Cause.TOO_LARGE


def test_old_versions_write_the_capacity_without_an_i() -> None:
    """torch 2.1 and 2.2 have "capacty"; without the total no other process would be seen."""
    text = NEW.format("64.00 MiB", "24.00 GiB", "1.00 MiB", "", "9.20 GiB", "9.00 GiB", "10.00 MiB")
    found = diagnosis_of(text.replace("capacity", "capacty"))
    assert (found.cause, found.total_bytes) == (Cause.OTHER_PROCESS, 24 * GIB)


@pytest.mark.parametrize(
    "writer",
    [
        "[rank{}]: ", "[default{}]:", "worker-{}: [rank3]: ", "worker-{}: ", "trainer-{}  | ",
        "{}: ", "[1,{}]<stderr>:", "[pod/train-{}/main] ", "May 01 12:00:00 gpu01 train[424{}]: ",
        "2024-05-01T12:00:00+00:00 gpu01 train[424{}]: ",
        "\x1b[36m(RayTrainWorker pid={}, ip=10.0.0.2)\x1b[0m ", "[36m(RayTrainWorker pid={})[0m ",
    ],
)  # fmt: skip
def test_a_place_is_of_the_process_that_failed(writer: str) -> None:
    """Lines of two processes alternate; one evaluates, the other runs out of memory in the backward pass."""
    zero = [
        "Traceback (most recent call last):", '  File "train.py", line 41, in main', "    loss.backward()",
        MESSAGE,
    ]  # fmt: skip
    one = [
        "Traceback (most recent call last):", '  File "train.py", line 80, in validate', "    model(x)",
        "KeyboardInterrupt",
    ]  # fmt: skip
    pairs = zip(zero, one, strict=True)
    text = "".join(f"{writer.format(0)}{a}\n{writer.format(1)}{b}\n" for a, b in pairs)
    found = diagnosis_of(text)
    assert (found.cause, found.site) == (Cause.TOO_LARGE, Place("train.py:41, in main", "loss.backward"))


@pytest.mark.parametrize("prefix", ["{}: ", "1{}:15:32 ERROR "])
def test_a_number_before_a_line_is_no_rank(prefix: str) -> None:
    """Numbers before lines, as `grep -n` and clocks write them, are of no rank: the process is one."""
    lines = ["Traceback (most recent call last):", '  File "train.py", line 7, in main', "    f(x)", MESSAGE]
    found = diagnosis_of("\n".join(prefix.format(number) + line for number, line in enumerate(lines)))
    assert found.site.line == "train.py:7, in main"


@pytest.mark.parametrize(
    "path", [r"C:\env\Lib\site-packages\torch\nn\linear.py", "/usr/lib/python3.10/contextlib.py"]
)
def test_files_of_libraries_are_not_the_users(path: str) -> None:
    """Neither a package on Windows nor the standard library."""
    head = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    model(x)\n'
    found = diagnosis_of(f'{head}  File "{path}", line 9, in forward\n    pass\n{MESSAGE}\n')
    assert found.site.line == "train.py:7, in main"


def test_a_traceback_within_json_has_lines() -> None:
    """A logger that writes a line of JSON for each record escapes them."""
    text = 'Traceback (most recent call last):\n  File "train.py", line 50, in fit\n    f(x)\n' + MESSAGE
    found = diagnosis_of(json.dumps({"level": "ERROR", "exc": text}))
    assert found.site.line == "train.py:50, in fit"


def test_docker_s_lines_of_json_are_the_lines_of_a_process() -> None:
    """Its driver json-file writes an object for each line, whose quotes and ends are escaped."""
    lines = ["Traceback (most recent call last):", '  File "train.py", line 50, in fit', "    f(x)", MESSAGE]
    objects = ({"log": f"{line}\n", "stream": "stderr"} for line in lines)
    found = diagnosis_of("\n".join(json.dumps(one) for one in objects))
    assert found.site == Place("train.py:50, in fit", "f")


PARENT = 'Traceback (most recent call last):\n  File "sweep.py", line 12, in main\n    f.result()\n'


@pytest.mark.parametrize(
    "again",
    [
        f"The above exception was the direct cause of the following exception:\n\n{PARENT}{MESSAGE}",
        f"2026-01-01 12:00:00 ERROR {MESSAGE}",
    ],
)
def test_a_message_that_is_repeated_has_the_first_place(again: str) -> None:
    """A parent raises a worker's error again, and a logger prints the error without its traceback."""
    found = diagnosis_of(f'{TRACEBACK.format(call="f(x)", function="fit")}{MESSAGE}\n"""\n\n{again}\n')
    assert found.site.line == "/home/u/train.py:33, in fit"


def test_a_traceback_of_pytest() -> None:
    """The function of a line stands in the source above it, or after the line's number."""
    lines = (
        "    def run():", ">       fit(x)", "", "tests/a.py:12: ", "_ _ _ _ _",
        "tests/b.py:30: in fit", "    net(x)", "/opt/site-packages/torch/c.py:9: in f", "    g(x)",
        f"E   {MESSAGE}",
    )  # fmt: skip
    assert diagnosis_of("\n".join(lines)).site == Place("tests/b.py:30, in fit", "g")
    assert diagnosis_of("\n".join((*lines[:5], lines[-1]))).site == Place("tests/a.py:12, in run")


@pytest.mark.parametrize(
    "halves", [("/home/u/long/tra", "in.py:7 in fit"), ("/home/u/long/train.py:7 in", "fit")]
)
def test_a_path_that_rich_folds_is_one(halves: tuple[str, str]) -> None:
    """In a narrow terminal a path goes over two lines of the box."""
    lines = (f"│ {half:<30} │" for half in halves)
    found = diagnosis_of("\n".join(("╭─ Traceback (most recent call last) ─╮", *lines, "╰───╯", MESSAGE)))
    assert found.site.line == "/home/u/long/train.py:7, in fit"


@pytest.mark.parametrize("line", ["oom_killer disabled", "srun --oom-kill-step=0", "OOM-kill-policy=none"])
def test_settings_of_a_scheduler_are_no_message(line: str) -> None:
    """They are in a log's head, of jobs that end well."""
    assert diagnose_log([line]) is None


def test_state_that_an_old_optimizer_makes_in_its_step_is_the_first_step() -> None:
    """Before torch 2.0 the step itself made it; DeepSpeed makes it at once."""
    head = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    optimizer.step()\n'
    adam = '  File "/x/site-packages/torch/optim/adam.py", line 95, in step\n    m = torch.zeros_like(p)\n'
    zero = '  File "/x/site-packages/deepspeed/z.py", line 9, in initialize_optimizer_states\n    a\n'
    causes = [diagnosis_of(f"{head}{frame}{MESSAGE}\n").cause for frame in (adam, zero)]
    assert causes == [Cause.FIRST_STEP] * 2


def test_the_message_of_cudamallocasync_has_figures() -> None:
    """Its pools are the driver's, so that what was reserved is not known."""
    lines = (
        "RuntimeError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "Currently allocated     : 22.47 GiB", "Requested               : 25.00 MiB",
        "Device limit            : 23.99 GiB", "Free (according to CUDA): 12.75 MiB",
    )  # fmt: skip
    found = diagnosis_of("\n".join(lines))
    assert (found.cause, found.requested_bytes, found.reserved_bytes) == (Cause.TOO_LARGE, 25 * MIB, None)
    assert "12.8 MiB were free" in found.reason


@pytest.mark.parametrize(("free", "fits"), [("60.00 MiB", None), ("40.00 MiB", False)])
def test_what_is_left_decides_whether_joining_it_may_help(free: str, fits: bool | None) -> None:
    """With 10 MiB unused, 64 MiB may be found only if at least 54 MiB are free."""
    text = NEW.format("64.00 MiB", "7.93 GiB", free, "", "7400.00 MiB", "7300.00 MiB", "10.00 MiB")
    found = diagnosis_of(text)
    assert (found.cause, [one.fits for one in found.would_help]) == (Cause.TOO_LARGE, [fits])


@pytest.mark.parametrize(
    "point", [(" GiB", "\xa0GiB"), ("2.00", "2,00"), ("Tried to allocate", "Requested size:")]
)
def test_sizes_are_read_as_a_locale_or_a_limit_words_them(point: tuple[str, str]) -> None:
    """A space that does not break, a decimal comma, and a request that torch refuses by a limit."""
    found = diagnosis_of(MESSAGE.replace(*point))
    assert (found.cause, found.requested_bytes) == (Cause.TOO_LARGE, 2 * GIB)


def test_another_backend_has_neither_settings_nor_a_history_of_cuda() -> None:
    """Ascend's message has the wording of torch for CUDA before 2.1."""
    text = OLD.format("2.00 GiB", "60.97 GiB", "55.00 GiB", "10.00 MiB", "59.50 GiB").replace("CUDA", "NPU")
    found = diagnosis_of(text)
    assert (found.cause, found.would_help) == (Cause.FRAGMENTATION, ())
    assert found.notes[-1].endswith("whether memory grew is not known")


def test_a_limit_of_the_process_bounds_what_is_left() -> None:
    """Joining unused blocks does not help if the limit, not the GPU, refuses the request."""
    text = NEW.format("2.00 GiB", "22.03 GiB", "11.79 GiB", "", "10.24 GiB", "10.00 GiB", "0 bytes")
    found = diagnosis_of(text.replace("in use. Of", "in use. 11.02 GiB allowed; Of"))
    assert (found.cause, [one.fits for one in found.would_help]) == (Cause.TOO_LARGE, [False])
    assert [one.reason for one in found.would_help] == ["only 1,044.5 MiB were left in all"]


@pytest.mark.parametrize("figures", [OLD.format("1.00 GiB", "39.59 GiB", "37.0", "", ""), MESSAGE])
def test_two_messages_on_one_line_are_two(figures: str) -> None:
    """Ranks write to one file: figures of one are not mixed with figures of the other."""
    begun, after = figures[: figures.index(" total cap")], "RuntimeError: CUDA out of memory. Tried to "
    whole = MESSAGE[MESSAGE.index("allocate") :].replace("2.00 GiB", "20.00 MiB")
    found = diagnosis_of(f"{TRACEBACK.format(call='f(x)', function='fit')}{begun}{after}{whole}\n")
    assert (found.requested_bytes, found.total_bytes) == (20 * MIB, round(23.69 * GIB))
    assert found.site.line == "/home/u/train.py:33, in fit"


HIP = NEW.replace("CUDA", "HIP").replace("PYTORCH_ALLOC", "PYTORCH_HIP_ALLOC")
WINDOWS = 'Traceback (most recent call last):\n  File "C:\\u\\a.py", line 7, in main\n    f(x)\n'
HINT = " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


@pytest.mark.parametrize(
    ("head", "form", "variable", "settings"),
    [
        ("", NEW, "PYTORCH_ALLOC_CONF", {"expandable_segments:True": (None, "a recorded history")}),
        ("", HIP, "PYTORCH_HIP_ALLOC_CONF", {"expandable_segments:True": (None, "ROCm 7")}),
        (WINDOWS, NEW, "PYTORCH_ALLOC_CONF", {"expandable_segments:True": (False, "on Windows")}),
        (
            "",
            OLD + HINT,
            "PYTORCH_CUDA_ALLOC_CONF",
            {"expandable_segments:True": (False, "since 2.1"), "max_split_size_mb:128": (None, "try it")},
        ),
        ("", OLD, "PYTORCH_CUDA_ALLOC_CONF", {"expandable_segments:True": (False, "since 2.1")}),
    ],
)
def test_settings_are_those_of_the_torch_that_wrote_the_message(
    head: str, form: str, variable: str, settings: dict[str, tuple[bool | None, str]]
) -> None:
    """The wording tells the version, the name of the backend and the paths tell the platform."""
    old = "64.00 MiB", "8.00 GiB", "7.00 GiB", "60.00 MiB", "7.50 GiB"
    new = "64.00 MiB", "8.00 GiB", "60.00 MiB", "", "7.90 GiB", "7.00 GiB", "512.00 MiB"
    found = diagnosis_of(head + form.format(*(old if form.startswith(OLD) else new)))
    assert found.alloc_conf == variable
    assert {one.setting: one.fits for one in found.would_help} == {
        name: fits for name, (fits, _) in settings.items()
    }
    assert all(settings[one.setting][1] in one.reason for one in found.would_help)


def test_more_than_the_gpu_has_is_of_the_host() -> None:
    """The driver of Windows lends memory of the host."""
    found = diagnosis_of(
        NEW.format("200.00 MiB", "8.00 GiB", "0 bytes", "", "15.00 GiB", "14.50 GiB", "100.00 MiB")
    )
    assert found.notes[1].startswith(
        "14.50 GiB were allocated on a GPU of 8,192.0 MiB: the driver lent memory"
    )


def test_what_was_in_use_adds_up() -> None:
    """What PyTorch had, and what was neither free nor its own."""
    found = diagnosis_of(OLD.format("64.00 MiB", "8.00 GiB", "7.00 GiB", "0 bytes", "7.50 GiB"))
    assert [(held.what.split(":")[0], held.size_bytes) for held in found.live] == [
        ("tensors and workspaces of PyTorch", 7 * GIB),
        ("reserved by PyTorch and unused", GIB // 2),
        ("neither free nor of PyTorch in this process", GIB // 2),
    ]
    assert isinstance(found.live[0], Held)


@pytest.mark.parametrize("text", ["", "loss 0.3\n", "out of memory\n", 'File "a.py", line 1, in f\n'])
def test_a_log_without_a_message_has_no_diagnosis(text: str) -> None:
    """Nothing is guessed."""
    assert diagnose_log(text.splitlines(keepends=True)) is None


def test_a_limit_of_time_says_less_than_an_error_before_it() -> None:
    """Other ranks wait for the rank that failed until the scheduler ends the job."""
    found = diagnosis_of(
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED\n"
        "slurmstepd: error: *** JOB 7 ON n01 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    )
    assert found.cause is Cause.UNKNOWN and "CUDNN_STATUS_ALLOC_FAILED" in found.reason


def test_messages_of_the_host_do_not_count_as_messages_of_a_gpu() -> None:
    """A note on several messages counts those of the GPU."""
    notes = diagnosis_of(f"{MESSAGE}\n      Reason:       OOMKilled\n").notes
    assert not any("such messages" in note for note in notes)
    assert any("such messages" in note for note in diagnosis_of(f"{MESSAGE}\n\n{MESSAGE}\n").notes)


@pytest.mark.parametrize(
    ("code", "marks", "operator"),
    [
        ("attn = q @ k.transpose(-2, -1)", "       ~~^~~~~~~~~~~~~~~~~~~~~", "@"),
        ("attn = q @ k.transpose(-2, -1)", "           ~~~~~~~~~~~^^^^^^^^", "k.transpose"),  # of Python 3.13
        (
            "if is_on() and self.reducer.rebuild():",
            "               ^^^^^^^^^^^^^^^^^^^^^^",
            "self.reducer.rebuild",
        ),
        ("return x.float().sum(self.dims(1))", "       ^^^^^^^^^^^^^^^^^^^^^^^^^^^", "sum"),
        ("return table[ids.view(-1)]", "       ~~~~~^^^^^^^^^^^^^^", "indexing"),
        ("return x.float().sum()", "", "x.float"),
    ],
)
def test_marks_below_a_line_tell_which_of_its_calls_failed(code: str, marks: str, operator: str) -> None:
    """Python marks the call, or the operator, since 3.11; without marks it is the line's first call."""
    below = f"    {marks}\n" if marks else ""
    head = f'Traceback (most recent call last):\n  File "a.py", line 7, in main\n    {code}\n{below}'
    assert diagnosis_of(f"{head}{MESSAGE}\n").site.operator == operator
