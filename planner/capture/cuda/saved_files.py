"""Save checkpoints of tensors without values, and leave the user's files as they are.

A planned script may save to a path of a real checkpoint, directly, or by a rename or a copy of another file.
`torch.save` and safetensors never write a file that exists: a file in a temporary folder is written and read
in its place. Files that they make are deleted when the capture ends, since a later training run must not load
them. Files that a script opens itself are written as in training.

A file of safetensors gets its header, and zeros that take no space on disk. Its format is that of
https://huggingface.co/docs/safetensors: the header's length in eight bytes, the header as JSON, the data.
"""

import functools
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
        self._copies: dict[str, str] = {}  # by the path of a file of the user: the file written in its place
        self._folder: TemporaryDirectory[str] | None = None
        self._count = 0  # of the files in the folder

    @contextmanager
    def writing(self, target: Any) -> Iterator[Any]:
        """Yield the path to write in place of the path `target`, or `target` itself if it is an open file."""
        if not isinstance(target, str | os.PathLike):
            yield target
            return
        path = os.path.realpath(target)
        if self._is_of_user(path):
            yield self._in_place_of(path)
            return
        self._copies.pop(path, None)
        try:
            yield target
        finally:
            self._note(path)

    def to_read(self, source: Any) -> Any:
        """Return the path to read in place of the path `source`, or `source` itself if it is an open file."""
        if not self._copies or not isinstance(source, str | os.PathLike):
            return source
        return self._copies.get(os.path.realpath(source), source)

    def transfer(self, plain: Callable[..., Any], source: Any, target: Any, keeps_source: bool) -> Any:
        """Rename or copy a file, or rename a folder; a written file replaces no file of the user.

        `plain` is the function that the script called. A file that was written in place of a file of the user
        counts as that file.
        """
        if not all(isinstance(one, str | os.PathLike) for one in (source, target)):
            return plain(source, target)
        old, new = os.path.realpath(source), os.path.realpath(target)
        written = self._copies.get(old)
        if written is None and (old not in self._made or self._is_of_user(old)):
            result = plain(source, target)
            self._copies.pop(new, None)
            if not keeps_source:
                self._follow(old, new)
            return result
        if self._is_of_user(new):
            if written is None:
                written = self._in_place_of(new)
                (shutil.copyfile if keeps_source else shutil.move)(old, written)
            self._copies[new] = written
        else:
            (plain if written is None else shutil.copyfile)(written or old, new)
            self._copies.pop(new, None)
            self._note(new)
        if not keeps_source:
            self._copies.pop(old, None)
            self._made.pop(old, None)
        return target

    def remove(self, plain: Callable[..., None], path: Any, **given: Any) -> None:
        """Delete a file, unless a file was written in its place, which is forgotten instead."""
        is_path = isinstance(path, str | os.PathLike) and not given
        if not is_path or self._copies.pop(os.path.realpath(path), None) is None:
            plain(path, **given)

    def close(self) -> None:
        """Delete the written files, except files that have changed since."""
        for path, identity in self._made.items():
            with suppress(OSError):  # the script may have deleted it
                if _identity(path) == identity:
                    Path(path).unlink()
        self._made.clear()
        self._copies.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _is_of_user(self, path: str) -> bool:
        """Return whether a path is of a file that exists and is not as this capture has written it."""
        try:
            return self._made.get(path) != _identity(path)
        except OSError:
            return False

    def _in_place_of(self, path: str) -> str:
        """Return the path of a new file that is written in place of a file of the user."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="planner-")
        self._count += 1
        self._copies[path] = f"{self._folder.name}/{self._count}"
        return self._copies[path]

    def _note(self, path: str) -> None:
        """Note that this capture has written a file, if the file exists."""
        with suppress(OSError):
            self._made[path] = _identity(path)

    def _follow(self, old: str, new: str) -> None:
        """Change the paths of written files in a folder that was renamed."""
        for paths in (self._made, self._copies):
            for path in [one for one in paths if one.startswith(f"{old}{os.sep}")]:
                paths[new + path[len(old) :]] = paths.pop(path)  # type: ignore[assignment]


def replacements(files: Callable[[], SavedFiles]) -> Iterator[Replacement]:
    """Yield replacements for functions that write checkpoints, or rename, copy or delete files."""
    yield torch, "save", _saving(torch.save, files)
    yield shutil, "copyfile", _transferring(shutil.copyfile, files, keeps_source=True)
    for name in ("rename", "replace"):
        yield os, name, _transferring(getattr(os, name), files, keeps_source=False)
    for name in ("remove", "unlink"):
        yield os, name, _removing(getattr(os, name), files)
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


def loading(plain: Callable[..., Any], files: Callable[[], SavedFiles]) -> Callable[..., Any]:
    """Return a version of `torch.load` that reads the file written in place of a file of the user."""

    @functools.wraps(plain)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(files().to_read(f), *args, **kwargs)

    return load


def _transferring(
    plain: Callable[..., Any], files: Callable[[], SavedFiles], keeps_source: bool
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def transfer(src: Any, dst: Any, **given: Any) -> Any:
        if given.keys() & {"src_dir_fd", "dst_dir_fd"}:
            return plain(src, dst, **given)
        return files().transfer(functools.partial(plain, **given), src, dst, keeps_source)

    return transfer


def _removing(plain: Callable[..., None], files: Callable[[], SavedFiles]) -> Callable[..., None]:
    @functools.wraps(plain)
    def remove(path: Any, **given: Any) -> None:
        files().remove(plain, path, **given)

    return remove


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
