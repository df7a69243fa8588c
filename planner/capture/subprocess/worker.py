"""The process in which `--isolate` runs a model: requests in as lines of JSON, traces out as files.

A message has `job`, `kind`, `limit_seconds`, `capability`, `multiprocessors`, `batch` and `path`; its answer
is {} once the file is there, or `error` and `message`. The lines are those of `planner._support.worker`.
"""

import faulthandler
import json
import os
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
    tracers: dict[Target, TraceSource] = {}
    for line in requests:
        request = json.loads(line)
        answer = _capture(request["message"], tracers)
        answers.write(json.dumps({"number": request["number"], "answer": answer}).encode() + b"\n")
        answers.flush()


def _capture(message: dict[str, Any], tracers: dict[Target, TraceSource]) -> dict[str, str]:
    """Capture a trace into the file that the message names, and return the answer."""
    major, minor = message["capability"]
    target = Target((major, minor), message["multiprocessors"])
    try:
        # Where the parent was killed, nobody else stops a model that hangs.
        faulthandler.dump_traceback_later(message["limit_seconds"] + _GRACE_SECONDS, exit=True)
        if target not in tracers:
            job, take = job_from_json(message["job"]), _TAKES[message["kind"]]
            tracers[target] = trace_workload(job, None, None, target, take).open(lambda line: None)
        save_trace(tracers[target](message["batch"]), Path(message["path"]), {})
    except PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # the model's own, or one that it caused
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"error": "ModelError", "message": f"the model's process fails: {text}; see it with --debug"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {}


if __name__ == "__main__":
    main()
