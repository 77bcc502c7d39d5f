"""The parity suite's models: their weights as NumPy arrays, and the exact maths every backend implements.

Written once here and once a backend, so that any two runs differ in nothing but the framework. ``W`` below are the
weights by name. Where precision is concerned every backend follows the policy through its op families:

* ``dense(x, n)``: ``x @ W[n.kernel] + W[n.bias]``, kernel ``(in, out)``. Family ``matmul``: inputs, kernel and bias in
  the compute dtype, result in the compute dtype. The product is rounded before the bias is added.
* ``conv(x, n)``: 3x3, stride 1, zero padding 1, no bias, ``W[n.kernel]`` is ``(3, 3, in, out)``, data are NHWC. Family ``conv``.
* ``norm(x, n)``: family ``norm``, float32 in and out. Layer norm over the last axis: ``(x - mean) / sqrt(var + 1e-5) *
  W[n.scale] + W[n.offset]``, biased variance. In the CNN batch norm over all axes but the last; evaluation uses the
  running ``W[n.mean]`` and ``W[n.var]``, updated in training as ``0.9 * running + 0.1 * batch`` (a backend may use the
  unbiased batch variance there, as PyTorch does; training does not depend on it), not on skipped steps.
* ``relu``: family ``elementwise``, keeps the dtype. Residual sums promote to the wider input.
* ``softmax`` float32; ``mean`` over axes is family ``reduction``, float32.
* The loss is the mean softmax cross-entropy with integer labels, family ``loss``, float32, of ``cast_to_output(logits)``.

``mlp(x)``, x ``(batch, 64)``:
    ``h = relu(dense(x, fc1)); h = norm(h, norm1); h = relu(dense(h, fc2)); h = norm(h, norm2); logits = dense(h, head)``

``cnn(x)``, x ``(batch, 8, 8, 1)``:
    ``h = relu(norm(conv(x, conv1), norm1)); h = maxpool2x2(h); h = relu(norm(conv(h, conv2), norm2));
    h = mean(h over height and width); logits = dense(h, head)``

``transformer(x)``, x ``(batch, 8, 8)`` (rows of the image are tokens); ``chars(x)``, x int ``(batch, 32)``:
    ``h = dense(x, embed) + W[position]`` (``chars``: ``h = W[embed.table][x] + W[position]``); the sum promotes;
    ``position`` and ``embed.table`` are float32 parameters used as they are, outside any ``dense``;
    for each block ``i``: ``h = h + attention(norm(h, block{i}.norm1)); h = h + mlp(norm(h, block{i}.norm2))``;
    ``h = norm(h, norm)``; ``transformer``: ``h = mean(h over tokens)``; ``logits = dense(h, head)`` (``chars``: at each token).
    ``attention(x)``: ``q, k, v = split(dense(x, block{i}.qkv), 3, last axis)``; each is split into 2 heads of 16;
    ``s = (q @ k^T) * 0.25`` (family ``matmul``, compute dtype); ``chars``: ``s = where(causal, s, -30000)``;
    ``p = softmax(s)``; ``o = p @ v`` (family ``matmul``); heads joined; ``dense(o, block{i}.proj)``.
    ``mlp(x)``: ``dense(relu(dense(x, block{i}.fc1)), block{i}.fc2)``.

Module rules of the policy apply by these names (``**norm*`` is every norm).
"""

from __future__ import annotations

import numpy as np

from precision.errors import PrecisionError
from precision.parity.adapter import Array

MODELS = ("mlp", "cnn", "transformer", "chars")
WIDTH, HEADS, CONTEXT, VOCABULARY = 32, 2, 32, 64
BLOCKS = {"transformer": 2, "chars": 1}
BATCH_NORM = {"cnn"}
BATCH_STATS = ("mean", "var")


def initial_weights(model: str, seed: int = 0) -> dict[str, Array]:
    """Return a model's initial float32 weights by canonical name. The same seed gives the same weights.

    Kernels are normal with variance ``2 / fan_in`` (He et al., 2015) before a relu, ``1 / fan_in`` otherwise.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def kernel(name: str, *shape: int, gain: float = 1.0) -> None:
        fan_in = int(np.prod(shape[:-1]))
        weights[f"{name}.kernel"] = (rng.standard_normal(shape) * np.sqrt(gain / fan_in)).astype(np.float32)

    def dense(name: str, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        kernel(name, fan_in, fan_out, gain=gain)
        weights[f"{name}.bias"] = np.zeros(fan_out, np.float32)

    def norm(name: str, features: int) -> None:
        weights[f"{name}.scale"] = np.ones(features, np.float32)
        weights[f"{name}.offset"] = np.zeros(features, np.float32)
        if model in BATCH_NORM:
            weights[f"{name}.mean"] = np.zeros(features, np.float32)
            weights[f"{name}.var"] = np.ones(features, np.float32)

    if model == "mlp":
        dense("fc1", 64, 128, gain=2.0)
        norm("norm1", 128)
        dense("fc2", 128, 128, gain=2.0)
        norm("norm2", 128)
        dense("head", 128, 10)
    elif model == "cnn":
        kernel("conv1", 3, 3, 1, 16, gain=2.0)
        norm("norm1", 16)
        kernel("conv2", 3, 3, 16, 32, gain=2.0)
        norm("norm2", 32)
        dense("head", 32, 10)
    elif model in BLOCKS:
        if model == "chars":
            weights["embed.table"] = (0.5 * rng.standard_normal((VOCABULARY, WIDTH))).astype(np.float32)
        else:
            dense("embed", 8, WIDTH)
        tokens = CONTEXT if model == "chars" else 8
        weights["position"] = (0.1 * rng.standard_normal((tokens, WIDTH))).astype(np.float32)
        for i in range(BLOCKS[model]):
            norm(f"block{i}.norm1", WIDTH)
            dense(f"block{i}.qkv", WIDTH, 3 * WIDTH)
            dense(f"block{i}.proj", WIDTH, WIDTH)
            norm(f"block{i}.norm2", WIDTH)
            dense(f"block{i}.fc1", WIDTH, 2 * WIDTH, gain=2.0)
            dense(f"block{i}.fc2", 2 * WIDTH, WIDTH)
        norm("norm", WIDTH)
        dense("head", WIDTH, VOCABULARY if model == "chars" else 10)
    else:
        raise PrecisionError(f"unknown parity model {model!r}. Known: {', '.join(MODELS)}.")
    return weights


def is_statistic(name: str) -> bool:
    """Whether a weight's name is a BatchNorm running statistic (not trained)."""
    return name.rpartition(".")[2] in BATCH_STATS


Axes = tuple[tuple[str, int], ...]
INPUT = "input"


def symmetries(model: str) -> list[tuple[int, Axes]]:
    """The hidden units of a model that may change places without changing what it computes, but for rounding.

    Returns:
        One ``(size, axes)`` a group of units; ``axes`` are ``(weight, axis)`` pairs to be permuted alike, with
        ``("input", -1)`` for the features of the input.
    """

    def dense_out(name: str) -> Axes:
        return (f"{name}.kernel", -1), (f"{name}.bias", 0)

    def norm(name: str) -> Axes:
        leaves = ("scale", "offset", *(BATCH_STATS if model in BATCH_NORM else ()))
        return tuple((f"{name}.{leaf}", 0) for leaf in leaves)

    if model == "mlp":
        return [
            (64, ((INPUT, -1), ("fc1.kernel", 0))),
            (128, (*dense_out("fc1"), *norm("norm1"), ("fc2.kernel", 0))),
            (128, (*dense_out("fc2"), *norm("norm2"), ("head.kernel", 0))),
        ]
    if model == "cnn":
        return [
            (16, (("conv1.kernel", -1), *norm("norm1"), ("conv2.kernel", -2))),
            (32, (("conv2.kernel", -1), *norm("norm2"), ("head.kernel", 0))),
        ]
    width: Axes = (("position", 1), *norm("norm"), ("head.kernel", 0))
    width += (("embed.table", 1),) if model == "chars" else dense_out("embed")
    groups: list[tuple[int, Axes]] = [] if model == "chars" else [(8, ((INPUT, -1), ("embed.kernel", 0)))]
    for i in range(BLOCKS[model]):
        b = f"block{i}"
        width += (*norm(f"{b}.norm1"), (f"{b}.qkv.kernel", 0), *dense_out(f"{b}.proj"))
        width += (*norm(f"{b}.norm2"), (f"{b}.fc1.kernel", 0), *dense_out(f"{b}.fc2"))
        groups.append((2 * WIDTH, (*dense_out(f"{b}.fc1"), (f"{b}.fc2.kernel", 0))))
    return [*groups, (WIDTH, width)]
