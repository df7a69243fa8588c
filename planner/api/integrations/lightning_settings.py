"""Tables of the settings of Lightning's `Trainer`: which are planned, refused, named in a note, or harmless.

The settings are all parameters, callbacks, strategies and plugins.
"""

from collections.abc import Callable
from typing import Any

from planner.api.integrations.settings import Setting, harmless, planned, refused, stated
from planner.capture import is_deterministic


def _is_sharded(trainer: Any) -> bool:
    return strategy_name(trainer) not in STRATEGIES


def _is_strategy(name: str) -> Callable[[Any], bool]:
    """Return a function that checks whether a trainer's strategy is of class `name` or a subclass."""
    return lambda trainer: name in [one.__name__ for one in type(trainer.strategy).__mro__]


def strategy_name(trainer: Any) -> str:
    """Return the name of a trainer's strategy as listed in `STRATEGIES`.

    It is the nearest listed class. If no class is listed, it is the strategy's own class.
    """
    names = [one.__name__ for one in type(trainer.strategy).__mro__]
    return next((name for name in names if name in STRATEGIES), names[0])


def averages_on_gpu(callback: Any) -> bool:
    """Return whether a callback stores its average of the weights on the GPU."""
    return callback._device is None or not str(callback._device).startswith("cpu")


def _syncs(trainer: Any) -> bool:
    return getattr(trainer.strategy, "_layer_sync", None) is not None


def _is_foreign(trainer: Any) -> bool:
    return type(trainer.accelerator).__name__ not in ("CPUAccelerator", "CUDAAccelerator")


# Strategies that are planned; any other is refused.
STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy")

# Strategies that shard the module before any callback runs, with advice on how to plan them.
SHARDED: tuple[Setting, ...] = (
    refused(
        "FSDPStrategy",
        "it is FSDP 1; plan FSDP2 of the network by hand: planner.max_batch(network, fsdp=8)",
        _is_strategy("FSDPStrategy"),
    ),
    refused(
        "ModelParallelStrategy",
        "configure_model has sharded the module already; plan it by hand, in a step of a FILE.py that shards "
        "alike: planner max-batch --model FILE.py:NAME --world-size 8",
        _is_strategy("ModelParallelStrategy"),
    ),
    refused(
        "DeepSpeedStrategy",
        "DeepSpeed's engine has the module already; plan the network by hand: "
        "planner.max_batch(network, deepspeed='zero.json', world_size=8)",
        _is_strategy("DeepSpeedStrategy"),
    ),
)

# `devices` and `num_nodes` are planned by the strategy and the number of processes, `callbacks` by
# `CALLBACKS`, `plugins` by `PRECISION_PLUGINS`; the last two decide whether there is an evaluation.
TRAINER: tuple[Setting, ...] = (
    *planned(
        "precision accumulate_grad_batches gradient_clip_val gradient_clip_algorithm benchmark devices "
        "num_nodes callbacks plugins limit_val_batches num_sanity_val_steps"
    ),
    # When and how long it trains, and what it prints and saves
    *harmless(
        "logger fast_dev_run max_epochs min_epochs max_steps min_steps max_time limit_train_batches "
        "limit_test_batches limit_predict_batches overfit_batches val_check_interval "
        "check_val_every_n_epoch log_every_n_steps enable_checkpointing enable_progress_bar "
        "enable_model_summary use_distributed_sampler profiler barebones "
        "reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry "
        "inference_mode"
    ),
    refused(
        "strategy", "it shards or splits the model; train with strategy='ddp', or plan by hand", _is_sharded
    ),
    refused("accelerator", "plans are for NVIDIA GPUs; use accelerator='gpu'", _is_foreign),
    refused("sync_batchnorm", "synchronized statistics take other memory; plan by hand", _syncs),
    stated(
        "deterministic",
        "deterministic kernels may take more scratch memory than is planned",
        lambda trainer: is_deterministic(),
    ),
    stated(
        "detect_anomaly",
        "the comparison of each gradient with itself takes memory that is not counted",
        lambda trainer: trainer._detect_anomaly,
    ),
)

# Classes of callbacks. A subclass counts as its nearest ancestor here, a user's own callback as `Callback`.
CALLBACKS: tuple[Setting, ...] = (
    *planned("EMAWeightAveraging WeightAveraging GradientAccumulationScheduler"),
    *harmless(
        "BasePredictionWriter Checkpoint DeviceStatsMonitor EarlyStopping LearningRateFinder "
        "LearningRateMonitor ModelCheckpoint ModelSummary OnExceptionCheckpoint ProgressBar "
        "RichModelSummary RichProgressBar SpikeDetection ThroughputMonitor Timer TQDMProgressBar "
        "BatchSizePlanner"
    ),
    refused("BatchSizeFinder", "it sets the batch size as well; use one of the two"),
    refused(
        "BaseFinetuning",
        "it trains more layers in later epochs, which takes more than the first; plan by hand with all that "
        "will be trained",
    ),
    refused("BackboneFinetuning", "it trains more layers in later epochs; plan by hand with all of them"),
    stated("ModelPruning", "masks as large as the pruned weights are not counted"),
    stated(
        "StochasticWeightAveraging",
        "an averaged model on the GPU is not counted: as much as the weights",
        averages_on_gpu,
    ),
    stated("LambdaCallback", "what its functions keep on the GPU is not counted"),
    stated("Callback", "what a callback of your own keeps on the GPU is not counted"),
)

# Classes of precision plugins that are planned; any other is refused. Other plugins change no memory.
PRECISION_PLUGINS = ("Precision", "MixedPrecision", "HalfPrecision")

# Hooks of a module that change what a step does; overridden hooks are named in the answer.
MODULE_HOOKS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad"),
)
