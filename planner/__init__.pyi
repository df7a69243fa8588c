from .api.advise import AdviceResult as AdviceResult, advise as advise
from .api.estimate import EstimateResult as EstimateResult, estimate as estimate
from .api.explain import ExplainResult as ExplainResult, explain as explain
from .api.gpus import GpusResult as GpusResult, gpus as gpus
from .api.max_batch import MaxBatchResult as MaxBatchResult, max_batch as max_batch
from .hardware import Device as Device
from .jobs import Job as Job
