"""Save a job with its programs for all known GPUs.

A job without a program is saved with a fitted trace.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from planner.errors import ModelError, PlannerError
from planner.hardware import load_devices
from planner.jobs import Job, job_to_json
from planner.program import (
    FIT_BATCHES,
    LARGEST_BATCH,
    NotAffineError,
    Program,
    ProgramSet,
    Target,
    Trace,
    Variants,
    constant_program,
    fit_traces,
    tensors_diverge,
)
from planner.store.codec import save_programs
from planner.store.source import ProgramSource

_NOT_CAPTURED = (PlannerError, ImportError)  # ImportError if programs were cached and torch is not installed


def save_job(job: Job, batch: int, target: Target, programs: ProgramSet, path: Path) -> None:
    """Write a job and its programs to a file, from which the job can be planned without a capture.

    `batch` is the default batch size of the file. A job without a program is saved as one trace: for all
    batch sizes if its tensors are affine in the batch size, else for `batch`. Raises DataFileError or
    the errors of a capture.
    """
    saved: list[Program] = []
    if isinstance(programs, ProgramSource):
        saved = group_by_structure(programs_for_all_targets(programs, target, batch))
        traced = programs.traced_notes(batch, target)
        saved = [replace(one, notes=tuple(dict.fromkeys((*one.notes, *traced)))) for one in saved]
    if not saved:
        saved = [_fitted(lambda size: programs.trace(size, target), batch, target)]
    about = {"job": job_to_json(job), "batch": batch, "capability": target.capability}
    save_programs(saved, path, about | {"multiprocessors": target.sm_count})


def programs_for_all_targets(
    source: ProgramSource, target: Target, batch: int
) -> Iterator[tuple[Program, Target]]:
    """Yield the job's programs, with their targets, for each known compute capability that can run the job.

    The programs for `target` come first. Each program is followed by runs at batch sizes that it does not
    cover: one sample and, on `target`, `batch` and the next batch size. Nothing is yielded if the job has no
    program on `target`. Raises the errors of a capture for `target` only.
    """
    program = _covering(source, target)
    if program is None:
        return
    yield program, target
    yield from _runs(source, program, target, (1, batch, batch + 1))
    others = {device.capability for device in load_devices()} - {target.capability}
    for other in map(Target.for_capability, sorted(others)):
        with suppress(*_NOT_CAPTURED):  # jobs that such a GPU cannot run are left out
            program = _covering(source, other)
            if program is not None:
                yield program, other
                yield from _runs(source, program, other, (1,))


def _covering(source: ProgramSource, target: Target) -> Program | None:
    try:
        program = source.program(target)
    except ModelError:  # the model refuses a batch size at which programs are fitted
        return None
    if program is None:
        return None
    least = program.targets[target.capability].min_batch
    if not all(program.covers(batch, target) for batch in (least, least + program.unit)):
        return None
    source.enumerate_variants(program, target)
    return program


def _runs(
    source: ProgramSource, program: Program, target: Target, batches: Iterable[int]
) -> Iterator[tuple[Program, Target]]:
    for batch in sorted(set(batches)):
        if not program.covers(batch, target):
            with suppress(*_NOT_CAPTURED):  # a model may refuse a batch of one sample
                run = source.run(batch, target)
                source.enumerate_variants(run, target)
                yield run, target


def group_by_structure(programs: Iterable[tuple[Program, Target]]) -> list[Program]:
    """Merge programs that differ in their GPUs alone, keeping the variants of all GPUs.

    The programs have equal structures, sites, notes and least batch sizes.
    """
    groups: dict[object, Program] = {}
    for program, target in programs:
        variants = program.targets[target.capability]
        key = program.structure, program.sites, program.notes, variants.min_batch
        if key not in groups:
            groups[key] = replace(program, targets={}, rules=None)
        groups[key].targets[target.capability] = variants
    return list(groups.values())


def _fitted(trace_at: Callable[[int], Trace], batch: int, target: Target) -> Program:
    """Return a program fitted to two traces of the job, or a constant program if it misfits a third trace.

    The constant program is for `batch`. It is also returned if the two traces cannot be fitted.
    """
    traced = trace_at(batch)
    low, third = [size for size in (*FIT_BATCHES, FIT_BATCHES[-1] + 1) if size != batch][:2]
    with suppress(NotAffineError, ModelError):  # ModelError: the model refuses other batch sizes
        program = fit_traces(trace_at(low), traced)
        if not tensors_diverge(program, trace_at(third)):
            sizes = " and ".join(map(str, sorted((low, batch))))
            note = f"scratch memory of kernels is as traced at batches {sizes}; at others it may differ"
            targets = {target.capability: Variants(0, 1, LARGEST_BATCH, [])}
            return replace(program, notes=(*program.notes, note), targets=targets)
    return constant_program(traced, target)
