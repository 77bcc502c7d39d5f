"""An optax optimizer that skips non-finite steps and moves the loss scale: a wrapper around any optax transformation.

Everything is selected on the device: no branch, no host read, one trace for the whole run. (A ``lax.cond`` around the
inner update is up to a third faster with Adam on CPUs, but GPUs read its predicate back, and where the flag differs between
replicas a collective inside it would hang; a select does neither.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from precision.backend import check_leaf
from precision.errors import LossScaleError, MasterWeightsError, UnsupportedError
from precision.loss_scale import LossScaleState
from precision_jax.divergence import leaves_or_none
from precision_jax.leaves import cast_leaf, dotted, is_array, is_inexact, is_low
from precision_jax.replicas import AxisName, axes_of, everywhere
from precision_jax.scaler import all_finite, is_looked_at, select
from precision_jax.shardings import beside

if TYPE_CHECKING:
    from precision_jax.bound import JaxPolicy


class OptimizerState(NamedTuple):
    """What :meth:`precision_jax.JaxPolicy.optimizer` keeps from step to step.

    Attributes:
        inner_state: the wrapped transformation's own state.
        loss_scale: the loss scale's state; pass it to ``value_and_grad``.
        finite: bool scalar, whether the last step was taken (True before the first).
        masters: float32 copies of the low-precision parameters, or None if none are kept.
        finite_leaves: bool vector, whether each gradient of the last step was finite, in the order of the parameters; only
            with ``max_consecutive_skips``, for the names in its error; else None.
    """

    inner_state: Any
    loss_scale: LossScaleState
    finite: Any
    masters: Any = None
    finite_leaves: Any = None


def wrap_optimizer(
    mp: JaxPolicy, tx: Any, master_weights: bool | None, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """See :meth:`precision_jax.JaxPolicy.optimizer`."""
    mp.policy.require_trainable()
    axes_of(axis_name)
    inner = optax.with_extra_args_support(_transformation(tx))
    scaler = mp.loss_scaler
    checks = mp.policy.loss_scale.mode != "none"
    names = mp.policy.loss_scale.max_consecutive_skips is not None

    def init(params: Any) -> OptimizerState:
        _check(params)
        mp.rules.parameters(params)
        if master_weights is None:
            _require_masters(params)
        masters = jax.tree.map(lambda leaf: _widen(leaf) if is_low(leaf) else None, params) if master_weights else None
        state = OptimizerState(
            inner_state=jax.tree.map(_strong, inner.init(jax.tree.map(_widen, params))),
            loss_scale=scaler.init(),
            finite=jnp.asarray(True),
            masters=masters,
            finite_leaves=jnp.ones(len(mp.divergence.names(params)), jnp.bool_) if names else None,
        )
        return beside(params, state)

    def update(
        updates: Any, state: OptimizerState, params: Any = None, *, finite: Any = None, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        if not isinstance(state, OptimizerState):
            raise LossScaleError(
                f"this optimizer's state is the OptimizerState that its init(params) gives, not {type(state).__name__}."
            )
        _check(updates)
        grads = jax.tree.map(_widen, updates)
        weights = jax.tree.map(_widen, params) if state.masters is None else _weights(state.masters, params)
        steps, inner_state = inner.update(grads, state.inner_state, weights, **extra_args)
        masters = None
        if state.masters is not None:
            masters, steps = _step_masters(state.masters, steps, params)
        if not checks and finite is None:
            return steps, state._replace(inner_state=jax.tree.map(_strong, inner_state), masters=masters)
        if finite is not None and jnp.ndim(finite):
            raise LossScaleError(
                f"finite is one flag for all gradients, a boolean scalar; this one has shape {jnp.shape(finite)}."
            )
        ok, leaves = _agree(grads, finite, axis_name, state.finite_leaves)
        if names:
            mp.divergence.names(updates)
        return jax.tree.map(lambda step: _unless_skipped(ok, step), steps), OptimizerState(
            inner_state=select(ok, inner_state, state.inner_state),
            loss_scale=scaler.update(state.loss_scale, ok),
            finite=ok,
            masters=select(ok, masters, state.masters),
            finite_leaves=leaves,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _transformation(tx: Any) -> optax.GradientTransformation:
    if isinstance(tx, optax.GradientTransformation):
        return tx
    if callable(convert := getattr(tx, "gradient_transformation", None)):  # optax.MultiSteps
        return convert()
    check_leaf(tx, "jax")
    raise UnsupportedError(
        f"mp.optimizer wraps an optax.GradientTransformation, such as optax.adam(1e-3), not {type(tx).__name__}."
    )


def _agree(grads: Any, finite: Any, axis_name: AxisName, before: Any) -> tuple[jax.Array, Any]:
    """Whether to step, and which gradients are finite (None without ``before``), the same on all replicas: one collective."""
    given = None if finite is None else jnp.asarray(finite, jnp.bool_)
    if before is None:
        return (all_finite(grads, axis_name) if given is None else everywhere(given, axis_name)), None
    flags = [jnp.isfinite(x).all() if is_looked_at(x) else jnp.asarray(True) for x in leaves_or_none(grads)]
    if len(flags) != before.shape[-1]:
        raise LossScaleError(
            f"there are {len(flags)} gradients for the {before.shape[-1]} parameters this state was made for: pass gradients of "
            "the parameters' structure, None where there is none."
        )
    if given is not None:
        flags.append(given)
    if not flags:
        return jnp.asarray(True), before
    agreed = everywhere(jnp.stack(flags), axis_name)
    return (agreed.all(), agreed) if given is None else (agreed[-1], agreed[:-1])


def _check(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        check_leaf(leaf, "jax")


def _require_masters(params: Any) -> None:
    pairs = jax.tree_util.tree_leaves_with_path(params)
    low = [f"{dotted(path) or 'the parameter'} ({leaf.dtype})" for path, leaf in pairs if is_low(leaf)]
    if low:
        shown = ", ".join(low[:5]) + (f" and {len(low) - 5} more" if len(low) > 5 else "")
        raise MasterWeightsError(
            f"trainable parameters are kept in a low-precision dtype: {shown}. Updates smaller than their spacing are lost. "
            "Keep them in float32 (mp.value_and_grad casts them for computing), or pass master_weights=True to "
            "mp.optimizer to keep float32 masters in its state, or master_weights=False to go without."
        )


def _widen(leaf: Any) -> Any:
    return cast_leaf(leaf, jnp.dtype(jnp.float32)) if is_low(leaf) else leaf


def _strong(leaf: Any) -> Any:
    """The same value without weak type (Python numbers too), so that the state's type never changes between steps."""
    if isinstance(leaf, (int, float, complex)) or getattr(leaf, "weak_type", False):
        return jnp.asarray(leaf, jnp.result_type(leaf))
    return leaf


def _unless_skipped(ok: jax.Array, step: Any) -> Any:
    """Adding -0.0 leaves every weight as it is, -0.0 included; adding 0.0 would not."""
    if isinstance(step, (float, complex)):
        step = jnp.asarray(step)
    if not is_array(step):
        return step
    zero = jnp.zeros((), step.dtype)
    return jnp.where(ok, step, -zero if is_inexact(step) else zero)


def _weights(masters: Any, params: Any) -> Any:
    if params is None:
        raise MasterWeightsError("with master_weights=True, update needs params: opt.update(grads, opt_state, params).")
    return _over(lambda master, param: param if master is None else master, masters, params)


def _step_masters(masters: Any, steps: Any, params: Any) -> tuple[Any, Any]:
    """Move the masters, and turn the steps into those that bring the low-precision parameters to the moved masters."""
    moved = _over(lambda master, step: master if master is None or step is None else master + step, masters, steps)

    def step_to(master: Any, step: Any, param: Any) -> Any:
        return (
            step
            if master is None or step is None
            else master.astype(param.dtype).astype(jnp.float32) - param.astype(jnp.float32)
        )

    return moved, _over(step_to, moved, steps, params)


def _over(function: Any, *trees: Any) -> Any:
    """Map over trees whose first has None where it has nothing to say."""
    return jax.tree.map(function, *trees, is_leaf=lambda node: node is None)
