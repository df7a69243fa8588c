"""docs/replacements.md lists what a capture replaces, and attributes are replaced by one function alone."""

import ast
from pathlib import Path

from benchmarks.docs import replacements

CAPTURE = Path(replacements.ROOT, "planner", "capture")


def test_the_page_is_what_the_sources_give() -> None:
    """Written again from the sources, the page is the same."""
    assert replacements.PAGE.read_text(encoding="utf-8") == replacements.page()


def test_attributes_are_replaced_by_one_function() -> None:
    """`mock.patch.object` is called in capture/patching.py alone."""
    found = {
        path.name
        for path in CAPTURE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "mock.patch.object"
    }
    assert found == {"patching.py"}


def test_imported_and_looked_up_modules_have_their_qualified_names(tmp_path: Path) -> None:
    """A row names what is replaced, where the source tells it, and the reason that a docstring gives."""
    source = tmp_path / "one.py"
    source.write_text(
        '"""Replace things."""\n'
        "from torch._inductor import config\n"
        "def first():\n"
        '    """Keep a value. More."""\n'
        '    module = importlib.import_module("library.part")\n'
        '    patched(module, "read", None)\n'
        '    patched(config, "flag", True)\n'
        "def second():\n"
        "    patched(holder, name, None)\n"
        '    library.impl("mm", kernel, "AutogradMeta")\n'
    )
    assert list(replacements.replacements_of(source, tmp_path)) == [
        ("`library.part.read`", "one.py", "first", "Keep a value"),
        ("`torch._inductor.config.flag`", "one.py", "first", "Keep a value"),
        ("*names*", "one.py", "second", "Replace things"),
        ("`mm` at AutogradMeta", "one.py", "second", "Replace things"),
    ]
