"""Save checkpoints of tensors without values, and leave the user's files as they are.

A planned script may save to a path of a real checkpoint. A file that exists is never written: a copy in a
temporary folder is written and read instead. Files that a script makes are deleted when the capture ends,
since a later training run must not load them.

A file of safetensors gets its header, and zeros that take no space on disk. Its format is that of
https://huggingface.co/docs/safetensors: the header's length in eight bytes, the header as JSON, the data.
"""

import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.callers import is_of_torch
from planner.capture.cuda.device_names import names_gpu
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.threads import caller_frame

_Path = str | os.PathLike[str]


class SavedFiles:
    """The files that a capture has written, until they are deleted."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, ...]] = {}  # by path: the identity of the file when written
        self._copies: dict[str, str] = {}  # by the path of a file that existed: the path of its copy
        self._folder: TemporaryDirectory[str] | None = None

    @contextmanager
    def writing(self, target: Any) -> Iterator[Any]:
        """Yield the path to write in place of the path `target`, or `target` itself if it is an open file."""
        if not isinstance(target, str | os.PathLike):
            yield target
            return
        path = os.path.realpath(target)
        if path not in self._made and os.path.lexists(path):
            yield self._copy_of(path)
            return
        yield target
        self._made[path] = _identity(path)

    def to_read(self, source: Any) -> Any:
        """Return the path to read in place of the path `source`, or `source` itself if it is an open file."""
        if not self._copies or not isinstance(source, str | os.PathLike):
            return source
        return self._copies.get(os.path.realpath(source), source)

    def move(self, move: Callable[..., None], source: _Path, target: _Path) -> None:
        """Rename a file; a file that the capture has written replaces no file of the user."""
        old, new = os.path.realpath(source), os.path.realpath(target)
        if old not in self._made:
            move(source, target)
        elif new not in self._made and os.path.lexists(new):
            move(source, self._copy_of(new))
            del self._made[old]
        else:
            move(source, target)
            self._made[new] = self._made.pop(old)

    def close(self) -> None:
        """Delete the written files, except files that another process has changed."""
        for path, identity in self._made.items():
            try:
                if _identity(path) == identity:
                    Path(path).unlink()
            except OSError:  # deleted by the script
                continue
        self._made.clear()
        self._copies.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _copy_of(self, path: str) -> str:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="planner-")
        return self._copies.setdefault(path, f"{self._folder.name}/{len(self._copies)}")


def replacements(files: Callable[[], SavedFiles]) -> Iterator[Replacement]:
    """Yield replacements for functions that write, read or rename checkpoints."""
    yield torch, "save", _saving(torch.save, files)
    yield torch, "load", _loading(torch.load, files)
    for name in ("rename", "replace"):
        yield os, name, _moving(getattr(os, name), files)
    yield torch.UntypedStorage, "data_ptr", _data_ptr(torch.UntypedStorage.data_ptr)
    if find_spec("safetensors") is not None:
        library: Any = importlib.import_module("safetensors.torch")
        opened = _opening(library.safe_open, files)
        yield library, "safe_open", opened
        yield importlib.import_module("safetensors"), "safe_open", opened
        yield library, "serialize_file", _serializing(library.serialize_file, files)
        yield library, "_is_complete", _is_complete


def _saving(plain: Callable[..., None], files: Callable[[], SavedFiles]) -> Callable[..., None]:
    @functools.wraps(plain)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        with files().writing(f) as target:
            plain(obj, target, *args, **kwargs)

    return save


def _loading(plain: Callable[..., Any], files: Callable[[], SavedFiles]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(files().to_read(f), *args, **kwargs)

    return load


def _moving(plain: Callable[..., None], files: Callable[[], SavedFiles]) -> Callable[..., None]:
    @functools.wraps(plain)
    def move(src: Any, dst: Any, **given: Any) -> None:
        if given or not isinstance(src, str | os.PathLike):
            plain(src, dst, **given)
        else:
            files().move(plain, src, dst)

    return move


def _data_ptr(plain: Callable[[torch.UntypedStorage], int]) -> Callable[[torch.UntypedStorage], int]:
    """Return `data_ptr` that gives each storage on the meta device a number, unless torch asks.

    Libraries find tensors that share a storage by it.
    """

    @functools.wraps(plain)
    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta" or is_of_torch(caller_frame()):
            return plain(storage)
        return int(storage._cdata)

    return data_ptr


def _is_complete(tensor: Tensor) -> bool:
    """Return whether a tensor covers its whole storage."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def _serializing(plain: Callable[..., None], files: Callable[[], SavedFiles]) -> Callable[..., None]:
    @functools.wraps(plain)
    def serialize_file(
        tensor_dict: Mapping[str, Any], filename: _Path, metadata: Mapping[str, str] | None = None
    ) -> None:
        with files().writing(filename) as target:
            if all(spec.data_len or 0 in spec.shape for spec in tensor_dict.values()):
                plain(tensor_dict, target, metadata=metadata)
            else:
                _write_zeros(tensor_dict, target, metadata)

    return serialize_file


def _opening(plain: Callable[..., Any], files: Callable[[], SavedFiles]) -> Callable[..., Any]:
    """Return `safe_open` that reads to the CPU, and moves tensors to the GPU if they are read to it.

    The library itself would read into the memory of a pinned tensor.
    """

    @functools.wraps(plain)
    def safe_open(filename: _Path, framework: str, device: Any = "cpu", **given: Any) -> Any:
        on_gpu = names_gpu(device)
        file = plain(files().to_read(filename), framework, device="cpu" if on_gpu else device, **given)
        return _ReadToGpu(file) if on_gpu else file

    return safe_open


class _ReadToGpu:
    """An open file of safetensors, or a slice of it, whose tensors are moved to the GPU as they are read."""

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
    """Write a file of safetensors with zeros as the data of all tensors."""
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
    """Return the bits of a number, which are in the dtype's name, such as F32, BF16 or F8_E4M3."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 8  # BOOL


def _identity(path: str) -> tuple[int, ...]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
