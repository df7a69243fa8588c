"""The process in which `--isolate` runs a model: requests in as lines of JSON, programs out as files.

A message has `job`, `kind`, `limit_seconds`, `capability`, `multiprocessors`, `batch` and `path`; its answer
is {} once the file is there, or `error` and `message`. The lines are those of `planner._support.worker`.
"""

import faulthandler
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.capture.recorder import ProvenanceCollector
from planner.capture.session import record
from planner.capture.symbolic import ProgramBuilder, open_builder
from planner.errors import PlannerError
from planner.jobs import job_from_json
from planner.program import OnProgress, Program, Target, constant_program
from planner.store import save_programs

_GRACE_SECONDS = 5  # the parent stops this process first, if it is still there


def main() -> None:
    """Answer until the input ends."""
    # The model gets an empty input, and an output that is not the one for answers.
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    builders: list[ProgramBuilder] = []  # of the one job, once it is known

    def send(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line).encode() + b"\n")
        answers.flush()

    for line in requests:
        request = json.loads(line)
        number, message = request["number"], request["message"]

        def begin_run(_: str, number: int = number, seconds: float = message["limit_seconds"]) -> None:
            # Where the parent was killed, nobody else stops a model that hangs.
            faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True)
            send({"number": number, "alive": True})

        send({"number": number, "answer": _answer(message, builders, begin_run)})


def _answer(message: dict[str, Any], builders: list[ProgramBuilder], begin_run: OnProgress) -> dict[str, str]:
    """Capture programs into the file that the message names, and return the answer."""
    major, minor = message["capability"]
    target = Target((major, minor), message["multiprocessors"])
    try:
        begin_run("")
        save_programs(_capture(message, target, builders, begin_run), Path(message["path"]), {})
    except PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # the model's own, or one that it caused
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"error": "ModelError", "message": f"the model's process fails: {text}; see it with --debug"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {}


def _capture(
    message: dict[str, Any], target: Target, builders: list[ProgramBuilder], begin_run: OnProgress
) -> Sequence[Program]:
    job, batch = job_from_json(message["job"]), message["batch"]
    if message["kind"] == "provenance":
        provenance, sm_count = ProvenanceCollector(), target.sm_count
        trace = record(job, batch, target.capability, provenance=provenance, sm_count=sm_count)
        return [constant_program(trace, target)]
    if not builders:
        builders.append(open_builder(job, begin_run))
    (builder,) = builders
    programs = builder.programs(target) if message["kind"] == "programs" else [builder.run(batch, target)]
    for program in programs:
        builder.enumerate_variants(program, target)
    known = target.capability
    return [replace(program, targets={known: program.targets[known]}) for program in programs]


if __name__ == "__main__":
    main()
