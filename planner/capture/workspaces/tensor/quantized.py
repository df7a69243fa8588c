"""Workspace rules of bitsandbytes' operators on CUDA, and the order of their outputs.

Sources: bitsandbytes/backends/cuda/ops.py and backends/default/ops.py of version 0.50. A product with 4-bit
weights runs in a single kernel for few rows, and otherwise dequantizes the weight first. A function of the
library decides by shape, compute capability and number of multiprocessors.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from planner.capture.workspaces._rule import argument, contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import (
    Args,
    Hold,
    Ops,
    Output,
    Outputs,
    Release,
    ReleaseBeneath,
    Rule,
    UseCublas,
)
from planner.program import Target

_DECISION = "_gemm_4bit_use_custom_cuda"
_LIMIT = "_gemm_4bit_custom_max_m"


def _gemm_4bit(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a product with a 4-bit weight: by one kernel, or with the weight dequantized first.

    Statistics that are quantized themselves are dequantized before the weight.
    """
    activations, weight, shape, absmax, blocksize = args[:5]
    outer, inner = shape
    rows = activations.numel() // inner
    if _is_one_kernel(activations.dtype, rows, outer, inner, blocksize, target):
        return (*contiguous_copies(activations), Outputs())
    statistics = argument(args, 7)
    dequantized = Hold(outer * inner * activations.element_size())
    if statistics is None:
        return (dequantized, UseCublas(), Outputs())
    each = 4 * statistics.numel()
    nested = (Hold(each), Hold(each), dequantized)
    return (*nested, UseCublas(), Outputs(), ReleaseBeneath(1), ReleaseBeneath(1), Release(1))


def _is_one_kernel(dtype: Any, rows: Any, outer: int, inner: int, blocksize: int, target: Target) -> bool:
    decide, limit = _decision()
    if decide is None or inner % blocksize or rows > limit:
        return False
    properties = (target.sm_count, *target.capability)
    decide.__globals__["_gpu_dispatch_props"] = lambda _: properties
    return bool(decide(0, dtype, rows, outer, inner))


@functools.cache
def _decision() -> tuple[Any, int]:
    """Return bitsandbytes' function that chooses the kernel, or None, and the most rows for a single kernel.

    The module itself needs CUDA, so the function is compiled from its source. The function is None for
    versions before 0.50, which lack it and dequantize for more than one row.
    """
    package = importlib.util.find_spec("bitsandbytes")
    assert package is not None and package.origin is not None
    tree = ast.parse((Path(package.origin).parent / "backends" / "cuda" / "ops.py").read_text())
    body: list[ast.stmt] = []
    limit = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == _DECISION:
            node.decorator_list = []
            body.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if name.startswith("_GEMM_4BIT"):
                body.append(node)
            elif name == _LIMIT:
                limit = max(limit, ast.literal_eval(value))  # CUDA's is the larger of two
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body, []), "bitsandbytes", "exec"), names)
    return names.get(_DECISION), limit


def _int8_vectorwise_quant(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of int8 quantization by rows: first the statistics, then the rows.

    With a threshold, bitsandbytes looks for outliers, and is assumed to find no outliers.
    """
    activations, threshold = args[0], argument(args, 1, 0.0)
    if threshold <= 0.0:
        return (Output(1), Output())
    magnitudes, mask = Hold(tensor_bytes(activations)), Hold(activations.numel())
    return (Output(1), Output(), magnitudes, mask, ReleaseBeneath(1), 1, Release(1))


def _int8_product(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of an int8 product: sums in int32, and a float16 copy if the result is not float16."""
    result = out[0] if isinstance(out, tuple | list) else out
    sums = Hold(4 * result.numel())
    if result.dtype is torch.float16:
        return (sums, Output())
    return (sums, Hold(2 * result.numel()), Output())


def _statistics_first(args: Args, out: Any, target: Target) -> Ops:
    return (Output(1), Output())


def _none(args: Args, out: Any, target: Target) -> Ops:
    return ()


RULES_BY_NAME: Mapping[str, Rule] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "bitsandbytes::int8_scaled_mm": _int8_product,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_product,
    "bitsandbytes::quantize_4bit": _statistics_first,
    "bitsandbytes::quantize_blockwise": _statistics_first,
    "bitsandbytes::dequantize_4bit": _none,
    "bitsandbytes::dequantize_blockwise": _none,
    "bitsandbytes::int8_vectorwise_dequant": lambda args, out, target: (Hold(4 * args[0].numel()),),
}
