"""How large a batch of this model, trained this way, fits this GPU, and how sure are we?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.advise_api import AdviceResult, advise
    from planner.api import EstimateResult, MaxBatchResult, estimate, max_batch
    from planner.device import Device
    from planner.explain_api import ExplainResult, explain
    from planner.gpus_api import GpusResult, gpus
    from planner.job import Job

__all__ = [
    "AdviceResult",
    "Device",
    "EstimateResult",
    "ExplainResult",
    "GpusResult",
    "Job",
    "MaxBatchResult",
    "advise",
    "estimate",
    "explain",
    "gpus",
    "max_batch",
]

_HOMES = {
    "AdviceResult": "planner.advise_api",
    "Device": "planner.device",
    "ExplainResult": "planner.explain_api",
    "GpusResult": "planner.gpus_api",
    "Job": "planner.job",
    "advise": "planner.advise_api",
    "explain": "planner.explain_api",
    "gpus": "planner.gpus_api",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562): `import planner` alone costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "planner.api")), name)
