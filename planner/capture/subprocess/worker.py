"""Run a model in the child process of `--isolate`.

The process reads requests and writes programs to files. A request is a line of JSON with `job`, `kind`,
`limit_seconds`, `capability`, `multiprocessors`, `batch` and `path`; the answer is null once the file is
written.
"""

import faulthandler
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner._support.worker import serve
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.session import record
from planner.capture.symbolic.builder import ProgramBuilder, open_builder
from planner.emulator import open_convolutions
from planner.jobs import job_from_json
from planner.program import OnProgress, Program, Target, constant_program
from planner.store import save_programs

_GRACE_SECONDS = 5  # so that the parent stops this process first, if it still runs


def main() -> None:
    """Capture the requested programs and write them to files, until the input ends."""
    builders: list[ProgramBuilder] = []  # the builder of the only job; empty until it is known

    def answer(message: dict[str, Any], restart_limit: Callable[[], None]) -> None:
        def begin_run(_: str) -> None:
            # If the parent was killed, nothing else stops a model that hangs.
            faulthandler.dump_traceback_later(message["limit_seconds"] + _GRACE_SECONDS, exit=True)
            restart_limit()

        major, minor = message["capability"]
        job = job_from_json(message["job"])
        convolutions = open_convolutions(job)
        target = Target((major, minor), message["multiprocessors"], convolutions)
        try:
            begin_run("")
            save_programs(_capture(message, target, builders, begin_run), Path(message["path"]), {})
        finally:
            faulthandler.cancel_dump_traceback_later()

    serve(answer, "the model's process fails: {}; see it with --debug")


def _capture(
    message: dict[str, Any], target: Target, builders: list[ProgramBuilder], begin_run: OnProgress
) -> Sequence[Program]:
    job, batch = job_from_json(message["job"]), message["batch"]
    if message["kind"] == "provenance":
        trace = record(
            job, batch, target.capability, provenance=ProvenanceCollector(),
            sm_count=target.sm_count, conv_workspace_query=target.conv_workspace_query,
        )  # fmt: skip
        return [constant_program(trace, target)]
    if not builders:
        builders.append(open_builder(job, begin_run))
    (builder,) = builders
    programs = builder.programs(target) if message["kind"] == "programs" else [builder.run(batch, target)]
    for program in programs:
        builder.enumerate_variants(program, target)
    capability = target.capability
    return [replace(program, targets={capability: program.targets[capability]}) for program in programs]


if __name__ == "__main__":
    main()
