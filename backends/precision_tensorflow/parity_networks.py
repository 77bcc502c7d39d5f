"""TensorFlow's side of the whole networks under ``mp.autocast``: Keras layers, one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision.parity.adapter import Array, NetworkResult, NetworkSpec
from precision.parity.networks import HEADS, is_trained
from precision_tensorflow.bound import TensorFlowPolicy
from precision_tensorflow.opcast import idle
from precision_tensorflow.opcast.saved import saved_tensors

_NAMES = {
    "kernel": "kernel", "bias": "bias", "scale": "gamma", "offset": "beta", "mean": "moving_mean", "var": "moving_variance",
}  # fmt: skip


class Network:
    """A network's layers, made as they are first called, with their weights by canonical name; and what each module gave.

    Args:
        spec: which network, with its weights.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        self.spec = spec
        self.layers: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}

    def layer(self, name: str, make: Callable[..., Any], **options: Any) -> Any:
        """The layer of a name."""
        if name not in self.layers:
            self.layers[name] = make(name=name.rpartition(".")[2], **options)
        return self.layers[name]

    def call(self, name: str, layer: Any, x: Any, **options: Any) -> Any:
        """A layer's result; its weights are the specification's from the first call on."""
        if not layer.built:
            layer.build(x.shape)
            for ours, theirs in _NAMES.items():
                if f"{name}.{ours}" in self.spec.weights:
                    variable = self.weights[f"{name}.{ours}"] = getattr(layer, theirs)
                    with tf.init_scope():
                        variable.assign(self.spec.weights[f"{name}.{ours}"])
        return layer(x, **options)

    def dense(self, x: Any, name: str) -> Any:
        """A dense layer."""
        units = self.spec.weights[f"{name}.kernel"].shape[-1]
        return self.call(name, self.layer(name, keras.layers.Dense, units=units), x)

    def conv(self, x: Any, name: str, stride: int = 1) -> Any:
        """A convolution with padding 1 for 3x3."""
        kernel = self.spec.weights[f"{name}.kernel"]
        size = kernel.shape[0]
        layer = self.layer(name, keras.layers.Conv2D, filters=kernel.shape[-1], kernel_size=size, strides=stride,
                           padding="valid", use_bias=f"{name}.bias" in self.spec.weights)  # fmt: skip
        if size == 3:
            x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
        return self.call(name, layer, x)

    def batch_norm(self, x: Any, name: str) -> Any:
        """Batch normalisation in training mode."""
        return self.call(name, self.layer(name, keras.layers.BatchNormalization, epsilon=1e-5), x, training=True)

    def layer_norm(self, x: Any, name: str) -> Any:
        """Layer normalisation."""
        return self.call(name, self.layer(name, keras.layers.LayerNormalization, epsilon=1e-5), x)

    def variable(self, name: str) -> Any:
        """A weight that belongs to no layer."""
        if name not in self.weights:
            with tf.init_scope():
                self.weights[name] = tf.Variable(self.spec.weights[name], name=name.replace(".", "_"))
        return self.weights[name]

    def gives(self, name: str, x: Any) -> Any:
        """Note what a module gives."""
        self.modules[name] = x
        return x

    def loss(self, x: Any, labels: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The loss, the logits and what every module gave."""
        self.modules = {}
        logits = getattr(self, self.spec.network)(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        return loss, logits, dict(self.modules)

    # ---- the networks -------------------------------------------------------------------------------------------

    def resnet(self, x: Any) -> Any:
        """ResNet-18."""
        with keras.name_scope("stem"):
            x = self.gives("stem.conv", self.conv(x, "stem.conv"))
            x = self.gives("stem.norm", self.batch_norm(x, "stem.norm"))
            x = self.gives("stem", tf.nn.relu(x))
        for stage in range(4):
            for block in range(2):
                name, stride = f"stage{stage}.block{block}", 2 if stage and not block else 1
                with keras.name_scope(f"stage{stage}"), keras.name_scope(f"block{block}"):
                    x = self.gives(name, self._block(x, name, stride))
        x = self.gives("pool", tf.reduce_mean(x, (1, 2)))
        return self.gives("head", self.dense(x, "head"))

    def _block(self, x: Any, name: str, stride: int) -> Any:
        y = self.gives(f"{name}.conv1", self.conv(x, f"{name}.conv1", stride))
        y = tf.nn.relu(self.gives(f"{name}.norm1", self.batch_norm(y, f"{name}.norm1")))
        y = self.gives(f"{name}.conv2", self.conv(y, f"{name}.conv2"))
        y = self.gives(f"{name}.norm2", self.batch_norm(y, f"{name}.norm2"))
        if stride == 2:
            x = self.gives(f"{name}.proj", self.conv(x, f"{name}.proj", stride))
            x = self.gives(f"{name}.projnorm", self.batch_norm(x, f"{name}.projnorm"))
        return tf.nn.relu(y + x)

    def transformer(self, x: Any) -> Any:
        """A pre-norm decoder."""
        with keras.name_scope("embed"):
            h = tf.nn.embedding_lookup(self.variable("embed.table"), x) + self.variable("position")
        h = self.gives("embed", h)
        for i in range(2):
            name = f"block{i}"
            with keras.name_scope(name):
                y = self.gives(f"{name}.norm1", self.layer_norm(h, f"{name}.norm1"))
                with keras.name_scope("attention"):
                    y = self.gives(f"{name}.attention", self._attention(y, name))
                h = h + y
                y = self.gives(f"{name}.norm2", self.layer_norm(h, f"{name}.norm2"))
                with keras.name_scope("mlp"):
                    y = self.dense(tf.nn.gelu(self.dense(y, f"{name}.fc1")), f"{name}.fc2")
                h = self.gives(name, h + self.gives(f"{name}.mlp", y))
        h = self.gives("norm", self.layer_norm(h, "norm"))
        return self.gives("head", self.dense(h, "head"))

    def _attention(self, x: Any, name: str) -> Any:
        batch, tokens, width = x.shape
        parts = tf.split(self.dense(x, f"{name}.qkv"), 3, axis=-1)
        q, k, v = (tf.reshape(part, (batch, tokens, HEADS, width // HEADS)) for part in parts)
        o = keras.ops.dot_product_attention(q, k, v, scale=0.25, is_causal=True)
        return self.dense(tf.reshape(o, (batch, tokens, width)), f"{name}.proj")

    def lstm(self, x: Any) -> Any:
        """Keras's LSTM in its while loop."""
        layer = self.layer("cell", keras.layers.LSTM, units=16, use_cudnn=False)
        if not layer.built:
            layer.build(x.shape)
            cell = layer.cell
            found = {"cell.wx": cell.kernel, "cell.wh": cell.recurrent_kernel, "cell.bias": cell.bias}
            with tf.init_scope():
                for name, variable in found.items():
                    variable.assign(self.spec.weights[name])
            self.weights |= found
        return self.gives("head", self.dense(self.gives("cell", layer(x)), "head"))

    def unet(self, x: Any) -> Any:
        """A U-Net with bilinear upsampling."""
        d1 = self.gives("down1", tf.nn.relu(self.conv(x, "down1")))
        d2 = self.gives("down2", tf.nn.relu(self.conv(tf.nn.max_pool2d(d1, 2, 2, "VALID"), "down2")))
        bottom = self.gives("bottom", tf.nn.relu(self.conv(tf.nn.max_pool2d(d2, 2, 2, "VALID"), "bottom")))
        up2 = self.gives("up2", tf.image.resize(bottom, d2.shape[1:3], "bilinear"))
        e2 = self.gives("dec2", tf.nn.relu(self.conv(tf.concat([up2, d2], -1), "dec2")))
        up1 = self.gives("up1", tf.image.resize(e2, d1.shape[1:3], "bilinear"))
        e1 = self.gives("dec1", tf.nn.relu(self.conv(tf.concat([up1, d1], -1), "dec1")))
        return self.gives("head", self.conv(e1, "head"))


def autocast_network(mp: TensorFlowPolicy, spec: NetworkSpec) -> NetworkResult:
    """See :class:`precision.parity.ParityAdapter`."""
    network = Network(spec)
    run = tf.autograph.experimental.do_not_convert(network.loss)
    cast: Any = tf.function(run) if idle(mp.policy) else mp.autocast_as_is(run)
    x, labels = tf.constant(spec.inputs), tf.constant(spec.labels)
    concrete = cast.get_concrete_function(x, labels)
    names = sorted(name for name in network.weights if is_trained(name))
    trained = [_variable(network.weights[name]) for name in names]

    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, logits, modules = cast(x, labels)
        return loss, logits, modules, [tf.convert_to_tensor(g) for g in tape.gradient(loss, trained)]

    loss, logits, modules, grads = (tf.function(step, autograph=False) if spec.compiled else step)(x, labels)
    return NetworkResult(
        loss=float(loss),
        logits=np.asarray(tf.cast(logits, tf.float64)),
        gradients={n: _float32(g) for n, g in zip(names, grads, strict=True)},
        gradient_dtypes={n: g.dtype.name for n, g in zip(names, grads, strict=True)},
        modules={name: tensor.dtype.name for name, tensor in modules.items()},
        saved_bytes=sum(t.dtype.size * (t.shape.num_elements() or 0) for t in saved_tensors(concrete, trained)),
    )


def _variable(weight: Any) -> Any:
    return weight.value if isinstance(weight, keras.Variable) else weight


def _float32(grad: Any) -> Array:
    return np.asarray(tf.cast(grad, tf.float32))
