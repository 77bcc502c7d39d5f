"""Which op family each JAX primitive belongs to: JAX's half of the one table in ``precision.ops``.

A primitive is in exactly one of the tables below. Those in none are opaque: they see the dtypes they were traced with.
"""

from __future__ import annotations


def _table(**families: str) -> dict[str, str]:
    return {name.replace("__", "-"): family for family, names in families.items() for name in names.split()}


FAMILY: dict[str, str] = _table(
    matmul="dot_general ragged_dot_general",
    conv="conv_general_dilated",
    reduction="""
        reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum select_and_scatter_add
        psum psum_invariant reduce_scatter symmetric_product
    """,
    transcendental="""
        exp exp2 expm1 log log2 log1p pow integer_pow square rsqrt tan acos acosh asin cosh sinh
        erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a
        regularized_incomplete_beta bessel_i0e bessel_i1e
    """,
    linalg="""
        cholesky cholesky_update eig eigh svd qr lu geqrf geqp3 ormqr householder_product hessenberg schur tridiagonal
        tridiagonal_solve triangular_solve fft
    """,
    elementwise="""
        add add_any sub mul div rem neg abs sign max min sqrt cbrt logistic tanh erf erfc sin cos
        asinh atan atan2 atanh floor ceil round nextafter clamp select_n is_finite
        eq ne lt le gt ge one_minus_square polynomial eq_to lt_to le_to concatenate stack dynamic_update_slice reduce_precision
    """,
    shape="""
        broadcast_in_dim broadcast_to reshape transpose squeeze slice dynamic_slice gather pad rev copy tile split unstack
        reduce_max reduce_min argmax argmin cummax cummin reduce_window_max reduce_window_min sort top_k approx_top_k
        stop_gradient name optimization_barrier sharding_constraint layout_constraint reshard device_put
        with_memory_space_constraint pvary pbroadcast preduced all_gather all_gather_invariant all_gather_reduced all_to_all
        ppermute pmax pmin ragged_all_to_all pin unpin tie dce_sink reduced_vary_cast_p vary_unreduced_cast_p reduced_vary_cast vary_unreduced_cast relayout pbroadcast_dynamic
        unreduced_psum unreduced_pmax unreduced_pmin unreduced_reduce_scatter
    """,
)
"""Families by primitive name."""

OF_OTHER_RELEASES = frozenset(
    [
        "log2",
        "one_minus_square",
        "polynomial",
        "reduced_vary_cast",
        "vary_unreduced_cast",
        "relayout",
        "pbroadcast_dynamic",
        "unreduced_pmax",
        "unreduced_pmin",
        "reduced_vary_cast_p",
        "vary_unreduced_cast_p",
    ]
)
"""Names of :data:`FAMILY` that not every JAX has that this package admits."""

WHY: dict[str, str] = {
    "sqrt": "torch.autocast leaves it: it shrinks what it is given",
    "tanh": "bounded; torch.autocast leaves it",
    "logistic": "bounded; torch.autocast leaves sigmoid",
    "erf": "bounded", "erfc": "bounded", "sin": "bounded", "cos": "bounded", "atan": "bounded", "atan2": "bounded",
    "asinh": "grows slower than its argument", "atanh": "torch.autocast leaves it", "cbrt": "it shrinks",
    "reduce_max": "picks a value", "reduce_min": "picks a value", "pmax": "picks a value", "pmin": "picks a value",
    "gather": "looks values up", "top_k": "picks values", "approx_top_k": "picks values", "sort": "moves values",
    "cummax": "picks values", "cummin": "picks values", "reduce_window_max": "picks values", "reduce_window_min": "picks values",
    "unreduced_psum": "a sum that is put off; its operands stay", "unreduced_reduce_scatter": "a sum that is put off",
    "reduce_precision": "the rounding is asked for by number of bits",
}  # fmt: skip
"""Why a primitive that computes is left to promote or to follow; those not named move values, or are cheap arithmetic."""

EACH = frozenset(
    [
        "sort",
        "optimization_barrier",
        "pvary",
        "pbroadcast",
        "device_put",
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_to_all",
        "ppermute",
        "all_gather",
        "sharding_constraint",
        "tie",
        "dce_sink",
        "unreduced_psum",
    ]
)
"""Primitives whose operands need not agree: each is treated for itself."""

SELECTING = frozenset(
    [
        "select_n",
        "max",
        "min",
        "clamp",
        "pad",
        "concatenate",
        "dynamic_update_slice",
        "stack",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
)
"""Primitives that give one of their operands: a constant among them is brought into range instead of becoming infinite."""

VIEW = frozenset(
    [
        "reshape",
        "transpose",
        "squeeze",
        "slice",
        "dynamic_slice",
        "broadcast_in_dim",
        "rev",
        "copy",
        "stop_gradient",
        "name",
        "sharding_constraint",
        "layout_constraint",
        "reshard",
        "pvary",
        "optimization_barrier",
        "split",
        "unstack",
    ]
)
"""Primitives whose result shows values of one operand: a view of a parameter is still that parameter."""

CONTRACTIONS = frozenset(name for name, family in FAMILY.items() if family in ("matmul", "conv"))
"""Primitives that multiply and accumulate."""

ENTERED: dict[str, str] = {
    "jit": "entered", "closed_call": "entered", "call": "entered", "core_call": "entered", "eval_jaxpr": "entered", "remat2": "entered, policy kept",
    "scan": "entered, carries to a fixed point", "while": "entered, carries to a fixed point",
    "cond": "entered, branches agree", "custom_jvp_call": "entered, rule kept", "custom_vjp_call": "entered, rule kept",
    "shard_map": "entered", "custom_linear_solve": "float32, the functions inside too", "convert_element_type": "an author's cast is obeyed; JAX's own are not needed",
}  # fmt: skip
"""Primitives with a rule of their own in :mod:`precision_jax.opcast`."""

OPAQUE: dict[str, str] = {
    **dict.fromkeys(
        ("pallas_call", "core_map", "ffi_call", "call_exported", "call_hi_primitive", "composite", "custom_partitioning", "cudnn_fusion",
         "scaled_matmul", "scaled_matmul_wrapper", "scaled_dot", "mosaic_call", "tpu_custom_call"),
        "a kernel written for its dtypes",
    ),
    **dict.fromkeys(
        ("dot_product_attention_fwd", "dot_product_attention_bwd", "dot_product_attention_fwd_wrapper",
         "dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_fwd", "dot_product_attention_fp8_bwd",
         "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"),
        "cuDNN's attention: its layout and dtypes were chosen when it was traced",
    ),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "debug_print", "inspect_sharding", "check"),
                    "Python on the host sees the dtypes it declares"),
    **dict.fromkeys(("linear_call", "custom_lin", "custom_vmap_call", "custom_transpose_call"),
                    "functions inside that must stay each other's derivative or inverse"),
    **dict.fromkeys(("reduce", "reduce_window", "select_and_scatter", "select_and_gather_add", "reduce_and", "reduce_or",
                     "reduce_xor"), "reduces with a function traced for its dtype, or integers"),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
                    "combines with a function traced for its dtype; sums of many rows belong in float32"),
    **dict.fromkeys(("complex", "real", "imag", "conj"), "complex numbers have no low formats"),
    **dict.fromkeys(("bitcast_convert_type", "from_edtype", "to_edtype"), "its result depends on the bits"),
    **dict.fromkeys(("get", "swap", "addupdate", "run_state", "empty_ref", "freeze", "new_ref", "ref", "free_ref"),
                    "references hold the dtype they were made with"),
    **dict.fromkeys(("random_gamma", "rng_uniform"), "draws in the dtype it was traced with"),
    **dict.fromkeys(
        ["and", "or", "xor", "not", "shift_left", "shift_right_arithmetic", "shift_right_logical", "population_count", "clz", "mulhi", "random_bits", "random_fold_in", "random_seed", "random_split", "random_clone", "random_wrap", "random_unwrap", "threefry2x32", "threefry4x32", "philox2x32", "philox4x32", "rng_bit_generator", "iota", "iota_2x32_shape", "axis_index", "lu_pivots_to_permutation", "after_all", "create_token", "create_linear", "empty", "empty2", "dim_as_value", "dimension_size", "shape_assertion", "platform_index", "unreachable", "stage", "precv", "psend", "remat_opt"],
        "no floating inputs",
    ),
    **dict.fromkeys(
        tuple(f"{name}_{end}" for end in ("start", "done") for name in
              ("all_gather", "all_gather_reduced", "all_to_all", "pbroadcast", "ppermute", "psum", "psum_invariant",
               "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter")),
        "half of a collective: both halves were traced for one dtype",
    ),
}  # fmt: skip
"""Primitives that see the dtypes they were traced with, and why."""
