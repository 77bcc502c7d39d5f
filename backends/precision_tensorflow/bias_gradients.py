"""Whether this device sums the gradient of a bias in the low precision itself, where long sums stop growing.

TensorFlow's CPU kernel for the gradient of ``bias_add`` accumulates bfloat16 in bfloat16: of 4096 ones it makes 256.
Keras's ``Dense`` adds its bias with that op.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from precision.errors import PrecisionWarning

ROWS = 4096
_LOW = ("float16", "bfloat16")


@functools.cache
def sums_exactly(dtype: str) -> bool:
    """Whether ``bias_add``'s gradient of 4096 ones is 4096. Found by trying, once a dtype."""
    return float(tf.raw_ops.BiasAddGrad(out_backprop=tf.ones((ROWS, 1), dtype))[0]) == ROWS


def warn_of_bias_gradients(layers: Iterable[Any], stacklevel: int) -> None:
    """Warn of layers whose bias gradient loses terms on this device."""
    low = [layer for layer in layers if getattr(layer, "use_bias", False) and layer.compute_dtype in _LOW]
    lossy = [layer.path for layer in low if not sums_exactly(layer.compute_dtype)]
    if lossy:
        shown = ", ".join(lossy[:5]) + (f" and {len(lossy) - 5} more" if len(lossy) > 5 else "")
        warnings.warn(
            f"the gradient of the bias of {shown} is summed in bfloat16 by TensorFlow on this device: beyond 256 rows "
            "(batch times positions) terms are lost. Use use_bias=False where a norm with an offset of its own follows, a "
            "rule that keeps the layer float32, or another device.",
            PrecisionWarning,
            stacklevel=stacklevel + 1,
        )
