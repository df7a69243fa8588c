"""Classify FILE.py:NAME by its source: a model, a training step, or a LightningModule.

The file is parsed and not run, as are the files that it imports its base classes from: a plan from stored
traces needs no torch, and a plan in another process runs none of the file's code in this process. If the
source does not show the kind (a class made by a library, a function that returns something from another
file), it counts as a model; `--mode` overrides the kind.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from enum import Enum, auto
from functools import cached_property
from pathlib import Path

from planner.errors import UsageError
from planner.jobs.imported_code import ImportedCode, classes_of, last_name, parse_file
from planner.jobs.parse import nearest, shown

_LIBRARIES = ("transformers", "trl")  # libraries whose Trainers run the training
_MODELS = re.compile(r"For[A-Z]|LMHead|AutoModel|Model$")  # found in names of transformers' model classes
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Common names of methods that train on one batch.
_STEP_NAMES = (
    "train_step",
    "training_step",
    "train_batch",
    "update",
    "learn",
    "optimize",
    "train",
    "__call__",
)


class CodeKind(Enum):
    """What FILE.py:NAME may name: a model, a training step, or a LightningModule."""

    MODEL = auto()  # a model, or a name whose kind is unknown
    STEP = auto()  # a class or function that creates a step, or a LightningModule with manual optimization
    STEP_FUNCTION = auto()  # a function that is the step; the file creates models and optimizers
    LIGHTNING = auto()  # a LightningModule with automatic optimization
    TRANSFORMERS = auto()  # a model of transformers, which takes its inputs by keyword and returns its loss


def kind_of_code(name: str, given: Collection[str] = ()) -> CodeKind:
    """Return the `CodeKind` of FILE.py:NAME by its source, or MODEL if the source does not show it.

    `given` are the names of the arguments in the call of FILE.py:NAME. Raises UsageError for a function that
    needs no arguments and returns nothing, and for a method of an object that trains.
    """
    path = Path(name.rpartition(":")[0])
    tree = parse_file(path)
    if tree is None:
        return CodeKind.MODEL  # running it reports the problem
    return _File(tree, path.parent).kind_of(name.rpartition(":")[2], given, name)


def sets_cudnn_benchmark(name: str) -> bool:
    """Return whether the import of FILE.py:NAME sets `torch.backends.cudnn.benchmark` to True.

    The last assignment counts. Assignments in functions and under `if __name__` are not made by an import.
    """
    tree = parse_file(Path(name.rpartition(":")[0]))
    assigned = () if tree is None else _assigned(_run_on_import(tree.body))
    values = [
        value
        for targets, value in assigned
        if any(ast.unparse(one).endswith("cudnn.benchmark") for one in targets)
    ]
    return bool(values) and isinstance(values[-1], ast.Constant) and values[-1].value is True


def check_code(name: str) -> None:
    """Raise UsageError if FILE.py:NAME does not exist, or is a class that trains but has no `forward`."""
    file, _, attribute = name.rpartition(":")
    if not Path(file).is_file():
        raise UsageError(f"{name}: there is no file {shown(file)}; check the path")
    tree = parse_file(Path(file))
    if tree is not None:
        _File(tree, Path(file).parent).check(attribute, name)


class _File:
    def __init__(self, tree: ast.Module, folder: Path) -> None:
        self._classes = classes_of(tree)
        self._functions = {node.name: node for node in tree.body if isinstance(node, _Function)}
        self._imported = dict(_imported_from_libraries(tree))
        self._names = set(_names_of(tree))
        self._tree, self._folder = tree, folder

    @cached_property
    def _elsewhere(self) -> ImportedCode:
        """Return the classes that the file imports, directly or indirectly, from the user's other files."""
        return ImportedCode(self._tree, list(dict.fromkeys((self._folder, Path()))))

    def _name_in_library(self, name: str) -> str:
        """Return an object's name in transformers or TRL, or "" for other objects.

        After a star import from one of the two, every name that the file neither defines nor imports counts
        as a name of that library.
        """
        if name in self._imported or "*" not in self._imported or name in self._names:
            return self._imported.get(name, "")
        return name

    def kind_of(self, name: str, given: Collection[str], where: str) -> CodeKind:
        if name in self._classes:
            return self._kind_of_class(self._classes[name])
        owner, _, method = name.partition(".")
        if method and owner in self._classes:
            return self._kind_of_method(self._classes[owner], method)
        function = self._functions.get(name)
        if function is None:
            return self._kind_of_object(owner, method, where)
        if _required(function, given):
            return CodeKind.STEP_FUNCTION
        if not function.decorator_list and not any(_returned(function)):
            raise UsageError(
                f"{where}: returns nothing, so it is neither a model nor a training step; name a function or "
                "method that trains on one batch, or run the script: planner run -- python "
                f"{Path(where.rpartition(':')[0]).name}"
            )
        return self._kind_of_results(function)

    def _kind_of_object(self, name: str, method: str, where: str) -> CodeKind:
        """Return the kind of an object made at the file's top level, or MODEL for any other name.

        Raises UsageError for a method of an object that trains.
        """
        values = [value for targets, value in _assigned(self._tree.body) if name in map(last_name, targets)]
        kind = self._kind_of_call(values[-1], ()) if values else CodeKind.MODEL
        if not method:
            return kind
        if kind is CodeKind.STEP:
            raise UsageError(
                f"{where}: is a method of an object that trains; name the object: --model "
                f"{where.removesuffix(f'.{method}')}"
            )
        return CodeKind.MODEL

    def check(self, name: str, where: str) -> None:
        """Raise UsageError if the file lacks a name, or if a class has a training method but no `forward`."""
        node = self._classes.get(name)
        methods = {} if node is None else self._methods(node)
        steps = [one for one in _STEP_NAMES if one in methods and _required(methods[one], ("self",))]
        if node is not None and steps and "forward" not in methods:
            raise UsageError(
                f"{where}: has no step(batch), and counts as a model; if its {steps[0]} is the training "
                f"step, name it: --model {where}.{steps[0]}"
            )
        owner, _, method = name.partition(".")
        inner = self._classes.get(owner) if method else None
        if inner is not None and not inner.bases and method not in self._methods(inner):
            near = nearest(method, self._methods(inner))
            hint = f"the nearest: {near}" if near else "check the name"
            raise UsageError(f"{where}: {owner} has no {shown(method)}; {hint}")
        known = self._names
        if owner not in known and "*" not in known:
            near = nearest(name, sorted(known, reverse=True))  # Net rather than net
            hint = f"the nearest: {near}" if near else "check the name"
            raise UsageError(f"{where}: the file has no {shown(name)}; {hint}")

    def _methods(self, node: ast.ClassDef) -> dict[str, _Function]:
        family = self._family(node)
        return {one.name: one for each in family for one in each.body if isinstance(one, _Function)}

    def _kind_of_method(self, node: ast.ClassDef, name: str) -> CodeKind:
        """Return STEP if a method may be a training step, else MODEL.

        A step is an instance method that needs an argument besides `self`.
        """
        method = self._methods(node).get(name)
        if method is None or not _required(method, ("self",)):
            return CodeKind.MODEL
        made = {last_name(one) for one in method.decorator_list} & {"classmethod", "staticmethod"}
        return CodeKind.MODEL if made else CodeKind.STEP

    def _kind_of_class(self, node: ast.ClassDef) -> CodeKind:
        family = list(self._family(node))
        methods = self._methods(node)
        bases = {last_name(base) for each in family for base in each.bases}
        if "LightningModule" in bases or {"training_step", "configure_optimizers"} <= methods.keys():
            return CodeKind.STEP if any(map(_is_manual, family)) else CodeKind.LIGHTNING
        step = methods.get("step")
        is_step = step is not None and "forward" not in methods and _required(step, ("self",))
        return CodeKind.STEP if is_step else CodeKind.MODEL

    def _family(self, node: ast.ClassDef, heirs: tuple[ast.ClassDef, ...] = ()) -> Iterator[ast.ClassDef]:
        """Yield a class's base classes from the user's files, and the class itself last."""
        for base in node.bases:
            name = last_name(base)
            inner = self._classes.get(name) if isinstance(base, ast.Name) else None
            if inner in (None, node):  # such as of class Net(other.Net)
                inner = self._elsewhere.base(base)
            if inner is not None and inner not in (node, *heirs):
                yield from self._family(inner, (node, *heirs))
        yield node

    def _kind_of_results(self, function: _Function, callers: tuple[str, ...] = ()) -> CodeKind:
        """Return the kind of a function's results if all have the same kind, else MODEL.

        `callers` names the functions whose kind is being determined, which are not followed again.
        """
        kinds = {self._kind_of_value(value, function, callers) for value in _returned(function)}
        return kinds.pop() if len(kinds) == 1 else CodeKind.MODEL

    def _kind_of_value(self, value: ast.expr, function: _Function, callers: tuple[str, ...]) -> CodeKind:
        """Return the kind of a value that a function returns.

        Names and calls are followed. The value may be an instance of a class, a nested function, or the
        result of another function of the file. Adapters of peft do not change the kind.
        """
        if isinstance(value, ast.Call) and last_name(value.func) == "get_peft_model" and value.args:
            return self._kind_of_value(value.args[0], function, callers)
        if isinstance(value, ast.Name):
            nodes = (*ast.walk(function), *self._tree.body)  # of the file: its top level
            for node in nodes:
                if isinstance(node, _Function) and node.name == value.id and node is not function:
                    return CodeKind.STEP if _required(node) else CodeKind.MODEL
            values = (one for targets, one in _assigned(nodes) if value.id in map(last_name, targets))
            value = next(values, value)
        return self._kind_of_call(value, (*callers, function.name))

    def _kind_of_call(self, value: ast.expr, callers: tuple[str, ...]) -> CodeKind:
        if isinstance(value, ast.Lambda):
            return CodeKind.STEP if value.args.args else CodeKind.MODEL
        if not isinstance(value, ast.Call):
            return CodeKind.MODEL
        name = last_name(value.func)
        if name in self._functions and name not in callers and isinstance(value.func, ast.Name):
            return self._kind_of_results(self._functions[name], callers)
        made = self._classes.get(name)
        bases = [] if made is None else [base for one in self._family(made) for base in one.bases]
        if any(self._name_in_library(last_name(one)).endswith("Trainer") for one in (value.func, *bases)):
            return CodeKind.STEP
        owner = value.func.value if isinstance(value.func, ast.Attribute) else value.func  # of from_config
        if any(_MODELS.search(self._name_in_library(one)) for one in (name, last_name(owner))):
            return CodeKind.TRANSFORMERS
        return CodeKind.MODEL if made is None else self._kind_of_class(made)


def _run_on_import(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements that an import runs, with the statements inside of them."""
    for node in body:
        is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if isinstance(node, ast.stmt) and not (is_main or isinstance(node, _Function | ast.ClassDef)):
            yield node
            yield from _run_on_import(ast.iter_child_nodes(node))


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    """Yield the targets and the value of each assignment among syntax nodes."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield [node.target], node.value


def _names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file assigns, defines or imports anywhere, `*` for a star import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, _Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name).partition(".")[0] for one in node.names)


def _imported_from_libraries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the local and the library's name of each object from transformers or TRL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _LIBRARIES:
            yield from ((one.asname or one.name, one.name) for one in node.names)
        elif isinstance(node, ast.Attribute) and last_name(node.value) in _LIBRARIES:
            yield node.attr, node.attr


def _required(function: _Function, given: Collection[str] = ()) -> list[str]:
    """Return the names of the function's arguments that have no default and are not in `given`."""
    spec = function.args
    plain = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    needed = plain[: len(plain) - len(spec.defaults)] if spec.defaults else plain
    keyword = [one.arg for one, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value is None]
    return [name for name in (*needed, *keyword) if name not in given]


def _returned(function: _Function) -> Iterator[ast.expr]:
    """Yield the expressions that a function itself returns; inner functions are skipped."""
    waiting: list[Iterable[ast.AST]] = [function.body]
    while waiting:
        for node in waiting.pop():
            if isinstance(node, ast.Return) and node.value is not None:
                yield node.value
            if not isinstance(node, (*_Function.__args__, ast.ClassDef, ast.Lambda)):
                waiting.append(list(ast.iter_child_nodes(node)))


def _is_manual(node: ast.ClassDef) -> bool:
    """Return whether a LightningModule sets `self.automatic_optimization = False`."""
    return any(
        isinstance(one, ast.Assign)
        and isinstance(one.value, ast.Constant)
        and one.value.value is False
        and any(last_name(target) == "automatic_optimization" for target in one.targets)
        for one in ast.walk(node)
    )
