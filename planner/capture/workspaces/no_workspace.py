"""The operators that need no workspace.

Their CUDA kernels allocate only outputs. Pointwise operators and views need no entry. An entry states that
the CUDA implementation named in native_functions.yaml allocates its outputs and no other memory, or no other
memory that depends on the batch.
"""

_NAMES = """
    # allocation, copies, layout
    empty empty_like empty_strided new_empty new_zeros new_ones new_full zeros zeros_like ones ones_like
    full full_like scalar_tensor arange linspace clone copy_ _to_copy contiguous cat stack
    constant_pad_nd zero_ fill_ _unsafe_view _reshape_alias lift_fresh repeat flip masked_fill
    masked_fill_ where tril triu select_backward slice_backward diagonal_backward unfold_backward
    new_empty_strided resize_ set_ split_with_sizes normal_ uniform_ bernoulli_ bernoulli rand randn
    as_strided_ eye rand_like randn_like randint randint_like exponential_ log_normal_
    geometric_ cauchy_ random_ normal scatter scatter_ scatter_add scatter_add_
    index_add index_add_ index_copy index_copy_ index_fill index_fill_
    slice_scatter select_scatter diagonal_scatter diagonal_copy take put unsafe_split
    unsafe_split_with_sizes unsafe_chunk resize_as_ diag_embed tril_indices triu_indices complex polar isin
    bucketize searchsorted log_sigmoid __or__ __and__ __xor__ eq_ ne_ lt_ le_ gt_ ge_ _is_all_true
    _is_any_true
    replication_pad1d replication_pad2d replication_pad3d replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward reflection_pad3d_backward _pin_memory
    _padded_dense_to_jagged_forward block_diag cartesian_prod vander fft_fftfreq fft_rfftfreq
    # dropout, activations and normalisation with a kernel of their own
    native_dropout_backward cudnn_batch_norm cudnn_batch_norm_backward glu glu_backward prelu
    _prelu_kernel hardswish hardswish_ hardswish_backward hardsigmoid_backward hardtanh_backward
    leaky_relu_backward _prelu_kernel_backward log_sigmoid_forward log_sigmoid_backward elu_backward
    softplus_backward celu_ selu_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_backward
    mish_backward silu_backward gelu_backward softshrink_backward hardshrink_backward threshold_backward
    _weight_norm_interface _weight_norm_interface_backward
    # pooling, sampling
    adaptive_max_pool3d_backward max_unpool2d max_unpool3d fractional_max_pool2d
    fractional_max_pool2d_backward upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    upsample_linear1d _upsample_lanczos2d_aa
    pixel_shuffle pixel_unshuffle channel_shuffle grid_sampler_3d grid_sampler_3d_backward
    # look-ups and losses
    _local_scalar_dense _assert_async
    gather index_select kthvalue mode trace floor_divide
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward
    binary_cross_entropy_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward
    multilabel_margin_loss_backward _embedding_bag _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _pdist_forward cross linalg_cross
    # cells of recurrent layers (native/cuda/RNN.cu): their workspace is an output
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell
    _thnn_fused_gru_cell_backward _thnn_differentiable_lstm_cell_backward _cudnn_init_dropout_state
    # the choice of attention's kernel
    _fused_sdp_choice
    # optimizers in place
    _foreach_add_ _foreach_mul_ _foreach_sub_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_
    _foreach_lerp_ _foreach_sqrt_ _foreach_neg_ _foreach_zero_ _foreach_copy_ _foreach_sqrt _foreach_add
    _foreach_mul _foreach_sub _foreach_div _foreach_neg _foreach_pow _foreach_reciprocal_
    _foreach_maximum_ _foreach_sign_ _foreach_clamp_min_ _foreach_clamp_max_ _foreach_rsqrt_
    _foreach_abs _foreach_abs_ _foreach_pow_ _foreach_reciprocal _foreach_rsqrt _foreach_maximum
    _foreach_minimum _foreach_minimum_ _foreach_sign _foreach_clamp_min _foreach_clamp_max _foreach_addcmul
    _foreach_addcdiv _foreach_lerp _foreach_exp _foreach_exp_ _foreach_log _foreach_log_
    _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ lerp_
    addcmul_ addcdiv_
    # gradient scaling: the gradients and the scale change in place (native/cuda/AmpKernels.cu)
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
"""

# bitsandbytes: each operator runs one kernel, which needs only registers (csrc/ops.cu)
_OF_LIBRARIES = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")
# Collectives, whose buffers NCCL allocates outside of torch's allocator, and copies into a given tensor. The
# buffers of lists of tensors are allocated before (`planner.capture.distributed.list_collectives`).
_COLLECTIVES = """
    c10d::_allgather_base_ c10d::_reduce_scatter_base_ c10d::allreduce_ c10d::broadcast_ c10d::alltoall_base_
    c10d::allgather_ c10d::alltoall_ c10d::barrier c10d::gather_ c10d::recv_ c10d::recv_any_source_
    c10d::reduce_ c10d::reduce_scatter_ c10d::scatter_ c10d::send
    _c10d_functional::all_reduce _c10d_functional::all_reduce_ _c10d_functional::all_gather_into_tensor
    _c10d_functional::all_gather_into_tensor_out _c10d_functional::reduce_scatter_tensor
    _c10d_functional::reduce_scatter_tensor_out _c10d_functional::all_to_all_single
    _c10d_functional::broadcast _c10d_functional::broadcast_ _c10d_functional::wait_tensor
    _c10d_functional::_wrap_tensor_autograd fsdp::all_gather_copy_in
"""

NO_WORKSPACE_OPS = frozenset((*_OF_LIBRARIES, *_COLLECTIVES.split())) | frozenset(
    f"aten::{name}" for line in _NAMES.splitlines() if "#" not in line for name in line.split()
)
