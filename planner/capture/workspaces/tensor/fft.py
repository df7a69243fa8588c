"""Workspaces of Fourier transforms and distances."""

from torch import Tensor

from planner.capture.workspaces._rule import contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Op, Ops, Outputs, Rule
from planner.program import Target


def _fourier(args: Args, out: Tensor, target: Target) -> Ops:
    """Allocate cuFFT's work area (ATen/native/cuda/SpectralOps.cpp).

    cuFFT does not document its size. For lengths of small prime factors it is assumed to be the larger of
    input and output, an upper bound there (inferred, not measured).
    """
    x = args[0]
    return (*contiguous_copies(x), Outputs(), max(tensor_bytes(x), tensor_bytes(out)))


def _fourier_to_real(args: Args, out: Tensor, target: Target) -> Ops:
    """Copy the input, which the transform overwrites, and allocate cuFFT's work area."""
    x = args[0]
    return Outputs(), Hold(tensor_bytes(x)), max(tensor_bytes(x), tensor_bytes(out))


def _euclidean_distance(args: Args, out: Tensor, target: Target) -> Ops:
    """Multiply rows extended by their norms and by ones (ATen/native/Distance.cpp)."""
    x, y = args[:2]
    ops: list[Op] = []
    for points in (x, y):
        norms = points.element_size() * (points.numel() // max(points.shape[-1], 1))
        ops += [tensor_bytes(points), Hold(norms), Hold(norms)]
    extended = [t.element_size() * (t.numel() // max(t.shape[-1], 1)) * (t.shape[-1] + 2) for t in (x, y)]
    return (*ops, Hold(tensor_bytes(x)), Hold(extended[0]), Hold(extended[1]), Outputs())


RULES: dict[str, Rule] = {
    "_fft_c2c _fft_r2c": _fourier,
    "_fft_c2r": _fourier_to_real,
    "_euclidean_dist": _euclidean_distance,
}
