"""Locate the compiled stand-in libraries, and open cuDNN with the stand-in of cuBLASLt."""

from pathlib import Path

from planner._support.user_dirs import cache_dir
from planner.emulator.child.libraries.build import build_cublaslt
from planner.emulator.child.libraries.tools import EmulatorError
from planner.emulator.gpu import describe_gpu
from planner.errors import UsageError
from planner.hardware import generic_device
from planner.hardware.cudnn import Cudnn, open_cudnn

SOME_MIB = 24_000  # of the GPU that the driver in cuDNN's process has; each question describes its own


def compiled_dir() -> Path:
    """Return the cache folder of the compiled libraries. Raises UsageError if no home folder is known."""
    folder = cache_dir()
    if folder is None:
        raise UsageError("no home folder is known for the compiled libraries: set XDG_CACHE_HOME")
    return folder / "emulator"


def open_cudnn_with_cublaslt(where: str, cache_folder: Path | None = None) -> Cudnn:
    """Return a client of cuDNN, with a stand-in of cuBLASLt if the stand-in can be compiled."""
    return open_cudnn(where, cublaslt_for, describe_gpu(generic_device(SOME_MIB)), cache_folder)


def cublaslt_for(cudnn: Path) -> Path | str:
    """Return the path of the compiled stand-in of cuBLASLt, or the reason if there is none.

    The stand-in is compiled if it is not in the cache. `cudnn` is the folder of libcudnn.so.9 in NVIDIA's
    packages. When cuDNN finalizes an engine that is built on cuBLASLt, it runs the heuristic of cuBLASLt,
    which needs a GPU, and drops the engine if there is no GPU.
    """
    packages = cudnn.parent.parent
    libraries = sorted(packages.glob("*/lib/libcublasLt.so.*[0-9]"))
    if not libraries:
        return "there is no cuBLASLt next to it"
    includes = sorted(packages.glob("*/include"))
    if not any((folder / "cublasLt.h").is_file() for folder in includes):
        return "the headers of cuBLASLt are not next to it"
    try:
        return build_cublaslt(includes, libraries[-1].name, compiled_dir())
    except (EmulatorError, UsageError) as error:
        return str(error)
