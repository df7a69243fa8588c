"""Rows of the accuracy report from the seeds and from single well-described points.

ViT-L/16 and bert-large: `benchmarks/published/points.csv` (its README names origins and loops). They ran
with a torch of their time. Column `installed` holds the loop as today's torch runs it, `planner` the same
with what is known of that version: for bert-large, that torch 1.10's softmax saved its input
(pytorch_1_10.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.accuracy.ablations import SCRATCH_TERMS, peaks, variants, without
from benchmarks.accuracy.peers import peer_estimates
from benchmarks.accuracy.rows import PEERS, Row, texts
from benchmarks.docs import notebook
from benchmarks.published.allocator import PUBLISHED, replay_published
from benchmarks.rows import read_lines
from planner.api.compare import compare
from planner.capture.session import record
from planner.hardware.device import MIB
from planner.hardware.likeness import kind_of
from planner.hardware.residuals import RunKind
from planner.jobs import STORED, Job, parse_tensor_spec, resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.published import load_measured
from planner.planning.process.file import find_process_file, read_process
from planner.program.events import Trace

NOTEBOOK, THREAD, VIT_L, BERT = "the seed's notebook", "the forum thread", "ViT-L/16", "bert-large"
T4 = "a T4"
POINTS = Path(__file__).parents[1] / "published" / "points.csv"
T4_RUNS = POINTS.with_name("t4_torch211.csv")
# Torch 2.11 ran, whose allocator takes the free block of the lowest address among those of equal size. Where
# new segments have rising addresses, as on a T4 (docs/emulator.md), that is the oldest one, as in 2.13.
T4_ORDER = "2.13"
Peers = Callable[[Job, int], dict[str, float]]

# An empty context on the same machine, measured beside the runs: the figures hold it.
BERT_CONTEXT_MIB = 1343
BERT_ARGS = (
    ("hidden_size", 1024),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 16),
    ("intermediate_size", 4096),
    ("attn_implementation", "eager"),  # transformers of that time had no other
)
BERT_INPUTS = ("input_ids=512:int64", "attention_mask=512:int64", "labels=scalar:int64")
VOLTA, VOLTA_SMS = (7, 0), 80
A100, A100_SMS = (8, 0), 108


def notebook_rows() -> list[Row]:
    """Return peak allocated (B) and reserved (C) of each model, replayed as one process.

    Reserved is that of a process bounded by the card as the notebook shows it; the other estimators' figures
    are those of the model alone, to which the memory that earlier models left is added.
    """
    process = read_process(find_process_file("notebook"), load_catalogue()).process
    cap = replace(PUBLISHED, limit_bytes=(notebook.CARD_MIB - round(notebook.outside_mib())) * MIB)
    tracer = cache(notebook.trace_generic)
    free, bound = (notebook.readings_of(process, tracer, limits) for limits in (PUBLISHED, cap))
    reduced = {
        term: notebook.readings_of(process, cache(lambda job, batch, term=term: without(tracer(job, batch), term)), PUBLISHED)  # noqa: E501
        for term in SCRATCH_TERMS
    }  # fmt: skip
    peak, reserved = map(notebook.printed, ("peak_allocated", "reserved"))
    rows = []
    for (model, point), truth in peak.items():
        if point != "end" or model not in notebook.MODELS.values():
            continue
        key = (model, point)
        allocated = {
            name: of[key].peak_allocated_bytes / MIB for name, of in {"planner": free, **reduced}.items()
        }
        common = {"model": model, "case": model, "family": "seed", "gpu": "24 GB, unknown"}
        batch = load_catalogue()[model].batch
        estimates = texts(allocated | _seed_peers(model, batch))
        rows.append(Row(NOTEBOOK, "B", batch=batch, truth=f"{truth}", estimates=estimates, **common))
        reserved_estimates = {
            "planner": (bound[key].reserved_bytes or 0) / MIB,
            "no_retries": (free[key].reserved_bytes or 0) / MIB,
        }
        reserved_estimates["allocated"] = allocated["planner"]
        estimates = texts(reserved_estimates)
        rows.append(Row(NOTEBOOK, "C", batch=batch, truth=f"{reserved[key]}", estimates=estimates, **common))
    return rows


def _seed_peers(model: str, batch: int) -> dict[str, float]:
    """Return other estimators' figures with the memory that earlier models left."""
    sizes = {row.key: row.size_bytes / MIB for row in compare(model, batch).comparison.rows}
    resident = resident_mib(model, batch)
    return {name: size + resident for name in PEERS if (size := sizes.get(name)) is not None}


@cache
def resident_mib(model: str, batch: int) -> float:
    """Return the memory that earlier models of the notebook left, in MiB."""
    measured = compare(model, batch).comparison.measured
    return 0 if measured is None else measured.resident_bytes / MIB


def thread_rows() -> list[Row]:
    """Return the memory allocated after a forward pass, and its peak."""
    catalogue = load_catalogue()
    rows = []
    for figure in load_measured().figures:
        is_mine = "forum" in figure.source.title and figure.point == "end" and figure.model in catalogue
        if not is_mine or figure.kind not in ("allocated", "peak_allocated"):
            continue
        entry = catalogue[figure.model]
        trace = notebook.trace_generic(entry.job, figure.batch)
        run = replay_published(trace, figure.batch)
        is_peak = figure.kind == "peak_allocated"
        size = run.peak_allocated_bytes if is_peak else run.end_allocated_bytes
        note = (
            "its torch saved ReLU's input, today's saves the result" if figure.model == "basic_unet" else ""
        )
        case = f"{figure.model}, {'peak' if is_peak else 'after the forward pass'}"
        truth = f"{figure.quantity.size_bytes / MIB}"
        estimates = texts({"planner": size / MIB})
        rows.append(
            Row(THREAD, "B", figure.model, case, "seed", "unknown", figure.batch, truth, estimates, note=note)
        )
    return rows


def point_rows() -> list[Row]:
    """Return the rows of ViT-L/16 (C) and bert-large (D)."""
    lines = [line for line in read_lines(POINTS) if line["task"] == "train"]
    return [row for line in lines if (row := (_vit_l if "vit" in line["model"] else _bert)(line)) is not None]


def t4_rows() -> list[Row]:
    """Return peak allocated (B) and reserved (C) on a T4, to the byte."""
    return [row for line in read_lines(T4_RUNS) for row in _t4(line)]


def _t4(line: Mapping[str, str]) -> Iterator[Row]:
    """Replay the loop that was measured, which lets the output of a step go before the next."""
    from benchmarks.emulated.t4_static import job_of, plan

    model, batch = line["model"], int(line["batch"])
    run = {"model": model, "batch": batch, "size": int(line["length_or_size"])}, STORED, T4_ORDER
    figures, (job, build) = plan(*run), job_of(*run)
    case = f"{model} {batch} x {line['length_or_size']}"
    family = "cnn" if model == "resnet50" else "transformer"
    for layer, counter in (("B", "allocated"), ("C", "reserved"), ("D", "process")):
        measured = int(line[f"peak_{'allocated' if layer == 'B' else 'reserved'}_bytes"])
        measured += int(line["context_bytes"]) if layer == "D" else 0
        peers = peer_estimates(job, batch, build) if layer == "B" else {}  # they know no allocator
        estimates = texts({"planner": figures[counter] / MIB, **peers})
        truth, kind = f"{measured / MIB:.2f}", RunKind.FIXED.value
        yield Row(T4, layer, model, case, family, "T4 16GB", batch, truth, estimates, kind=kind)


def _vit_l(line: Mapping[str, str]) -> Row:
    """Replay the authors' loop: an evaluation pass in each epoch, zero_grad after the forward."""
    options: dict[str, Any] = {"optimizer": "sgd" if line["optimizer"].startswith("SGD") else "adam"}
    options["precision"] = {"fp32": "fp32", "amp_fp16": "amp-fp16", "pure_bf16": "bf16"}[line["dtype_amp"]]
    accumulate = re.search(r"accumulation (\d+)", line["extra"])
    options["accumulate"] = int(accumulate[1]) if accumulate else 1
    job = resolve_job(
        "torchvision:vit_l_16", {}, model_args=[("num_classes", 10)], steps=3,
        zero_grad="before-backward", evaluate=True, **options,
    )  # fmt: skip
    batch = int(line["batch"])
    trace = record(job, batch, A100, sm_count=A100_SMS)
    kind = f"{line['extra'].split(',')[0].split(' (')[0]}, {line['dtype_amp']}"
    case = f"vit_l_16 {options['optimizer']} {batch} ({kind})"
    note = ""
    if options["precision"] != "fp32":
        note = "inferred: unfinished torch 2.1 of June 2023 may have taken more in attention and Adam"
    return _point(
        VIT_L,
        "C",
        "vit_l_16",
        case,
        "A100",
        batch,
        line["value_mib"],
        {"planner": trace, "installed": trace},
        note,
        kind=kind_of(job, trace),
    )  # noqa: E501


def _bert(line: Mapping[str, str]) -> Row | None:
    """Replay Trainer's loop: gradients clipped, filled with zeros; the optimizer a loop over parameters."""
    from benchmarks.published.shims.pytorch_1_10 import as_torch_1_10

    optimizer = {"adamw_hf": "adamw", "adafactor": "adafactor"}.get(line["optimizer"])
    if optimizer is None:
        return None  # bitsandbytes' 8-bit Adam is no optimizer of the planner
    options: dict[str, Any] = {"optimizer": optimizer, "clip_gradients": "norm", "keep_grads": True}
    options["precision"] = "amp-fp16" if line["dtype_amp"].startswith("amp") else "fp32"
    if "grad_accum=4" in line["extra"]:
        options["accumulate"] = 4
    if "checkpointing" in line["extra"]:
        options["checkpoint"] = "blocks"
    job = resolve_job(
        "hf:BertForSequenceClassification", {}, model_args=list(BERT_ARGS), loss="output", steps=3,
        inputs=[parse_tensor_spec(text) for text in BERT_INPUTS],
        optimizer_impl="for-loop", zero_grad="after-step", lengths="fixed", **options,
    )  # fmt: skip
    batch = int(line["batch"])
    traces: dict[str, Trace] = {}
    for name, version in (("planner", as_torch_1_10), ("installed", nullcontext)):
        with version():
            traces[name] = record(job, batch, VOLTA, sm_count=VOLTA_SMS)
    recipe = ", ".join(filter(None, (line["dtype_amp"], line["extra"])))
    case = f"bert-large {line['optimizer']} {batch} ({recipe})"
    return _point(
        BERT,
        "D",
        "bert-large",
        case,
        "V100 16GB",
        batch,
        line["value_mib"],
        traces,
        "",
        BERT_CONTEXT_MIB,
        kind_of(job, traces["planner"]),
    )  # noqa: E501


def _point(
    source: str, layer: str, model: str, case: str, gpu: str, batch: int, truth: str,
    traces: Mapping[str, Trace], note: str, context_mib: float = 0, kind: str = "",
) -> Row:  # fmt: skip
    sizes = peaks(variants(traces["planner"], batch))
    del sizes["loaded_later"]
    sizes["installed"] = replay_published(traces["installed"], batch).peak_reserved_bytes / MIB
    estimates = texts({name: size + context_mib for name, size in sizes.items()})
    return Row(source, layer, model, case, "transformer", gpu, batch, truth, estimates, note=note, kind=kind)
