"""What the optimizer is given, looked at: settings, the optimizer inside, gradients, a native optimizer's state."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from precision.backend import check_leaf
from precision.errors import PolicyError


def require_plain(inner_optimizer: Any) -> None:
    """Refuse what is no Keras optimizer, or scales the loss itself."""
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise PolicyError(
            f"the inner optimizer must be a keras.optimizers.Optimizer, not {type(inner_optimizer).__name__}."
        )
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        raise PolicyError("the inner optimizer scales the loss itself; pass the optimizer it wraps.")
    if inner_optimizer.loss_scale_factor is not None:
        raise PolicyError(
            "the inner optimizer has loss_scale_factor set, so gradients would be unscaled twice. Remove it and set "
            "loss_scale in the policy (mode = 'static' for a constant factor)."
        )


def require_clipping(**settings: Any) -> None:
    """Refuse clipping bounds that are no finite numbers above 0, or more than one."""
    if sum(value is not None for value in settings.values()) > 1:
        raise PolicyError("at most one of clipnorm, global_clipnorm and clipvalue can be set.")
    for setting, value in settings.items():
        if value is not None and not (_is_number(value) and 0 < value < float("inf")):
            raise PolicyError(f"{setting} must be a finite number above 0, or left out; not {value!r}.")


def tensor_or_none(grad: Any) -> Any:
    """A gradient as a tensor (``tf.IndexedSlices`` stay), so that none goes by unscaled and unchecked."""
    check_leaf(grad, "tensorflow")
    if grad is None or (tf.is_tensor(grad) and not isinstance(grad, keras.Variable)):
        return grad
    return tf.convert_to_tensor(grad)


def filled(values: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The values, and where there is none (None, or a variable that its gradient overwrites) the gradient as it came."""
    return [grad if value is None else value for value, grad in zip(values, grads, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def native_state(optimizer: keras.optimizers.LossScaleOptimizer) -> dict[str, float | int]:
    """The state of a Keras ``LossScaleOptimizer`` as plain numbers; before it is built, the one it will start with."""
    if not optimizer.built:
        return {"dynamic_scale": float(optimizer.initial_scale), "step_counter": 0}
    return {
        "dynamic_scale": float(optimizer.dynamic_scale.numpy()),
        "step_counter": int(optimizer.step_counter.numpy()),
    }
