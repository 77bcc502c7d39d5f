"""The parity suite's models in TensorFlow: functions over a dict of variables, their ops marked with ``mp.op``.

The maths is that of ``precision.parity.models``; nothing here decides a dtype, the bound policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from precision.parity.models import BATCH_NORM, BLOCKS, HEADS
from precision_tensorflow.bound import TensorFlowPolicy

EPSILON = 1e-5


class Model:
    """A parity model over given variables.

    Args:
        name: ``"mlp"``, ``"cnn"``, ``"transformer"`` or ``"chars"``.
        mp: the bound policy.
        weights: variables by canonical name.
    """

    def __init__(self, name: str, mp: TensorFlowPolicy, weights: Mapping[str, Any]) -> None:
        self.name, self.mp, self.w = name, mp, weights
        self._relu = mp.op("elementwise")(tf.nn.relu)
        self._add = mp.op("elementwise")(tf.add)
        self._matmul = mp.op("matmul")(tf.matmul)
        self._softmax = mp.op("softmax")(tf.nn.softmax)
        self._mean = mp.op("reduction")(tf.reduce_mean)
        self._loss = mp.op("loss")(cross_entropy)

    def logits(self, x: Any, training: bool) -> Any:
        """The model's outputs in the output dtype."""
        forward = self._transformer if self.name in BLOCKS else getattr(self, f"_{self.name}")
        return self.mp.cast_to_output(forward(x, training))

    def loss(self, x: Any, labels: Any) -> Any:
        """The mean cross-entropy of a training batch, float32."""
        return self._loss(self.logits(x, training=True), labels)

    def _mlp(self, x: Any, training: bool) -> Any:
        h = self._norm(self._relu(self._dense(x, "fc1")), "norm1", training)
        h = self._norm(self._relu(self._dense(h, "fc2")), "norm2", training)
        return self._dense(h, "head")

    def _cnn(self, x: Any, training: bool) -> Any:
        h = self._relu(self._norm(self._conv(x, "conv1"), "norm1", training))
        h = tf.nn.max_pool2d(h, 2, 2, "VALID")
        h = self._relu(self._norm(self._conv(h, "conv2"), "norm2", training))
        return self._dense(self._mean(h, axis=(1, 2)), "head")

    def _transformer(self, x: Any, training: bool) -> Any:
        chars = self.name == "chars"
        h = tf.gather(self.w["embed.table"], x) if chars else self._dense(x, "embed")
        h = self._add(h, self.w["position"])
        for i in range(BLOCKS[self.name]):
            block = f"block{i}"
            h = self._add(h, self._attention(self._norm(h, f"{block}.norm1", training), block, causal=chars))
            m = self._relu(self._dense(self._norm(h, f"{block}.norm2", training), f"{block}.fc1"))
            h = self._add(h, self._dense(m, f"{block}.fc2"))
        h = self._norm(h, "norm", training)
        return self._dense(h if chars else self._mean(h, axis=1), "head")

    def _attention(self, x: Any, block: str, causal: bool) -> Any:
        batch, tokens, width = tf.shape(x)[0], x.shape[1], x.shape[2]
        parts = tf.split(self._dense(x, f"{block}.qkv"), 3, axis=-1)
        heads = [tf.transpose(tf.reshape(part, (batch, tokens, HEADS, width // HEADS)), (0, 2, 1, 3)) for part in parts]
        s = self._matmul(heads[0], heads[1], transpose_b=True) * 0.25
        if causal:
            mask = tf.linalg.band_part(tf.ones((tokens, tokens)), -1, 0) > 0
            s = tf.where(mask, s, tf.constant(-30000.0, s.dtype))
        o = self._matmul(self._softmax(s), heads[2])
        return self._dense(tf.reshape(tf.transpose(o, (0, 2, 1, 3)), (batch, tokens, width)), f"{block}.proj")

    def _dense(self, x: Any, name: str) -> Any:
        return self._op(name, "matmul", _linear)(x, self.w[f"{name}.kernel"], self.w[f"{name}.bias"])

    def _conv(self, x: Any, name: str) -> Any:
        return self._op(name, "conv", conv2d)(x, self.w[f"{name}.kernel"])

    def _norm(self, x: Any, name: str, training: bool) -> Any:
        scale, offset = self.w[f"{name}.scale"], self.w[f"{name}.offset"]
        if self.name not in BATCH_NORM:
            return self._op(name, "norm", layer_norm)(x, scale, offset)
        running = self.w[f"{name}.mean"], self.w[f"{name}.var"]

        def batch_norm(x: Any, scale: Any, offset: Any) -> Any:
            if training:
                mean, variance = tf.nn.moments(x, (0, 1, 2))
                for statistic, value in zip(running, (mean, variance), strict=True):
                    statistic.assign(0.9 * statistic + 0.1 * tf.cast(value, statistic.dtype))
            else:
                mean, variance = (tf.cast(statistic, x.dtype) for statistic in running)
            return (x - mean) * tf.math.rsqrt(variance + EPSILON) * scale + offset

        return self._op(name, "norm", batch_norm)(x, scale, offset)

    def _op(self, name: str, family: str, function: Callable[..., Any]) -> Any:
        rule = self.mp.policy.rule_for(name)
        return self.mp.op(family)(function) if rule is None else self.mp.island(rule.dtype)(function)


def _linear(x: Any, kernel: Any, bias: Any) -> Any:
    if len(x.shape) == 2:
        return tf.matmul(x, kernel) + bias
    flat = tf.matmul(tf.reshape(x, (-1, x.shape[-1])), kernel) + bias
    return tf.reshape(flat, (tf.shape(x)[0], *x.shape[1:-1], kernel.shape[-1]))


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean softmax cross-entropy with integer labels."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def conv2d(x: Any, kernel: Any) -> Any:
    """3x3 convolution, stride 1, zero padding 1, NHWC."""
    return tf.nn.conv2d(x, kernel, strides=1, padding="SAME")


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    """Layer normalisation over the last axis."""
    mean, variance = tf.nn.moments(x, (-1,), keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + EPSILON) * scale + offset
