"""Liger's own kernels as its benchmarks ran them: its modules and functions over inputs on meta.

Beside them are those of DeepSpeed and Megatron that its benchmarks ran. Each function builds one from the
setting of a published row. What a script makes beside, such as the weights of the plain module, is made too.
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
    GELU,
    META,
    Setting,
    Sizes,
    cleared,
    distilled,
    experts,
    gated_mlp,
    halves,
    held_gradients,
    ids,
    leaf,
    of_vector,
    over_pairs,
    over_texts,
    rms_norm as plain_rms_norm,
    summed,
    with_head,
)
from planner.capture.models.libraries import import_library

Kernel = Callable[[Setting], Operator]


def _library(name: str) -> Any:
    """Import a module of Liger, or MODULE:NAME of one."""
    file, _, attribute = name.partition(":")
    module = import_library(f"liger_kernel.{file}", extra="liger")
    return getattr(module, attribute) if attribute else module


def _module(make: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module on meta."""
    with META:
        return make().to(dtype)


# ---- layers


def _mlp(name: str, activation: str, is_tiled: bool, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    config = SimpleNamespace(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        hidden_act=activation,
        pretraining_tp=1,
    )
    shards = {"num_shards": sizes["num_shards"]} if is_tiled else {}
    return _module(lambda: _library(f"transformers.{name}")(config, **shards), torch.bfloat16)


def _tiled_plain(activation: Callable[[Tensor], Tensor], sizes: Sizes) -> Callable[[Tensor], Tensor]:
    """Return a plain MLP over tiles of the texts as DeepSpeed computes it, by the same steps of Liger."""
    mlp, tiled = gated_mlp(activation, sizes), _library("ops.tiled_mlp").apply_tiled_mlp
    return lambda x: tiled(lambda module, part: mlp(part), None, x, sizes["num_shards"])  # type: ignore[no-any-return]


def group_norm(setting: Setting) -> Operator:
    """Return GroupNorm, whose script makes the whole pass in every mode, beside torch's module."""
    sizes = setting.sizes
    channels, groups = sizes["C"], sizes["C"] // sizes["channels_per_group"]
    kind = _library("transformers.group_norm").LigerGroupNorm
    layer = _module(lambda: kind(num_channels=channels, num_groups=groups, eps=1e-6))
    twin = nn.GroupNorm(groups, channels, device=META)
    x = leaf(sizes["M"], channels, sizes["H"], dtype=torch.float32)

    def forward(twin: nn.Module = twin) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    return Operator(forward, held_gradients(torch.randn_like(x)), keeps_graph=True)


def rms_norm(setting: Setting) -> Operator:
    """Return the RMSNorm for Megatron, and the sum of its output."""
    sizes = setting.sizes
    config = SimpleNamespace(
        normalization="RMSNorm", sequence_parallel=False, layernorm_zero_centered_gamma=False
    )
    kind = _library("megatron.rms_norm").LigerMegatronRMSNorm
    layer = _module(lambda: kind(config=config, hidden_size=sizes["H"], eps=1e-6), torch.bfloat16)
    x = leaf(sizes["S"], sizes["B"], sizes["H"])
    return Operator(summed(lambda: layer(x)))


def swiglu_in_place(setting: Setting) -> Operator:
    """Return the SwiGLU for Megatron that writes gradients over its input."""
    layer = _library("megatron.swiglu").LigerMegatronSwiGLU(in_place=True)
    x = halves(setting.sizes)
    return cleared(x, lambda: layer(x, None, False, False))


class _FusedSwiglu(torch.autograd.Function):
    """SwiGLU whose passes TorchScript fuses into a kernel each, as Megatron's `bias_swiglu_impl`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def fused_swiglu(setting: Setting) -> Operator:
    """Return Megatron's SwiGLU."""
    x = halves(setting.sizes)
    return cleared(x, lambda: _FusedSwiglu.apply(x))  # type: ignore[no-untyped-call]


def rope(setting: Setting) -> Operator:
    """Return Llama 4's rotary embedding of queries and keys, with gradients of both that nothing keeps."""
    sizes = setting.sizes
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


def attention(is_sparse: bool, setting: Setting) -> Operator:
    """Return multi-token attention over scores, beside a plain module's weights."""
    _, sizes, dtype = setting
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


def cross_entropy(setting: Setting) -> Operator:
    """Return cross entropy of logits in float32."""
    sizes = setting.sizes
    x = leaf(sizes["B"] * sizes["T"], sizes["V"], dtype=torch.float32)
    target = ids(sizes["B"] * sizes["T"])
    loss = _library("transformers.cross_entropy").LigerCrossEntropyLoss()
    return Operator(lambda: loss(x, target))


def megatron_cross_entropy(setting: Setting) -> Operator:
    """Return cross entropy for Megatron, and the sum of its losses."""
    sizes = setting.sizes
    x, target = leaf(sizes["S"], sizes["B"], sizes["V"]), ids(sizes["S"], sizes["B"])
    loss = _library("megatron.cross_entropy").LigerMegatronCrossEntropy(reduction="none")
    return cleared(x, lambda: loss(x, target))


def _linear_cross_entropy() -> Any:
    return _library("transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss()


def _preference(name: str) -> Kernel:
    """Return a loss over pairs of texts, in chunks."""

    def loss() -> Callable[..., Any]:
        function = _library(f"chunked_loss.{name}")

        def first(*inputs: Tensor) -> Any:
            result = function.apply(*inputs)
            return result[0] if isinstance(result, tuple) else result

        return first

    return partial(over_pairs, loss)


def _distillation() -> Callable[..., Any]:
    """Return Jensen and Shannon's divergence of a student from a teacher, in chunks."""
    function = _library("chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
    has_biases = "student_bias" in inspect.signature(function.forward).parameters
    biases = (None, None) if has_biases else ()
    return lambda *inputs: function.apply(*inputs, *biases, 0.5, 0.5)


_GELU, _SILU = "gelu_pytorch_tanh", "silu"
_GEGLU = partial(over_texts, partial(_mlp, "geglu:LigerGEGLUMLP", _GELU, False))
# By provider and operator of a row.
KERNELS: Mapping[tuple[str, str], Kernel] = {
    ("liger", "geglu"): _GEGLU,
    ("liger", "tiled_geglu"): _GEGLU,
    ("liger", "swiglu"): partial(over_texts, partial(_mlp, "swiglu:LigerSwiGLUMLP", _SILU, False)),
    ("liger_tiled", "tiled_geglu"): partial(
        over_texts, partial(_mlp, "tiled_mlp:LigerTiledGEGLUMLP", _GELU, True)
    ),
    ("liger_tiled", "tiled_swiglu"): partial(
        over_texts, partial(_mlp, "tiled_mlp:LigerTiledSwiGLUMLP", _SILU, True)
    ),
    ("deepspeed_tiled", "tiled_geglu"): partial(over_texts, partial(_tiled_plain, GELU)),
    ("deepspeed_tiled", "tiled_swiglu"): partial(over_texts, partial(_tiled_plain, F.silu)),
    ("liger", "group_norm"): group_norm,
    ("liger", "megatron_rms_norm"): rms_norm,
    ("megatron", "megatron_rms_norm"): plain_rms_norm,
    ("liger_in_place", "megatron_swiglu"): swiglu_in_place,
    ("megatron", "megatron_swiglu"): fused_swiglu,
    ("liger", "llama4_rope"): rope,
    ("liger", "softmax"): partial(of_vector, lambda: _library("transformers.softmax:LigerSoftmax")()),
    ("liger", "relu_squared"): partial(
        of_vector, lambda: _library("transformers.relu_squared:LigerReLUSquared")()
    ),
    ("liger", "multi_token_attention"): partial(attention, False),
    ("liger", "sparse_multi_token_attention"): partial(attention, True),
    ("liger", "cross_entropy"): cross_entropy,
    ("liger", "megatron_cross_entropy"): megatron_cross_entropy,
    ("liger", "fused_linear_cross_entropy"): partial(with_head, _linear_cross_entropy),
    ("liger", "fused_linear_orpo_loss"): _preference("orpo_loss:LigerFusedLinearORPOFunction"),
    ("liger", "fused_linear_cpo_loss"): _preference("cpo_loss:LigerFusedLinearCPOFunction"),
    ("liger", "fused_linear_simpo_loss"): _preference("simpo_loss:LigerFusedLinearSimPOFunction"),
    ("liger", "distill_jsd_loss"): partial(distilled, _distillation),
    ("liger", "fused_moe"): partial(experts, lambda: _library("ops.fused_moe").LigerFusedMoEFunction.apply),
}
