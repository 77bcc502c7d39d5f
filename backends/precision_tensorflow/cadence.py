"""Settings of an inner optimizer that act every so many steps, decided before the replicas part.

``gradient_accumulation_steps`` and ``ema_overwrite_frequency`` are branches inside Keras's ``apply``, and replicas cannot
be merged in a branch that each of them entered by itself: with several of them Keras fails there. Here the branch is
entered once, across the replicas, and the optimizer is told on which side of it it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def on_each_replica(optimizer: Any, strategy: Any, take: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call ``take`` on each replica, across which this is called, with what is due this time decided.

    Args:
        optimizer: the inner optimizer that ``take`` applies.
        strategy: the strategy in force.
        take: called with ``args`` in replica context.
    """
    every, overwrite = optimizer.gradient_accumulation_steps, optimizer.ema_overwrite_frequency
    if not every and not (optimizer.use_ema and overwrite):
        strategy.extended.call_for_each_replica(take, args=args)
        return

    def run(step_due: bool, overwrite_due: bool) -> None:
        with _decided(optimizer, step_due, overwrite_due):
            strategy.extended.call_for_each_replica(take, args=args)

    def run_step(step_due: bool) -> None:
        if not (optimizer.use_ema and overwrite):
            run(step_due, False)
            return
        due = tf.equal((optimizer.iterations + 1) % overwrite, 0)
        tf.cond(due, lambda: run(step_due, True), lambda: run(step_due, False))

    if not every:
        run_step(True)
        return
    due = tf.equal((optimizer._iterations + 1) % every, 0)
    tf.cond(due, lambda: run_step(True), lambda: run_step(False))


@contextlib.contextmanager
def _decided(optimizer: Any, step_due: bool, overwrite_due: bool) -> Iterator[None]:
    """While in force, the optimizer applies gradients without branches of its own."""

    def apply_gradients(grads: Any, variables: Any) -> None:
        every = optimizer.gradient_accumulation_steps
        held = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables] if every else []
        if step_due:
            if every:
                grads = [(grad + kept) / every for grad, kept in zip(grads, held, strict=True)]
            grads = optimizer._clip_gradients(grads)
            optimizer._apply_weight_decay(variables)
            optimizer._backend_update_step(grads, variables, optimizer.learning_rate)
            if every:
                optimizer._backend_reset_gradient_accumulators()
        else:
            optimizer._all_reduce_sum_gradients([])  # summed before, as are all gradients given to it
            optimizer._backend_increment_gradient_accumulators(grads, held)
        if optimizer.use_ema:
            trained = optimizer._trainable_variables
            optimizer._update_model_variables_moving_average(trained)
            if overwrite_due:
                tf.distribute.get_replica_context().merge_call(
                    lambda strategy: optimizer._overwrite_model_variables_with_average_value(trained)
                )

    optimizer._backend_apply_gradients = apply_gradients
    try:
        yield
    finally:
        del optimizer._backend_apply_gradients
