"""Let a planned script save checkpoints and change files, and leave the files of the user as they are.

A planned script has no values to save, and it may save to the path of a real checkpoint, directly or by
another file that it renames or copies, and delete old ones. A file is of the user if it was there before the
capture. What `torch.save`, safetensors, os and shutil would write to it is written to a temporary folder, and
read from there; it is not renamed or deleted. Checkpoints that were not there before are deleted when the
capture ends, since a later training run must not load them. What a script writes to files that it opens
itself is written as in training.

A file of safetensors gets its header, and zeros that take no space on disk. Its format is that of
https://huggingface.co/docs/safetensors: the header's length in eight bytes, the header as JSON, the data.
"""

import functools
import importlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.callers import is_of_torch
from planner.capture.cuda.devices.names import names_gpu
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.threads import caller_frame

_Path = str | os.PathLike[str]
_OPENED: tuple[int, ...] = ()  # in place of the identity of a file that the script has opened itself


class SavedFiles:
    """The checkpoints that a capture has written, until they are deleted."""

    def __init__(self) -> None:
        self._start_ns = time.time_ns()
        with suppress(OSError), TemporaryFile() as file:  # the clock of files is behind Python's
            self._start_ns = os.fstat(file.fileno()).st_ctime_ns
        self._made: dict[str, tuple[int, ...]] = {}  # by path: the identity of a checkpoint when written
        self._copies: dict[str, str] = {}  # by the path of a file of the user: the file read in its place
        self._folder: TemporaryDirectory[str] | None = None
        self._count = 0  # of the files in the folder

    @contextmanager
    def writing(self, target: Any) -> Iterator[Any]:
        """Yield the path to write in place of the path `target`, or `target` itself if it is an open file."""
        if not isinstance(target, str | os.PathLike):
            yield target
            path = _real(getattr(target, "name", ""))
            if path:  # it may have held something before, so that it is not deleted
                self._made[path] = _OPENED
            return
        path = _real(target)
        if self._is_foreign(path):
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
        return self._copies.get(_real(source), source)

    def rename(self, plain: Callable[..., Any], source: Any, target: Any) -> None:
        """Rename a file or a folder by `plain`, unless a file of the user is renamed or replaced."""
        old, new = _unresolved(source), _unresolved(target)
        if Path(old).is_dir() and not Path(old).is_symlink():
            if not self._holds_files_of_user(old):
                plain(source, target)
                self._follow(old, new)
        elif old in self._copies:
            self._put(self._copies.pop(old), new)
            if not self._is_of_user(old):
                Path(old).unlink(missing_ok=True)
        elif self._is_of_user(old):
            self._put(old, new)
        elif self._is_of_user(new) or (old in self._made and self._is_foreign(new)):
            shutil.move(old, self._in_place_of(new))
            self._made.pop(old, None)
        else:
            plain(source, target)
            self._copies.pop(new, None)
            identity = self._made.pop(old, None)
            if identity is not None:
                self._made[new] = identity

    def copy(self, plain: Callable[..., Any], source: Any, target: Any) -> Any:
        """Copy or link a file by `plain`, unless a file of the user is replaced or a checkpoint is copied."""
        old, new = _real(source), _real(target)
        if old in self._copies or old in self._made or self._is_of_user(new):
            self._put(self._copies.get(old, old), new)
            return target
        self._copies.pop(new, None)
        return plain(source, target)

    def remove(self, plain: Callable[..., None], path: Any) -> None:
        """Delete a file by `plain`, unless it is of the user; what was written in its place is forgotten."""
        real = _unresolved(path)
        self._copies.pop(real, None)
        if not self._is_of_user(real):
            plain(path)
            self._made.pop(real, None)

    def remove_folder(self, plain: Callable[..., None], path: Any) -> None:
        """Delete a folder by `plain`, unless it holds files of the user."""
        if not self._holds_files_of_user(_unresolved(path)):
            plain(path)

    def change(self, plain: Callable[..., None], source: Any, target: Any) -> None:
        """Copy the permissions or times of a file by `plain`, unless the target is a file of the user."""
        real = _real(target)
        if real not in self._copies and not self._is_of_user(real):
            plain(self.to_read(source), target)

    def close(self) -> None:
        """Delete the checkpoints, except files that have changed since."""
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
        """Return whether a file was there before the capture, and has not changed since."""
        try:
            return os.lstat(path).st_ctime_ns < self._start_ns
        except OSError:
            return False

    def _is_foreign(self, path: str) -> bool:
        """Return whether a file exists that is no checkpoint of this capture, or no longer."""
        try:
            return self._made.get(path) != _identity(path)
        except OSError:
            return os.path.lexists(path)

    def _holds_files_of_user(self, folder: str) -> bool:
        return any(
            self._is_of_user(f"{place}/{name}") for place, _, names in os.walk(folder) for name in names
        )

    def _in_place_of(self, path: str) -> str:
        """Return the path of a new file that is read in place of a file of the user."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="planner-")
        self._count += 1
        self._copies[path] = f"{self._folder.name}/{self._count}"
        return self._copies[path]

    def _put(self, source: str, path: str) -> None:
        """Make a path have the content of `source`, or be read as `source` if another file is there."""
        is_of_user = self._is_of_user(source)
        is_kept = is_of_user or (self._folder is not None and source.startswith(self._folder.name))
        if self._is_foreign(path):
            if is_kept:
                self._copies[path] = source
            else:
                _copy(source, self._in_place_of(path))
            return
        self._copies.pop(path, None)
        Path(path).unlink(missing_ok=True)  # it may be a link to a file of the user
        if is_of_user:
            Path(path).symlink_to(source)
        else:
            _copy(source, path)
        self._note(path)

    def _note(self, path: str) -> None:
        """Note that this capture has written a checkpoint, if the file exists."""
        with suppress(OSError):
            self._made[path] = _identity(path)

    def _follow(self, old: str, new: str) -> None:
        """Change the paths of the checkpoints in a folder that was renamed."""
        for path in [one for one in self._made if one.startswith(f"{old}{os.sep}")]:
            self._made[new + path[len(old) :]] = self._made.pop(path)


def replacements(files: Callable[[], SavedFiles | None]) -> Iterator[Replacement]:
    """Yield replacements for functions that write checkpoints, or rename, copy or delete files.

    `files` returns None outside of captures, where functions that were imported in a capture may be called.
    """
    yield torch, "save", _saving(torch.save, files)
    for holder, name, act in (
        (os, "rename", SavedFiles.rename),
        (os, "replace", SavedFiles.rename),
        (os, "link", SavedFiles.copy),
        (shutil, "copyfile", SavedFiles.copy),
        (os, "remove", SavedFiles.remove),
        (os, "unlink", SavedFiles.remove),
        (shutil, "rmtree", SavedFiles.remove_folder),
        (shutil, "copymode", SavedFiles.change),
        (shutil, "copystat", SavedFiles.change),
    ):
        yield holder, name, _guarded(getattr(holder, name), files, act)
    yield torch.UntypedStorage, "data_ptr", _data_ptr(torch.UntypedStorage.data_ptr)
    if find_spec("safetensors") is not None:
        library: Any = importlib.import_module("safetensors.torch")
        opened = _opening(library.safe_open, files)
        yield library, "safe_open", opened
        yield importlib.import_module("safetensors"), "safe_open", opened
        yield library, "serialize_file", _serializing(library.serialize_file, files)
        yield library, "_is_complete", _is_complete


def loading(plain: Callable[..., Any], files: Callable[[], SavedFiles | None]) -> Callable[..., Any]:
    """Return a version of `torch.load` that reads the file written in place of a file of the user."""

    @functools.wraps(plain)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        saved = files()
        return plain(f if saved is None else saved.to_read(f), *args, **kwargs)

    return load


def _saving(plain: Callable[..., None], files: Callable[[], SavedFiles | None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        saved = files()
        if saved is None:
            plain(obj, f, *args, **kwargs)
            return
        with saved.writing(f) as target:
            plain(obj, target, *args, **kwargs)

    return save


def _guarded(
    plain: Callable[..., Any], files: Callable[[], SavedFiles | None], act: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a version of a function of os or shutil that calls a method of `SavedFiles` for paths.

    torch's own calls, and calls by the descriptor of a folder, are left alone.
    """

    @functools.wraps(plain)
    def call(*paths: Any, **given: Any) -> Any:
        saved = files()
        names = [given.pop(name) for name in ("src", "dst", "path") if name in given]
        both = (*paths, *names)
        is_left = any(name.endswith("dir_fd") and given[name] is not None for name in given)
        is_left = is_left or not all(isinstance(one, str | os.PathLike) for one in both[:2])
        if saved is None or is_left or is_of_torch(caller_frame()):
            return plain(*both, **given)
        most = 2 if act in (SavedFiles.rename, SavedFiles.copy, SavedFiles.change) else 1
        return act(saved, lambda *places: plain(*places, *both[most:], **given), *both[:most])

    return call


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


def _serializing(plain: Callable[..., None], files: Callable[[], SavedFiles | None]) -> Callable[..., None]:
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


def _opening(plain: Callable[..., Any], files: Callable[[], SavedFiles | None]) -> Callable[..., Any]:
    """Return `safe_open` that reads to the CPU, and moves tensors to the GPU if they are read to it.

    The library itself would read into the memory of a pinned tensor.
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


def _copy(source: str, target: str) -> None:
    """Copy a file without the holes in it, which zeros of safetensors are."""
    with Path(source).open("rb") as read, Path(target).open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        at = 0
        while at < size:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:  # no data is left
                break
            hole = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            read.seek(at)
            write.seek(at)
            write.write(read.read(hole - at))
            at = hole
        write.truncate(size)


def _real(path: Any) -> str:
    return os.path.realpath(path) if path and isinstance(path, str | os.PathLike) else ""


def _unresolved(path: _Path) -> str:
    """Return the real path of a file's folder with the file's own name, which may be a link's."""
    return os.path.realpath(Path(path).parent) + os.sep + Path(path).name


def _identity(path: str) -> tuple[int, ...]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size
