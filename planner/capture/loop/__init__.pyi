from .formats import (
    format_of as format_of,
    with_own_types as with_own_types,
)
from .optimizers import (
    build_optimizer as build_optimizer,
)
from .precision import (
    convert_model as convert_model,
    cuda_machine as cuda_machine,
)
from .runtime import (
    Machine as Machine,
    OnPhase as OnPhase,
)
from .trainable import (
    choose_trained as choose_trained,
)
from .training_loop import (
    empty_batch as empty_batch,
    run_loop as run_loop,
)
