"""Time plans against their imports and other estimators; writes the tables of docs/speed.md.

    python -m benchmarks.speed.plans [--runs 3] [--only models|growth|sweep] [MODEL ...]

Each figure is the median wall time of processes of their own, the columns in turn, so that a busy machine
slows all of them. Columns: the imports alone that a trace of the model cannot do without; `planner max-batch`
traced anew; the same from cached traces for another GPU; MemTracker's one trace under FakeTensorMode, and
torchinfo's summary; one training step on the CPU under torch.profiler with memory, which is what xMem (the
best published estimator from runs) starts from. In brackets: without the imports. A column that cannot run
shows the reason. The sweep is of ten models in five recipes on twenty GPUs, from nothing and with all traces
cached. Progress goes to standard error; the last line gives the load of the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

MODELS = (
    *("torchvision:alexnet", "torchvision:mobilenet_v2", "resnet50", "torchvision:densenet121"),
    *("vit_b_16", "unetr", "bert_base", "gpt2", "llama_8b", "llama_70b"),
)
GPU_MIB, OTHER_GPU_MIB = "80000", "48000"
SERVER_MIB = "1150000"  # eight H200, so that the 70B model fits
CPU_BATCH = 32  # of MemTracker, torchinfo and the profiled step; the planner's answers are of any batch
SMALL_BATCHES = {"unetr": 2, "bert_base": 8, "gpt2": 2, "llama_8b": 1, "llama_70b": 1}
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SHIM = (  # beside a CPU-only torch the registry's torchvision does not import without
    f"import torch; [torch.library.define('torchvision::' + name, '{SCHEMA}') for name in ('nms', 'qnms')]; "
)
IMPORTS = {
    "unetr": "from monai.networks.nets import UNETR",
    "bert_base": "from transformers import BertForSequenceClassification",
    "gpt2": "from transformers import GPT2LMHeadModel",
    "llama_8b": "from transformers import LlamaForCausalLM",
    "llama_70b": "from transformers import LlamaForCausalLM",
}
MOST_PROFILED = 500_000_000  # parameters that a step on the CPU has the memory and the time for
LIMIT_SECONDS = 1800
SWEEP = """
about: ten models in five recipes on twenty GPUs
models: [resnet50, vit_b_16, vgg16_bn, bert_base, gpt2, basic_unet, torchvision:alexnet,
  torchvision:mobilenet_v2, torchvision:densenet121, torchvision:efficientnet_b0]
recipes:
  sgd: {}
  adamw: {optimizer: adamw}
  amp: {optimizer: adamw, precision: amp-fp16}
  checkpointed: {optimizer: adamw, checkpoint: blocks}
  inference: {mode: infer}
gpus: [RTX 2060 6GB, RTX 4060 8GB, RTX 2080 8GB, RTX 3070 8GB, RTX 3080 10GB, RTX 2080 Ti 11GB,
  RTX 4070 12GB, RTX 3060 12GB, 16000, RTX 4080 16GB, RTX 5080 16GB, 20000, RTX 3090 24GB, RTX 4090 24GB,
  32000, 40000, 48000, 80000, 96000, 141000]
"""


# ---- work of a process of its own


def work(kind: str, model: str) -> dict[str, Any]:
    """Do one thing, and return its seconds with and without the imports."""
    start = perf_counter()
    import torch

    from planner.api.request.request import make_job
    from planner.capture.models.registry import construct_model, find_constructor

    job, _, _ = make_job(model, {})
    constructor = find_constructor(job)
    imported = perf_counter()
    batch = SMALL_BATCHES.get(model, CPU_BATCH)
    if kind == "memtracker":
        from planner.planning.estimators.torch_runners.mem_tracker import estimate_by_memtracker

        estimate_by_memtracker(job, batch)
    elif kind == "torchinfo":
        from planner.planning.estimators.torch_runners.layer_table import summarize

        summarize(construct_model(job, constructor), job, batch)
    elif kind == "profiled":
        built = construct_model(job, constructor)
        count = sum(parameter.numel() for parameter in built.parameters())
        if count > MOST_PROFILED:
            return {"why": f"{count / 1e9:.0f}B parameters"}
        imported = _profile_step(job, constructor, batch, torch)
    return {"import": imported - start, "work": perf_counter() - imported}


def _profile_step(job: Any, constructor: Callable[..., Any], batch: int, torch: Any) -> float:

    from planner.capture import LoopRuntime, empty_batch, run_loop
    from planner.capture.loop.optimizers import build_optimizer

    model = constructor(**{key: list(v) if isinstance(v, tuple) else v for key, v in job.model.args})
    optimizer = build_optimizer(job.loop.optimizer, job.loop.optimizer_impl, model.parameters())

    def fetch() -> Any:
        args, kwargs, target = empty_batch(job, batch, "cpu")
        for tensor in (*args, *kwargs.values(), target):
            if tensor is not None:
                tensor.zero_()
        return args, kwargs, target

    start = perf_counter()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run_loop(model, job.replace(steps=1), fetch, optimizer, lambda step, phase: None, LoopRuntime())
    profile.key_averages()
    return start


# ---- measurement


def measured(arguments: list[str], cache: str) -> tuple[float, dict[str, Any]]:
    """Return the wall time of a Python process and the JSON that it prints last."""
    start = perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return LIMIT_SECONDS, {"why": f"over {LIMIT_SECONDS} s"}
    seconds = perf_counter() - start
    if done.returncode not in (0, 1):
        return seconds, {"why": (done.stderr.strip().splitlines() or ["failed"])[-1][:60]}
    lines = done.stdout.strip().splitlines()
    return seconds, json.loads(lines[-1]) if lines else {}


def planned(model: str, mib: str, *more: str) -> list[str]:
    return ["-m", "planner", "max-batch", "--model", model, "--gpu-mib", mib, "--json", *more]


def columns(model: str) -> dict[str, list[str]]:
    """Return the processes of one row."""
    mib, other = (SERVER_MIB, "900000") if model.startswith("llama") else (GPU_MIB, OTHER_GPU_MIB)
    own = [__file__, "--work"]
    return {
        "imports": ["-c", SHIM + IMPORTS.get(model, "import torchvision.models")],
        "cold": planned(model, mib, "--no-cache"),
        "filled": planned(model, mib),
        "cached": planned(model, other),
        "memtracker": [*own, "memtracker", model],
        "torchinfo": [*own, "torchinfo", model],
        "profiled": [*own, "profiled", model],
    }


def print_progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def row(model: str, runs: int) -> dict[str, Any]:
    """Return the medians of one model: wall seconds, and those after the imports."""
    processes: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for number in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            for name, arguments in columns(model).items():
                runs_of = processes.setdefault(name, [])
                if not (runs_of and "why" in runs_of[-1][1]):
                    runs_of.append(measured(arguments, cache))
                    print_progress(f"{model} {name} run {number + 1}: {runs_of[-1][0]:.2f} s")
    medians: dict[str, Any] = {}
    for name, runs_of in processes.items():
        failures = [output["why"] for _, output in runs_of if "why" in output]
        medians[name] = failures[0] if failures else median(seconds for seconds, _ in runs_of)
        medians[f"{name} work"] = None if failures else median(_work_of(output) for _, output in runs_of)
    return medians


def _work_of(output: dict[str, Any]) -> float:
    if "seconds" not in output:
        return float(output.get("work", 0.0))
    seconds = output["seconds"]
    return float(seconds["trace"] + seconds["replay"])


def shown(value: Any, inside: Any = None) -> str:
    """Format seconds, with those after the imports in brackets, or the reason that there are none."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" + ("" if inside is None else f" ({inside:.2f})")


def ratio(value: Any, base: Any) -> str:
    """Format the ratio; a dash if either did not run."""
    return f"{value / base:.1f}" if isinstance(value, float) and isinstance(base, float) and base else "-"


def models_table(models: list[str], runs: int) -> Iterator[str]:
    """Yield the tables with one row for each model."""
    yield "| model | imports | cold plan | cached plan | MemTracker | torchinfo | profiled step |"
    yield "|---|---|---|---|---|---|---|"
    ratios = [
        "| model | cold / imports | MemTracker / cold | MemTracker / cached | profiled / cached |",
        "|---|---|---|---|---|",
    ]
    for model in models:
        medians = row(model, runs)
        cells = [shown(medians["imports"])]
        for name in ("cold", "cached", "memtracker", "torchinfo", "profiled"):
            cells.append(shown(medians[name], medians[f"{name} work"]))
        yield f"| {model} | {' | '.join(cells)} |"
        ratios.append(
            f"| {model} | {ratio(medians['cold'], medians['imports'])} "
            f"| {ratio(medians['memtracker work'], medians['cold work'])} "
            f"| {ratio(medians['memtracker'], medians['cached'])} "
            f"| {ratio(medians['profiled'], medians['cached'])} |"
        )
    yield ""
    yield from ratios


def growth_tables(runs: int) -> Iterator[str]:
    """Yield the tables by the depth of a model, the memory, and the number of GPUs."""
    yield "| blocks of Llama 8B | cold plan, after the imports | cached plan |"
    yield "|---|---|---|"
    for layers in (4, 8, 16, 32, 64):
        more = ["--model-arg", f"num_hidden_layers={layers}"]
        yield f"| {layers} | {_cold_and_cached('llama_8b', SERVER_MIB, more, runs)} |"
    yield ""
    yield "| memory, MiB | largest batch of ResNet-50 | cold plan, after the imports | cached plan |"
    yield "|---|---|---|---|"
    for mib in ("8000", "16000", "32000", "64000", "128000", "256000"):
        _, output = measured(planned("resnet50", mib), tempfile.gettempdir())
        yield f"| {mib} | {output.get('max_batch')} | {_cold_and_cached('resnet50', mib, [], runs)} |"
    yield ""
    yield "| GPUs | ResNet-50 on all, cold | from cached traces |"
    yield "|---|---|---|"
    for words in ("h200", "4090", "ampere 24", "rtx", ""):
        yield f"| {_gpus(words, runs)} |"


def _cold_and_cached(model: str, mib: str, more: list[str], runs: int) -> str:
    with _cache() as cache:
        measured(planned(model, mib, *more), cache)
        cold = [measured(planned(model, mib, *more, "--no-cache"), cache)[1] for _ in range(runs)]
        cached = [measured(planned(model, mib, *more), cache)[0] for _ in range(runs)]
    print_progress(f"{model} {mib} {more}")
    return f"{median(map(_work_of, cold)):.2f} | {median(cached):.2f}"


def _gpus(words: str, runs: int) -> str:
    command = ["-m", "planner", "gpus", "--model", "resnet50", "--json"]
    for word in words.split():
        command += ["--filter", word]
    with _cache() as cache:
        cold = [measured([*command, "--no-cache"], cache) for _ in range(runs)]
        measured(command, cache)
        cached = [measured(command, cache)[0] for _ in range(runs)]
    print_progress(f"gpus {words}")
    count = len(cold[0][1].get("rows", ()))
    return f"{count} | {median(seconds for seconds, _ in cold):.2f} | {median(cached):.2f}"


def sweep_table() -> Iterator[str]:
    """Yield the table of a run from nothing, and of one for which only the results are missing."""
    yield "| cells | from nothing, s | with all traces cached, s |"
    yield "|---|---|---|"
    with _cache() as cache:
        path = Path(cache, "grid.yaml")
        path.write_text(SWEEP, encoding="utf-8")
        times = []
        for name in ("cold", "cached"):
            start = perf_counter()
            _, output = measured(
                ["-m", "planner", "sweep", str(path), "--results", str(Path(cache, name)), "--json"], cache
            )
            print_progress(f"sweep {name} {output.get('why', '')}")
            times.append(perf_counter() - start)
    yield f"| {len(output.get('cells', ()))} | {times[0]:.0f} | {times[1]:.0f} |"


def machine() -> str:
    """Describe the machine, without names and paths."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{len(os.sched_getaffinity(0))} cores ({names[0] if names else 'unknown'}), Python "
        f"{sys.version.partition(' ')[0]}; load of the machine at the end, over 1, 5 and 15 minutes: {loads}."
    )


@contextmanager
def _cache() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description="The planner's speed beside that of others.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("models", "growth", "sweep"))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(*options.work)))
        return
    if options.only in (None, "models"):
        for line in models_table(options.models or list(MODELS), options.runs):
            print(line, flush=True)
        print()
    if options.only in (None, "growth"):
        for line in growth_tables(options.runs):
            print(line, flush=True)
        print()
    if options.only in (None, "sweep"):
        for line in sweep_table():
            print(line, flush=True)
        print()
    print(machine())


if __name__ == "__main__":
    main()
