"""Plan a job of a check on each of its GPUs.

The results are the verdicts, and the memory of modules at the peak.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from planner.api.request.budget import budget_for, calibrate_budget, find_budget
from planner.api.request.options import Options
from planner.api.request.request import Request, open_request
from planner.errors import UsageError
from planner.hardware import EVEN_ODDS, Device
from planner.planning import (
    CaptureMode,
    EpochPrograms,
    estimate_batch,
    explain,
    find_max_batch,
    max_useful_batch,
    unlimited,
    with_last_batch,
)
from planner.planning.check import CheckJob, CheckRow, Verdict, judge, largest_that_holds, own_bytes
from planner.program import ProgramSet


def plan_rows(checked: CheckJob, options: Options, searches: Callable[[Verdict], bool]) -> Iterator[CheckRow]:
    """Yield a row for each of a job's GPUs: the estimate, the verdict and, if searched, the largest batch.

    The largest batch is searched if `searches(verdict)` is true. Raises UsageError for an invalid job, with
    the job's place in the configuration.
    """
    programs: ProgramSet | None = None
    for device in checked.devices:
        given = options_on(checked, device, options)
        try:
            request = open_request(checked.job, given, checked.batch)
            if programs is None:
                programs = request.programs()
        except UsageError as error:
            raise UsageError(f"{checked.where}: {error}") from error
        yield _row(checked, device, request, programs, searches)


def _row(
    checked: CheckJob,
    device: Device | None,
    request: Request,
    programs: ProgramSet,
    searches: Callable[[Verdict], bool],
) -> CheckRow:
    job, budget = request.job, request.budget
    request.on_progress(f"planning {checked.name} on {budget.device.name}")
    trace = EpochPrograms(job, programs).trace(request.batch, budget.device.target)
    estimate = estimate_batch(job, trace, budget)
    even: Options = {**request.options, "confidence": EVEN_ODDS}
    even_budget = calibrate_budget(budget_for(find_budget(even), job), job, even)
    judgement = judge(estimate, trace, even_budget, checked.budget_bytes, checked.headroom)
    largest = _largest_batch(checked, request, programs) if searches(judgement.verdict) else None
    return CheckRow(checked, device, estimate, judgement, largest)


def _largest_batch(checked: CheckJob, request: Request, programs: ProgramSet) -> int:
    """Return the largest batch that fits the GPU at the requested confidence, and the memory budget."""
    job, budget, budget_bytes = request.job, request.budget, checked.budget_bytes
    if budget.limits.allocator_limit_bytes is None:
        most = max_useful_batch(job)
    else:
        search = find_max_batch(job, budget, programs, 1).search
        most = search.comfortable or search.largest
    if budget_bytes is None:
        return most
    epochs = EpochPrograms(job, programs)

    def holds(batch: int) -> bool:
        trace = epochs.trace(batch, budget.device.target)
        return estimate_batch(job, trace, budget).process_upper_bytes <= budget_bytes

    return largest_that_holds(holds, checked.batch, most)


def options_on(checked: CheckJob, device: Device | None, options: Options) -> Options:
    """Return the caller's options with a job's settings, for planning a check's job on one GPU.

    A confidence given by the caller takes precedence over the job's confidence.
    """
    confidence = options.get("confidence")
    own: Mapping[str, Any] = {
        "gpu": device,
        "alloc_conf": checked.alloc_conf,
        "allocator_cap_mib": checked.allocator_cap_mib,
        "confidence": checked.confidence if confidence is None else confidence,
    }
    of_a_gpu = ("calibrations", "own_calibrations") if device is None else ()
    kept = {name: value for name, value in options.items() if name not in ("models", "allow_code", *of_a_gpu)}
    return cast(Options, {**kept, **own})


def plan_modules(checked: CheckJob, device: Device | None, options: Options) -> dict[str, int]:
    """Return the bytes of each module's blocks at the peak of allocated memory, without its submodules."""
    request = open_request(checked.job, options_on(checked, device, options), checked.batch)
    trace = with_last_batch(request.job, request.batch, request.traces(CaptureMode.WITH_PROVENANCE))
    return own_bytes(explain(trace, unlimited(request.budget.limits)).blocks)
