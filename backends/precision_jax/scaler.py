"""The neutral loss scaler over pytrees: explicit state, pure functions, usable under jit, scan, vmap and pmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precision.backend import check_leaf
from precision.errors import LossScaleError, StateError
from precision.loss_scale import LossScale, LossScaler, LossScaleState
from precision_jax.leaves import is_array, is_inexact
from precision_jax.replicas import AxisName, everywhere


class JaxLossScaler(LossScaler):
    """Loss scaling with explicit state. The state is a pytree of strongly typed scalars (float32 and int32).

    Args:
        config: the policy's loss-scale settings.

    Example:
        >>> scaler = JaxLossScaler(LossScale(mode="dynamic", initial=8.0))
        >>> state = scaler.init()
        >>> grads, finite = scaler.unscale({"w": jnp.full(2, 4.0)}, state)
        >>> float(grads["w"][0]), bool(finite), float(scaler.update(state, False).scale)
        (0.5, True, 4.0)
    """

    xp = jnp

    def __init__(self, config: LossScale) -> None:
        super().__init__(config)
        highest = {"dynamic": config.maximum, "static": config.initial}.get(config.mode, 1.0)
        # The reciprocal of a scale above 2**126 is a subnormal float32, which XLA flushes to zero on CPUs.
        self._divide = highest > 2.0**126

    def from_host(self, state: LossScaleState) -> LossScaleState:
        """Turn NumPy scalars into JAX scalars on the default device."""
        return LossScaleState(
            jnp.asarray(state.scale, jnp.float32), *(jnp.asarray(count, jnp.int32) for count in state[1:])
        )

    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """Multiply a loss, or a tree of losses, by the scale in float32 (float64 losses: in float64); integers stay."""
        if self.config.mode == "none":
            return loss
        scale = self.checked(state).scale

        def scaled(leaf: Any) -> Any:
            check_leaf(leaf, "jax")
            leaf = jnp.asarray(leaf)
            if not is_inexact(leaf):  # a count; jax.grad says that it has no gradient
                return leaf
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            return leaf.astype(wide) * scale.astype(wide)

        return jax.tree.map(scaled, loss)

    def unscale(self, grads: Any, state: LossScaleState, axis_name: AxisName = None) -> tuple[Any, Any]:
        """Multiply gradients by the scale's reciprocal, in float32 or wider, and say whether all are finite, on all replicas.

        Integers, float0, keys and None pass through. With mode ``"none"`` the gradients come back as they are, and the
        flag is a constant True.

        Args:
            grads: any pytree of gradients of the scaled loss.
            state: the state that scaled it.
            axis_name: over which mapped axes to agree on the flag; see :func:`all_finite`.
        """
        if self.config.mode == "none":
            return grads, jnp.asarray(True)
        grads = self.unscale_only(grads, state)
        return grads, all_finite(grads, axis_name)

    def unscale_only(self, grads: Any, state: LossScaleState) -> Any:
        """Unscale without looking: an inf or NaN stays one, so that whoever comes next can see it."""
        if self.config.mode == "none":
            return grads
        scale = self.checked(state).scale
        if self._divide:
            return jax.tree.map(lambda leaf: _apply(jnp.divide, leaf, scale), grads)
        # 1/scale, rounded to float32, then multiplied: the numbers of torch.amp.GradScaler, bit for bit.
        inverse = 1.0 / scale
        return jax.tree.map(lambda leaf: _apply(jnp.multiply, leaf, inverse), grads)

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """The state after a step; see :func:`precision.next_state`."""
        return super().update(self.checked(state), finite)

    def state_dict(self, state: LossScaleState) -> dict[str, float | int]:
        """Save the state as a flat dict of plain numbers; see :func:`precision.loss_scale.state_to_dict`."""
        return super().state_dict(_one(self.checked(state)))

    def check(self, state: LossScaleState, tensors: Any = ()) -> None:
        """Raise if more than ``max_consecutive_skips`` steps in a row were skipped. Reads the state from the device.

        Args:
            state: the state after a step.
            tensors: the gradients to name, or a function that gives them; see :meth:`precision.LossScaler.check`.

        Raises:
            NonFiniteGradientsError: the run diverges; the message gives the scale and what to try.
        """
        super().check(_one(self.checked(state), worst=True), tensors)

    def load_state_dict(self, saved: Any) -> LossScaleState:
        """Load a state saved under any backend, or a native one.

        Args:
            saved: a dict as :meth:`state_dict` gives; a mapping with the native state of a torch ``GradScaler``, a Keras
                ``LossScaleOptimizer`` or a flax ``DynamicScale``; or a flax ``DynamicScale`` or ``jmp.DynamicLossScale`` object.

        Raises:
            StateError: not a loss-scale state, of another version, truncated, or out of range.
        """
        if not isinstance(saved, Mapping):
            for scale, count in (("scale", "fin_steps"), ("loss_scale", "counter")):  # flax, jmp
                if hasattr(saved, scale) and hasattr(saved, count):
                    saved = {"scale": getattr(saved, scale), "fin_steps": getattr(saved, count)}
                    break
        return super().load_state_dict(saved)

    def checked(self, state: Any) -> LossScaleState:
        """The state, if it is one.

        Raises:
            LossScaleError: it is something else; says what to pass.
        """
        if not isinstance(state, LossScaleState):
            raise LossScaleError(
                f"the loss scale's state is a LossScaleState (opt_state.loss_scale, or loss_scaler.init()), not "
                f"{type(state).__name__}. A saved dict goes through loss_scaler.load_state_dict first."
            )
        return state


def on_host(value: Any) -> np.ndarray[Any, Any]:
    """A small array on the host. Waits for it. If it is spread over processes, the piece that is here (all hold the same)."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)
    return np.asarray(value)


def _one(state: LossScaleState, worst: bool = False) -> LossScaleState:
    """The state as scalars on the host, where ``pmap`` or ``vmap`` keeps one a replica, too, if they are the same.

    With ``worst``, that of the replica which has skipped most steps in a row, whatever the others'.
    """
    fields = [on_host(field) for field in state]
    if not fields[0].ndim:
        return LossScaleState(*fields)
    index = int(np.argmax(fields[-1])) if worst else 0
    if not worst and not all((field == field.flat[0]).all() for field in fields):
        raise StateError("this state holds several loss scales that differ (of a vmap): take one out before saving it.")
    return LossScaleState(*(field.flat[index] for field in fields))


_NUMBERS = (int, float, complex)  # bool is an int


def _apply(operation: Callable[..., Any], leaf: Any, factor: jax.Array) -> Any:
    check_leaf(leaf, "jax")
    if isinstance(leaf, float):
        leaf = jnp.asarray(leaf, jnp.float32)
    if not is_inexact(leaf):
        return leaf
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return operation(jnp.asarray(leaf, wide), factor.astype(jnp.finfo(wide).dtype))


def finite_leaves(tree: Any) -> list[jax.Array]:
    """For each floating or complex leaf of a tree, whether it is finite: bool scalars, on this replica."""
    numbers = [leaf for leaf in jax.tree.leaves(tree) if is_looked_at(leaf)]
    return [jnp.isfinite(leaf).all() for leaf in numbers]


def is_looked_at(leaf: Any) -> bool:
    """Whether a leaf counts for :func:`all_finite`."""
    return is_inexact(leaf) or isinstance(leaf, (float, complex))


def all_finite(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """Whether every floating or complex value in a tree is finite, as a device scalar (bool). True for an empty tree.

    Args:
        tree: any pytree; leaves that are not floating point or complex do not count.
        axis_name: a mapped axis, or a tuple of them, over which to agree: finite only if finite on every replica. None
            agrees over all axes of the enclosing ``shard_map`` or ``pmap`` (and has nothing to do elsewhere; an axis of
            ``vmap`` must be named); an empty tuple does not agree.

    Example:
        >>> bool(all_finite({"a": jnp.ones(3), "b": jnp.asarray([jnp.inf])}))
        False
    """
    flags = finite_leaves(tree)
    finite = reduce(jnp.logical_and, flags) if flags else jnp.asarray(True)
    return everywhere(finite, axis_name)


def select(finite: Any, new: Any, old: Any) -> Any:
    """Take one tree or the other, leaf by leaf: what keeps BatchNorm statistics from a step that was skipped.

    Args:
        finite: boolean scalar, for instance ``opt_state.finite`` after the update.
        new: the tree to take if it is True.
        old: the tree to take otherwise, of the same structure, shapes and dtypes.

    Returns:
        A tree with the dtypes of ``old``. Python numbers that differ become arrays; what is neither array nor number is taken from ``new``.

    Example:
        >>> float(select(False, {"mean": jnp.asarray(jnp.nan)}, {"mean": jnp.asarray(2.0)})["mean"])
        2.0
    """

    def pick(n: Any, o: Any) -> Any:
        if not is_array(n) and not is_array(o) and (not isinstance(o, _NUMBERS) or (type(n) is type(o) and n == o)):
            return n
        dtype = jnp.result_type(o)
        picked = jnp.where(finite, n, o)
        return picked if jnp.issubdtype(dtype, jax.dtypes.extended) else picked.astype(dtype)  # typed keys do not cast

    return jax.tree.map(pick, new, old)
