"""Record the allocations of moving a model to the GPU before its first step.

`Module.to` moves the model as a whole. A model with quantized weights is adapted on the GPU: its weights are
quantized one after another, the weights that are not quantized may be cast, and adapters are added last.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.cuda.devices.moves import in_order_of_apply
from planner.capture.cuda.devices.placed import CacheEmptied, Called, Entry, Freed, Put, Replayed
from planner.capture.cuda.devices.placement import (
    is_put_on_gpu,
    modules_on_cpu,
    placed_tensors,
    put_order,
    work_put_off,
)
from planner.capture.cuda.operators.rnn import flatten_weights
from planner.capture.models.quantized.layers import adapters_as_made, cast_to_float32
from planner.capture.patching import patched
from planner.capture.recorder.recorder import Recorder
from planner.jobs import Job
from planner.program import Category


def record_setup(model: nn.Module, job: Job, recorder: Recorder, loaded: dict[int, list[Tensor]]) -> None:
    """Record the allocations of a model's tensors before the first step.

    The move to the GPU, quantization and adapters allocate memory. `loaded` holds the tensors that each
    quantized module allocates, by the module's `id`; entries are removed once recorded.
    """
    if loaded:
        _record_model(model, recorder, loaded, lambda tensor: not tensor.requires_grad)
    if job.model.prepare_kbit:
        _record_preparation(model, recorder)
    _record_adapters(model, recorder)
    _record_model(model, recorder, {})


def _record_model(
    model: nn.Module,
    recorder: Recorder,
    loaded: dict[int, list[Tensor]],
    where: Callable[[Tensor], bool] = lambda tensor: True,
) -> None:
    """Record the move of a model's tensors to the GPU.

    Tensors for which `where` is false are omitted. Tensors that user code put on the GPU while it built the
    model are recorded first, in the order of their allocation, including tensors that were freed again.
    `loaded` holds the tensors that each quantized module allocates during the move, by the module's `id`.
    """
    log = Replayed(placed_tensors())
    moves: list[tuple[float, Callable[[], None]]] = [
        (number, partial(_record_logged, log, entry, recorder))
        for number, entry in placed_tensors().take_entries()
    ]
    for name, module in in_order_of_apply(model):
        held = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
        orders = [put_order(one) for one in held]
        if id(module) in loaded:
            moves.append((min(orders, default=inf), partial(_record_loaded, loaded, module, recorder, name)))
        moves += [(inf, partial(_record_all, (one,), recorder, "to", name)) for one in held if where(one)]
        moves.append((max(orders, default=inf), partial(_record_flattened, module, recorder, name)))
        moves.append((inf, partial(_record_others, module, recorder, name)))
    moves += [(order, partial(_run, work, recorder)) for order, work in work_put_off()]
    for _, record in sorted(moves, key=itemgetter(0)):
        record()
    for tensor in log.living():
        recorder.set_category(tensor, Category.PARAMETER)
    for name, module in in_order_of_apply(model):
        for one in (*module._parameters.values(), *module._buffers.values()):
            if one is not None and put_order(one) < inf:
                recorder.set_module(one, name)


def _run(work: Callable[[], None], recorder: Recorder) -> None:
    with recorder:
        work()


def _record_loaded(loaded: dict[int, list[Tensor]], module: nn.Module, recorder: Recorder, name: str) -> None:
    _record_all(loaded.pop(id(module)), recorder, "quantize", name)


def _record_logged(log: Replayed, entry: Entry, recorder: Recorder) -> None:
    """Record one logged GPU event of the model's build: an allocation, call, free or emptied cache."""
    match entry:
        case Put():
            recorder.record_tensor(log.bytes_of(entry), Category.TEMPORARY, "to", "")
        case Called(func, args, kwargs, out):
            recorder.record_call(func, *log.tensors((args, kwargs, out)))
        case Freed(number):
            log.free(number)
        case CacheEmptied():
            recorder.record_empty_cache()


def _record_flattened(module: nn.Module, recorder: Recorder, name: str) -> None:
    for buffer in flatten_weights(module):
        recorder.record_tensor(buffer, Category.PARAMETER, "flatten_parameters", name)


def _record_others(module: Any, recorder: Recorder, name: str) -> None:
    """Record the allocations of tensors that only a module's override of `_apply` moves to the GPU.

    The tensors are replaced by meta tensors. Metrics of torchmetrics hold such tensors as states. Parameters
    and buffers are recorded before. A module that user code moved to the CPU is skipped.
    """
    if type(module)._apply.__module__.partition(".")[0] == "torch" or module in modules_on_cpu():
        return

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_meta and tensor not in recorder.host:
            return tensor
        moved = torch.empty_like(tensor, device="meta")
        recorder.record_tensor(moved, Category.PARAMETER, "to", name)
        return moved

    with patched(nn.Module, "_apply", lambda module, fn, recurse=True: module):
        module._apply(move)


def _record_all(tensors: Iterable[Tensor], recorder: Recorder, op: str, module: str) -> None:
    for tensor in tensors:
        recorder.record_tensor(tensor, Category.PARAMETER, op, module)


def _record_preparation(model: nn.Module, recorder: Recorder) -> None:
    """Cast weights to float32 as peft's `prepare_model_for_kbit_training` does, and record the casts."""
    with recorder:
        cast_to_float32(model)
    for tensor in model.parameters():
        recorder.set_category(tensor, Category.PARAMETER)
    recorder.record_empty_cache()


def _record_adapters(model: nn.Module, recorder: Recorder) -> None:
    made = {one: first for one, first in adapters_as_made(model) if not is_put_on_gpu(one)}
    _record_all(made.values(), recorder, "to", "")
    for parameter in list(made):
        recorder.record_tensor(parameter, Category.PARAMETER, "to", "")
        del made[parameter]
