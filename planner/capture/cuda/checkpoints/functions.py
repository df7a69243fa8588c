"""Replace functions that save, load, open, rename, copy and delete files.

The functions are in torch, safetensors, io, os and shutil.
"""

import builtins
import functools
import importlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from planner.capture.cuda.callers import is_of_torch
from planner.capture.cuda.checkpoints import safetensors
from planner.capture.cuda.checkpoints.saved_files import SavedFiles
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.threads import caller_frame


def replacements(files: Callable[[], SavedFiles | None]) -> Iterator[Replacement]:
    """Yield replacements for functions that save checkpoints, or open, rename, copy or delete files.

    `UntypedStorage.data_ptr` is replaced too. `files` returns None outside of captures, where functions that
    were imported in a capture may be called.
    """
    yield torch, "save", _saving(torch.save, files)
    opening = _opening(io.open, files)
    yield builtins, "open", opening
    yield io, "open", opening
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
        opened = safetensors.opening(library.safe_open, files)
        yield library, "safe_open", opened
        yield importlib.import_module("safetensors"), "safe_open", opened
        yield library, "serialize_file", safetensors.serializing(library.serialize_file, files)
        yield library, "_is_complete", safetensors.is_complete


def loading(plain: Callable[..., Any], files: Callable[[], SavedFiles | None]) -> Callable[..., Any]:
    """Return a version of `torch.load` that reads the file written in place of the user's file, if any."""

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


def _opening(plain: Callable[..., Any], files: Callable[[], SavedFiles | None]) -> Callable[..., Any]:
    """Return a version of `open` that opens a temporary file if it would otherwise empty a user's file.

    Later calls for the user's file open the temporary file too.
    """

    @functools.wraps(plain)
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        saved = files()
        if saved is None:
            return plain(file, mode, *args, **kwargs)
        opened = plain(saved.to_open(file, mode), mode, *args, **kwargs)
        saved.note_opened(file, mode)
        return opened

    return open_file


def _guarded(
    plain: Callable[..., Any], files: Callable[[], SavedFiles | None], act: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a version of an os or shutil function that calls `act`, which leaves the user's files unchanged.

    It passes paths to `act`, a method of `SavedFiles`. torch's own calls, and calls with the descriptor of a
    folder, are left alone.
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
    """Return a version of `data_ptr` that gives code outside torch a distinct number for each meta storage.

    torch's own code still gets 0. Libraries use the number to find tensors that share a storage.
    """

    @functools.wraps(plain)
    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta" or is_of_torch(caller_frame()):
            return plain(storage)
        return int(storage._cdata)

    return data_ptr
