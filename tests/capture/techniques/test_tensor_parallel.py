"""Tensor parallel by the plans of transformers: one rank's parts, and what collectives hold."""

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh

from planner.capture.cuda.streams import Streams
from planner.capture.distributed.process_group import process_group
from planner.capture.recorder.recorder import Recorder
from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import ClipGradients, Job, Loss, Mode, Optimizer
from planner.program import Phase, Target
from planner.program.events import Alloc, Category, Free, Trace, validate
from tests.helpers.models import AMPERE, born, job_of

WIDE, INNER, VOCABULARY = 64, 96, 128
CONFIG = {
    "hidden_size": WIDE,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "use_cache": False,
}


def split(model: str = "hf:LlamaForCausalLM", config: dict[str, object] = CONFIG, **fields: object) -> Trace:
    """The trace of the first rank's two steps with SGD."""
    loop = {"mode": Mode.TRAIN, "loss": Loss.OUTPUT, "steps": 2, "model_args": tuple(config.items())}
    return record(job_of("16:int64", **{**loop, "tp": 2, **fields, "model": model}), 4, AMPERE)


def parameters(trace: Trace) -> list[int]:
    """Numbers of the parameters and buffers, in float32."""
    of_model = [e for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    return [event.size_bytes // 4 for event in of_model]


def test_a_rank_holds_its_part_of_projections() -> None:
    """The embedding and all projections are halved, norms and frequencies are not."""
    trace = split()
    validate(trace)
    heads, keys, inner = WIDE * WIDE // 2, WIDE * WIDE // 4, WIDE * INNER // 2
    layer = [heads, keys, keys, heads, inner, inner, inner, WIDE, WIDE]
    ends = VOCABULARY * WIDE // 2
    assert parameters(trace) == [ends, *layer, WIDE, 8, 8, ends]
    assert not trace.unknown_ops
    assert "tensor parallel: by the plan of transformers (" in " ".join(trace.notes)


def test_tied_weights_are_one_part() -> None:
    """The head of a model with tied weights takes no memory of its own."""
    tied = split(config={**CONFIG, "tie_word_embeddings": True})
    assert parameters(tied) == parameters(split())[:-1]


def test_within_fsdp_a_rank_holds_a_part_of_its_part() -> None:
    """On two times two ranks each holds a quarter of what is split, and half of the rest."""
    alone, nested = parameters(split()), parameters(split(fsdp=2))
    of_buffers = alone[-3:-1]
    assert nested == [one if one in of_buffers else one // 2 for one in alone]


def test_the_logits_are_gathered() -> None:
    """Each rank multiplies for its half of the vocabulary, then gathers the logits along it."""
    trace = split()
    logits = 4 * 4 * 16 * VOCABULARY
    assert born(trace, "all_gather_into_tensor") == [logits] * 2
    assert logits // 2 in born(trace, "mm")


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.SGD])
def test_clipping_and_optimizers_take_each_mesh_by_itself(optimizer: Optimizer) -> None:
    """Norms are plain tensors and projections are not, which no kernel takes together."""
    trace = split(optimizer=optimizer, clip_gradients=ClipGradients.NORM)
    assert not trace.unknown_ops


def test_models_without_a_plan_are_refused() -> None:
    """One line says where to write one; no process group stays behind."""
    with pytest.raises(UsageError, match=r"--tp 2: the model has no tensor parallel plan .* call"):
        split("torchvision:resnet18", {}, inputs=job_of("3x64x64").samples.inputs)
    assert not distributed.is_initialized()


def test_what_a_collective_reads_lives_until_it_is_waited_for() -> None:
    """The input of a reduction is freed by the wait, not where the last variable goes."""
    recorder = Recorder(torch.nn.Identity(), Target.for_capability(AMPERE))
    with process_group(2, Streams()):
        mesh = init_device_mesh("meta", (2,))
        with recorder:
            recorder.start_phase(1, Phase.FORWARD)
            x = torch.empty(1024, device="meta")
            reduced = collectives.all_reduce(x, "sum", mesh)
            del x
            marker = torch.empty(1, device="meta")
            reduced.wait()
            recorder.start_phase(1, Phase.BACKWARD)
    events = [e for e in recorder.finish(1).events if isinstance(e, Alloc | Free)]
    read, result, other = (e for e in events if isinstance(e, Alloc))
    assert [read.size_bytes, result.size_bytes, other.size_bytes] == [4096, 4096, 4]
    assert events.index(Free(read.block)) > events.index(other)
    assert marker.numel() == 1


def test_tensors_made_on_meta_by_that_name_take_no_memory() -> None:
    """Libraries ask them for strides; of a model's own code it is the same."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the input, after a question."""
            return x * (torch.empty(1000, 1000, device="meta").stride(0) // 1000)

    Net.__module__ = __name__

    def build(_: Job) -> torch.nn.Module:
        return Net()

    trace = record(job_of("8"), 4, AMPERE, build)
    assert born(trace) == [4 * 4 * 8] * 2
