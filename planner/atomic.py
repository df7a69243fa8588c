"""Writing a file whole or not at all."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from planner.errors import DataFileError


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` in place by a rename, so that nobody ever reads half of it; makes the folder.

    Raises DataFileError where the file cannot be written.
    """
    partial = path.parent / f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise DataFileError(
            f"{path}: cannot be written: {error.strerror or error}; check the folder"
        ) from error
    finally:
        with suppress(OSError):  # gone by the replacement, or could not even be made
            partial.unlink()
