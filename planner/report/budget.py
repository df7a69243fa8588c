"""Report the memory of a GPU, and the entries with which JSON reports begin."""

from typing import Any

from planner.hardware import Budget, Device, SourcedBytes
from planner.jobs import Job, job_to_json
from planner.program import NEWEST_TORCH, format_torch_version, torch_version_of
from planner.report.document import Table
from planner.report.units import SCHEMA, attributes, is_endless, memory_table, mib, to_builtins


def budget_table(budget: Budget) -> Table:
    """Return a table of the GPU's memory, from its total down to the allocator's share."""
    device, sure = budget.device, f"confidence {budget.confidence:g}"
    rows: list[tuple[str, int, str]] = []
    is_bounded = not is_endless(device.usable)
    if is_bounded:
        rows.append(("total", device.total.value, device.total.source))
        rows.append(("usable by torch", device.usable.value, device.usable.source))
    rows.append(("CUDA context", device.context.value, device.context.source))
    if device.nccl is not None:
        rows.append(("NCCL", device.nccl.value, device.nccl.source))
    if budget.bound_bytes is not None:
        rows.append(("allocator's cap", budget.bound_bytes, "given by the user"))
    if budget.limits.allocator_limit_bytes is not None:
        rest = (
            "usable less context" + (" and NCCL" if device.nccl is not None else "")
            if is_bounded
            else "the cap"
        )
        if is_bounded and budget.bound_bytes is not None:
            rest += " or the cap"
        left_bytes, less = budget.limits.allocator_limit_bytes, f"{rest}, less a margin for {sure}"
        rows.append(("left for the allocator", left_bytes, less))
    return memory_table(device.name if is_bounded else "Any GPU", rows)


def device_to_json(budget: Budget) -> dict[str, Any]:
    """Return the JSON value of `device`: the GPU's figures and the allocator's limits.

    A size is null if it is unlimited, `limit_mib` if nothing limits the allocator, `cap_mib` if no cap is
    given, and `nccl` if NCCL's memory is not counted, as on one GPU.
    """
    limits = budget.limits
    return {
        **figures_to_json(budget.device),
        "nccl": _figure(budget.device.nccl),
        "allocator": {
            **attributes(limits, "capacity_mib", "limit_mib"),
            **attributes(budget, "cap_mib"),
            "rules": to_builtins(limits.config),
        },
    }


def _figure(figure: SourcedBytes | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"mib": mib(figure.value), "spread_mib": mib(figure.spread), "source": figure.source}


def planned_torch(job: Job) -> str:
    """Return the job's torch version as text, or `NEWEST_TORCH` if the job's version is newer."""
    return format_torch_version(min(torch_version_of(job.environment.torch), NEWEST_TORCH))


def job_to_report(job: Job, budget: Budget) -> dict[str, Any]:
    """Return the entries `schema`, `model`, `torch`, `job`, `device` and `confidence` of a JSON report."""
    return {**planned_job(job), "device": device_to_json(budget), "confidence": budget.confidence}


def planned_job(job: Job) -> dict[str, Any]:
    """Return the entries `schema`, `model`, `torch` and `job` of a JSON report."""
    return {
        "schema": SCHEMA,
        "model": job.model.name,
        "torch": planned_torch(job),
        "job": job_to_json(job),
    }


def figures_to_json(device: Device) -> dict[str, Any]:
    """Return JSON entries for a GPU's name, memory and compute capability, with the source of each figure.

    An unlimited size is None.
    """
    figures = {"total": device.total, "usable": device.usable, "context": device.context}
    sources = {name: figure.source for name, figure in figures.items()}
    return {
        "name": device.name,
        **{
            f"{name}_mib": None if is_endless(figure) else mib(figure.value)
            for name, figure in figures.items()
        },
        "capability": list(device.capability),
        "sources": sources | {"capability": device.capability_source},
        "kinds": {name: figure.kind.value for name, figure in figures.items()},
        "spreads_mib": {name: mib(figure.spread) for name, figure in figures.items()},
    }
