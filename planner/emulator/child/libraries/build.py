"""Compile the stand-in libraries for one installation of torch.

They are compiled once, into the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .installation import Installation
from .private import is_sealed, locked, open_private, seal
from .prototypes import Library, generate
from .tools import EmulatorError, run_tool

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
CORE = "libplanner_emulated_gpu.so"
CORE_SOURCES = ("gpu.c", "shared_memory.c", "memory.c", "contents.c", "handles.c")
_BUILDERS = (
    "build.py",
    "installation.py",
    "private.py",
    "prototypes.py",
    "tools.py",
)  # decide what is compiled
_FLAGS = ("-D__CUDA_FP8_H__", "-O2", "-fPIC", "-std=gnu2x", "-w")


@dataclass(frozen=True)
class _StandIn:
    """One stand-in library: its name, its source files, and the functions to generate."""

    soname: str  # a key of `Installation.sonames`, or a name as it is
    sources: tuple[str, ...]
    generated: Library | None
    imports: str = ""  # regular expression for the symbols that torch imports from it, as `name@version`


_NOT_SUPPORTED = "801"  # cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED
_STAND_INS = (
    _StandIn(
        "libcudart",
        ("cudart.c", "cudart_kernels.c", "cudart_graphs.c"),
        Library("(?:cuda|__cuda)", _NOT_SUPPORTED, ("cuda_runtime_api.h",)),
        "@libcudart",
    ),
    _StandIn(
        "libcuda.so.1",
        ("driver.c", "driver_memory.c", "driver_kernels.c"),
        Library("cu[A-Z]", _NOT_SUPPORTED, ("cuda.h",)),
    ),
    _StandIn("libcublasLt", ("cublaslt.c",), Library("cublasLt", "0", ("cublasLt.h",)), "@libcublasLt"),
    _StandIn("libcublas", ("cublas.c",), Library("cublas", "0", ("cublas_v2.h",)), r"@libcublas\.so"),
    _StandIn("libcusparse", (), Library("cusparse", "0", ("cusparse.h",)), r"@libcusparse\.so"),
    _StandIn("libcusolver", (), Library("cusolver", "0", ("cusolverDn.h",)), r"@libcusolver\.so"),
    _StandIn("libcufft", (), Library("cufft", "0", ("cufftXt.h",)), r"@libcufft\.so"),
    _StandIn("libnccl", ("nccl.c",), Library("p?nccl", "0", ("nccl.h",)), "^nccl"),
    _StandIn(
        "libcudnn",
        ("cudnn.c", "cudnn_layers.c"),
        Library("cudnn", "0", ("cudnn.h",), forwards=True),
        r"@libcudnn\.so",
    ),
    _StandIn("libnvidia-ml.so.1", ("nvml.c", "nvml_readings.c"), None),
)


def load_order(installation: Installation) -> list[str]:
    """Return the file names of the libraries in the order in which they can be loaded."""
    first = ["libcuda.so.1", "libnvidia-ml.so.1"]
    names = [installation.sonames.get(one.soname, one.soname) for one in _present(installation)]
    return [CORE, *first, *(name for name in names if name not in first)]


def _present(installation: Installation) -> list[_StandIn]:
    return [one for one in _STAND_INS if ".so" in one.soname or one.soname in installation.sonames]


def build(installation: Installation, cache: Path) -> Path:
    """Compile the stand-in libraries unless they are cached, and return their folder.

    Raises EmulatorError if the compiler is missing or fails, or the cache cannot be written.
    """

    def compile_all(work: Path, out: Path) -> None:
        flags = _flags(installation.includes, installation.crt)
        imports = _imports(installation)
        _compile_core(flags, out)

        def compile_one(one: _StandIn) -> None:
            name = installation.sonames.get(one.soname, one.soname)
            _compile(one, name, flags, imports, work / one.soname, out)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, _present(installation)))
        (out / "libcuda.so").symlink_to("libcuda.so.1")  # Triton's launchers are linked with -lcuda

    return _compiled(cache, installation.key(), "for this version of torch, once", compile_all)


def build_cublaslt(includes: Sequence[Path], soname: str, cache: Path) -> Path:
    """Compile the stand-in of cuBLASLt unless it is cached, and return its path.

    It is for a process that queries cuDNN. The stand-in of the driver is in the same folder: without a driver
    cuDNN drops the engines that it compiles at run time. `includes` are folders of headers, `soname` is the
    file name under which cuDNN looks for cuBLASLt. Raises EmulatorError as `build` does.
    """
    names = {"libcublasLt": soname, "libcuda.so.1": "libcuda.so.1"}

    def compile_it(work: Path, out: Path) -> None:
        flags = _flags(includes, None)
        _compile_core(flags, out)
        for one in _STAND_INS:
            if one.soname in names:
                _compile(one, names[one.soname], flags, [], work / one.soname, out)

    key = "\n".join([soname, *map(str, includes)])
    return _compiled(cache, key, "of cuBLASLt for cuDNN, once", compile_it) / soname


def _compiled(cache: Path, key: str, purpose: str, compile_into: Callable[[Path, Path], None]) -> Path:
    """Return the cached folder for a key and the current sources, or create it with `compile_into`.

    A cached folder whose files were changed is replaced. `purpose` completes the message that is printed
    before compiling. Raises EmulatorError if the cache cannot be written.
    """
    folder = cache / _digest(key)
    try:
        open_private(cache)
        if is_sealed(folder):
            return folder
        with locked(cache / "lock"):
            if is_sealed(folder):
                return folder
            print(f"planner: compiling the stand-in libraries {purpose}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=cache) as work:
                out = Path(work) / "out"
                out.mkdir(mode=0o700)
                compile_into(Path(work), out)
                seal(out)
                shutil.rmtree(folder, ignore_errors=True)
                out.rename(folder)
    except OSError as error:
        raise EmulatorError(
            f"{cache}: the compiled libraries cannot be cached there: {error.strerror}; mend that, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _digest(key: str) -> str:
    digest = hashlib.sha256(f"{key}\n{platform.machine()}".encode())  # machines may share a home
    for path in (*sorted(SOURCES.rglob("*.[ch]")), *map(Path(__file__).with_name, _BUILDERS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _flags(includes: Sequence[Path], crt: Path | None) -> list[str]:
    flags = [*_FLAGS, f"-I{SOURCES}", *(f"-I{folder}" for folder in includes)]
    return flags + [
        word for path in (crt, SOURCES / "fallback") if path for word in ("-idirafter", str(path))
    ]


def _compile_core(flags: list[str], out: Path) -> None:
    sources = [str(SOURCES / name) for name in CORE_SOURCES]
    soname = f"-Wl,-soname,{CORE}"
    run_tool(["gcc", *flags, "-shared", *sources, soname, "-o", str(out / CORE), "-lpthread"])


def _imports(installation: Installation) -> list[str]:
    """Return the symbols that torch's libraries import, as `name@version` or `name`."""
    rows = run_tool(["readelf", "--dyn-syms", "-W", *map(str, installation.libraries)]).splitlines()
    fields = (row.split() for row in rows)
    return sorted({row[7].replace("@@", "@") for row in fields if len(row) > 7 and row[6] == "UND"})


def _compile(one: _StandIn, name: str, flags: list[str], imports: list[str], work: Path, out: Path) -> None:
    work.mkdir()
    objects = []
    for source in one.sources:
        objects.append(str(work / source.replace(".c", ".o")))
        run_tool(["gcc", *flags, "-c", str(SOURCES / source), "-o", objects[-1]])
    defined = _symbols(objects)
    imported = [text for text in imports if one.imports and re.search(one.imports, text)]
    if one.generated is not None:
        includes = "".join(f"#include <{header}>\n" for header in one.generated.headers)
        preprocessed = run_tool(["gcc", *flags, "-E", "-P", "-xc", "-"], includes)
        names = [text.partition("@")[0] for text in imported]
        rest = work / "generated.c"
        rest.write_text(generate(one.generated, preprocessed, defined, names), encoding="utf-8")
        objects.append(str(work / "generated.o"))
        run_tool(["gcc", *flags, "-c", str(rest), "-o", objects[-1]])
    versions = sorted({text.partition("@")[2] for text in imported if "@" in text})
    link = [f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
    if versions:
        script = work / "versions"
        script.write_text(f"{versions[0]} {{ global: *; }};", encoding="utf-8")
        link.append(f"-Wl,--version-script={script}")
    if one.soname == "libcuda.so.1":
        link += _plain_names(_symbols(objects))
    target = str(out / name)
    run_tool(["gcc", "-shared", *link, *objects, f"-L{out}", f"-l:{CORE}", "-ldl", "-lpthread", "-o", target])


def _symbols(objects: list[str]) -> set[str]:
    rows = run_tool(["nm", "-g", "--defined-only", *objects]).splitlines() if objects else []
    return {row.split()[2] for row in rows if len(row.split()) == 3}


def _plain_names(names: set[str]) -> list[str]:
    """Return linker options that define driver functions without the version suffixes _v2 and _v3.

    cuDNN looks for the names without suffix.
    """
    versioned = {re.sub(r"_v[23]$", "", name): name for name in sorted(names) if re.search(r"_v[23]$", name)}
    return [f"-Wl,--defsym={plain}={name}" for plain, name in versioned.items() if plain not in names]
