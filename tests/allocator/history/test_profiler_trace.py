"""Traces of torch.profiler, in the form that torch 2.13 exports them, as histories of an allocator."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from planner.allocator.history import History, load_profiler_trace
from planner.allocator.history.profiler_trace import is_profiler_trace
from planner.errors import DataFileError
from planner.program import Category

MIB = 2**20
GPU, CPU = 1, 0
MAIN, BACKWARD = 7, 8  # threads


def span(name: str, cat: str, begin: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": begin, "dur": end - begin, "args": {}}


def change(moment: float, mib: int, allocated: int, reserved: int, **others: Any) -> dict[str, Any]:
    """An allocation, or a free if `mib` is below zero; `others` are a thread, and fields of its arguments."""
    thread, name = others.pop("thread", MAIN), others.pop("name", "[memory]")
    fields = {"Bytes": mib * MIB, "Total Allocated": allocated * MIB, "Total Reserved": reserved * MIB}
    args = fields | {"Device Id": 0, "Device Type": GPU, "Addr": 4096} | others
    return {"ph": "i", "cat": "cpu_instant_event", "name": name, "tid": thread, "ts": moment, "args": args}


MODULE = "torch/nn/modules/module.py(1): _call_impl"
EVENTS = [
    change(31, -2, 12, 24, thread=BACKWARD, Addr=2 * MIB),
    span("autograd::engine::evaluate_function: MulBackward0", "cpu_op", 30, 33, BACKWARD),
    span("ProfilerStep#1", "user_annotation", 0, 100),
    span("train.py(3): train", "python_function", 1, 90),
    span(MODULE, "python_function", 2, 20),
    span("nets/model.py(9): forward", "python_function", 3, 19),
    span("torch/nn/functional.py(5): linear", "python_function", 4, 18),
    span("aten::linear", "cpu_op", 5, 17),
    span("aten::addmm", "cpu_op", 6, 16),
    change(10, 4, 14, 24),
    change(12, 1, 1, 1, **{"Device Type": CPU}),
    span("Optimizer.step#SGD.step", "user_annotation", 50, 60),
    span("aten::empty", "cpu_op", 51, 52),
    change(51.5, 6, 18, 30, Addr=8192),
    change(95, -6, 12, 30, Addr=8192),
]
DEVICES = [{"id": 0, "name": "NVIDIA L4", "totalGlobalMem": 2**34}]


def read(folder: Path, events: list[dict[str, Any]], devices: Any = DEVICES) -> History:
    file = folder / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": events}))
    return load_profiler_trace(file)


def test_spans_tell_the_category_of_a_block(tmp_path: Path) -> None:
    """A module's call is an activation, a step of an optimizer its state; the backward pass frees one."""
    history = read(tmp_path, EVENTS)
    found = [history.categories[event.site] for event in history.events if event.action == "alloc"]
    assert found == [Category.ACTIVATION, Category.OPTIMIZER]
    modules = [{**event, "name": event["name"].replace(MODULE, "nn.Module: Net_0")} for event in EVENTS]
    assert read(tmp_path, modules).categories == history.categories


def test_changes_are_events_in_the_order_of_time(tmp_path: Path) -> None:
    """The thread of the backward pass comes between; memory of the CPU is left out; reserved memory grows."""
    history = read(tmp_path, EVENTS)
    assert (history.gpu, history.total_bytes) == ("NVIDIA L4", 2**34)
    assert [(event.action, event.size_bytes // MIB) for event in history.events] == [
        *(("alloc", 4), ("free_completed", 2)),
        *(("segment_alloc", 6), ("alloc", 6), ("free_completed", 6)),
    ]


def test_the_code_is_what_lies_around_a_change(tmp_path: Path) -> None:
    """The outermost operator, and the innermost function that is not torch's or Python's."""
    history = read(tmp_path, EVENTS)
    sites = [history.sites[event.site] for event in history.events if event.site >= 0]
    assert [(site.module, site.op) for site in sites] == [
        ("aten::linear (nets/model.py:9)", "forward"),
        ("MulBackward0", ""),
        ("aten::empty (train.py:3)", "train"),
        ("", ""),
    ]
    plain = read(tmp_path, [event for event in EVENTS if event["cat"] != "python_function"])
    names = [(plain.sites[event.site].module, plain.sites[event.site].op) for event in plain.events]
    assert ("aten::empty", "Optimizer.step#SGD.step") in names


def test_what_is_older_than_the_trace_is_its_start(tmp_path: Path) -> None:
    """Ten MiB were in use before: two are freed in the trace, the rest is one block; others are unused."""
    history = read(tmp_path, EVENTS)
    (segment,) = history.start
    assert [(block.size_bytes // MIB, block.in_use) for block in segment.blocks] == [
        (2, True),
        (8, True),
        (14, False),
    ]
    freed = [event.address for event in history.events if event.action == "free_completed"]
    assert freed[0] == segment.blocks[0].address


def test_the_gpu_whose_request_failed_is_read(tmp_path: Path) -> None:
    """Else the one with the highest peak."""
    other = [change(1, 100, 100, 100, **{"Device Id": 3})]
    assert read(tmp_path, EVENTS + other).gpu == "GPU 3"
    refused = change(96, 64, 12, 30, name="[OutOfMemory]")
    history = read(tmp_path, EVENTS + other + [refused])
    assert history.gpu == "NVIDIA L4"
    assert (history.events[-1].action, history.events[-1].size_bytes) == ("oom", 64 * MIB)


def test_traces_of_torch_before_totals_were_recorded(tmp_path: Path) -> None:
    """Their operators have another category, and the memory before them is not known."""
    args = {"Device Type": GPU, "Device Id": 0, "Addr": 4096, "Bytes": 512}
    old = [span("aten::relu", "Operator", 0, 2), change(1, 0, 0, 0) | {"args": args}]
    history = read(tmp_path, old, [])
    assert (history.gpu, history.start) == ("GPU 0", ())
    assert [(event.action, event.size_bytes) for event in history.events] == [("alloc", 512)]
    assert history.sites[history.events[0].site].module == "aten::relu"


@pytest.mark.parametrize("content", [b'{"traceEvents": 3}', b'{"schemaVersion": 1}', b'{"traceEvents": ['])
def test_broken_traces_are_refused(tmp_path: Path, content: bytes) -> None:
    """In one line that says what to do."""
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(DataFileError, match="broken trace of torch.profiler: .*; export it again"):
        load_profiler_trace(file)


def test_a_trace_that_torch_exports_is_recognised(tmp_path: Path) -> None:
    """A trace of the CPU alone has no memory of a GPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.ones(10) @ torch.ones(10)
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    content = file.read_bytes()
    assert is_profiler_trace(content[:4096])
    assert is_profiler_trace(gzip.compress(content)[:4096])
    assert not is_profiler_trace(b'{"emulated": true}')
    assert not is_profiler_trace(gzip.compress(b'{"events": {}}'))
    with pytest.raises(DataFileError, match=r"no memory of a GPU: .*profile_memory=True"):
        load_profiler_trace(file)
