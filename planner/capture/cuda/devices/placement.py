"""The state of the simulated GPU while user code runs: its tensors, streams, graphs and remarks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from planner.capture.cuda import graphs as cuda_graphs
from planner.capture.cuda.callers import line_of_caller
from planner.capture.cuda.checkpoints.saved_files import SavedFiles
from planner.capture.cuda.devices.host_tensors import HostTensors
from planner.capture.cuda.devices.placed import PlacedTensors
from planner.capture.cuda.names import Names
from planner.capture.cuda.streams import Streams
from planner.capture.wrapped import is_wrapped
from planner.program import NEWEST_TORCH, TorchVersion

META = "meta"
GPU, CPU, META_DEVICE = torch.device("cuda", 0), torch.device("cpu"), torch.device(META)
is_meta = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(slots=True)
class Placement:
    """The state of a simulated GPU for user code: the device for `cuda`, tensors, streams and remarks."""

    target: str = META  # device that `cuda` maps to for tensors that are not on the meta device
    capability: tuple[int, int] = (8, 0)
    torch_version: TorchVersion = NEWEST_TORCH  # version that the job runs
    placed: PlacedTensors = field(default_factory=PlacedTensors)  # tensors on the GPU while a model is built
    is_running: bool = False  # whether the loop runs, whose tensors are not added to `placed`
    host: HostTensors = field(default_factory=HostTensors)  # meta tensors that stand for CPU tensors
    has_values: bool = False  # whether tensors have values, so that copies to the CPU are real
    moves_module: bool = False  # whether the loop moves a module, whose tensors stay on the meta device
    streams: Streams = field(default_factory=Streams)
    graphs: cuda_graphs.Graphs = field(default_factory=cuda_graphs.Graphs)
    on_empty_cache: Callable[[], None] = lambda: None  # replaced by a recorder's method in `watch`
    on_resize: Callable[[Tensor], None] = lambda tensor: None  # likewise; called with the resized tensor
    has_recorded: Callable[[Tensor], bool] = lambda tensor: True  # likewise; False for a tensor on the CPU
    remarks: dict[str, str] = field(default_factory=dict)  # remark -> the first line that causes it
    names: Names | None = None  # torch's names that are replaced while a placement is open
    # Work postponed until the set-up is recorded, each with a marker tensor that gives its order.
    put_off: list[tuple[Tensor, Callable[[], None]]] = field(default_factory=list)
    on_cpu: WeakSet[nn.Module] = field(default_factory=WeakSet)  # modules that user code moved to the CPU
    saved: SavedFiles = field(default_factory=SavedFiles)

    @property
    def stands_for_host(self) -> bool:
        """Return whether new CPU tensors are made as stand-ins on the meta device."""
        return self.is_running and not self.has_values

    @contextmanager
    def moving_module(self) -> Iterator[None]:
        """Keep tensors on the meta device, even if they are moved to the CPU, inside the context.

        Otherwise `Module.to` would replace its parameters, which optimizers hold.
        """
        before, self.moves_module = self.moves_module, True
        try:
            yield
        finally:
            self.moves_module = before

    @property
    def notes(self) -> tuple[str, ...]:
        """Return each remark as a note that begins with the first line of user code that caused it."""
        return tuple(f"{line} {text}" for text, line in self.remarks.items())

    def watch(self, recorder: Any) -> None:
        """Report emptied caches, resized storages and CUDA graphs to the recorder of the running loop."""
        self.on_empty_cache = recorder.record_empty_cache
        self.on_resize = recorder.record_resize
        self.has_recorded = recorder.has_recorded
        self.graphs.open_pool = recorder.graph_pool

    def empty_cache(self) -> None:
        """Report to the recorder that the cache is emptied, or log it in `placed` before the loop runs."""
        if self.is_running:
            self.on_empty_cache()
        else:
            self.placed.add_empty_cache()

    def put(self, tensor: Any) -> Any:
        """Log that user code puts a tensor on the GPU, unless the loop runs, and return the tensor."""
        if isinstance(tensor, Tensor) and not self.is_running:
            self.placed.add(tensor)
        return tensor


opened: list[Placement] = []  # open placements, innermost last; several if a model is built in a capture


def is_put_on_gpu(tensor: Tensor) -> bool:
    """Return whether user code put a tensor on the GPU while the model was built."""
    return bool(opened) and tensor in opened[-1].placed


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is a meta tensor that stands for a CPU tensor. A wrapper of tensors is not."""
    return bool(opened) and not is_wrapped(tensor) and tensor in opened[-1].host


def put_off_until_recorded(work: Callable[[], None]) -> bool:
    """Postpone a constructor's work until the set-up is recorded, and return whether it was postponed.

    The work runs once the tensors that are already on the GPU are recorded. If the loop runs already, or no
    placement is open, nothing is postponed and the caller must run the work itself.
    """
    if not opened or opened[-1].is_running:
        return False
    marker = torch.empty(0, device=META)
    opened[-1].put(marker)
    opened[-1].put_off.append((marker, work))
    return True


def work_put_off() -> list[tuple[float, Callable[[], None]]]:
    """Return and clear the postponed calls, as (position among the tensors put on the GPU, call) pairs."""
    taken = [(put_order(marker), work) for marker, work in opened[-1].put_off] if opened else []
    if taken:
        opened[-1].put_off.clear()
    return taken


def modules_on_cpu() -> WeakSet[nn.Module]:
    """Return the modules whose last move by user code, while it built the model, was to the CPU."""
    return opened[-1].on_cpu if opened else WeakSet()


def placed_tensors() -> PlacedTensors:
    """Return the tensors that user code put on the GPU while the model was built, and their log."""
    return opened[-1].placed if opened else PlacedTensors()


def current_placement() -> Placement:
    """Return the placement that was opened last."""
    return opened[-1]


def put_order(tensor: Tensor) -> float:
    """Return a tensor's position among the tensors put on the GPU while a model was built, or infinity."""
    return opened[-1].placed.number_of(tensor) if opened else inf


def target_of(device: object) -> str:
    """Return the device of the capture that replaces a GPU, and add a remark if the GPU's index is not 0."""
    index = device if isinstance(device, int) else torch.device(device).index  # type: ignore[call-overload]
    if index:
        add_remark(f"uses cuda:{index}: each GPU stands for the planned one")
    return opened[-1].target


def add_remark(text: str) -> None:
    opened[-1].remarks.setdefault(text, line_of_caller())
