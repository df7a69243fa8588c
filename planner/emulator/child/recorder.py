"""Record a training process on emulated GPUs.

The peaks of each optimizer step and out-of-memory errors are recorded. The record is a JSON file of the
process, written whole at each step and at exit, before the interpreter is finalized; processes that never
make a CUDA context leave none. The peaks that torch reports to the script are the same as without the
recorder.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
import time
import traceback
import warnings
from importlib import import_module
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

from .frames import line_of, line_of_caller, place
from .history import MAX_EVENTS, History
from .optimizer_state import keep_numbers_readable
from .script_logger import ScriptLogger
from .steps import Phases, Steps

_WRITE_SECONDS = 0.5  # between records of a running process
_GRACE_SECONDS = 5.0  # for a script that is stopped
_MOST_PROCESSES = 64  # on one GPU that are told apart
_YIELD_SECONDS = 0.05  # for threads that wait for the interpreter's lock


def attach(torch: Any, core: Any) -> None:
    """Pass torch's architectures to the stand-ins, keep optimizer state readable, and start recording.

    Nothing is recorded if PLANNER_EMULATED_RECORDS names no folder.
    """
    folder = os.environ.get("PLANNER_EMULATED_RECORDS")
    # torch takes the question for its kernels' images as a use of CUDA, after which a fork cannot use it
    torch.cuda._lazy_call(lambda: core.emu_set_kernel_images(" ".join(_architectures(torch)).encode()))
    keep_numbers_readable(torch, core)
    if not folder:
        return
    recorder = RunRecorder(torch, core, Path(folder))
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(recorder.after_step)
    modules: Any = import_module("torch.nn.modules.module")
    modules.register_module_forward_pre_hook(recorder.before_module)
    # it also fires for the module that torch.compile makes, which is harmless
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    torch.cuda._lazy_call(recorder.watch_memory)
    core.emu_watch_contexts(ctypes.pythonapi.Py_AddPendingCall, recorder.on_context)
    os.register_at_fork(after_in_child=recorder.restart)
    register_after_fork(recorder, _finish_with_process)
    torch.cuda.OutOfMemoryError.__init__ = recorder.wrap_error(torch.cuda.OutOfMemoryError.__init__)
    sys.excepthook = recorder.wrap_excepthook(sys.excepthook)
    atexit.register(recorder.finish)


def _finish_with_process(recorder: RunRecorder) -> None:
    """Register `finish` for the end of a multiprocessing process. Such a process runs no atexit handlers."""
    Finalize(None, recorder.finish, exitpriority=0)


def _architectures(torch: Any) -> list[str]:
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return [part for part in (flags or "").split() if part.startswith("sm_")]


class OwnPeaks:
    """The peaks of torch's allocator since the last step, apart from the peaks that the script reads.

    Torch keeps one peak, which `reset_peak_memory_stats` resets. Recorder and script each read a separate
    peak, since a reset by either first stores the current peak for the other.
    """

    def __init__(self, torch: Any) -> None:
        self._stats = torch._C._cuda_memoryStats
        self._reset = torch._C._cuda_resetPeakMemoryStats
        self._hidden: dict[int, dict[str, Any]] = {}  # peaks that the recorder's resets hide, by device
        self._since: dict[int, tuple[int, int]] = {}  # peaks that the script's resets hide, by device
        torch._C._cuda_memoryStats = self._stats_of_script
        torch._C._cuda_resetPeakMemoryStats = self._reset_by_script

    def take(self, device: int) -> tuple[int, int]:
        """Return the peak allocated and reserved bytes since the last call, and reset torch's peaks."""
        stats = self._stats(device)
        self._hidden[device] = _larger_peaks(stats, self._hidden.get(device))
        self._reset(device)
        largest = self._largest(device, stats)
        self._since.pop(device, None)
        return largest

    def stats(self, device: int) -> dict[str, Any]:
        """Return the allocator statistics of a GPU as torch keeps them, with peaks since the last reset."""
        stats: dict[str, Any] = self._stats(device)
        return stats

    def _stats_of_script(self, device: int) -> Any:
        return _larger_peaks(self._stats(device), self._hidden.get(device))

    def _reset_by_script(self, device: int) -> None:
        self._since[device] = self._largest(device, self._stats(device))
        self._hidden.pop(device, None)
        self._reset(device)

    def _largest(self, device: int, stats: dict[str, Any]) -> tuple[int, int]:
        """Return the peak allocated and reserved bytes since the last `take`, despite the script's resets."""
        allocated, reserved = self._since.get(device, (0, 0))
        return max(allocated, _peak(stats, "allocated_bytes")), max(reserved, _peak(stats, "reserved_bytes"))


def _peak(stats: dict[str, Any], name: str) -> int:
    return int(stats[name]["all"]["peak"])


def _larger_peaks(stats: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Return `stats` with each peak raised to the peak in `other`. Larger peaks stay."""
    if other is None:
        return stats
    return {
        name: value
        if not isinstance(value, dict)
        else {
            pool: {**row, "peak": max(row["peak"], other[name][pool]["peak"])} if "peak" in row else row
            for pool, row in value.items()
        }
        if all(isinstance(row, dict) for row in value.values())
        else value
        for name, value in stats.items()
    }


class RunRecorder:
    """A recorder of one process's peaks, steps, history and end."""

    def __init__(self, torch: Any, core: Any, folder: Path) -> None:
        self._torch, self._core = torch, core
        core.emu_peak.restype = core.emu_pinned_bytes.restype = ctypes.c_size_t
        core.emu_context_active.restype = ctypes.c_bool
        self.on_context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._note_context)  # emu_call
        self._folder = folder
        self._peaks: OwnPeaks | None = None  # until torch initializes CUDA
        kinds = os.environ.get("PLANNER_EMULATED_HISTORY", "").split()
        self._script_log = ScriptLogger(torch, self._places) if "script_log" in kinds else None
        self.restart()

    def restart(self) -> None:
        """Begin an empty record of this process, which may be a fork of a recorded process."""
        torch = self._torch
        self._process = {"rank": int(os.environ.get("RANK") or 0), "pid": os.getpid()}
        self._path = self._folder / f"{self._process['rank']}-{os.getpid()}.json"
        self._pid, self._written = os.getpid(), 0.0
        kinds = os.environ.get("PLANNER_EMULATED_HISTORY", "").split()
        self._has_snapshot = "snapshot" in kinds
        if self._script_log is not None:
            self._script_log.restart()
        history = History(torch, self._path.with_suffix(".history"), self._process, self._script_log)
        self._history = history if "events" in kinds else None
        self._peaks = None
        self._steps, self._phases = Steps(), Phases(self._read_peaks)
        self._count, self._stopping, self._finished = 0, False, False
        self._finishing = threading.Lock()
        self._failure: dict[str, Any] | None = None  # the last that the script met, else the last
        self._last_failure: dict[str, Any] | None = None
        self._raised = False  # whether an exception ended the script
        self._first_lines: dict[int, str] = {}  # of the script, by GPU, that made the process use it
        self._stop_after = int(os.environ.get("PLANNER_EMULATED_STOP_AFTER") or 0)
        self._ends_after_evaluation = bool(os.environ.get("PLANNER_EMULATED_STOP_AFTER_EVALUATION"))
        self._ends_out_of_memory = bool(os.environ.get("PLANNER_EMULATED_STOP_OUT_OF_MEMORY"))
        self._history_steps = int(os.environ.get("PLANNER_EMULATED_HISTORY_STEPS") or 0)  # 0: all

    # ---- what torch calls

    def watch_memory(self) -> None:
        """Begin to record the allocator's peaks, failed requests and, if asked for, history.

        torch calls this method when CUDA is initialized.
        """
        if os.getpid() == self._pid and self._peaks is None:
            self._peaks = OwnPeaks(self._torch)
            if self._has_snapshot or self._history is not None:
                self._torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
            self._torch._C._cuda_attach_out_of_memory_observer(self.on_out_of_memory)
            self._write(whole=False)  # an empty list: the process uses CUDA

    def _note_context(self, device: int | None) -> int:
        """Note the script's line that created this process's context on a GPU.

        A `device` of None is GPU 0.
        """
        self._first_lines[device or 0] = line_of_caller()
        return 0

    def before_module(self, module: Any, args: Any) -> None:
        """Record that a module is about to run, and whether it runs with gradients."""
        if self._torch.compiler.is_compiling() or os.getpid() != self._pid or self._peaks is None:
            return
        self._phases.note_module(self._torch.is_grad_enabled())

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer step and the peaks since the previous step. Raises SystemExit at the last step.

        The last step is the step to stop after, or the first step after an evaluation if that ends the run.
        """
        if os.getpid() != self._pid or self._peaks is None:
            return
        if self._stopping:  # the script went on
            self._end()
        self._count += 1
        self._note_rank()
        if self._history is not None:
            for device in self._devices():
                self._history.mark(device, self._count, self._peaks.stats(device))
        if self._script_log is not None:
            self._script_log.end_step(optimizer)
        self._steps.add(self._count, self._phases.end_step(self._count))
        self._write(whole=False)
        if self._count == self._history_steps:
            self._end_history()
        is_evaluated = self._phases.before_step is not None
        if self._count == self._stop_after or (is_evaluated and self._ends_after_evaluation):
            self._stopping = True
            ending = threading.Timer(_GRACE_SECONDS, self._end)  # threads of the script may live on
            ending.daemon = True
            ending.start()
            raise SystemExit(0)

    def _end_history(self) -> None:
        """Write the allocator's history, and stop recording it unless a snapshot needs it."""
        if self._history is not None:
            self._history.write(self._devices())
            self._history = None
            if not self._has_snapshot:
                self._torch.cuda.memory._record_memory_history(None)

    def _end(self, code: int = 0) -> None:
        """Write the record and end the process with an exit code. Other threads may still run."""
        self.finish()
        os._exit(code)

    def on_out_of_memory(self, device: int, requested: int, allocated: int, free: int) -> None:
        """Record a failed allocation with its phase, module and line, even if the script survives it."""
        if os.getpid() != self._pid:
            return
        if self._script_log is not None:
            self._script_log.hold_all()
        found = place(self._torch)
        self._last_failure = {
            "device": device,
            "step": self._count + 1,
            "requested_bytes": requested,
            "was_raised": False,
            "reached_script": False,
            "others": self._others(device),
            **found,
            "phase": found["phase"] or self._phases.current(bool(found["module"])),
        }
        if self._failure is None or not self._failure["reached_script"]:
            self._failure = self._last_failure
        self._write(whole=False)

    def wrap_error(self, init: Any) -> Any:
        """Return an `__init__` of out-of-memory errors that records that the error reached the script.

        Python makes the object of an error in C++ when the script catches it or ends. The process ends here,
        with exit code 1, if out-of-memory errors are to end it.
        """

        def noting(error: Any, *args: Any) -> None:
            init(error, *args)
            if self._last_failure is None or os.getpid() != self._pid:
                return
            self._failure = self._last_failure
            self._failure["reached_script"] = True
            if not self._failure["line"]:
                self._failure["line"] = line_of_caller()
            if self._ends_out_of_memory:
                self._failure["was_raised"] = True
                self._end(1)

        return noting

    def wrap_excepthook(self, hook: Any) -> Any:
        """Return an excepthook that records that an exception ended the script, and then calls `hook`.

        It records too whether the exception was a failed allocation.
        """

        def noting(kind: Any, error: Any, trace: Any) -> None:
            self._raised = True
            if isinstance(error, self._torch.cuda.OutOfMemoryError) and self._failure is not None:
                self._failure["was_raised"] = True
                frames = [frame for frame, _ in traceback.walk_tb(trace)]
                if not self._failure["line"]:
                    self._failure["line"] = line_of(frames)
            hook(kind, error, trace)

        return noting

    def finish(self) -> None:
        """Write the histories and then the record of this process.

        The process is about to end. The record is written last, so that a whole record has nothing missing.
        Then let threads of autograd have the interpreter's lock: a thread that still waits for the lock, to
        release a thread's state, when the interpreter is finalized ends the process by std::terminate
        (torch/csrc/autograd/engine.cpp, PyThread_exit_thread of CPython).
        """
        if os.getpid() != self._pid:
            return
        with self._finishing:
            if self._finished:
                return
            try:
                self._write_histories()
            finally:
                self._write(whole=True)
                self._finished = True
        time.sleep(_YIELD_SECONDS)

    def _write_histories(self) -> None:
        if self._peaks is not None:
            if self._has_snapshot:
                self._torch.cuda.memory._dump_snapshot(str(self._path.with_suffix(".pickle")))
            if self._history is not None:
                self._history.write(self._devices())

    # ---- reading and writing

    def _note_rank(self) -> None:
        """Take the rank from the script's process group if its launcher set none, as `mp.spawn`."""
        distributed = self._torch.distributed
        if "RANK" in os.environ or not (distributed.is_available() and distributed.is_initialized()):
            return
        before, self._process["rank"] = self._path, distributed.get_rank()
        self._path = self._folder / f"{self._process['rank']}-{os.getpid()}.json"
        if before != self._path and before.is_file():
            before.replace(self._path)

    def _devices(self) -> list[int]:
        return [n for n in range(self._torch.cuda.device_count()) if self._core.emu_context_active(n)]

    def _others(self, device: int) -> list[dict[str, int]]:
        """Return the rank and memory of each other process of the command on a GPU. Memory is in bytes."""
        pids, used = (ctypes.c_uint * _MOST_PROCESSES)(), (ctypes.c_size_t * _MOST_PROCESSES)()
        count = self._core.emu_processes(device, _MOST_PROCESSES, pids, used)
        others = []
        for pid, process_bytes in zip(pids[:count], used[:count], strict=True):
            record = next(self._folder.glob(f"*-{pid}.json"), None)
            if pid != self._pid and record is not None:
                others.append({"rank": int(record.name.split("-")[0]), "process_bytes": process_bytes})
        return others

    def _places(self) -> dict[int, int]:
        """Return the position in the allocator's history, keyed by GPU.

        A position is the number of blocks allocated plus the number of blocks freed.
        """
        if self._peaks is None or os.getpid() != self._pid:
            return {}
        counts = {n: self._peaks.stats(n)["allocation"]["all"] for n in self._devices()}
        return {n: int(one["allocated"]) + int(one["freed"]) for n, one in counts.items()}

    def _read_peaks(self) -> dict[int, dict[str, int]]:
        """Return and reset the peaks of allocated, reserved and process memory on each GPU, in bytes."""
        assert self._peaks is not None
        read = {}
        for device in self._devices():
            allocated, reserved = self._peaks.take(device)
            process = self._core.emu_peak(device)
            self._core.emu_reset_peak(device)
            read[device] = {
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "process_bytes": process,
            }
        return read

    def _write(self, whole: bool) -> None:
        if not whole and time.monotonic() - self._written < _WRITE_SECONDS and self._count > 3:
            return
        if self._peaks is None:
            return
        self._note_rank()
        self._written = time.monotonic()
        after = self._phases.end() if whole else {}  # the peaks after the last step
        failed = [] if self._failure is None else [self._failure["device"]]
        devices = {*after, *failed, *self._steps.devices()}
        records = [self._record(device, after.get(device)) for device in sorted(devices)]
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(records), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            print(f"planner: {self._path}: the record cannot be written: {error.strerror}", file=sys.stderr)

    def _record(self, device: int, after: dict[str, int] | None) -> dict[str, Any]:
        """Return the fields of the `GpuRecord` of a GPU, with its peaks after the last step in `after`."""
        assert self._peaks is not None
        torch, failure = self._torch, self._failure
        cudnn = torch.backends.cudnn.version()
        return {
            **self._process,
            "device": device,
            "gpu_index": self._core.emu_machine_gpu(device),
            "first_line": self._first_lines.get(device, ""),
            "steps": self._steps.of(device),
            "merged_from": self._steps.merged_from,
            "after_steps": after,
            "loading": self._phases.loading.get(device),
            "evaluation": self._phases.evaluations.get(device),
            "between_steps": self._phases.between_steps.get(device),
            "retries": self._peaks.stats(device)["num_alloc_retries"],
            "pinned_bytes": self._core.emu_pinned_bytes(),
            "failure": failure if failure is not None and failure["device"] == device else None,
            "versions": [
                ("torch", torch.__version__),
                ("cuda", torch.version.cuda),
                ("cudnn", f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"),
            ],
            "step_count": self._count,
            "was_stopped": self._stopping,
            "raised": self._raised,
            "evaluated_before_step": self._phases.before_step if self._ends_after_evaluation else None,
        }
