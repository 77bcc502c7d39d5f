"""Primitives that hold programs: each is entered, and its body rewritten for the dtypes that reach it.

Loops: a carry keeps the wider of the dtypes it starts and comes back with. Branches: results in the widest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from precision_jax.opcast import _private, marks
from precision_jax.opcast.cache import body
from precision_jax.opcast.contract import saving
from precision_jax.opcast.notes import CASTABLE, F32, PLAIN, Note, castable, dtype_of
from precision_jax.opcast.rewrite import Results, Rewriter, _widest, bind, handles, opaque


def _dtypes(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dtype_of(x) for x in values)


def _join(left: Any, right: Any) -> Any:
    if left in CASTABLE and right in CASTABLE:
        return _widest([left, right])
    return left


def _computed(notes: Sequence[Note]) -> list[Note]:
    return [PLAIN] * len(notes)


def _sliced(note: Note) -> Note:
    """What is known of a slice of a loop's input: still a parameter, kept at no cost."""
    return Note(path=note.path, stored=note.stored, whole=note.whole, pinned=note.pinned) if note.stored else PLAIN


def _passing(note: Note) -> Note:
    """What is known of a value that is an argument inside."""
    return note


@handles("jit")
def _jit(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    new, known = body(rw, eqn.params["jaxpr"], _dtypes(args), tuple(notes), scope)
    return bind(eqn, args, jaxpr=new), list(known)


@handles("closed_call", "call", "core_call", "eval_jaxpr")
def _call(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    inner = eqn.params["call_jaxpr"]
    closed = inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())
    return rw.run_closed(closed, args, notes, scope)


@handles("remat2")
def _remat(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    closed = jex.ClosedJaxpr(eqn.params["jaxpr"], ())
    new, known = body(rw, closed, _dtypes(args), tuple(notes), scope)
    consts, cse = list(new.consts), eqn.params["prevent_cse"]
    jaxpr = new.jaxpr
    if consts:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        cse = (False,) * len(consts) + cse if isinstance(cse, tuple) else cse
    results = bind(eqn, [*consts, *args], jaxpr=jaxpr, prevent_cse=cse, policy=saving(eqn.params["policy"]))
    return results, _computed(known)


@handles("scan")
def _scan(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    first, count = _private.scan_counts(eqn)
    last = first + count
    inside = (*notes[:first], *_computed(notes[first:last]), *map(_sliced, notes[last:]))
    carry = _dtypes(args[first:last])
    while True:
        dtypes = (*_dtypes(args[:first]), *carry, *_dtypes(args[last:]))
        new, known = body(rw, eqn.params["jaxpr"], dtypes, inside, scope, atleast=carry)
        back = tuple(getattr(aval, "dtype", None) for aval in new.out_avals[:count])
        if back == carry:
            break
        carry = back
    args = [*args[:first], *_start(args[first:last], carry), *args[last:]]
    return bind(eqn, args, jaxpr=new), _computed(known)


def _start(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [
        lax.convert_element_type(x, d) if castable(x) and x.dtype != d else x
        for x, d in zip(values, dtypes, strict=True)
    ]


@handles("while")
def _while(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    test, step = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    last = test + step
    carry, inside = _dtypes(args[last:]), tuple(_computed(notes[last:]))
    while True:
        new, _ = body(
            rw,
            eqn.params["body_jaxpr"],
            (*_dtypes(args[test:last]), *carry),
            (*notes[test:last], *inside),
            scope,
            atleast=carry,
        )
        back = tuple(getattr(aval, "dtype", None) for aval in new.out_avals)
        if back == carry:
            break
        carry = back
    ask, _ = body(rw, eqn.params["cond_jaxpr"], (*_dtypes(args[:test]), *carry), (*notes[:test], *inside), scope)
    args = [*args[:last], *_start(args[last:], carry)]
    return bind(eqn, args, cond_jaxpr=ask, body_jaxpr=new), _computed(inside)


@handles("cond")
def _cond(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    dtypes, inside = _dtypes(args[1:]), tuple(notes[1:])
    outs: tuple[Any, ...] = ()
    while True:
        branches, ends = [], []
        for branch in eqn.params["branches"]:
            new, _ = body(rw, branch, dtypes, inside, scope, atleast=outs)
            branches.append(new)
            ends.append([getattr(aval, "dtype", None) for aval in new.out_avals])
        joined = tuple(_reduce(column) for column in zip(*ends, strict=True))
        if all(tuple(end) == joined for end in ends):
            break
        outs = joined
    return bind(eqn, args, branches=tuple(branches)), [PLAIN] * len(joined)


def _reduce(column: Sequence[Any]) -> Any:
    found = column[0]
    for dtype in column[1:]:
        found = _join(found, dtype)
    return found


@handles("shard_map")
def _shard_map(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    params = eqn.params
    inner = params["jaxpr"]
    closed = inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())

    def inside(*values: Any) -> tuple[Any, ...]:
        return tuple(rw.run_closed(closed, values, notes, scope)[0])

    mapped = jax.shard_map(
        inside,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    results = list(mapped(*args))
    return results, [PLAIN] * len(results)


@handles("custom_linear_solve")
def _linear_solve(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    """In float32, whatever it was traced in: the functions inside are each other's inverse and transpose."""
    if all(v.aval.dtype not in CASTABLE or v.aval.dtype == F32 for v in eqn.invars):
        return opaque(rw, eqn, args, notes, scope)
    fixed = rw.fixed()

    def in_float32(closed: Any) -> Any:
        dtypes = tuple(F32 if v.aval.dtype in CASTABLE else v.aval.dtype for v in closed.jaxpr.invars)
        return body(fixed, closed, dtypes, (PLAIN,) * len(dtypes), scope, atleast=(F32,) * len(closed.out_avals))[0]

    jaxprs = type(eqn.params["jaxprs"])(*(None if j is None else in_float32(j) for j in eqn.params["jaxprs"]))
    args = [lax.convert_element_type(x, F32) if castable(x) else x for x in args]
    results = bind(eqn, args, jaxprs=jaxprs)
    return results, [PLAIN] * len(results)


@handles("convert_element_type")
def _convert(rw: Rewriter, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
    """An author's cast. To float32 from a lower dtype it begins an island; to a lower dtype it ends one.

    Casts that JAX makes by itself, in promoting and around its sums, are not: the rewriting decides on these.
    """
    del rw, scope
    (x,), (note,) = args, notes
    have, want = getattr(eqn.invars[0].aval, "dtype", None), np.dtype(eqn.params["new_dtype"])
    if have in CASTABLE and want in CASTABLE:
        if have == want or not marks.authored(eqn):  # have == want: only a weak type is dropped
            return [x], [note]
        if want == F32:
            return [_start([x], [want])[0]], [note._replace(pinned=0 if note.weak else 2)]
        return [_start([x], [want])[0]], [PLAIN._replace(weak=note.weak, value=note.value)]
    known = Note(weak=note.weak, value=note.value if want in CASTABLE else None)
    return bind(
        eqn,
        [
            lax.convert_element_type(x, have)
            if castable(x) and have is not None and x.dtype != have and have not in CASTABLE
            else x
        ],
    ), [known]
