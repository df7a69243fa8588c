"""Write preflight.csv: torch-preflight's estimates for truths of accuracy.csv.

    pip install --no-deps --target DIR torch-preflight==0.5.0 libcst
    PYTHONPATH=DIR python -m benchmarks.accuracy.preflight

torch-preflight (github.com/highwaterlabs/torch-preflight, MIT; once torch-guard) has two ways to a figure:
the name of a model in its snapshot of architectures, and a model's constructor, which it runs forward on
meta and whose saved tensors it counts. Both are asked through its own command line. It projects the peak of
the process; each truth takes off what it does not hold.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from typing import Any

from torch import nn

from benchmarks.accuracy.rows import PREFLIGHT, PREFLIGHT_TABLE, Row, mib_text, read_rows
from benchmarks.accuracy.rows_points import (
    BERT,
    BERT_CONTEXT_MIB,
    NOTEBOOK,
    POINTS,
    T4,
    T4_RUNS,
    VIT_L,
    resident_mib,
)
from benchmarks.accuracy.rows_published import CNNS, TRANSFORMERS, xmem_tasks
from benchmarks.published.outcomes import job_of as cnn_job
from benchmarks.published.transformers import CONFIGS
from benchmarks.rows import read_lines, write_lines
from planner.hardware.device import MIB
from planner.jobs.files.catalogue import load_catalogue

VERSION = "0.5.0"
T4_CONTEXT_MIB = 141_426_688 / MIB  # as measured in that process
BY_NAME, ON_META = PREFLIGHT
_PRECISIONS = {"fp32": "fp32", "amp_fp16": "amp", "pure_bf16": "pure-bf16"}
_OPTIMIZERS = {"adamw_hf": "adamw", "momentum": "sgd-momentum", "sgd(momentum=0)": "sgd"}


@dataclass(frozen=True, slots=True)
class Question:
    """One truth as torch-preflight is asked for it."""

    key: tuple[str, str, str]  # of the row
    options: Mapping[str, object]  # of its command line
    name: str = ""  # in its snapshot; "" if the model is not there
    constructor: str = ""  # a function of this module
    arguments: Mapping[str, object] | None = None


def torchvision_model(name: str, **keywords: Any) -> nn.Module:
    """Build a model of torchvision."""
    from planner.capture.models.torchvision.shim import prepare_torchvision

    prepare_torchvision()
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, **keywords)
    return model


def transformers_model(model: str, kind: str = "AutoModelForCausalLM") -> nn.Module:
    """Build a model of transformers from a folder of benchmarks/published/hf, or from a class's defaults."""
    from planner.capture.models.registry import import_transformers

    library = import_transformers()
    if (CONFIGS / model).exists():
        config = library.AutoConfig.from_pretrained(CONFIGS / model)
    else:
        config = library.AutoConfig.for_model(model)
    built: nn.Module = getattr(library, kind).from_config(config)
    return built


def _xmem() -> Iterator[Question]:
    """Yield the published runs; a sequence is 128 tokens, an image as the job has it."""
    rows = {(row.source, line_of(row)): row for row in read_rows() if row.source in (CNNS, TRANSFORMERS)}
    for source in (CNNS, TRANSFORMERS):
        for task in xmem_tasks(source):
            row, line = rows.get((source, task.number)), task.line
            if row is None:
                continue
            options = {"dtype": "fp32", "optimizer": line["optimizer"].lower(), "batch-size": row.batch}
            name = line["model"].split("(")[0]
            if source == CNNS:
                job = cnn_job(line)
                arguments = {"name": job.model.name.removeprefix("torchvision:"), **dict(job.model.args)}
                options["image-size"] = job.samples.inputs[0].shape[-1]
                yield Question(row.key, options, _known(name), "torchvision_model", arguments)
            else:
                options["seq-len"] = 128
                yield Question(
                    row.key,
                    options,
                    _known(name),
                    "transformers_model",
                    {"model": name.replace("/", "--")},
                )


def line_of(row: Row) -> int:
    """Return the line of the published table that a row is of."""
    match = re.search(r"line (\d+)\)", row.case)
    return int(match[1]) if match else 0


def _known(name: str) -> str:
    """Return the name if the snapshot has it."""
    from torch_preflight.vram import archdb  # type: ignore[import-not-found, unused-ignore]

    profile = archdb.resolve(name)
    return name if profile is not None and profile.resolved else ""


def _t4() -> Iterator[Question]:
    kinds = {
        "gpt2": ("gpt2", "AutoModelForCausalLM"),
        "bert-base-uncased": ("bert", "AutoModel"),
        "distilbert-base-uncased": ("distilbert", "AutoModel"),
    }
    for line in read_lines(T4_RUNS):
        model, batch, size = line["model"], int(line["batch"]), int(line["length_or_size"])
        options = {"dtype": "amp", "optimizer": "adamw", "batch-size": batch, "gpu": "t4"}
        key = (T4, "D", f"{model} {batch} x {size}")
        if model == "resnet50":
            options["image-size"] = size
            yield Question(key, options, _known(model), "torchvision_model", {"name": model})
        else:
            options["seq-len"] = size
            arguments = dict(zip(("model", "kind"), kinds[model], strict=True))
            yield Question(key, options, _known(model), "transformers_model", arguments)


def _points() -> Iterator[Question]:
    """Yield ViT-L/16 and bert-large, in the order of their rows."""
    rows = {source: [row for row in read_rows() if row.source == source] for source in (VIT_L, BERT)}
    lines = [line for line in read_lines(POINTS) if line["task"] == "train"]
    lines = [line for line in lines if "8bit" not in line["optimizer"]]
    for line in lines:
        optimizer = line["optimizer"].lower()
        options = {
            "dtype": _PRECISIONS[line["dtype_amp"]],
            "optimizer": _OPTIMIZERS.get(optimizer, optimizer),
            "batch-size": int(line["batch"]),
        }
        if "vit" in line["model"]:
            row = rows[VIT_L].pop(0)
            options["image-size"] = 224
            arguments = {"name": "vit_l_16", "num_classes": 10}
            yield Question(row.key, options, "", "torchvision_model", arguments)
        else:
            row = rows[BERT].pop(0)
            options["seq-len"] = 512
            if "checkpointing" in line["extra"]:
                options["checkpointing"] = True
            yield Question(row.key, options, _known("bert-large-uncased"))


def _notebook() -> Iterator[Question]:
    catalogue = load_catalogue()
    for model in ("vgg16_bn", "resnet50", "vit_b_16"):
        job = catalogue[model].job
        options = {
            "dtype": job.loop.precision.value,
            "optimizer": _OPTIMIZERS.get(job.loop.optimizer.value, job.loop.optimizer.value),
            "batch-size": catalogue[model].batch,
            "image-size": job.samples.inputs[0].shape[-1],
        }
        arguments = {"name": model, **dict(job.model.args)}
        yield Question((NOTEBOOK, "B", model), options, _known(model), "torchvision_model", arguments)


def ask(options: Mapping[str, object], model: str, arguments: Mapping[str, object]) -> dict[str, Any] | None:
    """Return torch-preflight's report; None if it does not know the model or its activations."""
    from torch_preflight.cli import main  # type: ignore[import-not-found, unused-ignore]

    options = {"gpu": "a100-80gb", **options}
    words = ["estimate", "--model", model, "--format", "json"]
    for name, value in arguments.items():
        words += ["--model-args", f"{name}={value}"]
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    text = StringIO()
    with redirect_stdout(text):
        main(words)
    report: dict[str, Any] = json.loads(text.getvalue())
    return report if report["resolved"] and report["breakdown"]["activations"] else None


def size_of_truth(row: Row, total_mib: float, context_mib: float | None, slack_mib: float) -> float:
    """Return an estimator's projected peak as the row's truth counts it, in MiB.

    `context_mib` is its CUDA context, None where it counts none, and `slack_mib` what it adds for the
    allocator.
    """
    if row.source == T4:
        return total_mib if context_mib is not None else total_mib + T4_CONTEXT_MIB
    total_mib -= context_mib or 0.0
    if row.source == BERT:
        return total_mib + BERT_CONTEXT_MIB
    if row.source == CNNS:  # less what the first sample holds
        return total_mib - (float(row.estimates["no_set_up"]) - float(row.estimates["planner"]))
    if row.source == NOTEBOOK:
        return total_mib - slack_mib + resident_mib(row.model, row.batch)
    return total_mib


def _answers(row: Row, question: Question) -> Iterator[tuple[str, str]]:
    ways = {BY_NAME: (question.name, {}), ON_META: (question.constructor, question.arguments or {})}
    for way, (model, arguments) in ways.items():
        if not model:
            continue
        model = f"{__spec__.name}:{model}" if way == ON_META else model
        report = ask(question.options, model, arguments)
        if report is not None:
            parts = {name: size / MIB for name, size in report["breakdown"].items()}
            total, context, slack = report["total_bytes"] / MIB, parts["CUDA_context"], parts["fragmentation"]
            yield way, mib_text(size_of_truth(row, total, context, slack))


def questions() -> Iterator[Question]:
    """Yield every truth that other estimators are asked for."""
    yield from _xmem()
    yield from _t4()
    yield from _points()
    yield from _notebook()


def main() -> None:
    """Ask, and write the answers."""
    if version("torch-preflight") != VERSION:
        sys.exit(f"torch-preflight {version('torch-preflight')}: the page names {VERSION}; install that")
    rows = {row.key: row for row in read_rows()}
    lines = []
    for question in questions():
        answers = dict(_answers(rows[question.key], question))
        lines.append((*question.key, *(answers.get(name, "") for name in PREFLIGHT)))
    write_lines(PREFLIGHT_TABLE, ("source", "layer", "case", *PREFLIGHT), lines)


if __name__ == "__main__":
    main()
