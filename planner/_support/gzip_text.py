"""Compress text with gzip, reproducibly, and decompress files within a bound on their size."""

import zlib
from pathlib import Path

from planner._support.bounded_read import read_bytes

_GZIP = 31  # zlib's wbits for gzip with the largest window


def pack(text: str) -> bytes:
    """Compress a text with gzip, without a time stamp, so that equal texts give equal bytes."""
    return zlib.compress(text.encode(), 9, wbits=_GZIP)


def read_packed(path: Path, most_bytes: int) -> bytes:
    """Return the decompressed content of a gzip file, if the file and its content fit `most_bytes` each.

    Raises OSError if the file cannot be read or is too large, and ValueError or zlib.error if the content is
    too large or the file is not a single gzip stream.
    """
    packed = read_bytes(path, most_bytes)
    decompressor = zlib.decompressobj(wbits=_GZIP)
    content = decompressor.decompress(packed, most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it holds more than {most_bytes} bytes")
    if not decompressor.eof:
        raise ValueError("it is cut short")
    if decompressor.unused_data:
        raise ValueError("it has data after its end")
    return content
