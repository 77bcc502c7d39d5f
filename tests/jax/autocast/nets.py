"""Small whole models for the tests of autocast, in plain JAX: a transformer, a residual network, an LSTM and a U-Net."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax.autocast.common import normal

WIDTH, HEADS, HIDDEN, TOKENS, BATCH, VOCABULARY, LAYERS = 32, 4, 128, 16, 2, 33, 2


def _dense(rows, columns):
    return {"kernel": normal(rows, columns, seed=rows * columns, scale=rows**-0.5), "bias": normal(columns, scale=0.02)}


def _norm(width):
    return {"scale": jnp.ones(width), "offset": jnp.zeros(width)}


def _block():
    return {
        "norm1": _norm(WIDTH),
        "qkv": _dense(WIDTH, 3 * WIDTH),
        "proj": _dense(WIDTH, WIDTH),
        "norm2": _norm(WIDTH),
        "fc1": _dense(WIDTH, HIDDEN),
        "fc2": _dense(HIDDEN, WIDTH),
    }


def transformer_params(stacked=False):
    blocks = [_block() for _ in range(LAYERS)]
    return {
        "embed": normal(VOCABULARY, WIDTH, seed=5),
        "position": normal(TOKENS, WIDTH, seed=6, scale=0.1),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if stacked else blocks,
        "norm": _norm(WIDTH),
        "head": _dense(WIDTH, VOCABULARY),
    }


def _apply(p, x):
    return x @ p["kernel"] + p["bias"]


def _layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["offset"]


def block(p, x):
    """One layer with masked attention."""

    def heads(a):
        return a.reshape(*a.shape[:2], HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

    q, k, v = map(heads, jnp.split(_apply(p["qkv"], _layer_norm(p["norm1"], x)), 3, -1))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH // HEADS)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + _apply(p["proj"], mixed)
    return x + _apply(p["fc2"], jax.nn.gelu(_apply(p["fc1"], _layer_norm(p["norm2"], x))))


def transformer(p, tokens, remat=False):
    """Logits; the layers are scanned over if their parameters are stacked."""
    layer = jax.checkpoint(block) if remat else block
    x = p["embed"][tokens] + p["position"]
    if isinstance(p["blocks"], list):
        for layer_params in p["blocks"]:
            x = layer(layer_params, x)
    else:
        x, _ = lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, p["blocks"])
    return _apply(p["head"], _layer_norm(p["norm"], x))


def tokens():
    rng = np.random.default_rng(1)
    return rng.integers(0, VOCABULARY, (BATCH, TOKENS)), rng.integers(0, VOCABULARY, (BATCH, TOKENS))


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


class ResNet(nn.Module):
    """Two residual stages with BatchNorm. Its activation is smooth: a rounding that flips a ReLU moves a gradient by much more."""

    @nn.compact
    def __call__(self, x):
        for width, stride in ((8, 1), (16, 2)):
            norm = lambda y: nn.BatchNorm(use_running_average=False, momentum=0.9)(y)  # noqa: E731
            y = nn.silu(norm(nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)))
            y = norm(nn.Conv(width, (3, 3), use_bias=False)(y))
            x = nn.silu(y + norm(nn.Conv(width, (1, 1), (stride, stride), use_bias=False)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def lstm_params():
    return {
        "input": normal(8, 64, scale=0.3),
        "hidden": normal(16, 64, seed=1, scale=0.2),
        "bias": jnp.zeros(64),
        "out": _dense(16, 3),
    }


def lstm(p, xs):
    """The last output of a scanned LSTM; ``xs`` is (time, batch, 8)."""

    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["input"] + h @ p["hidden"] + p["bias"], 4, -1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], 16))
    (h, _), _ = lax.scan(cell, (zeros, zeros), xs)
    return _apply(p["out"], h)


def unet_params():
    def kernel(i, o, seed):
        return {"kernel": normal(3, 3, i, o, seed=seed, scale=(9 * i) ** -0.5), "bias": jnp.zeros(o)}

    return {"down": kernel(3, 8, 1), "middle": kernel(8, 8, 2), "up": kernel(16, 4, 3)}


def unet(p, x):
    """Down, across and up again with a bilinear resize; NHWC."""

    def conv(name, x):
        y = lax.conv_general_dilated(x, p[name]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y + p[name]["bias"]

    skip = jax.nn.relu(conv("down", x))
    pooled = lax.reduce_window(skip, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    middle = jax.nn.relu(conv("middle", pooled))
    raised = jax.image.resize(middle, skip.shape, "bilinear")
    return conv("up", jnp.concatenate([skip, raised], -1))
