"""What is known of a value besides its dtype, and casting it: the small vocabulary of the replay."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from precision.formats import FloatFormat
from precision.ops import widest

F32 = tf.float32
CASTABLE = frozenset(tf.as_dtype(n) for n in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))
"""The floating dtypes that a policy may move values between. Float64 is not among them."""


class Value(NamedTuple):
    """A tensor of the new graph and what is known of it.

    Attributes:
        tensor: the tensor.
        stored: whether it is (a view of) a variable or an argument, not something computed.
        pinned: 2 if the author has cast it to float32, 1 if it was computed from such a value.
        weak: whether it depends on constants only; then it takes the dtype of what it meets.
        number: the one number that it is full of, if that is known.
        pending: the low dtype that this float32 sum of a product is still to be rounded to, after its bias.
    """

    tensor: Any
    stored: bool = False
    pinned: int = 0
    weak: bool = False
    number: float | None = None
    pending: Any = None

    @property
    def dtype(self) -> tf.DType:
        """The tensor's dtype."""
        return self.tensor.dtype


def castable(dtype: tf.DType) -> bool:
    """Whether a dtype is floating and may be cast."""
    return dtype in CASTABLE


def in_range(number: float, dtype: tf.DType) -> float:
    """A finite number brought into the range of a dtype; the others as they are."""
    return float(np.clip(number, float(dtype.min), float(dtype.max))) if np.isfinite(number) else number


def exact(number: float, dtype: tf.DType) -> bool:
    """Whether a dtype has a number."""
    with np.errstate(over="ignore"):
        return bool(np.float64(np.asarray(number, dtype.as_numpy_dtype)) == np.float64(np.float32(number))) or bool(
            np.isnan(number)
        )


def fits(number: float, dtype: tf.DType) -> bool:
    """Whether a number is neither beyond a dtype's range nor below its smallest normal number."""
    if not np.isfinite(number) or number == 0:
        return True
    smallest = FloatFormat.of(dtype.name).smallest_normal
    return float(smallest) <= abs(number) <= float(dtype.max)


def meet(dtypes: list[tf.DType]) -> tf.DType:
    """The dtype that values meet in."""
    return tf.as_dtype(widest(sorted({d.name for d in dtypes})))
