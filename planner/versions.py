"""Versions of installed distributions, without importing them or reading their long metadata."""

import re
import sys
from pathlib import Path


def installed_version(distribution: str) -> str | None:
    """The version of a distribution as its folder of metadata is named; None where it is not installed.

    The names of such folders are fixed (packaging.python.org, recording installed projects); of installers
    that keep another form, importlib.metadata knows, which takes 20 ms to import.
    """
    wanted = re.compile(re.escape(_normal(distribution)) + r"-([^-]+)\.dist-info")
    for folder in dict.fromkeys(sys.path):
        try:
            names = [path.name for path in Path(folder or ".").iterdir() if path.suffix == ".dist-info"]
        except OSError:  # no folder, or none of ours
            continue
        for name in names:
            found = wanted.fullmatch(_normal(name.rpartition("-")[0]) + "-" + name.rpartition("-")[2])
            if found:
                return found[1]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def public_version(version: str | None) -> str | None:
    """Without the local part that tells builds apart: `2.13.0+cpu` is `2.13.0`."""
    return None if version is None else version.partition("+")[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
