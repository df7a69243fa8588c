from .live import (
    Prepare as Prepare, StandIn as StandIn, Step as Step, fields_of_process as fields_of_process,
    is_deterministic as is_deterministic, live_job as live_job, read_live_model as read_live_model,
)
from .live_optimizer import (
    LiveOptimizer as LiveOptimizer, fields_of_optimizer as fields_of_optimizer,
    notes_of_optimizer as notes_of_optimizer, read_optimizer as read_optimizer, settings_of as settings_of,
)
from .registry import (
    build_model as build_model, complete_by_library as complete_by_library,
    construct_model as construct_model, find_constructor as find_constructor,
)
from .torchvision.shim import prepare_torchvision as prepare_torchvision
from .transformers.training import (
    in_float32 as in_float32, loss_step as loss_step, optimizer_of as optimizer_of,
    prepare_for_training as prepare_for_training,
)
