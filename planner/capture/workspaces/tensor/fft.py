"""Workspace rules of Fourier transforms and of Euclidean distances."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from planner.capture.workspaces._rule import accumulator_bytes, released, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Op, Ops, Outputs, ReleaseBeneath, Rule
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Target


def notes_on_transforms(operators: Iterable[str]) -> tuple[str, ...]:
    """Return a note on cuFFT's work area, or () if no operator is a Fourier transform."""
    if not any(name.startswith("aten._fft_") for name in operators):
        return ()
    return (
        "the work area of cuFFT, which documents none, is taken to be the larger of a transform's input and "
        "output; emulated runs leave it out",
    )


def _fourier(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of a Fourier transform: the output, a copy if cuFFT needs one, and the work area.

    Source: ATen/native/cuda/SpectralOps.cpp, `_fft_r2c_cufft`. cuFFT does not document the size of its work
    area. It is assumed to be the larger of input and output, an upper bound for lengths with small prime
    factors (inferred, not measured).
    """
    x, dims = args[:2]
    copies = () if _is_readable(x, dims) else (Hold(tensor_bytes(x)),)
    return (Outputs(), *copies, max(tensor_bytes(x), tensor_bytes(out)))


def _is_readable(x: Tensor, dims: Sequence[int]) -> bool:
    """Return whether cuFFT reads a tensor without a copy.

    The dimensions that are not transformed, in descending order of strides, must merge into one by `reshape`
    (`_exec_fft`). The stride of each transformed dimension must be a multiple of the next one's
    (CuFFTPlanCache.h, `as_cufft_embed`).
    """
    transformed = [dim % x.dim() for dim in dims]
    sizes, strides = x.shape, x.stride()
    others = [dim for dim in range(x.dim()) if dim not in transformed and sizes[dim] != 1]
    others.sort(key=lambda dim: strides[dim], reverse=True)
    is_one = all(strides[a] == sizes[b] * strides[b] for a, b in pairwise(others))
    last = strides[transformed[-1]]
    if not is_one or last == 0 or (others and strides[others[-1]] == 0):
        return False
    for dim in reversed(transformed[:-1]):
        if sizes[dim] == 1:
            continue
        if strides[dim] == 0 or strides[dim] % last != 0:
            return False
        last = strides[dim]
    return True


def _fourier_to_real(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of a transform to real numbers: output, overwritten copy of the input, work area."""
    x = args[0]
    return Outputs(), Hold(tensor_bytes(x)), max(tensor_bytes(x), tensor_bytes(out))


def _euclidean_distance(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `_euclidean_dist`: norms, extended rows of both operands, and the output.

    PyTorch extends each row by its squared norm and a one, and multiplies the extended rows. What the rows
    are extended from is freed once they are. Source: ATen/native/Distance.cpp.
    """
    x, y = args[:2]
    ops: list[Op] = []
    for points in (x, y):
        norms = points.element_size() * (points.numel() // max(points.shape[-1], 1))
        sums = reduction(points, [-1], accumulator_bytes(points), target)
        ops += [
            Hold(tensor_bytes(points)),
            Hold(norms),
            *sums,
            *released(sums),
            ReleaseBeneath(1),
            Hold(norms),
        ]
    extended = [t.element_size() * (t.numel() // max(t.shape[-1], 1)) * (t.shape[-1] + 2) for t in (x, y)]
    of_x = ReleaseBeneath(4), ReleaseBeneath(4), ReleaseBeneath(1)  # ones, norms, and rows times -2
    of_y = ReleaseBeneath(3), ReleaseBeneath(2)
    return (*ops, Hold(tensor_bytes(x)), Hold(extended[0]), *of_x, Hold(extended[1]), *of_y, Outputs())


RULES: dict[str, Rule] = {
    "_fft_c2c _fft_r2c": _fourier,
    "_fft_c2r": _fourier_to_real,
    "_euclidean_dist": _euclidean_distance,
}
