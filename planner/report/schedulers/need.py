"""List the GPUs that run a job, and their names for schedulers."""

from collections.abc import Iterable, Mapping
from typing import Self

from msgspec import Struct

from planner.hardware import (
    Device,
    Vocabulary,
    known_names,
    load_devices,
    load_names,
    load_other_devices,
    mig_slice,
)
from planner.jobs import size_ranges
from planner.planning import ClusterTable, FleetTable
from planner.program import pinned_bytes
from planner.report.units import batch_text, mib


class Need(Struct, frozen=True):
    """A number of GPUs of one kind on which the job runs."""

    device: Device
    gpus: int
    nodes: int
    figures: str  # one line on the batch and the memory

    @property
    def per_node(self) -> int:
        """Return the number of GPUs per node."""
        return self.gpus // self.nodes


class Request(Struct, frozen=True):
    """A request for GPUs, which a scheduler may satisfy with any one of `needs`."""

    title: str
    needs: tuple[Need, ...]


def request_of_fleet(table: FleetTable) -> Request:
    """Return a request for one GPU, of any kind that runs the job. The kinds are in the table's order."""
    which = "its largest batch on each GPU" if table.batch is None else f"batch {table.batch:,}"
    needs = [
        Need(fit.budget.device, 1, 1, _figures(
            f"batch {batch_text(fit.batch)}", fit.process_bytes, fit.process_upper_bytes, fit.budget.device,
            _pinned(table, fit.batch, fit.budget.device),
        ))
        for fit in table.fits if fit.max_batch
    ]  # fmt: skip
    return Request(f"{table.job.model.name}, {which}, at confidence {table.confidence:g}", tuple(needs))


def request_of_clusters(table: ClusterTable) -> Request:
    """Return a request for the fewest GPUs of each kind that run the job.

    The kinds are sorted by the number of GPUs. If the table has advice, the request is for its first plan.
    """
    rows = table.rows if table.advice is None else (table.advice.plans,)
    needs = []
    for plan in sorted((row.plans[0] for row in rows if row.plans), key=lambda plan: plan.split.gpus):
        device, gpus = plan.budget.device, plan.split.gpus
        nodes = -(-gpus // table.question.gpus_per_node)
        while gpus % nodes:
            nodes += 1
        sharded = f"fsdp {plan.job.sharding.fsdp}, " if plan.job.sharding.fsdp else ""
        parallel = f"tp {plan.job.sharding.tp}, " if plan.job.sharding.tp else ""
        step = f"{sharded}{parallel}micro-batch {plan.split.micro_batch} x {plan.split.accumulate}"
        needs.append(
            Need(device, gpus, nodes, _figures(step, plan.process_bytes, plan.process_upper_bytes, device))
        )
    asked = f"global batch {table.question.global_batch:,}, at confidence {table.confidence:g}"
    return Request(f"{table.job.model.name}, {asked}", tuple(needs))


def _figures(run: str, process: int, upper: int, device: Device, pinned: int = 0) -> str:
    sizes = f"process {mib(process, 0):,.0f} MiB, at most {mib(upper, 0):,.0f} of"
    host = f"; pinned host memory {mib(pinned, 0):,.0f} MiB" if pinned else ""
    return f"{run}: {sizes} {mib(device.usable.value, 0):,.0f} MiB{host}"


def _pinned(table: FleetTable, batch: int, device: Device) -> int:
    if size_ranges(table.job):
        return 0
    return pinned_bytes(table.programs.trace(batch, device.target).pinned)


class Naming(Struct, frozen=True):
    """A scheduler's names of all GPUs of the database, and the needs of a request."""

    needs: tuple[Need, ...]
    names: Mapping[str, tuple[str, ...]]  # the scheduler's names by the names of the database
    devices: tuple[Device, ...]  # all GPUs of the database

    @classmethod
    def of(cls, request: Request, vocabulary: Vocabulary) -> Self:
        """Return the `Naming` of a request in a scheduler's vocabulary."""
        known = (*load_devices(), *load_other_devices())
        return cls(request.needs, load_names(vocabulary), known)

    def of_device(self, device: Device) -> tuple[str, ...]:
        """Return a GPU's names in the scheduler's vocabulary, or () if the scheduler has none.

        For a MIG slice, they are the names of the whole GPU.
        """
        return known_names(device, self.names)

    def strangers(self, name: str) -> list[Device]:
        """Return the GPUs of the database outside the request that the scheduler also calls `name`."""
        running = {need.device.name for need in self.needs}
        return [
            device
            for device in self.devices
            if device.name not in running and name in self.names.get(device.name, ())
        ]

    def own(self, need: Need) -> list[str]:
        """Return the names of a need's GPU that no GPU outside the request has, or [] for a MIG slice."""
        if mig_slice(need.device) is not None:
            return []
        return [name for name in self.of_device(need.device) if not self.strangers(name)]


def comment(lines: Iterable[str]) -> str:
    """Return the lines as one text of comments, each line after "# "."""
    return "".join(f"# {line}\n" for line in lines)


def unnamed(needs: Iterable[Need], scheduler: str) -> list[str]:
    """Return a line, in a list, on GPUs without a unique name in a scheduler, or [] if `needs` is empty."""
    names = ", ".join(need.device.name for need in needs)
    return [f"also, without a name of their own in {scheduler}: {names}"] if names else []
