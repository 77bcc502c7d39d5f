"""The parity suite's models and training run in JAX; the maths is fixed in ``precision.parity.models``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from precision.parity.adapter import TrainResult, TrainSpec
from precision.parity.models import BATCH_NORM, BLOCKS, HEADS, is_statistic
from precision.policy import PrecisionPolicy
from precision.registry import bind
from precision_jax.parity import conv2d, cross_entropy, layer_norm

Weights = dict[str, Any]


def hold(x: Any) -> Any:
    """Round where the program says so, in the gradient too.

    XLA fuses casts into the ops around them and then keeps float32: more exact, but not the other frameworks' numbers.
    (XLA:CPU's library fusions do so whatever ``xla_allow_excess_precision`` says.) ``reduce_precision`` is an op of its
    own, which no fusion drops. In float16 it would flush subnormals to zero; there a barrier holds.
    """
    return lax.reduce_precision(x, 8, 7) if x.dtype == jnp.bfloat16 else lax.optimization_barrier(x)


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op that rounds its inputs and its result; see :func:`hold`."""
    return lambda *args: hold(function(*map(hold, args)))


def rounded_dense(x: Any, kernel: Any, bias: Any) -> Any:
    """``x @ kernel + bias`` with both results rounded, and the bias's gradient summed in float32.

    Left to itself XLA sums the gradient of a low-precision bias in that low precision.
    """
    product = rounded(jnp.matmul)(x, kernel)
    total = product.astype(jnp.float32) + bias.astype(jnp.float32)
    return hold(total.astype(product.dtype))


class Model:
    """One of the parity models: its layers, each marked with its op family or kept in the dtype of a rule.

    Args:
        mp: the bound policy.
        kind: the model's name.
        weights: parameters and BatchNorm statistics by name.
        training: whether BatchNorm uses and updates the batch's statistics (in ``stats``).
    """

    def __init__(self, mp: Any, kind: str, weights: Weights, training: bool) -> None:
        self.mp, self.kind, self.w, self.training = mp, kind, weights, training
        self.stats: Weights = {}

    def run(self, x: Any) -> Any:
        """The logits, in the output dtype."""
        logits = {"mlp": self.mlp, "cnn": self.cnn}.get(self.kind, self.transformer)(x)
        return self.mp.cast_to_output(logits)

    def op(self, family: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        rule = self.mp.policy.rule_for(name)
        return self.mp.island(rule.dtype) if rule else self.mp.op(family)

    def dense(self, x: Any, name: str) -> Any:
        return self.op("matmul", name)(rounded_dense)(x, self.w[f"{name}.kernel"], self.w[f"{name}.bias"])

    def conv(self, x: Any, name: str) -> Any:
        return self.op("conv", name)(rounded(conv2d))(x, self.w[f"{name}.kernel"])

    def norm(self, x: Any, name: str) -> Any:
        function = functools.partial(self.batch_norm, name=name) if self.kind in BATCH_NORM else layer_norm
        return self.op("norm", name)(function)(x, self.w[f"{name}.scale"], self.w[f"{name}.offset"])

    def batch_norm(self, x: Any, scale: Any, offset: Any, name: str) -> Any:
        mean, variance = self.w[f"{name}.mean"], self.w[f"{name}.var"]
        if self.training:
            axes = tuple(range(x.ndim - 1))
            running = mean, variance
            mean = x.mean(axes)
            variance = jnp.square(x - mean).mean(axes)
            for key, old, new in zip(("mean", "var"), running, (mean, variance), strict=True):
                self.stats[f"{name}.{key}"] = lax.stop_gradient(0.9 * old + 0.1 * new)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + offset

    def relu(self, x: Any) -> Any:
        return self.mp.op("elementwise")(jax.nn.relu)(x)

    def mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        return self.mp.op("reduction")(lambda h: h.mean(axes))(x)

    def mlp(self, x: Any) -> Any:
        h = self.norm(self.relu(self.dense(x, "fc1")), "norm1")
        h = self.norm(self.relu(self.dense(h, "fc2")), "norm2")
        return self.dense(h, "head")

    def cnn(self, x: Any) -> Any:
        h = self.relu(self.norm(self.conv(x, "conv1"), "norm1"))
        h = lax.reduce_window(h, np.asarray(-np.inf, h.dtype), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        h = self.relu(self.norm(self.conv(h, "conv2"), "norm2"))
        return self.dense(self.mean(h, (1, 2)), "head")

    def transformer(self, x: Any) -> Any:
        chars = self.kind == "chars"
        h = self.w["embed.table"][x] if chars else self.dense(x, "embed")
        h = h + self.w["position"]
        for i in range(BLOCKS[self.kind]):
            block = f"block{i}"
            h = h + self.attention(self.norm(h, f"{block}.norm1"), block, causal=chars)
            inner = self.relu(self.dense(self.norm(h, f"{block}.norm2"), f"{block}.fc1"))
            h = h + self.dense(inner, f"{block}.fc2")
        h = self.norm(h, "norm")
        return self.dense(h if chars else self.mean(h, (1,)), "head")

    def attention(self, x: Any, block: str, causal: bool) -> Any:
        batch, tokens, width = x.shape
        matmul = self.mp.op("matmul")(rounded(jnp.matmul))
        parts = jnp.split(self.dense(x, f"{block}.qkv"), 3, axis=-1)
        q, k, v = (p.reshape(batch, tokens, HEADS, width // HEADS).transpose(0, 2, 1, 3) for p in parts)
        scores = matmul(q, k.transpose(0, 1, 3, 2)) * 0.25
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.asarray(-30000, scores.dtype))
        weights = self.mp.op("softmax")(jax.nn.softmax)(scores)
        out = matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, tokens, width)
        return self.dense(out, f"{block}.proj")


@functools.lru_cache(maxsize=32)
def _compiled(kind: str, policy: PrecisionPolicy, learning_rate: float, momentum: float) -> tuple[Any, Any, Any]:
    """The optimizer, the compiled training step and the compiled prediction of a model under a policy."""
    mp: Any = bind(policy, backend="jax")
    opt = mp.optimizer(optax.sgd(learning_rate, momentum=momentum))

    def loss_fn(params: Weights, stats: Weights, x: Any, y: Any, poison: Any) -> Any:
        model = Model(mp, kind, {**params, **stats}, training=True)
        loss = mp.op("loss")(cross_entropy)(model.run(x), y)
        return loss * poison, (loss, model.stats)

    grad = mp.value_and_grad(loss_fn, has_aux=True, cast_argnums=())

    def step(params: Weights, stats: Weights, opt_state: Any, x: Any, y: Any, poison: Any) -> Any:
        (_, (loss, new_stats)), grads = grad(params, stats, x, y, poison, loss_scale=opt_state.loss_scale)
        updates, new_opt_state = opt.update(grads, opt_state, params)
        stats = mp.select(new_opt_state.finite, new_stats, stats)
        params = optax.apply_updates(params, updates)
        return params, stats, new_opt_state, (loss, opt_state.loss_scale.scale, ~new_opt_state.finite)

    def predict(params: Weights, stats: Weights, x: Any) -> Any:
        return Model(mp, kind, {**params, **stats}, training=False).run(x).argmax(-1)

    return opt, jax.jit(step, donate_argnums=(0, 1, 2)), jax.jit(predict)


def train(spec: TrainSpec) -> TrainResult:
    """Perform a training run; see :class:`precision.parity.TrainSpec`."""
    opt, step, predict = _compiled(spec.model, spec.policy, spec.learning_rate, spec.momentum)
    params = {k: jnp.asarray(v) for k, v in spec.weights.items() if not is_statistic(k)}
    stats = {k: jnp.asarray(v) for k, v in spec.weights.items() if is_statistic(k)}
    opt_state = opt.init(params)
    seen, seconds = [], []
    for i in range(spec.steps):
        start = time.perf_counter()
        params, stats, opt_state, facts = step(params, stats, opt_state, spec.inputs[i], spec.labels[i], spec.poison[i])
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
        seen.append(facts)
    losses, scales, skipped = zip(*seen, strict=True)
    right = np.asarray(predict(params, stats, spec.eval_inputs)) == spec.eval_labels
    mp = bind(spec.policy, backend="jax")
    return TrainResult(
        losses=[float(loss) for loss in losses],
        scales=[float(scale) for scale in scales],
        skipped=[bool(flag) for flag in skipped],
        accuracy=float(np.mean(right)),
        state=mp.loss_scaler.state_dict(opt_state.loss_scale),
        step_seconds=seconds,
        weights={name: np.asarray(value) for name, value in {**params, **stats}.items()},
    )
