"""Where the optimizer's state lives on a mesh: what mirrors a parameter beside it, everything else on every device."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from precision.errors import UnsupportedError
from precision_jax.leaves import dotted, is_array


def state_shardings(opt: optax.GradientTransformation, params: Any) -> Any:
    """See :meth:`precision_jax.JaxPolicy.state_shardings`."""
    pairs = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_array(leaf)]
    placed = {path: (leaf.shape, getattr(leaf, "sharding", None)) for path, leaf in pairs}
    bare = [dotted(path) or "the parameter" for path, leaf in placed.items() if not isinstance(leaf[1], NamedSharding)]
    if bare or not placed:
        raise UnsupportedError(
            f"these parameters are on no mesh: {', '.join(bare[:5]) or '(there are none)'}. Place them with "
            "jax.device_put(params, NamedSharding(mesh, spec)), or give jax.ShapeDtypeStructs that have a sharding."
        )
    first: Any = next(iter(placed.values()))[1]
    everywhere = NamedSharding(first.mesh, PartitionSpec())
    by_end = sorted(placed.items(), key=lambda item: -len(item[0]))

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for end, (shape, sharding) in by_end:
            if path[len(path) - len(end) :] == end and shape == leaf.shape:
                return sharding
        return everywhere

    return jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(opt.init, params))


def beside(params: Any, state: Any) -> Any:
    """A state made of parameters on a mesh, with its scalars on that mesh, too: a first step is then like every other.

    Left alone, they would be on no mesh before the first step and on all of it after, and the step be traced twice. Inside ``jit``
    the state is as it is (``out_shardings`` says where it goes).
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, *jax.tree.leaves(state))):
        return state
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    if not meshes:
        return state
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    leaves, structure = jax.tree.flatten(state)
    free = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.committed]
    values = [leaves[i] for i in free]
    if everywhere.is_fully_addressable:
        values = jax.device_put(values, everywhere)
    else:  # over several processes only a compiled function puts what each of them has
        values = jax.jit(lambda x: x, out_shardings=everywhere)(values)
    for i, value in zip(free, values, strict=True):
        leaves[i] = value
    return structure.unflatten(leaves)
