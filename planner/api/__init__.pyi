from .explain import VaryingExplainResult as VaryingExplainResult, batch_curve as batch_curve
from .fleet.gpus import GpusResult as GpusResult, PRICE_SORTS as PRICE_SORTS, SORTS as SORTS
from .request.options import Options as Options
from .request.request import make_job as make_job
