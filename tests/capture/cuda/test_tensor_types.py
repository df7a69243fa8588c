"""`Tensor.type` and the tensor types of torch.cuda, as a script sees them on a GPU."""

from pathlib import Path

import pytest

from planner.program.events import Alloc
from tests.capture.models.test_own_step import BATCH, trace_code

CODE = """
device = torch.device("cuda")
model = nn.Linear(64, 64).to(device)
weight = torch.cuda.FloatTensor([0.5, 0.5])
assert weight.type() == model.weight.type() == torch.typename(weight) == "torch.cuda.FloatTensor"
assert isinstance(weight, torch.cuda.FloatTensor)

def train_step(images):
    assert images.type() == "torch.FloatTensor" and not isinstance(images, torch.cuda.FloatTensor)
    images = images.{move}
    loss = model(images).sum()
    assert loss.type() == "torch.cuda.FloatTensor"
    assert isinstance(loss, torch.cuda.FloatTensor) and not isinstance(loss, torch.cuda.HalfTensor)
    half = loss.type(torch.cuda.HalfTensor)
    assert half.is_cuda and half.type() == "torch.cuda.HalfTensor"
    assert loss.type(torch.FloatTensor).type() == loss.type("torch.FloatTensor").type() == "torch.FloatTensor"
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3) and torch.cuda.LongTensor(2, 3).is_cuda
    loss.backward()
    return {result}
"""


@pytest.mark.parametrize("move", ["to(device)", "type(torch.cuda.FloatTensor)", "type(model.weight.type())"])
@pytest.mark.parametrize("result", ["loss", "loss.item()"])
def test_tensors_have_the_types_of_a_gpu(tmp_path: Path, move: str, result: str) -> None:
    """A conversion to a type of the GPU copies the batch once."""
    trace = trace_code(tmp_path, CODE.format(move=move, result=result), "train_step", "64", steps=1)
    sizes = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    assert sizes.count(4 * 64 * BATCH) >= 1 and 8 in sizes
