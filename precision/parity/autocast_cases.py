"""The op cases of op-level autocast: what each op computes, on which inputs, and what the one table decides for it.

An adapter runs each under ``mp.autocast`` in its framework's usual spelling. Layouts are canonical (see ``references``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from precision.ops import decide
from precision.parity import references as ref
from precision.parity.adapter import Array
from precision.policy import PrecisionPolicy

Make = Callable[[np.random.Generator], list[Array]]


@dataclasses.dataclass(frozen=True)
class AutocastCase:
    """One op.

    Attributes:
        name: what adapters know it by.
        family: its op family.
        make: draws the float64 (or integer, or bool) inputs.
        reference: the op in float64.
        what: the maths in a line.
        wide: positions of inputs that are float32 even when the others are low.
        promoted: positions of inputs that meet low results in an elementwise op (an RNN's cell state).
        both: positions of inputs that are used in both ways (a GRU's state).
        roundings: how many results are rounded to the compute dtype one after the other, where several must be; the bar on
            a low result is this number of units in the last place.
    """

    name: str
    family: str
    make: Make
    reference: Callable[..., Array]
    what: str
    wide: tuple[int, ...] = ()
    promoted: tuple[int, ...] = ()
    both: tuple[int, ...] = ()
    roundings: int = 1

    def decisions(self, policy: PrecisionPolicy, dtypes: Sequence[str]) -> tuple[str, ...]:
        """The dtypes in which the op takes its inputs, given theirs; both, joined by ``+``, where it takes one in two."""
        own = [d for i, d in enumerate(dtypes) if i not in self.promoted]
        decided = list(decide(policy, self.family, own))
        for i in self.promoted:
            decided.insert(i, self._meets(policy, dtypes, i))
        for i in self.both:
            decided[i] = "+".join(sorted({decided[i], self._meets(policy, dtypes, i)}))
        return tuple(decided)

    def result(self, policy: PrecisionPolicy, dtypes: Sequence[str]) -> str:
        """The dtype of the op's result, given those of its inputs."""
        for i in self.promoted + self.both:
            return self._meets(policy, dtypes, i)
        return next(d for d in self.decisions(policy, dtypes) if _floating(d))

    def _meets(self, policy: PrecisionPolicy, dtypes: Sequence[str], i: int) -> str:
        """The dtype in which an input meets what the family's op gave."""
        given = next(d for d in decide(policy, self.family, dtypes) if _floating(d))
        return decide(policy, "elementwise", [dtypes[i], given])[0]


def _floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _n(*shapes: tuple[int, ...]) -> Make:
    """Standard normal."""
    return lambda rng: [rng.standard_normal(shape) for shape in shapes]


def _u(low: float, high: float, *shapes: tuple[int, ...]) -> Make:
    """Uniform."""
    return lambda rng: [rng.uniform(low, high, shape) for shape in shapes]


def _labels(rng: np.random.Generator) -> list[Array]:
    return [rng.standard_normal((6, 10)), rng.integers(0, 10, 6).astype(np.int32)]


def _targets(rng: np.random.Generator) -> list[Array]:
    return [rng.standard_normal((4, 8)), rng.integers(0, 2, (4, 8)).astype(np.float64)]


def _log_probabilities(rng: np.random.Generator) -> list[Array]:
    logits, labels = _labels(rng)
    return [ref.log_softmax(logits), labels]


def _distributions(rng: np.random.Generator) -> list[Array]:
    return [ref.log_softmax(rng.standard_normal((4, 8))), ref.softmax(rng.standard_normal((4, 8)))]


def _definite(rng: np.random.Generator) -> list[Array]:
    a = rng.standard_normal((4, 4))
    return [a @ a.T + 4.0 * np.eye(4)]


def _system(rng: np.random.Generator) -> list[Array]:
    return [*_definite(rng), rng.standard_normal((4, 2))]


def _lower(rng: np.random.Generator) -> list[Array]:
    return [np.tril(rng.standard_normal((4, 4))) + 4.0 * np.eye(4), rng.standard_normal((4, 2))]


def _causal(rng: np.random.Generator) -> list[Array]:
    return [*(rng.standard_normal((2, 5, 16)) for _ in range(3)), np.tril(np.ones((5, 5), bool))]


def _where(rng: np.random.Generator) -> list[Array]:
    return [rng.integers(0, 2, (4, 8)).astype(bool), rng.standard_normal((4, 8)), rng.standard_normal((4, 8))]


def _rows(rng: np.random.Generator) -> list[Array]:
    return [rng.standard_normal((12, 8)), rng.integers(0, 12, (2, 5)).astype(np.int32)]


def _batch_norm_eval(rng: np.random.Generator) -> list[Array]:
    means, variances = rng.standard_normal(4), rng.uniform(0.5, 2.0, 4)
    return [rng.standard_normal((2, 4, 4, 4)), rng.uniform(0.5, 2.0, 4), rng.standard_normal(4), means, variances]


def _distinct(rng: np.random.Generator) -> list[Array]:
    return [rng.permutation(24).reshape(3, 8) / 8.0 - 1.0]


_IMAGE = (2, 6, 6, 4)
_C = AutocastCase

_MATMULS = (
    _C("matmul", "matmul", _n((4, 16), (16, 8)), np.matmul, "a (4,16) @ b (16,8)"),
    _C("batched_matmul", "matmul", _n((3, 4, 16), (3, 16, 8)), np.matmul, "a @ b, a batch of 3"),
    _C("matvec", "matmul", _n((8, 16), (16,)), np.matmul, "matrix (8,16) times vector (16,)"),
    _C("dot", "matmul", _n((16,), (16,)), np.dot, "inner product of two vectors; a scalar"),
    _C("linear", "matmul", _n((4, 16), (16, 8), (8,)), lambda x, k, b: x @ k + b, "x @ kernel + bias", roundings=2),
    _C("addmm", "matmul", _n((4, 8), (4, 16), (16, 8)), lambda c, a, b: c + a @ b, "torch.addmm(c, a, b) or a fused equal; elsewhere a @ b with all three cast", roundings=2),
    _C("einsum_batched", "matmul", _n((2, 5, 8), (2, 8, 6)), lambda a, b: np.einsum("bij,bjk->bik", a, b), 'einsum "bij,bjk->bik"'),
    _C("einsum_heads", "matmul", _n((2, 5, 2, 8), (2, 6, 2, 8)), lambda q, k: np.einsum("bqhd,bkhd->bhqk", q, k), 'einsum "bqhd,bkhd->bhqk"'),
    _C("einsum_three", "matmul", _n((4, 8), (8, 8), (8, 3)), lambda a, b, c: a @ b @ c, 'einsum "ij,jk,kl->il"', roundings=8),
    _C("tensordot", "matmul", _n((3, 4, 5), (4, 5, 6)), lambda a, b: np.tensordot(a, b, 2), "over the last two axes of a"),
)  # fmt: skip

_CONVS = (
    _C("conv1d", "conv", _n((2, 8, 3), (3, 3, 4)), ref.conv, "size 3, padding 1; NLC, kernel (3, in, out)"),
    _C("conv2d", "conv", _n((2, 6, 6, 3), (3, 3, 3, 4)), ref.conv, "3x3, padding 1, NHWC, kernel HWIO"),
    _C("conv2d_bias", "conv", _n((2, 6, 6, 3), (3, 3, 3, 4), (4,)), lambda x, k, b: ref.conv(x, k) + b, "the same plus a bias a channel", roundings=2),
    _C("conv2d_strided", "conv", _n((2, 7, 7, 3), (3, 3, 3, 4)), lambda x, k: ref.conv(x, k, stride=2), "3x3, padding 1, stride 2 (explicit padding, not SAME)"),
    _C("conv2d_dilated", "conv", _n((2, 6, 6, 3), (3, 3, 3, 4)), lambda x, k: ref.conv(x, k, dilation=2), "3x3, dilation 2, padding 2"),
    _C("conv2d_depthwise", "conv", _n((2, 6, 6, 4), (3, 3, 1, 4)), lambda x, k: ref.conv(x, k, groups=4), "3x3, padding 1, 4 groups of one channel"),
    _C("conv3d", "conv", _n((1, 4, 4, 4, 2), (3, 3, 3, 2, 3)), ref.conv, "3x3x3, padding 1, NDHWC"),
    _C("conv_transpose2d", "conv", _n((2, 3, 3, 4), (2, 2, 4, 3)), ref.conv_transpose2d, "2x2, stride 2; kernel (2, 2, in, out), not mirrored: y[2h+a, 2w+b] = x[h, w] @ k[a, b]"),
)  # fmt: skip

_ATTENTION = (
    _C("attention", "attention", _n(*[(2, 5, 16)] * 3), ref.attention, "softmax(q k^T / 4) v, one head: (batch, tokens, 16)", roundings=4),
    _C("attention_masked", "attention", _causal, ref.attention, "the same, mask (5,5) bool, True where seen", roundings=4),
)  # fmt: skip

_NORMS = (
    _C("layer_norm", "norm", _n((4, 16), (16,), (16,)), lambda x, s, o: ref.normalise(x, (-1,)) * s + o, "last axis, epsilon 1e-5, scale, offset"),
    _C("rms_norm", "norm", _n((4, 16), (16,)), ref.rms_norm, "x / sqrt(mean(x^2) + 1e-5) * scale, last axis"),
    _C("group_norm", "norm", _n(_IMAGE, (4,), (4,)), ref.group_norm, "2 groups, epsilon 1e-5, scale, offset; NHWC"),
    _C("instance_norm", "norm", _n(_IMAGE), lambda x: ref.normalise(x, (1, 2)), "over height and width, epsilon 1e-5, no scale; NHWC"),
    _C("batch_norm_train", "norm", _n(_IMAGE, (4,), (4,)), lambda x, s, o: ref.normalise(x, (0, 1, 2)) * s + o, "batch statistics, epsilon 1e-5, scale, offset; NHWC"),
    _C("batch_norm_eval", "norm", _batch_norm_eval, lambda x, s, o, m, v: (x - m) / np.sqrt(v + ref.EPSILON) * s + o, "given mean and variance: inputs x, scale, offset, mean, variance"),
    _C("l2_normalize", "norm", _n((4, 16)), lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True)), "x / its norm, last axis"),
)  # fmt: skip

_SOFTMAXES = (
    _C("softmax", "softmax", _n((4, 16)), ref.softmax, "over the last axis"),
    _C("log_softmax", "softmax", _n((4, 16)), ref.log_softmax, "over the last axis"),
    _C("logsumexp", "softmax", _n((4, 16)), ref.logsumexp, "over the last axis"),
)

_LOSSES = (
    _C("cross_entropy", "loss", _labels, lambda x, y: -ref.log_softmax(x)[np.arange(6), y].mean(), "mean softmax cross-entropy, int labels"),
    _C("nll", "loss", _log_probabilities, lambda p, y: -p[np.arange(6), y].mean(), "minus the mean of the labels' log probabilities"),
    _C("binary_cross_entropy", "loss", _targets, lambda x, y: (np.logaddexp(0, x) - x * y).mean(), "with logits, mean; targets floating"),
    _C("mse", "loss", _n((4, 16), (4, 16)), lambda a, b: ((a - b) ** 2).mean(), "mean squared difference"),
    _C("l1", "loss", _n((4, 16), (4, 16)), lambda a, b: np.abs(a - b).mean(), "mean absolute difference"),
    _C("huber", "loss", _n((4, 16), (4, 16)), ref.huber, "mean, threshold 1"),
    _C("kl_divergence", "loss", _distributions, lambda p, q: (q * (np.log(q) - p)).sum(-1).mean(), "inputs log p and q: sum of q (log q - log p), mean over the batch"),
    _C("cosine_similarity", "loss", _n((4, 16), (4, 16)), ref.cosine_similarity, "over the last axis"),
)  # fmt: skip

_REDUCTIONS = (
    _C("sum", "reduction", _u(0.5, 2.0, (64,)), np.sum, "of all elements"),
    _C("sum_axis", "reduction", _u(0.5, 2.0, (4, 16)), lambda x: x.sum(0), "over the first axis"),
    _C("mean", "reduction", _u(0.5, 2.0, (4, 16)), lambda x: x.mean(-1), "over the last axis"),
    _C("prod", "reduction", _u(0.5, 1.5, (4, 8)), lambda x: x.prod(-1), "over the last axis"),
    _C("cumsum", "reduction", _u(0.5, 2.0, (4, 16)), lambda x: x.cumsum(-1), "along the last axis"),
    _C("cumprod", "reduction", _u(0.8, 1.2, (4, 8)), lambda x: x.cumprod(-1), "along the last axis"),
    _C("variance", "reduction", _n((4, 16)), lambda x: x.var(-1), "biased, over the last axis"),
    _C("vector_norm", "reduction", _n((4, 16)), lambda x: np.sqrt((x**2).sum(-1)), "Euclidean, over the last axis"),
    _C("avg_pool2d", "reduction", _n(_IMAGE), lambda x: ref.pool2x2(x).mean(-1), "2x2, stride 2, NHWC"),
    _C("global_avg_pool", "reduction", _n(_IMAGE), lambda x: x.mean((1, 2)), "mean over height and width, NHWC"),
    _C("resize_bilinear", "reduction", _n((2, 3, 3, 4)), ref.bilinear2x, "to twice the size, half-pixel centres, NHWC"),
)

_TRANSCENDENTALS = (
    _C("exp", "transcendental", _n((16,)), np.exp, "elementwise"),
    _C("expm1", "transcendental", _n((16,)), np.expm1, "exp(x) - 1"),
    _C("log", "transcendental", _u(0.5, 2.0, (16,)), np.log, "natural"),
    _C("log1p", "transcendental", _u(0.0, 2.0, (16,)), np.log1p, "log(1 + x)"),
    _C("pow", "transcendental", _u(0.5, 2.0, (16,), (16,)), np.power, "a ** b"),
    _C("cube", "transcendental", _n((16,)), lambda x: x**3, "x ** 3, the exponent a Python number"),
    _C("square", "transcendental", _n((16,)), np.square, "x ** 2 by the framework's square"),
    _C(
        "rsqrt", "transcendental", _u(0.5, 2.0, (16,)), lambda x: 1 / np.sqrt(x), "1 / sqrt(x) by the framework's rsqrt"
    ),
    _C("reciprocal", "transcendental", _u(0.5, 2.0, (16,)), lambda x: 1 / x, "1 / x, the one a Python number"),
    _C("softplus", "transcendental", _n((16,)), lambda x: np.logaddexp(0, x), "log(1 + exp(x))"),
    _C("tan", "transcendental", _u(-1.0, 1.0, (16,)), np.tan, "elementwise"),
    _C("sinh", "transcendental", _n((16,)), np.sinh, "elementwise"),
    _C("erfinv", "transcendental", _u(-0.9, 0.9, (16,)), lambda x: _erfinv(x), "the inverse of erf"),
    _C("lgamma", "transcendental", _u(0.5, 4.0, (16,)), ref.lgamma, "log of the gamma function"),
)

_PAIR = ((4, 8), (4, 8))
_ELEMENTWISE = (
    _C("add", "elementwise", _n(*_PAIR), np.add, "a + b, b float32", wide=(1,)),
    _C("sub_low", "elementwise", _n(*_PAIR), np.subtract, "a - b, both low"),
    _C("mul", "elementwise", _n(*_PAIR), np.multiply, "a * b, b float32", wide=(1,)),
    _C("div", "elementwise", _u(0.5, 2.0, *_PAIR), np.divide, "a / b, a float32", wide=(0,)),
    _C("div_low", "elementwise", _u(0.5, 2.0, *_PAIR), np.divide, "a / b, both low"),
    _C("maximum", "elementwise", _n(*_PAIR), np.maximum, "of a and b, b float32", wide=(1,)),
    _C(
        "where",
        "elementwise",
        _where,
        lambda c, a, b: np.asarray(np.where(c, a, b)),
        "where(condition, a, b), b float32",
        wide=(2,),
    ),
    _C(
        "concat",
        "elementwise",
        _n(*_PAIR),
        lambda a, b: np.concatenate([a, b], -1),
        "along the last axis, b float32",
        wide=(1,),
    ),
    _C("atan2", "elementwise", _n(*_PAIR), np.arctan2, "atan2(a, b), b float32", wide=(1,)),
    _C("relu", "elementwise", _n((4, 16)), lambda x: np.maximum(x, 0), "max(x, 0)"),
    _C(
        "leaky_relu",
        "elementwise",
        _n((4, 16)),
        lambda x: np.asarray(np.where(x > 0, x, 0.125 * x)),
        "slope 0.125 below 0",
    ),
    _C(
        "elu",
        "elementwise",
        _n((4, 16)),
        lambda x: np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
        "alpha 1",
    ),
    _C("gelu", "elementwise", _n((4, 16)), ref.gelu, "exact, not the tanh form"),
    _C("silu", "elementwise", _n((4, 16)), lambda x: x * ref.sigmoid(x), "x * sigmoid(x)"),
    _C("sigmoid", "elementwise", _n((4, 16)), ref.sigmoid, "1 / (1 + exp(-x))"),
    _C("tanh", "elementwise", _n((4, 16)), np.tanh, "elementwise"),
    _C("sqrt", "elementwise", _u(0.5, 2.0, (16,)), np.sqrt, "elementwise"),
    _C("sin", "elementwise", _n((16,)), np.sin, "elementwise"),
    _C("abs", "elementwise", _n((16,)), np.abs, "elementwise"),
    _C("clip", "elementwise", _n((16,)), lambda x: np.clip(x, -0.5, 0.5), "to -0.5 .. 0.5"),
)

_SHAPES = (
    _C("transpose", "shape", _n((4, 16)), np.transpose, "swaps the two axes"),
    _C("reshape", "shape", _n((4, 16)), lambda x: x.reshape(2, 32), "to (2, 32)"),
    _C("slice", "shape", _n((4, 16)), lambda x: x[1:3, ::2], "x[1:3, ::2]"),
    _C("pad", "shape", _n((3, 4)), lambda x: np.pad(x, ((1, 1), (0, 2))), "zeros: one row before and after, two columns after"),
    _C("flip", "shape", _n((3, 4)), lambda x: x[:, ::-1], "the last axis reversed"),
    _C("embedding", "shape", _rows, lambda table, ids: table[ids], "rows of a table (12, 8) by ids (2, 5)"),
    _C("gather", "shape", _rows, lambda x, ids: x.take(ids, 0), "indexing x[ids] or the framework's take"),
    _C("max_pool2d", "shape", _n(_IMAGE), lambda x: ref.pool2x2(x).max(-1), "2x2, stride 2, NHWC"),
    _C("max", "shape", _n((4, 16)), lambda x: x.max(-1), "over the last axis"),
    _C("sort", "shape", _distinct, lambda x: np.sort(x, -1), "the last axis, ascending"),
    _C("top_k", "shape", _distinct, lambda x: -np.sort(-x, -1)[:, :3], "the 3 largest of the last axis, descending"),
    _C("resize_nearest", "shape", _n((2, 3, 3, 4)), lambda x: x.repeat(2, 1).repeat(2, 2), "to twice the size, NHWC"),
)  # fmt: skip

_LINALG = (
    _C("cholesky", "linalg", _definite, np.linalg.cholesky, "lower factor of a positive definite (4,4)"),
    _C("inverse", "linalg", _definite, np.linalg.inv, "of a positive definite (4,4)"),
    _C("solve", "linalg", _system, np.linalg.solve, "a x = b, a (4,4), b (4,2)"),
    _C("triangular_solve", "linalg", _lower, np.linalg.solve, "the same, a lower triangular"),
    _C("determinant", "linalg", _definite, np.linalg.det, "of a positive definite (4,4)"),
    _C("singular_values", "linalg", _n((4, 3)), lambda x: np.linalg.svd(x, compute_uv=False), "of (4,3), descending"),
    _C("eigenvalues", "linalg", _definite, np.linalg.eigvalsh, "of a symmetric (4,4), ascending (eigh)"),
)  # fmt: skip

_CELLS = (
    _C("lstm_cell", "matmul", _n((3, 4), (3, 5), (3, 5), (4, 20), (5, 20), (20,)), ref.lstm_cell, "h of one step; see references.lstm_cell", promoted=(2,), roundings=8),
    _C("lstm_cell_wide", "matmul", _n((3, 4), (3, 5), (3, 5), (4, 20), (5, 20), (20,)), ref.lstm_cell, "the same, the cell state float32", wide=(2,), promoted=(2,), roundings=8),
    _C("gru_cell", "matmul", _n((3, 4), (3, 5), (4, 15), (5, 15), (15,)), ref.gru_cell, "h of one step; see references.gru_cell", both=(1,), roundings=8),
)  # fmt: skip


def _erfinv(x: Array) -> Array:
    """By Newton's method on erf."""
    y = np.zeros_like(x)
    for _ in range(60):
        y = y - (ref.erf(y) - x) * np.sqrt(np.pi) / 2 * np.exp(y**2)
    return y


AUTOCAST_CASES: tuple[AutocastCase, ...] = (
    *_MATMULS, *_CONVS, *_ATTENTION, *_NORMS, *_SOFTMAXES, *_LOSSES, *_REDUCTIONS, *_TRANSCENDENTALS, *_ELEMENTWISE,
    *_SHAPES, *_LINALG, *_CELLS,
)  # fmt: skip
"""Every family, and each kind of op in it that the frameworks have in common."""
