"""Non-trainable state (BatchNorm statistics) put back when the optimizer skips a step.

A layer's forward pass has already written its statistics when the optimizer finds the overflow, so they are read before
the step begins: a guard around the step holds that snapshot, and a skipping optimizer restores it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from precision.errors import LossScaleError, PolicyError, PrecisionWarning
from precision_tensorflow import replicas
from precision_tensorflow.graphs import plain

_threads = threading.local()


class StateGuard:
    """A context manager around one training step: forward pass, gradients and ``optimizer.apply``.

    Works eagerly, in ``tf.function`` and under XLA, and costs one read of each guarded variable a step. Guards nest. A
    guard in which no optimizer looked for one, and so could not restore anything, warns when it is left.

    Args:
        state: a built Keras model or layer, whose non-trainable variables are guarded (frozen weights, metrics and
            random seeds are not), or the variables themselves.

    Raises:
        PolicyError: neither of these; on entering, the model has no variables yet.
        LossScaleError: on entering a guard that is entered already, or outside ``strategy.run`` under several replicas; on ``apply``, when the guard was entered outside the
            ``tf.function`` that applies.
    """

    def __init__(self, state: keras.layers.Layer | Iterable[Any]) -> None:
        self._state = state if isinstance(state, keras.layers.Layer) else _listed(state)
        self._snapshot: list[tuple[Any, Any]] = []
        self._graph: Any = None
        self._looked_for = False

    @plain
    def __enter__(self) -> StateGuard:
        if self in _stack():
            raise LossScaleError("this guard is entered already: make another with mp.guard(...) for the inner step.")
        if isinstance(self._state, keras.layers.Layer) and not self._state.built:
            raise PolicyError(
                f"mp.guard({self._state.name}) needs a built model, to know its statistics before the step: call it on a "
                "batch first, or start it with keras.Input, or call build()."
            )
        if replicas.count() > 1 and tf.distribute.in_cross_replica_context():
            raise LossScaleError(
                "mp.guard belongs into the function given to strategy.run: around it, it cannot see what the replicas do."
            )
        found = statistics(self._state) if isinstance(self._state, keras.layers.Layer) else self._state
        self._snapshot = [(variable, tf.identity(variable)) for variable in found]
        self._graph = _graph()
        self._looked_for = False
        _stack().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        _stack().remove(self)
        if kind is None and self._snapshot and not self._looked_for:
            warnings.warn(
                "no optimizer of mp.optimizer(...) asked for this guard, so nothing would have been put back on a skip: "
                "the gradients were applied elsewhere, by another optimizer, or in a tf.function traced before. Enter "
                "mp.guard inside the function, around the whole step.",
                PrecisionWarning,
                stacklevel=2,
            )
        self._snapshot = []

    @property
    def snapshot(self) -> list[Any]:
        """The values from the beginning of the step."""
        return [value for _, value in self._snapshot]

    @property
    def variables(self) -> list[Any]:
        """What they are the values of."""
        return [variable for variable, _ in self._snapshot]

    def check(self) -> None:
        """Refuse to restore eager values from inside a graph: they would be those of the first step for ever."""
        self._looked_for = True
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


def _listed(state: Any) -> list[Any]:
    several = isinstance(state, Iterable) and not tf.is_tensor(state)
    variables = list(state) if several else []
    if not several or not all(hasattr(v, "assign") for v in variables):
        raise PolicyError(
            f"mp.guard takes a Keras model or layer, or a list of variables, not {type(state).__name__}. One variable goes "
            "in as [variable]."
        )
    return variables


def active_guards() -> list[StateGuard]:
    """The guards entered in this thread, checked for being entered in the graph that is now being built."""
    guards = list(_stack())
    for guard in guards:
        guard.check()
    return guards


def restore(guards: Iterable[StateGuard], snapshots: Iterable[Iterable[Any]]) -> None:
    """Write values from the beginning of the step back; under several replicas, to each of them its own.

    Args:
        guards: of the step.
        snapshots: what each held, in the context that this is called in.
    """
    for guard, values in zip(guards, snapshots, strict=True):
        for variable, value in zip(guard.variables, values, strict=True):
            replicas.write_back(variable, value)


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
