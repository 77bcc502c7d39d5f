"""What the leaves of a training state are on disk: arrays, the data of typed keys, plain numbers; and how they come back.

A checkpoint holds a table of its leaves (path, kind, shape, dtype), so that a state of another kind is told by name before anything
is read, and Orbax is asked for what is there only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precision.errors import CheckpointError
from precision_jax.leaves import is_array

PLAIN = (bool, int, float, str)
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf as the table says it.

    Attributes:
        path: where it is, readable and unique in its tree.
        kind: ``"array"``, ``"key"`` (a typed PRNG key), a plain Python type's name, or ``"object"`` (not saved).
        shape: of the array or the key; empty for others.
        dtype: of the array, or the key's implementation; empty for others.
        value: of a plain number or string, as text that gives it back exactly.
    """

    path: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: str = ""

    def __str__(self) -> str:
        what = {"array": self.dtype, "key": f"key<{self.dtype}>", "object": "no array"}.get(self.kind, self.kind)
        return f"{what}{list(self.shape)}" if self.kind in ("array", "key") else what


def table(tree: Any) -> list[Leaf]:
    """The leaves of a tree, in order."""
    seen: dict[str, int] = {}
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "state"
        seen[name] = seen.get(name, 0) + 1
        found.append(_leaf(name if seen[name] == 1 else f"{name}#{seen[name]}", leaf))
    return found


def _leaf(path: str, leaf: Any) -> Leaf:
    if is_key(leaf):
        return Leaf(path, "key", tuple(leaf.shape), implementation(leaf))
    if is_array(leaf):
        return Leaf(path, "array", tuple(leaf.shape), np.dtype(leaf.dtype).name)
    if type(leaf) in PLAIN:
        return Leaf(path, type(leaf).__name__, value=leaf.hex() if isinstance(leaf, float) else str(leaf))
    return Leaf(path, "object")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or the shape of one."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def implementation(key: Any) -> str:
    """The name of the generator that a typed key, or the shape of one, is for."""
    names: list[str] = []
    jax.eval_shape(lambda k: names.append(str(jax.random.key_impl(k))), key)
    return names[0]


def from_json(rows: Any) -> list[Leaf]:
    """The table of a checkpoint.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return [Leaf(str(p), str(k), tuple(int(n) for n in s), str(d), str(v)) for p, k, s, d, v in rows]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's table of leaves cannot be read: {error}.") from None


def to_json(leaves: list[Leaf]) -> list[list[Any]]:
    """The table as JSON values."""
    return [[leaf.path, leaf.kind, list(leaf.shape), leaf.dtype, leaf.value] for leaf in leaves]


def matched(saved: list[Leaf], wanted: list[Leaf]) -> list[Leaf | None]:
    """For each wanted leaf the saved one that fills it; None for what the state's own value fills.

    ``finite_leaves`` comes and goes with ``max_consecutive_skips``, and says something about the last step only.

    Raises:
        CheckpointError: the checkpoint is of another state; names leaves that are missing, left over or different.
    """
    there = {leaf.path: leaf for leaf in saved}
    missing, different, found = [], [], []
    for want in wanted:
        have = there.pop(want.path, None)
        found.append(have)
        if have is None and not _passing(want):
            missing.append(want.path)
        elif have is not None and not _fits(have, want):
            different.append(f"{want.path} is {have} in the checkpoint and {want} here")
    extra = [path for path, leaf in there.items() if not _passing(leaf)]
    problems = [("it lacks", missing), ("it has besides", extra), ("they differ in", different)]
    if any(names for _, names in problems):
        told = "; ".join(f"{what} {_some(names)}" for what, names in problems if names)
        raise CheckpointError(f"the checkpoint is of another state: {told}. Nothing was restored.")
    return found


def _passing(leaf: Leaf) -> bool:
    return leaf.path.rpartition(".")[2] == "finite_leaves" and leaf.dtype == "bool"


def _fits(have: Leaf, want: Leaf) -> bool:
    if (have.kind, have.shape, have.dtype) == (want.kind, want.shape, want.dtype):
        return True
    # A number that a first compiled step turned into an array, or one that is still a number at the start of a run.
    numbers = ("bool", "int", "float")
    return (
        have.shape == want.shape == ()
        and {have.kind, want.kind} <= {"array", *numbers}
        and (have.kind in numbers or want.kind in numbers)
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def plain_value(leaf: Leaf) -> Any:
    """The value of a plain leaf.

    Raises:
        CheckpointError: the table does not hold one.
    """
    try:
        if leaf.kind == "bool":
            return {"True": True, "False": False}[leaf.value]
        if leaf.kind == "float":
            return float.fromhex(leaf.value)
        return int(leaf.value) if leaf.kind == "int" else leaf.value
    except (KeyError, ValueError):
        raise CheckpointError(f"the checkpoint's {leaf.path} is {leaf.value!r}, no {leaf.kind}.") from None


def placed(value: Any, like: Any) -> Any:
    """An array's value (NumPy's, or JAX's already in place) as the kind of array that ``like`` is, and where it is."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(like, np.generic):
        return value[()]
    if isinstance(like, np.ndarray):
        return value
    sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False) else None
    if sharding is None:  # free to follow the arrays it meets
        array = jnp.asarray(value)
        return array if array.dtype == value.dtype else value
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
