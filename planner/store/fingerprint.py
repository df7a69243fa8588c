"""Compute fingerprints of jobs, which are equal only for jobs with equal traces.

A fingerprint is plain data. The fingerprint of a user's file includes the modules in its folder that it
imports. If its code may read anything else (files, the environment, the time, modules named at run time), the
job has no fingerprint. Code that a plan does not run may do so: code below `if __name__ == "__main__":`, and
functions that only code below it calls.
"""

import ast
import json
import os
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_bytes
from planner._support.versions import installed_version
from planner.jobs import (
    Job,
    Quantize,
    is_code,
    is_optimizer_file,
    job_to_json,
    optimizer_library,
    reset_options,
    split_model,
)

Fingerprint = dict[str, Any]  # JSON

PACKAGE = Path(__file__).parents[1]
_PACKAGES = ("capture", "jobs", "program")  # packages whose code decides traces
_OWN = ("store/codec.py", "store/layout.py")  # modules that encode and decode traces
LIBRARIES = {
    "hf": ("transformers",),
    "diffusers": ("diffusers", "transformers"),
    "monai": ("monai", "einops"),
    "smp": ("segmentation_models_pytorch", "timm"),
    "timm": ("timm",),
    "torchvision": (),
    "nnunet": ("dynamic-network-architectures",),
    "zoo": (),
    "file": (),
}
# Modules of the standard library that read nothing outside the program.
PURE_MODULES = frozenset(
    ("__future__", "abc", "argparse", "collections", "contextlib", "copy", "dataclasses", "enum", "functools")
    + ("itertools", "logging", "math", "numbers", "operator", "re", "string", "types", "typing", "warnings")
)
_INSTALLED = frozenset(
    ("torch", "torchvision", "timm", "transformers", "monai", "einops", "numpy")
    + ("bitsandbytes", "torchao", "lion_pytorch", "lightning", "scipy", "torchmetrics", "tqdm")
)
IMPURE_NAMES = frozenset(
    ("open", "exec", "eval", "compile", "input", "__import__", "globals", "environ", "getenv", "load")
    + ("from_file", "from_pretrained", "hub", "load_state_dict_from_url", "fromfile", "memmap", "loadtxt")
    + ("genfromtxt", "fromregex", "read_text", "read_bytes", "read_file", "read_image", "decode_image")
    + ("datasets", "from_json_file", "get_config_dict", "read_config", "read_meta", "load_config_file")
    + ("load_config_files", "load_bundle_config")
)
# Impure names that are harmless as attributes: `model.eval()`, `torch.compile`, `re.compile`.
_HARMLESS = frozenset(("compile", "eval", "exec", "input"))
# Names of sys that reveal nothing about the process; a plan gives a file no arguments.
_OF_SYS = frozenset(("argv", "exit", "float_info", "maxsize", "stderr", "stdout"))


def fingerprint_of(job: Job) -> Fingerprint | None:
    """Return a job's fingerprint, without batch size and GPU, or None if it cannot be determined."""
    source, name = split_model(job.model.origin)
    if source not in LIBRARIES:
        return None
    content: str | None = ""
    if source == "file":
        content = _digest_of(name)
    elif source in ("hf", "diffusers") and Path(name).is_dir():
        content = _folder_digest(Path(name))
    elif source == "nnunet":
        content = _folder_digest(Path(name).parent)  # with dataset.json
    loss = _digest_of(str(job.loop.loss)) if is_code(job.loop.loss) else ""
    optimizer = _optimizer_digest(job)
    if content is None or loss is None or optimizer is None:
        return None
    return {
        "job": job_to_json(trace_relevant_fields(job)),
        "content": content,
        "loss": loss,
        "optimizer": optimizer,
        "versions": {
            name: installed_version(name)
            for name in ("torch", "torchvision", *LIBRARIES[source], *_libraries_of_tuning(job))
        },
        "python": list(sys.version_info[:2]),
        "planner": source_digest(),
    }


def _libraries_of_tuning(job: Job) -> tuple[str, ...]:
    """Return the libraries that adapt, quantize, patch or shard the job's model, whatever its source."""
    adapting = ("peft", "transformers") if job.model.peft else ()
    quantizing = ("bitsandbytes", "transformers") if job.model.quantize is not Quantize.NONE else ()
    quantizing = ("torchao", "transformers") if job.model.quantize.is_of_torchao else quantizing
    return (
        *adapting,
        *quantizing,
        *(("liger_kernel",) if job.model.liger else ()),
        *(("deepspeed",) if job.sharding.deepspeed else ()),
    )


def _optimizer_digest(job: Job) -> str | None:
    """Return the digest of an optimizer's file or its library's version, "" for PyTorch's, None if unknown.

    Returns None if the file has no digest, or the library is not installed.
    """
    if is_optimizer_file(job.loop.optimizer):
        return _digest_of(str(job.loop.optimizer))
    library = optimizer_library(job.loop.optimizer)
    return installed_version(library) if library else ""


def trace_relevant_fields(job: Job) -> Job:
    """Return the job reduced to the options that affect its trace. All other options have their defaults."""
    return reset_options(job, where=lambda option: not option.changes_trace)


def digest(key: Fingerprint) -> str:
    """Return a hash of a fingerprint as 40 hexadecimal digits, used as a file name."""
    return sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]


def source_digest() -> str:
    """Return a digest of the planner's source files that determine traces."""
    modules = (path for package in _PACKAGES for path in sorted((PACKAGE / package).rglob("*.py")))
    return _digest_files((*modules, *(PACKAGE / name for name in _OWN)))


def _digest_files(paths: Iterable[Path]) -> str:
    digest = sha256()
    for path in paths:
        content = read_bytes(path, LARGEST_CODE_BYTES)
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str | None:
    """Return a digest of the JSON and Python files in a folder, or None if one cannot be read."""
    try:
        return _digest_files(sorted(path for path in folder.iterdir() if path.suffix in (".json", ".py")))
    except OSError:  # a link without its target, which the model may not need
        return None


# ---- a user's own file


def _digest_of(name: str) -> str | None:
    file, _, attribute = name.rpartition(":")
    return file_digest(Path(file), attribute.partition(".")[0])


def file_digest(path: Path, name: str = "") -> str | None:
    """Return a digest of a Python file and the modules it imports, or None if their code may read other data.

    `name` is the function or class that a plan runs; with "", a plan may run all of them. The result is also
    None if a file cannot be read or parsed.
    """
    path = Path(os.path.realpath(path))
    digest = sha256(os.fsencode(path))  # tracebacks and relative paths depend on the path
    waiting, seen = [path], set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            content = read_bytes(file, LARGEST_CODE_BYTES)
            tree = ast.parse(content)
        except (OSError, SyntaxError, ValueError):
            return None  # tracing reports the problem
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
        nodes = list(_nodes_run(tree, name if file == path else ""))
        if any(map(_is_impure, nodes)):
            return None
        for module in sorted({one for node in nodes for one in _imported(node)}):
            top = module.partition(".")[0]
            inside = _module_files(top, path.parent)
            if inside is not None:
                waiting += inside
            elif top in _INSTALLED:
                digest.update(f"{top} {installed_version(top)}\n".encode())
            elif top not in PURE_MODULES and module != "sys" and module.removeprefix("sys.") not in _OF_SYS:
                return None
    return digest.hexdigest()


def _nodes_run(tree: ast.Module, name: str) -> Iterator[ast.AST]:
    """Yield the syntax nodes of the code that a plan may run.

    With a `name`, this is the code that runs at import, the function of that name, and each function that the
    yielded code names; without a `name`, it includes every function.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[ast.AST] = [node for node in tree.body if not _is_for_scripts(node)]
    if name:
        of_imports = [one for node in functions.values() for one in (node.args, *node.decorator_list)]
        waiting = [node for node in waiting if not isinstance(node, ast.FunctionDef)] + of_imports
        waiting += [functions.pop(name)] if name in functions else []
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            named = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
            if name and named in functions:
                waiting.append(functions.pop(named))


def _is_for_scripts(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ ...` without `else`."""
    names = ast.walk(node.test) if isinstance(node, ast.If) and not node.orelse else ()
    return any(isinstance(one, ast.Name) and one.id == "__name__" for one in names)


def _is_impure(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in IMPURE_NAMES
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "sys":
            return node.attr not in _OF_SYS
        return node.attr in IMPURE_NAMES - _HARMLESS
    if isinstance(node, ast.Import) and any(one.name == "sys" and one.asname for one in node.names):
        return True
    if isinstance(node, ast.Import | ast.ImportFrom):
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        return is_relative or any(
            part in IMPURE_NAMES for name in _imported(node) for part in name.split(".")
        )
    return False


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        if node.module != "sys":
            yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_files(module: str, folder: Path) -> list[Path] | None:
    """Return the Python files of a module or package in a folder, or None if the folder does not have it."""
    file, package = folder / f"{module}.py", folder / module
    if file.is_file():
        return [file]
    return sorted(package.rglob("*.py")) if package.is_dir() else None
