"""Write seconds.csv: how long this planner and other tools take for an answer, in one run on one machine.

    pip install --no-deps --target DIR torch-kitsune==0.7.0 torch-preflight==0.5.0 libcst
    PYTHONPATH=DIR python -m benchmarks.accuracy.seconds

One of each of xMem's CNNs is asked for three times, in one process, after an answer for another model, so
that imports do not count; the model's building does. Each tool counts as it is asked for the ledger, the
planner without its cache.
"""

import json
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

import planner
from benchmarks.accuracy import preflight
from benchmarks.accuracy.others import _kitsune, ask_accelerate, ask_kitsune, build
from benchmarks.accuracy.preflight import BY_NAME, ON_META, Question
from benchmarks.accuracy.rows import TABLE
from benchmarks.accuracy.rows_published import CNNS
from benchmarks.rows import write_lines
from planner.planning.estimators import Method

SECONDS_TABLE = TABLE.with_name("seconds.csv")
_TIMES = 3
_PLANNERS = {"planner": Method.TRACE, "memtracker": Method.MEMTRACKER}


def main() -> None:
    """Ask, and write the times."""
    asked: dict[str, Question] = {}
    for question in preflight.questions():
        if question.key[0] == CNNS:
            asked.setdefault(str((question.arguments or {})["name"]), question)
    first, *questions = asked.values()
    for ask in _tools(first).values():
        ask()
    lines = []
    for question in questions:
        for tool, ask in _tools(question).items():
            lines.append((question.key[2], tool, f"{median(_timed(ask) for _ in range(_TIMES)):.4f}"))
    write_lines(SECONDS_TABLE, ("case", "tool", "seconds"), lines)


def _timed(ask: Callable[[], object]) -> float:
    build.cache_clear()
    _kitsune.cache_clear()
    begin = perf_counter()
    ask()
    return perf_counter() - begin


def _tools(question: Question) -> dict[str, Callable[[], object]]:
    tools: dict[str, Callable[[], object]] = {
        name: partial(_ask_planner, question, method) for name, method in _PLANNERS.items()
    }
    on_meta = f"{preflight.__name__}:{question.constructor}"
    tools[ON_META] = partial(preflight.ask, question.options, on_meta, question.arguments or {})
    if question.name:
        tools[BY_NAME] = partial(preflight.ask, question.options, question.name, {})
    return tools | {
        "kitsune": partial(ask_kitsune, question),
        "accelerate": partial(ask_accelerate, question),
    }


def _ask_planner(question: Question, method: Method) -> object:
    options = question.options
    given: Any = {
        "input": "3x{0}x{0}".format(options["image-size"]),
        "target": "scalar:int64",
        "optimizer": options["optimizer"],
    }
    return planner.estimate(
        partial(_built, question), int(str(options["batch-size"])), method=method.value, **given
    )


def _built(question: Question) -> nn.Module:
    return build(question.constructor, json.dumps(dict(question.arguments or {})), "cpu")


if __name__ == "__main__":
    main()
