"""Which gradients were not finite at the last skipped step, kept on the device for the error that may come of it.

Written on a skip only, and only where ``max_consecutive_skips`` is set: a step that is taken costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from precision.divergence import SHOWN, NonFiniteTensor
from precision_tensorflow.replicas import count


class NonFiniteRecord:
    """Counts of NaN and infinite values, by replica and gradient, of the last skipped step.

    The last row holds the counts of the sums over all replicas, for sums that overflow where no replica did.

    Args:
        names: of the optimizer's trainable variables.

    Attributes:
        replicas: how many step together.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self.replicas = count()
        rows = 1 if self.replicas == 1 else self.replicas + 1
        self._counts = tf.Variable(
            tf.zeros((rows, len(self._names), 2), tf.int64),
            trainable=False,
            name="nonfinite",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self._sizes = [0] * len(self._names)

    def write(self, indices: Sequence[int], own: Sequence[Any], sums: Sequence[Any]) -> None:
        """Note a skipped step. Across replicas, or in the context of a single one.

        Args:
            indices: each gradient's place among the optimizer's variables.
            own: each replica's gradients before they were summed (tensors, ``tf.IndexedSlices`` or None).
            sums: unscaled gradients.
        """
        for index, grad in zip(indices, sums, strict=True):
            shape = None if grad is None or isinstance(grad, tf.IndexedSlices) else _shape(grad)
            self._sizes[index] = 0 if shape is None or None in shape else int(np.prod(shape))
        if self.replicas == 1:
            self._counts.assign(self._table(indices, sums)[tf.newaxis])
        elif tf.distribute.in_cross_replica_context():
            strategy = tf.distribute.get_strategy()
            rows = strategy.extended.call_for_each_replica(self._rows, args=(list(indices), list(own), list(sums)))
            self._counts.assign(strategy.experimental_local_results(rows)[0])
        else:
            self._counts.assign(self._rows(indices, own, sums))

    def _rows(self, indices: Sequence[int], own: Sequence[Any], sums: Sequence[Any]) -> Any:
        """All the rows, in replica context. The one collective in a branch: all replicas enter it, the flag being agreed."""
        context = tf.distribute.get_replica_context()
        mine = tf.one_hot(context.replica_id_in_sync_group, self.replicas, dtype=tf.int64)
        rows = mine[:, tf.newaxis, tf.newaxis] * self._table(indices, own)[tf.newaxis]
        rows = context.all_reduce(tf.distribute.ReduceOp.SUM, rows)
        return tf.concat([rows, self._table(indices, sums)[tf.newaxis]], axis=0)

    def _table(self, indices: Sequence[int], grads: Sequence[Any]) -> Any:
        counts = [tf.zeros(2, tf.int64)] * len(self._names)
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None:
                counts[index] = _count(grad.values if isinstance(grad, tf.IndexedSlices) else grad)
        return tf.stack(counts)

    def tensors(self) -> list[NonFiniteTensor]:
        """The first gradients that were not finite, in the order of the variables. Reads the device."""
        counts = self._counts.numpy()
        found = []
        for index, name in enumerate(self._names):
            size = self._sizes[index] or None
            own: list[tuple[int | None, Any]] = [
                (rank, row[index]) for rank, row in enumerate(counts[: self.replicas]) if row[index].any()
            ]
            if not own and counts[-1, index].any():
                own = [(None, counts[-1, index])]
            for rank, (nan, inf) in own:
                found.append(NonFiniteTensor(name, int(nan), int(inf), size, rank if self.replicas > 1 else None))
        return found[:SHOWN]


def _count(values: Any) -> Any:
    parts = (tf.math.real(values), tf.math.imag(values)) if values.dtype.is_complex else (values,)
    nan = sum(tf.math.count_nonzero(tf.math.is_nan(part)) for part in parts)
    inf = sum(tf.math.count_nonzero(tf.math.is_inf(part)) for part in parts)
    return tf.stack([nan, inf])


def _shape(grad: Any) -> Any:
    local = grad.values[0] if isinstance(grad, tf.distribute.DistributedValues) else grad
    return None if local.shape.rank is None else local.shape.as_list()
