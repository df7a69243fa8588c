"""A sweep: its file, its stored results, failures of single tasks, and its executors."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from planner import max_batch
from planner.api.sweep import SweepResult, run_task, sweep
from planner.cli import run
from planner.errors import DataFileError, UsageError
from planner.hardware.database import find_device
from planner.hardware.device import generic_device
from planner.jobs import resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.sweep.executors import dask_pool, run_all
from planner.planning.sweep.grid import Cell, Failure, Grid, NamedModel, Recipe, SweepTable, load_grid
from planner.planning.sweep.results import ResultStore, open_results
from planner.planning.sweep.task import GpuFigures, Task, TaskResult, device_digest
from planner.report.commands.sweep import sweep_to_csv, sweep_to_parquet
from tests.helpers.structs import replace

CATALOGUE = load_catalogue()
GRID = """
about: a small grid
models: [conv_pair, {model: basic_encoder, name: encoder, model_arg: {in_channels: 1}}]
recipes:
  sgd: {}
  amp: {optimizer: adamw, precision: amp-fp16, steps: 2, ema: true, alloc_conf: "expandable_segments:True"}
gpus: [L4, 8000]
"""
L4, SMALL = find_device("L4"), generic_device(8000)
MODELS = """
import os
from torch import nn

class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        os.write(1, b"raw chatter")
        return self.head(x)

class Broken(Fine):
    def forward(self, x):
        raise RuntimeError("not today")

class Deadly(Fine):
    def forward(self, x):
        os._exit(7)
"""


class DiedError(Exception):
    """A worker is gone."""


FIGURES = GpuFigures(L4.name, 23034.0, 1234, 20000.0, 21000.0, 500.0, False, "none", 1234)


@dataclass(slots=True)
class ThreadPool:
    """A pool that runs tasks in this process; after a deadly one its executor takes no more."""

    size: int = 2
    deadly: str = ""
    died: tuple[type[BaseException], ...] = (DiedError,)
    ran: list[str] = field(default_factory=list)

    @contextmanager
    def executor(self) -> Iterator["ThreadExecutor"]:
        yield ThreadExecutor(self)

    def close(self) -> None:
        pass


class ThreadExecutor(Executor):
    def __init__(self, pool: ThreadPool) -> None:
        self.pool, self.is_broken = pool, False

    def submit(self, run: Callable[[Task], TaskResult], task: Task) -> Future[TaskResult]:  # type: ignore[override]
        self.is_broken = self.is_broken or task.model == self.pool.deadly
        future: Future[TaskResult] = Future()
        if self.is_broken:
            future.set_exception(DiedError())
        else:
            self.pool.ran.append(f"{task.model} {task.recipe} {len(task.devices)}")
            future.set_result(run(task))
        return future


def quiet(line: str) -> None:
    pass


def write(folder: Path, text: str, name: str = "grid.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def store_in(folder: Path) -> ResultStore:
    return open_results(folder / "results", [], quiet)


def swept(grid: Grid, folder: Path, pool: ThreadPool) -> SweepTable:
    return sweep(grid, CATALOGUE, {}, store_in(folder), pool, quiet).table


def task_of(model: str, *devices: object) -> Task:
    return Task(model, "sgd", resolve_job(model, CATALOGUE), tuple(devices), {})  # type: ignore[arg-type]


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """Models with their arguments, recipes with options of job and memory, GPUs by name and by size."""
    assert load_grid(write(tmp_path, GRID), CATALOGUE) == Grid(
        "a small grid",
        (
            NamedModel("conv_pair", "conv_pair", {}),
            NamedModel("encoder", "basic_encoder", {"model_args": [("in_channels", 1)]}),
        ),
        (
            Recipe("sgd", {}),
            Recipe(
                "amp",
                {"optimizer": "adamw", "precision": "amp-fp16", "ema": True, "steps": 2},
                "expandable_segments:True",
            ),
        ),
        (L4, SMALL),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("conv_pair", "con_pair", "line 3, models[0]: model 'con_pair' is unknown"),
        ("conv_pair", "m.py:Net", "line 3, models[0]: 'm.py:Net' would run code; --allow-code"),
        ("name: encoder", "name: conv_pair", "line 3, models: 'conv_pair' occurs twice here"),
        ("sgd: {}", "sgd: {optimiser: adam}", "line 5, recipes.sgd.optimiser: unknown key"),
        ("steps: 2", "steps: 2.5", "line 6, recipes.amp.steps: expected a whole number"),
        ("ema: true", "ema: perhaps", "line 6, recipes.amp.ema: expected true or false"),
        ("L4, 8000", "L5000", "line 7, gpus[0]: unknown GPU 'L5000'"),
        ("L4, 8000", "L4, l4", "line 7, gpus: 'L4 24GB' occurs twice here"),
        ("[L4, 8000]", "[words: abacus]", "line 7, gpus[0].words: no GPU of the database has these words"),
        ("[L4, 8000]", "[]", "line 7, gpus: the list is empty"),
        ("gpus: [L4, 8000]", "", "line 2: missing gpus"),
        (
            "sgd: {}",
            "sgd: {optimizer: no}",
            "line 5, recipes.sgd.optimizer: expected a string, got 'no'; write it",
        ),
    ],
)
def test_errors_of_a_file_name_their_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A broken file is refused in a line that names file, line and key."""
    assert GRID.count(old) == 1
    path = write(tmp_path, GRID.replace(old, new))
    with pytest.raises(DataFileError) as caught:
        load_grid(path, CATALOGUE)
    assert str(caught.value).startswith(f"{path} {message}")


def test_all_gpus_and_words_of_the_database(tmp_path: Path) -> None:
    """`all` is the whole database, `words` those GPUs that `planner devices` lists."""
    every = load_grid(write(tmp_path, GRID.replace("[L4, 8000]", "all")), CATALOGUE).gpus
    some = load_grid(write(tmp_path, GRID.replace("[L4, 8000]", "[words: H100 NVL]")), CATALOGUE).gpus
    assert len(every) > 50 and some == tuple(card for card in every if "H100 NVL" in card.name)


@pytest.mark.slow
def test_cells_are_what_max_batch_says(tmp_path: Path) -> None:
    """Each cell of a sweep is the answer of `planner max-batch` for its model, recipe and GPU."""
    grid = load_grid(write(tmp_path, GRID), CATALOGUE)
    table = swept(grid, tmp_path, ThreadPool())
    assert [(cell.model, cell.recipe, cell.figures.gpu) for cell in table.cells] == [
        (model, recipe, gpu)
        for model in ("conv_pair", "encoder")
        for recipe in ("sgd", "amp")
        for gpu in (L4.name, SMALL.name)
    ]
    amp = {"optimizer": "adamw", "precision": "amp-fp16", "steps": 2, "ema": True}
    alone = [
        max_batch(model, gpu=gpu, **options).max_batch
        for model in ("conv_pair", "basic_encoder")
        for options in ({}, amp | {"alloc_conf": "expandable_segments:True"})
        for gpu in (L4, SMALL)
    ]
    assert [cell.figures.max_batch for cell in table.cells] == alone
    assert (table.new, table.failures) == (8, ())


def test_a_second_call_computes_only_what_is_missing(tmp_path: Path) -> None:
    """Stored results are not computed again; a GPU or a recipe more costs only its own cells."""
    grid = load_grid(write(tmp_path, GRID), CATALOGUE)
    small = replace(grid, models=grid.models[:1], recipes=grid.recipes[:1], gpus=(L4,))
    pool = ThreadPool()
    first = swept(small, tmp_path, pool)
    again = swept(small, tmp_path, pool)
    wider = swept(replace(small, gpus=(L4, SMALL)), tmp_path, pool)
    assert pool.ran == ["conv_pair sgd 1", "conv_pair sgd 1"]
    assert (first.new, again.new, wider.new) == (1, 0, 1)
    assert again.cells == first.cells == wider.cells[:1]
    assert wider.cells[1].figures.gpu == SMALL.name


def test_a_failure_stays_alone_and_is_tried_again(tmp_path: Path) -> None:
    """A model that raises and a recipe that makes no job are reported; the others have their cells."""
    file = write(tmp_path, MODELS, "models.py")
    models = tuple(NamedModel(name, f"{file}:{name}", {}) for name in ("Broken", "Fine"))
    grid = Grid("", models, (Recipe("sgd", {}), Recipe("soft", {"loss": "mse"})), (L4,))
    with_inputs = replace(grid, models=tuple(replace(m, options=_sample()) for m in models))
    pool = ThreadPool()
    table = swept(with_inputs, tmp_path, pool)
    assert [(cell.model, cell.recipe) for cell in table.cells] == [("Fine", "sgd")]
    assert [(one.model, one.recipe) for one in table.failures] == [
        ("Broken", "sgd"),
        ("Broken", "soft"),
        ("Fine", "soft"),
    ]
    assert "not today" in table.failures[0].why and "loss mse compares with floats" in table.failures[1].why
    swept(with_inputs, tmp_path, pool)
    assert pool.ran == ["Broken sgd 1", "Fine sgd 1", "Broken sgd 1"]


def _sample() -> dict[str, object]:
    from planner.jobs import parse_tensor_spec

    return {"inputs": [parse_tensor_spec("4")], "target": parse_tensor_spec("scalar:int64")}


def test_a_broken_result_is_noted_and_computed_anew(tmp_path: Path) -> None:
    """A file that is cut short, is no result or holds nonsense is as good as none, and does no harm."""
    task, lines = task_of("conv_pair", L4), []
    store = ResultStore(tmp_path, "", lines.append)
    done = run_task(task)
    store.keep(task, done)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert store.find(task).cells == done.cells and lines == []
    for broken in (b"", whole[:-30], b"[]", whole.replace(b'"max_batch":', b'"max_batch":-0.'), b"\xff"):
        path.write_bytes(broken)
        assert store.find(task) == TaskResult()
    assert len(lines) == 5 and all("computed again" in line and "\n" not in line for line in lines)


def test_stored_results_are_those_of_this_very_job(tmp_path: Path) -> None:
    """Another option, other memory or other surroundings have no stored result."""
    task = task_of("conv_pair", L4)
    done = TaskResult({device_digest(L4): FIGURES})
    ResultStore(tmp_path, "1", quiet).keep(task, done)
    others = [
        replace(task, job=task.job.replace(steps=2)),
        replace(task, options={"allocator_cap_mib": 9}),
        replace(task, options={"confidence": 0.9}),
        replace(task, options={"no_calibration": True}),
    ]
    assert [store_key(other) == store_key(task) for other in others] == [False] * 4
    assert ResultStore(tmp_path, "1", quiet)._key(task) != ResultStore(tmp_path, "2", quiet)._key(task)


def test_stored_results_are_those_of_the_queried_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cuDNN in the same place, or none, has no stored result; torch and the planner count as ever."""
    keys = set()
    plain = task_of("conv_pair", L4)
    task = replace(plain, job=plain.job.replace(cudnn="somewhere"))
    for version in ("9.8.0", "9.10.2"):
        monkeypatch.setattr(
            "planner.emulator.convolution_workspaces.open_cudnn_with_cublaslt",
            lambda where, folder, v=version: SimpleNamespace(version=v, lacks=""),
        )
        assert store_key(task) == store_key(task)
        keys.add(store_key(task))
    module = sys.modules["planner.store.fingerprint"]  # the room shows its function by this name
    monkeypatch.setattr(module, "installed_version", lambda name: "another")
    keys.add(store_key(task))
    monkeypatch.undo()
    keys.add(store_key(task))
    assert len(keys) == 4


def store_key(task: Task) -> str:
    return ResultStore(Path(), "", quiet)._key(task)


def test_a_task_that_kills_its_worker_is_found_and_left_out() -> None:
    """Tasks under way when a worker died run alone: the deadly one is reported, the others are done."""
    tasks = [task_of(name, L4) for name in ("conv_pair", "basic_encoder", "cnn")]
    tasks[1] = replace(tasks[1], model="deadly")
    results = dict(run_all(tasks, ThreadPool(deadly="deadly"), run_task))
    assert [bool(results[place].cells) for place in range(3)] == [True, False, True]
    assert results[1].failure == "basic_encoder: its process died; see why with --isolate"


@pytest.mark.slow
def test_processes_of_this_machine_survive_a_deadly_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command goes on after a model that ends its process, exits with 1, keeps standard output clean,
    and writes the same cells as JSON, CSV and Parquet.
    """
    import pyarrow.parquet

    models = write(tmp_path, MODELS, "models.py")
    entry = f'{{model: "{models}:%s", name: %s, input: [4], target: scalar:int64}}'
    both = ", ".join(entry % (name, name) for name in ("Deadly", "Fine"))
    path = write(tmp_path, f"about: a\nmodels: [{both}]\nrecipes: {{sgd: {{}}}}\ngpus: [L4]\n")
    table, columns = tmp_path / "t.csv", tmp_path / "t.parquet"
    where = ["--csv", str(table), "--parquet", str(columns), "--no-calibration"]
    code = run(["sweep", str(path), "--allow-code", "--jobs", "1", "--json", *where])
    fields = json.loads(capfd.readouterr().out)
    assert (code, [cell["model"] for cell in fields["cells"]]) == (1, ["Fine"])
    assert [failure["model"] for failure in fields["failures"]] == ["Deadly"]
    assert pyarrow.parquet.read_table(columns).to_pylist() == fields["cells"]
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [(row["model"], int(row["max_batch"])) for row in rows] == [
        (cell["model"], cell["max_batch"]) for cell in fields["cells"]
    ]


@pytest.mark.slow
def test_a_dask_cluster_loses_a_worker_and_nothing_else(tmp_path: Path) -> None:
    """One of several worker processes is killed in the middle: every cell is there once, and none failed."""
    distributed = pytest.importorskip("distributed")
    recipes = tuple(Recipe(f"r{steps}", {"steps": steps}) for steps in (2, 3, 4, 5))
    models = tuple(NamedModel(name, name, {}) for name in ("conv_pair", "basic_encoder"))
    grid = Grid("", models, recipes, (L4, SMALL))
    killed: list[int] = []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        closing(dask_pool(cluster.scheduler_address)) as pool,
        distributed.Client(cluster) as client,
    ):

        def kill_once(line: str) -> None:
            if " took " in line and not killed:
                killed.append(next(iter(client.run(os.getpid).values())))
                os.kill(killed[0], signal.SIGKILL)

        table = sweep(grid, CATALOGUE, {}, store_in(tmp_path), pool, kill_once).table
    assert killed and table.failures == ()
    assert (
        len(table.cells) == len({(c.model, c.recipe, c.figures.gpu) for c in table.cells}) == 16 == table.new
    )
    again = sweep(grid, CATALOGUE, {}, store_in(tmp_path), ThreadPool(), quiet).table
    assert (again.new, again.cells) == (0, table.cells)


def test_no_cluster_is_one_line() -> None:
    """A scheduler that nobody answers at is a usage error."""
    with pytest.raises(UsageError, match="--scheduler nowhere://x: no worker of a Dask cluster answers"):
        dask_pool("nowhere://x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "ray"], "--engine: unknown value 'ray'; use one of local, dask"),
        (["--engine", "dask"], "--engine dask: say where the cluster is"),
        (["--scheduler", "tcp://x:1"], "--scheduler: it is that of --engine dask"),
        (["--jobs", "0"], "--jobs: '0' is refused; use a whole number from 1 to 1024"),
        (["--time-limit", "5"], "--time-limit: only a model in a process of its own is stopped"),
        (["--confidence", "7"], "--confidence 7.0: give a probability from 0.5 to below 1"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Options that contradict each other are refused before anything runs."""
    assert run(["sweep", str(write(tmp_path, GRID)), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_table_of_a_sweep() -> None:
    """One block for each model: GPUs below each other, recipes beside each other; failures in words."""
    grid = Grid(
        "two GPUs",
        (NamedModel("net", "zoo:CNN", {}),),
        (Recipe("sgd", {}), Recipe("amp", {})),
        (L4, SMALL),
    )
    cell = Cell("net", "sgd", FIGURES)
    figures = replace(FIGURES, gpu=SMALL.name, max_batch=0, comfortable_batch=0, process_mib=None)
    small = Cell("net", "sgd", figures)
    table = SweepTable(grid, (cell, small), (Failure("net", "amp", "it broke"),), (), (), 2, 1.25)
    assert str(SweepResult(table)).splitlines() == [
        "two GPUs",
        "",
        "net: largest batch without retries",
        "GPU                                        sgd          amp",
        "L4 24GB                                  1,234       failed",
        "generic GPU of 8000 MiB                   none       failed",
        "",
        "Failed:         net amp: it broke",
        "2 cells, 2 of them new, 1 jobs failed, in 1.2 s",
    ]
    line = sweep_to_csv(table).splitlines()[2]
    assert line.startswith("net,sgd,generic GPU of 8000 MiB,23034.0,0,,21000.0")
    assert sweep_to_parquet(table)[:4] == b"PAR1"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_ended_says_so_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """The line has no word of the libraries that ran it; results are stored, and no worker is left."""
    grid, results = tmp_path / "grid.yaml", tmp_path / "grid.results"
    recipes = "".join(f"  r{steps}: {{steps: {steps}}}\n" for steps in range(1, 100))
    grid.write_text(f"about: long\nmodels: [conv_pair]\nrecipes:\n{recipes}gpus: [L4]\n")
    command = [sys.executable, "-m", "planner", "sweep", str(grid), "--jobs", "2"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not any(results.glob("*.json")) and started.poll() is None:
        sleep(0.05)
    started.send_signal(number)
    out, err = started.communicate()
    message = {signal.SIGTERM: "ended by SIGTERM", signal.SIGINT: "interrupted"}[number]
    assert (started.returncode, out, err) == (128 + number, "", f"planner: {message}\n")
    assert 0 < len(list(results.glob("*.json"))) < 99
    assert not any(path.suffix == ".partial" for path in results.iterdir())


INTERRUPTED = """
from loky.backend.resource_tracker import register
from planner.planning.sweep.executors import local_pool

if __name__ == "__main__":
    with local_pool(1).executor() as executor:
        executor.submit(abs, -1).result()
        register("/loky-interrupted", "semlock")
"""


def test_what_an_interrupted_sweep_leaves_is_removed_without_a_word(tmp_path: Path) -> None:
    """A signal while a semaphore is made leaves it registered, which loky's own process would warn of."""
    script = tmp_path / "sweep.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
