from .batch_curve import batch_curve as batch_curve
from .gpus import GpusResult as GpusResult, SORTS as SORTS
from .options import Options as Options
from .request import job_of as job_of
