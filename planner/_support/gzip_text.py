"""Text packed for a file: gzip without the time in it, unpacked within a bound."""

import zlib
from pathlib import Path

from planner._support.bounded_read import read_bytes

_GZIP = 31  # zlib's wbits for gzip with the largest window


def pack(text: str) -> bytes:
    """Return the text compressed; equal texts give equal bytes, unlike gzip's default."""
    return zlib.compress(text.encode(), 9, wbits=_GZIP)


def read_packed(path: Path, most_bytes: int) -> bytes:
    """Return the content of a packed file; neither side may exceed `most_bytes`.

    Raises OSError where the file cannot be read, ValueError or zlib.error where it is not one packed text.
    """
    packed = read_bytes(path, most_bytes)
    decompressor = zlib.decompressobj(wbits=_GZIP)
    content = decompressor.decompress(packed, most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it holds more than {most_bytes} bytes")
    if not decompressor.eof:
        raise ValueError("it is cut short")
    if decompressor.unused_data:
        raise ValueError("something stands behind its end")
    return content
