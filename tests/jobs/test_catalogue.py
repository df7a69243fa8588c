"""models.yaml: what it holds, and how a broken one is reported."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.capture.models.registry import build_model
from planner.errors import DataFileError
from planner.jobs import CatalogueEntry, Job, Loss, Mode, Optimizer, Precision, TensorSpec
from planner.jobs.files.catalogue import load_catalogue

IMAGE = TensorSpec((3, 224, 224))
ENTRY = "a:\n  about: T.\n  source: zoo:X\n"
UNETR_ARGS = (
    *(("in_channels", 1), ("out_channels", 2), ("img_size", (64, 64, 64)), ("feature_size", 16)),
    *(("hidden_size", 768), ("mlp_dim", 3072), ("num_heads", 12), ("proj_type", "perceptron")),
    *(("norm_name", "instance"), ("res_block", True), ("dropout_rate", 0.0)),
)
SMP_ARGS = (
    *(("encoder_name", "resnet18"), ("encoder_weights", None), ("in_channels", 1), ("classes", 1)),
    ("activation", None),
)


def classifier(name: str, source: str, *args: tuple[str, object]) -> Job:
    """A job of the notebook: images to 10 classes with soft targets."""
    return Job.create(name, model_args=args, inputs=(IMAGE,), target=TensorSpec((10,)), source=source)


def forward_only(name: str, source: str, *args: tuple[str, object]) -> Job:
    """A job of the forum thread: one forward pass with gradients recorded."""
    gray = (TensorSpec((1, 256, 256)),)
    return Job.create(
        name, model_args=args, inputs=gray, loss=Loss.SUM, mode=Mode.FORWARD, steps=1, source=source
    )


def summed(name: str, source: str, *shape: int) -> Job:
    """A job whose document names no loss."""
    return Job.create(name, inputs=(TensorSpec(shape),), loss=Loss.SUM, source=source)


TENSOR = Job.create(
    "tensor_1gib",
    inputs=(TensorSpec((2**28,)),),
    loss=Loss.SUM,
    mode=Mode.INFER,
    steps=1,
    source="zoo:Identity",
)
UNETR = Job.create(
    "unetr",
    model_args=UNETR_ARGS,
    inputs=(TensorSpec((1, 64, 64, 64)),),
    target=TensorSpec((2, 64, 64, 64)),
    cublas_workspace_config=":4096:8",
    source="monai:UNETR",
)


def test_catalogue_holds_the_seeds_workloads() -> None:
    """The catalogue has each seed's workload in its configuration and with its batch size."""
    seeds = {
        name: entry
        for name, entry in load_catalogue().items()
        if not entry.job.model.source.startswith(("hf:", "diffusers:"))
    }
    entries = {name: (entry.job, entry.batch) for name, entry in seeds.items()}
    cnn_args = (("channels", 3), ("height", 224), ("width", 224))
    assert entries == {
        "tensor_1gib": (TENSOR, 1),
        "cnn": (classifier("cnn", "zoo:CNN", *cnn_args), 128),
        "vgg16_bn": (classifier("vgg16_bn", "torchvision:vgg16_bn", ("num_classes", 10)), 128),
        "resnet50": (classifier("resnet50", "torchvision:resnet50", ("num_classes", 10)), 128),
        "vit_b_16": (classifier("vit_b_16", "torchvision:vit_b_16", ("num_classes", 10)), 128),
        "unetr": (UNETR, 8),
        "basic_unet": (
            forward_only("basic_unet", "zoo:BasicUNet", ("in_channels", 1), ("out_channels", 1)),
            4,
        ),
        "basic_encoder": (forward_only("basic_encoder", "zoo:BasicEncoder", ("in_channels", 1)), 4),
        "smp_unet_resnet18": (forward_only("smp_unet_resnet18", "smp:Unet", *SMP_ARGS), 4),
        "davenet_audio": (summed("davenet_audio", "zoo:Davenet", 40, 1024), 128),
        "davenet_image": (summed("davenet_image", "zoo:DavenetImage", 3, 224, 224), 128),
        "conv_pair": (summed("conv_pair", "zoo:ConvPair", 1, 32, 32), 1),
    }


def language_model(name: str, source: str, tokens: int, *args: tuple[str, object], **options: Any) -> Job:
    """A job whose further inputs transformers declares, with AdamW and the model's own loss."""
    text = (TensorSpec((tokens,), "int64"),)
    return Job.create(
        name,
        model_args=args,
        inputs=text,
        loss=Loss.OUTPUT,
        optimizer=Optimizer.ADAMW,
        source=source,
        **options,
    )


def llama(name: str, hidden: int, layers: int, heads: int, intermediate: int) -> Job:
    """A Llama in pure bfloat16."""
    args = (
        *(("hidden_size", hidden), ("num_hidden_layers", layers), ("num_attention_heads", heads)),
        *(("num_key_value_heads", 8), ("intermediate_size", intermediate), ("vocab_size", 128256)),
        ("max_position_embeddings", 8192),
    )
    return language_model(name, "hf:llama", 2048, *args, precision=Precision.BF16)


def test_catalogue_holds_language_models() -> None:
    """The catalogue has BERT, GPT-2 and three Llamas of the sizes that their papers print."""
    entries = {
        name: entry for name, entry in load_catalogue().items() if entry.job.model.source.startswith("hf:")
    }
    assert {name: (entry.job, entry.batch) for name, entry in entries.items()} == {
        "bert_base": (language_model("bert_base", "hf:bert", 128, ("task", "sequence-classification")), 32),
        "gpt2": (language_model("gpt2", "hf:gpt2", 1024), 8),
        "llama_8b": (llama("llama_8b", 4096, 32, 32, 14336), 1),
        "llama_70b": (llama("llama_70b", 8192, 80, 64, 28672), 1),
        "llama_405b": (llama("llama_405b", 16384, 126, 128, 53248), 1),
    }


@pytest.mark.slow
def test_catalogue_holds_diffusion_models() -> None:
    """The diffusion models of the catalogue have the published millions of parameters."""
    published = {
        "sd15_unet": 860,
        "sdxl_unet": 2567,
        "sd3_medium": 2028,
        "flux_dev": 11_901,
        "pixart_alpha": 611,
        "sd_vae": 84,
    }
    entries = {name: entry for name, entry in load_catalogue().items() if name in published}
    models = {name: build_model(entry.job) for name, entry in entries.items()}
    assert {
        name: round(sum(one.numel() for one in model.parameters()) / 1e6) for name, model in models.items()
    } == published


def test_every_entry_names_its_origin() -> None:
    """Each entry says in one sentence what it is and where it comes from."""
    abouts = [entry.about for entry in load_catalogue().values()]
    assert [about for about in abouts if not re.fullmatch(r"[A-Z].*; the .+\.", about)] == []


def test_smallest_entry_takes_the_defaults_of_its_source(tmp_path: Path) -> None:
    """An entry of source and sentence alone has the source's sample and batch size 1."""
    file = tmp_path / "mine.yaml"
    file.write_text("r: {source: 'torchvision:resnet18', about: Mine.}\n")
    job = Job.create("r", inputs=(IMAGE,), target=TensorSpec((), "int64"), source="torchvision:resnet18")
    assert load_catalogue(file) == {"r": CatalogueEntry(job, 1, "Mine.")}


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("a:\n  source: [x\n", "line 3", "YAML"),
        ("- a\n", "line 1", "expected keys with values"),
        ("", "line 1", "the file is empty"),
        ("a: 5\n", "line 1, a", "expected keys with values"),
        ("a: {source: zoo:CNN, about: T.}\na: 1\n", "line 2, a", "once"),
        ("a:\n  source: zoo:X\n  source: zoo:X\n", "line 3, a.source", "once"),
        ("a:\n  source: zoo:X\n  about: T.\n  optimiser: x\n", "line 4, a.optimiser", "unknown key"),
        ("a:\n  source: zoo:X\n", "line 1, a", "missing about"),
        ("a:b: {}\n", "line 1, a:b", "a name that --model could take for a source or a file"),
        ("a:\n  about: T.\n  source: keras:X\n", "line 3, a.source", "unknown source 'keras'"),
        (
            "a:\n  about: T.\n  source: X\n",
            "line 3, a.source",
            "expected SOURCE:NAME or FILE.py:NAME, got 'X'",
        ),
        (f"{ENTRY}  inputs: 3x4\n", "line 4, a.inputs", "expected a list, got '3x4'"),
        (f"{ENTRY}  inputs:\n  - 3x4\n  - 3x0\n", "line 6, a.inputs[1]", "tensor '3x0': a size is 0"),
        (f"{ENTRY}  target: [1]\n", "line 4, a.target[0]", "of several targets, each needs a name"),
        (f"{ENTRY}  loss: l2\n", "line 4, a.loss", "one of cross_entropy, mse, "),
        (f"{ENTRY}  steps: 1.5\n", "line 4, a.steps", "expected a whole number, got 1.5"),
        (f"{ENTRY}  steps: 0\n", "line 4, a.steps", "expected a number from 1 to 100"),
        (f"{ENTRY}  args: {{b: {{c: 1}}}}\n", "line 4, a.args.b", "expected a scalar or a list"),
        (f"{ENTRY}  args: {{b-c: 1}}\n", "line 4, a.args.b-c", "expected the name of an argument"),
        (f"{ENTRY}  args: {{b: 2024-01-01}}\n", "line 4, a.args.b", "expected a number, a string, "),
        (f"{ENTRY}  args: {{b: &l [*l]}}\n", "line 4, a.args.b", "the list contains itself"),
        (f"{ENTRY}  inputs: [3x4]\n", "line 1, a", "loss cross_entropy needs a target"),
        (ENTRY, "line 1, a", "missing inputs, for which its source has no default"),
    ],
)
def test_broken_catalogue_names_line_and_key(tmp_path: Path, text: str, place: str, problem: str) -> None:
    """A broken catalogue is reported in one line: the file, the line, the key and the problem."""
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(DataFileError) as error:
        load_catalogue(file)
    message = str(error.value)
    assert message.startswith(f"{file} {place}: ")
    assert problem in message
    assert "\n" not in message


def test_missing_catalogue_is_a_broken_data_file(tmp_path: Path) -> None:
    """A catalogue that is not there is reported with its path."""
    with pytest.raises(DataFileError, match=re.escape(str(tmp_path / "none.yaml"))):
        load_catalogue(tmp_path / "none.yaml")


def test_job_and_catalogue_need_neither_torch_nor_numpy() -> None:
    """Reading the catalogue and completing a job import neither torch, NumPy nor pydantic."""
    code = (
        "import sys\n"
        "from planner.jobs.files.catalogue import load_catalogue\n"
        "from planner.jobs import resolve_job\n"
        "resolve_job('resnet50', load_catalogue())\n"
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
