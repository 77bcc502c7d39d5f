"""The op cases of tiers T0 and T3: what each op computes, on which inputs, and a float64 reference for it.

Layouts are canonical (channels last, kernels ``(in, out)``); an adapter transposes where its framework differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from precision.parity.adapter import Array

Reference = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One op, in one family.

    Attributes:
        name: what adapters know it by.
        family: its op family.
        make: draws the float64 (or integer) inputs from a generator.
        reference: the op in float64.
        what: the maths in a line.
        mixed: whether the second input is given in float32 while the first is low (shows promotion).
    """

    name: str
    family: str
    make: Callable[[np.random.Generator], list[Array]]
    reference: Reference
    what: str
    mixed: bool = False


def _normal(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], list[Array]]:
    return lambda rng: [rng.standard_normal(shape) for shape in shapes]


def _positive(*shape: int) -> Callable[[np.random.Generator], list[Array]]:
    return lambda rng: [rng.uniform(0.5, 2.0, shape)]


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _conv2d(x: Array, k: Array) -> Array:
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    return np.asarray(
        sum(
            np.einsum("nhwc,co->nhwo", padded[:, i : i + height, j : j + width], k[i, j])
            for i in range(3)
            for j in range(3)
        )
    )


def _layer_norm(x: Array, scale: Array, offset: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + offset)


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return np.asarray(-np.log(_softmax(logits))[np.arange(len(labels)), labels].mean())


def _spd(rng: np.random.Generator) -> list[Array]:
    a = rng.standard_normal((4, 4))
    return [a @ a.T + 4.0 * np.eye(4)]


def _logits(rng: np.random.Generator) -> list[Array]:
    return [rng.standard_normal((6, 10)), rng.integers(0, 10, 6).astype(np.int32)]


CASES: tuple[OpCase, ...] = (
    OpCase("matmul", "matmul", _normal((4, 16), (16, 8)), lambda a, b: a @ b, "a (4,16) @ b (16,8)"),
    OpCase("linear", "matmul", _normal((4, 16), (16, 8), (8,)), lambda x, k, b: x @ k + b, "x @ kernel + bias"),
    OpCase("conv2d", "conv", _normal((2, 6, 6, 3), (3, 3, 3, 4)), _conv2d, "3x3, padding 1, NHWC, kernel HWIO"),
    OpCase(
        "attention", "attention", _normal((2, 5, 16), (2, 5, 16), (2, 5, 16)),
        lambda q, k, v: _softmax(q @ np.swapaxes(k, -1, -2) * 0.25) @ v, "softmax(q k^T / 4) v, one head: (batch, tokens, 16)",
    ),
    OpCase("layer_norm", "norm", _normal((4, 16), (16,), (16,)), _layer_norm, "last axis, epsilon 1e-5, scale, offset"),
    OpCase("softmax", "softmax", _normal((4, 16)), _softmax, "over the last axis"),
    OpCase("cross_entropy", "loss", _logits, _cross_entropy, "mean softmax cross-entropy, int labels"),
    OpCase("mse", "loss", _normal((4, 16), (4, 16)), lambda a, b: ((a - b) ** 2).mean(), "mean squared difference"),
    OpCase("sum", "reduction", _positive(64), lambda x: x.sum(), "of all elements"),
    OpCase("mean", "reduction", _positive(4, 16), lambda x: x.mean(-1), "over the last axis"),
    OpCase("exp", "transcendental", _normal((16,)), np.exp, "elementwise"),
    OpCase("log", "transcendental", _positive(16), np.log, "natural, elementwise"),
    OpCase("add", "elementwise", _normal((4, 16), (4, 16)), lambda a, b: a + b, "a + b, a low and b float32", mixed=True),
    OpCase("relu", "elementwise", _normal((4, 16)), lambda x: np.maximum(x, 0), "max(x, 0)"),
    OpCase("transpose", "shape", _normal((4, 16)), lambda x: x.T, "swaps the two axes"),
    OpCase("cholesky", "linalg", _spd, np.linalg.cholesky, "lower factor of a positive definite (4,4)"),
)  # fmt: skip
"""Every family has at least one case."""
