"""NCCL's memory follows its sources, and published figures are within its range."""

import csv
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest

from planner.hardware.nccl import buffers
from planner.hardware.nccl.buffers import Communicator, Range, communicator_mib, nccl_mib

PUBLISHED = Path(buffers.__file__).with_name("published.csv")
VERSIONS = ((2, 20), (2, 21), (2, 26), (2, 29))
CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
RANKS = (2, 3, 4, 8, 16, 64)


def ranks(count: int) -> Range:
    return Range(count, count, count)


def published() -> Iterator[tuple[Communicator, str, float]]:
    with PUBLISHED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            nccl, capability = (tuple(map(int, row[key].split("."))) for key in ("nccl", "capability"))
            found = Communicator((nccl[0], nccl[1]), (capability[0], capability[1]), ranks(int(row["ranks"])))
            yield found, row["what"], float(row["mib"])


def every() -> Iterator[Communicator]:
    for nccl, capability, count in product(VERSIONS, CAPABILITIES, RANKS):
        yield Communicator(nccl, capability, ranks(count))


@pytest.mark.parametrize(("communicator", "what", "mib"), list(published()))
def test_published_figures_lie_within_the_range(communicator: Communicator, what: str, mib: float) -> None:
    """Each published figure that can be compared lies between low and high."""
    sizes = {
        "communicator": communicator_mib(communicator),
        "process": nccl_mib(communicator, 1),
        "kernels": buffers.KERNELS,
    }
    assert sizes[what].low <= mib <= sizes[what].high


def test_a_pair_of_a100_is_exact() -> None:
    """24 channels of 12 MiB and 32 of 8 MiB are the 544 MiB that were reported."""
    assert communicator_mib(Communicator((2, 18), (8, 0), ranks(2))).likely == 24 * 12 + 32 * 8 == 544


def test_ranges_are_ordered() -> None:
    """The likely figure lies between the others."""
    for communicator in every():
        low, likely, high = communicator_mib(communicator)
        assert 0 < low <= likely <= high


def test_more_communicators_never_need_less() -> None:
    """Each further communicator adds the same, and kernels are loaded once."""
    for communicator in every():
        each = communicator_mib(communicator)
        for fewer, more in pairwise(nccl_mib(communicator, count) for count in (1, 2, 3)):
            assert [b - a for a, b in zip(fewer, more, strict=True)] == list(each)


def test_newer_versions_never_need_more() -> None:
    """Smaller buffers of NVLink SHARP (2.21) and connections on use (2.22) only save."""
    for capability, count in product(CAPABILITIES, RANKS):
        sizes = [communicator_mib(Communicator(nccl, capability, ranks(count))) for nccl in VERSIONS]
        for older, newer in pairwise(sizes):
            assert all(b <= a for a, b in zip(older, newer, strict=True))


def test_more_ranks_of_a_node_never_need_less() -> None:
    """Beyond a node the likely figure may fall, as chunks are smaller over a network."""
    for nccl, capability in product(VERSIONS, CAPABILITIES):
        sizes = [communicator_mib(Communicator(nccl, capability, ranks(count))) for count in (2, 3, 4, 8)]
        for fewer, more in pairwise(sizes):
            assert all(a <= b for a, b in zip(fewer, more, strict=True))


@pytest.mark.parametrize(("torch", "nccl"), [((2, 4), (2, 20)), ((2, 6), (2, 21)), ((2, 13), (2, 29))])
def test_wheels_of_torch_bring_their_nccl(torch: tuple[int, int], nccl: tuple[int, int]) -> None:
    """The version follows torch's."""
    assert buffers.nccl_of_torch(torch) == nccl
