"""The process in which `--isolate` runs a model: requests in as lines of JSON, traces out as files.

A line has `job`, `kind`, `limit_seconds`, `capability`, `multiprocessors`, `batch` and `path`; each is
answered by a line of JSON: {} once the file is there, or `error` and `message`.
"""

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.jobs import job_from_json
from planner.planning import TraceSource, take_detailed_trace, take_trace, trace_workload
from planner.program import Target
from planner.store import save_trace

_GRACE_SECONDS = 5  # the parent stops this process first, if it is still there
_TAKES = {"plain": take_trace, "details": take_detailed_trace}


def main() -> None:
    """Answer until the input ends."""
    # The model gets an empty input, and an output that is not the one for answers.
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for answer in _answers(requests):
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answers(requests: Any) -> Iterator[dict[str, str]]:
    tracers: dict[Target, TraceSource] = {}
    for line in requests:
        said = json.loads(line)
        major, minor = said["capability"]
        chip = Target((major, minor), said["multiprocessors"])
        try:
            # Where the parent was killed, nobody else stops a model that hangs.
            faulthandler.dump_traceback_later(said["limit_seconds"] + _GRACE_SECONDS, exit=True)
            if chip not in tracers:
                job, take = job_from_json(said["job"]), _TAKES[said["kind"]]
                tracers[chip] = trace_workload(job, None, None, chip, take).open(lambda line: None)
            save_trace(tracers[chip](said["batch"]), Path(said["path"]), {})
            yield {}
        except PlannerError as error:
            yield {"error": type(error).__name__, "message": str(error)}
        except BaseException as error:  # the model's own, or one that it caused
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            yield {
                "error": "ModelError",
                "message": f"the model's process fails: {text}; see it with --debug",
            }
        finally:
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
