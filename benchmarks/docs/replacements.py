"""Write the table of what a capture replaces in torch and other libraries, from the sources of `planner`.

    python -m benchmarks.docs.replacements

Writes docs/replacements.md. A row is a call of `patched`, `all_patched` or `mock.patch.dict`, or of
`kernels_registered` or `library.impl`; the reason is the first sentence of the docstring around it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "replacements.md"
HEAD = """\
# What a capture replaces in torch and other libraries

A capture runs a model, an optimizer and a loop on the `meta` device. Where their code asks about a GPU,
launches a kernel or reads a value, functions of torch and other libraries are replaced until a context ends:
attributes by `patched` of `planner/capture/patching.py`, which threads that already run do not see, operators
by `torch.library`. A name that a new version lacks raises an AttributeError at the first capture.
[versions.md](versions.md) has the versions of each library. *names* stand for several, which the function or
a table in its file lists. `python -m benchmarks.docs.replacements` writes this page.

| replaced | in `planner/capture/` | by | reason |
|---|---|---|---|
"""
_PATCHING = ("patched", "all_patched")
_REGISTERING = ("kernels_registered", "library.impl")
_Scope = tuple[ast.FunctionDef | ast.ClassDef, ...]  # from the outermost to the innermost


class Replacement(NamedTuple):
    """One place in the sources that replaces something; `name` is Markdown."""

    name: str
    file: str
    function: str
    reason: str


def page() -> str:
    """Return the page as Markdown."""
    folder = ROOT / "planner" / "capture"
    paths = (path for path in sorted(folder.rglob("*.py")) if path.name != "patching.py")
    rows = dict.fromkeys(row for path in paths for row in replacements_of(path, folder))
    return HEAD + "".join(
        f"| {row.name} | `{row.file}` | `{row.function}` | {row.reason} |\n" for row in rows
    )


def replacements_of(path: Path, folder: Path) -> Iterator[Replacement]:
    """Yield what one file below the folder replaces."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    file = path.relative_to(folder).as_posix()
    for scope, call in _calls(tree, ()):
        if ast.unparse(call.func).endswith(_REGISTERING):
            name = _operator_name(call)
        else:
            name = _patched_name(call, _modules(tree, scope))
        if not name.startswith("`planner."):
            yield Replacement(name, file, scope[-1].name, _reason(scope, tree))


def _calls(node: ast.AST, scope: _Scope) -> Iterator[tuple[_Scope, ast.Call]]:
    """Yield the replacing calls below a node, with the classes and functions around each."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.Call):
            text = ast.unparse(one.func)
            if text in (*_PATCHING, "mock.patch.dict") or text.endswith(_REGISTERING):
                yield scope, one
        is_scope = isinstance(one, ast.FunctionDef | ast.ClassDef)
        yield from _calls(one, (*scope, one) if is_scope else scope)


def _modules(tree: ast.Module, scope: _Scope) -> dict[str, str]:
    """Return the qualified names of modules and classes of other libraries, by their names in a function."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(scope[-1]):
        text = ast.unparse(node)
        if isinstance(node, ast.Assign) and ("import_module" in text or "sys.modules" in text):
            constants = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            found |= {ast.unparse(node.targets[0]): str(constants[0])} if constants else {}
    return found


def _patched_name(call: ast.Call, modules: dict[str, str]) -> str:
    holder, name = ast.unparse(call.args[0]), call.args[min(1, len(call.args) - 1)]
    first, dot, rest = holder.partition(".")
    holder = modules.get(first, first) + dot + rest
    if isinstance(call.func, ast.Attribute):  # mock.patch.dict
        return "entries of `{}`".format(holder.strip("'"))
    if isinstance(name, ast.Constant):
        return f"`{holder}.{name.value}`"
    if isinstance(name, ast.Dict):
        keys = [key.value for key in name.keys if isinstance(key, ast.Constant)]
        return ", ".join(f"`{holder}.{key}`" for key in keys)
    return f"*names* of `{holder}`" if first in modules or holder[0].isupper() else "*names*"


def _operator_name(call: ast.Call) -> str:
    """Return the operator, or *operators* if its name is computed, and the dispatch key."""
    texts = [part.value for part in call.args if isinstance(part, ast.Constant)]
    operator = f"`{texts[0]}`" if len(texts) > 1 else "*operators*"
    return f"{operator} at {texts[-1]}"


def _reason(scope: _Scope, module: ast.Module) -> str:
    """Return the first sentence of the innermost docstring around a call, else of the module's."""
    texts = (ast.get_docstring(one) for one in (*reversed(scope), module))
    text = next(filter(None, texts), "").split("\n\n")[0].replace("\n", " ")
    return text.partition(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
