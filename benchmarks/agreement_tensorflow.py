"""What agreement and the state guard cost a step under ``MirroredStrategy``: ratios of interleaved runs, medians.

    python benchmarks/agreement_tensorflow.py [rounds]

Two replicas on logical CPU devices; the agreement is taken out of one of the compared steps for the comparison only.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf

import precision
from precision_tensorflow import replicas
from precision_tensorflow.parity_replicas import logical_devices

STEPS = 20
strategy = tf.distribute.MirroredStrategy(logical_devices(2))
mp = precision.bind(
    precision.PrecisionPolicy(loss_scale=precision.LossScale(mode="dynamic", initial=1024.0)), backend="tensorflow"
)
x = tf.constant(np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32))


def make(kind: str):
    """A compiled step: ``bare``, ``without`` (no agreement), ``ours`` or ``guarded``."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input((128,))]
        for _ in range(4):
            layers += [keras.layers.Dense(256, activation="relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        sgd = keras.optimizers.SGD(1e-3, momentum=0.9)
        optimizer = sgd if kind == "bare" else mp.optimizer(sgd)
        optimizer.build(model.trainable_variables)

    def body():
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_mean(model(x, training=True) ** 2))
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    def on_replica():
        if kind == "guarded":
            with mp.guard(model):
                body()
        else:
            body()

    step = tf.function(lambda: strategy.run(on_replica))
    with mock.patch.object(replicas, "agreed", lambda flag: flag) if kind == "without" else contextlib.nullcontext():
        step()  # traced here
    return step


def main(rounds: int) -> None:
    kinds = ("bare", "without", "ours", "guarded")
    steps = {kind: make(kind) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in kinds[turn % 4 :] + kinds[: turn % 4]:
            begin = time.perf_counter()
            for _ in range(STEPS):
                steps[kind]()
            seconds[kind].append((time.perf_counter() - begin) / STEPS)
    pairs = {
        "agreement (with / without)": ("ours", "without"),
        "state guard (with / without)": ("guarded", "ours"),
        "all of it (guarded / bare Keras optimizer)": ("guarded", "bare"),
    }
    for kind in kinds:
        print(f"{kind:10s} {1e3 * statistics.median(seconds[kind]):8.2f} ms a step")
    for what, (one, other) in pairs.items():
        ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        print(f"{what}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
