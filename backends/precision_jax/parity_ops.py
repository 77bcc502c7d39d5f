"""The op cases of op-level autocast as JAX's users spell them, and what the rewritten program did with each input.

All cases are traced into one program and compiled once; what is reported is read off that program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core as jex

from precision.parity.adapter import Array, OpResult
from precision_jax.autocast import untouched
from precision_jax.opcast import marks
from precision_jax.opcast.families import FAMILY

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA: a program that runs once is not worth optimising."""

NHWC = ("NHWC", "HWIO", "NHWC")


def _conv(x: Any, kernel: Any, stride: int = 1, dilation: int = 1, groups: int = 1) -> Any:
    spatial = x.ndim - 2
    letters = "DHW"[3 - spatial :]
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * spatial,
        ((dilation, dilation),) * spatial,
        rhs_dilation=(dilation,) * spatial,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )


def _attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    heads = [a[:, :, None] for a in (q, k, v)]
    return jax.nn.dot_product_attention(*heads, mask=None if mask is None else mask[None, None])[:, :, 0]


def _group_norm(x: Any, scale: Any, offset: Any) -> Any:
    split = x.reshape(*x.shape[:-1], 2, -1)
    return jax.nn.standardize(split, (1, 2, 4), epsilon=1e-5).reshape(x.shape) * scale + offset


def _windows(x: Any, start: float, combine: Any) -> Any:
    return lax.reduce_window(x, start, combine, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _lstm_cell(x: Any, h: Any, c: Any, wx: Any, wh: Any, bias: Any) -> Any:
    i, f, g, o = jnp.split(x @ wx + h @ wh + bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c)


def _gru_cell(x: Any, h: Any, wx: Any, wh: Any, bias: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ wx + bias, 3, -1), jnp.split(h @ wh, 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h


SPELT: dict[str, Callable[..., Any]] = {
    "matmul": jnp.matmul,
    "batched_matmul": jnp.matmul,
    "matvec": jnp.matmul,
    "dot": jnp.dot,
    "linear": lambda x, k, b: x @ k + b,
    "einsum_batched": lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
    "einsum_heads": lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
    "einsum_three": lambda a, b, c: jnp.einsum("ij,jk,kl->il", a, b, c),
    "tensordot": lambda a, b: jnp.tensordot(a, b, 2),
    "conv1d": _conv,
    "conv2d": _conv,
    "conv2d_bias": lambda x, k, b: _conv(x, k) + b,
    "conv2d_strided": lambda x, k: _conv(x, k, stride=2),
    "conv2d_dilated": lambda x, k: _conv(x, k, dilation=2),
    "conv2d_depthwise": lambda x, k: _conv(x, k, groups=4),
    "conv3d": _conv,
    "conv_transpose2d": lambda x, k: lax.conv_transpose(x, k[::-1, ::-1], (2, 2), "VALID", dimension_numbers=NHWC),
    "attention": _attention,
    "attention_masked": _attention,
    "layer_norm": lambda x, s, o: jax.nn.standardize(x, epsilon=1e-5) * s + o,
    "group_norm": _group_norm,
    "instance_norm": lambda x: jax.nn.standardize(x, (1, 2), epsilon=1e-5),
    "batch_norm_train": lambda x, s, o: jax.nn.standardize(x, (0, 1, 2), epsilon=1e-5) * s + o,
    "batch_norm_eval": lambda x, s, o, m, v: jax.nn.standardize(x, mean=m, variance=v, epsilon=1e-5) * s + o,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "cross_entropy": lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y).mean(),
    "nll": lambda p, y: -jnp.take_along_axis(p, y[:, None], -1).mean(),
    "binary_cross_entropy": lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean(),
    "mse": lambda a, b: jnp.square(a - b).mean(),
    "l1": lambda a, b: jnp.abs(a - b).mean(),
    "huber": lambda a, b: optax.huber_loss(a, b).mean(),
    "kl_divergence": lambda p, q: optax.losses.kl_divergence(p, q).mean(),
    "cosine_similarity": lambda a, b: optax.losses.cosine_similarity(a, b),
    "sum": jnp.sum,
    "sum_axis": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "cumprod": lambda x: jnp.cumprod(x, -1),
    "variance": lambda x: x.var(-1),
    "vector_norm": lambda x: jnp.linalg.norm(x, axis=-1),
    "avg_pool2d": lambda x: _windows(x, 0.0, lax.add) / 4,
    "global_avg_pool": lambda x: x.mean((1, 2)),
    "resize_bilinear": lambda x: jax.image.resize(x, (2, 6, 6, 4), "bilinear"),
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "pow": jnp.power,
    "cube": lambda x: x**3,
    "square": jnp.square,
    "rsqrt": lax.rsqrt,
    "reciprocal": lambda x: 1 / x,
    "softplus": jax.nn.softplus,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "erfinv": jax.scipy.special.erfinv,
    "lgamma": jax.scipy.special.gammaln,
    "add": jnp.add,
    "sub_low": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "div_low": jnp.divide,
    "maximum": jnp.maximum,
    "where": jnp.where,
    "concat": lambda a, b: jnp.concatenate([a, b], -1),
    "atan2": jnp.arctan2,
    "relu": jax.nn.relu,
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.125),
    "elu": jax.nn.elu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "sqrt": jnp.sqrt,
    "sin": jnp.sin,
    "abs": jnp.abs,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "transpose": jnp.transpose,
    "reshape": lambda x: x.reshape(2, 32),
    "slice": lambda x: x[1:3, ::2],
    "pad": lambda x: jnp.pad(x, ((1, 1), (0, 2))),
    "flip": lambda x: jnp.flip(x, -1),
    "embedding": lambda table, ids: table[ids],
    "gather": lambda x, ids: jnp.take(x, ids, axis=0),
    "max_pool2d": lambda x: _windows(x, -jnp.inf, lax.max),
    "max": lambda x: x.max(-1),
    "sort": lambda x: jnp.sort(x, -1),
    "top_k": lambda x: lax.top_k(x, 3)[0],
    "resize_nearest": lambda x: jax.image.resize(x, (2, 6, 6, 4), "nearest"),
    "cholesky": jnp.linalg.cholesky,
    "inverse": jnp.linalg.inv,
    "solve": jnp.linalg.solve,
    "triangular_solve": lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
    "determinant": jnp.linalg.det,
    "singular_values": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "eigenvalues": jnp.linalg.eigvalsh,
    "lstm_cell": _lstm_cell,
    "lstm_cell_wide": _lstm_cell,
    "gru_cell": _gru_cell,
}
"""Each case by its name, as plain JAX has it."""

MARKED: dict[str, tuple[str, Callable[..., Any]]] = {
    "addmm": ("matmul", lambda c, a, b: c + a @ b),
    "rms_norm": ("norm", lambda x, s: x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * s),
    "l2_normalize": ("norm", lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
}
"""What JAX has no function for: written by hand, and marked with ``mp.op(family)``."""


def autocast_ops(mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
    """See :meth:`precision.parity.ParityAdapter.autocast_ops`."""
    runs = [untouched(mp, _spelt(mp, name)) for name, _ in calls]
    inputs = [[jnp.asarray(a) for a in arrays] for _, arrays in calls]

    def every(inputs: Any) -> Any:
        return [run(*arrays) for run, arrays in zip(runs, inputs, strict=True)]

    traced = jax.jit(every).trace(inputs)
    jaxpr, outs = traced.jaxpr.jaxpr, traced.lower().compile(QUICKLY)(inputs)
    variables = iter(jaxpr.invars)
    return [
        OpResult(
            tuple("+".join(sorted(taken(jaxpr, next(variables)))) for _ in arrays),
            out.dtype.name,
            np.asarray(out).astype(np.float64),
        )
        for (_, arrays), out in zip(calls, outs, strict=True)
    ]


def _spelt(mp: Any, name: str) -> Callable[..., Any]:
    if name in MARKED:
        family, fun = MARKED[name]
        marked: Callable[..., Any] = mp.op(family)(fun)
        return marked
    return SPELT[name]


# ---- what a program does with an input ------------------------------------------------------------------------------

_MOVES = frozenset(name for name, family in FAMILY.items() if family == "shape") | {"convert_element_type"}


def taken(jaxpr: Any, var: Any) -> set[str]:
    """The dtypes in which a value is first taken by what computes, seen through casts and moves of values.

    Args:
        jaxpr: an open jaxpr.
        var: one of its variables.
    """
    if not jnp.issubdtype(var.aval.dtype, jnp.floating):
        return {var.aval.dtype.name}
    found, left = _follow(jaxpr, var)
    return found or left


def _follow(jaxpr: Any, var: Any) -> tuple[set[str], set[str]]:
    """The dtypes that a value is taken in, and those in which it leaves the jaxpr without having been."""
    found: set[str] = set()
    left = {var.aval.dtype.name for out in jaxpr.outvars if out is var}
    for eqn in jaxpr.eqns:
        if not any(a is var for a in eqn.invars if not isinstance(a, jex.Literal)):
            continue
        name = eqn.primitive.name
        onward: list[Any] = []
        if marks.FUSED in str(eqn.source_info.name_stack):
            found.add(var.aval.dtype.name)
        elif name == "precision_contract":
            found.add(eqn.params["compute"].name)
        elif name == "precision_round":
            found.add(eqn.params["dtype"].name)
        elif name == "convert_element_type" and _meets_a_product(jaxpr, eqn):
            found.add(var.aval.dtype.name)
        elif name in _MOVES:
            onward = [v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        elif name in _CALLS:
            for inner, position in _inner(eqn, var):
                inside = inner.invars[position]
                taken_inside, _ = _follow(inner, inside)
                found |= taken_inside
                onward += [o for o, v in zip(eqn.outvars, inner.outvars, strict=True) if _passes(inner, inside, v)]
        else:
            found.add(var.aval.dtype.name)
        for out in onward:
            more, leaves = _follow(jaxpr, out)
            found |= more
            left |= leaves
    return found, left


def _meets_a_product(jaxpr: Any, cast: Any) -> bool:
    """Whether a low value is widened to be added to a product's float32 sum: a bias, part of a product in its own dtype."""
    sums = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "precision_contract"}
    adds = [e for e in jaxpr.eqns if e.primitive.name == "add"]
    for e in adds:
        if sum(a in sums for a in e.invars if not isinstance(a, jex.Literal)) == 2:
            sums.add(e.outvars[0])
    out = cast.outvars[0]
    return out.aval.dtype == np.float32 and any(out in e.invars and any(a in sums for a in e.invars) for e in adds)


_CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def _inner(eqn: Any, var: Any) -> Iterator[tuple[Any, int]]:
    inner = eqn.params[_CALLS[eqn.primitive.name]]
    inner = getattr(inner, "jaxpr", inner)
    for position, atom in enumerate(eqn.invars):
        if atom is var:
            yield inner, position


def _passes(jaxpr: Any, var: Any, out: Any) -> bool:
    """Whether a result is a value that was only moved."""
    if out is var:
        return True
    for eqn in jaxpr.eqns:
        if not isinstance(out, jex.Literal) and out in eqn.outvars and eqn.primitive.name in _MOVES:
            return any(not isinstance(a, jex.Literal) and _passes(jaxpr, var, a) for a in eqn.invars)
    return False
