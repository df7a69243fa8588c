"""Calls of operators whose operands CUDA refuses for their dtypes, on `meta`, with torch's words."""

from typing import Any

import torch

aten = torch.ops.aten


def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor on meta."""
    return torch.empty(shape, dtype=dtype, device="meta")


CONVOLUTION = (None, [1], [0], [1], False, [0], 1)
SQUARE, LABELS, MASK = of(4, 4), of(4, 4, dtype=torch.int64), of(4, 4, dtype=torch.bool)
HALF, IMAGE = SQUARE.half(), of(1, 3, 8, 8, dtype=torch.uint8)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "mask times weight": (
        aten.addmm.default,
        (of(4), MASK, SQUARE),
        "mat1 and mat2 must have the same dtype, but got Bool and Float",
    ),
    "half times float": (
        aten.mm.default,
        (HALF, SQUARE),
        "have the same dtype, but got",
    ),
    "integers": (aten.mm.default, (LABELS, LABELS), "\"addmm_cuda\" not implemented for 'Long'"),
    "batches of masks": (aten.bmm.default, (MASK[None],) * 2, "\"baddbmm_cuda\" not implemented for 'Bool'"),
    "matrix and vector": (
        aten.mv.default,
        (LABELS, LABELS[0]),
        "\"addmv_impl_cuda\" not implemented for 'Long'",
    ),
    "vectors": (aten.dot.default, (LABELS[0],) * 2, "\"dot\" not implemented for 'Long'"),
    "softmax": (aten._softmax.default, (LABELS, 1, False), "\"host_softmax\" not implemented for 'Long'"),
    "activation": (aten.gelu.default, (LABELS,), "\"GeluCUDAKernelImpl\" not implemented for 'Long'"),
    "activation in place": (aten.silu_.default, (LABELS,), "\"silu_cuda\" not implemented for 'Long'"),
    "loss of labels": (aten.mse_loss.default, (LABELS, LABELS), "\"mse_cuda\" not implemented for 'Long'"),
    "pixels": (
        aten.upsample_bilinear2d.default,
        (IMAGE, [16, 16], False),
        "\"upsample_bilinear2d_out_frame\" not implemented for 'Byte'",
    ),
    "spread of pixels": (
        aten.std.correction,
        (IMAGE,),
        "std and var only support floating point",
    ),
    "distances in half precision": (
        aten._cdist_forward.default,
        (HALF, HALF, 2.0, None),
        "\"cdist_cuda\" not implemented for 'Half'",
    ),
    "inverse in half precision": (
        aten.linalg_cholesky_ex.default,
        (SQUARE.bfloat16(),),
        "\"cholesky_cusolver\" not implemented for 'BFloat16'",
    ),
    "convolution of a mask": (
        aten.convolution.default,
        (of(1, 4, 8, dtype=torch.bool), of(2, 4, 3), *CONVOLUTION),
        "Input type (CUDABoolType) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
}
