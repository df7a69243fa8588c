"""Operators declared free of scratch memory: all that their CUDA kernels take are the outputs.

Pointwise operators and views need no entry. An entry says that the CUDA implementation named in
native_functions.yaml allocates its outputs and nothing else, or nothing that depends on the batch.
"""

_NAMES = """
    # allocation, copies, layout
    empty empty_like empty_strided new_empty new_zeros new_ones new_full zeros zeros_like ones ones_like
    full full_like scalar_tensor arange linspace clone copy_ _to_copy contiguous cat stack
    constant_pad_nd zero_ fill_ _unsafe_view _reshape_alias lift_fresh repeat roll flip masked_fill
    masked_fill_ where tril triu select_backward slice_backward diagonal_backward unfold_backward
    new_empty_strided resize_ set_ split_with_sizes normal_ uniform_ bernoulli_ bernoulli rand randn
    as_strided_ index
    reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
    # dropout, activations and normalisation with a kernel of their own
    native_dropout native_dropout_backward native_layer_norm native_layer_norm_backward native_batch_norm
    native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _softmax _log_softmax
    _softmax_backward_data _log_softmax_backward_data glu glu_backward prelu _prelu_kernel
    hardswish_ hardswish_backward hardsigmoid_backward hardtanh_backward leaky_relu_backward
    _prelu_kernel_backward rms_norm log_sigmoid_forward log_sigmoid_backward
    # pooling, sampling
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d adaptive_max_pool2d
    _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward upsample_nearest2d
    upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d
    upsample_bicubic2d_backward upsample_linear1d upsample_linear1d_backward pixel_shuffle
    pixel_unshuffle grid_sampler_2d im2col col2im
    # look-ups and losses
    _local_scalar_dense
    embedding nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward gather
    index_select mse_loss mse_loss_backward binary_cross_entropy binary_cross_entropy_backward
    # attention whose scratch is nothing but outputs
    _scaled_dot_product_efficient_attention _fused_sdp_choice
    # optimizers in place
    _foreach_add_ _foreach_mul_ _foreach_sub_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_
    _foreach_lerp_ _foreach_sqrt_ _foreach_neg_ _foreach_zero_ _foreach_copy_ _foreach_sqrt _foreach_add
    _foreach_mul _foreach_sub _foreach_div _foreach_neg _foreach_pow _foreach_reciprocal_
    _foreach_maximum_ _foreach_sign_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ lerp_
    addcmul_ addcdiv_
"""

FREE = frozenset(f"aten::{name}" for line in _NAMES.splitlines() if "#" not in line for name in line.split())
