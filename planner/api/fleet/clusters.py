"""`planner gpus --global-batch` for Python: split a global batch over GPUs.

The number of GPUs is found too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Unpack

from planner._support.strict_yaml import read_entry
from planner.api.fleet.gpus import choose_devices
from planner.api.request.budget import budget_for, find_budget
from planner.api.request.options import Options
from planner.api.request.request import Model, Request, open_request
from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE, Budget, Device, ProductLine, Vendor, find_device
from planner.jobs import Job, Mode, check_count, read_count
from planner.planning import (
    MOST_GPUS,
    CaptureMode,
    ClusterAdvice,
    ClusterPlans,
    ClusterQuestion,
    ClusterSearch,
    ClusterTable,
    RankTraces,
    Seconds,
    find_clusters,
)
from planner.program import LARGEST_BATCH, Target, TraceSource
from planner.report import Report, Result, report_of

_LARGEST_COUNT = 2**16  # largest number of GPUs
_SMALLEST_MIB = 40_000  # smallest GPU that is searched if none is chosen
_ALONE = ("gpu", "gpu_mib", "trace", "save_trace", "isolate", "fsdp", "ddp", "tp", "calibrations")


@dataclass(frozen=True, slots=True)
class ClusterResult(Result):
    """The GPU counts and splits with which a global batch runs.

    `str` gives the text report. For several kinds of GPU, the result has the fewest GPUs of each kind; for
    one kind, several splits.
    """

    table: ClusterTable

    @property
    def fits(self) -> bool:
        """Return whether the global batch runs on at least one kind of GPU."""
        advice = self.table.advice
        return any(row.plans for row in (self.table.rows if advice is None else (advice.plans,)))

    def to_scheduler(self, scheduler: str) -> str:
        """Return a request for GPUs that run the batch, for a scheduler: slurm, k8s, skypilot or ray.

        Raises UsageError for another name.
        """
        from planner.report import scheduler_text

        return scheduler_text(self.table, scheduler)

    def _report(self) -> Report:
        from planner.report import clusters_document, clusters_to_json

        return report_of(clusters_document, clusters_to_json, self.table)


def clusters(
    model: Model | None = None,
    global_batch: int | None = None,
    *,
    filter: str | Sequence[str] | None = None,
    min_mib: int | None = None,
    max_mib: int | None = None,
    devices: Sequence[Device] | None = None,
    cluster: str | PathLike[str] | None = None,
    gpus_per_node: int | None = None,
    most_gpus: int | None = None,
    seq: int | None = None,
    **options: Unpack[Options],
) -> ClusterResult:
    """Return how many GPUs of each kind a global batch needs, and how it is split over them.

    The search covers DDP or FSDP2 over all GPUs, recomputation, resharding after the forward pass, tensor
    parallelism, micro-batch and accumulation, but not throughput. For a single kind of GPU several splits
    are returned. `cluster` is a file that names the available GPUs, `seq` the tokens of a sample, instead of
    `input`; the other options are as for `planner.gpus`. Raises the errors of `planner.errors`; that nothing
    fits is a result.
    """
    start = perf_counter()
    _reject_what_is_searched(options, "--global-batch")
    if global_batch is None:
        raise UsageError("--global-batch: give the batch of all GPUs together, such as --global-batch 512")
    if cluster is not None:
        if any(given is not None for given in (devices, filter, min_mib, max_mib, gpus_per_node, most_gpus)):
            raise UsageError("--cluster: the file says which GPUs there are; remove the other choice")
        devices, gpus_per_node, most_gpus = _read_cluster(Path(cluster))
    question = _question(global_batch, gpus_per_node, most_gpus)
    is_chosen = any(given is not None for given in (devices, filter, min_mib, max_mib))
    chosen = choose_devices(devices, filter, min_mib if is_chosen else _SMALLEST_MIB, max_mib)
    chosen = tuple(device for device in chosen if not _is_slice(device) and device.vendor is Vendor.NVIDIA)
    if not chosen:
        raise UsageError(
            "--filter: only slices of GPUs are left, which NCCL does not connect, or GPUs of other makers, "
            "whose communication is not modelled; choose others"
        )
    opened = _open_search(model, question, chosen, seq, options)
    rows = find_clusters(opened.search, opened.budgets)
    return ClusterResult(opened.table(rows, start))


def advise_cluster(
    model: Model | None = None,
    global_batch: int | None = None,
    *,
    cluster: str | PathLike[str] | None = None,
    seq: int | None = None,
    **options: Unpack[Options],
) -> ClusterResult:
    """Return which splits of a global batch over all GPUs of a cluster fit the GPUs.

    Splits that do not fit are returned too. DDP and FSDP2, each with and without recomputation, and tensor
    parallelism within nodes are tried, each with its largest micro-batch. `cluster` is a file that names the
    GPUs, `seq` the tokens of a sample; the other options and the errors are as for `planner.clusters`.
    """
    start = perf_counter()
    _reject_what_is_searched(options, "--cluster")
    if cluster is None:
        raise UsageError("--global-batch: give the GPUs there are as well, such as --cluster cluster.yaml")
    if global_batch is None:
        raise UsageError("--global-batch: give the batch of all GPUs together, such as --global-batch 512")
    chosen, gpus_per_node, most_gpus = _read_cluster(Path(cluster))
    question = _question(global_batch, gpus_per_node, most_gpus)
    opened = _open_search(model, question, chosen, seq, options)
    return ClusterResult(opened.table((), start, opened.search.advise(opened.budgets[0])))


class _OpenSearch(NamedTuple):
    job: Job
    question: ClusterQuestion
    traces: RankTraces
    search: ClusterSearch
    budgets: Sequence[Callable[[Job], Budget]]
    opened: float  # `perf_counter` in seconds when the job was opened

    def table(
        self, rows: tuple[ClusterPlans, ...], start: float, advice: ClusterAdvice | None = None
    ) -> ClusterTable:
        """Return `rows` or `advice` as a table, with the seconds that the search took.

        `start` is the `perf_counter` time before the job was opened.
        """
        seconds = Seconds(self.traces.seconds, perf_counter() - self.opened - self.traces.seconds)
        confidence = (advice.plans if advice else rows[0]).budget.confidence
        return ClusterTable(
            self.job, self.question, confidence, rows, advice, bool(self.traces.is_repeated),
            self.opened - start, seconds,
        )  # fmt: skip


def _open_search(
    model: Model | None,
    question: ClusterQuestion,
    chosen: Sequence[Device],
    seq: int | None,
    options: Options,
) -> _OpenSearch:
    if seq is not None:
        if options.get("input"):
            raise UsageError("--seq and --input: both give the size of a sample; remove one")
        options["input"] = f"{check_count('--seq', seq, LARGEST_BATCH)}:int64"
    request = open_request(model, {**options, "gpu": chosen[0], "fsdp": 2})
    job = request.job.replace(fsdp=0)
    opened = perf_counter()
    traces = RankTraces(_opener(request))
    search = ClusterSearch(job, question, traces)
    budgets = [_budgets_of(device, options) for device in chosen]
    return _OpenSearch(job, question, traces, search, budgets, opened)


def _reject_what_is_searched(options: Options, flag: str) -> None:
    for name in _ALONE:
        if options.get(name):
            given = f"--{name.replace('_', '-')}"
            raise UsageError(f"{given} and {flag}: the search decides that; remove one")
    if options.get("mode") not in (None, Mode.TRAIN):
        raise UsageError(f"--mode {options['mode']}: {flag} is of a training step; remove --mode")


def _question(global_batch: int, gpus_per_node: int | None, most_gpus: int | None) -> ClusterQuestion:
    per_node = GPUS_OF_A_NODE if gpus_per_node is None else gpus_per_node
    most = MOST_GPUS if most_gpus is None else most_gpus
    return ClusterQuestion(
        check_count("--global-batch", global_batch, LARGEST_BATCH),
        check_count("--gpus-per-node", per_node, _LARGEST_COUNT),
        check_count("--most-gpus", most, _LARGEST_COUNT),
    )


def _is_slice(device: Device) -> bool:
    return device.about is not None and device.about.line is ProductLine.SLICE


def _read_cluster(path: Path) -> tuple[Sequence[Device], int, int]:
    """Read a cluster file, and return its GPU, the number of GPUs per node, and the number of GPUs.

    The GPU is in a tuple of one. Raises DataFileError.
    """
    parts = read_entry(path).children(("gpu", "nodes", "gpus_per_node"))
    try:
        device = find_device(parts["gpu"].text())
    except UsageError as error:
        raise parts["gpu"].broken(str(error)) from error
    per_node = read_count(parts["gpus_per_node"], _LARGEST_COUNT)
    return (device,), per_node, per_node * read_count(parts["nodes"], _LARGEST_COUNT)


def _opener(request: Request) -> Callable[[Job, Target], TraceSource]:
    def open_traces(job: Job, target: Target) -> TraceSource:
        programs = request.programs(CaptureMode.RUNS, job)
        return lambda batch: programs.trace(batch, target)

    return open_traces


def _budgets_of(device: Device, options: Options) -> Callable[[Job], Budget]:
    """Return a function that returns a job's budget on the GPU `device`.

    Budgets are cached by the job's numbers of ranks.
    """
    plain = find_budget({**options, "gpu": device})
    by_ranks: dict[tuple[int, int], Budget] = {}

    def budget_of(job: Job) -> Budget:
        ranks = job.sharding.fsdp, job.sharding.tp
        if ranks not in by_ranks:
            by_ranks[ranks] = budget_for(plain, job)
        return by_ranks[ranks]

    return budget_of
