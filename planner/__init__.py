"""Plan the GPU memory of training and inference with PyTorch, and find the largest batch that fits.

Public names are imported when they are first used: `import planner` alone imports neither torch nor typer.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner._support.lazy_exports import attach_stub

if TYPE_CHECKING:
    from . import errors as errors
    from .api.advise import AdviceResult as AdviceResult, advise as advise
    from .api.check.check import CheckResult as CheckResult, check as check
    from .api.diagnose import DiagnoseResult as DiagnoseResult, diagnose as diagnose
    from .api.estimate import EstimateResult as EstimateResult, estimate as estimate
    from .api.explain import ExplainResult as ExplainResult, explain as explain
    from .api.fleet.clusters import (
        ClusterResult as ClusterResult,
        advise_cluster as advise_cluster,
        clusters as clusters,
    )
    from .api.fleet.gpus import GpusResult as GpusResult, gpus as gpus
    from .api.guard.guard import Guard as Guard, guard as guard
    from .api.max_batch import MaxBatchResult as MaxBatchResult, max_batch as max_batch
    from .api.max_size import MaxSizeResult as MaxSizeResult, max_size as max_size
    from .api.request.varying import VaryingResult as VaryingResult
    from .api.serve import ServeResult as ServeResult, serve as serve
    from .api.watch import watch as watch
    from .errors import DoesNotFitError as DoesNotFitError
    from .hardware import Device as Device
    from .jobs import Job as Job

else:  # type checkers would accept any name
    __getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

# The public names of the hooks' modules, and the modules that implement them.
_ALIASES = {
    "planner.huggingface": "planner.api.integrations.huggingface",
    "planner.lightning": "planner.api.integrations.lightning",
}


class _AliasFinder:
    """The import hook that makes modules of `planner.api` importable under their aliases.

    The aliases are `_ALIASES`. The class does not derive from the classes of importlib.abc, which import
    modules that a plan does not need.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the module spec of an alias, or None for any other name."""
        loader: Any = self
        return ModuleSpec(fullname, loader) if fullname in _ALIASES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module behind an alias."""
        return import_module(_ALIASES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run under its own name."""


sys.meta_path.append(_AliasFinder())
