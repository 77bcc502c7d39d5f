"""``mp.checkpoints(directory)``: a run's state through Orbax, whole after a kill at any moment.

Orbax writes the arrays, every process its own pieces, into the folder of :class:`precision.checkpoint.CheckpointStore`, which decides
when a checkpoint counts: Orbax's own commit is a step inside of that. The state is any pytree, and comes back as it was given, on
the mesh that the state to restore into is on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from precision.checkpoint import CheckpointStore, Manifest
from precision.errors import BackendUnavailableError, CheckpointError
from precision_jax import saved_leaves
from precision_jax.processes import all_well, gathered, parted
from precision_jax.saved_leaves import PLAIN, Leaf, is_key, matched, placed, plain_value, table

if TYPE_CHECKING:
    from types import ModuleType

_STATE = "state"


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
        step: the step it was saved after.
        state: of the structure, dtypes and shardings of the state given to :meth:`Checkpoints.restore`.
        extra: what was given to :meth:`Checkpoints.save` beside the state.
    """

    step: int
    state: Any
    extra: Any


class Checkpoints:
    """Checkpoints of a run in one folder; ``mp.checkpoints(directory)`` makes it. Needs ``orbax-checkpoint``.

    With several processes (``jax.distributed``) all of them call :meth:`save` and :meth:`restore` together, with a folder that all of
    them see. Neither may run inside ``jit``.

    Args:
        directory: made when the first checkpoint is saved.
        keep: how many complete checkpoints to keep; None keeps all.

    Raises:
        BackendUnavailableError: Orbax is not installed.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> state = {"w": jnp.ones(2, jnp.bfloat16), "key": jax.random.key(0)}
        >>> checkpoints.restore(state) is None
        True
        >>> checkpoints.save(7, state, extra={"epoch": 1})
        >>> restored = checkpoints.restore(state)
        >>> restored.step, restored.state["w"], restored.extra
        (7, Array([1, 1], dtype=bfloat16), {'epoch': 1})
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = None) -> None:
        _orbax()
        self.store = CheckpointStore(directory, keep)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return self.store.steps()

    def latest(self) -> int | None:
        """The last complete checkpoint's step; None if there is none."""
        return self.store.latest()

    def save(self, step: int, state: Any, *, extra: Any = None) -> None:
        """Save a state after a step; returns once it counts. Until then those before it do.

        Args:
            step: training steps taken so far, at least 0.
            state: any pytree, such as ``{"params": params, "opt_state": opt_state, "key": key}``: arrays of JAX (on any mesh) and
                NumPy, typed PRNG keys, Python numbers and strings. Functions and other objects among the leaves are not saved.
            extra: JSON values, the position in the data for example.

        Raises:
            CheckpointError: it could not be written (told to all processes), ``extra`` is no JSON, or an array that each process
                has for itself is not the same in all of them.
        """
        leaves, rows = jax.tree.leaves(state), table(state)
        _require_readable(leaves, rows)
        arrays, problem = _to_write(leaves, rows)
        about = {"extra": extra, "leaves": saved_leaves.to_json(rows)}
        with self.store.saving(
            step,
            backend="jax",
            world_size=jax.process_count(),
            coordinator=jax.process_index() == 0,
            agree=all_well,
            about=about,
        ) as folder:
            if problem:
                raise CheckpointError(problem)
            if arrays:
                ocp = _orbax()
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
                    checkpointer.save(folder.absolute() / _STATE, args=ocp.args.PyTreeSave(arrays))

    def restore(self, state: Any, *, step: int | None = None) -> Restored | None:
        """Give a checkpoint's state back. Everything is verified before anything is read.

        Args:
            state: says what to restore, and to where: a state as it is at the start of the run, or ``jax.ShapeDtypeStruct`` with
                shardings in its place. Each array comes back on that mesh, which may be another than it was saved from, as may be
                the number of processes. Leaves that are not saved are taken from it.
            step: which checkpoint; None for the last complete one.

        Returns:
            Its step, state and ``extra``; None if the folder holds none (and ``step`` was left out).

        Raises:
            CheckpointError: it is damaged, another program's, or of another state (names the leaves); or another process cannot read
                it.
        """
        if step is None and not gathered(np.int32(self.latest() is not None)).any():
            return None
        found: tuple[Path, Manifest, list[Leaf | None]] | None = None
        error: Exception | None = None
        try:
            folder, manifest = self.store.open(step, backend="jax")
            if not isinstance(manifest.about.get("leaves"), list):
                raise CheckpointError(f"{folder} holds no state that mp.checkpoints saved.")
            found = folder, manifest, matched(saved_leaves.from_json(manifest.about["leaves"]), table(state))
        except Exception as problem:  # noqa: BLE001 - raised below, after the other processes have been told
            error = problem
        steps = gathered(np.int32(-1 if found is None else found[1].step))
        if error is not None:
            raise error
        if found is None or (steps != steps[0]).any():
            raise CheckpointError(
                "nothing was restored: the processes do not all see the same checkpoint. The folder must be one that all of them "
                "read, and each gives a state of the same kind."
            )
        folder, manifest, fills = found
        try:
            return Restored(manifest.step, _read(folder / _STATE, state, fills), manifest.about.get("extra"))
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as problem:
            raise CheckpointError(f"{folder} cannot be restored: {problem}. Nothing was restored.") from problem


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise BackendUnavailableError(
            f"mp.checkpoints needs Orbax, which cannot be imported ({error}): pip install orbax-checkpoint."
        ) from error
    return ocp


def _require_readable(leaves: list[Any], rows: list[Leaf]) -> None:
    for leaf, row in zip(leaves, rows, strict=True):
        if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise CheckpointError(f"{row.path} has no value to save: it is a {type(leaf).__name__}.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"{row.path} was donated to a compiled function, and is gone: save what that function returned."
            )


def _to_write(leaves: list[Any], rows: list[Leaf]) -> tuple[dict[str, Any], str]:
    """The arrays for Orbax, by path; and what is wrong with them, if anything."""
    arrays = {
        row.path: jax.random.key_data(leaf) if row.kind == "key" else leaf
        for leaf, row in zip(leaves, rows, strict=True)
        if row.kind in ("array", "key")
    }
    if jax.process_count() > 1:
        own = {path: np.asarray(array) for path, array in arrays.items() if not _is_global(array)}
        arrays.update(own)
        if differ := parted(list(own.values())):
            names = [list(own)[i] for i in differ]
            return {}, (
                f"{', '.join(names[:5])}: each process has its own, and they are not the same. Make a global array of them "
                "(jax.make_array_from_process_local_data)."
            )
    return {path: array for path, array in arrays.items() if np.size(array)}, ""  # Orbax takes no empty arrays


def _is_global(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def _read(folder: Path, state: Any, fills: list[Leaf | None]) -> Any:
    leaves, structure = jax.tree.flatten(state)
    ocp = _orbax()
    items, asked = {}, {}
    for leaf, fill in zip(leaves, fills, strict=True):
        if fill is not None and fill.kind in ("array", "key") and 0 not in fill.shape:
            sharding = _sharding_of(leaf)
            items[fill.path] = 0
            asked[fill.path] = (
                ocp.RestoreArgs(restore_type=np.ndarray)
                if sharding is None
                else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
            )
    values: dict[str, Any] = {}
    if items:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
            args = ocp.args.PyTreeRestore(item=items, restore_args=asked, partial_restore=True)
            values = checkpointer.restore(folder.absolute(), args=args)
    return structure.unflatten(
        [leaf if fill is None else _filled(leaf, fill, values) for leaf, fill in zip(leaves, fills, strict=True)]
    )


def _filled(leaf: Any, fill: Leaf, values: dict[str, Any]) -> Any:
    if fill.kind == "object":
        return leaf
    if fill.kind in (kind.__name__ for kind in PLAIN):
        value = plain_value(fill)
        return value if type(leaf) in PLAIN else placed(np.asarray(value, leaf.dtype), leaf)
    if fill.kind == "key":
        shape = jax.eval_shape(jax.random.key_data, leaf)
        data = placed(values[fill.path] if 0 not in fill.shape else np.zeros(shape.shape, shape.dtype), leaf)
        return jax.random.wrap_key_data(data, impl=fill.dtype)
    empty = 0 in fill.shape
    value = np.zeros(fill.shape, np.dtype(fill.dtype)) if empty else values[fill.path]
    return jax.numpy.asarray(value) if type(leaf) in PLAIN else placed(value, leaf)


def _sharding_of(leaf: Any) -> Any:
    """Where Orbax is to put an array by itself: what is on a mesh or a device on purpose. The rest comes by way of the host."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    else:
        sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
        return None
    if is_key(leaf) and isinstance(sharding, jax.sharding.NamedSharding):
        # The key's data has one more axis, which is not sharded.
        return jax.sharding.NamedSharding(sharding.mesh, sharding.spec)
    return sharding
