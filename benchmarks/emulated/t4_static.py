"""Plan the loop of `t4_loop.py` by the static planner, for a T4."""

from collections.abc import Callable

import transformers
from torch import Tensor, nn

from benchmarks.emulated.emulate import Case
from planner.allocator.config import MemoryLimits, config_of_torch
from planner.allocator.replay import replay_trace
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.hardware.database import find_device
from planner.jobs import Job, Loss, Optimizer, Precision, TensorSpec
from planner.planning.programs import CaptureMode, open_programs
from planner.program import ignore_progress, parse_torch_option

STEPS = 2  # one to warm up, one that is read


class _Model(nn.Module):
    """A model that returns its loss and lets its output go when the next step begins: as `del output` at the
    end of a step, since nothing is allocated between.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output: object = None


class _Classifier(_Model):
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.output = None
        self.output = output = self.model(images)
        return nn.functional.cross_entropy(output, labels)


class _Language(_Model):
    def forward(self, ids: Tensor) -> Tensor:
        self.output = None
        self.output = output = self.model(input_ids=ids, labels=ids)
        loss: Tensor = output.loss
        return loss


class _Encoder(_Model):
    def forward(self, ids: Tensor) -> Tensor:
        self.output = None
        self.output = output = self.model(input_ids=ids)
        loss: Tensor = output.last_hidden_state.float().pow(2).mean()
        return loss


def _resnet() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    return model


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: _Classifier(_resnet()),
    "gpt2": lambda: _Language(transformers.GPT2LMHeadModel(transformers.GPT2Config())),
    "bert-base-uncased": lambda: _Encoder(transformers.BertModel(transformers.BertConfig())),
    "distilbert-base-uncased": lambda: _Encoder(
        transformers.DistilBertModel(transformers.DistilBertConfig())
    ),
}


def job_of(case: Case, cudnn: str, version: str) -> tuple[Job, Callable[[], nn.Module]]:
    """Return the job of the loop in this version of torch, and what builds its model."""
    prepare_torchvision()
    size = case["size"]
    tokens = (TensorSpec((size,), "int64"),)
    images = (TensorSpec((3, size, size)), TensorSpec((), "int64"))
    job = Job.create(
        case["model"],
        inputs=images if case["model"] == "resnet50" else tokens,
        loss=Loss.OUTPUT,
        optimizer=Optimizer.ADAMW,
        precision=Precision.AMP_BF16,
        steps=STEPS,
        cudnn=cudnn,
        torch=parse_torch_option(version),
    )
    return job, _BUILDERS[job.model.name]


def plan(case: Case, cudnn: str, version: str) -> dict[str, int]:
    """Return peaks of the second step in bytes, with the process's, in this version of torch."""
    job, build = job_of(case, cudnn, version)
    card = find_device("T4")
    programs = open_programs(job, ignore_progress, build, mode=CaptureMode.RUNS)
    limits = MemoryLimits(card.usable.value - card.context.value, config=config_of_torch(version))
    later = replay_trace(programs.trace(case["batch"], card.target), limits).later_steps
    assert later is not None
    process_bytes = later.reserved_bytes + card.context.value
    return {
        "allocated": later.allocated_bytes,
        "reserved": later.reserved_bytes,
        "process": process_bytes,
    }
