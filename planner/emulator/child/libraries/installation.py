"""Find torch's CUDA build and the NVIDIA packages installed with it, without importing them."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .tools import EmulatorError, run_tool

# The libraries that have a stand-in, by the beginning of their file name.
REPLACED = (
    "libcudart",
    "libcublasLt",
    "libcublas",
    "libcusparse",
    "libcusolver",
    "libcufft",
    "libnccl",
    "libcudnn",
)


FIRST_CUDNN = (9, 8)  # the first that takes a description of a GPU (cuDNN's release notes)


@dataclass(frozen=True)
class Installation:
    """The CUDA build of torch in one environment, with its NVIDIA headers and libraries."""

    torch: Path  # the package's folder
    includes: tuple[Path, ...]  # folders of headers
    crt: Path | None  # a folder that has crt/host_defines.h
    sonames: dict[str, str]  # `libcudart` -> `libcudart.so.13`
    cudnn: Path  # the installed libcudnn.so.9

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Return the paths of the compiled libraries of torch and torchvision.

        The stand-ins define the symbols that these libraries import.
        """
        packages = self.torch.parent
        return (
            *sorted((self.torch / "lib").glob("*.so*")),
            *sorted((packages / "torchvision").glob("*.so")),
            *sorted((packages / "torchvision.libs").glob("*.so*")),
        )

    def key(self) -> str:
        """Return a digest of torch's path and of the versions of the packages of torch, Triton and NVIDIA."""
        names = sorted(
            path.name
            for folder in {self.torch.parent, *(include.parents[2] for include in self.includes)}
            for path in folder.glob("*.dist-info")
            if re.match(r"(torch|torchvision|triton|nvidia_|nvidia-)", path.name)
        )
        return hashlib.sha256("\n".join([str(self.torch), *names]).encode()).hexdigest()[:16]


def find_installation(torch: Path) -> Installation:
    """Return the `Installation` of the torch package in a folder, with its NVIDIA packages.

    Raises EmulatorError for a build without CUDA, if headers or libraries are not where pip puts them, and if
    cuDNN is older than 9.8.
    """
    version = _version(torch)
    library = torch / "lib" / "libtorch_cuda.so"
    if not library.is_file():
        raise EmulatorError(
            f"torch {version} in {torch} is built without CUDA; run the command in an environment that has "
            "the CUDA build, as on a machine with a GPU"
        )
    roots = [folder for folder in _nvidia_folders(torch) if folder.is_dir()]
    includes = tuple(path for root in roots for path in sorted(root.glob("*/include")))
    if not any((folder / "cuda_runtime_api.h").is_file() for folder in includes):
        raise EmulatorError(
            f"torch {version}: the headers of CUDA are not next to it; install torch with pip, whose "
            "packages bring them"
        )
    cudnn = next((path for root in roots for path in sorted(root.glob("cudnn/lib/libcudnn.so.9"))), None)
    if cudnn is None:
        raise EmulatorError(f"torch {version}: libcudnn.so.9 is not next to it; cuDNN 9 is needed")
    _check_cudnn(version, cudnn.parent.with_name("include") / "cudnn_version.h")
    crt = next((f for f in (*includes, torch.parent / "triton/backends/nvidia/include") if _has_crt(f)), None)
    return Installation(torch, includes, crt, _sonames(library), cudnn)


def _check_cudnn(torch_version: str, header: Path) -> None:
    """Raise EmulatorError if cuDNN is older than `FIRST_CUDNN`, or its version is not found.

    An old cuDNN does not answer for a GPU that is only described.
    """
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    numbers = [re.search(rf"#define CUDNN_{name} (\d+)", text) for name in ("MAJOR", "MINOR", "PATCHLEVEL")]
    version = tuple(int(number.group(1)) for number in numbers if number)
    if version < FIRST_CUDNN:
        cuda = re.search(r"\+(cu\d\d)", torch_version)
        package = f"nvidia-cudnn-{cuda.group(1) if cuda else 'cu12'}"
        name = ".".join(map(str, version)) or "of an unknown version"
        raise EmulatorError(
            f"torch {torch_version}: its cuDNN {name} does not answer for a GPU that is only described; put "
            f"a newer one in its place: pip install '{package}>={'.'.join(map(str, FIRST_CUDNN))}'"
        )


def _has_crt(folder: Path) -> bool:
    return (folder / "crt" / "host_defines.h").is_file()


def _nvidia_folders(torch: Path) -> list[Path]:
    entries = [torch.parent, *(Path(entry) for entry in sys.path if entry)]
    return list(dict.fromkeys(entry / "nvidia" for entry in entries))


def _version(torch: Path) -> str:
    match = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text(encoding="utf-8"))
    return match.group(1) if match else "of an unknown version"


def _sonames(library: Path) -> dict[str, str]:
    """Return the file names of the libraries in `REPLACED` to which torch links, keyed by prefix."""
    askers = [
        library,
        library.with_name("libc10_cuda.so"),
        *sorted(library.parent.glob("libtorch_cuda_*.so")),
    ]
    text = run_tool(["readelf", "-d", "-W", *map(str, askers)])
    needed = {name.split(".so")[0]: name for name in re.findall(r"\(NEEDED\).*\[([^\]]+)\]", text)}
    return {prefix: needed[prefix] for prefix in REPLACED if prefix in needed}
