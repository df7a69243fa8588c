"""Build models of diffusers from a class or a local folder.

Nothing is fetched from a hub. `diffusers:UNet2DConditionModel` is a class with its default configuration,
which `--model-arg` changes; `diffusers:FOLDER` is a folder with a config.json that names its class.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.capture.models.diffusers.ids import add_ids
from planner.capture.models.libraries import import_library, quiet, read_json, unknown_name
from planner.errors import ModelError, UsageError
from planner.jobs import nearest, shown

SOURCE = "diffusers"
_SWITCHES = ("enable_slicing", "enable_tiling")  # methods of autoencoders: one image or tile at once


@dataclass(frozen=True, slots=True)
class DiffusersClass:
    """A class of diffusers with the arguments of its constructor."""

    model_class: Any  # a subclass of diffusers.ModelMixin
    arguments: Mapping[str, Any]  # the given arguments; others have the constructor's defaults
    switches: tuple[str, ...] = ()  # methods without arguments that are called on the model

    @property
    def config(self) -> dict[str, Any]:
        """Return the value of each of the constructor's parameters: the argument, or the default, or None."""
        return {
            name: self.arguments.get(name, None if one.default is one.empty else one.default)
            for name, one in _parameters(self.model_class.__init__).items()
        }

    @property
    def inputs(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the model's forward method, by name."""
        return _parameters(self.model_class.forward)


def choose(name: str, arguments: Mapping[str, Any]) -> DiffusersClass:
    """Return the class that `diffusers:NAME` names, with its constructor's arguments.

    Raises UsageError for a name or argument that does not exist, ModelError for a broken config.json.
    """
    diffusers = import_library("diffusers.models", extra=SOURCE)
    with quiet():  # its import has set the level of its logger, and finding a class imports more
        if Path(name).is_dir():
            model_class, read = _read_folder(diffusers, Path(name))
        else:
            model_class, read = _class_of(diffusers, name), {}
    known = _parameters(model_class.__init__)
    switches = tuple(key for key in _SWITCHES if key in arguments and hasattr(model_class, key))
    for key in arguments:
        if key not in known and key not in switches:
            near = nearest(key, known)
            hint = f"; the nearest: {near}" if near else ""
            raise UsageError(f"--model-arg {key}: {model_class.__name__} takes no such argument{hint}")
    own = {key: value for key, value in arguments.items() if key not in switches}
    return DiffusersClass(model_class, read | own, tuple(key for key in switches if arguments[key]))


def build(name: str, **arguments: Any) -> nn.Module:
    """Return the float32 model that `diffusers:NAME` names.

    Position ids get defaults. The attention is diffusers' default, `scaled_dot_product_attention`.
    """
    choice = choose(name, arguments)
    model: nn.Module = choice.model_class(**choice.arguments)
    for switch in choice.switches:
        getattr(model, switch)()
    add_ids(model)
    return model


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    given = inspect.signature(function).parameters
    return {name: one for name, one in given.items() if name != "self" and one.kind not in kinds}


def _class_of(diffusers: ModuleType, name: str) -> Any:
    names = [key for key in dir(diffusers) if key[0].isupper()]
    found = getattr(diffusers, name, None) if name in names else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        if "/" in name:
            raise UsageError(
                f"model {shown('diffusers:' + name)}: there is no such folder, and nothing is fetched from a "
                "hub; save the config.json of its unet, transformer or vae into a folder and name that"
            )
        raise unknown_name(SOURCE, name, names, "model class")
    return found


def _read_folder(diffusers: ModuleType, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the class that a folder's config.json names, and the arguments for its constructor."""
    path = folder / "config.json"
    values = read_json(path, "a folder with a config.json")
    name = values.get("_class_name") if isinstance(values, dict) else None
    if not isinstance(name, str):
        raise ModelError(f"{path}: names no _class_name; name the folder of one model, such as unet")
    model_class = _class_of(diffusers, name)
    known = _parameters(model_class.__init__)
    return model_class, {key: value for key, value in values.items() if key in known}
