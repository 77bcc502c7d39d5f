"""TensorFlow: a ``tf.function`` training step hand-written with Keras's own tools, and the same step through precision.

Both compute in bfloat16 from float32 masters, end in float32 and scale the loss dynamically. The hand-written step lets a
skipped step change BatchNorm's statistics, as Keras does; ours puts them back, within the time measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from case import Case
from keras import layers

import precision

POLICY = precision.PrecisionPolicy(compute_dtype="bfloat16", loss_scale=precision.LossScale(mode="dynamic"))
BATCH = 64


def mlp() -> tuple[keras.KerasTensor, keras.KerasTensor]:
    h = x = keras.Input((256,))
    for _ in range(2):
        h = layers.LayerNormalization()(layers.Dense(512, activation="relu")(h))
    return x, layers.Dense(10)(h)


def cnn() -> tuple[keras.KerasTensor, keras.KerasTensor]:
    h = x = keras.Input((12, 12, 3))
    for filters in (16, 32):
        h = layers.Conv2D(filters, 3, padding="same", use_bias=False)(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.MaxPooling2D()(h)
    return x, layers.Dense(10)(layers.GlobalAveragePooling2D()(h))


def transformer() -> tuple[keras.KerasTensor, keras.KerasTensor]:
    x = keras.Input((16, 16))
    h = layers.Dense(64)(x)
    for _ in range(2):
        n = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.MultiHeadAttention(4, 16)(n, n)])
        n = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.Dense(64)(layers.Dense(256, activation="relu")(n))])
    return x, layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h)))


def _loss(logits: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def native_step(build: Callable[[], tuple[Any, Any]], x: Any, y: Any) -> tuple[keras.Model, Callable[[], object]]:
    """The step by hand."""
    former = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs, logits = build()
    model = keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits))
    keras.config.set_dtype_policy(former)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=2.0**16)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(model(x, training=True), y)
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return model, lambda: step(x, y).numpy()


def precision_step(build: Callable[[], tuple[Any, Any]], x: Any, y: Any) -> tuple[keras.Model, Callable[[], object]]:
    """The same step through precision."""
    mp = precision.bind(POLICY, backend="tensorflow")
    with mp.scope():
        model = mp.prepare(keras.Model(*build()))
    optimizer = mp.optimizer(keras.optimizers.Adam(1e-3))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with mp.guard(model):
            with tf.GradientTape() as tape:
                loss = _loss(model(x, training=True), y)
                scaled = optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
        return loss

    return model, lambda: step(x, y).numpy()


def cases() -> Iterator[Case]:
    """The three models, each pair from the same weights and on the same batch."""
    rng = np.random.default_rng(0)
    y = tf.constant(rng.integers(0, 10, BATCH))
    for build in (mlp, cnn, transformer):
        keras.utils.set_random_seed(0)
        shape = build()[0].shape[1:]
        x = tf.constant(rng.standard_normal((BATCH, *shape)).astype(np.float32))
        (native, native_turn), (ours, our_turn) = native_step(build, x, y), precision_step(build, x, y)
        ours.set_weights(native.get_weights())
        yield Case(build.__name__, native_turn, our_turn)
