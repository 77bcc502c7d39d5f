"""Which replicas there are where the code runs, and agreement among them on what is not finite.

``shard_map`` and ``pmap`` name their axes to whoever asks; with ``check_vma`` they also say over which of them a value varies, so
that no collective is spent on what is the same everywhere already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from precision.errors import PolicyError

AxisName = str | Sequence[str] | None


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the enclosing ``shard_map`` or ``pmap``, in the mesh's order; empty outside of one.

    Axes that ``jit`` partitions by itself are not among them, nor is an axis that only ``vmap`` maps.
    """
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
    """The axes to agree over: those given; with None, all of the enclosing ``shard_map`` or ``pmap``.

    Raises:
        PolicyError: ``axis_name`` is neither a name, nor several, nor None.
    """
    if axis_name is None:
        return manual_axes()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise PolicyError(f"axis_name is the name of a mapped axis, or a tuple of them, or None; not {axis_name!r}.")
    return tuple(names)


def varying(value: Any) -> frozenset[str]:
    """The mesh axes over which an array may differ, as far as ``shard_map(..., check_vma=True)`` tells; else empty."""
    kind = jax.typeof(value)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", ()))


def tracked(axis: str) -> bool:
    """Whether JAX keeps track, here, of what varies over an axis (``shard_map`` with ``check_vma=True``)."""
    return axis in manual_axes() and axis in varying(jax.lax.axis_index(axis))


def everywhere(flags: jax.Array, axis_name: AxisName = None) -> jax.Array:
    """Boolean flags (any shape), each True if it is on every replica: one collective; none where all hold the same already.

    Args:
        flags: the same shape on every replica.
        axis_name: the axes to agree over, as :func:`axes_of` takes them; an empty tuple for none.
    """
    known = varying(flags)
    axes = tuple(axis for axis in axes_of(axis_name) if axis in known or not tracked(axis))
    return jax.lax.pmin(flags.astype(jnp.int32), axes).astype(jnp.bool_) if axes else flags
