"""The neutral loss scaler over TensorFlow tensors: explicit state, usable in ``tf.function``, XLA and eager code.

The pass that unscales and checks is here once; the Keras optimizer uses the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision.backend import check_leaf
from precision.errors import UnsupportedError
from precision.loss_scale import LossScale, LossScaler, LossScaleState
from precision_tensorflow.graphs import plain
from precision_tensorflow.replicas import agreed

_EXACT_RECIPROCAL = 2.0**126  # above it 1 / scale is subnormal in float32, which TensorFlow's kernels flush to zero


def widened(tensor: Any) -> Any:
    """Cast float16, bfloat16 and float8 to float32; leave wider dtypes."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


@plain
def scale_loss(loss: Any, scale: Any) -> Any:
    """Multiply a loss of any float dtype by the scale, in float32 or the loss's wider dtype."""
    wide = widened(tf.convert_to_tensor(loss))
    return wide * tf.cast(scale, wide.dtype)


@plain
def unscale(config: LossScale, grads: Sequence[Any], scale: Any) -> tuple[list[Any], Any]:
    """Undo the scale on gradients and say whether all are finite, looking at each once.

    Multiplies by the float32 reciprocal, as ``torch.amp.GradScaler`` does. The unscaled values are the ones checked,
    so that nothing non-finite can get past.

    Args:
        config: the settings; their upper bound tells whether a reciprocal is safe.
        grads: floating or complex tensors, arrays, numbers or ``tf.IndexedSlices``; anything else (None, integers)
            passes through.
        scale: float32 scalar.

    Returns:
        The gradients in float32 (or their wider dtype), and a bool scalar.
    """
    top = config.maximum if config.mode == "dynamic" else config.initial
    inverse = 1.0 / scale if top <= _EXACT_RECIPROCAL else None

    def undo(values: Any) -> Any:
        wide = widened(values)
        return wide / tf.cast(scale, wide.dtype) if inverse is None else wide * tf.cast(inverse, wide.dtype)

    out: list[Any] = []
    finite: list[Any] = []
    for grad in map(_as_tensor, grads):
        if not tf.is_tensor(grad) or not (grad.dtype.is_floating or grad.dtype.is_complex):
            out.append(grad)
            continue
        if isinstance(grad, tf.IndexedSlices):
            values = undo(grad.values)
            out.append(tf.IndexedSlices(values, grad.indices, grad.dense_shape))
        else:
            values = undo(tf.convert_to_tensor(grad))
            out.append(values)
        parts = (tf.math.real(values), tf.math.imag(values)) if values.dtype.is_complex else (values,)
        finite += [tf.reduce_all(tf.math.is_finite(part)) for part in parts]
    return out, tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def _as_tensor(leaf: Any) -> Any:
    """A NumPy array or scalar, a Python float or a Keras variable as a tensor; anything else as it is."""
    arrays = (np.ndarray, np.generic, float, complex, keras.Variable)
    return tf.convert_to_tensor(leaf) if isinstance(leaf, arrays) else leaf


class TensorFlowLossScaler(LossScaler):
    """The neutral :class:`~precision.LossScaler` on TensorFlow. State and gradients are nests (``tf.nest``) of tensors.

    Example:
        >>> scaler = precision.bind("mixed_float16", backend="tensorflow").loss_scaler   # doctest: +SKIP
        >>> state = scaler.init()                                                       # doctest: +SKIP
        >>> float(scaler.scale(tf.constant(0.5), state))                                # doctest: +SKIP
        32768.0
    """

    xp = tf

    def from_host(self, state: LossScaleState) -> LossScaleState:
        scale, *counters = state
        return LossScaleState(tf.constant(scale, tf.float32), *(tf.constant(c, tf.int32) for c in counters))

    @plain
    def scale(self, loss: Any, state: LossScaleState) -> Any:
        check_leaf(loss, "tensorflow")
        return loss if self.config.mode == "none" else scale_loss(loss, state.scale)

    @plain
    def unscale(self, grads: Any, state: LossScaleState) -> tuple[Any, Any]:
        """Divide gradients by the scale and say whether all are finite; see :meth:`precision.LossScaler.unscale`.

        In the replica context of a ``tf.distribute`` strategy (in the function given to ``strategy.run``) the flag is agreed
        on: it holds if it holds on all replicas, and state updated by it stays the same on all of them. The gradients
        stay each replica's own. In cross-replica context there is one set of gradients, and the flag is theirs.

        Raises:
            UnsupportedError: in cross-replica context, a value that differs by replica.
        """
        leaves = tf.nest.flatten(grads)
        for leaf in leaves:
            check_leaf(leaf, "tensorflow")
        if self.config.mode == "none":
            return grads, tf.constant(True)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            raise UnsupportedError(
                "mp.loss_scaler.unscale got gradients that differ by replica, outside replica context: call it in the "
                "function given to strategy.run, where the replicas agree on the flag."
            )
        unscaled, finite = unscale(self.config, leaves, state.scale)
        return tf.nest.pack_sequence_as(grads, unscaled), agreed(finite)

    @plain
    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        return super().update(state, finite)
