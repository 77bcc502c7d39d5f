"""The op cases' maths in float64 NumPy, written out plainly: what the frameworks' ops are judged against.

Layouts are canonical: channels last, kernels ``(..., in, out)``, batch first.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from precision.parity.adapter import Array

erf = np.vectorize(math.erf, otypes=[float])
lgamma = np.vectorize(math.lgamma, otypes=[float])
EPSILON = 1e-5


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    return np.asarray(1 / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """The exact one: ``x * Phi(x)``."""
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    return np.asarray(np.exp(log_softmax(x)))


def logsumexp(x: Array) -> Array:
    """Over the last axis."""
    top = x.max(-1)
    return np.asarray(top + np.log(np.exp(x - top[..., None]).sum(-1)))


def attention(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """``softmax(q k^T / sqrt(features)) v``, one head; q, k, v ``(batch, tokens, features)``; mask is True where seen."""
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -1e30)
    return np.asarray(softmax(scores) @ v)


def conv(x: Array, kernel: Array, stride: int = 1, dilation: int = 1, groups: int = 1) -> Array:
    """Convolution of any number of spatial axes, zero padding ``dilation * (size - 1) / 2`` (odd sizes)."""
    sizes = kernel.shape[:-2]
    per_group, out = kernel.shape[-2:]
    pads = [dilation * (size - 1) // 2 for size in sizes]
    padded = np.pad(x, [(0, 0), *((p, p) for p in pads), (0, 0)])
    counts = [-(-n // stride) for n in x.shape[1:-1]]
    result = np.zeros((x.shape[0], *counts, out))
    for offset in product(*(range(size) for size in sizes)):
        window = padded[
            (slice(None), *(slice(o * dilation, o * dilation + (n - 1) * stride + 1, stride) for o, n in zip(offset, counts, strict=True)))
        ]  # fmt: skip
        for g in range(groups):
            ins = slice(g * per_group, (g + 1) * per_group)
            outs = slice(g * out // groups, (g + 1) * out // groups)
            result[..., outs] += np.tensordot(window[..., ins], kernel[offset][:, outs], axes=1)
    return result


def conv_transpose2d(x: Array, kernel: Array) -> Array:
    """Stride 2, kernel 2x2 ``(2, 2, in, out)``, no overlap: each pixel becomes a 2x2 patch."""
    n, h, w, _ = x.shape
    patches = np.einsum("nhwi,abio->nhawbo", x, kernel)
    return np.asarray(patches.reshape(n, 2 * h, 2 * w, kernel.shape[-1]))


def normalise(x: Array, axes: tuple[int, ...]) -> Array:
    """Zero mean, unit (biased) variance over axes."""
    centred = x - x.mean(axes, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axes, keepdims=True) + EPSILON))


def group_norm(x: Array, scale: Array, offset: Array, groups: int = 2) -> Array:
    """Channels last, groups of neighbouring channels, over them and all spatial axes."""
    split = x.reshape(*x.shape[:-1], groups, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    return np.asarray(normalise(split, axes).reshape(x.shape) * scale + offset)


def rms_norm(x: Array, scale: Array) -> Array:
    """Over the last axis."""
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale)


def huber(a: Array, b: Array) -> Array:
    """Mean Huber loss with threshold 1."""
    d = np.abs(a - b)
    return np.asarray(np.where(d < 1, 0.5 * d**2, d - 0.5).mean())


def cosine_similarity(a: Array, b: Array) -> Array:
    """Over the last axis."""
    return np.asarray((a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1)))


def pool2x2(x: Array) -> Array:
    """The 2x2 windows of an NHWC image, ``(n, h / 2, w / 2, c, 4)``."""
    n, h, w, c = x.shape
    return np.asarray(
        x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 5, 2, 4).reshape(n, h // 2, w // 2, c, 4)
    )


def bilinear2x(x: Array) -> Array:
    """NHWC to twice the size, half-pixel centres, edges repeated (``align_corners=False``)."""
    for axis in (1, 2):
        before = np.concatenate([x.take([0], axis), x.take(range(x.shape[axis] - 1), axis)], axis)
        after = np.concatenate([x.take(range(1, x.shape[axis]), axis), x.take([-1], axis)], axis)
        pairs = np.stack([0.25 * before + 0.75 * x, 0.75 * x + 0.25 * after], axis + 1)
        x = pairs.reshape(*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    return x


def lstm_cell(x: Array, h: Array, c: Array, wx: Array, wh: Array, bias: Array) -> Array:
    """``h`` after one step; gates in the order input, forget, cell, output; ``wx (in, 4 h)``, ``wh (h, 4 h)``."""
    i, f, g, o = np.split(x @ wx + h @ wh + bias, 4, -1)
    return np.asarray(sigmoid(o) * np.tanh(sigmoid(f) * c + sigmoid(i) * np.tanh(g)))


def gru_cell(x: Array, h: Array, wx: Array, wh: Array, bias: Array) -> Array:
    """``h`` after one step; gates reset, update, new; ``n = tanh(x_n + r * h_n)``; ``bias`` is added to ``x wx``."""
    (xr, xz, xn), (hr, hz, hn) = np.split(x @ wx + bias, 3, -1), np.split(h @ wh, 3, -1)
    z = sigmoid(xz + hz)
    return np.asarray((1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * h)
