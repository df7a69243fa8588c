"""Import the names of Lightning that the integration uses.

They come from `lightning`, or from `pytorch_lightning` if only that is installed.
"""

import importlib
from importlib.util import find_spec
from typing import Any

from planner.capture import lightning_package_of, prepare_torchvision

prepare_torchvision()  # lightning imports torchmetrics, which imports torchvision

_ONLY_OLD = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
_PACKAGE = "pytorch_lightning" if _ONLY_OLD else "lightning.pytorch"
_utilities = f"{_PACKAGE}.utilities"

Callback: Any = importlib.import_module(_PACKAGE).Callback
parsing: Any = importlib.import_module(f"{_utilities}.parsing")
rank_zero: Any = importlib.import_module(f"{_utilities}.rank_zero")
isolate_rng: Any = importlib.import_module(f"{_utilities}.seed").isolate_rng
is_param_in_hook_signature: Any = importlib.import_module(
    f"{_utilities}.signature_utils"
).is_param_in_hook_signature


def is_overridden(method: str, module: object) -> bool:
    """Return whether a module overrides a method of LightningModule. The class may be of either package."""
    helpers: Any = importlib.import_module(f"{lightning_package_of(module)}.utilities.model_helpers")
    overridden: bool = helpers.is_overridden(method, module)
    return overridden
