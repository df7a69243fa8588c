"""Run recurrent layers as on CUDA, by one operator of cuDNN.

It runs all layers, directions and time steps. On the meta device, `lstm`, `gru` and `rnn` unroll into cells.
ATen/native/RNN.cpp passes CUDA tensors to cuDNN; cudnn/RNN.cpp, which this module follows, calls cuDNN. Once
`nn.LSTM` is on the GPU, its weights are views of one buffer (`flatten_parameters`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.cuda.devices.placement import is_on_host, is_put_on_gpu, opened
from planner.capture.operator_table import overload
from planner.capture.workspaces.nn.rnn import FIRST_DROPOUT_DIM, MODE_NUMBERS, RnnSizes

aten = torch.ops.aten


def flatten_weights(layer: nn.Module) -> Iterator[Tensor]:
    """Move the weights of a recurrent layer into one buffer, and yield the buffer before they move.

    `flatten_parameters` does the same on a GPU. The weights' previous storages are released when the caller
    resumes. For other modules, and for weights that cannot be flattened, nothing is yielded or changed.
    """
    if not isinstance(layer, nn.RNNBase) or not _is_whole(layer):
        return
    weights: list[Any] = list(layer._flat_weights)
    buffer = torch.empty(_elements(layer), dtype=weights[0].dtype, device="meta")
    yield buffer
    _move_into(buffer, weights)


def patches() -> Iterator[tuple[str, object]]:
    """Yield the name of `RNNBase.flatten_parameters`, which running loops call, and its replacement."""
    yield "torch.nn.modules.rnn.RNNBase.flatten_parameters", _flatten_again


def _flatten_again(layer: Any) -> None:
    """Move a recurrent layer's weights, if all can be moved, into a new buffer, as CUDA does in each call.

    The buffer is allocated before the weights' previous storages are freed.
    """
    if not _can_flatten(layer):
        return
    weights = layer._flat_weights
    buffer = torch.zeros(_elements(layer), dtype=weights[0].dtype, device="meta")
    if is_put_on_gpu(weights[0]):
        opened[-1].put(buffer)
    _move_into(buffer, weights)


def _move_into(buffer: Tensor, weights: Sequence[Tensor]) -> None:
    """Make weights views of a buffer, one after the other."""
    offset = 0
    for weight in weights:
        weight.data = buffer.as_strided(weight.shape, weight.stride(), offset)
        offset += weight.numel()


def _elements(layer: nn.RNNBase) -> int:
    return RnnSizes(
        MODE_NUMBERS[layer.mode], layer.input_size, layer.hidden_size, layer.proj_size, layer.num_layers,
        layer.bidirectional,
    ).weight_elements()  # fmt: skip


def _can_flatten(layer: nn.RNNBase) -> bool:
    """Return whether all weights of a layer can be moved into one buffer.

    They must be contiguous meta tensors of one dtype that cuDNN supports, and on the GPU.
    """
    weights = layer._flat_weights
    if layer.mode not in MODE_NUMBERS:
        return False
    if not all(isinstance(w, Tensor) and w.is_meta and w.is_contiguous() for w in weights):
        return False
    if any(is_on_host(w) for w in weights):  # type: ignore[arg-type]
        return False
    kinds = {w.dtype for w in weights}  # type: ignore[union-attr]
    return len(kinds) == 1 and kinds <= torch.backends.cudnn.CUDNN_TENSOR_DTYPES


def _is_whole(layer: nn.RNNBase) -> bool:
    """Return whether a layer's weights can be flattened and no two of them share a storage."""
    weights: list[Any] = list(layer._flat_weights)
    return _can_flatten(layer) and len({w.untyped_storage()._cdata for w in weights}) == len(weights)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Return the kernels of recurrent layers and cells, keyed by operator name."""

    ranks = chain([FIRST_DROPOUT_DIM], repeat(1))

    def dropout_state() -> Tensor:
        """Return an empty tensor that stands for cuDNN's dropout state, with a special rank at the first use.

        It takes no memory, and all layers share the state. By the rank, the operator's workspace rule
        allocates the state at the first use.
        """
        return torch.empty((0,) * next(ranks), dtype=torch.uint8, device="meta")

    return {
        f"{name.lower()}.{layout}": _kernel(number, f"{name.lower()}.{layout}", dropout_state, capability)
        for name, number in MODE_NUMBERS.items()
        for layout in ("input", "data")
    } | _CELLS


def _kernel(
    mode: int, name: str, dropout_state: Callable[[], Tensor], capability: tuple[int, int]
) -> Callable[..., Any]:
    """Return a function that runs a recurrent operator by cuDNN, or decomposed if cuDNN does not support it.

    `mode` is cuDNN's number for the kind of the layer. `NAME.input` takes samples of one length, `NAME.data`
    packed samples.
    """
    decompose = overload(name).decompose

    def run(x: Tensor, *args: Any) -> Any:
        if not _is_cudnn(x, capability):
            return decompose(x, *args)
        sizes: list[int] = []
        if name.endswith(".data"):
            sizes = args[0].tolist()  # on the CPU, with values
            args = (*args[1:], False)
        hidden, weights, biases, layers, p, train, bidirectional, batch_first = args
        dropout = dropout_state() if train and p > 0 and not is_on_host(weights[0]) else None
        options = layers, batch_first, p, train, bidirectional, sizes, dropout
        return _run(mode, x, hidden, weights, biases, options)

    return run


def _is_cudnn(x: Tensor, capability: tuple[int, int]) -> bool:
    """Return whether cuDNN runs a recurrent layer for the input `x`.

    The rule is `use_cudnn` of RNN.cpp. bfloat16 needs cuDNN 9.13, which is assumed, and capability 8.0
    (detail/CUDAHooks.cpp).
    """
    if x.numel() == 0:
        return False
    return x.dtype is not torch.bfloat16 or capability >= (8, 0)


def _run(
    mode: int, x: Tensor, hidden: Any, weights: Sequence[Tensor], biases: bool, options: tuple[Any, ...]
) -> Any:
    """Call cuDNN's operator for a recurrent layer, and return its output and states.

    It gets the buffer of the weights if they share one (`_cudnn_impl`).
    """
    hx, cx = hidden if isinstance(hidden, (tuple, list)) else (hidden, None)
    width, projected = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hx.shape[2]:
        width, projected = cx.shape[2], hx.shape[2]
    per_layer = (4 if biases else 2) + (1 if projected else 0)
    buffer = _shared_buffer(weights)
    output, hy, cy, *_ = aten._cudnn_rnn(
        x, weights, per_layer, buffer, hx, cx, mode, width, projected, *options
    )
    return (output, hy) if cx is None else (output, hy, cy)


def _shared_buffer(weights: Sequence[Tensor]) -> Tensor | None:
    """Return a flat tensor over the storage that all weights (at least two) share, or None if there is none.

    Without a shared storage, cuDNN's operator copies the weights into a buffer at each call.
    """
    storages = {w.untyped_storage()._cdata for w in weights}
    if len(storages) > 1 or len(weights) == 1:
        return None
    storage = weights[0].untyped_storage()
    with torch.no_grad():
        empty = torch.empty(0, dtype=weights[0].dtype, device="meta")
        return empty.set_(storage, 0, (storage.nbytes() // weights[0].element_size(),), (1,))


# ---- cells, whose gates one kernel computes (ATen/native/RNN.cpp, GRUCell and LSTMCell)


def _gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    hy: Tensor = aten._thnn_fused_gru_cell(x.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]
    return hy


def _lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden, cell = hx
    hy, cy, _ = aten._thnn_fused_lstm_cell(x.matmul(w_ih.t()), hidden.matmul(w_hh.t()), cell, b_ih, b_hh)
    return hy, cy


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return new tensors for the next state of a GRU cell and the workspace saved for the backward pass.

    Source: native/cuda/RNN.cu.
    """
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return new tensors for the gradients of a GRU cell's gates and state, and None for both biases.

    Source: cuda/RNN.cu.
    """
    width = 3 * (workspace.shape[1] // 5)
    gates = [workspace.new_empty((workspace.shape[0], width)) for _ in range(2)]
    return *gates, grad_hy.new_empty(grad_hy.shape), None, None


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of a GRU cell for both gates, the state and, if `has_bias`, both biases.

    Without `has_bias`, the gradients of the biases are None.
    """
    with torch._C._AutoDispatchBelowAutograd():
        of_input, of_hidden, grad_hx, *none = aten._thnn_fused_gru_cell_backward(grad_hy, workspace, False)
        biases = [of_input.sum(0), of_hidden.sum(0)] if has_bias else none
    return of_input, of_hidden, grad_hx, *biases


_CELLS: dict[str, Callable[..., Any]] = {
    "gru_cell": _gru_cell,
    "lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


# ---- outputs of cuDNN


def cudnn_rnn(
    x: Tensor, weight: Sequence[Tensor], weight_stride0: int, buffer: Tensor | None, hx: Tensor,
    cx: Tensor | None, mode: int, hidden: int, projected: int, layers: int, batch_first: bool, p: float,
    train: bool, bidirectional: bool, batch_sizes: Sequence[int], dropout: Tensor | None,
) -> Any:  # fmt: skip
    """Return new tensors for the results of `_cudnn_rnn`.

    The results are output, hidden state, cell state, reserve space and weight buffer. The weight buffer is
    new only if `buffer` is None. The device is that of the weights: a layer on the CPU may get tensors with
    values.
    """
    new = weight[0].new_empty
    sizes = RnnSizes(mode, x.shape[-1], hidden, projected, layers, bidirectional)
    width, states = sizes.width * sizes.directions, layers * sizes.directions
    if batch_sizes:
        rows, samples = x.shape[0], batch_sizes[0]
        output = new((rows, width))
    else:
        steps, samples = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
        rows = steps * samples
        output = new((steps, samples, width))
        output = output.transpose(0, 1) if batch_first else output
    hy = new((states, samples, sizes.width))
    cy = new((0,)) if cx is None else new((states, samples, hidden))
    reserve_bytes = sizes.reserve_bytes(rows, x.element_size()) if train else 0
    reserve = new(reserve_bytes, dtype=torch.uint8)
    if buffer is None:
        buffer = new(sum(w.numel() for w in weight))
    return output, hy, cy, reserve, buffer


def cudnn_rnn_backward(
    x: Tensor, weight: Sequence[Tensor], weight_stride0: int, buffer: Tensor, hx: Tensor, cx: Tensor | None,
    output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, mode: int,
    hidden: int, projected: int, layers: int, batch_first: bool, p: float, train: bool, bidirectional: bool,
    batch_sizes: Sequence[int], dropout: Tensor | None, reserve: Tensor, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Return new tensors for the gradients of a recurrent layer run by cuDNN.

    They are of the input, the hidden state, the cell state and the weights. The weights' gradients are views
    of one buffer. All gradients are None if no output has a gradient.
    """
    if grad_output is None and grad_hy is None and grad_cy is None:
        return None, None, None, [None] * len(weight)
    if batch_first and not batch_sizes:
        dx = x.new_empty((x.shape[1], x.shape[0], x.shape[2])).transpose(0, 1)
    else:
        dx = x.new_empty(x.shape)
    dhx = hx.new_empty(hx.shape)
    dcx = None if cx is None else cx.new_empty(cx.shape)
    if not mask[3]:
        return dx, dhx, dcx, []
    flat = buffer.new_empty(buffer.shape)
    views, offset = [], 0
    for w in weight:
        views.append(flat.as_strided(w.shape, w.stride(), offset))
        offset += w.numel()
    return dx, dhx, dcx, views


KERNELS: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
