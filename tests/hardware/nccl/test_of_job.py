"""Jobs of several GPUs leave room for NCCL; others are as they were."""

import pytest

from planner.allocator import AllocatorConfig
from planner.hardware import (
    MIB,
    communicators_of,
    find_device,
    make_budget,
    process_bytes,
    upper_process_bytes,
    with_nccl_of,
)
from planner.jobs import FsdpArguments, Job, Mode

BUDGET = make_budget(find_device("H100"), 0.99, AllocatorConfig())
JOB = Job.create("net")


def test_a_job_on_one_gpu_has_no_nccl() -> None:
    """Neither do passes without gradients, which send nothing."""
    assert with_nccl_of(BUDGET, JOB) == BUDGET
    assert with_nccl_of(BUDGET, JOB.replace(ddp=True, mode=Mode.INFER)) == BUDGET


@pytest.mark.parametrize("fields", [{"ddp": True}, {"fsdp": 2}, {"fsdp": 8}, {"fsdp": 64}])
def test_nccl_lies_beside_the_allocator(fields: dict[str, object]) -> None:
    """NCCL's memory is added to the process, and taken from the allocator with its spread."""
    budget = with_nccl_of(BUDGET, JOB.replace(**fields))
    nccl = budget.device.nccl
    assert nccl is not None and nccl.spread > 0
    assert process_bytes(budget, 10**9) - process_bytes(BUDGET, 10**9) == nccl.value
    assert upper_process_bytes(budget, 10**9) - upper_process_bytes(BUDGET, 10**9) > nccl.value
    before, after = BUDGET.limits.capacity_bytes, budget.limits.capacity_bytes
    assert before is not None and after is not None and before - after > nccl.value


def test_replicas_are_a_second_group() -> None:
    """HSDP gathers in one group and reduces in another."""
    job = JOB.replace(fsdp=8)
    assert communicators_of(job) == 1
    replicated = job.replace(fsdp_arg=FsdpArguments(replicas=2))
    assert communicators_of(replicated) == 2
    assert communicators_of(JOB.replace(world_size=4, mode=Mode.STEP)) == 1
    assert communicators_of(job.replace(tp=2)) == 2 and communicators_of(JOB.replace(tp=2)) == 1
    one, two = (with_nccl_of(BUDGET, each).device.nccl for each in (job, replicated))
    assert one is not None and two is not None and two.value - one.value == 800 * MIB
