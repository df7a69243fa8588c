"""Record how a model comes onto the GPU, before its first step.

`Module.to` moves it as a whole. A model with quantized weights is adapted once it is there: its weights are
quantized one after another, what is not quantized may be cast, and adapters follow.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from operator import itemgetter

from torch import Tensor, nn

from planner.capture.cuda.devices import put_order, quantized_on_gpu
from planner.capture.cuda.rnn import flatten_weights
from planner.capture.models.meta_init import tensors_put_on_gpu
from planner.capture.models.quantized import adapters_as_made, cast_to_float32
from planner.capture.models.torchao_weights import Quantized, take_over
from planner.capture.recorder.recorder import Recorder
from planner.jobs import Job
from planner.program import Category


def record_setup(model: nn.Module, job: Job, recorder: Recorder, loaded: dict[int, list[Tensor]]) -> None:
    """Record the tensors of a model; `loaded` are those that quantized modules allocate, by the module's
    identity, and is emptied as they are no longer needed.
    """
    if loaded:
        _record_model(model, recorder, loaded, lambda tensor: not tensor.requires_grad)
    if job.prepare_kbit:
        _record_preparation(model, recorder)
    _record_adapters(model, recorder)
    _record_model(model, recorder, {})


def _record_model(
    model: nn.Module,
    recorder: Recorder,
    loaded: dict[int, list[Tensor]],
    where: Callable[[Tensor], bool] = lambda tensor: True,
) -> None:
    """Record the tensors of a model as it is moved to the GPU: those of its modules for which `where` holds.

    What user code put there while it built the model comes first, in that order. `loaded` are the tensors
    that quantized modules allocate meanwhile, by the module's identity.
    """
    moves = [
        (put_order(one), partial(_record_all, (one,), recorder, "to", ""))
        for one in tensors_put_on_gpu(model)
    ]
    for one in quantized_on_gpu():
        moves.append((one.source_order, partial(_record_source, one, recorder)))
        moves.append((one.order, partial(_record_quantized, one, model, recorder)))
    for name, module in _in_order_of_apply(model):
        held = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
        orders = [put_order(one) for one in held]
        if id(module) in loaded:
            moves.append((min(orders, default=inf), partial(_record_loaded, loaded, module, recorder, name)))
        moves += [
            (order, partial(_record_all, (one,), recorder, "to", name))
            for order, one in zip(orders, held, strict=True)
            if where(one)
        ]
        moves.append((max(orders, default=inf), partial(_record_flattened, module, recorder, name)))
    for _, record in sorted(moves, key=itemgetter(0)):
        record()
    quantized_on_gpu().clear()


def _record_loaded(loaded: dict[int, list[Tensor]], module: nn.Module, recorder: Recorder, name: str) -> None:
    _record_all(loaded.pop(id(module)), recorder, "quantize", name)


def _record_source(one: Quantized, recorder: Recorder) -> None:
    if one.source is not None:
        recorder.record_tensor(one.source, Category.PARAMETER, "to", "")


def _record_quantized(one: Quantized, model: nn.Module, recorder: Recorder) -> None:
    """Record a weight's quantization on the GPU, after which it is no longer there as it was."""
    with recorder:
        made = one.again()
    take_over(model, one, made)
    recorder.set_category(made, Category.PARAMETER)


def _record_flattened(module: nn.Module, recorder: Recorder, name: str) -> None:
    for buffer in flatten_weights(module):
        recorder.record_tensor(buffer, Category.PARAMETER, "flatten_parameters", name)


def _record_all(tensors: Iterable[Tensor], recorder: Recorder, op: str, module: str) -> None:
    for tensor in tensors:
        recorder.record_tensor(tensor, Category.PARAMETER, op, module)


def _record_preparation(model: nn.Module, recorder: Recorder) -> None:
    """Record what peft's `prepare_model_for_kbit_training` casts, and that it empties the cache."""
    with recorder:
        cast_to_float32(model)
    for tensor in model.parameters():
        recorder.set_category(tensor, Category.PARAMETER)
    recorder.record_empty_cache()


def _record_adapters(model: nn.Module, recorder: Recorder) -> None:
    made = dict(adapters_as_made(model))
    _record_all(made.values(), recorder, "to", "")
    for parameter in list(made):
        recorder.record_tensor(parameter, Category.PARAMETER, "to", "")
        del made[parameter]


def _in_order_of_apply(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in the order in which `Module.to` moves their tensors: children first."""
    for name, child in model.named_children():
        yield from _in_order_of_apply(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, model
