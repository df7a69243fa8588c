"""Scratch memory of Fourier transforms and distances."""

from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.steps import Held, Made, Rule, Step, copies, tensor_bytes
from planner.program import Target

aten = torch.ops.aten


def _fourier(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """cuFFT's work area (ATen/native/cuda/SpectralOps.cpp).

    Its size is cuFFT's secret; for lengths of small prime factors it is taken to be the larger of input and
    output, an upper bound there (inferred, not measured).
    """
    x = args[0]
    return (*copies(x), Made.REST, max(tensor_bytes(x), tensor_bytes(out)))


def _fourier_to_real(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """As `_fourier`, but it overwrites its input, which is copied first."""
    x = args[0]
    return Made.REST, Held(tensor_bytes(x)), max(tensor_bytes(x), tensor_bytes(out))


def _euclidean_distance(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """One product of rows extended by their norms and by ones (ATen/native/Distance.cpp)."""
    x, y = args[:2]
    steps: list[Step] = []
    for points in (x, y):
        norms = points.element_size() * (points.numel() // max(points.shape[-1], 1))
        steps += [tensor_bytes(points), Held(norms), Held(norms)]
    extended = [t.element_size() * (t.numel() // max(t.shape[-1], 1)) * (t.shape[-1] + 2) for t in (x, y)]
    return (*steps, Held(tensor_bytes(x)), Held(extended[0]), Held(extended[1]), Made.REST)


RULES: dict[Any, Rule] = {
    aten._fft_c2c.default: _fourier,
    aten._fft_r2c.default: _fourier,
    aten._fft_c2r.default: _fourier_to_real,
    aten._euclidean_dist.default: _euclidean_distance,
}
