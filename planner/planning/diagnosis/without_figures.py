"""Patterns of log messages that name no memory in use, with the cause and reason of each message."""

import re

from msgspec import Struct

from planner.planning.diagnosis.diagnosis import Cause

NUMBER = r"([\d.,]+ ?(?:bytes|[KMGT]?i?B))"
BEFORE = "(?:rror|RROR|xception|WARNING|FATAL)"  # an error's name, or a level, ends so before a message
BACKENDS = "CUDA|HIP|XPU|NPU|MPS backend"


def either(*forms: str) -> re.Pattern[str]:
    """Join regular expressions to a pattern that matches any one of them. In a form, SIZE matches a size."""
    return re.compile("|".join(form.replace("SIZE", NUMBER) for form in forms))


class WithoutFigures(Struct, frozen=True):
    """A pattern of out-of-memory messages that name no memory in use, with their cause and reason."""

    pattern: re.Pattern[str]
    reason: str  # {what} stands for the words that the pattern found
    is_of_host: bool = True
    cause: Cause = Cause.UNKNOWN
    detail: int = 2  # less if other messages say more
    is_request: bool = True  # whether the code in the traceback asked for memory


WITHOUT_FIGURES = (
    WithoutFigures(
        either(
            "(?:CUDNN|CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # since cuDNN 9
            "(?:CUDA|HIP)(?: driver)? error: out of memory|hipErrorOutOfMemory",
            "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",  # Intel's
            r"Cuda Runtime \(out of memory\)",  # TensorRT
            r"cuda runtime error \(2\) : out of memory",  # torch before 1.0
            r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
            # not torch's "Search for `cudaErrorMemoryAllocation' in ...", which continues a message
            "cudaErrorMemoryAllocation(?!' in )|CUDA_ERROR_OUT_OF_MEMORY",
            r"Failed to CUDA calloc(?: async)? \d+ bytes",  # NCCL
            "Cuda failure.{0,8}out of memory'?",
            r"^Error out of memory at line \d+",  # bitsandbytes
        ),
        "{what} names no sizes, so that the cause is not decided: a library or the driver asked for memory "
        "itself; look for another process on the GPU (nvidia-smi), or try a smaller batch",
        is_of_host=False,
    ),
    WithoutFigures(
        either("CUDA out of memory occurred when warming up (?:sampler|pooler)"),
        "vLLM filled its share of the GPU, and what is left is too little for its sampler: lower "
        "max_num_seqs or gpu_memory_utilization",
        is_of_host=False,
        cause=Cause.TOO_LARGE,
    ),
    WithoutFigures(
        either("rror: No executable batch size found, reached zero"),
        "accelerate lowered the batch size to zero, as no batch fit: lower what each sample and the model "
        "take",
        is_of_host=False,
        cause=Cause.TOO_LARGE,
        is_request=False,
    ),
    WithoutFigures(
        either(r"NVML_SUCCESS == .{1,99} INTERNAL ASSERT FAILED at .{1,99}CUDACachingAllocator"),
        "torch looked for the processes on the GPU, as it does to report that memory ran out, and the driver "
        "did not list them: the sizes are lost; try a smaller batch",
        is_of_host=False,
    ),
    WithoutFigures(
        either(
            rf"{BEFORE}\W{{1,4}}(?:{BACKENDS}) out of memory",
            rf"^(?:{BACKENDS}) out of memory(?:[.!]|$)",
            "rror: Allocation on device(?:.{0,9} would exceed allowed memory)?",  # cudaMallocAsync
        ),
        "{what} names no sizes, so that the cause is not decided: give the log with PyTorch's whole message",
        is_of_host=False,
    ),
    WithoutFigures(
        either(
            r"Out of memory allocating [\d,]+ bytes(?= \(allocated so far)",  # CuPy
            r"bad_alloc: out_of_memory: (?:CUDA error|RMM failure)(?: \(failed to allocate SIZE\))?",
            "RESOURCE_EXHAUSTED: Failed to allocate request for SIZE",  # XLA, as the next
            "RESOURCE_EXHAUSTED: Out of memory|Resource exhausted: OOM|OOM when allocating tensor",
            r"Failed to allocate memory for requested buffer of size \d+",  # ONNX Runtime
            r"allocating SIZE on device \d+: cudaMalloc failed: out of memory",  # llama.cpp
            r"Out of memory error on GPU \d+\. Cannot allocate SIZE memory",  # PaddlePaddle
            r"ran out of memory trying to allocate SIZE",  # BFC of TensorFlow and JAX
        ),
        "{what} is of a library with an allocator of its own, such as CuPy, RMM, JAX or TensorFlow, of which "
        "no figures are read: if PyTorch uses the same GPU, limit what the other takes; see nvidia-smi",
        is_of_host=False,
    ),
    WithoutFigures(
        either(
            "CANCELLED AT .{0,40} DUE TO TIME LIMIT",  # Slurm
            "TERM_RUNLIMIT",  # LSF
            r"PBS: job killed: walltime",
        ),
        "{what}: the scheduler ended the job at its limit of time; ask for more of it, or save checkpoints",
        is_of_host=False,
        cause=Cause.NO_FAILURE,
        detail=1,
        is_request=False,
    ),
    WithoutFigures(
        either(
            r"\[Errno 28\] No space left on device(?!: '/dev/shm)",
            "code: 28, kind: StorageFull",  # safetensors
            r"inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+",  # torch.save
        ),
        "a file could not be written, as a full disk or quota causes it, and not memory: free space there, "
        "or keep fewer checkpoints",
        is_of_host=False,
        cause=Cause.NO_FAILURE,
        detail=1,
        is_request=False,
    ),
    WithoutFigures(
        either(
            r"Too many open files \(24\)|\[Errno 24\] Too many open files",
            r"Too many open files\. Communication with the workers is no longer possible",  # of loaders
            r"rror: received \d+ items of ancdata",  # of multiprocessing, which lacks a file's descriptor
        ),
        "the process has as many files open as it may, and memory did not run out: raise ulimit -n, or, as "
        "loaders' workers share each tensor by a file, call "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        is_of_host=False,
        cause=Cause.NO_FAILURE,
        detail=1,
        is_request=False,
    ),
    WithoutFigures(
        either(
            "(?:CUDA|HIP)(?: driver)? error: (?:an illegal memory access was encountered|device-side assert "
            "triggered|misaligned address|an illegal instruction was encountered"
            "|no kernel image is available for execution on the device)",
            r"rror: mat1 and mat2 (?:shapes cannot be multiplied|must have the same dtype)",
            r"rror: The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"rror: shape '\[[-\d, ]{0,99}\]' is invalid for input of size \d+",
            r"rror: Sizes of tensors must match except in dimension \d+",
            r"rror: Given groups=\d+, weight of size \[[\d, ]{1,99}\], expected input",
            "rror: Expected all tensors to be on the same device",
        ),
        "the job ended by an error of its code, and not for want of memory: {what}",
        is_of_host=False,
        cause=Cause.NO_FAILURE,
        detail=1,
        is_request=False,
    ),
    WithoutFigures(
        either(
            "Unable to find a valid cuDNN algorithm",
            "unable to find an engine to execute this computation",
            "(?:CUDNN|CUBLAS)_STATUS_NOT_INITIALIZED",
        ),
        "{what} hides whether memory was the cause, as a library says so too if it has none for its "
        "workspace or its handle: if a batch of one fails alike, memory was not the cause",
        is_of_host=False,
    ),
    WithoutFigures(
        either("out of resource: shared memory"),
        "Triton ran out of the memory of a multiprocessor that a kernel's threads share, not of the GPU's "
        "memory: a smaller batch does not help; smaller blocks, fewer stages (num_stages) or another release "
        "of the library that has the kernel may",
        is_of_host=False,
        cause=Cause.KERNEL,
    ),
    WithoutFigures(
        either(
            "No available memory for the cache blocks",
            "larger than the maximum number of tokens that can be stored in KV cache",
            "KV cache is needed, which is larger than the available KV cache memory",
        ),
        "vLLM loaded the weights, and the rest of its share of the GPU is too small for the cache: lower "
        "max_model_len, raise gpu_memory_utilization, or shard over more GPUs; planner serve finds how many "
        "sequences fit",
        is_of_host=False,
        cause=Cause.TOO_LARGE,
    ),
    WithoutFigures(
        either(r"Free memory on device .* on startup is less than desired GPU memory utilization"),
        "vLLM found less memory free than its share of the GPU: another process has the rest, as nvidia-smi "
        "shows, or lower gpu_memory_utilization",
        is_of_host=False,
        cause=Cause.OTHER_PROCESS,
    ),
    WithoutFigures(
        either(
            r"Not enough memory\. Please try to increase --mem-fraction-static",  # SGLang
            r"Not enough memory to handle \d+ prefill tokens",  # TGI
        ),
        "the server loaded the weights, and too little of the GPU was left for the texts that it must hold: "
        "shorten them, give it a larger share of the GPU, or shard over more GPUs",
        is_of_host=False,
        cause=Cause.TOO_LARGE,
    ),
    WithoutFigures(
        either(
            "DefaultCPUAllocator: .*?tried to allocate SIZE",
            r"\$ Torch: not enough memory: you tried to allocate SIZE",
            "Unable to allocate SIZE for an array",
            "^MemoryError|std::bad_alloc",
            r"\[Errno 12\] Cannot allocate memory",
            "unable to mmap SIZE from file .{0,300}Cannot allocate memory",
            r"\[WinError 1455\]|paging file is too small",
        ),
        "the memory of the host ran out, not a GPU's; load less at once, or use fewer workers",
    ),
    WithoutFigures(
        either(
            r"DataLoader worker \(pid.*?\) is killed by signal: Killed",
            "OOMKilled",  # Kubernetes, Docker
            "OutOfMemoryError: [Cc]ontainer killed due to memory usage",  # Amazon ECS
            "oom[-_]kill event|out-of-memory handler|exceeded (?:job |step )?memory limit",  # Slurm
            "Exceeded job memory limit|srun: error: .*: Out Of Memory",
            "TERM_MEMLIMIT",  # LSF
            "PBS: job killed: v?mem",
            "due to the node running low on memory",  # Ray
            "invoked oom-killer|oom-kill:constraint|[Oo]ut of memory: Killed process",  # Linux
        ),
        "the memory of the host ran out, not a GPU's, and a process was killed for it; use fewer workers, "
        "let them prefetch less, or ask for more memory of the host",
        is_request=False,
    ),
    WithoutFigures(
        either(
            r"insufficient shared memory \(shm\)",
            r"DataLoader worker \(pid.*?\) is killed by signal: Bus error",
            "unable to (?:write to|open|mmap|allocate|resize) .{0,9}</torch_.{0,99}No space left on device",
            "No space left on device: '/dev/shm",
        ),
        "the shared memory of the host (/dev/shm) ran out, through which workers hand over batches; give the "
        "container more (docker run --shm-size or --ipc=host), or use fewer workers",
        is_request=False,
    ),
    WithoutFigures(
        either(r"DataLoader worker \(pid.*?\) exited unexpectedly"),
        "a worker of a loader ended without an error: it was killed, as Linux does if the memory of the host "
        "runs out, or it crashed; num_workers=0 shows the error of a crash",
        is_request=False,
    ),
    WithoutFigures(
        either(r"memory (?:mapping|allocation) failed with OOM on device \d+ while trying to allocate SIZE"),
        "{what}: torch 2.13 and newer also warn so if they then release cached memory and have enough; "
        "whether the request failed is in the error that follows, which the log does not have",
        is_of_host=False,
        detail=0,
    ),
    WithoutFigures(
        either(
            r"Signal 9 \(SIGKILL\) received by PID",
            r"exitcode\s*: -9\b",
            r"return code = -9\b",  # DeepSpeed's launcher
            r"died with <Signals\.SIGKILL",  # accelerate launch
            r"[Ee]xit(?:ed with)? (?:[Cc]ode|status):?\s+137\b|non-zero status of 137\b",  # containers
            r"(?:^|\]|: task \d+: )Killed(?: |$)",  # shells, after a progress bar too; Slurm
            r": line \d+: +\d+ Killed",
            r"zsh: killed",
        ),
        "a process was killed from outside (signal 9), as Linux and schedulers do if the memory of the host "
        "runs out, and for other reasons; the log of the kernel (dmesg) or of the scheduler says whether it "
        "was that",
        is_of_host=False,
        detail=0,
        is_request=False,
    ),
)
