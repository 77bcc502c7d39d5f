"""Small things the TensorFlow tests share: bound policies, tiny models, and a plain statement of what a step should do."""

from __future__ import annotations

import keras
import numpy as np

import precision
from precision import LossScale, PrecisionPolicy, Rule

DYNAMIC = {"mode": "dynamic", "initial": 1024.0, "growth_interval": 1000}


def bind(name: str = "float32", *, rules: tuple[Rule, ...] = (), **loss_scale):
    """Bind a preset with a short dynamic loss scale; keyword arguments change its settings."""
    policy = PrecisionPolicy.from_name(name).with_(rules=rules, loss_scale=LossScale(**{**DYNAMIC, **loss_scale}))
    return precision.bind(policy, backend="tensorflow")


def unscaled(name: str = "float32", **changes):
    """Bind a preset without loss scaling."""
    policy = PrecisionPolicy.from_name(name).with_(loss_scale=LossScale(), **changes)
    return precision.bind(policy, backend="tensorflow")


def small_model(norm: bool = False, seed: int = 0) -> keras.Model:
    """A functional model 4 -> 3 -> 2 with fixed weights, under whatever policy is in force."""
    x = keras.Input((4,))
    h = keras.layers.Dense(3, activation="tanh", name="fc")(x)
    if norm:
        h = keras.layers.BatchNormalization(name="norm")(h)
    model = keras.Model(x, keras.layers.Dense(2, name="head")(h))
    rng = np.random.default_rng(seed)
    model.set_weights([w if "norm" in v.path else 0.5 * rng.standard_normal(w.shape).astype(np.float32)
                       for v, w in zip(model.weights, model.get_weights(), strict=True)])  # fmt: skip
    return model


def data(rows: int = 16, seed: int = 1):
    """Inputs ``(rows, 4)`` and targets ``(rows, 2)``, float32."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 4)).astype(np.float32), rng.standard_normal((rows, 2)).astype(np.float32)


def values(variables) -> list[np.ndarray]:
    """The variables' values as float64 arrays."""
    return [np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(v, "float64"))) for v in variables]


def equal(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    """Whether two lists of arrays are bit-equal."""
    return len(before) == len(after) and all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def apply(optimizer, variables, grads) -> None:
    """Apply unscaled gradients (NumPy) through an optimizer, scaled as its loss would be."""
    scale = optimizer.scale
    optimizer.apply([keras.ops.convert_to_tensor(g) * keras.ops.cast(scale, g.dtype) for g in grads], variables)
