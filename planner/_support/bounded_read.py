"""Read files that somebody else may have written: only regular files, and only up to a size limit.

A device has no end, a pipe that nobody writes to never answers, and a sparse file of a terabyte takes no
disk. Every data file that an option names is read through this module.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

MIB = 2**20
LARGEST_CODE_BYTES = 16 * MIB  # size limit of a file that defines a model, or of JSON that describes a model


@contextmanager
def open_regular(path: Path, most_bytes: int) -> Iterator[BufferedReader]:
    """Open a regular file of at most `most_bytes` for reading. Raises OSError for any other file."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))
        yield file


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`. Raises OSError for any other file."""
    with open_regular(path, most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
        while size < len(content) <= most_bytes:  # it has grown, or is in /proc, where sizes are 0
            if not (more := file.read(MIB)):
                break
            content += more
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))
    return content


def read_text(path: Path, most_bytes: int, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file of at most `most_bytes`, with all line ends converted to `\\n`.

    Raises OSError or UnicodeDecodeError.
    """
    text = read_bytes(path, most_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB:,} MiB" if size_bytes >= MIB else f"{size_bytes:,} bytes"
