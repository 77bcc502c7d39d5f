"""JAX: a compiled training step hand-written with optax and jmp's casts, and the same step through precision.

Both compute in bfloat16 from float32 masters, scale the loss dynamically, skip non-finite steps (BatchNorm statistics too),
and share the model's code, the optimizer and the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from case import Case
from jax import lax

import precision

POLICY = precision.PrecisionPolicy(compute_dtype="bfloat16", loss_scale=precision.LossScale(mode="dynamic"))
GROWTH_INTERVAL, MINIMUM = 2000, 2.0**-24
BATCH = 64


def dense(p: Any, x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


def layer_norm(p: Any, x: Any) -> Any:
    """In float32, back to the compute dtype."""
    h = x.astype(jnp.float32)
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return (h * p["scale"] + p["offset"]).astype(x.dtype)


def mlp(params: Any, stats: Any, x: Any) -> tuple[Any, Any]:
    for name in ("fc1", "fc2"):
        x = jax.nn.relu(dense(params[name], x))
    return dense(params["head"], x), stats


def cnn(params: Any, stats: Any, x: Any) -> tuple[Any, Any]:
    new = {}
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(
            x, params[name]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = x.astype(jnp.float32)
        mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
        new[name] = jax.tree.map(lambda o, n: 0.9 * o + 0.1 * n, stats[name], {"mean": mean, "var": var})
        p = params[name]
        x = jax.nn.relu(((h - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["offset"]).astype(x.dtype))
    return dense(params["head"], x.mean((1, 2))), new


def transformer(params: Any, stats: Any, x: Any) -> tuple[Any, Any]:
    h = dense(params["embed"], x)
    for block in params["blocks"]:
        b, t, w = h.shape
        q, k, v = jnp.split(dense(block["qkv"], layer_norm(block["norm1"], h)), 3, -1)
        q, k, v = (a.reshape(b, t, 4, w // 4).transpose(0, 2, 1, 3) for a in (q, k, v))
        scores = (q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32) * (w // 4) ** -0.5
        out = jax.nn.softmax(scores).astype(h.dtype) @ v
        h = h + dense(block["proj"], out.transpose(0, 2, 1, 3).reshape(b, t, w))
        h = h + dense(block["fc2"], jax.nn.relu(dense(block["fc1"], layer_norm(block["norm2"], h))))
    return dense(params["head"], h.mean(1)), stats


def _weights(shapes: Any) -> Any:
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> Any:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)

    return jax.tree.map(draw, shapes, is_leaf=lambda node: isinstance(node, tuple))


def _start(shapes: Any, stat_shapes: Any) -> tuple[Any, Any]:
    ones = jax.tree.map(lambda shape: jnp.ones(shape), stat_shapes, is_leaf=lambda node: isinstance(node, tuple))
    return _weights(shapes), ones


def _dense(fan_in: int, fan_out: int) -> Any:
    return {"kernel": (fan_in, fan_out), "bias": (fan_out,)}


def _norm(width: int) -> Any:
    return {"scale": (width,), "offset": (width,)}


def _models() -> Iterator[tuple[str, Callable[..., Any], Any, Any, tuple[int, ...]]]:
    yield "mlp", mlp, {"fc1": _dense(256, 512), "fc2": _dense(512, 512), "head": _dense(512, 10)}, {}, (256,)
    convs = {
        "conv1": {"kernel": (3, 3, 3, 16), **_norm(16)},
        "conv2": {"kernel": (3, 3, 16, 32), **_norm(32)},
        "head": _dense(32, 10),
    }
    stats = {"conv1": {"mean": (16,), "var": (16,)}, "conv2": {"mean": (32,), "var": (32,)}}
    yield "cnn", cnn, convs, stats, (12, 12, 3)
    w = 64
    block = {
        "norm1": _norm(w), "qkv": _dense(w, 3 * w), "proj": _dense(w, w),
        "norm2": _norm(w), "fc1": _dense(w, 4 * w), "fc2": _dense(4 * w, w),
    }  # fmt: skip
    shapes = {"embed": _dense(16, w), "blocks": [block, block], "head": _dense(w, 10)}
    yield "transformer", transformer, shapes, {}, (16, 16)


def _loss(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def native_step(model: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """The whole step by hand."""
    casts = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def step(params: Any, stats: Any, opt_state: Any, scale: Any, good: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            low, low_x = casts.cast_to_compute((params, x))
            logits, new_stats = model(low, stats, low_x)
            loss = _loss(casts.cast_to_output(logits), y)
            return loss * scale, (loss, new_stats)

        (_, (loss, new_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        inverse = 1.0 / scale
        grads = jax.tree.map(lambda g: g * inverse, grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state, stats = jmp.select_tree(
            finite, (new_params, new_opt_state, new_stats), (params, opt_state, stats)
        )
        due = good + 1 >= GROWTH_INTERVAL
        grown = jnp.where(due, jnp.minimum(scale * 2.0, 2.0**126), scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale * 0.5, MINIMUM))
        good = jnp.where(finite & ~due, good + 1, 0)
        return params, stats, opt_state, scale, good, loss

    return jax.jit(step, donate_argnums=(0, 1, 2, 3, 4))


def precision_step(mp: Any, model: Callable[..., Any], opt: Any) -> Callable[..., Any]:
    """The same step through precision."""

    def loss_fn(params: Any, x: Any, stats: Any, y: Any) -> Any:
        logits, new_stats = model(params, stats, x)
        return _loss(mp.cast_to_output(logits), y), new_stats

    grad = mp.value_and_grad(loss_fn, has_aux=True, cast_argnums=(0, 1))

    def step(params: Any, stats: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (loss, new_stats), grads = grad(params, x, stats, y, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        stats = mp.select(opt_state.finite, new_stats, stats)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1, 2))


def _turning(step: Callable[..., Any], state: tuple[Any, ...], x: Any, y: Any) -> Callable[[], Any]:
    """A callable that takes one step from where the last one ended, and waits for it."""
    held = [state]

    def turn() -> Any:
        *new, loss = step(*held[0], x, y)
        held[0] = tuple(new)
        jax.block_until_ready((new, loss))
        return loss

    return turn


def cases() -> Iterator[Case]:
    """The three models."""
    mp = precision.bind(POLICY, backend="jax")
    rng = np.random.default_rng(1)
    y = jnp.asarray(rng.integers(0, 10, BATCH))
    for name, model, shapes, stat_shapes, sample in _models():
        x = jnp.asarray(rng.standard_normal((BATCH, *sample)), jnp.float32)

        tx = optax.adam(1e-3)
        opt = mp.optimizer(tx)
        params, stats = _start(shapes, stat_shapes)
        scale = jnp.asarray(POLICY.loss_scale.initial, jnp.float32)
        native = (params, stats, tx.init(params), scale, jnp.asarray(0, jnp.int32))
        params, stats = _start(shapes, stat_shapes)
        ours = (params, stats, opt.init(params))
        yield Case(
            name,
            _turning(native_step(model, tx), native, x, y),
            _turning(precision_step(mp, model, opt), ours, x, y),
        )
