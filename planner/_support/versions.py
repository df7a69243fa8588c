"""Read the versions of installed distributions without importing them, and format versions of cuDNN."""

import re
import sys
from pathlib import Path


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed.

    The version is in the name of the metadata folder, whose form is fixed (packaging.python.org, recording
    installed projects). For installers with another form importlib.metadata is asked, which takes 20 ms to
    import.
    """
    normal = _normal(distribution)
    for folder in dict.fromkeys(sys.path):
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            if _normal(name) == normal:
                return version
    from importlib.metadata import PackageNotFoundError, version as version_by_metadata

    try:
        return version_by_metadata(distribution)
    except PackageNotFoundError:
        return None


def public_version(version: str | None) -> str | None:
    """Return a version without its local part, or None if `version` is None.

    For example, `2.13.0+cpu` becomes `2.13.0`.
    """
    return None if version is None else version.partition("+")[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def format_cudnn_version(number: int | None) -> str | None:
    """Convert cuDNN's version number to text, or return None if there is no cuDNN.

    `number` is the value of `torch.backends.cudnn.version()`; None and 0 mean no cuDNN.

    >>> format_cudnn_version(8902), format_cudnn_version(90100)
    ('8.9.2', '9.1.0')
    """
    if not number:
        return None
    thousands = 10_000 if number >= 90_000 else 1_000  # CUDNN_VERSION has another format starting at cuDNN 9
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"
