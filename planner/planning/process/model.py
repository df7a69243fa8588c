"""The possible steps of a process, and the check that a process is valid.

`run` replays a process through the simulated allocator, `file` reads a process from YAML, and
`calibration.probe.tensorflow` measures the plain tensors of a process on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from msgspec import Struct

from planner.jobs import Job, Mode, TensorSpec
from planner.program import Phase


class Model(Struct, frozen=True):
    """A model that a process uses, with the name of its variable.

    It is built on the CPU, so it takes no GPU memory until it is placed.
    """

    name: str
    job: Job  # how it is trained
    batch: int  # the batch size at which its weights are traced; the weights do not depend on it


class Heading(Struct, frozen=True):
    """A step that begins a section of the output."""

    text: str


class Print(Struct, frozen=True):
    """A step that reads the allocator's figures: `allocated`, `reserved`, `max allocated`."""

    label: str


class Define(Struct, frozen=True):
    """A step that allocates a named tensor on the GPU.

    A tensor that already has the name is freed after the new tensor is allocated.
    """

    name: str
    tensor: TensorSpec  # the whole tensor, not one sample


class Delete(Struct, frozen=True):
    """A step that deletes (`del`) tensors, or models with their weights and gradients."""

    names: tuple[str, ...]


class EmptyCache(Struct, frozen=True):
    """A step that calls `torch.cuda.empty_cache()`."""


class ResetPeak(Struct, frozen=True):
    """A step that calls `torch.cuda.reset_peak_memory_stats()`."""


class Place(Struct, frozen=True):
    """A step that calls `model.to("cuda")`, which does nothing if the model is on the GPU already."""

    model: Model


class Summary(Struct, frozen=True):
    """A step that calls `torchinfo.summary`, which runs one forward pass in eval mode on the GPU.

    The input is allocated first, then the model is moved to the GPU. No gradients are recorded. Input and
    output are freed when the call returns; the model stays on the GPU.
    """

    model: Model
    batch: int


class Train(Struct, frozen=True):
    """A step that runs the training loop of a model's job.

    The loop's variables (inputs, target, output, loss, optimizer) stay alive until `Leave`.
    """

    model: Model
    batch: int
    steps_per_epoch: int
    epochs: int
    label: str | None = None  # label of the figures read after each epoch; None if no figures are read


class Leave(Struct, frozen=True):
    """A step that frees the variables of the training loop.

    It represents the return from the function that trained. The model and its gradients stay on the GPU.
    """


Step = Heading | Print | Define | Delete | EmptyCache | ResetPeak | Place | Summary | Train | Leave
Process = tuple[Step, ...]


class MemoryReading(Struct, frozen=True):
    """The counters of a framework's allocator at one point of a process."""

    section: str  # text of the last heading; empty before the first heading
    label: str
    allocated_bytes: int
    reserved_bytes: int | None  # None if the framework does not count them
    peak_allocated_bytes: int  # since the last reset of the peak


class OutOfMemory(Struct, frozen=True):
    """A memory request that failed, and the step that made the request."""

    index: int  # index of the step in the process
    loop_step: int | None  # step of the loop, 0 in its set-up; None if no model is run or placed
    phase: Phase | None
    requested_bytes: int


class ProcessLog(Struct, frozen=True):
    """The readings of a process, and how it ended."""

    readings: tuple[MemoryReading, ...]
    retries: int  # number of times that cached segments were released to serve a request
    failure: OutOfMemory | None  # None if the process ran to its end


class InvalidStep(Struct, frozen=True):
    """The first invalid step of a process, and the reason."""

    index: int
    what: str


# torch's dtypes; `planner.jobs.parse.DTYPES` has the same names.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    "complex128": 16,
}


def size_bytes(tensor: TensorSpec) -> int:
    """Return the size of a tensor's elements in bytes."""
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def find_invalid_step(process: Process) -> InvalidStep | None:
    """Return the first step that is impossible or cannot be replayed, or None if every step is valid."""
    names = _Names()
    for index, step in enumerate(process):
        for what in names.take(step):
            return InvalidStep(index, what)
    return None


@dataclass(slots=True)
class _Names:
    """The names of the tensors and models on the GPU at one point of a process."""

    tensors: set[str] = field(default_factory=set)
    models: dict[str, Model] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)  # models that were deleted
    trained: set[str] = field(default_factory=set)  # models that were trained at least once
    training: str | None = None  # the model whose loop variables are alive; None if no loop's variables are

    def take(self, step: Step) -> Iterator[str]:
        """Update the names for a step, and yield a message for each error in the step."""
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
        job = model.job
        if job.loop.mode is not Mode.TRAIN:
            yield f"{job.model.name} is a job of mode {job.loop.mode}; only mode train can be trained"
        if model.name not in self.models:
            yield f"{model.name} is not on the GPU; place it first"
        yield from self._place(model)
        if self.training is not None:
            yield f"the names of the loop before, of {self.training}, still live; leave it first"
        if model.name in self.trained and job.loop.keep_grads:
            yield f"{model.name} was trained before and its gradients were kept; that is not modelled"
        self.training = model.name
        self.trained.add(model.name)
