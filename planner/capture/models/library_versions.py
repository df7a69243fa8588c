"""List the library versions for which captures are written.

Captures rely on private parts of libraries. A new version may allocate differently, or rename a function that
a capture replaces. tests/capture/models/test_library_versions.py fails for each library whose pinned version
differs.
"""

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from planner._support.versions import public_version

# Module name -> the major and minor version, and a file or folder of the planner that relies on it.
HELD_VERSIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "accelerate": ("1.15", "planner/capture/distributed/accelerate_plugin.py"),
        "bitsandbytes": ("0.50", "planner/capture/models/quantized/layers.py"),
        "deepspeed": ("0.19", "planner/capture/distributed/deepspeed_process.py"),
        "diffusers": ("0.42", "planner/capture/models/diffusers"),
        "lightning": ("2.6", "planner/capture/models/lightning_module.py"),
        "peft": ("0.21", "planner/capture/techniques/adapters.py"),
        "torchao": ("0.18", "planner/capture/cuda/optimizers/torchao.py"),
        "transformers": ("5.23", "planner/capture/models/transformers"),
        "trl": ("1.16", "planner/capture/models/transformers/own_trainer.py"),
    }
)


def notes_on_versions() -> Iterator[str]:
    """Yield a note for each imported library whose major or minor version differs from `HELD_VERSIONS`."""
    for name, (held, _) in HELD_VERSIONS.items():
        version = public_version(getattr(sys.modules.get(name), "__version__", None))
        if version is not None and ".".join(version.split(".")[:2]) != held:
            yield f"{name} {version} is installed, plans are held to {held}: it may allocate otherwise"
