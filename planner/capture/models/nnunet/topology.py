"""Compute the patch sizes that nnU-Net's planner tries, and the network that it chooses for each.

The rules follow nnunetv2/experiment_planning/experiment_planners: network_topology.py,
get_pool_and_conv_props, for the strides and kernels of a patch, and default_experiment_planner.py,
get_plans_for_configuration, for the patches, from the largest down.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct

SMALLEST_MAP = 4  # fewest voxels of an axis at the deepest stage (UNet_featuremap_min_edge_length)
MOST_VOXELS = {2: 2048**2, 3: 256**3}  # voxels of the first patch, before the cut to the median shape
MOST_FEATURES = {2: 512, 3: 320}  # most features of a stage (UNet_max_features_2d, UNet_max_features_3d)
_OF_STAGES = ("n_conv_per_stage", "n_blocks_per_stage", "n_conv_per_stage_decoder")

Sizes = tuple[int, ...]


class Topology(Struct, frozen=True):
    """The patch size of a network, with the strides and kernels of its stages.

    The first stage has stride 1.
    """

    patch: Sizes  # padded to multiples of `divisors`
    strides: tuple[Sizes, ...]
    kernels: tuple[Sizes, ...]

    @property
    def divisors(self) -> Sizes:
        """Return the product of the strides along each axis. It must divide the patch's size."""
        return tuple(map(prod, zip(*self.strides, strict=True)))


def plan_topology(spacing: Sequence[float], patch: Sizes) -> Topology:
    """Return the topology that nnU-Net's planner chooses for a voxel spacing and a patch size.

    The network has a stage for each halving of the long, finely spaced axes.
    """
    spaces, sizes = list(spacing), list(patch)
    kernel = [1] * len(sizes)
    strides: list[Sizes] = [(1,) * len(sizes)]
    kernels: list[Sizes] = []
    while True:
        long = [axis for axis, size in enumerate(sizes) if size >= 2 * SMALLEST_MAP]
        finest = min((spaces[axis] for axis in long), default=0.0)
        halved = [axis for axis in long if spaces[axis] / finest < 2]
        if not halved or (len(halved) == 1 and sizes[halved[0]] < 3 * SMALLEST_MAP):
            break
        kernel = [
            3 if size == 3 or space / min(spaces) < 2 else 1
            for size, space in zip(kernel, spaces, strict=True)
        ]
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in halved else 1 for axis in range(len(sizes))))
        for axis in halved:
            spaces[axis] *= 2
            sizes[axis] = -(-sizes[axis] // 2)
    kernels.append((3,) * len(sizes))
    divisors = tuple(map(prod, zip(*strides, strict=True)))
    padded = tuple(-(-size // divisor) * divisor for size, divisor in zip(patch, divisors, strict=True))
    return Topology(padded, tuple(strides), tuple(kernels))


def planned_topologies(spacing: Sequence[float], median: Sequence[float]) -> Iterator[Topology]:
    """Yield the topologies that nnU-Net's planner tries, largest patch first.

    The first patch has the aspect of the spacing, cut to the median shape of the images (`median`). Each next
    patch is shorter in the axis that is longest relative to the median shape, by the least that keeps the
    axis a multiple of its divisor.
    """
    axes = len(spacing)
    scale = (MOST_VOXELS[axes] * prod(spacing)) ** (1 / axes)
    first = tuple(
        round(min(round(scale / space), most)) for space, most in zip(spacing, median, strict=False)
    )
    current = plan_topology(spacing, first)
    while True:
        yield current
        patch = list(current.patch)
        shares = [size / most for size, most in zip(patch, median, strict=False)]
        axis = max(range(axes), key=lambda axis: (shares[axis], axis))
        shorter = patch.copy()
        shorter[axis] -= current.divisors[axis]
        if shorter[axis] <= 0:
            return
        patch[axis] -= plan_topology(spacing, tuple(shorter)).divisors[axis]
        current = plan_topology(spacing, tuple(patch))


def with_topology(network: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """Return a network of nnU-Net's plans with the strides and kernels of `topology`.

    Features double from stage to stage up to a limit. Each stage has as many blocks as in the plans; further
    stages have as many as the last.
    """
    arguments = dict(network["arch_kwargs"])
    stages, axes = len(topology.strides), len(topology.patch)
    features = arguments["features_per_stage"]
    most = max(*features, MOST_FEATURES[axes])
    arguments["n_stages"] = stages
    arguments["features_per_stage"] = [min(most, features[0] * 2**stage) for stage in range(stages)]
    arguments["strides"] = [list(stride) for stride in topology.strides]
    arguments["kernel_sizes"] = [list(kernel) for kernel in topology.kernels]
    for name in _OF_STAGES:
        if name in arguments:
            count = stages - ("decoder" in name)
            given = list(arguments[name])[:count]
            arguments[name] = given + [given[-1]] * (count - len(given))
    return {**network, "arch_kwargs": arguments}
