from .advise import (
    advise as advise,
)
from .batch_curve import (
    batch_curve as batch_curve,
)
from .gpus import (
    SORTS as SORTS,
    GpusResult as GpusResult,
    gpus as gpus,
)
from .options import (
    Options as Options,
)
from .request import (
    DEFAULT_CONFIDENCE as DEFAULT_CONFIDENCE,
    job_of as job_of,
)
