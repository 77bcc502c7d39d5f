"""Floating-point formats as plain numbers, and the reference rounding into them.

The numbers come from ``ml_dtypes.finfo``; nothing here touches a framework.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from precision.errors import PolicyError, nearest

DTYPES: tuple[str, ...] = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes a policy may name, by their NumPy / ``ml_dtypes`` names."""

_ALIASES = {
    "f32": "float32", "fp32": "float32", "single": "float32", "float": "float32", "full": "float32",
    "f16": "float16", "fp16": "float16", "bf16": "bfloat16", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


def canonical_dtype(name: object) -> str:
    """Return the canonical name of a dtype.

    Args:
        name: a dtype name (``"float16"``), a usual short form (``"fp16"``, ``"bf16"``, ``"f32"``), or any framework's
            dtype object (``torch.float16``, ``tf.bfloat16``, ``jnp.float32``, ``np.dtype``).

    Returns:
        One of :data:`DTYPES`.

    Raises:
        PolicyError: the dtype is not one a policy may name; the message lists those that are.

    Example:
        >>> canonical_dtype("bf16")
        'bfloat16'
    """
    text = name if isinstance(name, str) else _dtype_text(name)
    key = text.strip().lower().removeprefix("torch.").removeprefix("tf.")
    key = _ALIASES.get(key, key)
    if key in DTYPES:
        return key
    if key == "half":
        raise PolicyError(
            "dtype 'half' means float16 in PyTorch and 'float16 or bfloat16' in jmp; name one of the two."
        )
    if key in ("float64", "f64", "double", "fp64"):
        raise PolicyError(
            "float64 is not a policy dtype: float64 tensors are never narrowed, so they need no policy. "
            f"Use one of {', '.join(DTYPES)}."
        )
    raise PolicyError(f"unknown dtype {text!r}. Use one of {', '.join(DTYPES)}.{nearest(key, DTYPES)}")


def _dtype_text(obj: object) -> str:
    named = getattr(obj, "name", None)  # tf.DType, np.dtype
    if isinstance(named, str):
        return named
    try:
        return str(np.dtype(obj).name)  # type: ignore[call-overload]  # np.float16, jnp.bfloat16
    except TypeError:
        return str(obj)  # torch.float16


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """What a floating-point format can represent.

    Attributes:
        name: canonical dtype name.
        bits: storage width in bits.
        exponent_bits: width of the exponent field in bits.
        mantissa_bits: stored fraction bits (the leading 1 not counted).
        max: largest finite value.
        smallest_normal: smallest positive normal value.
        smallest_subnormal: smallest positive value.
        eps: distance from 1 to the next larger value, ``2**-mantissa_bits``.
        has_inf: whether infinities exist (``float8_e4m3fn`` has none: overflow becomes NaN).

    Example:
        >>> FloatFormat.of("float16").max
        65504.0
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_inf: bool

    @staticmethod
    @functools.cache
    def of(dtype: str) -> FloatFormat:
        """Return the format of a dtype name or alias. Raises ``PolicyError`` for an unknown one."""
        name = canonical_dtype(dtype)
        numpy_dtype = _numpy_dtype(name)
        info = ml_dtypes.finfo(numpy_dtype)  # type: ignore[no-untyped-call]
        with np.errstate(over="ignore"):
            has_inf = bool(np.isinf(np.array(np.inf, np.float32).astype(numpy_dtype).astype(np.float32)))
        return FloatFormat(
            name=name, bits=info.bits, exponent_bits=info.nexp, mantissa_bits=info.nmant,
            max=float(info.max), smallest_normal=float(info.smallest_normal),
            smallest_subnormal=float(info.smallest_subnormal), eps=float(info.eps), has_inf=has_inf,
        )  # fmt: skip

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype object (from ``ml_dtypes`` for those NumPy lacks)."""
        return _numpy_dtype(self.name)

    def round(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Round float32 values to this format, to nearest, ties to even, and return them as float32.

        Overflow goes to infinity (NaN where the format has none); subnormals are kept. This is the reference that
        every backend's rounding is tested against (parity tier T2).

        Args:
            values: float32 array of any shape.

        Returns:
            float32 array of the same shape whose values this format represents exactly.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = np.asarray(values, np.float32).astype(self.numpy_dtype)
            return np.asarray(rounded.astype(np.float32))

    def spacing(self, value: float) -> float:
        """One unit in the last place at ``value`` (the subnormal spacing below the smallest normal)."""
        magnitude = abs(float(value))
        if not np.isfinite(magnitude):
            return float("nan")
        exponent = math.frexp(max(magnitude, self.smallest_normal))[1] - 1
        return math.ldexp(1.0, exponent - self.mantissa_bits)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name if name in ("float32", "float16") else getattr(ml_dtypes, name))
