"""Liger's own kernels as its benchmarks ran them: its modules and functions over inputs on meta.

Beside them are those of DeepSpeed and Megatron that its benchmarks ran.

Each function builds one from the settings of a published row: the sizes of its `cfg` and the swept one. What
a script makes beside, such as the weights of the plain module, is made here too.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.operator_loop import Operator, Outputs
from benchmarks.accuracy.operators import (
    META,
    Sizes,
    held_gradients,
    ids,
    leaf,
    random_gradients,
    rms_norm as plain_rms_norm,
    summed,
)
from planner.capture.models.libraries import import_library


def _library(name: str) -> Any:
    """Import a module of Liger."""
    return import_library(f"liger_kernel.{name}", extra="liger")


def _module(make: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module on meta."""
    with META:
        return make().to(dtype)


# ---- layers


def _mlp(name: str, activation: str, mode: str, sizes: Sizes, **shards: int) -> Operator:
    batch = sizes.get("bsz") or sizes["B"]
    x = leaf(batch, sizes["T"], sizes["hidden_size"])
    config = SimpleNamespace(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        hidden_act=activation,
        pretraining_tp=1,
    )
    file, _, kind = name.partition(":")
    layer = _module(lambda: getattr(_library(f"transformers.{file}"), kind)(config, **shards), torch.bfloat16)
    gradients = held_gradients(torch.randn_like(x)) if mode == "backward" else random_gradients
    return Operator(lambda: layer(x), gradients, mode, keeps_graph=True)


def geglu(mode: str, sizes: Sizes) -> Operator:
    """Return GEGLU's MLP."""
    return _mlp("geglu:LigerGEGLUMLP", "gelu_pytorch_tanh", mode, sizes)


def swiglu(mode: str, sizes: Sizes) -> Operator:
    """Return SwiGLU's MLP."""
    return _mlp("swiglu:LigerSwiGLUMLP", "silu", mode, sizes)


def tiled_geglu(mode: str, sizes: Sizes) -> Operator:
    """Return GEGLU's MLP over tiles of the texts."""
    shards = sizes["num_shards"]
    return _mlp("tiled_mlp:LigerTiledGEGLUMLP", "gelu_pytorch_tanh", mode, sizes, num_shards=shards)


def tiled_swiglu(mode: str, sizes: Sizes) -> Operator:
    """Return SwiGLU's MLP over tiles of the texts."""
    shards = sizes["num_shards"]
    return _mlp("tiled_mlp:LigerTiledSwiGLUMLP", "silu", mode, sizes, num_shards=shards)


def tiled_plain(is_gelu: bool, mode: str, sizes: Sizes) -> Operator:
    """Return a plain MLP over tiles of the texts as DeepSpeed computes it, by the same steps of Liger."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    x = leaf(sizes["bsz"], sizes["T"], hidden)
    gate, up, down = (
        nn.Linear(n, m, bias=False, device=META, dtype=torch.bfloat16)
        for n, m in ((hidden, inner), (hidden, inner), (inner, hidden))
    )
    activation = partial(F.gelu, approximate="tanh") if is_gelu else F.silu
    tiled = _library("ops.tiled_mlp").apply_tiled_mlp

    def mlp(module: nn.Module, part: Tensor) -> Tensor:
        return down(activation(gate(part)) * up(part))  # type: ignore[no-any-return]

    gradients = held_gradients(torch.randn_like(x)) if mode == "backward" else random_gradients
    return Operator(lambda: tiled(mlp, None, x, sizes["num_shards"]), gradients, mode, keeps_graph=True)


def group_norm(sizes: Sizes) -> Operator:
    """Return GroupNorm, whose script makes the whole pass in every mode, beside torch's module."""
    channels, groups = sizes["C"], sizes["C"] // sizes["channels_per_group"]
    kind = _library("transformers.group_norm").LigerGroupNorm
    layer = _module(lambda: kind(num_channels=channels, num_groups=groups, eps=1e-6))
    twin = nn.GroupNorm(groups, channels, device=META)
    x = leaf(sizes["M"], channels, sizes["H"], dtype=torch.float32)

    def forward(twin: nn.Module = twin) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    return Operator(forward, held_gradients(torch.randn_like(x)), keeps_graph=True)


def rms_norm(sizes: Sizes) -> Operator:
    """Return the RMSNorm for Megatron, and the sum of its output."""
    config = SimpleNamespace(
        normalization="RMSNorm", sequence_parallel=False, layernorm_zero_centered_gamma=False
    )
    kind = _library("megatron.rms_norm").LigerMegatronRMSNorm
    layer = _module(lambda: kind(config=config, hidden_size=sizes["H"], eps=1e-6), torch.bfloat16)
    x = leaf(sizes["S"], sizes["B"], sizes["H"])
    return Operator(summed(lambda: layer(x)))


def swiglu_in_place(sizes: Sizes) -> Operator:
    """Return the SwiGLU for Megatron that writes gradients over its input; the script clears them first."""
    layer = _library("megatron.swiglu").LigerMegatronSwiGLU(in_place=True)
    x = leaf(sizes["S"], sizes["B"], 2 * sizes["ffn_local"])
    return _cleared(x, lambda: layer(x, None, False, False))


class _FusedSwiglu(torch.autograd.Function):
    """SwiGLU whose passes TorchScript fuses into a kernel each, as Megatron's `bias_swiglu_impl`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def fused_swiglu(sizes: Sizes) -> Operator:
    """Return Megatron's SwiGLU; the script clears the gradient first."""
    x = leaf(sizes["S"], sizes["B"], 2 * sizes["ffn_local"])
    return _cleared(x, lambda: _FusedSwiglu.apply(x))  # type: ignore[no-untyped-call]


def _cleared(x: Tensor, forward: Callable[[], Tensor]) -> Operator:
    """Return the sum of an output, before which the gradient of x is let go."""
    run = summed(forward)

    def cleared() -> Outputs:
        x.grad = None
        return run()

    return Operator(cleared)


def rope(sizes: Sizes) -> Operator:
    """Return Llama 4's rotary embedding of queries and keys, with gradients of both that nothing keeps."""
    hidden, length = sizes.get("hidden_size") or sizes["H"], sizes.get("seq_len") or sizes["T"]
    width = hidden // sizes["num_q_heads"]
    q, k = (leaf(1, length, sizes[heads], width) for heads in ("num_q_heads", "num_kv_heads"))
    places, inverse = ids(1, length), torch.empty(width // 2, device=META)
    held = (places, inverse, inverse.clone())  # transformers' module keeps its buffer twice
    with torch.no_grad():
        products = (inverse[None, :, None].expand(1, -1, 1).float() @ places[:, None].float()).transpose(1, 2)
        angles = torch.polar(torch.ones_like(products), products) * 1.0
        del products
    rotate = _library("transformers.llama4_rope").liger_llama4_text_rotary_pos_emb

    def forward(held: Outputs = held) -> Outputs:
        return rotate(q, k, angles)  # type: ignore[no-any-return]

    gradients = held_gradients(torch.randn_like(q), torch.randn_like(k))
    return Operator(forward, gradients, keeps_graph=True, inputs=(q, k))


def _vector(kind: Any, sizes: Sizes, dtype: torch.dtype) -> Operator:
    """Return a function of a vector: the script takes the swept size as the whole shape."""
    layer, x = kind(), leaf(sizes["N"], dtype=dtype)
    return Operator(
        lambda: layer(x),
        lambda outputs: tuple(torch.ones_like(one) for one in outputs),
        keeps_graph=True,
    )


def softmax(sizes: Sizes, dtype: torch.dtype) -> Operator:
    """Return the softmax of a vector."""
    return _vector(_library("transformers.softmax").LigerSoftmax, sizes, dtype)


def relu_squared(sizes: Sizes, dtype: torch.dtype) -> Operator:
    """Return the squared ReLU of a vector."""
    return _vector(_library("transformers.relu_squared").LigerReLUSquared, sizes, dtype)


def attention(sizes: Sizes, dtype: torch.dtype, is_sparse: bool) -> Operator:
    """Return multi-token attention over scores, beside a plain module's weights."""
    inputs, outputs, size = sizes["C_in"], sizes["C_out"], sizes["K"]
    kind = _library("transformers.multi_token_attention").LigerMultiTokenAttention
    layer = _module(
        lambda: kind(
            in_channels=inputs, out_channels=outputs, kernel_size=size, stride=1, padding=size // 2,
            dilation=1, groups=sizes["groups"], bias=True, sparse=is_sparse,
        ),
        dtype,
    )  # fmt: skip
    twins = (leaf(outputs, inputs, size, size, dtype=dtype), leaf(outputs, dtype=dtype))
    x = leaf(sizes["B"], inputs, sizes["L"], sizes["L"], dtype=dtype)

    def forward(twins: Outputs = twins) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    return Operator(forward, held_gradients(torch.randn_like(x)), keeps_graph=True)


# ---- losses


def cross_entropy(sizes: Sizes) -> Operator:
    """Return cross entropy of logits in float32."""
    x = leaf(sizes["B"] * sizes["T"], sizes["V"], dtype=torch.float32)
    target = ids(sizes["B"] * sizes["T"])
    loss = _library("transformers.cross_entropy").LigerCrossEntropyLoss()
    return Operator(lambda: loss(x, target))


def megatron_cross_entropy(sizes: Sizes) -> Operator:
    """Return cross entropy for Megatron, and the sum of its losses; the script clears the gradient first."""
    x, target = leaf(sizes["S"], sizes["B"], sizes["V"]), ids(sizes["S"], sizes["B"])
    loss = _library("megatron.cross_entropy").LigerMegatronCrossEntropy(reduction="none")
    return _cleared(x, lambda: loss(x, target))


def linear_cross_entropy(sizes: Sizes) -> Operator:
    """Return cross entropy with the layer that makes its logits."""
    head, twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, target = leaf(sizes["BT"], sizes["H"]), ids(sizes["BT"])
    loss = _library("transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss()

    def forward(twin: Tensor = twin) -> Tensor:
        return loss(head, x, target)  # type: ignore[no-any-return]

    return Operator(forward)


def preference(name: str, sizes: Sizes) -> Operator:
    """Return a loss over pairs of texts, in chunks, with the layer that makes the logits."""
    file, _, kind = name.partition(":")
    head, twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, target = leaf(sizes["B"], sizes["T"], sizes["H"]), ids(sizes["B"], sizes["T"])
    function = getattr(_library(f"chunked_loss.{file}"), kind)

    def forward(twin: Tensor = twin) -> Any:
        result = function.apply(x, head, target)
        return result[0] if isinstance(result, tuple) else result

    return Operator(forward)


def distillation(sizes: Sizes) -> Operator:
    """Return Jensen and Shannon's divergence of a student from a teacher, in chunks, with both heads."""
    student, student_twin = (leaf(sizes["V"], sizes["H"] // 2) for _ in range(2))
    teacher, teacher_twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, *beside = (leaf(sizes["BT"], sizes["H"] // 2) for _ in range(3))
    y, target = leaf(sizes["BT"], sizes["H"], grad=False), ids(sizes["BT"])
    held = (student_twin, teacher_twin, *beside)
    function = _library("chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
    has_biases = "student_bias" in inspect.signature(function.forward).parameters
    biases = (None, None) if has_biases else ()

    def forward(held: Outputs = held) -> Any:
        return function.apply(x, student, y, teacher, target, *biases, 0.5, 0.5)

    return Operator(forward)


# ---- experts


def experts(mode: str, sizes: Sizes) -> Operator:
    """Return a mixture of experts in one function."""
    tokens, count, hidden, inner, top = (sizes[name] for name in ("T", "E", "H", "intermediate_dim", "K"))
    x = leaf(tokens, hidden)
    up, down = leaf(count, 2 * inner, hidden) * 0.02, leaf(count, hidden, inner) * 0.02
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=META)
    weights = leaf(tokens, top)
    function = _library("ops.fused_moe").LigerFusedMoEFunction
    return Operator(
        lambda: function.apply(x, up, down, chosen, weights), random_gradients, mode, keeps_graph=True
    )


Kernel = Callable[[str, Sizes, torch.dtype], Operator]


def _losses_of_pairs(name: str) -> Kernel:
    return lambda mode, sizes, dtype: preference(name, sizes)


# By provider and operator of a row.
KERNELS: Mapping[tuple[str, str], Kernel] = {
    ("liger", "geglu"): lambda mode, sizes, dtype: geglu(mode, sizes),
    ("liger", "tiled_geglu"): lambda mode, sizes, dtype: geglu(mode, sizes),
    ("liger", "swiglu"): lambda mode, sizes, dtype: swiglu(mode, sizes),
    ("liger_tiled", "tiled_geglu"): lambda mode, sizes, dtype: tiled_geglu(mode, sizes),
    ("liger_tiled", "tiled_swiglu"): lambda mode, sizes, dtype: tiled_swiglu(mode, sizes),
    ("deepspeed_tiled", "tiled_geglu"): lambda mode, sizes, dtype: tiled_plain(True, mode, sizes),
    ("deepspeed_tiled", "tiled_swiglu"): lambda mode, sizes, dtype: tiled_plain(False, mode, sizes),
    ("liger", "group_norm"): lambda mode, sizes, dtype: group_norm(sizes),
    ("liger", "megatron_rms_norm"): lambda mode, sizes, dtype: rms_norm(sizes),
    ("megatron", "megatron_rms_norm"): lambda mode, sizes, dtype: plain_rms_norm(sizes),
    ("liger_in_place", "megatron_swiglu"): lambda mode, sizes, dtype: swiglu_in_place(sizes),
    ("megatron", "megatron_swiglu"): lambda mode, sizes, dtype: fused_swiglu(sizes),
    ("liger", "llama4_rope"): lambda mode, sizes, dtype: rope(sizes),
    ("liger", "softmax"): lambda mode, sizes, dtype: softmax(sizes, dtype),
    ("liger", "relu_squared"): lambda mode, sizes, dtype: relu_squared(sizes, dtype),
    ("liger", "multi_token_attention"): lambda mode, sizes, dtype: attention(sizes, dtype, False),
    ("liger", "sparse_multi_token_attention"): lambda mode, sizes, dtype: attention(sizes, dtype, True),
    ("liger", "cross_entropy"): lambda mode, sizes, dtype: cross_entropy(sizes),
    ("liger", "megatron_cross_entropy"): lambda mode, sizes, dtype: megatron_cross_entropy(sizes),
    ("liger", "fused_linear_cross_entropy"): lambda mode, sizes, dtype: linear_cross_entropy(sizes),
    ("liger", "fused_linear_orpo_loss"): _losses_of_pairs("orpo_loss:LigerFusedLinearORPOFunction"),
    ("liger", "fused_linear_cpo_loss"): _losses_of_pairs("cpo_loss:LigerFusedLinearCPOFunction"),
    ("liger", "fused_linear_simpo_loss"): _losses_of_pairs("simpo_loss:LigerFusedLinearSimPOFunction"),
    ("liger", "distill_jsd_loss"): lambda mode, sizes, dtype: distillation(sizes),
    ("liger", "fused_moe"): lambda mode, sizes, dtype: experts(mode, sizes),
}
