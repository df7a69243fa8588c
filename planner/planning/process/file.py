"""Read process files: YAML files that list the steps of a program on the GPU.

    torch: 2.0.1                            # the version whose allocator is simulated; default: the newest
    cublas_workspace_config: ":4096:8"      # CUBLAS_WORKSPACE_CONFIG, for all models; by default the setting
                                            # of the first model whose library has one
    models:                                 # built on the CPU; the name of a variable, and a job:
      net: resnet50                         #   a name of the catalogue, SOURCE:NAME or FILE.py:NAME
    steps:
      - heading: Training                   # begins a section of the output
      - reset_peak                          # torch.cuda.reset_peak_memory_stats()
      - define: var=268435456               # a tensor on the GPU: NAME=SHAPE[:DTYPE], the whole of it
      - print: Defined                      # the figures, behind this label
      - delete: [var]                       # del, of tensors and of models
      - empty_cache                         # torch.cuda.empty_cache()
      - summary: {model: net, batch: 128}   # torchinfo's; moves the model to the GPU
      - place: net                          # net.to("cuda")
      - train: {model: net, batch: 128, steps_per_epoch: 4, epochs: 3, print: Train}
      - leave                               # the function that trained returns

`torch`, `cublas_workspace_config` and `models` are optional. So are the `print` of `train`, the label of the
figures that are read after each epoch, and a `batch` that the catalogue knows. docs/notebook.md describes the
effect of each step on the memory.
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from planner._support.strict_yaml import Entry, read_entry
from planner.errors import UsageError
from planner.jobs import (
    SOURCES,
    CatalogueEntry,
    is_argument_name,
    parse_entry,
    parse_tensor_spec,
    read_count,
    read_model,
    shown,
)
from planner.planning.process.model import (
    Define,
    Delete,
    EmptyCache,
    Heading,
    Leave,
    Model,
    Place,
    Print,
    Process,
    ResetPeak,
    Step,
    Summary,
    Train,
    find_invalid_step,
)
from planner.program import format_torch_version, parse_workspace_config, torch_version_of

SHIPPED_FOLDER = Path(__file__).with_name("bundled")
MAX_BATCH = 2**31
MAX_STEPS = 10_000  # steps of one loop; their replay takes about a minute

# The batch size at which weights are traced if the catalogue has none; batch norm refuses 1.
_ANY_BATCH = 2


class ProcessFile(Struct, frozen=True):
    """A process, and the version of torch that runs it. The version is "" for the newest known version."""

    process: Process
    torch: str


def find_process_file(name: str) -> Path:
    """Return the path of the shipped process `name`, or `Path(name)` if there is none.

    Raises UsageError if `name` has no suffix and is neither a shipped process nor a file.
    """
    if name in shipped_processes():
        return SHIPPED_FOLDER / f"{name}.yaml"
    path = Path(name)
    if not path.suffix and not path.exists():
        names = ", ".join(shipped_processes())
        raise UsageError(
            f"process {shown(name)}: neither a file nor one that comes with the planner: {names}"
        )
    return path


def shipped_processes() -> tuple[str, ...]:
    """Return the names of the processes that come with the planner."""
    return tuple(sorted(path.stem for path in SHIPPED_FOLDER.glob("*.yaml")))


def read_process(
    path: Path, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str] = SOURCES
) -> ProcessFile:
    """Read a process, and the version of torch that runs it, from a YAML file.

    Raises DataFileError, which names the line and the key, for an invalid file. A model FILE.py:NAME, which
    would run code, is invalid unless `sources` contains "file".
    """
    values = read_entry(path).children(("steps",), ("models", "torch", "cublas_workspace_config"))
    named = values["models"].mapping() if "models" in values else {}
    models = {name: _model(name, entry, catalogue, sources) for name, entry in named.items()}
    of_models = (model.job.environment.cublas_workspace_config for model, _ in models.values())
    config = next(filter(None, of_models), "")
    if "cublas_workspace_config" in values:
        entry = values["cublas_workspace_config"]
        config = entry.text()
        parse_entry(entry, parse_workspace_config, config)
    version = _version(values["torch"]) if "torch" in values else ""
    models = {name: (_in_process(model, config, version), batch) for name, (model, batch) in models.items()}
    entries = values["steps"].items()
    process = tuple(_read_step(entry, models) for entry in entries)
    flaw = find_invalid_step(process)
    if flaw is not None:
        raise entries[flaw.index].broken(flaw.what)
    return ProcessFile(process, version)


Known = tuple[Model, int | None]  # a model of the file, and the batch size that the catalogue has for it


def _in_process(model: Model, cublas_config: str, version: str) -> Model:
    """Return the model with the process's cuBLAS workspace setting and torch version."""
    torch = version and format_torch_version(torch_version_of(version))
    return replace(model, job=model.job.replace(cublas_workspace_config=cublas_config, torch=torch))


def _version(entry: Entry) -> str:
    text = entry.text()
    if re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", text) is None:
        raise entry.broken(f"expected a version of torch, such as 2.13.0, got {text!r}")
    return text


def _model(
    name: str, entry: Entry, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str]
) -> Known:
    if not is_argument_name(name):
        raise entry.broken("expected the name of a variable")
    job, text = read_model(entry, catalogue, sources), entry.text()
    batch = catalogue[text].batch if text in catalogue else None
    return Model(name, job, batch or _ANY_BATCH), batch


def _read_step(entry: Entry, models: Mapping[str, Known]) -> Step:
    word = entry.node.value
    if isinstance(word, str):
        if word in _KEYS:
            raise entry.broken(f"step {word!r} needs a value, as in {word}: ...")
        if word not in _WORDS:
            raise entry.broken(f"step {word!r} is unknown; known are {_KNOWN}")
        return _WORDS[word]
    keys = entry.mapping()
    if len(keys) != 1:
        raise entry.broken("a step is one word, or one key with its value; begin each with a dash")
    ((key, value),) = keys.items()
    if key in _WORDS:
        raise value.broken(f"this step takes no value; write it as '- {key}'")
    if key not in _KEYS:
        raise value.broken(f"unknown step; known are {_KNOWN}")
    return _KEYS[key](value, models)


def _model_of(entry: Entry, models: Mapping[str, Known]) -> Known:
    name = entry.text()
    if name not in models:
        raise entry.broken(f"no model of this name; 'models' of this file is {', '.join(models) or 'empty'}")
    return models[name]


def _summary(entry: Entry, models: Mapping[str, Known]) -> Step:
    values = entry.children(("model",), ("batch",))
    model, batch = _model_of(values["model"], models)
    return Summary(model, _batch(entry, values, batch))


def _train(entry: Entry, models: Mapping[str, Known]) -> Step:
    values = entry.children(("model", "steps_per_epoch", "epochs"), ("batch", "print"))
    model, batch = _model_of(values["model"], models)
    steps, epochs = (read_count(values[name], MAX_STEPS) for name in ("steps_per_epoch", "epochs"))
    if steps * epochs > MAX_STEPS:
        raise entry.broken(f"{steps * epochs:,} steps are too many; at most {MAX_STEPS:,} are played")
    label = _line(values["print"]) if "print" in values else None
    return Train(model, _batch(entry, values, batch), steps, epochs, label)


def _define(entry: Entry, models: Mapping[str, Known]) -> Step:
    tensor = parse_entry(entry, parse_tensor_spec, entry.text())
    if tensor.keyword is None or not is_argument_name(tensor.keyword):
        raise entry.broken(f"expected NAME=SHAPE[:DTYPE], such as var=1024x1024, got {entry.text()!r}")
    return Define(tensor.keyword, tensor)


def _batch(entry: Entry, values: Mapping[str, Entry], default: int | None) -> int:
    if "batch" in values:
        return read_count(values["batch"], MAX_BATCH)
    if default is None:
        raise entry.broken("missing batch; the catalogue has none for this model")
    return default


def _line(entry: Entry) -> str:
    text = entry.text().strip()
    if "\n" in text:
        raise entry.broken("expected one line")
    return text


_WORDS: Mapping[str, Step] = {"empty_cache": EmptyCache(), "reset_peak": ResetPeak(), "leave": Leave()}
_KEYS: Mapping[str, Callable[[Entry, Mapping[str, Known]], Step]] = {
    "heading": lambda entry, models: Heading(_line(entry)),
    "print": lambda entry, models: Print(_line(entry)),
    "define": _define,
    "delete": lambda entry, models: Delete(tuple(item.text() for item in entry.items())),
    "place": lambda entry, models: Place(_model_of(entry, models)[0]),
    "summary": _summary,
    "train": _train,
}
_KNOWN = ", ".join((*_KEYS, *_WORDS))
