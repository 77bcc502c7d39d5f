"""What ``torch.autocast`` itself does on each device, by a function's bare name: ``low``, ``float32`` or ``promote``.

Functions that are not named here take their inputs as they come. A name stands here only if all of what is called so is
treated alike natively, mixed inputs included. CUDA's is the list in ``ATen/autocast_mode.h``; the CPU's, whose list is in no
header, was found by running each function. Tests hold both against the torch that is installed.
"""

from __future__ import annotations


def _table(**kinds: str) -> dict[str, str]:
    return {name: kind for kind, names in kinds.items() for name in names.split()}


_CUDA = _table(
    low="""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d addmm addmv addr matmul einsum mm mv
        linear addbmm bmm chain_matmul multi_dot __matmul__ __rmatmul__ prelu lstm gru rnn_tanh rnn_relu
    """,
    float32="""
        acos arccos asin arcsin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow __pow__ __rpow__
        softplus layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
        logsumexp prod softmax log_softmax cumprod cumsum sum cross_entropy upsample_nearest __rdiv__ __rtruediv__
    """,
    promote="addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add grid_sample",
)

_CPU = _table(
    low="""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d addmm matmul mm linear addbmm bmm
        vecdot __matmul__ __rmatmul__ prelu
    """,
    float32="""
        adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d binary_cross_entropy
        binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy
        ctc_loss fake_quantize_per_tensor_affine fft fft2 fftn fractional_max_pool2d fractional_max_pool2d_with_indices
        fractional_max_pool3d fractional_max_pool3d_with_indices geqrf grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
        hfft hinge_embedding_loss huber_loss ifft ifft2 ifftn ihfft inverse irfft irfft2 irfftn kl_div l1_loss cholesky_ex cond
        eig eigh eigvals eigvalsh householder_product inv inv_ex lstsq matrix_rank qr svd svdvals tensorinv tensorsolve
        margin_ranking_loss max_pool3d max_unpool1d max_unpool2d max_unpool3d mse_loss
        multi_margin_loss multilabel_margin_loss nanquantile nll_loss orgqr ormqr pad pinverse poisson_nll_loss polar prod
        quantile rfft rfft2 rfftn smooth_l1_loss soft_margin_loss stft trace triangular_solve triplet_margin_loss
        view_as_complex
    """,
    promote="cat stack index_copy concat concatenate",
)

NATIVE: dict[str, dict[str, str]] = {"cpu": _CPU, "cuda": _CUDA, "xpu": _CUDA, "mps": _table(
    low="conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d addmm matmul mm linear bmm __matmul__",
    float32="softmax log_softmax layer_norm exp log sum mse_loss nll_loss upsample_nearest __rdiv__ __rtruediv__ pow __pow__",
    promote="grid_sampler grid_sample",
) | {"prelu": "low"}}  # fmt: skip
"""By device type, then by bare name."""
