"""Rounding float32 to a low format where the rounding must happen.

XLA may keep more digits than a pair of casts float32 -> low -> float32 asks for; this does not let it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from precision.formats import FloatFormat, canonical_dtype


def round_to(values: Any, dtype: str) -> jax.Array:
    """Round values to a format, to nearest, ties to even, and return them in float32.

    Bit-equal to ``ml_dtypes`` for every format, subnormals, ties, overflow and NaN included. The cast is kept apart from the
    cast back by an optimisation barrier; ``jax.lax.reduce_precision`` would flush the subnormals of float16 and
    float8_e5m2 to zero and gives float8_e4m3fn infinities that it has not.

    Args:
        values: floating array of any shape.
        dtype: the format's name.

    Returns:
        float32 array of the same shape, holding values that the format represents.

    Example:
        >>> float(round_to(1.0 + 2.0**-12, "float16"))
        1.0
    """
    target = FloatFormat.of(canonical_dtype(dtype)).numpy_dtype
    low = jnp.asarray(values, jnp.float32).astype(target)
    return jax.lax.optimization_barrier(low).astype(jnp.float32)
