"""A table of all fields of `TrainingArguments`: which are planned, refused, named in a note, or harmless."""

from typing import Any

from planner.api.integrations.settings import COMPILED, Setting, harmless, planned, refused, stated, text_of


def evaluates(arguments: Any) -> bool:
    """Return whether the trainer evaluates during training or at its start."""
    return text_of(arguments.eval_strategy) != "no" or bool(arguments.eval_on_start)


def _gathers_predictions(arguments: Any) -> bool:
    gathers = not arguments.prediction_loss_only and not arguments.batch_eval_metrics
    return evaluates(arguments) and gathers


def _offloads(arguments: Any) -> bool:
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    return any(dict(getattr(arguments, name, None) or {}).get("offload") for name in names)


def _splits_batches(arguments: Any) -> bool:
    config = arguments.accelerator_config
    return arguments.world_size > 1 and bool(getattr(config, "split_batches", False))


SETTINGS: tuple[Setting, ...] = (
    *planned(  # an optimizer that is not planned is refused by name
        "per_device_train_batch_size gradient_accumulation_steps optim optim_args weight_decay "
        "max_grad_norm bf16 fp16 label_smoothing_factor use_cache neftune_noise_alpha "
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
        "gradient_checkpointing_kwargs eval_strategy eval_on_start per_device_eval_batch_size "
        "use_liger_kernel"
    ),
    *harmless(
        # How long, how fast and in which order it trains
        "num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps "
        "adam_beta1 adam_beta2 adam_epsilon seed data_seed ignore_data_skip "
        "restore_callback_states_from_checkpoint resume_from_checkpoint output_dir do_train do_eval "
        "do_predict average_tokens_across_devices tf32 "
        # Read by optimizers alone that `optim` refuses
        "optim_target_modules "
        # Logs, checkpoints and uploads are made of copies on the CPU
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name "
        "project trackio_space_id trackio_bucket_id trackio_static_space_id save_only_model save_strategy "
        "save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token "
        "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end "
        "metric_for_best_model greater_is_better skip_memory_metrics "
        # Data is loaded on the CPU; the shapes of a batch are those of the sample
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "remove_unused_columns label_names length_column_name "
        # When evaluations come, and evaluations outside training
        "eval_steps eval_delay eval_use_gather_object bf16_full_eval fp16_full_eval "
        # How processes find and wait for each other; the plan is for a GPU whatever trains here
        "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank use_cpu "
        # Given together with the setting that they belong to
        "torch_compile_backend torch_compile_mode prediction_loss_only "
        "batch_eval_metrics eval_do_concat_batches"
    ),
    stated("torch_compile", COMPILED),
    stated(
        "liger_kernel_config",
        "all of Liger's kernels for the model are planned",
        lambda arguments: bool(arguments.use_liger_kernel and arguments.liger_kernel_config),
    ),
    stated(
        "auto_find_batch_size",
        "the planned batch is where the trainer starts; it takes a smaller one should memory run out",
    ),
    stated("torch_empty_cache_steps", "planned without; emptying the cache releases memory, and takes time"),
    stated(
        "eval_accumulation_steps",
        "predictions of the whole evaluation gather on the GPU when compute_metrics is given; they are not "
        "counted; eval_accumulation_steps=1 moves them to the CPU",
        lambda arguments: _gathers_predictions(arguments) and arguments.eval_accumulation_steps is None,
    ),
    stated(
        "include_for_metrics",
        "inputs or losses of the whole evaluation gather on the GPU; they are not counted",
        lambda arguments: bool(arguments.include_for_metrics) and evaluates(arguments),
    ),
    stated(
        "train_sampling_strategy",
        "batches of long samples are planned as long as those of the sample batch; give the longest",
        lambda arguments: "length" in str(arguments.train_sampling_strategy),
    ),
    stated("full_determinism", "deterministic kernels may take more scratch memory than is planned"),
    stated("debug", "the debugger's own tensors are not counted"),
    stated(
        "ddp_bucket_cap_mb",
        "gradient buckets are planned with 25 MiB",
        lambda arguments: arguments.world_size > 1 and arguments.ddp_bucket_cap_mb not in (None, 25),
    ),
    *planned("fsdp fsdp_config"),  # by `fsdp_fields`
    *planned("deepspeed"),  # by `deepspeed_fields`
    refused("parallelism_config", "the model is split over GPUs; train with DDP, or plan by hand"),
    refused(
        "accelerator_config",
        "split_batches divides each batch among the processes; remove it",
        _splits_batches,
    ),
)

# Checked in addition to the fields of the same names, which are planned except for these values.
VALUES: tuple[Setting, ...] = (
    refused(
        "gradient_checkpointing_kwargs", "offload=True moves activations to the CPU; remove it", _offloads
    ),
    refused(
        "n_gpu",
        "DataParallel gathers on the first GPU; start one process per GPU with torchrun, or set "
        "CUDA_VISIBLE_DEVICES",
        lambda arguments: arguments.n_gpu > 1,
    ),
)

# Fields whose sentences do not apply if a trainer's own `train()` runs on its longest sample.
BY_ITS_TRAINER = (
    *("torch_compile", "train_sampling_strategy"),
    *("eval_accumulation_steps", "include_for_metrics"),  # its own evaluation runs too
)
