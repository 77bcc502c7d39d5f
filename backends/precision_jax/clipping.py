"""Clipping by the norm of the whole gradient where ``shard_map`` shows each device its piece only.

``optax.clip_by_global_norm`` measures the piece: every shard is then clipped by another factor. Under ``jit`` with sharded arrays
optax's own does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from precision.errors import PolicyError, UnsupportedError
from precision_jax.leaves import is_inexact
from precision_jax.replicas import manual_axes, tracked, varying


def global_norm(tree: Any, specs: Any = None) -> jax.Array:
    """The norm of a tree of gradients, its sharded pieces on all devices included; float32 (or wider) scalar.

    Args:
        tree: any pytree; leaves that are not floating point or complex do not count.
        specs: how the leaves are sharded inside ``shard_map``: ``PartitionSpec``, as its ``in_specs`` say it, for each leaf or
            for whole branches. Only ``shard_map(..., check_vma=False)`` and ``pmap`` need it (``PartitionSpec()``: everything is
            replicated); otherwise JAX knows.

    Raises:
        UnsupportedError: ``specs`` is needed and was not given.

    Example:
        >>> float(global_norm({"a": jnp.full(9, 1.0), "b": jnp.full((2, 2), 2.0)}))
        5.0
    """
    sums: dict[tuple[str, ...], Any] = {}
    for leaf, axes in _leaves_and_axes(tree, specs):
        square = jnp.square(jnp.abs(leaf)).astype(jnp.promote_types(jnp.finfo(leaf.dtype).dtype, jnp.float32))
        sums[axes] = sums.get(axes, 0.0) + jnp.sum(square)
    totals = [jax.lax.psum(total, axes) if axes else total for axes, total in sums.items()]
    return jnp.sqrt(jnp.asarray(sum(totals), jnp.result_type(jnp.float32, *totals)))


def clip_by_global_norm(max_norm: Any, specs: Any = None) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` by the norm of the whole gradient; see :func:`global_norm` for ``specs``."""
    if isinstance(max_norm, (int, float)) and (isinstance(max_norm, bool) or not max_norm > 0):
        raise PolicyError(f"max_norm is a number above 0, not {max_norm!r}.")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates, specs)
        fits = norm < max_norm

        def clip(leaf: Any) -> Any:
            if not is_inexact(leaf):
                return leaf
            return jnp.where(fits, leaf, (leaf / norm.astype(leaf.dtype)) * max_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _leaves_and_axes(tree: Any, specs: Any) -> list[tuple[Any, tuple[str, ...]]]:
    manual = manual_axes()
    axes_of: Callable[[Any, Any], tuple[str, ...]]
    if not manual:
        given = jax.tree.map(lambda leaf: None, tree)
        axes_of = lambda leaf, spec: ()  # noqa: E731
    elif specs is not None:
        is_spec = lambda node: isinstance(node, jax.sharding.PartitionSpec)  # noqa: E731
        given = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
        axes_of = lambda leaf, spec: tuple(axis for axis in manual if axis in _axes_in(spec))  # noqa: E731
    elif all(map(tracked, manual)):
        given = jax.tree.map(lambda leaf: None, tree)
        axes_of = lambda leaf, spec: tuple(axis for axis in manual if axis in varying(leaf))  # noqa: E731
    else:
        raise UnsupportedError(
            "inside shard_map(..., check_vma=False) and pmap nothing tells which gradients are sharded, and the norm of all of "
            "them depends on it: give specs, the PartitionSpecs of the parameters (PartitionSpec() if all are replicated)."
        )
    leaves, structure = jax.tree.flatten(tree)
    specs_of = structure.flatten_up_to(given)
    return [(leaf, axes_of(leaf, spec)) for leaf, spec in zip(leaves, specs_of, strict=True) if is_inexact(leaf)]


def _axes_in(spec: Any) -> set[str]:
    if not isinstance(spec, jax.sharding.PartitionSpec):
        raise PolicyError(f"specs holds PartitionSpecs, not {type(spec).__name__}.")
    return {name for part in spec if part is not None for name in ((part,) if isinstance(part, str) else part)}
