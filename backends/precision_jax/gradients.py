"""``value_and_grad`` under a policy: autocast, scale, differentiate, unscale with the same scale."""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from precision.backend import check_leaf
from precision.errors import LossScaleError, PolicyError, PrecisionWarning
from precision_jax.autocast import untouched
from precision_jax.casting import cast_tree
from precision_jax.leaves import dotted, is_castable, is_inexact, refuse_stateful_modules
from precision_jax.replicas import AxisName, axes_of, manual_axes, varying

if TYPE_CHECKING:
    from precision_jax.bound import JaxPolicy


def value_and_grad(
    mp: JaxPolicy,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    cast_argnums: int | Sequence[int] | None,
    axis_name: AxisName,
) -> Callable[..., Any]:
    """See :meth:`precision_jax.JaxPolicy.value_and_grad`."""
    mp.policy.require_trainable()
    _check_reduction(mp, axis_name)
    scaler = mp.loss_scaler
    run = untouched(mp, fun) if cast_argnums is None else fun

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, loss_scale: Any = None, **kwargs: Any) -> Any:
        state = _state(mp, loss_scale)
        nums = _positions(argnums, len(args))
        casting = () if cast_argnums is None else _positions(cast_argnums, len(args))
        for leaf in jax.tree.leaves((args, kwargs)):
            check_leaf(leaf, "jax")
        refuse_stateful_modules(*(args[i] for i in {*nums, *casting}))
        inputs = [mp.cast_arguments(a) if i in casting and i not in nums else a for i, a in enumerate(args)]
        mp.rules.parameters(*(args[i] for i in nums))
        pairs = [_partition(args[i]) for i in nums]

        def scaled(*diff: Any) -> tuple[Any, tuple[Any, Any]]:
            full = list(inputs)
            for i, d, (_, rest) in zip(nums, diff, pairs, strict=True):
                whole = _combine(d, rest)
                full[i] = mp.cast_arguments(whole) if i in casting else whole
            out = run(*full, **kwargs)
            if has_aux and not (isinstance(out, (list, tuple)) and len(out) == 2):  # a loss of two values would unpack
                raise TypeError(f"with has_aux=True the function gives (loss, aux), not {type(out).__name__}.")
            loss, aux = out if has_aux else (out, None)
            return scaler.scale(loss, state), (cast_tree(loss, mp.policy.output_dtype), aux)

        every = tuple(range(len(nums)))
        diff = [d if axis_name is None else _per_replica(d, axis_name) for d, _ in pairs]
        (_, (loss, aux)), grads = jax.value_and_grad(scaled, argnums=every, has_aux=True)(*diff)
        if axis_name is not None:
            grads = _mean(grads, axis_name, mp.reduce_dtype)
            loss = jax.lax.pmean(loss, axis_name)
        grads = scaler.unscale_only(grads, state)
        value = (loss, aux) if has_aux else loss
        return value, (grads[0] if hasattr(argnums, "__index__") else grads)

    return value_and_grad_fun


def _check_reduction(mp: JaxPolicy, axis_name: AxisName) -> None:
    reduce_dtype = mp.policy.reduce_dtype
    if axis_name is None and reduce_dtype != "float32":
        warnings.warn(
            f"reduce_dtype {reduce_dtype} has no effect without axis_name: XLA then places the reductions of gradients, in the "
            "dtype that they have there.",
            PrecisionWarning,
            stacklevel=4,
        )
    if axis_name is not None and reduce_dtype == "float16" and mp.policy.loss_scale.mode == "none":
        raise PolicyError(
            "reduce_dtype float16 with loss_scale.mode none: a sum of gradients over replicas that overflows would be stepped on, "
            'since nobody looks. Use reduce_dtype "bfloat16" or "float32", or a loss scale.'
        )


def _state(mp: JaxPolicy, loss_scale: Any) -> Any:
    if mp.policy.loss_scale.mode == "none":
        return loss_scale
    if loss_scale is None:
        raise LossScaleError(
            f"loss_scale.mode is {mp.policy.loss_scale.mode!r}: pass the state, "
            "mp.value_and_grad(fun)(params, ..., loss_scale=opt_state.loss_scale)."
        )
    return mp.loss_scaler.checked(loss_scale)


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    nums = tuple(operator.index(num) for num in ((argnums,) if hasattr(argnums, "__index__") else argnums))
    for num in nums:
        if not -count <= num < count:
            raise IndexError(f"argnums {num} is out of range: the function was given {count} positional arguments.")
    found = tuple(num % count for num in nums)
    if len(set(found)) < len(found):
        raise PolicyError(f"argnums {nums} name an argument twice.")
    return found


def _partition(tree: Any) -> tuple[Any, Any]:
    """Split a tree into what can be differentiated and the rest, each with None in the other's places.

    A Python float is a parameter, as in ``jax.grad``; inside an Equinox module it is a setting (the rate of a Dropout), as
    in ``equinox.filter_grad``.
    """
    equinox = sys.modules.get("equinox")  # whoever has such a module has imported it

    def is_module(node: Any) -> bool:
        return equinox is not None and isinstance(node, equinox.Module)

    def split(node: Any) -> Any:
        numbers = () if is_module(node) else (float,)
        return jax.tree.map(lambda leaf: is_inexact(leaf) or isinstance(leaf, numbers), node)

    mask = jax.tree.map(split, tree, is_leaf=is_module)
    return (
        jax.tree.map(lambda take, leaf: leaf if take else None, mask, tree),
        jax.tree.map(lambda take, leaf: None if take else leaf, mask, tree),
    )


def _combine(left: Any, right: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, left, right, is_leaf=lambda node: node is None)


def _per_replica(tree: Any, axis_name: AxisName) -> Any:
    """The same values, which ``shard_map`` takes to differ between replicas.

    Otherwise it sums the gradients of replicated parameters itself, in the compute dtype, and the mean that follows changes
    nothing: they come out as many times too large as there are replicas.
    """
    manual = tuple(name for name in axes_of(axis_name) if name in manual_axes())
    if not manual:
        return tree
    sharded = {
        dotted(path) or "the argument": varying(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for name, axes in sharded.items():
        if mixed := [axis for axis in manual if axis in axes]:
            raise PolicyError(
                f"{name} is sharded over axis {mixed[0]!r}: averaging its gradient over that axis would mix those of "
                "different parameters. Name only the axes over which the parameters are replicated, and average the loss "
                f"over {mixed[0]!r} inside the function, jax.lax.pmean(loss, {mixed[0]!r})."
            )
    always = jax.lax.axis_index(manual) >= 0
    return jax.tree.map(lambda leaf: jnp.where(always, leaf, leaf), tree)


def _mean(grads: Any, axis_name: AxisName, reduce_dtype: Any) -> Any:
    """Average over replicas in the reduce dtype, while still scaled."""

    def mean(leaf: Any) -> Any:
        if not is_castable(leaf):
            return jax.lax.pmean(leaf, axis_name)
        return jax.lax.pmean(leaf.astype(reduce_dtype), axis_name).astype(jnp.promote_types(leaf.dtype, jnp.float32))

    return jax.tree.map(mean, grads)
