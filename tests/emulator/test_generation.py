"""Libraries on an emulated GPU, and torch itself: what they decide by values that a kernel computes."""

import json
from pathlib import Path

import pytest

from tests.emulator.test_emulated_training import Emulator, emulator  # noqa: F401

pytestmark = pytest.mark.emulated

SCRIPT = """
import json
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=500, **sizes)).cuda().eval()
lengths = []
model.register_forward_hook(lambda module, args, output: lengths.append(output.logits.shape[1]))
found, beams = [], dict(max_length=70, num_beams=3)
for options in (dict(max_new_tokens=12), dict(max_new_tokens=5, do_sample=True), beams):
    lengths.clear()
    with torch.no_grad():
        result = model.generate(torch.randint(500, (4, 64)).cuda(), pad_token_id=0, **options)
    found.append([len(lengths), list(result.shape)])
open("found.json", "w").write(json.dumps(found))
"""


def test_generation_ends_at_its_length(emulator: Emulator, tmp_path: Path) -> None:  # noqa: F811
    """Greedy, sampled and by beams, the model runs once for each token, and texts have all of them.

    How many tokens each of the beams has is read from the GPU, so that texts of beams are empty.
    """
    emulator.run(SCRIPT, "--gpu", "L4")
    greedy, sampled, beams = json.loads((tmp_path / "found.json").read_text())
    assert greedy == [12, [4, 76]]
    assert sampled == [5, [4, 69]]
    assert beams[0] == 6


def test_texts_are_packed_where_the_script_says_so(emulator: Emulator, tmp_path: Path) -> None:  # noqa: F811
    """Positions that a kernel makes, or that count up, need no mask; those of three texts in a row do."""
    code = """
import json
from transformers import masking_utils

positions = torch.arange(6, device="cuda")[None], torch.arange(6)[None].cuda(), [[0, 1, 2, 0, 1, 0]]
found = [masking_utils.find_packed_sequence_indices(torch.as_tensor(one).cuda()) for one in positions]
open("found.json", "w").write(json.dumps([one is not None for one in found]))
"""
    emulator.run(code, "--gpu", "L4")
    assert json.loads((tmp_path / "found.json").read_text()) == [False, False, True]


def test_statistics_of_batch_norm_are_averaged_over_all_batches(emulator: Emulator, tmp_path: Path) -> None:  # noqa: F811
    """`update_bn` divides by the number of batches, which a kernel counts; afterwards no momentum is set."""
    code = """
import json
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

model = AveragedModel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).cuda()
update_bn([torch.ones(4, 8) for _ in range(3)], model, device="cuda")
alone = nn.BatchNorm1d(8, momentum=None).cuda()
alone(torch.ones(4, 8).cuda())
torch.jit.script(nn.BatchNorm2d(3, momentum=None))
open("found.json", "w").write(json.dumps([model.module[1].momentum, alone.momentum]))
"""
    emulator.run(code, "--gpu", "L4")
    assert json.loads((tmp_path / "found.json").read_text()) == [0.1, None]
