from .files.catalogue import load_catalogue as load_catalogue
from .codec import job_from_json as job_from_json, job_to_json as job_to_json
from .depth import Depth as Depth
from .files.deepspeed import (
    deepspeed_stage as deepspeed_stage, fill_deepspeed as fill_deepspeed, model_precision as model_precision,
    read_deepspeed as read_deepspeed,
)
from .fsdp import FsdpArguments as FsdpArguments, OF_PLUGIN as OF_PLUGIN, OF_POLICY as OF_POLICY
from .job import (
    Arguments as Arguments, Batching as Batching, CatalogueEntry as CatalogueEntry, Checkpoint as Checkpoint,
    ClipGradients as ClipGradients, Compile as Compile,
    FUSED_OPTIMIZERS as FUSED_OPTIMIZERS, INSTALLED as INSTALLED, JOB_FIELDS as JOB_FIELDS,
    Job as Job, Lengths as Lengths,
    Loss as Loss, MemoryFormat as MemoryFormat, Mode as Mode, Offload as Offload,
    Optimizer as Optimizer,
    OptimizerImpl as OptimizerImpl, PUBLISHED as PUBLISHED, Precision as Precision, Quantize as Quantize,
    STORED as STORED, TensorSpec as TensorSpec, ZeroGrad as ZeroGrad,
    is_cudnn_of_files as is_cudnn_of_files,
)
from .nested import batch_of_specs as batch_of_specs
from .own_code import CodeKind as CodeKind, kind_of_code as kind_of_code
from .optimizer_names import is_optimizer_file as is_optimizer_file, optimizer_library as optimizer_library
from .options import (
    FIELD_OPTIONS as FIELD_OPTIONS, JOB_OPTIONS as JOB_OPTIONS, JobOption as JobOption,
    OptionKind as OptionKind, copy_options as copy_options, reset_options as reset_options,
)
from .parse import (
    SOURCES as SOURCES, check_count as check_count, choose as choose, freeze as freeze,
    is_argument_name as is_argument_name,
    is_code as is_code, nearest as nearest, argument_texts as argument_texts,
    parse_arguments as parse_arguments, parse_model_arg as parse_model_arg,
    parse_tensor_spec as parse_tensor_spec, kind_text as kind_text, shown as shown,
    split_model as split_model,
)
from .conflicts import check_requirements as check_requirements
from .resolve import (
    default_impl as default_impl,
    check_evaluated as check_evaluated, complete_job as complete_job,
    defaults_of_code as defaults_of_code, evaluated_job as evaluated_job,
    is_completed_by_library as is_completed_by_library, merge_job as merge_job,
    resolve_job as resolve_job, trains_itself as trains_itself,
)
from .sizes import (
    BatchShape as BatchShape, Size as Size, SizeDistribution as SizeDistribution, at_size as at_size,
    check_sizes as check_sizes, draw_batches as draw_batches, load_distribution as load_distribution,
    require_one_size as require_one_size, size_ranges as size_ranges,
)
from .files.torchtitan import is_torchtitan as is_torchtitan, read_torchtitan as read_torchtitan
from .files.yaml_fields import (
    OPTION_KEYS as OPTION_KEYS, allowed_sources as allowed_sources, parse_entry as parse_entry,
    read_alloc_conf as read_alloc_conf, read_arguments as read_arguments, read_count as read_count,
    read_items as read_items, read_model as read_model, read_options as read_options,
)
