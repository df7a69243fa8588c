"""Compute NCCL's memory on a GPU by the rules in NCCL's sources.

The result is a range that contains published figures. NCCL allocates by channel and peer. The number of
channels depends on the links between GPUs, which a job does not name. Sources, read in NVIDIA/nccl v2.18.6,
v2.20.5, v2.21.5, v2.22.3, v2.28.9 and 2.30.7:

- init.cc: each connection has a buffer of each protocol, 4 MiB (Simple), 512 KiB (LL) and 4,800 KiB (LL128).
  transport/p2p.cc puts all at the receiving end, or the first at the sending end if GPUs read (Ampere over
  NVLink). In units of 2 MiB both cases take 12 MiB per channel and direction. Through host memory
  (transport/shm.cc) nothing is on the GPU.
- a ring has one such connection in and out; a tree adds one to the other neighbour if there are three ranks
  or more. Since 2.22 the connections of an algorithm are made when it first runs (NCCL_RUNTIME_CONNECT).
- transport/net.cc, `sharedNetBuffersInit`: 16 chunks per channel for sending and receiving, even without any
  network traffic; a chunk has 512 KiB if all GPUs of one node have NVLink, else 128; channels are a power of
  two.
- transport/nvls.cc: NVLink SHARP (9.0 and newer, three ranks or more) has two buffers per channel and rank of
  the node, of 1 MiB since 2.21, of 4 before.

NCCL's kernels are loaded once for all communicators.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from planner.program import TorchVersion

GPUS_OF_A_NODE = 8
CONNECTION_MIB = 12
CHUNKS = 16
NVLINK_CHUNK_MIB, OTHER_CHUNK_MIB = 0.5, 0.125
SHARP_CHANNELS = 16
SMALL_SHARP_BUFFERS = (2, 21)
CONNECTED_ON_USE = (2, 22)
_PINNED = {(2, 4): (2, 20), (2, 5): (2, 21), (2, 6): (2, 21), (2, 7): (2, 26), (2, 8): (2, 27)}
NEWEST_NCCL = (2, 29)


class Range(NamedTuple):
    """A range of a size in MiB or of a number of channels or ranks, with its likely value."""

    low: float
    likely: float
    high: float


# 470 - 388 MiB: a first group of one rank, and each further group, on an RTX 3060 (sglang #35538). For other
# GPUs no figure is known; local memory of kernels grows with the multiprocessors.
KERNELS = Range(40, 82, 300)
_NVLINK_CHANNELS = {
    (7, 0): Range(4, 12, 12),  # six links, each twice
    (8, 0): Range(4, 24, 24),  # twelve links, twice
    (9, 0): Range(8, 24, 32),  # logs: 8 (H20), 16 (H800, nccl #892), 24 (H100, nccl #1259)
}
_NEWER_CHANNELS = Range(8, 32, 64)  # a B300 opens 64 (nccl #2363)
_OTHER_CHANNELS = Range(2, 2, 8)  # logs of RTX 4090 (nccl-tests #307); a bridge has four links


class Communicator(NamedTuple):
    """A communicator by what decides its memory: NCCL's version, the GPUs' capability, and the ranks."""

    nccl: tuple[int, int]  # version
    capability: tuple[int, int]  # of the GPUs
    ranks: Range  # three equal numbers if the number of ranks is known


def nccl_of_torch(version: TorchVersion) -> tuple[int, int]:
    """Return the NCCL version in the wheels of a torch version, as (major, minor).

    A torch newer than 2.8 gets the newest known NCCL, and a torch older than 2.4 gets NCCL 2.20.
    """
    return _PINNED.get(version, NEWEST_NCCL if version > (2, 8) else (2, 20))


def communicator_mib(communicator: Communicator) -> Range:
    """Return the range of the size of one communicator's buffers, in MiB."""
    return Range(*(_buffers(communicator, itemgetter(place)) for place in range(3)))


def nccl_mib(communicator: Communicator, count: int) -> Range:
    """Return the range of the memory of `count` equal communicators and of NCCL's kernels, in MiB."""
    each = communicator_mib(communicator)
    return Range(*(kernels + count * one for kernels, one in zip(KERNELS, each, strict=True)))


def _buffers(communicator: Communicator, pick: Callable[[Range], float]) -> float:
    """Return the size of a communicator's buffers in MiB, the low, likely or high size as `pick` selects."""
    nccl, capability, ranks = communicator.nccl, communicator.capability, pick(communicator.ranks)
    has_nvlink = capability in _NVLINK_CHANNELS or capability >= (10, 0) and capability[0] < 12
    channels = pick(_NVLINK_CHANNELS.get(capability, _NEWER_CHANNELS) if has_nvlink else _OTHER_CHANNELS)
    other_neighbour = ranks > 2
    if nccl >= CONNECTED_ON_USE:  # large collectives run on rings; small collectives may open the tree
        tree = pick(Range(0, 0, 1)) * other_neighbour
    else:  # a chain's ends have one neighbour; with two ranks, the connection back is the ring's
        tree = pick(Range(0.5, 1, 1)) * other_neighbour
    # If GPUs reach each other only through the host, or nothing has run yet, there is no ring.
    ring = pick(Range(0, 1, 1))
    network = pick(Range(0, 1, 2)) * (ranks > GPUS_OF_A_NODE)
    connections = channels * CONNECTION_MIB * (ring + tree + network)
    is_one_nvlink = pick(Range(False, has_nvlink and ranks <= GPUS_OF_A_NODE, True))
    chunk = NVLINK_CHUNK_MIB if is_one_nvlink else OTHER_CHUNK_MIB
    shared = CHUNKS * chunk * (1 << (int(channels) - 1).bit_length())
    buffer_mib = 1 if nccl >= SMALL_SHARP_BUFFERS else 4
    has_sharp = has_nvlink and capability >= (9, 0) and ranks > 2
    sharp = pick(Range(0, 1, 1)) * has_sharp * 2 * SHARP_CHANNELS * buffer_mib * min(ranks, GPUS_OF_A_NODE)
    return connections + shared + sharp
