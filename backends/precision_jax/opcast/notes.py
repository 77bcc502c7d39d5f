"""What is known of a value besides its dtype, and casting it: the small vocabulary of the rewriting."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precision.formats import FloatFormat

F32 = np.dtype("float32")
CASTABLE = frozenset(
    FloatFormat.of(n).numpy_dtype for n in ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
)
"""The floating dtypes that a policy may move values between. Float64 is not among them."""


class Note(NamedTuple):
    """What is known of a value.

    Attributes:
        path: the path of the argument's leaf that it shows, if it shows one.
        stored: whether it is (a view of) an argument: a parameter or data, not something computed.
        whole: whether it is an argument as it came, so that keeping it costs nothing.
        pinned: 2 if the author has cast it to float32 (or asked to keep it), 1 if it was computed from such a value.
        weak: whether it depends on constants only; then it takes the dtype of what it meets.
        value: the one number that it is full of, if that is known.
    """

    path: str = ""
    stored: bool = False
    whole: bool = False
    pinned: int = 0
    weak: bool = False
    value: float | None = None


PLAIN = Note()


def dtype_of(x: Any) -> np.dtype | None:
    """The dtype of a value, or None if it has none (a token)."""
    return getattr(x, "dtype", None)


def castable(x: Any) -> bool:
    """Whether a value is floating and may be cast."""
    return dtype_of(x) in CASTABLE


def declared(var: Any) -> np.dtype | None:
    """The dtype that a variable was traced with, if it is one that may be cast."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype if dtype in CASTABLE else None


def literal_note(value: Any) -> Note:
    """The note of a literal."""
    number = (
        float(value)
        if np.ndim(value) == 0 and jnp.issubdtype(np.asarray(value).dtype, jnp.number) and not np.iscomplexobj(value)
        else None
    )
    return Note(weak=True, value=number)


def in_range(value: float, dtype: np.dtype) -> float:
    """A finite number brought into the range of a dtype; the others as they are."""
    info = jnp.finfo(dtype)
    return float(np.clip(value, float(info.min), float(info.max))) if np.isfinite(value) else value


def exact(value: float, dtype: np.dtype) -> bool:
    """Whether a dtype has a number."""
    with np.errstate(over="ignore"):
        return bool(np.asarray(value, dtype).astype(np.float64) == np.float64(np.float32(value))) or np.isnan(value)


def fits(value: float, dtype: np.dtype) -> bool:
    """Whether a number is neither beyond a dtype's range nor below its smallest normal number."""
    info = jnp.finfo(dtype)
    return not np.isfinite(value) or value == 0 or float(info.smallest_normal) <= abs(value) <= float(info.max)


def cast(x: Any, dtype: np.dtype, note: Note = PLAIN) -> Any:
    """Cast a floating value; a constant beyond the range becomes the largest number there is, never infinite."""
    if x.dtype == dtype:
        return x
    if note.value is not None and np.isfinite(note.value):
        inside = in_range(note.value, dtype)
        if np.ndim(x) == 0 and not isinstance(x, jax.Array):
            return np.asarray(inside, dtype)
        if inside != note.value:
            return lax.full(np.shape(x), np.asarray(inside, dtype), dtype)
    if not isinstance(x, jax.Array):
        return np.asarray(x).astype(dtype)
    return lax.convert_element_type(x, dtype)
