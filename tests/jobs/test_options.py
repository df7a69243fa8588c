"""The table of job options, and everything that follows from it."""

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from planner.api.request.options import JobOptions
from planner.errors import UsageError
from planner.jobs import (
    FIELD_OPTIONS,
    JOB_FIELDS,
    JOB_OPTIONS,
    FsdpArguments,
    Job,
    JobOption,
    OptionKind,
    TensorSpec,
    argument_texts,
    merge_job,
    parse_arguments,
    reset_options,
    resolve_job,
)
from planner.jobs.codec import job_from_json, job_to_json
from planner.jobs.conflicts import CONFLICTS, REQUIREMENTS, SETTINGS
from planner.jobs.files.catalogue import load_catalogue
from planner.jobs.files.yaml_fields import ANY_SOURCE
from planner.report.describe import describe_job

BASE = Job.create("torchvision:resnet18", inputs=(TensorSpec((3, 8, 8)),), target=TensorSpec((), "int64"))
# Fields of tensors, names and arguments
OTHERS = {"model", "source", "model_args", "inputs", "target", "targets", "optimizer_args"}
TEXTS = {
    "loss": "mse",
    "optimizer": "torch.optim.NAdam",
    "cudnn": "installed",
    "cublas_workspace_config": ":16:8",
    "torch": "2.6",
    "peft": "lora",
    "sizes": "lengths.txt",
    "deepspeed": '{"zero_optimization": {"stage": 2}}',
}
TYPES = {
    OptionKind.FLAG: bool | None,
    OptionKind.COUNT: int | None,
    OptionKind.CHOICE: str | None,
    OptionKind.TEXT: str | None,
}


def value_of(option: JobOption) -> Any:
    """A value that is not the default."""
    match option.kind:
        case OptionKind.FLAG:
            return True
        case OptionKind.COUNT:
            return option.maximum
        case OptionKind.PATTERNS:
            if option.name == "eval_input":
                return ["3x64x64"]
            return ["*.weight"]
        case OptionKind.ARGUMENTS:
            return ["replicas=2" if option.name == "fsdp_arg" else "r=16"]
        case OptionKind.CHOICE:
            return str(list(option.choices or ())[-1])
    return TEXTS[option.name]


# Options without which others are refused.
NEEDED = {
    **{"new_tokens": "  mode: generate\n", "deepspeed": "  world_size: 2\n", "fsdp_arg": "  fsdp: 4\n"},
    **{"world_size": f"  deepspeed: '{TEXTS['deepspeed']}'\n", "rank": "  fsdp: 65536\n  tp: 2\n"},
    **{
        "peft_arg": "  peft: lora\n",
        "quantize_arg": "  quantize: nf4\n",
        "prepare_kbit": "  quantize: nf4\n",
    },
}
each_option = pytest.mark.parametrize("option", FIELD_OPTIONS.values(), ids=FIELD_OPTIONS)


def test_every_field_of_a_job_is_an_option() -> None:
    """Beside the model and its tensors, the fields of `Job` and the options of the table are the same."""
    assert set(JOB_FIELDS) - OTHERS == set(FIELD_OPTIONS)


def test_every_option_is_a_keyword_in_python() -> None:
    """The keywords of the functions are the options of the table, each with the type of its kind."""
    hints = get_type_hints(JobOptions)
    assert list(hints) == [option.name for option in JOB_OPTIONS]
    hints["optimizer"] = str | None  # whose class may stand for its name
    assert all(hints[name] == TYPES[one.kind] for name, one in FIELD_OPTIONS.items() if one.kind in TYPES)


@each_option
def test_every_option_is_a_key_of_yaml(option: JobOption, tmp_path: Path) -> None:
    """A catalogue's entry takes each option by its name, with what Python and the command line take."""
    value = value_of(option)
    text = f"[{value[0]!r}]" if isinstance(value, list) else repr(value).replace("True", "true")
    entry = "net:\n  about: A test.\n  source: torchvision:resnet18\n  target: scalar:int64\n"
    more = NEEDED.get(option.name, "")
    more += "  new_tokens: 1\n" if value == "generate" else "  target: '10'\n" if value == "mse" else ""
    entry = entry.replace("  target: scalar:int64\n", "") if "target" in more else entry
    file = tmp_path / "models.yaml"
    file.write_text(f"{entry}{more}  {option.name}: {text}\n")
    job = load_catalogue(file, ANY_SOURCE)["net"].job
    assert job.value(option.name) == merge_job(BASE, {option.name: value}).value(option.name)


@each_option
def test_every_option_is_a_key_of_json(option: JobOption) -> None:
    """A job with an option is the same after JSON, and a job without its key has the default."""
    job = merge_job(BASE, {option.name: value_of(option)})
    assert job.value(option.name) != BASE.value(option.name)
    parts = job_to_json(job)
    assert job_from_json(parts) == job


@pytest.mark.parametrize(
    "value",
    [
        *("q_proj", "true", "no", "1", "", "a b", "[x", "#", "été", "a: b", "0x1f", "~"),
        *(True, None, 0, -3, 1e-05, -0.5, float("inf"), float("-inf")),
        *((), (1, 2), ("q_proj", "v, proj", "3"), ((1, "x"), (True,))),
    ],
)
def test_arguments_are_read_from_their_texts(value: object) -> None:
    """A text that looks like a number, a word of YAML or a list is still that text."""
    arguments = (("value", value),)
    assert parse_arguments(argument_texts(arguments), "--peft-arg") == arguments


def test_arguments_are_texts_or_keys_with_values(tmp_path: Path) -> None:
    """In YAML as in Python; truth is spelled as YAML spells it."""
    file = tmp_path / "models.yaml"
    ways = ("[offload=true, replicas=2]", "[offload=True, replicas=2]", "{offload: true, replicas: 2}")
    entry = "  about: A test.\n  source: torchvision:resnet18\n  target: scalar:int64\n  fsdp: 4\n"
    file.write_text("".join(f"net{n}:\n{entry}  fsdp_arg: {way}\n" for n, way in enumerate(ways)))
    catalogue = load_catalogue(file, ANY_SOURCE)
    jobs = [catalogue[f"net{n}"].job for n in range(3)]
    assert {job.sharding.fsdp_arg for job in jobs} == {FsdpArguments(offload=True, replicas=2)}
    given = merge_job(BASE, {"fsdp": 4, "fsdp_arg": {"offload": True, "replicas": 2}})
    assert given.sharding.fsdp_arg == jobs[0].sharding.fsdp_arg
    assert describe_job(given).count("FSDP over 4 ranks (replicas=2, offload=true)") == 1


def test_infinite_arguments_are_json() -> None:
    """Infinite arguments come back from a format that has no infinite numbers."""
    job = merge_job(BASE, {"model_args": (("low", float("-inf")), ("range", (0.5, float("inf"))))})
    text = json.dumps(job_to_json(job), allow_nan=False)
    assert job_from_json(json.loads(text)) == job


def test_reset_options() -> None:
    """Options can be set back to their defaults by the table's rows."""
    job = merge_job(BASE, {"ema": True, "accumulate": 4, "optimizer": "adam"})
    assert reset_options(job, where=lambda option: option.is_for_training) == merge_job(
        BASE, {"optimizer": "adam"}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp": 1}, "--fsdp 1: a model is sharded over two ranks or more"),
        ({"fsdp": 2, "ddp": True}, "--fsdp 2 with --ddp is not planned"),
        ({"tp": 2, "precision": "amp-fp16"}, "--tp 2 with --precision amp-fp16 is not planned"),
        ({"tp": 2, "freeze": ["*"]}, "--tp 2 with --freeze or --train-only is not planned"),
        ({"fsdp": 2, "compile": "default"}, "--fsdp 2 with --compile default is not planned"),
        (
            {"fsdp": 2, "mode": "infer"},
            "--fsdp 2 with --mode infer is not planned: a model is sharded in",
        ),
        (
            {"fsdp": 2, "torch": "2.12"},
            "--fsdp 2 with --torch 2.12 is not planned: a rank is planned as in",
        ),
        ({"fsdp": 4, "rank": 4}, "--rank 4: of 4 ranks give one from 0 to 3"),
        ({"fsdp": 4, "fsdp_arg": "replicas=3"}, "4 ranks do not divide into so many groups"),
        ({"fsdp": 4, "fsdp_arg": "replicas=4"}, "of 4 ranks each would hold all; use --ddp"),
        ({"tp": 1}, "--tp 1: a model is sharded over two ranks or more"),
        ({"fsdp": 2, "tp": 2, "ema": True}, "--fsdp 2 --tp 2 with --ema is not planned"),
    ],
)
def test_what_is_not_planned_with_fsdp_is_refused(options: dict[str, Any], words: str) -> None:
    """One line names the option and what to do."""
    with pytest.raises(UsageError, match=re.escape(words)):
        resolve_job("torchvision:resnet18", {}, **{"inputs": [TensorSpec((3, 64, 64))], **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"quantize": "int8-weight-only", "prepare_kbit": True},
            "--prepare-kbit with --quantize int8-weight-only fails: it prepares weights of bitsandbytes",
        ),
        (
            {"quantize": "int4-weight-only"},
            "--quantize int4-weight-only with --mode train fails in torchao: its products have no gradients",
        ),
        ({"mode": "step", "peft": "lora"}, "a step of your own with --peft is not planned: the file makes"),
        (
            {"mode": "infer", "ema": True},
            "--ema with --mode infer has no effect, since nothing is trained; remo",
        ),
        (
            {"mode": "forward", "accumulate": 2},
            "--accumulate with --mode forward has no effect, since nothing",
        ),
    ],
)
def test_changes_that_no_model_takes_are_refused(options: dict[str, Any], words: str) -> None:
    """They are refused by the options alone, before a model is built."""
    with pytest.raises(UsageError, match=re.escape(words)):
        resolve_job("torchvision:resnet18", {}, **{"inputs": [TensorSpec((3, 64, 64))], **options})


def test_refused_combinations_are_documented() -> None:
    """docs/limits.md has a row for each, with the reason and the remedy of its message."""
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    ends = [f"{one.reason}; {one.remedy}" for one in CONFLICTS] + [one.remedy for one in REQUIREMENTS]
    assert [row.rsplit(" | ", 1)[1].removesuffix(" |") for row in rows] == ends


def test_refused_combinations_name_settings() -> None:
    """Each name in the tables is a setting of a job, and each setting is in a table."""
    named = {name for one in CONFLICTS for name in (one.option, *one.others)}
    named |= {name for one in REQUIREMENTS for name in (*one.options, one.needed)}
    assert named == set(SETTINGS)


@pytest.mark.parametrize("version", ["2.12", ""])
def test_adagrad_is_fused_on_cuda_since_torch_2_12(version: str) -> None:
    """Before, torch refuses it when the optimizer first steps."""
    fused = {"optimizer": "adagrad", "optimizer_impl": "fused"}
    assert resolve_job("torchvision:resnet18", {}, **fused, torch=version).loop.optimizer_impl == "fused"
    with pytest.raises(UsageError, match="with --torch 2.11 fails in torch: before 2.12 Adagrad"):
        resolve_job("torchvision:resnet18", {}, **fused, torch="2.11")


def test_inference_of_a_recipe_of_training_has_no_options_of_training() -> None:
    """A job of the catalogue that trains may be planned for inference, whose job names no loss scaling."""
    catalogue = load_catalogue()
    job = resolve_job("vit_b_16", catalogue, mode="infer", precision="amp-fp16").loop
    assert (job.grad_scaler, job.ema, job.accumulate) == (False, False, 1)
