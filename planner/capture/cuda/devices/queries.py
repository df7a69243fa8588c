"""Answer user code's queries of torch.cuda and torch.accelerator as the planned GPU.

torch's own code gets the true answers. So do libraries that cache whether a GPU exists, since the process
continues after the capture.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from planner.capture.cuda.callers import caches_answers, is_of_torch
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.streams import DEFAULT_STREAM, Streams
from planner.capture.cuda.threads import caller_frame
from planner.capture.patching import always

Remark = Callable[[str], None]

_WITHOUT_EFFECT = (
    *("init", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_device", "set_rng_state", "set_rng_state_all", "set_sync_debug_mode", "synchronize"),
    *("reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_peak_memory_stats", "set_device_index", "set_device_idx"),
    *("_record_memory_history", "_dump_snapshot", "_sleep"),
)
_CONSTANTS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_tf32_supported": True,
    "can_device_access_peer": False,
    "device_count": 1,
    "current_device": 0,
    "current_device_index": 0,
    "current_device_idx": 0,
    "initial_seed": 0,
    "memory_summary": "",
    "get_sync_debug_mode": 0,
    "get_allocator_backend": "native",
    "get_per_process_memory_fraction": 1.0,
    "list_gpu_processes": "",
}
_NAME = "NVIDIA GPU"
_TOTAL_BYTES = 80 * 2**30
_SEGMENT_BYTES = 2 * 2**20  # reported as reserved, since user code may divide by the reserved bytes
_SEGMENT = {"device": 0, "address": 0, "stream": 0, "segment_type": "small", "total_size": _SEGMENT_BYTES}
_SEGMENT |= {"allocated_size": 0, "active_size": 0, "requested_size": 0, "blocks": []}


class _Statistics(dict[str, int]):
    """Statistics of an allocator that holds one empty segment."""

    def __missing__(self, name: str) -> int:
        return _SEGMENT_BYTES if name.startswith("reserved_bytes") else 0

    def get(self, name: str, default: object = None) -> int:
        """Return the statistic `name`; `default` is never used, since each statistic has a value."""
        return self[name]


_MEMORY: dict[str, Any] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), _SEGMENT_BYTES),
    **dict.fromkeys(("memory_cached", "max_memory_cached"), _SEGMENT_BYTES),
    **dict.fromkeys(("memory_usage", "device_memory_used"), 0),
    **dict.fromkeys(("mem_get_info", "get_memory_info"), (_TOTAL_BYTES, _TOTAL_BYTES)),
    **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), 0),
    **dict.fromkeys(("memory_stats", "host_memory_stats"), _Statistics()),
    "memory_stats_as_nested_dict": {},
    "memory_snapshot": [_SEGMENT],
    "_snapshot": {"segments": [_SEGMENT], "device_traces": [[]]},
}
_CACHED = ("is_available", "device_count", "is_initialized")  # queries that libraries cache for the process
_PLAIN_GENERATOR = torch.Generator


class Handle(AbstractContextManager[Any]):
    """A stand-in for an event or a device of torch.cuda, whose work counts as done."""

    device_index = idx = 0
    device = torch.device("cuda", 0)

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, _: object) -> float:
        """Return 0.0 milliseconds."""
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new completed event if `event` is None."""
        return Handle() if event is None else event

    def record(self, *_: Any) -> None:
        """Do nothing, since all work is done."""

    wait_stream = wait_event = synchronize = wait = record


class Stream(Handle):
    """A stand-in for a stream of torch.cuda, which is current while its context is open."""

    def __init__(self, streams: Streams, number: int) -> None:
        """Set the number of the stream and the `Streams` of the capture."""
        self.stream_id = self.cuda_stream = number
        self._streams = streams

    def __enter__(self) -> "Stream":
        self._streams.enter(self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.leave()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


def replacements(
    capability: Callable[[], tuple[int, int]],
    remark: Remark,
    empty_cache: Callable[[], None],
    streams: Callable[[], Streams],
) -> Iterator[Replacement]:
    """Yield replacements for names of torch that query or use the GPU.

    The names are in torch, torch.cuda, torch.accelerator, torch.random and torch.backends.cuda. `capability`
    and `streams` return the planned GPU's compute capability and the capture's streams. `remark` is called
    with a text for each query whose answer the trace must guess and for a memory limit that user code sets,
    `empty_cache` when user code empties the cache.
    """

    def current() -> Stream:
        return Stream(streams(), streams().current)

    def make(device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return Stream(streams(), streams().make(priority))

    def change(stream: Stream | None) -> None:
        if stream is not None:
            streams().set(stream.stream_id)

    of_streams: dict[str, Callable[..., Any]] = {
        "current_stream": lambda *_, **__: current(),
        "default_stream": lambda *_, **__: Stream(streams(), DEFAULT_STREAM),
        "set_stream": change,
        "stream": lambda stream: Handle() if stream is None else stream,
    }
    for holder in (torch.cuda, torch.cuda.memory, torch.accelerator):
        answers = {**_answers(holder.__name__, capability, remark, empty_cache), **of_streams}
        for name, answer in answers.items():
            if hasattr(holder, name):
                truth = caches_answers if name in _CACHED else is_of_torch
                yield holder, name, _for_users(getattr(holder, name), answer, truth)
    of_types: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("Event", "device", "device_of"), lambda *_, **__: Handle()),
        **{"Stream": make, "ExternalStream": lambda *_, **__: make(), "StreamContext": of_streams["stream"]},
    }
    yield torch, "Stream", _type_for_users(torch, "Stream", make)
    for name, construct in of_types.items():
        yield torch.cuda, name, _type_for_users(torch.cuda, name, construct)
    accelerator = _for_users(torch.accelerator.current_accelerator, always(torch.device("cuda")))
    yield torch.accelerator, "current_accelerator", accelerator
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        yield torch.cuda.nvtx, name, always(0)
    profiler = SimpleNamespace(cudaProfilerStart=always(0), cudaProfilerStop=always(0))
    yield torch.cuda, "cudart", _for_users(torch.cuda.cudart, always(profiler))
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, always(None)
    fork = torch.random.fork_rng

    @functools.wraps(fork)
    def fork_of_cpu(devices: Any = None, enabled: bool = True, *args: Any, **options: Any) -> Any:
        if options.get("device_type") == "meta" or not is_of_torch(caller_frame()):
            return fork((), enabled)
        return fork(devices, enabled, *args, **options)

    yield torch.random, "fork_rng", fork_of_cpu
    yield torch.cuda.nvtx, "range", lambda *_, **__: nullcontext()
    yield torch.backends.cuda, "is_built", _for_users(torch.backends.cuda.is_built, lambda: True)
    yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False
    yield torch.cuda, "is_bf16_supported", lambda including_emulation=True: True
    yield torch, "Generator", _Generator


def _answers(
    module: str, capability: Callable[[], tuple[int, int]], remark: Remark, empty_cache: Callable[[], None]
) -> dict[str, Callable[..., Any]]:
    def of_memory(name: str, value: Any) -> Callable[..., Any]:
        def answer(*_: Any, **__: Any) -> Any:
            remark(f"calls {module}.{name}, whose result depends on the run: the trace takes {value}")
            return copy.deepcopy(value)

        return answer

    def properties(*_: Any, **__: Any) -> Any:
        major, minor = capability()
        remark(f"calls {module}.get_device_properties: the trace takes 80 GiB and 100 multiprocessors")
        return SimpleNamespace(
            name=_NAME, major=major, minor=minor, total_memory=_TOTAL_BYTES,
            multi_processor_count=100, warp_size=32,
        )  # fmt: skip

    def named(*_: Any, **__: Any) -> str:
        remark(f"calls {module}.get_device_name: the trace takes {_NAME!r}")
        return _NAME

    def fraction(value: float, *_: Any, **__: Any) -> None:
        remark(f"sets {module}.set_per_process_memory_fraction({value}): use --allocator-cap-mib instead")

    return {
        "empty_cache": empty_cache,
        **{name: always(value) for name, value in _CONSTANTS.items()},
        **dict.fromkeys(_WITHOUT_EFFECT, always(None)),
        **{name: of_memory(name, value) for name, value in _MEMORY.items()},
        "get_device_name": named,
        "get_device_capability": lambda *_, **__: capability(),
        "get_device_properties": properties,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *_, **__: [torch.zeros(16, dtype=torch.uint8)],
        "set_per_process_memory_fraction": fraction,
    }


def _for_users(
    plain: Callable[..., Any],
    answer: Callable[..., Any],
    needs_truth: Callable[[FrameType], bool] = caches_answers,
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def query(*args: Any, **kwargs: Any) -> Any:
        return (plain if needs_truth(caller_frame()) else answer)(*args, **kwargs)

    return query


def _type_for_users(holder: ModuleType, name: str, construct: Callable[..., Any]) -> type:
    """Return a class for user code that replaces the class `name` and makes instances by `construct`.

    Instances of the replaced class and `Handle` count as its instances. Libraries that cache answers get
    instances of the replaced class.
    """
    plain = getattr(holder, name)

    class _Type(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (plain, Handle))

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            is_replaced = getattr(holder, name) is not plain  # else a module keeps the class after a plan
            if not is_replaced or caches_answers(caller_frame()):
                return plain(*args, **kwargs)
            return construct(*args, **kwargs)

    return _Type(plain.__name__, (), {})


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PLAIN_GENERATOR)

    def __call__(cls, device: Any = "cpu") -> Any:
        """Return a `torch.Generator` on the device, or on the CPU if the device is a GPU or `meta`.

        Random numbers of the planned GPU have no values.
        """
        is_gpu = torch.device(device).type in ("cuda", "meta")
        return _PLAIN_GENERATOR("cpu" if is_gpu else device)


class _Generator(metaclass=_AnyGenerator):
    """The replacement of `torch.Generator`, which is on the CPU if a GPU is named."""
