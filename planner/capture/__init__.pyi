from .loop.batches import empty_batch as empty_batch
from .loop.named_optimizers import build_named as build_named
from .loop.precision import (
    convert_inputs as convert_inputs, convert_model as convert_model, cuda_runtime as cuda_runtime,
    format_of as format_of,
)
from .loop.runtime import LoopRuntime as LoopRuntime, PhaseHook as PhaseHook
from .loop.trainable import freeze_parameters as freeze_parameters
from .loop.training_loop import run_loop as run_loop
from .techniques.adapters import attach_adapters as attach_adapters
from .techniques.liger import has_liger_kernels as has_liger_kernels
from .models.live.job import (
    LiveEvaluation as LiveEvaluation, Prepare as Prepare,
    StandIn as StandIn, Step as Step, fields_of_process as fields_of_process,
    is_deterministic as is_deterministic, live_job as live_job, read_live_model as read_live_model,
)
from .models.live.kept import (
    LiveConstructor as LiveConstructor, live_modules_restored as live_modules_restored,
)
from .models.live.optimizer import (
    AnyLiveOptimizer as AnyLiveOptimizer, fields_of_optimizer as fields_of_optimizer,
    notes_of_optimizer as notes_of_optimizer, read_optimizer as read_optimizer, settings_of as settings_of,
)
from .models.live.training import (
    LiveTraining as LiveTraining,
    other_bytes as other_bytes,
    cuda_index_of as cuda_index_of, digest_of as digest_of, hold_other_bytes as hold_other_bytes,
    outside_autocast as outside_autocast, read_training as read_training,
)
from .models.nnunet.build import planned_patches as planned_patches
from .models.quantized.layers import (
    prepare_for_kbit_training as prepare_for_kbit_training, quantize_linears as quantize_linears,
)
from .models.registry import (
    build_model as build_model, complete_by_library as complete_by_library,
    construct_model as construct_model,
    find_constructor as find_constructor,
)
from .models.torchvision.shim import prepare_torchvision as prepare_torchvision
from .models.lightning_module import lightning_package_of as lightning_package_of
from .models.transformers.build import is_padded as is_padded
from .models.transformers.contents import known_contents as known_contents
from .models.transformers.live_trainer import (
    bytes_of_longest_sample as bytes_of_longest_sample, check_trainer as check_trainer,
    notes_of_callbacks as notes_of_callbacks, set_batch as set_batch,
    trainer_job as trainer_job, trainer_maker as trainer_maker,
)
from .models.transformers.serving import ServedModel as ServedModel, served_model as served_model
from .models.transformers.training import (
    in_float32 as in_float32, loss_step as loss_step, optimizer_name_of as optimizer_name_of,
    optimizer_of as optimizer_of,
    prepare_for_training as prepare_for_training,
)
from .recorder.provenance import ProvenanceCollector as ProvenanceCollector
from .session import record as record
from .settings import changed_settings as changed_settings
from .subprocess.client import TracerProcess as TracerProcess
from .symbolic.builder import open_builder as open_builder
from .symbolic.deep_runs import LEAST_DEPTH_OF_RUN as LEAST_DEPTH_OF_RUN
from .symbolic.size_family import SizeFamily as SizeFamily, open_size_family as open_size_family
