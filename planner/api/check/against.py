"""Plan the jobs of a check with the code of another git revision, in a separate process.

That process never imports the user's current code. It runs this module by `python -m
planner.api.check.against`: each request has a job, each answer the job's memory by GPU or by module.
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

import msgspec

from planner._support.worker import Worker, WorkerError, serve
from planner.api.check.rows import plan_modules, plan_rows
from planner.api.request.options import Options
from planner.errors import ModelError, PlannerError
from planner.hardware import Device
from planner.jobs import job_from_json, job_to_json
from planner.planning.check import (
    SMALLEST_BYTES,
    CheckChange,
    CheckConfig,
    CheckJob,
    CheckRow,
    Comparison,
    Headroom,
    Revision,
    export_revision,
    module_changes,
)
from planner.program import ignore_progress

_CALLBACKS = ("warn", "on_progress")
_PLAIN = ("name", "batch", "confidence", "alloc_conf", "allocator_cap_mib")  # fields of a job, copied
Ask = Callable[[str, CheckJob, Device | None], Any]


def compare(
    config: CheckConfig,
    rows: Iterable[CheckRow],
    revision: str,
    max_increase: Headroom | None,
    options: Options,
) -> Comparison:
    """Return how the process memory of each row (a job on a GPU) changed since a git revision.

    Raises UsageError.

    A job that cannot be planned with the revision's code is listed with its error.
    """
    folder, on_progress = config.path.parent, options.get("on_progress") or ignore_progress
    by_job: dict[str, list[CheckRow]] = {}
    for row in rows:
        by_job.setdefault(row.job.name, []).append(row)
    changes: list[CheckChange] = []
    missing: list[tuple[str, str]] = []
    with export_revision(folder, revision) as exported:
        ask = _open_worker(exported, options)
        for name, of_job in by_job.items():
            on_progress(f"planning {name} at {revision}")
            try:
                before = ask("process", of_job[0].job, None)
            except PlannerError as error:
                missing.append((name, str(error)))
                continue
            for row, size_bytes in zip(of_job, before, strict=True):
                changes.append(_change(row, size_bytes, folder, ask, options))
    return Comparison(revision, exported.commit, max_increase, tuple(changes), tuple(missing))


def _change(row: CheckRow, before_bytes: int, folder: Path, ask: Ask, options: Options) -> CheckChange:
    """Return the change of a row's process memory, by module too if it is `SMALLEST_BYTES` or more."""
    if abs(row.estimate.process_bytes - before_bytes) < SMALLEST_BYTES:
        return CheckChange(row, before_bytes, None, ())
    then = ask("modules", row.job, row.device)
    with chdir(folder):
        now = plan_modules(row.job, row.device, options)
    return CheckChange(row, before_bytes, *module_changes(then, now))


def _open_worker(revision: Revision, options: Options) -> Ask:
    # -P: a folder of the user's with the name of this package must not be run in its place.
    worker = Worker([sys.executable, "-P", "-m", "planner.api.check.against"])
    kept = {key: value for key, value in options.items() if key not in _CALLBACKS}

    def ask(kind: str, checked: CheckJob, device: Device | None) -> Any:
        devices = checked.devices if kind == "process" else (device,)
        message = {
            "kind": kind,
            "folder": str(revision.folder),
            "job": job_to_json(checked.job),
            "devices": msgspec.to_builtins(devices),
            **{name: getattr(checked, name) for name in _PLAIN},
            "options": msgspec.to_builtins(kept, enc_hook=str),
        }
        try:
            return worker.request(message)
        except WorkerError as error:
            raise ModelError(f"the process of {revision.name} {error}") from None

    return ask


def main() -> None:
    """Read requests for the memory of jobs from standard input until it ends, and answer each."""

    def answer(message: dict[str, Any], restart_limit: Callable[[], None]) -> Any:
        folder = message["folder"]
        if folder not in sys.path:  # the revision's packages come before installed ones
            sys.path[:0] = [folder, str(Path(folder) / "src")]
        os.chdir(folder)
        devices = msgspec.convert(message["devices"], tuple[Device | None, ...])
        plain = {name: message[name] for name in _PLAIN}
        job = job_from_json(message["job"])
        checked = CheckJob(
            where="", line=0, job=job, devices=devices, budget_bytes=None, headroom=Headroom(), **plain
        )
        if message["kind"] == "process":
            rows = plan_rows(checked, message["options"], lambda verdict: False)
            return [row.estimate.process_bytes for row in rows]
        return plan_modules(checked, devices[0], message["options"])

    serve(answer, "its process fails: {}")


if __name__ == "__main__":
    main()
