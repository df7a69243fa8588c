"""Compute NCCL's memory in the processes of a job."""

from msgspec.structs import replace

from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import MIB, FigureKind, SourcedBytes
from planner.hardware.nccl.buffers import (
    GPUS_OF_A_NODE,
    Communicator,
    Range,
    nccl_mib,
    nccl_of_torch,
)
from planner.jobs import Job, Mode
from planner.program import torch_version_of


def with_nccl_of(budget: Budget, job: Job) -> Budget:
    """Return the budget less NCCL's memory in a process of the job, or unchanged without communicators.

    The spread of NCCL's memory is half the distance from the likely figure to the farther end of the range.
    """
    count = communicators_of(job)
    if not count:
        return budget
    version = nccl_of_torch(torch_version_of(job.environment.torch))
    size = nccl_mib(Communicator(version, budget.device.capability, _ranks(job)), count)
    spread = max(size.high - size.likely, size.likely - size.low) / 2
    groups = "one communicator" if count == 1 else f"{count} communicators"
    source = (
        f"computed for NCCL {version[0]}.{version[1]} and {groups}, {size.low:.0f} to {size.high:.0f} MiB by "
        "links and ranks; published figures are within"
    )
    nccl = SourcedBytes(round(size.likely * MIB), source, round(spread * MIB), FigureKind.DERIVED)
    return make_budget(
        replace(budget.device, nccl=nccl),
        budget.confidence,
        budget.limits.config,
        budget.cap_bytes,
        budget.correction,
        budget.likeness,
    )


def communicators_of(job: Job) -> int:
    """Return the number of NCCL communicators that a process of the job uses."""
    if job.sharding.deepspeed:
        return 2  # the default group and the group of data parallel ranks (utils/groups.py)
    if job.sharding.world_size:
        return 1
    if job.loop.mode is not Mode.TRAIN:
        return 0
    if job.sharding.fsdp:
        groups = 2 if job.sharding.fsdp_arg.replicas > 1 else 1
        return groups + (1 if job.sharding.tp else 0)
    return int(job.sharding.ddp or job.sharding.tp > 0)


def _ranks(job: Job) -> Range:
    groups = [ranks for ranks in (job.sharding.fsdp, job.sharding.tp, job.sharding.world_size) if ranks]
    if not groups:
        return Range(2, GPUS_OF_A_NODE, GPUS_OF_A_NODE)
    return Range(min(groups), max(groups), max(groups))
