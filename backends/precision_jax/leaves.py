"""What a leaf of a tree is and what its path reads as: the questions every cast and every rule asks.

Nothing here imports Flax, Equinox or Haiku; their trees answer through ``jax.tree_util``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precision.backend import check_leaf
from precision.errors import UnsupportedError
from precision.formats import FloatFormat

LOW = tuple(FloatFormat.of(name).numpy_dtype for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))
"""The floating dtypes narrower than float32 that a policy may name, as NumPy dtypes."""


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array (JAX's, NumPy's, a tracer, or an abstract ``ShapeDtypeStruct``)."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array that can have a gradient: floating point or complex, of any width."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_castable(leaf: Any) -> bool:
    """Whether a leaf is an array that a policy may cast: floating point, and not float64."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != np.float64


def is_low(leaf: Any) -> bool:
    """Whether a leaf is an array of a floating dtype narrower than float32."""
    return is_array(leaf) and leaf.dtype in LOW


def is_statistic(node: Any) -> bool:
    """Whether a node is an nnx ``BatchStat``: running statistics keep their dtype, as buffers do in PyTorch."""
    return any(c.__name__ == "BatchStat" and c.__module__.startswith("flax.") for c in type(node).__mro__)


def cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Cast a leaf if it may be cast; the result is never weakly typed. Everything else comes back as it is.

    Raises:
        MixedFrameworksError: the leaf is PyTorch's or TensorFlow's.
    """
    check_leaf(leaf, "jax")
    if not is_castable(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    if isinstance(leaf, jax.Array):
        return leaf if leaf.dtype == dtype and not leaf.weak_type else jax.lax.convert_element_type(leaf, dtype)
    return jnp.asarray(leaf, dtype)


def dotted(path: Sequence[Any]) -> str:
    """A key path as rules read it: ``layers.0.norm.scale``.

    Left out are what no user names: the collection ``params`` that Flax linen puts first, and the ``value`` inside an nnx
    variable.
    """
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if len(parts) > 1 and parts[0] == "params":
        parts = parts[1:]
    if len(parts) > 1 and parts[-1] == "value" and isinstance(path[-1], jax.tree_util.GetAttrKey):
        parts = parts[:-1]
    return ".".join(part.replace("/", ".") for part in parts)


def in_statistics(path: Sequence[Any]) -> bool:
    """Whether a path leads into Flax linen's collection of running statistics (``batch_stats``)."""
    return len(path) > 1 and getattr(path[0], "key", None) == "batch_stats"


def float_paths(tree: Any) -> list[str]:
    """The dotted paths of the leaves that a policy may cast."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_statistic)
    return [dotted(path) for path, leaf in pairs if is_castable(leaf)]


def refuse_stateful_modules(*trees: Any) -> None:
    """Refuse an ``nnx.Module`` with state of its own where a copy of it would be run, and its updates be lost.

    Raises:
        UnsupportedError: names the module's class and the kinds of its state, and says what to do.
    """
    nnx = sys.modules.get("flax.nnx")  # whoever has such a module has imported it
    if nnx is None:
        return
    for module in jax.tree.leaves(trees, is_leaf=lambda node: isinstance(node, nnx.Module)):
        if not isinstance(module, nnx.Module):
            continue
        variables = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
        kinds = {type(v).__name__ for v in variables if isinstance(v, nnx.Variable) and not isinstance(v, nnx.Param)}
        if kinds:
            raise UnsupportedError(
                f"{type(module).__name__} holds {', '.join(sorted(kinds))}: a cast runs a copy of it, whose updates would be "
                "lost. Differentiate and cast nnx.split states (see examples/flax_nnx.py), or give the layers "
                "dtype=mp.compute_dtype and leave the module uncast."
            )
