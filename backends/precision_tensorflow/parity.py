"""TensorFlow's side of the parity suite: its ops, its casts, its loss-scale trajectories and a training run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from precision.backend import Backend
from precision.loss_scale import LossScale
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
from precision.parity.models import initial_weights, is_statistic
from precision.policy import PrecisionPolicy
from precision_tensorflow.bound import TensorFlowPolicy
from precision_tensorflow.parity_models import Model, conv2d, cross_entropy, layer_norm


def _wide(*tensors: Any) -> list[Any]:
    return [tf.cast(x, tf.float32) if x.dtype.size < 4 else x for x in tensors]


def _linear(x: Any, kernel: Any, bias: Any) -> Any:
    """As a fused kernel does it: accumulated in float32 and rounded once (``Dense`` rounds the product before its bias)."""
    wide, wide_kernel, wide_bias = _wide(x, kernel, bias)
    return tf.cast(tf.matmul(wide, wide_kernel) + wide_bias, x.dtype)


def _attention(q: Any, k: Any, v: Any) -> Any:
    """Attention as fused kernels do it: low-precision inputs and output, float32 in between (TensorFlow has no kernel)."""
    wide_q, wide_k, wide_v = _wide(q, k, v)
    return tf.cast(tf.matmul(tf.nn.softmax(tf.matmul(wide_q, wide_k, transpose_b=True) * 0.25), wide_v), q.dtype)


OPS: dict[str, Callable[..., Any]] = {
    "matmul": tf.matmul,
    "linear": _linear,
    "conv2d": conv2d,
    "attention": _attention,
    "layer_norm": layer_norm,
    "softmax": tf.nn.softmax,
    "cross_entropy": cross_entropy,
    "mse": lambda a, b: tf.reduce_mean(tf.math.squared_difference(a, b)),
    "sum": tf.reduce_sum,
    "mean": lambda x: tf.reduce_mean(x, axis=-1),
    "exp": tf.exp,
    "log": tf.math.log,
    "add": tf.add,
    "relu": tf.nn.relu,
    "transpose": tf.transpose,
    "cholesky": tf.linalg.cholesky,
}


class TensorFlowParity(ParityAdapter):
    """The adapter; see :class:`precision.parity.ParityAdapter`."""

    name = "tensorflow"
    engines = ("mirrored",)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _bind(self, policy: PrecisionPolicy) -> TensorFlowPolicy:
        bound: Any = self._backend.bind(policy)
        return bound  # type: ignore[no-any-return]

    def tensor(self, array: Array) -> Any:
        return tf.constant(array)

    def array(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        seen: list[str] = []

        @mp.op(family)
        def run(*tensors: Any) -> Any:
            seen.extend(tensor.dtype.name for tensor in tensors)
            return OPS[case](*tensors)

        result = run(*(tf.constant(array) for array in inputs))
        return OpResult(tuple(seen), result.dtype.name, tf.cast(result, tf.float64).numpy())

    def autocast_ops(self, mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
        from precision_tensorflow.parity_autocast import autocast_ops

        return autocast_ops(self._bind(mp.policy), calls)

    def autocast_network(self, spec: NetworkSpec) -> NetworkResult:
        from precision_tensorflow.parity_networks import autocast_network

        return autocast_network(self._bind(spec.policy), spec)

    def round_to(self, values: Array, dtype: str) -> Array:
        # Two functions, so that no compiler can see that the pair of casts leads back to where it began.
        low = _caster(dtype)(tf.constant(values, tf.float32))
        return np.asarray(_caster("float32")(low).numpy())

    def trajectory(
        self,
        config: LossScale,
        finite: Sequence[bool],
        form: Literal["neutral", "native"],
        start: Mapping[str, float | int] | None = None,
    ) -> list[dict[str, float | int]]:
        mp = self._bind(PrecisionPolicy(loss_scale=config))
        factors = [tf.constant(1.0 if flag else np.inf, tf.float32) for flag in finite]
        return (_neutral if form == "neutral" else _native)(mp, factors, start)

    def train(self, spec: TrainSpec) -> TrainResult:
        return self._training(spec.model, spec.policy, spec.learning_rate, spec.momentum).run(spec)

    def replicated(self, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
        if engine not in self.engines:
            return super().replicated(engine, specs)
        from precision_tensorflow.parity_replicas import replicated

        return replicated(specs)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - one adapter a process; it keeps what it compiled
    def _training(self, model: str, policy: PrecisionPolicy, learning_rate: float, momentum: float) -> Training:
        return Training(self._bind(policy), model, learning_rate, momentum)


class Training:
    """A model, its optimizer and its compiled step, used again for every run that differs in numbers only.

    The step is compiled by XLA, as Keras's ``fit`` does unless told otherwise. (TensorFlow's own bfloat16 matmul on CPUs
    without bfloat16 arithmetic truncates instead of rounding to nearest; XLA's rounds.)
    """

    def __init__(self, mp: TensorFlowPolicy, name: str, learning_rate: float, momentum: float) -> None:
        self._mp = mp
        start = self._start(initial_weights(name))
        self._weights = {n: tf.Variable(value, trainable=not is_statistic(n)) for n, value in start.items()}
        trained = [weight for name, weight in self._weights.items() if not is_statistic(name)]
        statistics = [weight for name, weight in self._weights.items() if is_statistic(name)]
        model = Model(name, mp, self._weights)
        sgd = keras.optimizers.SGD(learning_rate, momentum=momentum)
        self._optimizer = optimizer = mp.optimizer(sgd, master_weights=True)
        optimizer.build(trained)
        self._fresh = [np.array(variable) for variable in optimizer.variables]

        @tf.function(jit_compile=True)
        def step(x: Any, labels: Any, poison: Any) -> Any:
            with mp.guard(statistics):
                with tf.GradientTape() as tape:
                    loss = model.loss(x, labels)
                    scaled = optimizer.scale_loss(loss * poison)
                optimizer.apply(tape.gradient(scaled, trained), trained)
            return loss

        @tf.function
        def predict(x: Any) -> Any:
            return tf.argmax(model.logits(x, training=False), -1)

        self._step, self._predict = step, predict

    def _start(self, weights: dict[str, Array]) -> dict[str, Any]:
        cast = self._mp.cast_to_param({name: tf.constant(array) for name, array in weights.items()})
        return {name: tf.constant(weights[name]) if is_statistic(name) else value for name, value in cast.items()}

    def run(self, spec: TrainSpec) -> TrainResult:
        """Begin anew from the spec's weights and train."""
        optimizer = self._optimizer
        for name, value in self._start(spec.weights).items():
            self._weights[name].assign(value)
        for variable, value in zip(optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        losses, scales, skipped, seconds = [], [], [], []
        for x, labels, poison in zip(spec.inputs, spec.labels, spec.poison, strict=True):
            scales.append(float(optimizer.state_dict()["scale"]))
            batch = tf.constant(x), tf.constant(labels), tf.constant(poison)
            begin = time.perf_counter()
            loss = float(self._step(*batch))
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
            skipped.append(optimizer.state_dict()["consecutive_skips"] > 0)
        hits = self._predict(tf.constant(spec.eval_inputs)).numpy() == spec.eval_labels
        return TrainResult(
            losses=losses, scales=scales, skipped=skipped, accuracy=float(np.mean(hits)), state=optimizer.state_dict(),
            step_seconds=seconds, weights={n: tf.cast(w, tf.float32).numpy() for n, w in self._weights.items()},
        )  # fmt: skip


def _neutral(mp: TensorFlowPolicy, factors: Sequence[Any], start: Any) -> list[dict[str, float | int]]:
    scaler = mp.loss_scaler

    @tf.function
    def step(state: Any, factor: Any) -> Any:
        grads = {"w": scaler.scale(factor, state)}  # the gradient of w * factor
        _, finite = scaler.unscale(grads, state)
        return scaler.update(state, finite)

    state, out = scaler.load_state_dict(start) if start else scaler.init(), []
    for factor in factors:
        state = step(state, factor)
        out.append(scaler.state_dict(state))
    return out


def _native(mp: TensorFlowPolicy, factors: Sequence[Any], start: Any) -> list[dict[str, float | int]]:
    weight = tf.Variable(0.0)
    optimizer = mp.optimizer(keras.optimizers.SGD(0.0))
    optimizer.build([weight])
    if start:
        optimizer.load_state_dict(start)

    @tf.function
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(weight * factor)
        optimizer.apply([tape.gradient(scaled, weight)], [weight])

    out = []
    for factor in factors:
        step(factor)
        out.append(optimizer.state_dict())
    return out


@functools.cache
def _caster(dtype: str) -> Any:
    return tf.function(lambda x: tf.cast(x, dtype))
