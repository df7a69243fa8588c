"""Records of the self-contained measuring script, literal in its format, as observations and histories."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from calibration.calibrate import import_records
from calibration.observations import load_observation
from calibration.records.reader import SkippedRecord, read_measured_records
from planner.allocator.config import MIB
from planner.allocator.history.check import check_history
from planner.allocator.history.file import load_history
from planner.allocator.history.history import HistoryEvent, HistoryMark
from planner.errors import DataFileError
from planner.hardware.calibration.model import NoFit, Settings, Versions
from planner.jobs import (
    Job,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
    parse_tensor_spec,
)
from planner.program.events import Phase
from tests.helpers.runs import RUN
from tests.helpers.structs import replace

MACHINE = {
    "gpu": "NVIDIA A100-SXM4-40GB",
    "capability": [8, 0],
    "multiprocessors": 108,
    "total_torch": 40_507 * MIB,
    "torch": "2.9.0+cu128",
    "torchvision": "0.24.0+cu128",
    "cuda": "12.8",
    "cudnn": 91002,
    "driver": "570.12",
    "nvml_total": 40_960 * MIB,
    "alloc_conf": None,
    "tf32_matmul": False,
    "tf32_cudnn": True,
}
WHAT = {
    "model": "torchvision:resnet50",
    "batches": [16, 32, 64, 128],
    "inp": "3x224x224",
    "target": "10",
    "loss": "cross_entropy",
    "precision": "fp32",
    "optimizer": "sgd",
    "impl": "foreach",
    "memory_format": "contiguous",
    "mode": "train",
    "zero_grad": "before-forward",
    "benchmark": False,
    "kwargs": {"num_classes": 10},
    "alloc_conf": "",
}
PEAKS = {
    "total_torch": 40_507 * MIB,
    "total_nvml": 40_960 * MIB,
    "used_before": 500 * MIB,
    "context": 400 * MIB,
    "used_after": [3_000 * MIB, 3_050 * MIB, 3_060 * MIB, 3_060 * MIB],
    "process_after": [-1, -1, -1, -1],
    "allocated_after": [200 * MIB] * 4,
    "reserved_after": [2_500 * MIB, 2_550 * MIB, 2_560 * MIB, 2_560 * MIB],
    "oom": False,
    "model_allocated": 100 * MIB,
    "peak_allocated": 2_400 * MIB,
    "peak_reserved": 2_560 * MIB,
    "peak_active": 2_400 * MIB,
    "retries": 0,
    "ooms": 0,
    "steps_done": 4,
}
HISTORY = {
    "events": [
        ["segment_alloc", 2**32, 2 * MIB],
        ["alloc", 2**32, 4096],
        ["alloc", 2**32 + 4096, 512],
        ["free_requested", 2**32, 4096],
        ["free_completed", 2**32, 4096],
    ],
    "marks": [["built", 0], ["model", 2], ["forward0", 2], ["backward0", 3], ["step0", 5]],
}
LIMITS = {
    "largest": 40,
    "first_oom": 41,
    "exact": True,
    "probes": [
        [40, True, {"peak_allocated": 7 * MIB, "peak_reserved": 8 * MIB, "retries": 3}],
        [41, False, {"peak_allocated": 5 * MIB, "peak_reserved": 6 * MIB, "retries": 1}],
    ],
}


def record(kind: str, arg: int, result: dict[str, Any], **what: object) -> str:
    fields = {
        "key": "k",
        "kind": kind,
        "job": WHAT | what,
        "arg": arg,
        "seconds": 1.5,
        "ok": True,
        "result": result,
        "error": None,
    }
    return json.dumps(fields) + "\n"


def put(folder: Path, machine: dict[str, Any] = MACHINE, **files: str) -> Path:
    """Write a folder of records of 31 January 2026; packed files are written line by line, as they grow."""
    (folder / "versions.json").write_text(json.dumps(machine))
    for name, text in files.items():
        path = folder / f"{name}.jsonl{'.gz' if name in ('history', 'ops') else ''}"
        if path.suffix == ".gz":
            path.write_bytes(
                b"".join(gzip.compress(line.encode()) for line in text.splitlines(keepends=True))
            )
        else:
            path.write_text(text)
        os.utime(path, (1_769_860_800, 1_769_860_800))
    return folder


OURS = Job.create(
    "torchvision:resnet50",
    model_args=(("num_classes", 10),),
    inputs=(parse_tensor_spec("3x224x224"),),
    target=parse_tensor_spec("10"),
    steps=4,
)
SEEN = replace(
    RUN,
    job=OURS,
    gpu="NVIDIA A100-SXM4-40GB",
    versions=Versions("2.9.0+cu128", "12.8", "9.10.2", "570.12", (8, 0), 40_507 * MIB, 40_960 * MIB),
    peak_allocated_bytes=2_400 * MIB,
    peak_reserved_bytes=2_560 * MIB,
    end_allocated_bytes=200 * MIB,
    process_peak_bytes=3_060 * MIB,
    context_before_bytes=400 * MIB,
    context_after_bytes=500 * MIB,
)


def test_a_record_of_peaks_is_an_observation(tmp_path: Path) -> None:
    """Every figure arrives; where NVML hides the process the device's rise stands for it."""
    records = read_measured_records(put(tmp_path, peaks=record("peaks", 32, PEAKS)))
    assert records.observations == (SEEN,)
    assert (records.histories, records.skipped) == ((), ())


def test_the_process_itself_counts_before_the_device(tmp_path: Path) -> None:
    """The process's own memory is taken if NVML shows it."""
    result = PEAKS | {"process_after": [2_900 * MIB, 2_950 * MIB, 2_960 * MIB, 2_960 * MIB]}
    (records,) = read_measured_records(put(tmp_path, peaks=record("peaks", 32, result))).observations
    assert records == replace(SEEN, process_peak_bytes=2_960 * MIB, context_after_bytes=400 * MIB)


def test_what_was_not_seen_is_none(tmp_path: Path) -> None:
    """After retries or a death a level between steps is no peak; without NVML there is no process."""
    died = {"oom": True, "retries": 2, "used_after": [], "process_after": [], "allocated_after": []}
    lines = [
        record("peaks", 32, PEAKS | {"retries": 1}),
        record("peaks", 32, PEAKS | died | {"reserved_after": [], "error": "CUDA out of memory"}),
        record("peaks", 32, PEAKS | {"total_nvml": -1, "used_after": [0, 0, 0, 0]}),
    ]
    observations = read_measured_records(put(tmp_path, peaks="".join(lines))).observations
    nothing = replace(SEEN, process_peak_bytes=None, context_after_bytes=None)
    assert observations == (
        replace(SEEN, process_peak_bytes=None, retries=1),
        replace(nothing, end_allocated_bytes=None, oom=True, retries=2),
        replace(nothing, context_before_bytes=None),
    )


def test_the_options_of_a_record_are_those_of_a_job(tmp_path: Path) -> None:
    """Optimizer, implementation, mode, zero_grad, allocator options and the script's own models."""
    lines = [
        record("peaks", 8, PEAKS, optimizer="adamw", impl="fused", zero_grad="before-backward"),
        record("peaks", 8, PEAKS, mode="infer", benchmark=True, alloc_conf="expandable_segments:True"),
        record("peaks", 8, PEAKS, model="local:cnn", kwargs={}),
        record("peaks", 2, PEAKS, model="monai:unetr", kwargs={}, inp="1x64x64x64", target="2x64x64x64"),
    ]
    observations = read_measured_records(put(tmp_path, peaks="".join(lines))).observations
    job = observations[0].job
    assert (job.loop.optimizer, job.loop.optimizer_impl) == (Optimizer.ADAMW, OptimizerImpl.FUSED)
    assert job.loop.zero_grad is ZeroGrad.BEFORE_BACKWARD
    assert (observations[1].job.loop.mode, observations[1].job.samples.target) == (Mode.INFER, None)
    assert observations[1].settings == Settings(alloc_conf="expandable_segments:True")
    assert [one.job.environment.cudnn_benchmark for one in observations] == [False, True, False, False]
    assert observations[1].about == "the target was on the device too"
    assert observations[2].job.model.name == "zoo:CNN"
    assert dict(observations[3].job.model.args)["img_size"] == (64, 64, 64)


def test_every_probe_of_a_limit_is_an_observation(tmp_path: Path) -> None:
    """A limit is what its probes show: which batch lived under the cap and which died."""
    records = read_measured_records(put(tmp_path, limits=record("limits", 24, LIMITS))).observations
    assert [(one.batch, one.oom, one.retries, one.peak_reserved_bytes) for one in records] == [
        (40, False, 3, 8 * MIB),
        (41, True, 1, 6 * MIB),
    ]
    assert {one.settings.allocator_cap_bytes for one in records} == {24 * 1024 * MIB}


def test_a_history_is_read_whole_and_can_be_replayed(tmp_path: Path) -> None:
    """Actions, addresses and sizes arrive; the script's marks become the loop's phases."""
    (records,) = read_measured_records(put(tmp_path, history=record("history", 32, HISTORY))).histories
    assert (records.job, records.batch) == (OURS.replace(steps=3), 32)
    assert records.history.events == tuple(HistoryEvent(*event) for event in HISTORY["events"])
    assert records.history.marks == (
        HistoryMark(0, 0, Phase.SETUP),
        HistoryMark(1, 1, Phase.FORWARD),
        HistoryMark(2, 1, Phase.BACKWARD),
        HistoryMark(2, 1, Phase.OPTIMIZER),
    )
    check = check_history(records.history)
    assert (check.difference, check.allocations) == (None, 2)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"model": "hf:bert"}, "hf:bert: the planner has no such model"),
        ({"model": "local:lstm"}, "local:lstm: the planner has no such model"),
    ],
)
def test_records_that_no_job_expresses_are_skipped_with_a_reason(
    tmp_path: Path, what: dict[str, object], reason: str
) -> None:
    """The other records are read; this one is named by file, line and reason."""
    text = record("peaks", 32, PEAKS) + record("peaks", 32, PEAKS, **what)
    records = read_measured_records(put(tmp_path, peaks=text))
    assert records.observations == (SEEN,)
    assert records.skipped == (SkippedRecord("peaks.jsonl", 2, reason),)


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ({"precision": "amp-bf16"}, {"precision": Precision.AMP_BF16}),
        ({"precision": "amp-fp16"}, {"precision": Precision.AMP_FP16, "grad_scaler": True}),
        (
            {"precision": "amp-fp16", "mode": "infer"},
            {"precision": Precision.AMP_FP16, "mode": Mode.INFER, "target": None},
        ),
        (
            {"precision": "bf16", "memory_format": "channels_last"},
            {"precision": Precision.BF16, "memory_format": MemoryFormat.CHANNELS_LAST},
        ),
        ({"benchmark": True}, {"cudnn_benchmark": True}),
    ],
)
def test_precision_and_layout_become_options_of_the_job(
    tmp_path: Path, what: dict[str, object], fields: dict[str, Any]
) -> None:
    """measure.py scales the gradients in float16 autocast, where there are gradients."""
    (records,) = read_measured_records(put(tmp_path, peaks=record("peaks", 32, PEAKS, **what))).observations
    assert records.job == OURS.replace(**fields)


def test_a_last_line_that_a_killed_run_left_is_set_aside(tmp_path: Path) -> None:
    """Cut text and a cut gzip member cost only themselves."""
    put(tmp_path, peaks=record("peaks", 32, PEAKS) + '{"key": "k', history=record("history", 32, HISTORY) * 2)
    packed = tmp_path / "history.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    records = read_measured_records(tmp_path)
    assert (len(records.observations), len(records.histories)) == (1, 1)
    assert records.skipped == (
        SkippedRecord("peaks.jsonl", 2, "the line is cut short"),
        SkippedRecord("history.jsonl.gz", 2, "the line is cut short"),
    )


def test_records_are_taken_over_into_a_folder_of_calibrations(tmp_path: Path) -> None:
    """Runs and histories become files, runs without a cap a calibration, and skipped records are listed."""
    source, out = tmp_path / "records", tmp_path / "out"
    source.mkdir()
    runs = [record("peaks", batch, PEAKS) for batch in (16, 32)]
    lines: list[str] = []
    put(
        source,
        peaks="".join(runs) + record("peaks", 32, PEAKS, model="hf:bert"),
        limits=record("limits", 24, LIMITS),
        history=record("history", 32, HISTORY),
    )
    result = import_records(source, out, lines.append)
    (calibration,), failures = result.calibrations, result.failures
    assert failures == ()
    assert lines[0] == "set aside: peaks.jsonl line 3: hf:bert: the planner has no such model"
    assert [point.observation.batch for point in calibration.points] == [16, 32]
    stored = calibration.points[1].observation  # with the name of what answers for its convolutions
    assert replace(stored, job=SEEN.job) == SEEN
    assert stored.job == SEEN.job.replace(cudnn="stored")
    assert isinstance(calibration.fit, NoFit)
    assert sorted(run.batch for run in map(load_observation, (out / "runs").glob("*.json"))) == [
        16,
        32,
        40,
        41,
    ]
    (history,) = (out / "runs").glob("*.history.json.gz")
    assert check_history(load_history(history)).allocations == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("peaks", "{}\n", "line 1: missing job; remove the line"),
        ("peaks", "nonsense\n", "line 1: JSON is malformed"),
        ("peaks", record("peaks", 32, {"oom": True}), "line 1: result: missing retries"),
        (
            "peaks",
            record("peaks", 32, PEAKS | {"oom": 1}),
            "line 1: result.oom: expected true or false",
        ),
        ("peaks", record("peaks", 32, PEAKS, inp=3), "line 1: job.inp: expected a string, got 3"),
        (
            "peaks",
            record("peaks", 32, PEAKS, optimizer="lion"),
            "line 1: job.optimizer: expected one of sgd",
        ),
        ("limits", record("limits", 24, LIMITS | {"probes": [[1, True]]}), "line 1: result.probes[0]: "),
        (
            "history",
            record("history", 2, HISTORY | {"events": [["jump", 1, 2]]}),
            "line 1: unknown action",
        ),
    ],
)
def test_a_broken_record_names_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    """One line with the file and the number, whatever is wrong."""
    put(tmp_path, **{name: text})
    with pytest.raises(DataFileError) as error:
        read_measured_records(tmp_path)
    assert words in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": []}, "capability: expected a list of 2"),
        ({"gpu": None}, "gpu: expected a string, got null"),
    ],
)
def test_records_need_to_know_their_gpu(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """A dry run of the script measured nothing, and a folder without a GPU's name is of no use."""
    with pytest.raises(DataFileError, match=words):
        read_measured_records(put(tmp_path, MACHINE | change))
    (tmp_path / "versions.json").unlink()
    with pytest.raises(DataFileError, match=r"versions\.json: cannot be read"):
        read_measured_records(tmp_path)
