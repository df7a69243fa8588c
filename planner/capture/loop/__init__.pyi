from .batches import empty_batch as empty_batch
from .optimizers import build_optimizer as build_optimizer
from .precision import (
    convert_inputs as convert_inputs, convert_model as convert_model, cuda_runtime as cuda_runtime,
    format_of as format_of,
)
from .runtime import LoopRuntime as LoopRuntime, PhaseHook as PhaseHook
from .trainable import freeze_parameters as freeze_parameters
from .training_loop import run_loop as run_loop
