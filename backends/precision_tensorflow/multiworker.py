"""``fit`` and ``evaluate`` over several workers, where Keras 3 stops with an error of its own before the first step.

Under ``MultiWorkerMirroredStrategy`` Keras builds the model from a batch that it cannot reduce over workers, and averages
scalar logs along an axis that they do not have (keras-team/keras#20585). Both are got round on the one model, in public
terms of ``tf.distribute``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def mend_fit(model: keras.Model) -> None:
    """Make a model made in the scope of a ``MultiWorkerMirroredStrategy`` with several workers fit; leave others alone."""
    strategy = model.distribute_strategy
    resolver = getattr(strategy, "cluster_resolver", None)
    workers = len(resolver.cluster_spec().as_dict().get("worker", ())) if resolver is not None else 0
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or workers == 0:
        return
    if getattr(model.train_step, "_precision_logs", False):
        return
    model.train_step, model.test_step = _with_vector_logs(model.train_step), _with_vector_logs(model.test_step)
    model.train_function = model.test_function = None

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            for _, _, batches in iterator:
                data_batch = tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], next(batches))
                break
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    model._maybe_symbolic_build = build


def _with_vector_logs(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose scalar logs come as vectors of one, which Keras averages over the workers to scalars again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        logs = step(*args, **kwargs)
        return keras.tree.map_structure(
            lambda v: tf.reshape(v, [1]) if tf.convert_to_tensor(v).shape.rank == 0 else v, logs
        )

    run._precision_logs = True  # type: ignore[attr-defined]
    run._precision_guarded = getattr(step, "_precision_guarded", False)  # type: ignore[attr-defined]
    return run
