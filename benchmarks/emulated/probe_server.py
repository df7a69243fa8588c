"""Answer requests to the probe of calibration, each in a process forked after the slow imports.

`probe_client.py` starts it, also under `planner run`. A line on standard input is a JSON request with the
file to which the answer goes. A fork is as fresh as a new process: CUDA is initialized only in forks.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# Not MONAI, which sets CUBLAS_WORKSPACE_CONFIG when imported (monai/utils/misc.py), for its own jobs alone.
SLOW_IMPORTS = (
    *("torch", "torchvision", "timm", "transformers", "segmentation_models_pytorch"),
    *(
        "torch.optim.swa_utils",
        "planner.capture.loop.training_loop",
        "planner.capture.models.registry",
        "calibration.probe.run",
    ),
)


def main() -> None:
    """Serve until standard input ends."""
    _tolerate_older_torch()
    _let_checks_pass()
    for name in SLOW_IMPORTS:
        with suppress(ModuleNotFoundError):  # of a library whose models no job has
            import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer = Path(request["answer"])
        child = os.fork()
        if child == 0:
            _answer(request, answer)
        problem = _wait(child, request["max_seconds"])
        if not answer.exists():
            _write(answer, {"error": "ModelError", "message": problem})


def _tolerate_older_torch() -> None:
    """Give capture's tables stand-ins for operators and optimizers that this torch, an older one, lacks.

    Only capture's loop and models run here, not its tables.
    """
    import torch

    import planner.capture.operator_table as operator_table

    find = operator_table.overload

    def overload(name: str) -> Any:
        try:
            return find(name)
        except AttributeError:
            return name

    operator_table.overload = overload
    if not hasattr(torch.optim, "Adafactor"):  # since 2.5
        torch.optim.Adafactor = _missing
    if not hasattr(torch, "accelerator"):  # since 2.6
        torch.accelerator = ModuleType("torch.accelerator")
        torch.accelerator.current_accelerator = _missing


def _let_checks_pass() -> None:
    """Let transformers' checks of values pass: kernels write none, so a condition reads as false."""
    import torch

    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    is_true = torch.Tensor.__bool__

    def is_true_or_checked(self: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_code.co_name
        return caller == "generalized_box_iou" or is_true(self)  # loss_for_object_detection.py

    torch.Tensor.__bool__ = is_true_or_checked  # type: ignore[method-assign]


def _missing(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("this version of torch does not have it")


def _answer(request: Mapping[str, Any], answer: Path) -> None:
    """Run the job in this fork, which ends with it."""
    os.dup2(2, 1)  # what libraries print is not the answer
    os.environ.update(request["environment"])
    from calibration.probe import __main__ as probe
    from planner._support.worker import reply_of

    reply = reply_of(probe.FAILURE, probe.answer, request["probe"])
    _write(answer, reply.get("answer", reply))
    os._exit(0)


def _wait(child: int, max_seconds: float) -> str:
    """Wait for a fork, and return the error message for the case that it left no answer."""
    start = time.monotonic()
    while time.monotonic() - start < max_seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return f"the probe ended with exit code {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"the probe took more than {max_seconds} s"


def _write(path: Path, reply: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(reply), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
