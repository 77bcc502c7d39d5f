"""Torch's op cases of op-level autocast, and what was observed when they ran.

The observer is a dispatch mode: it sees what runs below autocasting, after every cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from precision.parity.adapter import OpResult
from precision_torch.dtypes import dtype_name

_NAMES = """
    _reshape_alias _to_copy _unsafe_view alias clone constant_pad_nd copy_ detach embedding expand flip gather index index_select
    lift_fresh max max_pool2d_with_indices permute reshape select slice sort split squeeze t topk transpose unbind unsqueeze new_zeros
    upsample_nearest2d view amax chunk split_with_sizes
"""
_MOVES = frozenset(_NAMES.split())
"""Ops, as the dispatcher names them, that move or pick values."""
_MEETING = frozenset(["cat", "stack"])
"""Ops that are not pointwise and promote inside, as pointwise ones do."""


class Watch(TorchDispatchMode):
    """Notes the dtypes in which each of some tensors is taken by the ops that compute with it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.taken: list[set[str]] = [set() for _ in inputs]
        self._kept: list[Any] = list(inputs)  # so that no id is used again
        self._which = {id(tensor): i for i, tensor in enumerate(inputs)}

    def note(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is taken as it is."""
        if id(tensor) in self._which:
            self.taken[self._which[id(tensor)]].add(dtype_name(tensor.dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        ours = [(self._which[id(t)], t) for t in given if id(t) in self._which]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if ours and name in _MOVES:
            for out in torch.utils._pytree.tree_leaves(result):
                if isinstance(out, torch.Tensor) and (out.is_floating_point() or not given[0].is_floating_point()):
                    self._which[id(out)] = ours[0][0]
                    self._kept.append(out)
        elif ours:
            floats = [t.dtype for t in given if t.is_floating_point() and t.dim()]
            meet = (torch.Tag.pointwise in func.tags or name in _MEETING) and floats
            for i, tensor in ours:
                dtype = tensor.dtype
                if meet and tensor.is_floating_point():
                    for other in floats:
                        dtype = torch.promote_types(dtype, other)
                self.taken[i].add(dtype_name(dtype))
        return result


class Called(TorchFunctionMode):
    """For functions whose kernels are made of others that widen inside: what they are called with is what they take.

    It is entered before autocasting, so that it sees calls after the table's casts.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.rms_norm:
            return func(*args, **(kwargs or {}))
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                self.watch.note(tensor)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(*args, **(kwargs or {}))


def first(x: torch.Tensor) -> torch.Tensor:
    """Channels first."""
    return x.movedim(-1, 1)


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels last."""
    return x.movedim(1, -1)


def _conv(function: Callable[..., torch.Tensor], **settings: Any) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return last(function(first(x), kernel.permute(-1, -2, *range(kernel.dim() - 2)), bias, **settings))

    return run


_wide = {"padding": 1}
CASES: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda a, b: a @ b,
    "batched_matmul": torch.bmm,
    "matvec": torch.mv,
    "dot": torch.dot,
    "linear": lambda x, k, b: F.linear(x, k.T, b),
    "addmm": torch.addmm,
    "einsum_batched": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "einsum_heads": lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
    "einsum_three": lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
    "tensordot": lambda a, b: torch.tensordot(a, b, 2),
    "conv1d": _conv(F.conv1d, **_wide),
    "conv2d": _conv(F.conv2d, **_wide),
    "conv2d_bias": _conv(F.conv2d, **_wide),
    "conv2d_strided": _conv(F.conv2d, stride=2, **_wide),
    "conv2d_dilated": _conv(F.conv2d, dilation=2, padding=2),
    "conv2d_depthwise": _conv(F.conv2d, groups=4, **_wide),
    "conv3d": _conv(F.conv3d, **_wide),
    "conv_transpose2d": lambda x, k: last(F.conv_transpose2d(first(x), k.permute(2, 3, 0, 1), stride=2)),
    "attention": lambda q, k, v: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0],
    "attention_masked": lambda q, k, v, m: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], m)[:, 0],
    "layer_norm": lambda x, s, o: F.layer_norm(x, x.shape[-1:], s, o, 1e-5),
    "rms_norm": lambda x, s: F.rms_norm(x, x.shape[-1:], s, 1e-5),
    "group_norm": lambda x, s, o: last(F.group_norm(first(x), 2, s, o, 1e-5)),
    "instance_norm": lambda x: last(F.instance_norm(first(x), eps=1e-5)),
    "batch_norm_train": lambda x, s, o: last(F.batch_norm(first(x), None, None, s, o, True, eps=1e-5)),
    "batch_norm_eval": lambda x, s, o, m, v: last(F.batch_norm(first(x), m, v, s, o, False, eps=1e-5)),
    "l2_normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.long()),
    "nll": lambda p, y: F.nll_loss(p, y.long()),
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "kl_divergence": lambda p, q: F.kl_div(p, q, reduction="batchmean"),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "sum": torch.sum,
    "sum_axis": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "variance": lambda x: x.var(-1, correction=0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "avg_pool2d": lambda x: last(F.avg_pool2d(first(x), 2)),
    "global_avg_pool": lambda x: F.adaptive_avg_pool2d(first(x), 1).flatten(1),
    "resize_bilinear": lambda x: last(F.interpolate(first(x), scale_factor=2, mode="bilinear")),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "pow": lambda a, b: a**b,
    "cube": lambda x: x**3,
    "square": torch.square,
    "rsqrt": torch.rsqrt,
    "reciprocal": lambda x: 1 / x,
    "softplus": F.softplus,
    "tan": torch.tan,
    "sinh": torch.sinh,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "add": lambda a, b: a + b,
    "sub_low": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "div_low": lambda a, b: a / b,
    "maximum": torch.maximum,
    "where": torch.where,
    "concat": lambda a, b: torch.cat([a, b], -1),
    "atan2": torch.atan2,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.125),
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "abs": torch.abs,
    "clip": lambda x: x.clip(-0.5, 0.5),
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 32),
    "slice": lambda x: x[1:3, ::2],
    "pad": lambda x: F.pad(x, (0, 2, 1, 1)),
    "flip": lambda x: x.flip(-1),
    "embedding": lambda table, ids: F.embedding(ids, table),
    "gather": lambda x, ids: x[ids],
    "max_pool2d": lambda x: last(F.max_pool2d(first(x), 2)),
    "max": lambda x: x.amax(-1),
    "sort": lambda x: x.sort(-1).values,
    "top_k": lambda x: x.topk(3).values,
    "resize_nearest": lambda x: last(F.interpolate(first(x), scale_factor=2)),
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "solve": torch.linalg.solve,
    "triangular_solve": lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
    "determinant": torch.linalg.det,
    "singular_values": torch.linalg.svdvals,
    "eigenvalues": torch.linalg.eigvalsh,
    "lstm_cell": lambda x, h, c, wx, wh, b: torch.lstm_cell(x, (h, c), wx.T, wh.T, b, b.new_zeros(20))[0],
    "lstm_cell_wide": lambda x, h, c, wx, wh, b: torch.lstm_cell(x, (h, c), wx.T, wh.T, b, b.new_zeros(20))[0],
    "gru_cell": lambda x, h, wx, wh, b: torch.gru_cell(x, h, wx.T, wh.T, b, b.new_zeros(15)),
}


def run_case(mp: Any, name: str, inputs: Sequence[torch.Tensor]) -> OpResult:
    """Run a case under ``mp.autocast()`` and tell what was observed; an input that is only moved leaves as the result does."""
    watch = Watch(inputs)
    with torch.no_grad(), Called(watch), mp.autocast(), watch:
        result = CASES[name](*inputs)
    gives = dtype_name(result.dtype)
    takes = [
        ("+".join(sorted(taken)) or gives) if tensor.is_floating_point() else dtype_name(tensor.dtype)
        for tensor, taken in zip(inputs, watch.taken, strict=True)
    ]
    return OpResult(tuple(takes), gives, result.detach().double().cpu().numpy())
