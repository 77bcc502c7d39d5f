"""What op-level autocast costs in TensorFlow: tracing, and a training step, on the CPU.

    python benchmarks/autocast_tensorflow.py
    python benchmarks/autocast_tensorflow.py --rounds 100

A transformer block of Keras layers in float32, under Keras's layer policy and under ``mp.autocast``, which take turns in one
process: medians, and their ratios to float32. (Where the CPU has no bfloat16 arithmetic, products are computed in float32 from
rounded operands, so that nothing can be gained there but memory.)
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

import precision

WIDTH, HEADS, TOKENS, ROWS = 128, 4, 64, 8


def build() -> keras.Model:
    """Two pre-norm blocks."""
    x = inputs = keras.Input((TOKENS, WIDTH))
    for _ in range(2):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h)
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(h))
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(x[:, 0]))


def step_of(model: Any, variables: list[Any]) -> Any:
    """A compiled forward and backward pass."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            total = loss(y, model(x, training=True))
        return total, tape.gradient(total, variables)

    return step


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each step in milliseconds; they take turns."""
    times = {name: np.empty(rounds) for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 else list(steps)[::-1]:
            begin = time.perf_counter()
            steps[name]()[0].numpy()
            times[name][i] = 1e3 * (time.perf_counter() - begin)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def main() -> None:
    """Print the medians and their ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--policy", default="mixed_bfloat16")
    options = parser.parse_args()
    mp = precision.bind(options.policy, backend="tensorflow")
    plain = build()
    with mp.scope():
        layers = build()
    x = tf.constant(np.random.default_rng(0).standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32))
    y = tf.constant(np.arange(ROWS) % 10)
    models = {"float32": (plain, plain), "layers": (layers, layers), "autocast": (mp.autocast(plain), plain)}
    steps, tracing = {}, {name: [] for name in models}
    for _ in range(3):
        for name, (model, owner) in models.items():
            fresh = mp.autocast(plain) if name == "autocast" else model
            steps[name] = step_of(fresh, [v.value for v in owner.trainable_variables])
            begin = time.perf_counter()
            steps[name].get_concrete_function(x, y)
            tracing[name].append(time.perf_counter() - begin)
    traced = {name: 1e3 * float(np.median(taken[1:])) for name, taken in tracing.items()}
    calls = {name: (lambda step=step: step(x, y)) for name, step in steps.items()}
    for call in calls.values():
        call()
    medians = interleaved(calls, options.rounds)
    print(
        json.dumps(
            {
                "trace_ms": traced,
                "trace_ratio": {name: ms / traced["float32"] for name, ms in traced.items()},
                "step_ms": medians,
                "step_ratio": {name: ms / medians["float32"] for name, ms in medians.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
