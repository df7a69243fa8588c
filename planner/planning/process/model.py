"""A process as people write it, step after step, in the nouns of a notebook: no algorithm beyond the check.

`run` replays one through the simulated allocator, `file` reads one, and `calibration.probe.tensorflow`
measures the plain tensors of one on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from msgspec import Struct

from planner.jobs import Job, Mode, TensorSpec
from planner.program import Phase


class Model(Struct, frozen=True):
    """A model under the name of a variable. It is built on the CPU, where it takes no memory of the GPU."""

    name: str
    job: Job  # how it is trained
    batch: int  # at which it is traced to see its weights; they do not depend on it


class Heading(Struct, frozen=True):
    """The process comes to another section."""

    text: str


class Print(Struct, frozen=True):
    """The allocator's figures are read: `allocated`, `reserved`, `max allocated`."""

    label: str


class Define(Struct, frozen=True):
    """A tensor is made on the GPU. A name that has one already lets go of it once the new one is there."""

    name: str
    tensor: TensorSpec  # the whole tensor, not one sample


class Delete(Struct, frozen=True):
    """`del`: tensors go, and models with their weights and gradients."""

    names: tuple[str, ...]


class EmptyCache(Struct, frozen=True):
    """`torch.cuda.empty_cache()`."""


class ResetPeak(Struct, frozen=True):
    """`torch.cuda.reset_peak_memory_stats()`."""


class Place(Struct, frozen=True):
    """`model.to("cuda")`: nothing happens where the model is on the GPU already."""

    model: Model


class Summary(Struct, frozen=True):
    """`torchinfo.summary`: the input is made on the GPU, the model placed, one forward pass run in eval mode.

    No gradients are recorded. Input and output are gone when it returns, the model stays.
    """

    model: Model
    batch: int


class Train(Struct, frozen=True):
    """The loop of the model's job. Its names (inputs, target, output, loss, optimizer) live until `Leave`."""

    model: Model
    batch: int
    steps_per_epoch: int
    epochs: int
    label: str | None = None  # of the figures that are read after each epoch; None: they are not


class Leave(Struct, frozen=True):
    """The function that trained returns and its names die. The model stays, and so do its gradients."""


Step = Heading | Print | Define | Delete | EmptyCache | ResetPeak | Place | Summary | Train | Leave
Process = tuple[Step, ...]


class MemoryReading(Struct, frozen=True):
    """The counters of a framework's allocator at one point of a process."""

    section: str  # the last heading; "" before the first
    label: str
    allocated_bytes: int
    reserved_bytes: int | None  # None: unknown to the framework
    peak_allocated_bytes: int  # since the last reset


class OutOfMemory(Struct, frozen=True):
    """The step of a process at which a request could not be served."""

    index: int  # of the step
    loop_step: int | None  # where the step runs or places a model: 0 before the loop's first step
    phase: Phase | None
    requested_bytes: int


class ProcessLog(Struct, frozen=True):
    """The readings of a process, and how it ended."""

    readings: tuple[MemoryReading, ...]
    retries: int  # times that cached segments were released to serve a request
    failure: OutOfMemory | None  # None: it ran to its end


class InvalidStep(Struct, frozen=True):
    """The first step of a process that makes no sense."""

    index: int
    what: str


# torch's dtypes; `job.DTYPES` has the same names.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    "complex128": 16,
}


def size_bytes(tensor: TensorSpec) -> int:
    """Return the bytes of the elements of a tensor."""
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def find_invalid_step(process: Process) -> InvalidStep | None:
    """Return the first step that no program could take there, or that cannot be replayed; None: all can."""
    names = _Names()
    for index, step in enumerate(process):
        for what in names.take(step):
            return InvalidStep(index, what)
    return None


@dataclass(slots=True)
class _Names:
    """The tensors and models that live on the GPU."""

    tensors: set[str] = field(default_factory=set)
    models: dict[str, Model] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)  # models
    trained: set[str] = field(default_factory=set)  # models that were trained once
    training: str | None = None  # the model whose loop's names live

    def take(self, step: Step) -> Iterator[str]:
        """Follow a step; gives what is wrong with it."""
        match step:
            case Define(name):
                if name in self.models:
                    yield f"{name} is a model; take another name for the tensor"
                self.tensors.add(name)
            case Delete(names):
                for name in names:
                    yield from self._delete(name)
            case Place(model) | Summary(model):
                yield from self._place(model)
            case Train(model):
                yield from self._train(model)
            case Leave():
                if self.training is None:
                    yield "there is no loop to leave; train first"
                self.training = None
            case _:
                pass

    def _delete(self, name: str) -> Iterator[str]:
        if name == self.training:
            yield f"{name} is held by its loop's optimizer; leave the loop first"
        elif name in self.tensors:
            self.tensors.remove(name)
        elif name in self.models:
            del self.models[name]
            self.trained.discard(name)
            self.deleted.add(name)
        else:
            yield f"nothing on the GPU is named {name} here; define a tensor or place a model first"

    def _place(self, model: Model) -> Iterator[str]:
        if model.name in self.deleted:
            yield f"{model.name} was deleted; give another model of the same job a name of its own"
        if model.name in self.tensors:
            yield f"{model.name} is a tensor; take another name for the model"
        if self.models.setdefault(model.name, model) != model:
            yield f"{model.name} is another model already; take another name"

    def _train(self, model: Model) -> Iterator[str]:
        if model.job.mode is not Mode.TRAIN:
            yield f"{model.job.model} is a job of mode {model.job.mode}; only mode train can be trained"
        if model.name not in self.models:
            yield f"{model.name} is not on the GPU; place it first"
        yield from self._place(model)
        if self.training is not None:
            yield f"the names of the loop before, of {self.training}, still live; leave it first"
        if model.name in self.trained and model.job.keep_grads:
            yield f"{model.name} was trained before and its gradients were kept; that is not modelled"
        self.training = model.name
        self.trained.add(model.name)
