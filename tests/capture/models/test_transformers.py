"""Models of transformers are built from configurations alone, and are called as their users call them."""

import json
import re
import socket
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.capture.models.registry import build_model, complete_by_library
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Loss, parse_model_arg, parse_tensor_spec, resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.programs import complete_from_library
from planner.program.events import Alloc, Trace
from planner.program.extrapolation.fit import fit_traces

AMPERE = (8, 6)
TINY_BERT = (
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_attention_heads=2",
    "intermediate_size=64",
    "vocab_size=99",
)
TINY_LLAMA = (*TINY_BERT, "num_key_value_heads=1")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail any access to the network."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was reached for")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def hf_job(name: str, *args: str, inputs: tuple[str, ...] = (), **options: str) -> Job:
    """The whole job of `hf:NAME` with these --model-arg and --input."""
    given = [parse_tensor_spec(text) for text in inputs]
    arguments = [parse_model_arg(text) for text in args]
    job = resolve_job(f"hf:{name}", {}, model_args=arguments, inputs=given, **options)  # type: ignore[arg-type]
    return complete_from_library(job)


def inputs_of(job: Job) -> list[str]:
    """The inputs as --input spells them."""
    return [str(spec) for spec in job.samples.inputs]


def births(taken: Trace) -> Iterator[tuple[str, int]]:
    """Operator and size of each block."""
    for event in taken.events:
        if isinstance(event, Alloc):
            yield taken.sites[event.site].op, event.size_bytes


@pytest.mark.parametrize(
    ("name", "args", "inputs"),
    [
        ("bert", (), ["input_ids=128:int64", "attention_mask=128:int64", "labels=128:int64"]),
        ("gpt2", (), ["input_ids=128:int64", "attention_mask=128:int64", "labels=128:int64"]),
        ("t5", (), ["input_ids=128:int64", "attention_mask=128:int64", "labels=128:int64"]),
        ("LlamaForCausalLM", (), ["input_ids=128:int64", "attention_mask=128:int64", "labels=128:int64"]),
        (
            "bert",
            ("task=sequence-classification",),
            ["input_ids=128:int64", "attention_mask=128:int64", "labels=scalar:int64"],
        ),
        (
            "BertForQuestionAnswering",
            (),
            [
                "input_ids=128:int64",
                "attention_mask=128:int64",
                "start_positions=scalar:int64",
                "end_positions=scalar:int64",
            ],
        ),
        (
            "BertForMultipleChoice",
            (),
            ["input_ids=4x128:int64", "attention_mask=4x128:int64", "labels=scalar:int64"],
        ),
        ("vit", (), ["pixel_values=3x224x224", "labels=scalar:int64"]),
        ("swin", ("image_size=256",), ["pixel_values=3x256x256", "labels=scalar:int64"]),
        ("segformer", ("task=semantic-segmentation",), ["pixel_values=3x224x224", "labels=224x224:int64"]),
        ("wav2vec2", (), ["input_values=160000", "labels=scalar:int64"]),
        ("whisper", (), ["input_features=80x3000", "labels=128:int64"]),
        ("clip", (), ["input_ids=77:int64", "pixel_values=3x224x224", "attention_mask=77:int64"]),
    ],
)
def test_inputs_follow_from_the_class(name: str, args: tuple[str, ...], inputs: list[str]) -> None:
    """A model is called with the main input, mask and labels that its class takes, and returns its loss."""
    job = hf_job(name, *args)
    assert (inputs_of(job), job.loop.loss, job.samples.target) == (inputs, Loss.OUTPUT, None)


@pytest.mark.parametrize("given", ["512:int64", "input_ids=512:int64"])
def test_everything_follows_the_length_of_the_text(given: str) -> None:
    """With or without its keyword, the given text decides the length of mask and labels."""
    job = hf_job("gpt2", inputs=(given,))
    assert inputs_of(job) == ["input_ids=512:int64", "attention_mask=512:int64", "labels=512:int64"]


def test_inputs_given_by_keyword_count() -> None:
    """An encoder's and a decoder's lengths may differ, and a completed job stays as it is."""
    job = hf_job("t5", inputs=("512:int64", "labels=64:int64"))
    assert inputs_of(job) == ["input_ids=512:int64", "labels=64:int64", "attention_mask=512:int64"]
    assert complete_by_library(job) == job


def test_inference_has_no_labels() -> None:
    """Without training there are no labels, and an encoder-decoder gets its decoder's tokens."""
    assert inputs_of(hf_job("bert", mode="infer")) == ["input_ids=128:int64", "attention_mask=128:int64"]
    assert inputs_of(hf_job("t5", inputs=("labels=9:int64",), mode="infer")) == [
        "input_ids=128:int64",
        "attention_mask=128:int64",
        "decoder_input_ids=128:int64",
    ]


def test_a_class_without_a_loss_is_summed() -> None:
    """A model without a loss is trained on the sum of what it returns."""
    job = hf_job("BertModel")
    assert (inputs_of(job), job.loop.loss) == (["input_ids=128:int64", "attention_mask=128:int64"], Loss.SUM)


@pytest.mark.parametrize(
    ("name", "args", "inputs", "problem"),
    [
        ("berd", (), (), "transformers has no model type or class 'berd'; the nearest: bert, ibert, hubert"),
        (
            "google/bert",
            (),
            (),
            "model 'hf:google/bert': there is no such folder, and nothing is fetched from a hub; "
            "save its config.json into a folder and name that as hf:FOLDER",
        ),
        (
            "bert",
            ("hiden_size=3",),
            (),
            "--model-arg hiden_size: BertConfig has no such value; the nearest: hidden_size, hidden_act",
        ),
        ("bert", ("padded=3",), (), "--model-arg padded: expected true or false"),
        (
            "vit",
            ("task=ctc",),
            (),
            "hf:vit: transformers has no class for ctc; it has image-classification, features",
        ),
        ("bert", (), ("3x8x8",), "--input 3x8x8: BertForMaskedLM needs input_ids; write 128:int64"),
        (
            "bert",
            (),
            ("label=8:int64",),
            "--input label=8:int64: BertForMaskedLM takes no 'label'; the nearest: labels",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, args: tuple[str, ...], inputs: tuple[str, ...], problem: str
) -> None:
    """Unknown names, arguments and inputs are refused in one line that states what to write."""
    with pytest.raises(UsageError) as error:
        hf_job(name, *args, inputs=inputs)
    assert str(error.value) == problem


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert_base", 109_483_778),  # google-bert/bert-base-uncased with two labels
        ("gpt2", 124_439_808),  # openai-community/gpt2
        ("llama_8b", 8_030_261_248),  # meta-llama/Meta-Llama-3-8B
        ("llama_70b", 70_553_706_496),  # meta-llama/Meta-Llama-3-70B
    ],
)
def test_catalogue_models_have_the_published_sizes(name: str, parameters: int) -> None:
    """A catalogue entry has as many parameters as the model it is named after, none of them with memory."""
    model = build_model(resolve_job(name, load_catalogue()))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_folder_is_what_its_config_says(tmp_path: Path) -> None:
    """A folder with config.json gives its architecture; arguments go over the file, `a__b` into its parts."""
    text = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    config = {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": text, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(hf_job(str(tmp_path), "text_config__num_hidden_layers=3", "projection_dim=7"))
    assert type(model).__name__ == "CLIPModel"
    assert model.text_projection.weight.shape == (7, 64)
    assert (len(model.text_model.encoder.layers), model.dtype) == (3, torch.float32)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "config.json: cannot be read: Expecting property name"),
        ("[]", "config.json: is no JSON object; mend the file"),
        ('{"model_type": "mine"}', "config.json: model_type 'mine' is none that transformers "),
        ('{"model_type": "bert", "architectures": ["Mine"]}', "has no class 'Mine', which config.json names"),
    ],
)
def test_broken_config_is_named(tmp_path: Path, text: str, problem: str) -> None:
    """A config.json that cannot be used is an error that names it and what is wrong."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as error:
        hf_job(str(tmp_path))
    assert problem in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (
            ("hf:bert", "hidden_size=wide"),
            "hf:bert: .*hidden_size.*; check --model-arg, or see the traceback",
        ),
        (("timm:resnet10t", "img_size=[1,2,3]"), "timm:resnet10t: .*too many values.*; check --model-arg"),
    ],
)
def test_arguments_that_a_library_refuses_are_named(job: tuple[str, str], problem: str) -> None:
    """In one line, whatever the library raises before the model is built."""
    model, text = job
    with pytest.raises(ModelError, match=problem):
        complete_from_library(resolve_job(model, {}, model_args=[parse_model_arg(text)]))  # type: ignore[arg-type]


def test_padding_decides_whether_there_is_a_mask() -> None:
    """A padded batch attends under a mask of batch x 1 x rows x columns booleans, a full one under none."""
    padded, full = (
        record(hf_job("bert", *TINY_BERT, f"padded={padded}", inputs=("16:int64",)), 2, AMPERE)
        for padded in ("true", "false")
    )
    mask = ("aten.bitwise_and.Tensor", 2 * 16 * 16)
    assert mask in births(padded) and mask not in births(full)
    assert padded.notes[0].startswith("batches are assumed to be padded")
    assert full.notes[0].startswith("batches are assumed to have no padding")


def test_a_model_without_a_mask_makes_none_in_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of transformers ask whether code is traced where there is no mask to read."""
    masks = import_module("transformers.masking_utils")

    def decide(mask: Any, length: int, local: int | None = None) -> bool:
        return not masks.is_tracing(mask) and mask is None

    monkeypatch.setattr(masks, "_ignore_bidirectional_mask_sdpa", decide)
    sizes = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32")
    trace = record(hf_job("vit", *sizes, "image_size=32"), 2, AMPERE)
    assert not any("where" in op or "arange" in op for op, _ in births(trace))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gpt2", ("n_embd=16", "n_layer=1", "n_head=2", "n_positions=16")),
        ("opt", ("hidden_size=16", "word_embed_proj_dim=16", "num_hidden_layers=1", "ffn_dim=32")),
    ],
)
def test_more_tokens_than_a_table_of_positions_has_are_refused(name: str, args: tuple[str, ...]) -> None:
    """No position is looked up on meta; on a GPU a table that is too short is an error."""
    if name == "opt":
        args = (*args, "num_attention_heads=2", "max_position_embeddings=16", "pad_token_id=1")
    job = hf_job(name, *args, "vocab_size=99", inputs=("16:int64",))
    record(job, 2, AMPERE)
    message = (
        f"hf:{name}: .* has 16 positions, and its input is 17 long; give at most 16, or --model-arg "
        "max_position_embeddings=17"
    )
    with pytest.raises(ModelError, match=message):
        record(hf_job(name, *args, "vocab_size=99", inputs=("17:int64",)), 2, AMPERE)


def test_more_tokens_than_positions_are_noted() -> None:
    """A model that computes its positions may go beyond those of its configuration."""
    sizes = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32")
    args = (*sizes, "num_key_value_heads=2", "vocab_size=99", "max_position_embeddings=16")
    fits, exceeds = (record(hf_job("llama", *args, inputs=(f"{n}:int64",)), 2, AMPERE) for n in (16, 17))
    note = (
        "17 tokens are more than the 16 positions of the configuration: a model that looks its positions up "
        "in a table fails; --model-arg max_position_embeddings=17"
    )
    assert note in exceeds.notes
    assert not any("positions" in note for note in fits.notes)


def test_full_causal_batch_runs_the_flash_kernel() -> None:
    """In bfloat16 and without padding a causal model attends by the flash kernel, which takes no mask."""
    job = hf_job("llama", *TINY_LLAMA, "padded=false", inputs=("16:int64",), precision="bf16")
    ops = {op for op, _ in births(record(job, 2, AMPERE))}
    assert any("flash_attention" in op for op in ops)
    assert not any("efficient_attention" in op for op in ops)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("bert", TINY_BERT),
        ("llama", TINY_LLAMA),
        ("t5", ("d_model=16", "d_ff=16", "d_kv=8", "num_heads=2", "num_layers=2", "vocab_size=99")),
        ("gpt2", ("n_embd=16", "n_layer=2", "n_head=2", "vocab_size=99")),
        ("vit", ("hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "image_size=32")),
        (
            "whisper",
            ("d_model=24", "encoder_layers=1", "decoder_layers=1", "vocab_size=99", "pad_token_id=0"),
        ),
    ],
)
def test_models_of_each_kind_are_planned_for_any_batch(name: str, args: tuple[str, ...], mode: str) -> None:
    """Text, vision and sound models trace, and two batch sizes give one line for all."""
    job = hf_job(name, *args, mode=mode)
    assert fit_traces(record(job, 2, AMPERE), record(job, 3, AMPERE)).events


def test_model_that_reads_its_input_says_where() -> None:
    """If the model itself reads values of its input, the answer names the line that does."""
    sizes = ("d_model=16", "encoder_layers=1", "decoder_layers=1", "vocab_size=99", "attention_window=[8]")
    heads = ("encoder_attention_heads=2", "decoder_attention_heads=2")
    taken = record(hf_job("led", *sizes, *heads, inputs=("16:int64",)), 2, AMPERE)
    assert re.search(r"modeling_led.py:\d+: is_global_attn = .*, which reads values", taken.notes[-1])


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the error states which extra brings it."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'gpu-batch-planner\[hf\]'"):
        hf_job("bert")
