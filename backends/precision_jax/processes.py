"""What the processes of ``jax.distributed`` tell each other outside of a step: whether all are well, and what they hold."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from precision.errors import CheckpointError


def gathered(value: Any) -> np.ndarray[Any, Any]:
    """A small NumPy value of every process, by process; all call it together.

    Raises:
        CheckpointError: one of them is gone.
    """
    value = np.asarray(value)
    if jax.process_count() == 1:
        return value[None]
    try:
        rows = multihost_utils.process_allgather(value)
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(f"another process has ended, or cannot be reached: {why}") from error
    return np.asarray(rows).reshape(jax.process_count(), *value.shape)


def all_well(well: bool) -> bool:
    """Whether every process is; also a barrier. Without other processes, the answer is one's own."""
    return well if jax.process_count() == 1 else bool(gathered(np.int32(well)).all())


def parted(arrays: list[np.ndarray[Any, Any]]) -> list[int]:
    """Which of the arrays (same number everywhere, of any content) are not the same in every process."""
    if jax.process_count() == 1 or not arrays:
        return []
    digests = [hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest() for array in arrays]
    rows = gathered(np.frombuffer(b"".join(digests), np.uint8).reshape(len(arrays), -1))
    return [int(i) for i in np.flatnonzero((rows != rows[0]).any(axis=(0, 2)))]
