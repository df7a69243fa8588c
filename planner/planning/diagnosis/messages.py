"""Read the out-of-memory messages of a log: their wordings, their figures and the tracebacks before them.

The wordings are those of c10/cuda/CUDACachingAllocator.cpp in torch 1.0 to 2.13, of its counterparts for
ROCm, XPU and MPS, and of the libraries that report a failed allocation by a status alone.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import Struct

from planner.planning.diagnosis.diagnosis import Cause
from planner.planning.diagnosis.tracebacks import Frame, read_frame, read_frames

_KEPT_LINES = 400  # lines kept before a message; the longest tracebacks of trainers have some 120
_MOST_RANKS = 4096  # ranks that are told apart, so that a log of any size takes little memory
_MESSAGE_LINES = 8  # lines over which a terminal may wrap a message
_NUMBER = r"([\d.]+ ?(?:bytes|[KMGT]?i?B))"
_BYTES = {"bytes": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ASYNC = "would exceed allowed memory"  # c10/cuda/CUDAMallocAsyncAllocator.cpp
MESSAGE = re.compile(rf"(CUDA|HIP|XPU|MPS backend) out of memory|{_ASYNC}")


def _either(*forms: str) -> re.Pattern[str]:
    return re.compile("|".join(form.replace("SIZE", _NUMBER) for form in forms))


class _WithoutFigures(Struct, frozen=True):
    """A pattern of messages that do not say how much memory was in use, and the cause that they imply."""

    pattern: re.Pattern[str]
    reason: str  # {what} stands for the words that the pattern found
    is_of_host: bool = True
    cause: Cause = Cause.UNKNOWN


_KILLED = _WithoutFigures(
    _either(
        r"Signal 9 \(SIGKILL\) received by PID",
        r"exitcode\s*: -9\b",
        r"return code = -9\b",  # DeepSpeed's launcher
        r"died with <Signals\.SIGKILL",  # accelerate launch
        r"[Ee]xit [Cc]ode:?\s+137\b",  # containers
        r"^Killed(?: |$)",
        r": line \d+: +\d+ Killed",
        r"zsh: killed",
    ),
    "a process was killed from outside (signal 9), as Linux and schedulers do if the memory of the host "
    "runs out; the log of the kernel (dmesg) or of the scheduler says whether it was that",
)
WITHOUT_FIGURES = (
    _WithoutFigures(
        _either(
            "(?:CUDNN|CUBLAS|CUSOLVER)_STATUS_ALLOC_FAILED",
            "(?:CUDA|HIP)(?: driver)? error: out of memory",
            "cudaErrorMemoryAllocation",
            "Cuda failure.{0,8}out of memory'?",
            r"^Error out of memory at line \d+",  # bitsandbytes
        ),
        "{what} names no sizes, so that the cause is not decided: a library or the driver asked CUDA itself; "
        "look for another process in nvidia-smi, or try a smaller batch",
        is_of_host=False,
    ),
    _WithoutFigures(
        _either(
            "Unable to find a valid cuDNN algorithm",
            "unable to find an engine to execute this computation",
            "(?:CUDNN|CUBLAS)_STATUS_NOT_INITIALIZED",
        ),
        "{what} hides whether memory was the cause, as a library says so too if it has none for its "
        "workspace or its handle: if a batch of one fails alike, memory was not the cause",
        is_of_host=False,
    ),
    _WithoutFigures(
        _either("out of resource: shared memory"),
        "Triton ran out of the memory of a multiprocessor that a kernel's threads share, not of the GPU's "
        "memory: a smaller batch does not help; smaller blocks, fewer stages (num_stages) or another release "
        "of the library that has the kernel may",
        is_of_host=False,
        cause=Cause.KERNEL,
    ),
    _WithoutFigures(
        _either(
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
    _WithoutFigures(
        _either(r"Free memory on device .* on startup is less than desired GPU memory utilization"),
        "vLLM found less memory free than its share of the GPU: another process has the rest, as nvidia-smi "
        "shows, or lower gpu_memory_utilization",
        is_of_host=False,
        cause=Cause.OTHER_PROCESS,
    ),
    _WithoutFigures(
        _either(
            r"Not enough memory\. Please try to increase --mem-fraction-static",  # SGLang
            r"Not enough memory to handle \d+ prefill tokens",  # TGI
        ),
        "the server loaded the weights, and too little of the GPU was left for the texts that it must hold: "
        "shorten them, give it a larger share of the GPU, or shard over more GPUs",
        is_of_host=False,
        cause=Cause.TOO_LARGE,
    ),
    _WithoutFigures(
        _either(
            "DefaultCPUAllocator: .*?tried to allocate SIZE",
            "Unable to allocate SIZE for an array",
            "^MemoryError",
            r"\[Errno 12\] Cannot allocate memory",
        ),
        "the memory of the host ran out, not a GPU's; load less at once, or use fewer workers",
    ),
    _WithoutFigures(
        _either(
            r"DataLoader worker \(pid.*?\) is killed by signal: Killed",
            "OOMKilled",  # Kubernetes, Docker
            "oom[-_]kill event|out-of-memory handler|exceeded (?:job |step )?memory limit",  # Slurm
            "Exceeded job memory limit|srun: error: .*: Out Of Memory",
            "TERM_MEMLIMIT",  # LSF
            "PBS: job killed: v?mem",
            "due to the node running low on memory",  # Ray
            "invoked oom-killer|oom-kill:constraint|[Oo]ut of memory: Killed process",  # Linux
        ),
        "the memory of the host ran out, not a GPU's, and a process was killed for it; use fewer workers, "
        "let them prefetch less, or ask for more memory of the host",
    ),
    _WithoutFigures(
        _either(
            r"insufficient shared memory \(shm\)",
            r"DataLoader worker \(pid.*?\) is killed by signal: Bus error",
        ),
        "the shared memory of the host (/dev/shm) ran out, through which workers hand over batches; give the "
        "container more (docker run --shm-size or --ipc=host), or use fewer workers",
    ),
    _KILLED,
)


# Each line of a log is searched once, which takes less time than a search for each pattern.
_BEGINNING = re.compile("|".join((MESSAGE.pattern, *(one.pattern.pattern for one in WITHOUT_FIGURES))))
_FIGURES = {
    "requested": _either("[Tt]ried to allocate SIZE", r"Requested\s*: SIZE"),
    # torch 2.1 and 2.2 write "capacty"
    "total": _either(
        "total capaci?ty of SIZE", "SIZE total capacity", "max allowed: SIZE", r"Device limit\s*: SIZE"
    ),
    "free": _either("of which SIZE is free", "SIZE free", r"Free \(according to CUDA\): SIZE"),
    "allowed": _either("SIZE allowed"),
    "allocated": _either(
        "SIZE is allocated by PyTorch",
        "SIZE already allocated",
        "MPS allocated: SIZE",
        r"Currently allocated\s*: SIZE",  # cudaMallocAsync
    ),
    "unallocated": _either("SIZE is reserved by PyTorch but unallocated", "SIZE cached"),
    "reserved": _either("SIZE reserved in total by PyTorch"),
    "own": _either("this process has SIZE memory in use"),
    "pools": _either("SIZE allocated in private pools"),
    "metal": _either("other allocations: SIZE"),
}
_LISTED = _either(r"Process \d+ has SIZE memory in use")
_ROUNDING_BYTES = 2**30 // 100  # messages give GiB with two decimals
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A number is a rank's if it is in a bracket or after that word; alone, it may be a line's or an hour.
_RANK = re.compile(r"^\s*(?P<mark>\[?(?:rank ?)?)(?P<number>\d+)\]?:\s?")


class Message(Struct, frozen=True):
    """An out-of-memory message with the traceback before it."""

    text: str
    frames: tuple[Frame, ...]

    def figure(self, name: str) -> int | None:
        """Return the figure `name` of `_FIGURES` in bytes, or None if the message does not have it."""
        found = _FIGURES[name].search(self.text)
        return None if found is None else in_bytes(next(filter(None, found.groups())))

    @property
    def detail(self) -> int:
        """Return a number that compares messages: higher for more figures, lowest for a killed process.

        It is 1 plus the number of figures if the message names the requested size. Otherwise it is 1 if the
        message matches a pattern other than `_KILLED`, else 0.
        """
        if self.figure("requested") is not None:
            return 1 + sum(self.figure(name) is not None for name in _FIGURES)
        return int(any(one.pattern.search(self.text) for one in WITHOUT_FIGURES if one is not _KILLED))

    @property
    def reserved_bytes(self) -> int | None:
        """Return the bytes that PyTorch reserved, as printed or as the sum of allocated and unallocated.

        None if the message does not have them, as with cudaMallocAsync, whose pools are the driver's.
        """
        if _ASYNC in self.text:
            return None
        allocated, unallocated = self.figure("allocated"), self.figure("unallocated")
        if allocated is None:
            return self.figure("reserved")
        return self.figure("reserved") or allocated + (unallocated or 0)

    @property
    def is_of_metal(self) -> bool:
        """Return whether the allocator of Apple's GPUs wrote the message."""
        return self.figure("metal") is not None

    @property
    def free_bytes(self) -> int | None:
        """Return the bytes that PyTorch could still reserve, or None if the message does not have them."""
        metal, total, allocated = (self.figure(name) for name in ("metal", "total", "allocated"))
        if metal is None or total is None or allocated is None:
            return self.figure("free")
        return total - allocated - metal

    @property
    def left_bytes(self) -> int | None:
        """Return the sum of free bytes and reserved, unallocated bytes, or None if a figure is missing."""
        free, allocated, reserved = self.free_bytes, self.figure("allocated"), self.reserved_bytes
        if free is None or allocated is None or reserved is None:
            return None
        return free + max(0, reserved - allocated)

    @property
    def own_bytes(self) -> int | None:
        """Return the bytes of this process with its CUDA context, or None if the message does not have them.

        In a container torch does not recognize its own process in the driver's list, and the message lists it
        with the other processes. Then the smallest listed process with at least the reserved bytes counts.
        """
        reserved = self.reserved_bytes
        if self.figure("own") is not None or reserved is None:
            return self.figure("own")
        return min((size for size in self._listed() if size + _ROUNDING_BYTES >= reserved), default=None)

    @property
    def other_bytes(self) -> int:
        """Return the total bytes of the other processes that the message lists."""
        own = 0 if self.figure("own") is not None else self.own_bytes or 0
        return sum(self._listed()) - own

    @property
    def outside_bytes(self) -> int | None:
        """Return the bytes in use outside of this process, or None if the message lacks a figure.

        If the size of the process is unknown, all bytes in use that its PyTorch did not reserve count.
        """
        total, free = self.figure("total"), self.figure("free")
        mine = self.reserved_bytes if self.own_bytes is None else self.own_bytes
        return None if total is None or free is None or mine is None else total - free - mine

    def _listed(self) -> list[int]:
        return [in_bytes(size) for size in _LISTED.findall(self.text)]


class _Reader:
    """A reader of the lines that one process writes to a log."""

    def __init__(self) -> None:
        self._before: deque[str] = deque(maxlen=_KEPT_LINES)
        self._text: list[str] = []
        self._frames: tuple[Frame, ...] = ()

    def read(self, line: str) -> Iterator[Message]:
        """Read a line, and yield the message that ends before the line, if there is one."""
        begins = _begins(line)
        if self._text and (
            begins or len(self._text) == _MESSAGE_LINES or not line.strip() or read_frame(line)
        ):
            yield from self.end()
        if begins:
            self._frames, self._text = read_frames(self._before), [line.strip()]
            self._before.clear()
        elif self._text:
            self._text.append(line.strip())
        else:
            self._before.append(line)

    def end(self) -> Iterator[Message]:
        """Yield the message that is not yet ended, if there is one."""
        if self._text:
            yield Message(" ".join(self._text), self._frames)
            self._text = []


def read_messages(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the messages of a log, whose lines may begin with the number of the rank that wrote them."""
    readers = {"": _Reader()}
    for raw in lines:
        for line in _printed(raw):
            found = _RANK.match(line)
            rank = found["number"] if found is not None and found["mark"] else ""
            if rank not in readers and len(readers) < _MOST_RANKS:
                readers[rank] = _Reader()
            reader = readers.get(rank, readers[""])
            yield from reader.read(line if found is None else line[found.end() :])
    for reader in readers.values():
        yield from reader.end()


def _printed(raw: str) -> Iterator[str]:
    """Yield the lines that a terminal shows for a line of a log, without text that progress bars overwrite.

    Overwritten text is yielded if a message begins in it or it names a frame. A traceback within a string of
    JSON has several lines.
    """
    text = _CONTROL.sub("", raw).rstrip("\r\n")
    if "\\n" in text and "Traceback (most recent call last)" in text:
        yield from text.replace('\\"', '"').split("\\n")
        return
    *overwritten, last = text.split("\r")
    if overwritten:
        yield from (part for part in overwritten if _begins(part) or read_frame(part))
    yield last


def _begins(line: str) -> bool:
    """Return whether a message begins in a line."""
    return _BEGINNING.search(line) is not None


def in_bytes(text: str) -> int:
    """Return the bytes that a size such as "64.00 MiB" names, or 0 if its number is malformed."""
    number, unit = re.findall(r"[\d.]+|[A-Za-z]+", text)[:2]
    try:
        return round(float(number) * _BYTES[unit if unit in _BYTES else unit[0]])
    except ValueError:  # such as "1.2.3"
        return 0
