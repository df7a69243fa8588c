from .api.advise import AdviceResult as AdviceResult, advise as advise
from .api.explain import ExplainResult as ExplainResult, explain as explain
from .api.gpus import GpusResult as GpusResult, gpus as gpus
from .api.max_batch import (
    EstimateResult as EstimateResult,
    MaxBatchResult as MaxBatchResult,
    estimate as estimate,
    max_batch as max_batch,
)
from .hardware.device import Device as Device
from .jobs.job import Job as Job
