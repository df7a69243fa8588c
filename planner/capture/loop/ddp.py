"""Model DistributedDataParallel's memory in one process.

It consists of buckets of gradients, and of copies for broadcasts. There is no process group: buckets are real
tensors on the device, filled by hooks as gradients arrive, and nothing is sent. The defaults are modelled:
`find_unused_parameters=False`, no communication hook, and each backward pass synchronises. Facts from
torch/nn/parallel/distributed.py (2.13), and from reducer.cpp and comm.cpp of torch/csrc/distributed/c10d
(read in 1.10 and a version of 2.x); a test compares them with the real implementation. Some tensors of a few
hundred bytes, by which ranks agree on shapes and on the order of gradients, are left out.
"""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from planner.capture.loop.runtime import CategoryHook
from planner.jobs import Job
from planner.program import Category, TorchVersion, torch_version_of

FIRST_BUCKET_BYTES = 2**20  # reducer.hpp: kDefaultFirstBucketBytes
BUCKET_BYTES = 25 * 2**20  # reducer.hpp: kDefaultBucketBytesCap
BROADCAST_BYTES = 250 * 2**20  # distributed.py: broadcast_bucket_size
BROADCASTS_IN_FLIGHT = 2  # comm.cpp: broadcast_coalesced
# ProcessGroupNCCL holds a collective's tensors until the next collective, unless `Work.wait` is called, which
# DDP's reducer does not do (pytorch/pytorch#148590).
INPUTS_HELD_SINCE: TorchVersion = (2, 8)


class Buckets:
    """The gradient buckets of DistributedDataParallel, filled by hooks on the parameters of a model.

    At first, all gradients of one dtype share a bucket. Before the second forward pass with gradients the
    buckets are rebuilt in the order in which the first backward pass computed the gradients. Since torch 2.8
    the old bucket lives until the next reduction. `set_category` is called with each bucket.
    """

    def __init__(self, model: nn.Module, job: Job, set_category: CategoryHook) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._model = model
        self._are_views = job.sharding.ddp_bucket_view
        self._set_category = set_category
        self._arrived: list[int] | None = []  # indices of parameters, until the buckets are rebuilt
        self._views: dict[int, Tensor] = {}  # index of a parameter -> its view into a bucket
        self._buckets: list[Tensor] = []
        self._holds_inputs = torch_version_of(job.environment.torch) >= INPUTS_HELD_SINCE
        self._held: list[Tensor] = []  # buckets that were reduced last, until the next collective
        self._awaited: set[int] = set()  # parameters' indices in the bucket that is reduced next
        # distributed.py: _sync_module_states
        broadcast([*model.parameters(), *model.buffers()])
        self._fill(list(reversed(_by_first_tensor(assign_buckets(self._parameters, (sys.maxsize,))))))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]

    def before_forward(self) -> None:
        """Rebuild the buckets at the first call after a backward pass, and broadcast the buffers each time.

        `DistributedDataParallel.forward` does both in training before the model's own forward pass.
        """
        if self._arrived:
            arrived, self._arrived = self._arrived, None
            # DDP raises here if a parameter got no gradient; such parameters are put last.
            arrived += sorted(set(range(len(self._parameters))) - set(arrived))
            ordered = [self._parameters[index] for index in arrived]
            places = assign_buckets(ordered, (FIRST_BUCKET_BYTES, BUCKET_BYTES))
            buckets = [[arrived[place] for place in bucket] for bucket in places]
            if self._holds_inputs:
                self._held, self._awaited = self._buckets, set(buckets[0])
            self._fill(buckets)
        broadcast(list(self._model.buffers()))

    def close(self) -> None:
        """Remove the hooks from the model and release the buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._views.clear()
        self._buckets, self._held = [], []

    def _fill(self, buckets: Sequence[Sequence[int]]) -> None:
        """Release the old buckets, and allocate new buckets, in which each parameter gets a view.

        Source: Reducer::initialize_buckets. `buckets` gives the indices of the parameters in each bucket.
        """
        self._views.clear()
        self._buckets = []
        for bucket in buckets:
            first = self._parameters[bucket[0]]
            elements = sum(self._parameters[index].numel() for index in bucket)
            flat = torch.empty(elements, dtype=first.dtype, device=first.device)
            self._set_category(flat, Category.GRADIENT)
            self._buckets.append(flat)
            offset = 0
            for index in bucket:
                parameter = self._parameters[index]
                # Reducer::initialize_bucket_views: with the parameter's strides
                view = flat.as_strided(parameter.shape, parameter.stride(), offset)
                offset += parameter.numel()
                self._views[index] = view
                if self._are_views and parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Record a gradient's arrival, copy it into its bucket, and release held buckets if the next is full.

        Arrivals are recorded until the buckets are rebuilt. A gradient that is a view of the bucket is not
        copied. The bucket is not reduced; buckets are held after their reduction. With `ddp_bucket_view`, the
        gradient becomes a view of the bucket. Source: Reducer::mark_variable_ready_dense. Without views the
        gradient is copied back after the reduction, which takes no memory and is left out.
        """
        if self._arrived is not None and index not in self._arrived:
            self._arrived.append(index)
        gradient, view = parameter.grad, self._views[index]
        if gradient is not None and gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
            view.copy_(gradient)
            if self._are_views:
                parameter.grad = view
        self._awaited.discard(index)
        if not self._awaited:
            self._held = []


def assign_buckets(tensors: Sequence[Tensor], limits_bytes: Sequence[int]) -> list[list[int]]:
    """Assign tensors to buckets by dtype and size, and return the indices of the tensors in each bucket.

    A bucket holds tensors of one dtype. A bucket is full as soon as it reaches its limit; the last limit
    holds for all further buckets of its dtype. Full buckets come first, in order. Source: reducer.cpp,
    compute_bucket_assignment_by_size, which leaves the order of the other buckets open.
    """
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    filled_bytes: dict[torch.dtype, int] = {}
    closed: dict[torch.dtype, int] = {}  # buckets of this dtype that are full
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype
        filling.setdefault(kind, []).append(index)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + tensor.numel() * tensor.element_size()
        count = closed.get(kind, 0)
        if filled_bytes[kind] >= limits_bytes[min(count, len(limits_bytes) - 1)]:
            full.append(filling.pop(kind))
            del filled_bytes[kind]
            closed[kind] = count + 1
    return [*full, *filling.values()]


def _by_first_tensor(buckets: Iterable[list[int]]) -> list[list[int]]:
    return sorted(buckets, key=min)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Allocate and free the flat copies for a broadcast of tensors. Source: comm.cpp."""
    in_flight: deque[Tensor] = deque()
    with torch.no_grad():
        for bucket in _by_first_tensor(assign_buckets(tensors, (BROADCAST_BYTES,))):
            if len(in_flight) == BROADCASTS_IN_FLIGHT:
                in_flight.popleft()
            flat = [tensors[index].contiguous().view(-1) for index in bucket]
            in_flight.append(torch.cat(flat) if len(flat) > 1 else flat[0])
            del flat
        while in_flight:
            in_flight.popleft()
