"""The JAX side of the parity suite: ops, rounding, loss-scale trajectories. Training is in ``parity_training``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from precision.loss_scale import LossScale, LossScaleState, state_to_dict
from precision.parity.adapter import (
    Array,
    NetworkResult,
    NetworkSpec,
    OpResult,
    ParityAdapter,
    ReplicaResult,
    ReplicaSpec,
    TrainResult,
    TrainSpec,
)
from precision.policy import PrecisionPolicy
from precision_jax.rounding import round_to


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    """Layer norm over the last axis, epsilon 1e-5."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + offset


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean softmax cross-entropy with integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linear(x: Any, kernel: Any, bias: Any) -> Any:
    """``x @ kernel + bias``, accumulated in float32 and rounded once."""
    return (jnp.matmul(x, kernel, preferred_element_type=jnp.float32) + bias).astype(x.dtype)


def conv2d(x: Any, kernel: Any) -> Any:
    """3x3 convolution, stride 1, padding 1, NHWC and HWIO."""
    return lax.conv_general_dilated(x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))


def attention(q: Any, k: Any, v: Any) -> Any:
    """Scaled dot-product attention with one head; (batch, tokens, features). Everything inside accumulates in float32.

    (``jax.nn.dot_product_attention`` refuses float16 on CPUs, and rounds the probabilities.)
    """
    scores = jnp.einsum("bqd,bkd->bqk", q, k, preferred_element_type=jnp.float32) * 0.25
    out = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v, preferred_element_type=jnp.float32)
    return out.astype(v.dtype)


OPS: dict[str, Callable[..., Any]] = {
    "matmul": jnp.matmul,
    "linear": linear,
    "conv2d": conv2d,
    "attention": attention,
    "layer_norm": layer_norm,
    "softmax": jax.nn.softmax,
    "cross_entropy": cross_entropy,
    "mse": lambda a, b: jnp.square(a - b).mean(),
    "sum": jnp.sum,
    "mean": lambda x: x.mean(-1),
    "exp": jnp.exp,
    "log": jnp.log,
    "add": jnp.add,
    "relu": jax.nn.relu,
    "transpose": jnp.transpose,
    "cholesky": jnp.linalg.cholesky,
}


class JaxParity(ParityAdapter):
    """JAX's adapter. Everything runs compiled. XLA's casts keep subnormals, so none is stated as flushed."""

    name = "jax"
    engines = ("jit", "shard_map", "pmap")

    def tensor(self, array: Array) -> Any:
        """An array on JAX's default device."""
        return jnp.asarray(array)

    def array(self, tensor: Any) -> Array:
        """The values."""
        return np.asarray(tensor)

    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        """Run a case's op, compiled, under ``mp.op(family)``."""
        seen: list[str] = []

        @mp.op(family)
        def run(*tensors: Any) -> Any:
            seen.extend(t.dtype.name for t in tensors)
            return OPS[case](*tensors)

        out = jax.jit(run)(*(jnp.asarray(a) for a in inputs))
        return OpResult(tuple(seen), out.dtype.name, np.asarray(out).astype(np.float64))

    def autocast_ops(self, mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
        """Run the calls in one program under ``mp.autocast``, compiled."""
        from precision.registry import bind
        from precision_jax.parity_ops import autocast_ops

        return autocast_ops(bind(mp.policy, backend="jax"), calls)

    def autocast_network(self, spec: NetworkSpec) -> NetworkResult:
        """One pass of a network of plain functions under ``mp.autocast``."""
        from precision_jax.parity_networks import autocast_network

        return autocast_network(spec)

    def round_to(self, values: Array, dtype: str) -> Array:
        """Cast to a dtype and back, compiled."""
        return np.asarray(jax.jit(round_to, static_argnums=1)(values, dtype))

    def trajectory(
        self,
        config: LossScale,
        finite: Sequence[bool],
        form: Literal["neutral", "native"],
        start: Mapping[str, float | int] | None = None,
    ) -> list[dict[str, float | int]]:
        """Scan the neutral scaler, or real steps of the optax transformation, over a pattern."""
        from precision.registry import bind

        mp = bind(PrecisionPolicy(loss_scale=config), backend="jax")
        run = _neutral if form == "neutral" else _native
        scaler = mp.loss_scaler
        first = scaler.load_state_dict(start) if start else scaler.init()
        states: LossScaleState = jax.jit(lambda first, flags: run(mp, first, flags))(first, jnp.asarray(finite))
        host = [np.asarray(field) for field in states]
        return [state_to_dict(LossScaleState(*(field[i] for field in host))) for i in range(len(finite))]

    def train(self, spec: TrainSpec) -> TrainResult:
        """Train with ``mp.op``, ``mp.value_and_grad`` and ``mp.optimizer``, one compiled step at a time."""
        from precision_jax.parity_training import train

        return train(spec)

    def replicated(self, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
        """Train on the CPU's devices, in a process of their own: under ``jit`` with sharded data, ``shard_map`` or ``pmap``."""
        from precision_jax.parity_replicas import replicated

        return replicated(engine, specs)


def _neutral(mp: Any, first: LossScaleState, flags: Any) -> Any:
    def step(state: LossScaleState, flag: Any) -> tuple[LossScaleState, LossScaleState]:
        scaled = mp.loss_scaler.scale(jnp.where(flag, 2.0**-100, jnp.inf), state)
        _, finite = mp.loss_scaler.unscale({"w": scaled}, state)
        state = mp.loss_scaler.update(state, finite)
        return state, state

    return lax.scan(step, first, flags)[1]


def _native(mp: Any, first: LossScaleState, flags: Any) -> Any:
    opt = mp.optimizer(optax.sgd(0.1, momentum=0.9))
    params = {"w": jnp.ones((2,), jnp.float32)}

    def step(carry: Any, flag: Any) -> Any:
        params, opt_state = carry
        slope = jnp.where(flag, jnp.float32(2.0**-100), jnp.float32(jnp.inf))
        grad = mp.value_and_grad(lambda p: (p["w"] * slope).sum())
        _, grads = grad(params, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), opt_state.loss_scale

    opt_state = opt.init(params)._replace(loss_scale=first)
    return lax.scan(step, (params, opt_state), flags)[1]
