"""The files of a cuDNN: where an installed one lies, and what tells one library from another."""

import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from msgspec import json

from planner.errors import UsageError

LIBRARY = "libcudnn.so.9"
_BESIDE = ("libnvrtc*.so.*", "libcublas*.so.*")  # of NVIDIA's other packages
_OWN = ("client.py", "worker.py")  # how it is queried
_VARIABLES = ("CUDNN", "CUBLAS", "NVIDIA_TF32", "PLANNER_EMULATED", "LD_")  # read by it or by the linker


def installed_folder() -> Path:
    """Return the folder of the first package on Python's path that brings cuDNN. Raises UsageError."""
    for entry in sys.path:
        folder = Path(entry) / "nvidia" / "cudnn" / "lib"
        if (folder / LIBRARY).is_file():
            return folder
    raise UsageError(
        "--cudnn installed: no package brings cuDNN; install nvidia-cudnn-cu12 or torch for CUDA, or name "
        f"the folder of {LIBRARY}"
    )


def digest_library(folder: Path, cublaslt: Path, gpu: str) -> bytes:
    """Return a digest of what decides the answers beside GPU and convolution.

    It holds paths, sizes and times of the library's files, of those that it loads and of the stand-ins of
    cuBLASLt and the driver; the environment; and the planner's own code. The library has half a gigabyte, too
    much to read each time.
    """
    files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in _files(folder, cublaslt)]
    variables = sorted(one for one in os.environ.items() if one[0].startswith(_VARIABLES))
    code = [Path(__file__).with_name(name).read_bytes() for name in _OWN]
    return sha256(json.encode([files, variables, gpu, [sha256(one).hexdigest() for one in code]])).digest()


def _files(folder: Path, cublaslt: Path) -> Iterator[tuple[Path, os.stat_result]]:
    folder = folder.resolve()
    found = [*folder.glob("libcudnn*.so*"), *cublaslt.resolve().parent.glob("*.so*")]
    for pattern in _BESIDE:
        found += folder.parent.parent.glob(f"*/lib/{pattern}")
    for path in sorted(found):
        if path.is_file():  # no link whose target is gone
            yield path, path.stat()
