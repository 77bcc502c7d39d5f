"""``precision_contract``: a matrix product or convolution in a low dtype that accumulates in float32 and rounds once.

Its operands may be wider than the dtype it computes in. So a float32 parameter is cast inside, its gradient is accumulated
in float32 and never rounded on the way, and what is kept for the backward pass is the parameter itself, not a copy.
Derivatives and batching are those of the wrapped primitive, traced in float32 and replayed with this one in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from precision_jax.opcast import _private
from precision_jax.opcast.families import CONTRACTIONS

contract_p = jex.Primitive("precision_contract")
"""Operands: those of ``prim``. Parameters: ``wraps`` (the primitive), ``inner`` (its own), ``compute``, ``out`` (dtypes), ``keep``."""

F32 = np.dtype("float32")


class Params:
    """The parameters of the wrapped primitive, hashable. Printed as JAX prints them."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.dict = params
        self._key = tuple(sorted(params.items(), key=lambda item: item[0]))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and self._key == other._key

    def __repr__(self) -> str:
        return f"({', '.join(f'{k}={v}' for k, v in self._key)})"


def contract(
    prim: Any, params: dict[str, Any], operands: Sequence[Any], compute: Any, out: Any, keep: tuple[bool, bool]
) -> Any:
    """Bind :data:`contract_p`.

    Args:
        prim: ``dot_general_p`` or another primitive that multiplies and accumulates two operands.
        params: its parameters.
        operands: the two, of any floating dtype, and what else it takes.
        compute: the dtype both are cast to.
        out: the dtype the float32 sum is rounded to.
        keep: for each of the two, whether a wider operand is itself kept for the backward pass; else its cast is.
    """
    params = {**params, "preferred_element_type": F32}
    return contract_p.bind(
        *operands, wraps=prim, inner=Params(params), compute=np.dtype(compute), out=np.dtype(out), keep=keep
    )


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _run(*operands: Any, wraps: Any, inner: Params, compute: Any, out: Any, keep: Any) -> Any:
    del keep
    low = [_cast(x, compute) for x in operands[:2]]
    return _cast(wraps.bind(*low, *operands[2:], **inner.dict), out)


def _run_on_cpu(*operands: Any, wraps: Any, inner: Params, compute: Any, out: Any, keep: Any) -> Any:
    """XLA's products on CPUs take float32 for a float32 sum: the rounded operands, which float32 holds exactly.

    Left to itself XLA drops a cast to a low format and back; this does not let it.
    """
    del keep
    wide = [_held(x, compute) for x in operands[:2]]
    return _cast(_held(wraps.bind(*wide, *operands[2:], **inner.dict), out), out)


def _held(x: Any, dtype: Any) -> Any:
    """Values rounded to a dtype, for certain, in float32."""
    if dtype.name == "bfloat16":
        return lax.reduce_precision(_cast(x, F32), 8, 7)
    return _cast(x if dtype == F32 else lax.optimization_barrier(_cast(x, dtype)), F32)


def _run_on_gpu(*operands: Any, wraps: Any, inner: Params, compute: Any, out: Any, keep: Any) -> Any:
    """cuDNN's convolutions give what they are given: float32 results of low inputs come from float32 ones.

    TensorFloat-32 holds float16 and bfloat16 values exactly, so the tensor cores still do it.
    """
    if wraps.name != "conv_general_dilated":
        return _run(*operands, wraps=wraps, inner=inner, compute=compute, out=out, keep=keep)
    low = [_cast(x, compute) for x in operands[:2]]
    if out == compute:
        return wraps.bind(*low, *operands[2:], **{**inner.dict, "preferred_element_type": None})
    return _cast(wraps.bind(*(_cast(x, F32) for x in low), *operands[2:], **inner.dict), out)


@functools.lru_cache(maxsize=1024)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *operands: contract_p.bind(*operands, **dict(params)))


def _abstract(*avals: Any, wraps: Any, inner: Params, compute: Any, out: Any, keep: Any) -> Any:
    del keep
    low = [aval.update(dtype=compute, weak_type=False) for aval in avals[:2]]
    found = wraps.abstract_eval(*low, *avals[2:], **inner.dict)
    return (found[0] if isinstance(found, tuple) else found).update(dtype=out)


contract_p.def_impl(lambda *operands, **params: _compiled(tuple(params.items()))(*operands))
contract_p.def_abstract_eval(_abstract)
mlir.register_lowering(contract_p, mlir.lower_fun(_run, multiple_results=False))
mlir.register_lowering(contract_p, mlir.lower_fun(_run_on_cpu, multiple_results=False), platform="cpu")
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(contract_p, mlir.lower_fun(_run_on_gpu, multiple_results=False), platform=_platform)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, compute: Any, keep: Any, **params: Any) -> Any:
    bind = functools.partial(contract_p.bind, compute=compute, keep=keep, **params)
    out = bind(*primals)
    kept = [x if k else _cast(x, compute) for x, k in zip(primals[:2], keep, strict=True)]
    terms = []
    if type(tangents[0]) is not ad.Zero:
        terms.append(bind(tangents[0], kept[1], *primals[2:]))
    if type(tangents[1]) is not ad.Zero:
        terms.append(bind(kept[0], tangents[1], *primals[2:]))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(ad.add_jaxvals, terms)


def _transpose(ct: Any, *operands: Any, wraps: Any, inner: Params, compute: Any, out: Any, keep: Any) -> Any:
    del out, keep
    which = 0 if ad.is_undefined_primal(operands[0]) else 1
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    aval = operands[which].aval
    given = [x for i, x in enumerate(operands) if i != which]
    wide = [_wide(ct), *map(_wide, given)]
    jaxpr, consts = _transposed(
        wraps, inner, which, aval.update(dtype=F32, weak_type=False), tuple(wide), _private.context_key()
    )
    grad = _replay(jaxpr, consts, [ct, *given], compute, aval.dtype)[0]
    return [grad if i == which else None for i in range(len(operands))]


@functools.lru_cache(maxsize=2048)
def _transposed(prim: Any, params: Params, which: int, aval: Any, avals: tuple[Any, ...], _context: Any) -> Any:
    """The transpose of the wrapped primitive in one operand, as a float32 jaxpr of the cotangent and the others."""

    def backward(ct: Any, *given: Any) -> list[Any]:
        operands = list(given)
        operands.insert(which, ad.UndefinedPrimal(aval))
        return [ad.get_primitive_transpose(prim)(ct, *operands, **params.dict)[which]]

    return _private.trace(backward, avals, _private.debug_info("transpose", backward, len(avals)))


def _batch(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    wraps: Any,
    inner: Params,
    compute: Any,
    out: Any,
    keep: Any,
) -> Any:
    wide = tuple(map(_wide, args))
    jaxpr, consts, dim = _batched(wraps, inner, axis_data, wide, tuple(dims), _private.context_key())
    return _replay(jaxpr, consts, args, compute, out, keep)[0], dim


@functools.lru_cache(maxsize=2048)
def _batched(
    prim: Any, params: Params, axis_data: Any, avals: tuple[Any, ...], dims: tuple[Any, ...], _context: Any
) -> Any:
    """The batched wrapped primitive as a float32 jaxpr, and where its result has the batch."""
    found = []

    def batched(*args: Any) -> list[Any]:
        if prim in batching.fancy_primitive_batchers:
            out, dim = batching.fancy_primitive_batchers[prim](axis_data, args, dims, **params.dict)
        else:
            out, dim = batching.primitive_batchers[prim](args, dims, **params.dict)
        found.append(dim)
        return [out]

    jaxpr, consts = _private.trace(batched, avals, _private.debug_info("vmap", batched, len(avals)))
    return jaxpr, consts, found[0]


def _wide(x: Any) -> Any:
    """The abstract value of an operand, in float32 if it is floating."""
    aval = jax.typeof(x)
    return aval.update(dtype=F32, weak_type=False) if jax.numpy.issubdtype(aval.dtype, np.floating) else aval


def _replay(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    compute: Any,
    out: Any,
    keep: tuple[bool, bool] = (False, False),
) -> list[Any]:
    """Run a float32 jaxpr of contractions and moves on operands of any dtype, with :data:`contract_p` for the former."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CONTRACTIONS:
            results = [contract(eqn.primitive, eqn.params, values, compute, out, keep)]
        else:
            floats = {v.dtype for v in values if jax.numpy.issubdtype(v.dtype, np.floating)}
            if len(floats) > 1:  # a fill value
                values = [_cast(v, out) if jax.numpy.issubdtype(v.dtype, np.floating) else v for v in values]
            results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [_cast(read(atom), out) for atom in jaxpr.outvars]


ad.primitive_jvps[contract_p] = _jvp
ad.primitive_transposes[contract_p] = _transpose
batching.fancy_primitive_batchers[contract_p] = _batch


round_p = jex.Primitive("precision_round")
"""Rounds float32 values to the grid of ``dtype``, in float32. The gradient passes as it is, not rounded."""


def _round(x: Any, *, dtype: Any) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), F32)


round_p.def_impl(_round)
round_p.def_abstract_eval(lambda aval, *, dtype: aval)
mlir.register_lowering(round_p, mlir.lower_fun(_round, multiple_results=False))
batching.defvectorized(round_p)
ad.primitive_jvps[round_p] = lambda primals, tangents, *, dtype: (round_p.bind(*primals, dtype=dtype), tangents[0])


@functools.lru_cache(maxsize=256)
def saving(policy: Any) -> Any:
    """A ``jax.checkpoint`` policy that sees a contraction of ours as the primitive it wraps (``dots_saveable`` saves it).

    Example:
        >>> import jax
        >>> from precision_jax.opcast import saving
        >>> policy = saving(jax.checkpoint_policies.dots_saveable)
    """
    if policy is None:
        return None

    @functools.wraps(policy)
    def sees(prim: Any, *args: Any, **params: Any) -> Any:
        if prim is contract_p:
            return policy(params["wraps"], *args, **params["inner"].dict)
        return policy(prim, *args, **params)

    return sees
