"""Apply the rules of CUDA's autocast to meta tensors.

torch registers the kernels of CUDA's autocast at the dispatch key `AutocastCUDA`, above autograd. Builds
without CUDA have the kernels too, but meta tensors do not carry the key, and the kernels pass over tensors
that are not on CUDA. So the key is included for every tensor of this thread, and the kernels are replaced by
kernels that treat meta as CUDA. Everything else is torch's own: `torch.autocast("cuda")` opens a region by
removing the key from the excluded keys, an operator's kernel excludes the key for the operators that it
calls, and autograd hands the state on to the backward pass (ATen/ThreadLocalState.h).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast_mode

from planner.capture.operator_table import overload

Kernel = Callable[..., Any]

_KEY = torch._C.DispatchKey.AutocastCUDA
KEYS = torch._C.DispatchKeySet(_KEY)


# ---- operators that are cast (ATen/autocast_mode.h and autocast_mode.cpp, torch 2.13)

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
"""

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
    layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim dist pdist cdist renorm logsumexp
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""

# Their argument `dtype` becomes float32 if no dtype is given and the first argument is eligible.
FLOAT32_BY_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""

# Overloads without an argument `dtype`, each with the overload that has it and is called instead.
FLOAT32_BY_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""

BANNED = ("binary_cross_entropy",)


class CastCache:
    """A cache of weights cast to autocast's dtype, kept until the outermost autocast region ends."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor cast to `dtype` (weights from the cache), or itself if autocast does not cast it.

        Inference mode keeps no casts, as observed on the CPU and in a record of a GPU (torch 2.11). The
        source is held weakly, as in ATen/autocast_mode.cpp. The cast is held, and has its autograd history
        even if it is made without gradients, as observed in torch 2.13 on the CPU; casts that older versions
        keep from a region's first use under `no_grad` have none.
        """
        if tensor.dtype is dtype or not is_eligible(tensor):
            return tensor
        is_kept = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not is_kept or not _is_weight(tensor) or dtype is not _lower():
            return tensor.to(dtype)
        source, cast = self._casts.get(id(tensor), (None, None))
        if source is None or cast is None or source() is not tensor:
            with torch.enable_grad():
                cast = tensor.to(dtype)
            self._casts[id(tensor)] = (weakref.ref(tensor), cast)
        return cast

    def clear(self) -> None:
        """Release all casts that the cache holds."""
        self._casts.clear()


def is_eligible(value: object) -> bool:
    """Return whether CUDA's autocast casts a value: a GPU tensor of a floating dtype other than float64."""
    return (
        isinstance(value, Tensor)
        and (value.is_meta or value.is_cuda)  # the compiler's fake tensors are on CUDA
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
    )


def kernels(cache: CastCache) -> dict[str, Kernel]:
    """Return kernels by operator name, which cast arguments as CUDA's autocast does, or refuse the call."""
    return {
        **{name: _casting(name, lambda args: _lower(), cache) for name in LOWER_PRECISION.split()},
        **{name: _casting(name, lambda args: torch.float32, cache) for name in FLOAT32.split()},
        **{name: _casting(name, _widest, cache) for name in WIDEST.split()},
        **{name: _with_dtype(name) for name in FLOAT32_BY_DTYPE.split()},
        **{name: _with_other_overload(other) for name, other in FLOAT32_BY_OVERLOAD.items()},
        **{name: _banned(name) for name in BANNED},
    }


def included() -> AbstractContextManager[object]:
    """Return a context manager that includes the dispatch key of CUDA's autocast in this thread."""
    guard: AbstractContextManager[object] = torch._C._IncludeDispatchKeyGuard(_KEY)
    return guard


def _lower() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def _casting(name: str, dtype_of: Callable[[tuple[Any, ...]], torch.dtype], cache: CastCache) -> Kernel:
    """Return a kernel that runs an operator with its eligible tensors cast to the dtype from `dtype_of`.

    Tensors in lists are cast too.
    """
    run = overload(name)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return cache.cast(value, dtype)
        if isinstance(value, (list, tuple)):
            return [cast(item, dtype) for item in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            dtype = dtype_of((*args, *kwargs.values()))
            # The compiler evaluates the arguments of a C++ call from the last to the first (GCC on x86).
            named = {key: cast(value, dtype) for key, value in reversed(kwargs.items())}
            cast_args = [cast(value, dtype) for value in reversed(args)]
            return run(*reversed(cast_args), **named)

    return kernel


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """Return float32 if an eligible tensor is in float32, otherwise autocast's dtype.

    Raises RuntimeError if no eligible tensor is in float32 and one is not in autocast's dtype.
    """
    lower = _lower()
    values = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    kinds = {value.dtype for value in values if is_eligible(value)}
    if torch.float32 in kinds:
        return torch.float32
    if kinds - {lower}:
        raise RuntimeError(f"autocast to {lower} meets tensors of another type: {kinds - {lower}}")
    return lower


def _with_dtype(name: str) -> Kernel:
    run = overload(name)
    position = [argument.name for argument in run._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            given = args[position] if position < len(args) else kwargs.get("dtype")
            if given is not None or not is_eligible(args[0]):
                return run(*args, **kwargs)
            return run(*args[:position], **{**kwargs, "dtype": torch.float32})

    return kernel


def _with_other_overload(other: str) -> Kernel:
    run = overload(other)
    defaults: dict[str, Any] = {"p": 2, "keepdim": False}  # of the overload that is called
    names = [argument.name for argument in run._schema.arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            named = dict(zip(names, args, strict=False)) | kwargs
            values = [named[name] if name in named else defaults[name] for name in names]
            dtype = torch.float32 if is_eligible(values[0]) else values[0].dtype
            return run(*values, dtype=dtype)

    return kernel


def _banned(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is refused under autocast; use {name}_with_logits on what comes before sigmoid"
        )

    return kernel


# ---- queries


def patches(clear: Callable[[], None]) -> Iterator[tuple[str, object]]:
    """Yield (name, replacement) pairs of torch functions, so that autocast acts on `meta` as on a GPU.

    Models query with the device type of their tensors (transformers, timm, torch.utils.checkpoint do), which
    is `meta` in a capture and would be `cuda` on a GPU. `torch.clear_autocast_cache` calls `clear` too.
    """
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield f"torch.{name}", _of_cuda(getattr(torch, name))
    yield "torch.autocast.__init__", _of_cuda(autocast_mode.autocast.__init__, position=1)
    for module in ("torch.amp", "torch.amp.autocast_mode"):
        yield f"{module}.is_autocast_available", _of_cuda(autocast_mode.is_autocast_available)
    # `torch.autocast("cuda")` switches itself off if CUDA is not available
    yield "torch.cuda.amp.common.amp_definitely_not_available", lambda: False
    yield "torch.cuda.is_bf16_supported", lambda including_emulation=True: True
    clear_own = torch.clear_autocast_cache

    def clear_both() -> None:
        clear_own()
        clear()

    yield "torch.clear_autocast_cache", clear_both


def _of_cuda(function: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
    """Return a version of a function that treats the device type `meta` as `cuda`.

    The device type is the argument `device_type`, or the argument at `position`.
    """

    def query(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        if len(values) > position and values[position] == "meta":
            values[position] = "cuda"
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cuda"
        return function(*values, **kwargs)

    return query
