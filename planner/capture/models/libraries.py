"""Import model libraries, read their JSON files and find models in their namespaces."""

import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_text
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.capture.process_state import first_line_of
from planner.errors import ModelError, UsageError
from planner.jobs import nearest, shown


def read_json(path: Path, instead: str) -> Any:
    """Return the parsed contents of a JSON file.

    Raises UsageError for a missing file, with the advice to name `instead`; ModelError for a file that cannot
    be read or parsed.
    """
    try:
        return json.loads(read_text(path, LARGEST_CODE_BYTES))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file; name {instead}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path}: cannot be read: {reason}; mend the file") from error


def import_library(module: str, extra: str) -> ModuleType:
    """Import and return a module of a model library. Raises ModelError if the import fails.

    `extra` is the extra of gpu-batch-planner that installs the library, "" if no extra does.
    """
    library = module.partition(".")[0]
    prepare_torchvision()  # each of these libraries imports torchvision
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = f"gpu-batch-planner[{extra}]" if extra else library
        if error.name == library:
            raise ModelError(f"{library} is not installed; pip install '{remedy}'") from error
        raise ModelError(f"{library} lacks {error.name}; pip install '{remedy}'") from error
    except Exception as error:
        raise ModelError(
            f"{library} does not import: {first_line_of(error)}; mend the installation"
        ) from error


_TALKATIVE = (
    "transformers",
    "diffusers",
    "peft",
    "bitsandbytes",
    "liger_kernel",
    "torchao",
    "torch.utils._pytree",
    "torch._inductor",
    "torch._dynamo",
)


@contextmanager
def quiet(names: Iterable[str] = _TALKATIVE) -> Iterator[None]:
    """Silence log messages below level ERROR inside the context.

    `names` are the loggers, by default those of libraries that provide models and kernels.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def find_in_namespace(source: str, name: str, namespace: ModuleType) -> Callable[..., object]:
    """Return the function or `nn.Module` class `name` of a Python module.

    Downloads of weights are turned off. Raises UsageError for an unknown name.
    """
    builders = {
        key: value
        for key, value in vars(namespace).items()
        if not key.startswith("_")
        and (inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module)))
    }
    if name not in builders:
        raise unknown_name(source, name, list(builders))
    # smp would download weights by default: its argument for them is None unless a caller sets it.
    arguments = inspect.signature(builders[name]).parameters
    return partial(builders[name], **dict.fromkeys(arguments.keys() & {"encoder_weights"}))


def unknown_name(source: str, name: str, names: list[str], what: str = "model") -> UsageError:
    """Return the UsageError for a name that a source lacks, with similar names or else the first names."""
    near = nearest(name, names)
    hint = f"the nearest: {near}" if near else f"it has {', '.join(names[:8])}" + " ..." * (len(names) > 8)
    return UsageError(f"{source} has no {what} {shown(name)}; {hint}")
