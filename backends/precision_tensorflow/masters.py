"""Float32 master copies of low-precision variables: what the optimizer updates, rounded into the variables after.

Without them an update smaller than half a unit in the last place is lost, and Adam's ``beta_2 = 0.999`` is 1 in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from precision.errors import MasterWeightsError

_LOW = ("float16", "bfloat16")


class MasterWeights:
    """The master copies of an optimizer's low-precision trainable variables.

    Args:
        optimizer: the optimizer that owns the copies.
        variables: its trainable variables.
        keep: True keeps copies, False none, None raises where there are low-precision variables.

    Raises:
        MasterWeightsError: with ``keep`` None, names the variables and what can be done.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], keep: bool | None) -> None:
        low = [v for v in variables if dtype_name(v) in _LOW and not optimizer._overwrite_variable_with_gradient(v)]
        if low and keep is None:
            names = ", ".join(f"{getattr(v, 'path', v.name)} ({dtype_name(v)})" for v in low[:5])
            more = f" and {len(low) - 5} more" if len(low) > 5 else ""
            raise MasterWeightsError(
                f"trainable variables in low precision: {names}{more}. Small updates to them are lost (Adam's beta_2 of "
                "0.999 is 1 in bfloat16). Use param_dtype = 'float32' (the mixed_ presets), or "
                "mp.optimizer(..., master_weights=True) for float32 copies, or master_weights=False to go without."
            )
        self._key = optimizer._var_key
        self._copies = {self._key(v): self._copy(optimizer, v) for v in low} if keep else {}

    @property
    def kept(self) -> bool:
        """Whether there are any copies."""
        return bool(self._copies)

    def of(self, variables: Sequence[Any]) -> list[Any]:
        """The variables, each low-precision one replaced by its master copy."""
        return [self._copies.get(self._key(v), v) for v in variables]

    def read_in(self, variables: Sequence[Any]) -> None:
        """Take over values written to the variables from outside (loaded weights) since the last step."""
        for variable, copy in self._pairs(variables):
            rounded = tf.cast(copy, variable.dtype)
            value = tf.convert_to_tensor(variable)
            copy.assign(tf.where(rounded == value, tf.convert_to_tensor(copy), tf.cast(value, tf.float32)))

    def write_back(self, variables: Sequence[Any]) -> None:
        """Round the copies into the variables."""
        for variable, copy in self._pairs(variables):
            variable.assign(tf.cast(copy, variable.dtype))

    def _pairs(self, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(v, self._copies[self._key(v)]) for v in variables if self._key(v) in self._copies]

    @staticmethod
    def _copy(optimizer: Any, variable: Any) -> keras.Variable:
        name = getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_")
        with _outside_graphs(variable):
            copy = optimizer.add_variable(
                variable.shape,
                lambda shape, dtype: tf.cast(variable, dtype),
                "float32",
                name=f"{name}_master",
            )
        copy.constraint = getattr(variable, "constraint", None)
        return copy


def _outside_graphs(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """A context that leaves the graph being traced, if the variable has a value there to copy.

    XLA cannot run a function that creates a variable from another one's value.
    """
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if tf.executing_eagerly() or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    with tf.init_scope():
        ready = tf.executing_eagerly() and bool(native.is_initialized())
    return tf.init_scope() if ready else contextlib.nullcontext()


def dtype_name(variable: Any) -> str:
    """The dtype name of a Keras or TensorFlow variable."""
    return str(getattr(variable.dtype, "name", variable.dtype))
