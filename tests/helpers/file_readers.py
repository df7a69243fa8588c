"""Every reader of files that others may have written, with a valid file for each."""

import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from calibration.campaign_file import STANDARD, load_campaign
from calibration.observations import load_observation, save_observation
from calibration.records.reader import read_measured_records
from planner.allocator.history.file import load_history, save_history
from planner.allocator.history.history import History, HistoryEvent, HistoryMark
from planner.allocator.history.profiler_trace import load_profiler_trace
from planner.allocator.history.snapshot_reader import load_snapshot
from planner.errors import DataFileError
from planner.hardware.calibration.files import Origins, add_points, key_of, load_calibration
from planner.hardware.calibration.model import NoFit, Point
from planner.hardware.database import DEVICES_FOLDER, load_devices
from planner.jobs.codec import job_to_json
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.process.file import SHIPPED_FOLDER, read_process
from planner.planning.sweep.grid import load_grid
from planner.planning.sweep.results import ResultStore
from planner.planning.sweep.task import GpuFigures, Task, TaskResult, device_digest
from planner.program.events import Category, Free, Phase, PhaseStart, Site
from planner.program.expr import Guard, GuardedOps, OpExpr
from planner.program.kernels.expansion import OpKind
from planner.program.program import AffineAlloc, KernelCall, Program, Variants
from planner.program.target import Target
from planner.store.cache_dir import CacheDirectory
from planner.store.codec import save_programs
from planner.store.file_store import open_saved
from tests.calibration.test_records import HISTORY as RECORDED, LIMITS, MACHINE, PEAKS, record
from tests.helpers.runs import RUN
from tests.helpers.structs import replace
from tests.helpers.traces import program_of, save_trace

CATALOGUE = load_catalogue()
EVENTS = (
    *(PhaseStart(0, Phase.SETUP), AffineAlloc(0, 37632, 0, Category.PARAMETER, 0)),
    PhaseStart(1, Phase.FORWARD),
    *(AffineAlloc(7, -64, 802816, Category.ACTIVATION, 1), Free(7), PhaseStart(1, Phase.END)),
)
SITES = (Site("", "to"), Site("conv1", "aten.convolution.default"))
TRACE = program_of(EVENTS, SITES).instantiate(3)
HISTORY = History(
    "NVIDIA GeForce RTX 3060",
    "2.13.0",
    "",
    2**33,
    None,
    (HistoryEvent("segment_alloc", 2**40, 2**21), HistoryEvent("alloc", 2**40, 512)),
    (HistoryMark(1, 1, Phase.FORWARD),),
)
SNAPSHOT = {
    "segments": [],
    "device_traces": [[{"action": "alloc", "addr": 2**40, "size": 512, "frames": [], "stream": 0}]],
    "allocator_settings": {"PYTORCH_ALLOC_CONF": ""},
}
PROFILE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA L4", "totalGlobalMem": 2**34}],
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::relu", "tid": 1, "ts": 1, "dur": 5, "args": {}},
        {
            "ph": "i", "name": "[memory]", "tid": 1, "ts": 2,
            "args": {"Bytes": 512, "Device Id": 0, "Device Type": 1, "Addr": 4096},
        },
    ],
}  # fmt: skip
SWEEP = b"""about: a
models: [conv_pair, {model: basic_encoder, name: e, model_arg: {in_channels: 1, sizes: [1, 2.5, no]}}]
recipes:
  sgd: {}
  amp: {optimizer: adamw, precision: amp-fp16, steps: 2, ema: true, input: [1x64x64], freeze: ["*.bias"]}
gpus: [L4, 8000, words: H100]
"""


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of a file, and a valid file."""

    load: Callable[[Path], object]
    valid: bytes  # as text, where it is packed
    name: str = "file.yaml"
    pack: Callable[[bytes], bytes] = bytes


def _written(write: Callable[[Path], object]) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        if not path.exists():
            (path,) = (path for path in Path(folder).iterdir() if path.name != ".lock")
        return path.read_bytes()


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def _warn(line: str) -> None:
    raise DataFileError(line)


def _calibrate(path: Path) -> None:
    runs = [replace(RUN, batch=batch) for batch in (16, 32)]
    points = [Point(run, 10**9) for run in runs]
    add_points(path.parent, key_of(RUN), points, Origins("measured", "a", "2.13"), lambda _: NoFit("no"))


TASK = Task("m", "r", RUN.job, (load_devices()[0],), {})
FIGURES = GpuFigures("x", 1.5, 3, None, 2, 1, True, "none", 2)
_RESULT = TaskResult({device_digest(TASK.devices[0]): FIGURES}, ("a note",), ("op",))
_KEY = {"job": "a"}
_NODES = (("m", 0, 0), ("c", 512, 0), ("*", 0, 1))
_VARIANT = GuardedOps(2, 100, _NODES, (Guard("<", 0, 2, True),), (OpExpr(OpKind.HOLD, 2),))
_CALL = KernelCall(0, 1, 3, (True,), True)
PROGRAM = Program(EVENTS, SITES, (_CALL,), {(8, 6): Variants(8192, 2, 100, [[_VARIANT]])})
_ABOUT = {"job": job_to_json(RUN.job), "batch": 2, "capability": [8, 6], "key": _KEY}
_ABOUT_LOOPS = _ABOUT | {"multiprocessors": 84}


def _recorded(path: Path) -> object:
    machine = path.parent / "versions.json"
    if not machine.exists():
        machine.write_text(json.dumps(MACHINE))
    return read_measured_records(path.parent)


def _read(path: Path) -> object:
    return ResultStore(path.parent, "", _warn).find(TASK)


def _result_name() -> str:
    with TemporaryDirectory() as folder:
        ResultStore(Path(folder), "", _warn).keep(TASK, _RESULT)
        return next(Path(folder).iterdir()).name


READERS: dict[str, Reader] = {
    "catalogue": Reader(load_catalogue, (Path(__file__).parents[2] / "models.yaml").read_bytes()),
    "device": Reader(lambda path: load_devices(path.parent), (DEVICES_FOLDER / "rtx_4090.yaml").read_bytes()),
    "calibration": Reader(load_calibration, _written(_calibrate)),
    "campaign": Reader(lambda path: load_campaign(CATALOGUE, path), STANDARD.read_bytes()),
    "process": Reader(
        lambda path: read_process(path, CATALOGUE), (SHIPPED_FOLDER / "notebook.yaml").read_bytes()
    ),
    "sweep": Reader(lambda path: load_grid(path, CATALOGUE), SWEEP),
    "sweep result": Reader(
        _read, _written(lambda path: ResultStore(path.parent, "", _warn).keep(TASK, _RESULT)), _result_name()
    ),
    "trace": Reader(
        lambda path: open_saved(path).trace(3, Target((8, 6), 84)),
        gzip.decompress(_written(lambda path: save_trace(TRACE, path, _ABOUT))),
        pack=_gzip,
    ),
    "saved program": Reader(
        lambda path: open_saved(path).trace(7, Target((8, 6), 84)),
        gzip.decompress(_written(lambda path: save_programs([PROGRAM], path, _ABOUT_LOOPS))),
        pack=_gzip,
    ),
    "cached trace": Reader(
        lambda path: CacheDirectory(path.parent, _warn).get(_KEY),
        gzip.decompress(_written(lambda path: save_trace(TRACE, path, _ABOUT))),
        CacheDirectory(Path(), _warn)._path(_KEY).name,
        _gzip,
    ),
    "observation": Reader(load_observation, _written(lambda path: save_observation(RUN, path)), "file.json"),
    "history": Reader(
        load_history, gzip.decompress(_written(lambda path: save_history(HISTORY, path))), pack=_gzip
    ),
    "snapshot": Reader(load_snapshot, pickle.dumps(SNAPSHOT, protocol=4), "file.pickle"),
    "profiler's trace": Reader(load_profiler_trace, json.dumps(PROFILE).encode(), "file.json"),
    "machine": Reader(_recorded, json.dumps(MACHINE).encode(), "versions.json"),
    "peaks": Reader(_recorded, record("peaks", 32, PEAKS).encode(), "peaks.jsonl"),
    "limits": Reader(_recorded, record("limits", 24, LIMITS).encode(), "limits.jsonl"),
    "records": Reader(_recorded, record("history", 32, RECORDED).encode(), "history.jsonl.gz", _gzip),
}
