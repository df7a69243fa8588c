"""Write and read the safetensors files of a planned script.

If tensors have no values, a file gets its header, and zeros that take no space on disk. The format is
described in https://huggingface.co/docs/safetensors: the header's length in eight bytes, the header as JSON,
the data.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from planner.capture.cuda.checkpoints.saved_files import SavedFiles
from planner.capture.cuda.devices.names import names_gpu

_Path = str | os.PathLike[str]


def is_complete(tensor: Tensor) -> bool:
    """Return whether a tensor covers its whole storage."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def serializing(plain: Callable[..., None], files: Callable[[], SavedFiles | None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def serialize_file(
        tensor_dict: Mapping[str, Any], filename: _Path, metadata: Mapping[str, str] | None = None
    ) -> None:
        saved = files()
        if saved is None:
            plain(tensor_dict, filename, metadata=metadata)
            return
        with saved.writing(filename) as target:
            if all(spec.data_len or 0 in spec.shape for spec in tensor_dict.values()):
                plain(tensor_dict, target, metadata=metadata)
            else:
                _write_zeros(tensor_dict, target, metadata)

    return serialize_file


def opening(plain: Callable[..., Any], files: Callable[[], SavedFiles | None]) -> Callable[..., Any]:
    """Return a version of `safe_open` that reads tensors for the GPU into CPU memory, then moves them.

    It opens the file written in place of the user's file, if any. The library itself would read into the
    memory of a pinned tensor. If `files()` is None, the plain `safe_open` is called.
    """

    @functools.wraps(plain)
    def safe_open(filename: _Path, framework: str, device: Any = "cpu", **given: Any) -> Any:
        saved = files()
        if saved is None:
            return plain(filename, framework, device=device, **given)
        on_gpu = names_gpu(device)
        file = plain(saved.to_read(filename), framework, device="cpu" if on_gpu else device, **given)
        return _ReadToGpu(file) if on_gpu else file

    return safe_open


class _ReadToGpu:
    """An open safetensors file, or a slice of it, whose tensors are moved to the GPU when read."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "_ReadToGpu":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __getitem__(self, index: Any) -> Any:
        return self._file[index].to("cuda")

    def get_slice(self, name: str) -> "_ReadToGpu":
        return _ReadToGpu(self._file.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name).to("cuda")  # type: ignore[no-any-return]

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: tensor.to("cuda") for name, tensor in self._file.get_tensors().items()}


def _write_zeros(tensors: Mapping[str, Any], path: _Path, metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file with the header for `tensors`; its data is zeros, which take no disk space."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, spec in tensors.items():
        start, end = end, end + prod(spec.shape) * _bits_of(spec.dtype) // 8
        header[name] = {"dtype": spec.dtype, "shape": [*spec.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _bits_of(dtype: str) -> int:
    """Return the bits per element of a safetensors dtype, from the digits in its name.

    Examples are F32, BF16 and F8_E4M3. A name without digits, such as BOOL, has 8 bits.
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 8  # BOOL
