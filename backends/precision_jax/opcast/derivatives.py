"""Functions with an author's derivative: the function is rewritten, and so is the rule, which stays the derivative in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad

from precision_jax.opcast import _private
from precision_jax.opcast.notes import PLAIN, Note, castable
from precision_jax.opcast.rewrite import Results, Rewriter, handles


def _as(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Values in the dtypes of others, where both may be cast."""
    return [
        lax.convert_element_type(x, np.dtype(y.dtype)) if castable(x) and castable(y) and x.dtype != y.dtype else x
        for x, y in zip(values, like, strict=True)
    ]


@handles("custom_jvp_call")
def _custom_jvp(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    closed, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]

    def inside(*xs: Any) -> tuple[Any, ...]:
        return tuple(rw.run_closed(closed, xs, notes, scope)[0])

    inside.__name__ = eqn.params.get("name", "fun")
    fun = jax.custom_jvp(inside)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = fun(*primals)
        zeros = [type(t) is _private.INSTANTIATED for t in tangents]
        jaxpr, consts, still = _private.jvp_rule(eqn, zeros[count:])
        given = [t for t, zero in zip(tangents[count:], zeros[count:], strict=True) if not zero]
        known = [*notes[count:], *[PLAIN] * len(given)]
        results = rw.run(jaxpr, consts, [*primals[count:], *given], known, scope)[0]
        primal, moving = _as(results[: len(still)], out), iter(results[len(still) :])
        slopes = []
        for value, zero in zip(primal, still, strict=True):
            slopes.append(
                ad.instantiate_zeros(ad.Zero(jax.typeof(value).to_tangent_aval()))
                if zero
                else _as([next(moving)], [value])[0]
            )
        return tuple(primal), tuple(slopes)

    fun.defjvp(rule, symbolic_zeros=eqn.params["symbolic_zeros"])
    results = list(fun(*args))
    weak = bool(notes) and all(n.weak for n in notes)
    return results, [Note(weak=weak)] * len(results)


@handles("custom_vjp_call")
def _custom_vjp(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    closed, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]
    consts, args = args[:count], args[count:]
    declared_in = [v.aval for v in closed.jaxpr.invars[count:]]
    declared_out = closed.out_avals

    @jax.custom_vjp
    def fun(*xs: Any) -> tuple[Any, ...]:
        return tuple(rw.run_closed(closed, [*consts, *xs], notes, scope)[0])

    def forward(*xs: Any) -> tuple[Any, Any]:
        jaxpr, held, residuals, forwarded = _private.vjp_rule(eqn, [True] * len(xs))
        results = rw.run(jaxpr, held, xs, notes[count:], scope)[0]
        kept, primal = iter(results[:residuals]), results[residuals:]
        saved = [next(kept) if place is None else xs[place - count] for place in forwarded]
        at = [v.aval for v in jaxpr.outvars[:residuals]]
        avals = iter(at)
        saved_at = [next(avals) if place is None else declared_in[place - count] for place in forwarded]
        wanted = jax.eval_shape(fun, *xs)
        return tuple(_as(primal, wanted)), (tuple(saved), _Static(tuple(saved_at)), tuple(_Like(x.dtype) for x in xs))

    def backward(saved: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
        values, at, like = saved
        avals = [*at.value, *(aval.to_ct_aval() if hasattr(aval, "to_ct_aval") else aval for aval in declared_out)]
        rule = _private.backward_rule(eqn)

        def run(*xs: Any) -> list[Any]:
            return [ad.instantiate_zeros(ct) for ct in rule(*xs)]

        jaxpr, held = _private.trace(run, avals, _private.debug_info("backward rule", run, len(avals)))
        grads = rw.run(jaxpr, held, [*values, *cts], [PLAIN] * len(avals), scope)[0]
        return tuple(
            lax.convert_element_type(g, x.dtype) if castable(g) and g.dtype != x.dtype else g
            for g, x in zip(grads, like, strict=True)
        )

    fun.defvjp(forward, backward)
    results = list(fun(*args))
    return results, [PLAIN] * len(results)


@jax.tree_util.register_static
class _Static:
    """A value that rides along residuals, no array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value


@jax.tree_util.register_static
class _Like:
    """The dtype of an argument, no array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and self.dtype == other.dtype
