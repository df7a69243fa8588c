"""Find the cause and the place of a failed request from the functions in a traceback."""

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from planner.planning.diagnosis.diagnosis import Cause, Place
from planner.planning.diagnosis.tracebacks import Frame

_CALL = re.compile(r"([A-Za-z_][\w.]*)\(")
_OPERATOR = re.compile(r"[-+*/%@&|^~<>=]+")
_OPTIMIZER_STATE = ("_init_group", "init_state", "_init_state")
_OF_DEEPSPEED = "initialize_optimizer_states"
_OPTIMIZER_FILE = re.compile("optim(?!um)")  # not Optimum, a library of trainers
_TRAINS = {"train", "training", "fit"}
_SAVES = {"save", "checkpoint"}
_EVALUATES = {"eval", "evaluate", "evaluation", "validation"}
# Words that name an evaluation if only words of its loop are near them: a model's forward pass
# may have functions such as `predict_masks`, and any code may validate its arguments.
_VALIDATES = {"val", "valid", "validate", "test"}
_PRODUCES = {"predict", "prediction", "inference", "infer", "generate"}  # training may do so too
_OF_LOOPS = {"run", "do", "on", "one", "step", "loop", "epoch", "batch", "model", "start", "end", "fn"}


_OF_LOAD = (
    "torch.load put the file's tensors on the GPU that they were saved from: pass "
    'map_location="cpu", and load the state from there'
)
_OF_DEEPCOPY = "__deepcopy__"
_OF_OPTIMIZER_COPY = (
    "an optimizer's load_state_dict before torch 2.1 first copied the given state where it was, on the GPU: "
    'load it by torch.load with map_location="cpu"'
)
_OF_BUCKETS = (
    "DistributedDataParallel allocated its buckets, which are as large as all gradients: pass "
    "gradient_as_bucket_view=True, so that gradients take no memory beside them, or shard the model (FSDP)"
)
_OF_FULL_STATE = (
    "a full state dict gathers the whole weights of a sharded model on the GPU: offload them to the CPU as "
    "they are gathered (StateDictOptions(cpu_offload=True); FullStateDictConfig(offload_to_cpu=True, "
    "rank0_only=True)), or save shards by torch.distributed.checkpoint"
)
_OF_WEIGHTS = (
    "a model's weights were moved to the GPU: load them in bfloat16 or quantized, shard the model, or free "
    "what else is there before"
)
_OF_VAE = (
    "an autoencoder worked on whole images: call its enable_slicing() and enable_tiling(), or encode the "
    "images before the training"
)
_OF_FOREACH = "_multi_tensor_"  # begins the names of updates by foreach kernels
# Functions of libraries that allocate or copy on a GPU, and advice on what takes less. A key without a file
# is the name of a function of any file.
_ADVICE = {
    "_cuda_deserialize": _OF_LOAD,
    "torch/serialization.py _deserialize": _OF_LOAD,  # of newer torch
    "_process_value_according_to_param_policy": "load_state_dict copied the state of an optimizer to the "
    "GPU, which each step needs there: free other memory before, or take an optimizer with less state",
    _OF_DEEPCOPY: "copy.deepcopy made a second copy on the GPU: copy a model that is on the CPU, or keep "
    "the copy, such as an average of weights, there",
    _OF_FOREACH: "the optimizer's foreach kernels take temporary copies of many parameters at once: pass "
    "fused=True if the optimizer has it, or foreach=False, which updates one parameter after the other",
    "parallel/distributed.py _ddp_init_helper": _OF_BUCKETS,
    "parallel/distributed.py _pre_forward": _OF_BUCKETS,
    "fsdp/_state_dict_utils.py _full_pre_state_dict_hook": _OF_FULL_STATE,
    "fsdp/_state_dict_utils.py _full_post_state_dict_hook": _OF_FULL_STATE,
    "distributed/_state_dict_utils.py _gather_state_dict": _OF_FULL_STATE,
    "modules/module.py convert": _OF_WEIGHTS,
    "modules/module.py cuda": _OF_WEIGHTS,
    "transformers/modeling_utils.py caching_allocator_warmup": _OF_WEIGHTS,
    "utils/modeling.py set_module_tensor_to_device": _OF_WEIGHTS,
    "eager_attention_forward": "eager attention makes scores of batch x heads x length x length: load the "
    'model with attn_implementation="sdpa" or "flash_attention_2"',
    "autoencoders/autoencoder_kl.py encode": _OF_VAE,
    "autoencoders/autoencoder_kl.py decode": _OF_VAE,
    "nn/functional.py cross_entropy": "cross entropy takes the log-probabilities of all classes beside the "
    "logits: take the loss of parts of the batch, or of a language model's tokens by a fused kernel (Liger)",
    "transformers/trainer_pt_utils.py nested_concat": "a Trainer's evaluation keeps all batches' logits on "
    "the GPU: set eval_accumulation_steps=1, or keep less of them by preprocess_logits_for_metrics",
    "transformers/cache_utils.py update": "the key-value cache of a generation grows by each token of each "
    'sample: generate fewer tokens or samples at once, or pass cache_implementation="offloaded"',
    "utils/operations.py _convert_to_fp32": "accelerate copies a model's outputs to float32 under mixed "
    "precision: let the model return the loss without logits, or load it in bfloat16 without mixed precision",
}


def names_evaluation(function: str) -> bool:
    """Return whether a function's name, such as `validation_step`, says that it evaluates."""
    words, may_evaluate = _words(function), _VALIDATES | _PRODUCES
    if words & (_TRAINS | _SAVES):
        return False
    return bool(words & _EVALUATES or (words & may_evaluate and words <= may_evaluate | _OF_LOOPS))


def _words(function: str) -> set[str]:
    return set(filter(None, function.lower().split("_")))


def cause_of_frames(frames: Sequence[Frame]) -> tuple[Cause, str] | None:
    """Return EVALUATION or FIRST_STEP with a reason, if a traceback's functions imply it, else None."""
    evaluation = None if _is_backward(frames) else _evaluation(takewhile(_is_no_module, frames))
    if evaluation is not None:
        return Cause.EVALUATION, (
            f"it happened in {evaluation}, an evaluation: plan it by --evaluate and --eval-batch, "
            "and look for outputs that it keeps on the GPU or a missing torch.no_grad()"
        )
    if any(map(_makes_optimizer_state, frames)):
        return Cause.FIRST_STEP, (
            "the optimizer allocated its state, as it does in its first step: the forward and backward pass "
            "fit without it"
        )
    return None


def _evaluation(frames: Iterable[Frame]) -> str | None:
    """Return the name of the outermost function that evaluates outside of training, or None if none does.

    Within a function that trains, or an optimizer's step, a name must have words of an evaluation's loop
    alone: training also generates samples, and evaluates actions and losses.
    """
    found, trains = None, False
    for frame in frames:
        words = _words(frame.function)
        if words & _TRAINS or _is_of_optimizer(frame):
            found, trains = None, True
        elif found is None and names_evaluation(frame.function):
            is_loop = words <= _EVALUATES | _VALIDATES | _OF_LOOPS
            found = frame.function if is_loop or not trains else None
    return found


def _is_of_optimizer(frame: Frame) -> bool:
    return _OPTIMIZER_FILE.search(frame.file) is not None and not frame.is_of_user


def _is_backward(frames: Iterable[Frame]) -> bool:
    return any(
        frame.function in ("_engine_run_backward", "backward") and not frame.is_of_user for frame in frames
    )


def _is_no_module(frame: Frame) -> bool:
    return frame.function not in ("forward", "_call_impl", "_wrapped_call_impl")


def _makes_optimizer_state(frame: Frame) -> bool:
    is_in_step = frame.function == "step" and "zeros_like" in frame.code  # of torch before 2.0
    is_named = frame.function in _OPTIMIZER_STATE or is_in_step
    return frame.function == _OF_DEEPSPEED or (is_named and _is_of_optimizer(frame))


def place_of_frames(frames: Sequence[Frame]) -> Place:
    """Return the innermost line of the user's code, and the function or operator called there.

    The innermost frame's line names the function, or else the user's line; it is "backward" in a backward
    pass. If no frame is of the user's code, the innermost frame counts. The result is empty without frames.
    """
    if not frames:
        return Place()
    own = next((frame for frame in reversed(frames) if frame.is_of_user), frames[-1])
    call = "backward" if _is_backward(frames) else _call(frames[-1]) or _call(own)
    return Place(f"{own.file}:{own.line}, in {own.function}", call)


def _call(frame: Frame) -> str:
    """Return the operator or function that failed in a frame's line, or "" if the line has none.

    Without marks below the line, it is the line's first call.
    """
    if frame.failed.endswith(")"):
        depths = accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in reversed(frame.failed))
        arguments = next((at for at, depth in enumerate(depths, 1) if depth == 0), 0)
        return frame.failed[:-arguments].rpartition(")")[2].strip(".")
    if _OPERATOR.fullmatch(frame.failed):
        return frame.failed
    if frame.failed.startswith("["):
        return "indexing"
    return next(iter(_CALL.findall(frame.code)), "")


def advice_of_frames(frames: Iterable[Frame]) -> tuple[str, ...]:
    """Return advice on what takes less memory than the library functions in a traceback."""
    found: dict[str, None] = {}
    is_in_load = False
    for frame in frames:
        if frame.is_of_user:
            continue
        is_in_load = is_in_load or (frame.function == "load_state_dict" and _is_of_optimizer(frame))
        file = "/".join(re.split(r"[\\/]", frame.file)[-2:])
        function = _OF_FOREACH if frame.function.startswith(_OF_FOREACH) else frame.function
        advice = _ADVICE.get(function) or _ADVICE.get(f"{file} {function}")
        if advice is not None:
            found[_OF_OPTIMIZER_COPY if is_in_load and frame.function == _OF_DEEPCOPY else advice] = None
    return tuple(found)
