"""Read the memory of an ordinary training loop while it runs.

Peaks are read from torch, and the memory of the process from NVML. The readings are taken after each step of
the optimizer and at the end. Nothing is synchronized, and the only effect on the loop is that torch's peaks
are reset by `torch.cuda.reset_peak_memory_stats`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from calibration.probe.client import DetectedGpu
from calibration.probe.gauge import Gauge, detect_gpu, open_gauge
from calibration.probe.memory_sampler import OUT_OF_MEMORY, STEPS_UNTIL_LOADED
from planner.hardware import MIB
from planner.hardware.calibration import Observation, Settings, origin_of
from planner.jobs import Job

MOST_SHAPES = 16  # largest number of kinds of batches that are recorded
SEGMENT_BYTES = 20 * MIB  # c10/cuda/CUDACachingAllocator.h, kLargeBuffer: bound of a small release

Shapes = tuple[tuple[int, ...], ...]


class Readings(Struct, frozen=True):
    """The memory peaks of a training loop, its steps and retries, and the shapes of its batches."""

    steps: int  # of the optimizer
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int | None  # after the last step; None if there was no step
    process_peak_bytes: int | None  # None if NVML does not show the process
    context_after_bytes: int | None  # after the third step; None if it was not reached or not shown by NVML
    retries: int
    shapes: frozenset[Shapes]  # of the tensors in each kind of call of the model
    was_fresh: bool  # whether nothing large had been released before the loop began


@dataclass(slots=True)
class TrainingMeter:
    """A meter of the memory of one loop on one GPU. Call `start` before the loop and `stop` after it."""

    index: int
    gpu: DetectedGpu
    _gauge: Gauge | None
    _steps: int = 0
    _peaks: tuple[int, int] = (0, 0)
    _process_bytes: int | None = None
    _context_bytes: int | None = None
    _end_bytes: int | None = None
    _retries_before: int = 0
    _was_fresh: bool = True
    _shapes: set[Shapes] = field(default_factory=set)
    _removers: list[Callable[[], None]] = field(default_factory=list)
    _outer: tuple["TrainingMeter", ...] = ()

    def start(self, optimizer: Any, module: Any) -> None:
        """Reset torch's peaks, and hook the optimizer's steps and, unless None, the calls of `module`."""
        self._outer = _OPEN.get()
        for one in self._outer:  # the reset below loses their peaks
            one.sample()
        _OPEN.set((*self._outer, self))
        stats = torch.cuda.memory_stats(self.index)
        earlier, now = (stats.get(f"allocated_bytes.all.{name}", 0) for name in ("peak", "current"))
        self._was_fresh = earlier - now <= SEGMENT_BYTES
        self._retries_before = stats.get("num_alloc_retries", 0)
        torch.cuda.reset_peak_memory_stats(self.index)
        self._removers.append(optimizer.register_step_post_hook(self._on_step).remove)
        if module is not None:
            handle = module.register_forward_pre_hook(self._on_call, with_kwargs=True)
            self._removers.append(handle.remove)

    def sample(self) -> None:
        """Read torch's peaks and the process's memory once, and keep the highest readings."""
        seen = torch.cuda.max_memory_allocated(self.index), torch.cuda.max_memory_reserved(self.index)
        self._peaks = max(self._peaks[0], seen[0]), max(self._peaks[1], seen[1])
        if self._gauge is not None:
            self._process_bytes = max(self._process_bytes or 0, self._gauge.level())

    def close(self) -> None:
        """Remove the hooks without a last reading."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        _OPEN.set(self._outer)

    def stop(self) -> Readings:
        """Take a last reading, remove the hooks, and return the readings of the whole loop."""
        self.close()
        self.sample()
        retries = torch.cuda.memory_stats(self.index).get("num_alloc_retries", 0)
        return Readings(
            self._steps,
            *self._peaks,
            self._end_bytes,
            self._process_bytes,
            self._context_bytes,
            retries - self._retries_before,
            frozenset(self._shapes),
            self._was_fresh,
        )

    def _on_step(self, *_: object) -> None:
        self._steps += 1
        try:
            self.sample()
            self._end_bytes = torch.cuda.memory_allocated(self.index)
            if self._steps == STEPS_UNTIL_LOADED and self._gauge is not None:
                self._context_bytes = self._gauge.level() - torch.cuda.memory_reserved(self.index)
        except Exception:  # a driver that stops answering must not end a training run
            self._gauge = None

    def _on_call(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self._shapes) < MOST_SHAPES:
            leaves = tree_leaves((args, kwargs))
            self._shapes.add(tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)))


# The running meters, the outermost first: torch has one pair of peaks, which each start resets.
_OPEN: ContextVar[tuple[TrainingMeter, ...]] = ContextVar("_OPEN", default=())


def open_meter(index: int) -> TrainingMeter:
    """Return a meter of torch's GPU `index`, on which this process must already have a CUDA context."""
    gauge = open_gauge(index)
    own = gauge if gauge is None or not gauge.remark else None
    return TrainingMeter(index, detect_gpu(gauge, index), own)


def others_bytes(meter: TrainingMeter, context_bytes: int) -> int:
    """Return the bytes that other processes hold on the GPU.

    `context_bytes` is the size of this process's context, which counts if NVML does not show the process.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(meter.index)
    own = context_bytes + torch.cuda.memory_reserved(meter.index)
    if meter._gauge is not None:
        own = meter._gauge.level()
    return max(0, total_bytes - free_bytes - own)


def cap_of_process(meter: TrainingMeter) -> int | None:
    """Return the limit in bytes set by `set_per_process_memory_fraction`, or None if unset.

    Returns None too if the GPU's total memory is unknown.
    """
    fraction = torch.cuda.get_per_process_memory_fraction(meter.index)
    total = meter.gpu.versions.torch_total_bytes
    return None if fraction >= 1 or total is None else int(fraction * total)


def settings_of(meter: TrainingMeter, alloc_conf: str, cap_bytes: int | None) -> Settings:
    """Return this process's TF32 settings together with an allocator configuration and an allocator cap."""
    return replace(meter.gpu.settings, alloc_conf=alloc_conf, allocator_cap_bytes=cap_bytes)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that the GPU's memory ran out."""
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


def is_first_process() -> bool:
    """Return whether this process is rank 0 or not distributed."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_rank() > 0)


def observe_training(
    meter: TrainingMeter, readings: Readings, job: Job, batch: int, settings: Settings, oom: bool
) -> Observation:
    """Convert the readings of a training run to an observation."""
    return Observation(
        job=job,
        batch=batch,
        gpu=meter.gpu.name,
        versions=meter.gpu.versions,
        settings=settings,
        oom=oom,
        source=origin_of(meter.gpu.name),
        about="an ordinary training",
        when=datetime.now(UTC).date().isoformat(),
        peak_allocated_bytes=readings.peak_allocated_bytes,
        peak_reserved_bytes=readings.peak_reserved_bytes,
        end_allocated_bytes=readings.end_allocated_bytes,
        process_peak_bytes=readings.process_peak_bytes,
        context_after_bytes=readings.context_after_bytes,
        retries=readings.retries,
    )
