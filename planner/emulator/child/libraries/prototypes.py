"""Generate the functions that a stand-in library lacks.

Headers declare these functions, but no source file defines them. Prototypes come from the preprocessed public
headers. A function that creates handles writes an opaque object for each; a function that returns sizes or
counts writes zeros; all other functions only return the library's fixed answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ATTRIBUTE = re.compile(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)")
_QUALIFIER = re.compile(r"\b(extern|__host__|__cudart_builtin__|static|inline|__inline__)\b")
_HANDLE = re.compile(r"typedef\s+(?:(?:const\s+)?struct\s+\w+|\w+Opaque_t)\s*\*\s*(\w+)\s*;")
_MAKES = re.compile(r"Create|Init|Retain|Split")
_READS = re.compile(r"Get|[sS]ize|Version|Count|BufferSize|MakePlan|Estimate")
_PLAIN = ("int", "unsigned", "long", "double", "float", "size_t")
_OPAQUE = ("void", "char", "FILE", "float", "double", "cuComplex", "cuDoubleComplex")
_NUMBERS = ("size_t", "int", "unsigned", "unsigned int", "float", "double")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a prototype."""

    text: str  # its declaration, with a name
    name: str | None  # None for a function pointer

    @property
    def base(self) -> str:
        """Return the first word of the parameter's type that is not `const`, `struct` or `enum`."""
        words = re.sub(r"[*\[\]]", " ", self.text).split()
        return next((word for word in words if word not in ("const", "struct", "enum")), "")

    @property
    def is_output(self) -> bool:
        """Return whether a value may be written through the parameter, one pointer or array without const."""
        return self.text.count("*") + self.text.count("[") == 1 and "const" not in self.text


@dataclass(frozen=True)
class Prototype:
    """The declaration of a C function in a header."""

    result: str
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def head(self) -> str:
        """Return the C signature of the function, as its definition begins."""
        listed = ", ".join(one.text for one in self.parameters) or "void"
        return f"{self.result} {self.name}({listed})"


@dataclass(frozen=True)
class Library:
    """The description of a library whose missing functions are generated."""

    prefix: str  # regular expression that the library's function names begin with
    answer: str  # the value that the generated functions return
    headers: tuple[str, ...]
    forwards: bool = False  # whether functions without a handle call the installed cuDNN


def parse_prototypes(preprocessed: str, prefix: str) -> tuple[list[Prototype], set[str]]:
    """Return the prototypes whose names match `prefix`, and all handle types, in preprocessed headers."""
    text = _QUALIFIER.sub("", _ATTRIBUTE.sub("", preprocessed))
    pattern = re.compile(
        r"(?:^|[;}])\s*([\w\s\*]+?[\s\*])(" + prefix + r"\w*)\s*\(((?:[^();{}]|\([^()]*\))*)\)\s*(?=;)", re.M
    )
    prototypes: dict[str, Prototype] = {}
    for result, name, parameters in pattern.findall(text):
        result = " ".join(result.split())
        if name not in prototypes and "typedef" not in result and result not in ("return", ""):
            pairs = enumerate(_split(parameters))
            prototypes[name] = Prototype(result, name, tuple(_parameter(index, one) for index, one in pairs))
    return list(prototypes.values()), set(_HANDLE.findall(text))


def _split(parameters: str) -> list[str]:
    parts, depth, part = [], 0, ""
    for letter in parameters:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return parts if part.strip() in ("", "void") else [*parts, part.strip()]


def _parameter(index: int, text: str) -> Parameter:
    """Parse the declaration of a parameter; a missing name is made from the index."""
    if "(" in text:
        return Parameter(text, None)
    match = re.search(r"(\w+)\s*(\[[^\]]*\])*\s*$", text)
    name = match.group(1) if match else ""
    bare = (
        re.sub(r"\b(const|struct|enum|unsigned|long|int|short|char|signed)\b", "", text)
        .replace("*", "")
        .split()
    )
    is_type = len(bare) == 1 and bare[0].endswith("_t") and name == bare[0]
    if not match or len(text.replace("*", " ").split()) == 1 or name in _PLAIN or is_type:
        name = f"a{index}_"
        text = f"{text} {name}"
    return Parameter(text, name)


def generate(library: Library, preprocessed: str, defined: Iterable[str], imported: Iterable[str]) -> str:
    """Return C source for the functions of a library that its stand-in does not define.

    Functions in `defined` are not generated. Functions in `imported` are defined even if the headers have no
    prototype for them.
    """
    prototypes, handles = parse_prototypes(preprocessed, library.prefix)
    done = set(defined)
    lines = ["#define _GNU_SOURCE", "#include <stddef.h>", '#include "core.h"']
    lines += [f"#include <{header}>" for header in library.headers]
    if library.forwards:
        lines.append("void *emu_real_cudnn(const char *);")
    for prototype in prototypes:
        if prototype.name not in done:
            done.add(prototype.name)
            lines.append(_definition(prototype, library, handles))
    for name in sorted(set(imported) - done):
        lines.append(f"int {name}(void) {{ LOG(); return {library.answer}; }}")
    return "\n".join(lines) + "\n"


def _definition(prototype: Prototype, library: Library, handles: set[str]) -> str:
    names = [one.name for one in prototype.parameters]
    takes_handle = any("cudnnHandle_t" in one.text for one in prototype.parameters)
    if library.forwards and not takes_handle and None not in names:
        passed = ", ".join(name for name in names if name)
        declare = f"static typeof(&{prototype.name}) real;"
        find = f'if (!real) real = (typeof(real))emu_real_cudnn("{prototype.name}");'
        return f"{prototype.head} {{ {declare} {find} return real({passed}); }}"
    body = " ".join(_outputs(prototype, library, handles))
    return f"{prototype.head} {{ LOG(); {body} return {_value(prototype.result, library.answer)}; }}"


def _outputs(prototype: Prototype, library: Library, handles: set[str]) -> list[str]:
    written = []
    for one in prototype.parameters:
        if one.name is None or not one.is_output or not one.base:
            continue
        if one.base in handles:
            if _MAKES.search(prototype.name):
                written.append(f"if ({one.name}) *{one.name} = emu_handle();")
        elif _READS.search(prototype.name) and one.base not in _OPAQUE and library.answer == "0":
            written.append(f"if ({one.name}) __builtin_memset({one.name}, 0, sizeof *{one.name});")
        elif one.name == "info" and re.match(r"cublas.(gels|geqrf|getrs)Batched", prototype.name):
            written.append("*info = 0;")  # in host memory, unlike `info` of other functions
    return written


def _value(result: str, answer: str) -> str:
    if "*" in result:
        return '"emulated"' if "char" in result else "NULL"
    if result == "void":
        return ""
    if result.startswith("struct "):
        return f"({result}){{0}}"
    return "0" if result in _NUMBERS else answer
