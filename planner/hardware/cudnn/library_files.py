"""Find the files of an installed cuDNN, and compute a digest of them."""

import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from msgspec import json

from planner.errors import UsageError

LIBRARY = "libcudnn.so.9"
_OTHER_LIBRARIES = ("libnvrtc*.so.*", "libcublas*.so.*")  # of NVIDIA's other packages
_OWN = ("client.py", "worker.py")  # the code that queries cuDNN
_VARIABLES = ("CUDNN", "CUBLAS", "NVIDIA_TF32", "PLANNER_EMULATED", "LD_")  # read by cuDNN or by the linker


def installed_folder() -> Path:
    """Return the library folder of the first package on Python's path that has cuDNN.

    Raises UsageError if there is none.
    """
    for entry in sys.path:
        folder = Path(entry) / "nvidia" / "cudnn" / "lib"
        if (folder / LIBRARY).is_file():
            return folder
    raise UsageError(
        "--cudnn installed: no package brings cuDNN; install nvidia-cudnn-cu12 or torch for CUDA, or name "
        f"the folder of {LIBRARY}"
    )


def digest_library(folder: Path, cublaslt: Path, gpu: str) -> bytes:
    """Return a digest of everything that decides cuDNN's answers apart from the query.

    It covers the paths, sizes and times of the library's files, of the files that it loads, and of the
    stand-ins of cuBLASLt and the driver; the environment variables that cuDNN or the linker reads; `gpu`; and
    the planner's code that queries cuDNN. The contents of the library are not read, since they take half a
    gigabyte.
    """
    files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in _files(folder, cublaslt)]
    variables = sorted(one for one in os.environ.items() if one[0].startswith(_VARIABLES))
    code = [Path(__file__).with_name(name).read_bytes() for name in _OWN]
    return sha256(json.encode([files, variables, gpu, [sha256(one).hexdigest() for one in code]])).digest()


def _files(folder: Path, cublaslt: Path) -> Iterator[tuple[Path, os.stat_result]]:
    folder = folder.resolve()
    found = [*folder.glob("libcudnn*.so*"), *cublaslt.resolve().parent.glob("*.so*")]
    for pattern in _OTHER_LIBRARIES:
        found += folder.parent.parent.glob(f"*/lib/{pattern}")
    for path in sorted(found):
        if path.is_file():  # skips links whose target is gone
            yield path, path.stat()
