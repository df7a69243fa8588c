"""Read the classes of the user's files that a file imports, without running the files."""

import ast
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_bytes

_MOST_FILES = 50  # the most of the user's files that are read for base classes


def parse_file(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file, or None if it cannot be read or parsed."""
    try:
        return ast.parse(read_bytes(path, LARGEST_CODE_BYTES))
    except (OSError, SyntaxError, ValueError):
        return None


def classes_of(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Return the classes that a file defines at its top level, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


class ImportedCode:
    """The classes of the user's other files that a file imports, directly or indirectly.

    Files are searched in `folders`; files of installed packages are not read.
    """

    def __init__(self, tree: ast.Module, folders: Sequence[Path]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}  # by name
        self.modules: set[str] = set()  # names by which a file refers to another file
        waiting, known = [tree], set[Path]()
        while waiting and len(known) < _MOST_FILES:
            importing = waiting.pop()
            for path, name in _imported_files(importing, folders):
                self.modules.add(name)
                inner = None if path in known else parse_file(path)
                known.add(path)
                if inner is not None:
                    self.classes = {**classes_of(inner), **self.classes}
                    waiting.append(inner)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                renamed = {
                    one.asname: self.classes[one.name] for one in node.names if one.name in self.classes
                }
                self.classes |= {name: made for name, made in renamed.items() if name}

    def base(self, expression: ast.expr) -> ast.ClassDef | None:
        """Return the class that a base expression names, or None if no imported file defines it."""
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        if root is not expression and last_name(root) not in self.modules:
            return None
        return self.classes.get(last_name(expression))


def _imported_files(tree: ast.Module, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files in `folders` that a file imports at top level, with their local names."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules = [(one.name, (one.asname or one.name).partition(".")[0]) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inner = [(f"{module}.{one.name}".strip("."), one.asname or one.name) for one in node.names]
            modules = [(module, ""), *inner]
        else:
            continue
        for folder, (module, name) in product(folders, modules):
            stem = folder.joinpath(*module.split("."))
            paths = (stem.with_suffix(".py"), stem / "__init__.py") if module else ()
            yield from ((path, name) for path in paths if path.is_file())


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, such as `nn` of `torch.nn`.

    A name without dots is returned whole. Returns "" for other expressions.
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
