"""Quantize the weights of a model, and run torchao's INT8 kernels as on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.capture.cuda.torchao_kernels import torchao_kernels
from planner.capture.models.quantized.layers import notes_on_quantized, quantize_linears, quantize_on_meta
from planner.capture.models.quantized.torchao import prepare_quantization
from planner.capture.techniques.technique import BuiltModel, CapturedLoop, Notes, Technique, is_always_used
from planner.jobs import Job


def _quantize(model: BuiltModel, job: Job) -> BuiltModel:
    """Return the model with linear layers quantized as the job says, and with the tensors they allocate."""
    module = quantize_linears(model.module, job)
    return BuiltModel(module, quantize_on_meta(module))


@contextmanager
def _open_kernels(loop: CapturedLoop) -> Iterator[Callable[[], Notes]]:
    with torchao_kernels():
        yield lambda: notes_on_quantized(loop.job, loop.model)


QUANTIZATION = Technique(
    is_always_used, prepare=prepare_quantization, change_model=_quantize, open_loop=_open_kernels
)
