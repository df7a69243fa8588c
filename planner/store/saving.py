"""What `--save-trace` writes: loops that tell any batch size on any GPU; a trace where the job has none."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from planner.errors import PlannerError
from planner.hardware import load_devices
from planner.jobs import Job, job_to_json
from planner.planning import FIT_BATCHES, TraceSource
from planner.program import Capability, StoredLoop, Target, Trace, align, loops_to_json, refit
from planner.store.codec import save_loops, save_trace
from planner.store.kept_tracer import Fresh

Group = dict[Capability, StoredLoop]  # loops that differ in their cases only
_UNTAKEN = (PlannerError, ImportError)  # the second where traces were kept and no torch is installed


def save_job(
    job: Job, batch: int, chip: Target, tracer: TraceSource, keeper: Fresh | None, path: Path
) -> None:
    """Write a file that plans by itself, at `batch` unless another is asked for.

    `keeper` takes loops; without one, or where the job has none, the file holds one trace: for all batch
    sizes where the tracer's lie on lines, else for `batch`. Raises DataFileError, or as the tracer does.
    """
    about = {"job": job_to_json(job), "batch": batch, "capability": chip.capability}
    groups = [] if keeper is None else take_groups(keeper, chip, batch)
    if not groups:
        save_trace(_whole(tracer, batch), path, about)
        return
    known = next(iter(groups[0].values())).own.notes
    more = tuple(note for note in tracer(batch).notes if note not in known)  # of what traced it
    loops = []
    for group in groups:
        own = next(iter(group.values())).own
        loops.append((replace(own, notes=(*own.notes, *more)), loops_to_json(group)))
    save_loops(loops, path, about | {"multiprocessors": chip.sm_count})


def _whole(tracer: TraceSource, batch: int) -> Trace:
    affine = align(*map(tracer, FIT_BATCHES))
    if isinstance(affine, Trace):
        affine = refit(affine, tracer(batch))
    if isinstance(affine, str):
        return tracer(batch)
    sizes = " and ".join(map(str, affine.batches))
    note = f"scratch memory of kernels is as traced at batches {sizes}; at others it may differ"
    return replace(affine, notes=(*affine.notes, note))


# ---- loops


def take_groups(keeper: Fresh, chip: Target, batch: int) -> list[Group]:
    """The job's loops on all GPUs that the planner knows, and its runs where they do not answer: one sample,
    and the batch size that was planned with the next one. None where the job has no loop on this GPU.

    Those of this GPU come first. Raises the errors of a trace.
    """
    loops = _answering(keeper, chip, FIT_BATCHES)
    if not loops:
        return []
    groups: list[Group] = []
    _place(groups, chip, [*loops, *_runs(keeper, chip, loops, (1, batch, batch + 1))])
    others = {device.capability for device in load_devices()} - {chip.capability}
    for other in map(Target.for_capability, sorted(others)):
        with suppress(*_UNTAKEN):  # what such a GPU cannot run is not in the file
            loops = _answering(keeper, other, FIT_BATCHES)
            if loops:
                _place(groups, other, [*loops, *_runs(keeper, other, loops, (1,))])
    return groups


def _answering(keeper: Fresh, chip: Target, batches: Sequence[int]) -> tuple[StoredLoop, ...]:
    loops = keeper.loops(chip)
    is_known = all(_answer(loops, chip, batch) for batch in batches)
    return loops if is_known else ()


def _answer(loops: Iterable[StoredLoop], chip: Target, batch: int) -> bool:
    return any(loop.answers(batch, chip.sm_count) is not None for loop in loops)


def _runs(
    keeper: Fresh, chip: Target, loops: Sequence[StoredLoop], batches: Sequence[int]
) -> Iterator[StoredLoop]:
    for batch in sorted(set(batches)):
        if not _answer(loops, chip, batch):
            with suppress(*_UNTAKEN):  # a model may refuse a batch of one sample
                run = keeper.run(batch, chip)
                if run.own.is_affine:  # else its kernels are in it, as they are on these multiprocessors only
                    yield run


def _place(groups: list[Group], chip: Target, loops: Iterable[StoredLoop]) -> None:
    for loop in loops:
        alike = (group for group in groups if chip.capability not in group and _is_like(group, loop))
        group = next(alike, None)
        if group is None:
            groups.append({chip.capability: loop})
        else:
            group[chip.capability] = loop


def _is_like(group: Group, loop: StoredLoop) -> bool:
    one = next(iter(group.values()))
    return (one.own, one.kernels, one.first) == (loop.own, loop.kernels, loop.first)
