"""Write others.csv: what kitsune, fitcheck and accelerate answer for truths of accuracy.csv, or why not.

    pip install --no-deps --target DIR torch-kitsune==0.7.0 fitcheck-llm==0.3.1 torch-preflight==0.5.0 libcst
    PYTHONPATH=DIR python -m benchmarks.accuracy.others

kitsune is asked by `predict_memory` with models on meta, as it loads those of transformers by itself, for one
and for two samples, between which its figures are linear. fitcheck is asked by `estimate`, with the
config.json that it would fetch; accelerate by the calculation behind `accelerate estimate-memory`, which
knows no batch.
"""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from io import StringIO
from typing import Any

from torch import device, nn

from benchmarks.accuracy import preflight
from benchmarks.accuracy.preflight import Question, size_of_truth
from benchmarks.accuracy.rows import TABLE, mib_text, read_rows
from benchmarks.published.transformers import CONFIGS
from benchmarks.rows import write_lines
from planner.hardware.device import MIB

OTHERS_TABLE = TABLE.with_name("others.csv")
VERSIONS = {"torch-kitsune": "0.7.0", "fitcheck-llm": "0.3.1", "accelerate": "1.15.0"}
COLUMNS = ("source", "layer", "case", "tool", "mib", "reason")
_DTYPES = {"fp32": "float32", "amp": "bfloat16", "pure-bf16": "bfloat16", "bf16": "bfloat16"}
NAME_ALONE = "the model is known by a name alone"
_LANGUAGE = "transformers_model"  # the constructor of a question about a language model


class RefusalError(Exception):
    """A tool has no answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A tool's peak, with the parts that some truths do not hold, in MiB."""

    total_mib: float
    context_mib: float | None = None  # None: the tool counts no CUDA context
    slack_mib: float = 0.0  # of the allocator


@cache
def build(constructor: str, arguments: str, where: str) -> nn.Module:
    """Build the model of a question on `meta` or `cpu`; arguments as JSON."""
    given = json.loads(arguments)
    if given.get("model") == "t5-small":
        given["kind"] = "AutoModelForSeq2SeqLM"
    with device(where):
        model: nn.Module = getattr(preflight, constructor)(**given)
    return model


def _model(question: Question, where: str) -> nn.Module:
    if not question.constructor:
        raise RefusalError(NAME_ALONE)
    return build(question.constructor, json.dumps(dict(question.arguments or {})), where)


def ask_kitsune(question: Question) -> Answer:
    """Ask kitsune, with the model on meta."""
    options = question.options
    if not question.constructor:
        raise RefusalError(NAME_ALONE)
    is_text, side = question.constructor == _LANGUAGE, options.get("image-size")
    shape = (options["seq-len"],) if is_text else (3, side, side)
    key = (question.constructor, json.dumps(dict(question.arguments or {})), "meta")
    recipe = (_DTYPES[str(options["dtype"])], str(options["optimizer"]).replace("-", "_"))
    (one, slack_of_one), (two, slack_of_two) = (_kitsune(key, shape, batch, *recipe) for batch in (1, 2))
    more = int(str(options["batch-size"])) - 1
    slack = slack_of_one + more * (slack_of_two - slack_of_one)
    return Answer((one + more * (two - one)) / MIB, None, slack / MIB)


@cache
def _kitsune(
    key: tuple[str, str, str], shape: tuple[int, ...], batch: int, dtype: str, optimizer: str
) -> tuple[int, int]:
    """Return kitsune's total and its share for the allocator, in bytes."""
    from kitsune.predict import predict_memory  # type: ignore[import-not-found, unused-ignore]

    result = predict_memory(build(*key), shape, batch, dtype, optimizer, training=True)
    return result.total_bytes, result.overhead_bytes


def ask_fitcheck(question: Question) -> Answer:
    """Ask fitcheck for full fine-tuning, with the count of parameters that a hub would report."""
    from fitcheck import (  # type: ignore[import-not-found, unused-ignore]
        ModelConfig,
        config_parser,
        estimator,
        get_gpu,
    )

    if question.constructor != _LANGUAGE:
        raise RefusalError("language models alone: the model has no config.json")
    name = str((question.arguments or {})["model"])
    raw = _published_config(name)
    counted = sum(parameter.numel() for parameter in _model(question, "meta").parameters())
    try:
        with redirect_stderr(StringIO()):
            config_parser._reject_unsupported(raw, name)
            fields = config_parser._parse_fields(raw)
            derived = config_parser._count_params(fields)
            count = config_parser._reconcile_param_count(name, counted, derived)
    except ValueError as error:
        raise RefusalError(str(error).partition(" (")[0].partition(". ")[0]) from error
    config = ModelConfig(name, count, **{key: getattr(fields, key) for key in fields.__dataclass_fields__})
    options = question.options
    training = estimator.TrainingConfig(
        precision={"fp32": "fp32"}.get(str(options["dtype"]), "bf16"), optimizer=str(options["optimizer"]),
        batch_size=options["batch-size"], seq_len=options["seq-len"], lora_rank=None, flash_attn=True,
    )  # fmt: skip
    report = estimator.estimate(config, training, get_gpu("t4"))
    return Answer(report.total_mib, report.overhead_mib)


def _published_config(name: str) -> dict[str, Any]:
    """Return config.json as the model's authors publish it, or as transformers' defaults have it."""
    file = CONFIGS / name / "config.json"
    if file.exists():
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return raw
    from planner.capture.models.registry import import_transformers

    defaults: dict[str, Any] = import_transformers().AutoConfig.for_model(name).to_dict()
    return defaults


def ask_accelerate(question: Question) -> Answer:
    """Ask for `Training using Adam` of `accelerate estimate-memory`, without its search of a hub."""
    model = _model(question, "meta")  # makes torchvision importable, which accelerate needs
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(size, _DTYPES[str(question.options["dtype"])])
    return Answer(max(usage.values()) / MIB)


ASK: dict[str, Callable[[Question], Answer]] = {
    "kitsune": ask_kitsune, "fitcheck": ask_fitcheck, "accelerate": ask_accelerate
}  # fmt: skip


def main() -> None:
    """Ask, and write the answers."""
    for name, wanted in VERSIONS.items():
        if version(name) != wanted:
            sys.exit(f"{name} {version(name)}: the page names {wanted}; install that")
    rows = {row.key: row for row in read_rows()}
    lines = []
    for question in preflight.questions():
        for tool, ask in ASK.items():
            row, size, reason = rows[question.key], "", ""
            try:
                answer = ask(question)
                size = mib_text(size_of_truth(row, answer.total_mib, answer.context_mib, answer.slack_mib))
            except RefusalError as error:
                reason = str(error)
            lines.append((*question.key, tool, size, reason))
    write_lines(OTHERS_TABLE, COLUMNS, lines)


if __name__ == "__main__":
    main()
