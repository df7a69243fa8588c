"""The source of a user's file tells models, training steps and LightningModules apart."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.jobs import Job, Loss, Mode, ZeroGrad, parse_tensor_spec, resolve_job
from planner.jobs.own_code import CodeKind, kind_of_code, sets_cudnn_benchmark

CODE = """
import lightning.pytorch as pl
from torch import nn
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOTrainer as Preferences
import transformers

class Weighted(Trainer):
    def compute_loss(self, model, inputs, **more): ...

def dpo():
    return Preferences(net, args=TrainingArguments("out"))

def weighted():
    trainer = Weighted(net)
    return trainer

def annotated():
    trainer: Trainer = Weighted(net)
    return trainer

def named(): return transformers.Trainer(net)

def texts(): return AutoModelForCausalLM.from_config(config)

def adapted():
    model = transformers.BertForSequenceClassification(config)
    return get_peft_model(model, adapters)

class Net(nn.Module):
    def forward(self, x): ...

class NetWithStep(nn.Module):
    def forward(self, x): ...
    def step(self, batch): ...

class Gan:
    def __init__(self, width=8): ...
    def step(self, batch): ...

class Wgan(Gan):
    pass

class Schedule:
    def step(self): ...

class Lit(pl.LightningModule):
    def training_step(self, batch, index): ...

class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

def build(width=8):
    return Net()

def wide(width):
    return Net()

def make_gan():
    gan = Gan()
    return gan

def make_step():
    net = Net()
    def step(batch):
        return net(batch)
    return step

def lit(): return Lit()

def make_inside(width=8): return make_step()

def make_itself(): return make_itself()

def make_lambda(): return lambda batch: net(batch)

def train_step(images, labels): ...

def main():
    train_step(None, None)

class Called:
    def __call__(self, batch):
        self.net(batch).sum().backward()


class Learner:
    def __init__(self, width=8): ...
    def train_step(self, batch): ...
    def epoch(self): ...
    @staticmethod
    def build(): return Net()

net = Net()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with all of them."""
    path = tmp_path / "train.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, CodeKind.MODEL) for name in ("Net", "NetWithStep", "Schedule", "build", "net", "missing")),
        *((name, CodeKind.STEP) for name in ("Gan", "Wgan", "Manual", "make_gan", "make_step")),
        *((name, kind) for name, kind in (("make_inside", CodeKind.STEP), ("make_itself", CodeKind.MODEL))),
        *((name, CodeKind.STEP) for name in ("make_lambda", "Learner.train_step")),
        *((name, CodeKind.MODEL) for name in ("Learner", "Learner.build", "Learner.epoch")),
        *((name, CodeKind.STEP) for name in ("dpo", "weighted", "annotated", "named")),
        *((name, CodeKind.LIGHTNING) for name in ("Lit", "lit")),
        *((name, CodeKind.TRANSFORMERS) for name in ("texts", "adapted")),
        *((name, CodeKind.STEP_FUNCTION) for name in ("train_step", "wide")),
    ],
)
def test_the_kind_shows_in_the_source(file: Path, name: str, kind: CodeKind) -> None:
    """Classes by their methods and bases, functions by what they need and return."""
    assert kind_of_code(f"{file}:{name}") is kind


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("from own.base import Base", "Base"),
        ("import own.base", "own.base.Base"),
        ("from own.base import Lit as Base", "Base"),
        ("from own import base", "base.Net"),
    ],
)
def test_a_base_class_of_another_file_shows_the_kind(tmp_path: Path, imports: str, base: str) -> None:
    """A class is a LightningModule if a class of the user's other files, which it inherits from, is one."""
    (tmp_path / "own").mkdir()
    code = "from own.train import Base\nimport lightning as L\nclass Lit(L.LightningModule): ...\n"
    (tmp_path / "own" / "base.py").write_text(code + "class Base(Lit): ...\nclass Net(Base): ...\n")
    (tmp_path / "own" / "train.py").write_text("from own.base import *\nclass Other: ...\n")
    code = f"{imports}\nclass Net({base}): ...\nclass Plain(nn.Module): ...\n"
    (tmp_path / "train.py").write_text(code)
    assert kind_of_code(f"{tmp_path / 'train.py'}:Net") is CodeKind.LIGHTNING
    assert kind_of_code(f"{tmp_path / 'train.py'}:Plain") is CodeKind.MODEL


def test_a_class_of_another_file_is_no_base_of_a_librarys(tmp_path: Path) -> None:
    """`nn.Module` is torch's, although a file that is imported has a class Module too."""
    (tmp_path / "utils.py").write_text("class Module:\n    def step(self, batch): ...\n")
    (tmp_path / "train.py").write_text("import utils\nfrom torch import nn\nclass Net(nn.Module): ...\n")
    assert kind_of_code(f"{tmp_path / 'train.py'}:Net") is CodeKind.MODEL


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("def make(): return Trainer(net)", CodeKind.STEP),
        ("def make(): return LlamaForCausalLM(config)", CodeKind.TRANSFORMERS),
        ("class Trainer: ...\ndef make(): return Trainer(net)", CodeKind.MODEL),
    ],
)
def test_all_names_of_a_library_may_be_imported(tmp_path: Path, code: str, kind: CodeKind) -> None:
    """A star import brings the library's Trainers and models, unless the file has a class of the name."""
    (tmp_path / "train.py").write_text(f"from transformers import *\n{code}\n")
    assert kind_of_code(f"{tmp_path / 'train.py'}:make") is kind


def test_a_function_with_all_its_arguments_makes_a_model(file: Path) -> None:
    """`--model-arg width=8` gives the argument that a step would lack."""
    assert kind_of_code(f"{file}:wide", ["width"]) is CodeKind.MODEL


def resolved(name: str, **options: object) -> Job:
    """Return the job of a name, without a catalogue."""
    return resolve_job(name, {}, inputs=[parse_tensor_spec("8")], **options)


def test_a_step_decides_the_loop(file: Path) -> None:
    """A job of a step needs no target, and refuses what the step decides; `--mode` names another loop."""
    assert resolved(f"{file}:Gan").loop.mode is Mode.STEP
    with pytest.raises(UsageError, match="--precision.*its own training step decides that"):
        resolved(f"{file}:Gan", precision="amp-bf16")
    with pytest.raises(UsageError, match="needs a target"):
        resolved(f"{file}:Gan", mode="train")
    assert resolved(f"{file}:NetWithStep", mode="step").loop.mode is Mode.STEP


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Learner", "if its train_step is the training step, name it: --model .*train.py:Learner.train_step"),
        ("Called", "if its __call__ is the training step, name it: --model .*train.py:Called.__call__"),
        ("Learner.train_stp", "Learner has no 'train_stp'; the nearest: train_step"),
        ("Nett", "the file has no 'Nett'; the nearest: Net"),
        ("main", "returns nothing.*planner run -- python train.py$"),
    ],
)
def test_what_the_source_shows_is_said_before_what_options_lack(file: Path, name: str, message: str) -> None:
    """A name that cannot be planned is no matter of a target."""
    with pytest.raises(UsageError, match=message):
        resolved(f"{file}:{name}")
    with pytest.raises(UsageError, match="missing.py:Net: there is no file '.*'; check the path"):
        resolved(str(file.with_name("missing.py:Net")))


@pytest.mark.parametrize("name", ["texts", "adapted"])
def test_a_model_of_transformers_is_given_its_labels(file: Path, name: str) -> None:
    """Without inputs or a target, the message says how its inputs and its own loss are given."""
    example = "--input input_ids=512:int64 --input labels=512:int64 --loss output"
    with pytest.raises(UsageError, match=f"its inputs are unknown; give one sample, such as {example}"):
        resolve_job(f"{file}:{name}", {})
    with pytest.raises(
        UsageError, match=f"needs a target; for the model's own loss, give its labels: {example}"
    ):
        resolved(f"{file}:{name}")


def test_a_lightning_module_brings_loss_and_optimizer(file: Path) -> None:
    """Inputs and target are its batch, and gradients are zeroed before the backward pass."""
    target = parse_tensor_spec("10")
    job = resolved(f"{file}:Lit", target=target)
    assert (job.loop.loss, job.loop.zero_grad) == (Loss.TRAINING_STEP, ZeroGrad.BEFORE_BACKWARD)
    assert list(map(str, job.samples.inputs)) == ["8", "10"]
    assert job.samples.target is None
    with pytest.raises(UsageError, match="--optimizer.*configure_optimizers of the model decides that"):
        resolved(f"{file}:Lit", optimizer="adamw")


@pytest.mark.parametrize(
    ("code", "is_set"),
    [
        ("torch.backends.cudnn.benchmark = True", True),
        ("from torch.backends import cudnn\ncudnn.benchmark = True", True),
        ("if torch.cuda.is_available():\n    cudnn.benchmark = True", True),
        ("cudnn.benchmark = True\ncudnn.benchmark = False", False),
        ("def main():\n    cudnn.benchmark = True", False),
        ("if __name__ == '__main__':\n    cudnn.benchmark = True", False),
        ("cudnn.benchmark = args.benchmark", False),
        ("cudnn.deterministic = True", False),
        ("cudnn.benchmark = True)", False),
    ],
)
def test_a_file_that_is_imported_sets_cudnn_benchmark(tmp_path: Path, code: str, is_set: bool) -> None:
    """The setting holds for a step of the file, as in training."""
    (tmp_path / "train.py").write_text(code)
    assert sets_cudnn_benchmark(f"{tmp_path / 'train.py'}:train_step") is is_set
