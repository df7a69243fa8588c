"""Replace layers and the loss of a transformers model by Liger's kernels (`--liger`).

The model's modules are patched as with `TrainingArguments(use_liger_kernel=True)`. Liger also replaces
functions in modules of transformers, which is undone afterwards.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from planner.capture.cuda.triton_kernels import triton_importable
from planner.capture.models.libraries import import_library, quiet
from planner.capture.process_state import first_line_of, foreign_errors
from planner.capture.recorder.recorder import Recorder
from planner.capture.techniques.technique import Notes, Technique
from planner.errors import ModelError
from planner.jobs import Job

_PATCHED = ("transformers.models.", "transformers.loss.")


@contextmanager
def _liger_kernels(model: nn.Module, job: Job) -> Iterator[None]:
    """Apply Liger's kernels to the model, and restore the patched functions of transformers on exit.

    Raises ModelError if Liger has no kernels for the model, or if Liger fails.
    """
    with quiet():
        patches = import_library("liger_kernel.transformers.monkey_patch", extra="liger")
    inner = _find_model(model, patches.MODEL_TYPE_TO_APPLY_LIGER_FN)
    if inner is None:
        raise ModelError(f"{job.model.name}: Liger has no kernels for it; remove --liger")

    def explain(error: BaseException) -> ModelError:
        problem = f"{job.model.name}: --liger fails: {first_line_of(error)}"
        return ModelError(f"{problem}; remove it, or see the traceback with --debug")

    before = [
        (module, dict(vars(module))) for name, module in sys.modules.copy().items() if _is_patched(name)
    ]
    try:
        with foreign_errors(explain):
            patches._apply_liger_kernel_to_instance(model=inner)
        yield
    finally:
        for module, names in before:
            vars(module).update(names)


def has_liger_kernels(model: nn.Module) -> bool:
    """Return whether Liger has kernels for a model. Raises ModelError if Liger is not installed."""
    with quiet(), triton_importable():
        patches = import_library("liger_kernel.transformers.monkey_patch", extra="liger")
    return _find_model(model, patches.MODEL_TYPE_TO_APPLY_LIGER_FN) is not None


def _is_patched(name: str) -> bool:
    """Return whether Liger may patch the module named `name`.

    Liger patches models and losses of transformers.
    """
    return name.startswith(_PATCHED) and ("modeling" in name or "loss" in name)


def _find_model(model: nn.Module, known: Any) -> nn.Module | None:
    """Return the outermost transformers model, even inside a peft model, that Liger supports, or None."""
    kind: Any = import_library("transformers", extra="hf").PreTrainedModel
    found = (one for one in model.modules() if isinstance(one, kind) and one.config.model_type in known)
    return next(found, None)


@contextmanager
def _open_model(model: nn.Module, job: Job, recorder: Recorder) -> Iterator[Notes]:
    with _liger_kernels(model, job):
        yield ()


LIGER = Technique(lambda job: job.model.liger, open_model=_open_model)
