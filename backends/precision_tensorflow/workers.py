"""The workers of a ``MultiWorkerMirroredStrategy`` as the host sees them: who is the chief, and whether all are well."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf


def count(strategy: Any) -> int:
    """How many processes train together."""
    resolver = getattr(strategy, "cluster_resolver", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 1
    tasks = resolver.cluster_spec().as_dict()
    return max(sum(len(tasks.get(kind, ())) for kind in ("chief", "worker")), 1)


def index(strategy: Any) -> int:
    """This process's place among them, from 0."""
    if count(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", ()))
    return int(resolver.task_id) + (chiefs if resolver.task_type == "worker" else 0)


def is_chief(strategy: Any) -> bool:
    """Whether this process writes what all of them share."""
    return bool(strategy.extended.should_checkpoint)


def all_well(strategy: Any, well: bool) -> bool:
    """Whether all processes are well: a collective that each of them enters, and so also a barrier."""
    if count(strategy) == 1:
        return well
    return float(_troubles(strategy)(tf.constant(0.0 if well else 1.0))) == 0.0


@functools.cache
def _troubles(strategy: Any) -> Any:
    """A compiled sum over the replicas of all workers."""
    return tf.function(lambda mine: strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: mine), axis=None))
