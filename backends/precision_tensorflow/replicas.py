"""Deciding on a step under ``tf.distribute``: where the branch is entered, and what is refused.

With several replicas the flag would have to be agreed on by all before any of them steps; until that is built they are
refused rather than trained wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from precision.errors import UnsupportedError


def branch(finite: Any, take: Callable[..., None], args: tuple[Any, ...], skip: Callable[[], None]) -> None:
    """Take or skip a step.

    A strategy that merges replicas to update its variables cannot do so inside a branch: there the branch itself is
    entered across replicas, as Keras's own optimizer does.

    Args:
        finite: bool scalar tensor.
        take: called with ``args`` in replica context when ``finite`` holds.
        args: tensors and variables of the step.
        skip: called otherwise.
    """
    context = tf.distribute.get_replica_context()
    if context is None or tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(finite, lambda: take(*args), skip)
        return

    def across(strategy: Any, flags: Any, merged: tuple[Any, ...]) -> None:
        agreed = strategy.experimental_local_results(flags)[0]  # one replica, see refuse_replicas
        tf.cond(agreed, lambda: strategy.extended.call_for_each_replica(take, args=merged), skip)

    context.merge_call(across, args=(finite, args))


def refuse_replicas() -> None:
    """Raise ``UnsupportedError`` under a strategy with several replicas."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"loss scaling over {replicas} tf.distribute replicas: an overflow on one must be seen by all, which this "
            "release does not do. Train on one replica, or with loss_scale.mode = 'none'."
        )
