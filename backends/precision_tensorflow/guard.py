"""Non-trainable state (BatchNorm statistics) put back when the optimizer skips a step.

A layer's forward pass has already written its statistics when the optimizer finds the overflow, so they are read before
the step begins: a guard around the step holds that snapshot, and a skipping optimizer restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from precision.errors import LossScaleError, PolicyError
from precision_tensorflow.graphs import plain

_threads = threading.local()


class StateGuard:
    """A context manager around one training step: forward pass, gradients and ``optimizer.apply``.

    Works eagerly, in ``tf.function`` and under XLA, and costs one read of each guarded variable a step. Guards nest.

    Args:
        state: a Keras model or layer, whose non-trainable variables are guarded (frozen weights, metrics and random
            seeds are not), or the variables themselves.

    Raises:
        LossScaleError: on ``apply``, when the guard was entered outside the ``tf.function`` that applies.
    """

    def __init__(self, state: keras.layers.Layer | Iterable[Any]) -> None:
        self._state = state if isinstance(state, keras.layers.Layer) else list(state)
        self._snapshot: list[tuple[Any, Any]] = []
        self._graph: Any = None

    @plain
    def __enter__(self) -> StateGuard:
        found = statistics(self._state) if isinstance(self._state, keras.layers.Layer) else self._state
        self._snapshot = [(variable, tf.identity(variable)) for variable in found]
        self._graph = _graph()
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().remove(self)
        self._snapshot = []

    def restore(self) -> None:
        """Write the values from the beginning of the step back."""
        for variable, value in self._snapshot:
            variable.assign(value)

    def check(self) -> None:
        """Refuse to restore eager values from inside a graph: they would be those of the first step for ever."""
        if self._graph is None and _graph() is not None and self._snapshot:
            raise LossScaleError(
                "mp.guard was entered outside the tf.function that applies the gradients, so it would restore the "
                "values of the first step at every skip. Enter it inside the function, around the whole step."
            )


def statistics(layer: keras.layers.Layer) -> list[Any]:
    """The variables a forward pass may write: non-trainable ones of layers that are not frozen, built up to now."""
    found: list[Any] = []
    for part in layer._flatten_layers(include_self=True, recursive=True):
        if part.trainable and not isinstance(part, keras.metrics.Metric):
            found += [v for v in part._non_trainable_variables if isinstance(v, keras.Variable)]
    unique = {id(v): v for v in found if getattr(v, "trainable", True) is False}
    return list(unique.values())


def active_guards() -> list[StateGuard]:
    """The guards entered in this thread, checked for being entered in the graph that is now being built."""
    guards = list(_stack())
    for guard in guards:
        guard.check()
    return guards


def guard_steps(model: keras.Model) -> None:
    """Put a guard around every training step of a model (``fit``, ``train_on_batch``). Does nothing the second time."""
    if not isinstance(model, keras.Model):
        raise PolicyError(f"a keras.Model is needed, not {type(model).__name__}.")
    step = model.train_step
    if getattr(step, "_precision_guarded", False):
        return

    def train_step(*args: Any, **kwargs: Any) -> Any:
        with StateGuard(model):
            return step(*args, **kwargs)

    train_step._precision_guarded = True  # type: ignore[attr-defined]
    model.train_step = train_step
    model.train_function = None  # a step function made before would go on without the guard


def _stack() -> list[StateGuard]:
    if not hasattr(_threads, "guards"):
        _threads.guards = []
    stack: list[StateGuard] = _threads.guards
    return stack


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
