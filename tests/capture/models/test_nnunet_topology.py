"""The networks and patches of nnU-Net's planner, worked out by hand from its rules."""

from itertools import islice, pairwise
from math import prod

import pytest

from planner.capture.models.nnunet.topology import Topology, plan_topology, planned_topologies, with_topology


def test_axes_of_one_spacing_are_halved_together() -> None:
    """64 voxels are halved to 4: four times, since 8 may still be halved and 4 may not."""
    topology = plan_topology((1.0, 1.0, 1.0), (64, 64, 64))
    assert topology.strides == ((1, 1, 1), *[(2, 2, 2)] * 4)
    assert topology.kernels == ((3, 3, 3),) * 5
    assert topology.divisors == (16, 16, 16)
    assert topology.patch == (64, 64, 64)


def test_thick_slices_wait_until_the_others_are_as_coarse() -> None:
    """Slices of 5 mm and pixels of 0.6 mm are halved together from 4.8 mm on; kernels are flat until then."""
    topology = plan_topology((5.0, 0.6, 0.6), (16, 256, 256))
    assert topology.strides[:5] == ((1, 1, 1), (1, 2, 2), (1, 2, 2), (1, 2, 2), (2, 2, 2))
    assert topology.kernels[:4] == ((1, 3, 3), (1, 3, 3), (1, 3, 3), (3, 3, 3))


def test_a_patch_is_padded_to_what_its_strides_divide() -> None:
    """50 voxels are halved 3 times while 8 and more are left, and once more from 7: 50, 25, 13, 7."""
    topology = plan_topology((1.0, 1.0), (50, 50))
    assert topology.divisors == (8, 8)
    assert topology.patch == (56, 56)


def test_patches_shrink_along_the_axis_that_is_longest_for_the_images() -> None:
    """The first is cut to the images and padded; each next one is shorter along one axis, of two the last."""
    median = (100.0, 300.0, 200.0)
    topologies = list(planned_topologies((1.0, 1.0, 1.0), median))
    assert topologies[0].patch == (112, 256, 224)
    assert topologies[1].patch == (112, 256, 192)
    for before, after in pairwise(topologies):
        assert prod(after.patch) < prod(before.patch)
        assert all(size % divisor == 0 for size, divisor in zip(after.patch, after.divisors, strict=True))
    assert min(topologies[-1].patch) < 8


def test_a_deeper_network_repeats_the_last_stage() -> None:
    """Features double up to 320 in three dimensions; blocks beyond those of the plans are the last one's."""
    network = {
        "network_class_name": "a.Net",
        "arch_kwargs": {
            "n_stages": 3,
            "features_per_stage": [32, 64, 128],
            "strides": [],
            "kernel_sizes": [],
            "n_blocks_per_stage": [1, 3, 4],
            "n_conv_per_stage_decoder": [1, 1],
        },
    }
    deeper = with_topology(network, plan_topology((1.0, 1.0, 1.0), (128, 128, 128)))["arch_kwargs"]
    assert deeper["n_stages"] == 6
    assert deeper["features_per_stage"] == [32, 64, 128, 256, 320, 320]
    assert deeper["n_blocks_per_stage"] == [1, 3, 4, 4, 4, 4]
    assert deeper["n_conv_per_stage_decoder"] == [1] * 5
    shallow = with_topology(network, plan_topology((1.0, 1.0, 1.0), (12, 12, 12)))["arch_kwargs"]
    assert (shallow["n_stages"], shallow["n_blocks_per_stage"]) == (2, [1, 3])


@pytest.mark.parametrize("axes", [2, 3])
def test_the_plans_own_patch_is_reached(axes: int) -> None:
    """Images of 128 and spacing 1: the patches of equal sides in steps of 16 are among those tried."""
    patches = [each.patch for each in islice(planned_topologies((1.0,) * axes, (128.0,) * axes), 60)]
    assert {(128,) * axes, (96,) * axes, (64,) * axes} <= set(patches)
    assert isinstance(plan_topology((1.0,) * axes, patches[0]), Topology)
