"""Which op family each of torch's public functions belongs to: torch's half of the one table in ``precision.ops``.

A function is known by its bare name, which means the same in ``torch``, on ``torch.Tensor``, and in ``torch.nn.functional``,
``torch.special``, ``torch.linalg`` and ``torch.fft``. Variants in place and with ``out=`` write into a tensor that has a
dtype, and are left as they are. Functions in none of the tables below have no floating inputs, or no arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch

from precision.ops import OpEntry


def _table(**families: str) -> dict[str, str]:
    return {name: family for family, names in families.items() for name in names.split()}


FAMILY: dict[str, str] = _table(
    matmul="""
        addbmm addmm addmv addr baddbmm bmm chain_matmul dot einsum gru gru_cell inner linear lstm lstm_cell matmul mm
        multi_dot mv rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell tensordot vdot vecdot __matmul__ __rmatmul__
    """,
    conv="conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    attention="scaled_dot_product_attention",
    norm="""
        batch_norm group_norm instance_norm layer_norm local_response_norm native_batch_norm native_group_norm
        native_layer_norm normalize rms_norm
    """,
    softmax="gumbel_softmax log_softmax logcumsumexp logsumexp softmax softmin",
    loss="""
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy ctc_loss
        gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss linear_cross_entropy margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    """,
    reduction="""
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d cdist corrcoef cov
        cumprod cumsum cumulative_trapezoid dist embedding_bag frobenius_norm interpolate lp_pool1d lp_pool2d lp_pool3d mean
        nanmean nanquantile nansum native_norm norm norm_except_dim nuclear_norm pairwise_distance pdist prod quantile renorm
        std std_mean sum trace trapezoid trapz upsample upsample_bilinear var var_mean vector_norm
    """,
    transcendental="""
        acos acosh airy_ai arccos arccosh arcsin asin bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t
        chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w cosh digamma entr erfcx erfinv exp exp2 expm1
        gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e igamma igammac
        laguerre_polynomial_l legendre_polynomial_p lgamma log log10 log1p log2 log_ndtr logaddexp logaddexp2 logit logsigmoid
        modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma ndtr ndtri polygamma
        pow psi reciprocal rsqrt scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t
        shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w sinh softplus
        spherical_bessel_j0 square tan vander xlog1py xlogy zeta __pow__ __rpow__
    """,
    linalg="""
        cholesky cholesky_ex cholesky_inverse cholesky_solve cond det eig eigh eigvals eigvalsh fft fft2 fftn geqrf hfft hfft2
        hfftn householder_product ifft ifft2 ifftn ihfft ihfft2 ihfftn inv inv_ex inverse irfft irfft2 irfftn istft ldl_factor
        ldl_factor_ex ldl_solve lobpcg logdet lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_norm matrix_power
        matrix_rank orgqr ormqr pca_lowrank pinv pinverse polar qr rfft rfft2 rfftn slogdet solve solve_ex solve_triangular
        stft svd svd_lowrank svdvals tensorinv tensorsolve triangular_solve
    """,
    elementwise="""
        abs absolute add addcdiv addcmul affine_grid affine_grid_generator alpha_dropout angle arcsinh arctan arctan2 arctanh
        asinh atan atan2 atanh bilinear block_diag cat ceil celu clamp clamp_max clamp_min clip column_stack complex concat
        concatenate copysign cos cross deg2rad diff div divide dropout dropout1d dropout2d dropout3d dstack elu erf erfc expit
        fake_quantize_per_channel_affine fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fix floor
        floor_divide fmax fmin fmod fold frac gelu ger glu gradient grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
        hardshrink hardsigmoid hardswish hardtanh heaviside hstack hypot index_add index_copy index_put index_reduce kron
        ldexp leaky_relu lerp masked_scatter maximum minimum mish mul multiply nan_to_num native_dropout neg negative
        nextafter outer positive prelu put rad2deg relu relu6 remainder round row_stack rrelu rsub scatter scatter_add
        scatter_reduce select_scatter selu sgn sigmoid sign silu sin sinc slice_scatter softshrink softsign sqrt stack sub
        subtract tanh tanhshrink threshold true_divide trunc vstack where diagonal_scatter as_strided_scatter cartesian_prod
        meshgrid
        __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ __rtruediv__ __rdiv__ __floordiv__
        __rfloordiv__ __mod__ __rmod__
        allclose eq equal ge greater greater_equal gt isclose le less less_equal lt ne not_equal
        __eq__ __ge__ __gt__ __le__ __lt__ __ne__
    """,
    shape="""
        H T mH mT data real imag alias_copy adjoint argsort amax amin aminmax as_strided as_strided_copy atleast_1d atleast_2d
        atleast_3d broadcast_tensors broadcast_to channel_shuffle chunk clone combinations constant_pad_nd contiguous cummax
        cummin detach detach_copy diag diag_embed diagflat diagonal diagonal_copy dsplit embedding expand expand_as expand_copy
        fftshift flatten flip fliplr flipud gather hsplit ifftshift index_fill index_select kthvalue masked_fill masked_select
        max adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
        adaptive_max_pool3d adaptive_max_pool3d_with_indices fractional_max_pool2d fractional_max_pool2d_with_indices
        fractional_max_pool3d fractional_max_pool3d_with_indices max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d median min mode
        moveaxis movedim msort nanmedian narrow narrow_copy native_channel_shuffle pad permute permute_copy pixel_shuffle
        pixel_unshuffle ravel repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 select
        select_copy slice_copy slice_inverse sort split split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy
        swapaxes swapdims t t_copy take take_along_dim tensor_split tile topk transpose transpose_copy tril triu unbind
        unbind_copy unflatten unfold unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy
        upsample_nearest view view_as view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit
        __getitem__ __reversed__ lu_unpack conj conj_physical
    """,
)
"""Families by bare name."""

_INSIDE = {
    "affine_grid affine_grid_generator": "positions: a low format cannot tell pixels apart, so its matmul is kept out of autocast",
    "bilinear": "sums products that were rounded one by one: no matmul kernel; torch.autocast promotes it too",
    "addcdiv addcmul atan2 arctan2 cross grid_sample grid_sampler grid_sampler_2d grid_sampler_3d index_put scatter_add": (
        "torch.autocast promotes it on CUDA"
    ),
    "index_add index_copy index_reduce masked_scatter put scatter scatter_reduce": (
        "writes one tensor's values among another's, which have to agree"
    ),
    "select_scatter slice_scatter diagonal_scatter as_strided_scatter": "writes one tensor's values among another's",
    "prelu": "a product; torch.autocast lists it among the matmuls",
    "where maximum minimum fmax fmin clamp clamp_max clamp_min clip": "picks values of either input",
    "cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag cartesian_prod meshgrid": (
        "puts values side by side, which have to agree"
    ),
    "lerp ldexp hypot copysign nextafter fmod remainder heaviside complex __mod__ __rmod__": "arithmetic of a few operands",
    "ger outer kron": "products without sums",
    "add sub subtract mul multiply div divide true_divide floor_divide rsub neg negative positive abs absolute sign sgn": (
        "plain arithmetic"
    ),
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ __rdiv__ __rtruediv__ __floordiv__ "
    "__rfloordiv__": "plain arithmetic; a literal 1 divided by a tensor is its reciprocal",
    "eq ne lt le gt ge greater greater_equal less less_equal not_equal equal isclose allclose __eq__ __ge__ __gt__ __le__ "
    "__lt__ __ne__": "compares",
    "gelu silu mish elu celu selu sigmoid expit tanh softsign tanhshrink": (
        "bounded, or no steeper than its argument; kernels compute it in float32 inside"
    ),
    "relu relu6 leaky_relu rrelu threshold hardtanh hardshrink hardsigmoid hardswish softshrink glu": "piecewise linear or a gate",
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout native_dropout": (
        "a product with a mask"
    ),
    "sin cos sinc erf erfc atan arctan": "bounded",
    "asinh arcsinh": "grows slower than its argument",
    "atanh arctanh": "torch.autocast leaves it",
    "sqrt": "it shrinks what it is given; torch.autocast leaves it",
    "angle deg2rad rad2deg": "a factor, or bounded",
    "ceil fix floor frac round trunc nan_to_num": "rounds or replaces",
    "diff gradient": "differences of neighbours",
    "fold": "adds what overlaps: a few terms",
    "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine": "the rounding is asked for by scale",
}
PROMOTES: dict[str, str] = {name: why for names, why in _INSIDE.items() for name in names.split()}
"""Why a function that computes is left to the widest of its inputs."""

_MOVES = {
    "amax amin aminmax max min cummax cummin kthvalue median nanmedian mode sort msort argsort topk": "picks or orders values",
    "adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices "
    "adaptive_max_pool3d adaptive_max_pool3d_with_indices fractional_max_pool2d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d fractional_max_pool3d_with_indices max_pool1d max_pool1d_with_indices max_pool2d "
    "max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d": "picks values",
    "embedding gather index_select take take_along_dim masked_select __getitem__": "looks values up",
    "masked_fill index_fill": "a constant among values; one beyond their range becomes the largest they have",
    "upsample_nearest": "repeats values",
    "lu_unpack": "takes a result apart",
}
FOLLOWS: dict[str, str] = {name: "moves values" for name, family in FAMILY.items() if family == "shape"} | {
    name: why for names, why in _MOVES.items() for name in names.split()
}
"""Why a function's inputs are left as they come."""

_MEETS = """
    addcdiv addcmul bilinear cross grid_sample grid_sampler grid_sampler_2d grid_sampler_3d heaviside index_add index_copy
    index_put index_reduce isclose allclose lerp masked_scatter put scatter scatter_add scatter_reduce select_scatter
    slice_scatter diagonal_scatter as_strided_scatter cartesian_prod meshgrid complex
"""
MEETS = frozenset(_MEETS.split())
"""Elementwise functions that do not promote by themselves: they fail on mixed dtypes, or write into the first input's."""

APART = frozenset(["affine_grid", "affine_grid_generator", "kron"])
"""Functions made of others that autocast would reach; their treatment holds for all that is inside."""

_NO_FLOATS = {
    "factories, views of storage and bookkeeping": """
        H.get __array__ __array_wrap__ __bool__ __complex__ __contains__ __deepcopy__ __dlpack__ __dlpack_device__ __float__
        __format__ __index__ __int__ __len__ __long__ __nonzero__ __reduce_ex__ __repr__ __setitem__ __setstate__
        _autocast_to_full_precision _autocast_to_reduced_precision _clear_non_serializable_cached_data _coalesced_ _dimI _dimV
        _indices _is_view _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides _nnz
        _sparse_mask_projection _sym_int _to_dense _values autocast backward coalesce const_data_ptr data_ptr dense_dim
        dim dim_order element_size empty_like full_like get_device item module_load ndimension nelement numel numpy ones_like
        pin_memory qscheme record_stream register_hook register_post_accumulate_grad_hook requires_grad_ resize resize_as
        resize_as_sparse_ retain_grad set_ share_memory_ size sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_
        storage storage_offset storage_type stride sum_to_size tolist untyped_storage values zeros_like apply_ map_ map2_ col_indices
        col_indices_copy ccol_indices ccol_indices_copy crow_indices crow_indices_copy row_indices row_indices_copy indices
        indices_copy values_copy sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum index
    """,
    "an attribute": """
        _backward_hooks _base _cdata _grad _grad_fn _post_accumulate_grad_hooks _version __cuda_array_interface__ device dtype grad
        grad_dtype grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse
        is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name nbytes ndim output_nr requires_grad retains_grad shape volatile
    """,
    "a cast, which is the author's choice": """
        bfloat16 bool byte cdouble cfloat chalf char cpu cuda double float half int ipu long mtia short to type type_as xpu
        to_dense to_mkldnn to_sparse copy_ float_power dequantize
    """,
    "a question about a tensor": """
        all any count_nonzero is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point is_inference is_neg
        is_nonzero is_pinned is_same_size is_set_to is_shared is_signed isfinite isin isinf isnan isneginf isposinf isreal
        signbit argmax argmin argwhere nonzero nonzero_static hash_tensor
    """,
    "integers or booleans": """
        __and__ __iand__ __ilshift__ __invert__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rand__ __rlshift__ __ror__
        __rrshift__ __rshift__ __rxor__ __xor__ bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
        bitwise_xor bincount gcd lcm logical_and logical_not logical_or logical_xor one_hot unravel_index
    """,
    "in place": "__iadd__ __idiv__ __ifloordiv__ __imod__ __imul__ __ipow__ __isub__ __itruediv__",
    "draws random numbers in the dtype that it is given": """
        bernoulli binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ poisson random_ uniform_
    """,
    "fills": "fill_ fill_diagonal_ zero_",
    "counts or looks up by value": """
        bucketize frexp histc histogram histogramdd searchsorted unique unique_consecutive
    """,
    "quantized, by scales and zero points": """
        choose_qparams_optimized fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis q_per_channel_scales
        q_per_channel_zero_points q_scale q_zero_point quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
        quantized_batch_norm quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d
        quantized_max_pool3d quantized_rnn_relu_cell quantized_rnn_tanh_cell
    """,
    "a kernel of one device, called by others": """
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
        batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats miopen_batch_norm miopen_convolution
        miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution miopen_rnn
    """,
    "sparse, left to torch.autocast": "hspmm smm spmm sspaddmm",
    "entered: its parts are decided one by one": "multi_head_attention_forward",
}
LEFT: dict[str, str] = {name: why for why, names in _NO_FLOATS.items() for name in names.split()}
"""Functions that are left as they are, and why."""


def namespaces() -> dict[str, Any]:
    """The public namespaces of functions, by the name that users know."""
    return {
        "torch": torch, "torch.nn.functional": torch.nn.functional, "torch.special": torch.special, "torch.linalg": torch.linalg,
        "torch.fft": torch.fft, "torch.functional": torch.functional, "torch.Tensor": torch.Tensor,
    }  # fmt: skip


def op_table() -> list[OpEntry]:
    """Every function of the tables once, under the first namespace that has it."""
    entries = []
    reasons = PROMOTES | FOLLOWS | LEFT
    for name in {**FAMILY, **LEFT}:
        place = next((space for space, module in namespaces().items() if hasattr(module, name)), None)
        if place is not None:
            entries.append(OpEntry(f"{place}.{name}", FAMILY.get(name), reasons.get(name, "")))
    return entries
