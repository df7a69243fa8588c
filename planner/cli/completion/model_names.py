"""Complete the names of models after `--model`.

The names are of the catalogue and of installed model libraries. A library's source files are searched, not
imported: a key press must not wait for torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from planner.errors import PlannerError
from planner.jobs import load_catalogue

# torchvision/models/_api.py, timm/models/_registry.py: the decorator of a function that creates a model.
_REGISTERED = re.compile(r"^@register_model(?:\(\))?$[\s\S]*?^def (\w+)\(", re.MULTILINE)
_SMP_MODEL = re.compile(r"^class (\w+)\(SegmentationModel\)", re.MULTILINE)
# diffusers/models/__init__.py: names of a module that are imported on first use.
_EXPORTED = re.compile(
    r'^    _import_structure\["(?:autoencoders|controlnets|transformers|unets)\.\w+"\] = \[([^\]]*)\]',
    re.MULTILINE,
)
_IMPORTED = re.compile(r"^from \.\w+ import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def model_names(beginning: str) -> list[str]:
    """Return the values of `--model` that start with `beginning`.

    Models of a library are listed only if `beginning` starts with `LIBRARY:` or matches that library alone.
    """
    library = next((name for name in LIBRARIES if beginning.startswith(f"{name}:")), None)
    if library is not None:
        members = (f"{library}:{name}" for name in sorted(set(LIBRARIES[library]())))
        return [name for name in members if name.startswith(beginning)]
    names = [*_catalogued(), *(f"{name}:" for name in LIBRARIES)]
    matches = [name for name in names if name.startswith(beginning)]
    if len(matches) == 1 and matches[0].endswith(":"):  # so that a shell continues the word, not ends it
        return model_names(matches[0]) or matches
    return matches


def _catalogued() -> list[str]:
    try:
        return list(load_catalogue())
    except PlannerError:
        return []


def _defined(package: str, files: str, definition: re.Pattern[str]) -> Iterator[str]:
    """Yield the names of the unquantized models that a package's source files define."""
    for file in _files(package, files):
        if file.parent.name != "quantization":
            yield from definition.findall(_text(file))


def _from_transformers() -> Iterator[str]:
    """Yield the model types of transformers: the names of the folders that have a configuration."""
    for file in _files("transformers", "models/*/configuration_*.py"):
        yield file.parent.name


def _from_monai() -> Iterator[str]:
    """Yield the names of the networks that MONAI exports.

    Of names that differ only in case, the first is yielded.
    """
    for file in _files("monai", "networks/nets/__init__.py"):
        spelled: dict[str, str] = {}
        for several, one in _IMPORTED.findall(_text(file)):
            for name in re.findall(r"\b[A-Z][A-Za-z0-9]*\b", several or one):
                spelled.setdefault(name.lower(), name)
        yield from spelled.values()


def _from_diffusers() -> Iterator[str]:
    """Yield the names of the U-Nets, transformers, autoencoders and ControlNets that diffusers exports."""
    for file in _files("diffusers", "models/__init__.py"):
        for several in _EXPORTED.findall(_text(file)):
            yield from re.findall(r'"(\w+)"', several)


LIBRARIES: Mapping[str, Callable[[], Iterable[str]]] = {
    "torchvision": partial(_defined, "torchvision", "models/**/*.py", _REGISTERED),
    "timm": partial(_defined, "timm", "models/*.py", _REGISTERED),
    "hf": _from_transformers,
    "diffusers": _from_diffusers,
    "monai": _from_monai,
    "smp": partial(_defined, "segmentation_models_pytorch", "decoders/*/model.py", _SMP_MODEL),
}


def _files(package: str, pattern: str) -> list[Path]:
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return [file for place in places for file in sorted(Path(place).glob(pattern))]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
