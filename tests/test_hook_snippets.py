"""The hooks as the README shows them, each in a process of its own, as a user's script starts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LIGHTNING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningDataModule, LightningModule

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(LightningDataModule):
    batch_size = 4
    def train_dataloader(self):
        rows = TensorDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64))
        return DataLoader(rows, batch_size=self.batch_size)
"""
FIT = """
trainer = Trainer(callbacks=[BatchSizePlanner(gpu_mib=2000, confidence=0.9)], accelerator="cpu", max_steps=1,
                  logger=False, enable_checkpointing=False, enable_progress_bar=False)
data = Data()
trainer.fit(Module(), data)
assert data.batch_size > 4
"""
TRANSFORMERS = """
import torch, transformers
from accelerate import Accelerator
model = transformers.BertForSequenceClassification(transformers.BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128))
arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True)
ids = torch.zeros(2, 32, dtype=torch.int64)
sample_batch = {"input_ids": ids, "labels": torch.zeros(2, dtype=torch.int64)}
accelerator = Accelerator(cpu=True)  # TrainingArguments forget those of before
optimizer = torch.optim.AdamW(model.parameters())
"""


def snippet(module: str) -> str:
    """Return the README's code that imports from this module of the planner."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if f"from {module} import" in block]
    return str(found)


def run_fresh(script: str, folder: Path) -> None:
    """Run a script in a new interpreter and show what it printed where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_lightning_snippet_runs_in_a_fresh_process(tmp_path: Path) -> None:
    """The README's callback imports, makes a trainer and trains in a process of its own."""
    run_fresh(snippet("planner.lightning") + LIGHTNING + FIT, tmp_path)


def test_huggingface_snippet_runs_in_a_fresh_process(tmp_path: Path) -> None:
    """The README's calls plan, where transformers and accelerate are imported after the planner."""
    code = snippet("planner.huggingface")
    imports = "\n".join(line for line in code.splitlines() if "import" in line)
    calls = "\n".join(line for line in code.splitlines() if "import" not in line)
    end = "\nassert batch_size > 8 and arguments.per_device_train_batch_size >= 1"
    run_fresh(imports + TRANSFORMERS + calls + end, tmp_path)


@pytest.mark.parametrize("hook", ["planner.lightning", "planner.huggingface"])
def test_libraries_import_after_a_hook(hook: str, tmp_path: Path) -> None:
    """A script that imports the hook first may import the frameworks and torchvision's models afterwards."""
    script = f"import {hook}\nimport transformers, torchvision.models\nfrom transformers import Trainer\n"
    run_fresh(script + "import lightning.pytorch", tmp_path)
