from .catalogue import (
    load_catalogue as load_catalogue,
)
from .codec import (
    job_from_json as job_from_json,
    job_to_json as job_to_json,
)
from .job import (
    SOURCES as SOURCES,
    CatalogueEntry as CatalogueEntry,
    Checkpoint as Checkpoint,
    ClipGradients as ClipGradients,
    Job as Job,
    Lengths as Lengths,
    Loss as Loss,
    MemoryFormat as MemoryFormat,
    Mode as Mode,
    Optimizer as Optimizer,
    OptimizerImpl as OptimizerImpl,
    Precision as Precision,
    TensorSpec as TensorSpec,
    ZeroGrad as ZeroGrad,
    check_count as check_count,
    choose as choose,
    freeze as freeze,
    is_argument_name as is_argument_name,
    is_code as is_code,
    nearest as nearest,
    parse_model_arg as parse_model_arg,
    parse_tensor_spec as parse_tensor_spec,
    shown as shown,
    split_model as split_model,
)
from .named_models import (
    allowed_sources as allowed_sources,
    job_named_in as job_named_in,
    loss_named_in as loss_named_in,
)
from .nested import (
    batch_of_specs as batch_of_specs,
)
from .resolve import (
    COUNTS as COUNTS,
    JobOptions as JobOptions,
    PlainOptions as PlainOptions,
    complete_job as complete_job,
    is_completed_by_library as is_completed_by_library,
    merge_job as merge_job,
    resolve_job as resolve_job,
)
from .yaml_fields import (
    alloc_conf_of as alloc_conf_of,
    arguments_of as arguments_of,
    count_of as count_of,
    items_of as items_of,
    sample_of as sample_of,
    targets_of as targets_of,
    truth_of as truth_of,
)
