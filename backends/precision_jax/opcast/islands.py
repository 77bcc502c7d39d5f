"""Where an author casts to float32 what was traced in float32: such a cast leaves no equation behind.

Code that could do so is looked for by the names it uses. If there is any, the function is traced once more, with its inputs in
the compute dtype, where the casts do leave equations; the two programs are laid side by side.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from precision.errors import PrecisionWarning
from precision_jax.opcast import _private, marks
from precision_jax.opcast.closures import parts_of
from precision_jax.opcast.families import CONTRACTIONS
from precision_jax.opcast.notes import CASTABLE, F32

_CASTS = frozenset(("astype", "asarray", "array", "convert_element_type", "promote_types"))
_LIBRARIES = tuple(
    f"site-packages/{n}/" for n in ("jax", "flax", "equinox", "haiku", "optax", "numpy", "jaxlib", "precision_jax")
)


@dataclasses.dataclass
class Marks:
    """What an author has done to the operands of equations, by position: 1 cast up, -1 cast down, 0 nothing.

    Attributes:
        operands: the marks of each operand.
        wide: products whose result the author asked for in float32.
        results: the marks of the jaxpr's results.
    """

    operands: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    wide: set[int] = dataclasses.field(default_factory=set)
    results: tuple[int, ...] = ()


NONE = Marks()


def find(
    fun: Callable[..., Any], flat: Callable[..., Any], closed: Any, values: Sequence[Any], compute: np.dtype
) -> dict[Any, Marks]:
    """The author's casts in a traced function, by jaxpr.

    Args:
        fun: the function.
        flat: the same, of its traced leaves.
        closed: what it was traced to.
        values: the leaves.
        compute: the dtype to trace it in.
    """
    if compute == F32 or not any(map(_suspect, _codes(closed.jaxpr) | _reachable(fun))):
        return {}
    avals = [jax.typeof(x).update(dtype=compute, weak_type=False) if x.dtype == F32 else jax.typeof(x) for x in values]
    try:
        low = _private.trace_closed(flat, avals, closed.jaxpr.debug_info)
    except Exception as error:  # noqa: BLE001 - whatever the function raises of dtypes it does not expect
        warnings.warn(
            f"{flat.__name__} cannot be traced in {compute}, so its casts to float32 (astype and the like) are not seen: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} "
            "Put mp.island on what is to stay float32.",
            PrecisionWarning,
            stacklevel=2,
        )
        return {}
    found: dict[Any, Marks] = {}
    _align(closed.jaxpr, low.jaxpr, found)
    return found


# ---- is there anything to look for? ---------------------------------------------------------------------------------


def _codes(jaxpr: Any) -> set[types.CodeType]:
    found: set[types.CodeType] = set()
    for eqn in jaxpr.eqns:
        for code in _private.codes(eqn):
            if code.co_filename.endswith("transform.py") and code.co_name == "flat":
                break  # what called the function is no part of it
            found.add(code)
        for inner in _inner(eqn):
            found |= _codes(inner)
    return found


def _reachable(fun: Any) -> set[types.CodeType]:
    """The code of the functions that a function may call, as far as its closures, globals and defaults show.

    A helper that does nothing but cast leaves no equation, and so no frame.
    """
    found: set[types.CodeType] = set()
    waiting = [fun]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)  # a method
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and not _of_library(value.__code__):
            found.add(value.__code__)
            waiting += parts_of(value)
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (list, tuple)) and len(value) < 100:
            waiting += value
        elif callable(value) and not isinstance(value, type):
            waiting += [w for w in (getattr(value, "__wrapped__", None), vars(type(value)).get("__call__")) if w]
    return found


def _of_library(code: types.CodeType) -> bool:
    file = code.co_filename.replace("\\", "/")
    return any(part in file for part in _LIBRARIES) or "/precision_jax/" in file


@functools.lru_cache(maxsize=8192)
def _suspect(code: types.CodeType) -> bool:
    """Whether code, or a function defined in it, may cast to float32."""
    if _of_library(code):
        return False
    return _casts(code) or any(isinstance(c, types.CodeType) and _suspect(c) for c in code.co_consts)


def _casts(code: types.CodeType) -> bool:
    names = set(code.co_names)
    words = {c for c in code.co_consts if isinstance(c, str)}
    words.update(w for c in code.co_consts if isinstance(c, tuple) for w in c if isinstance(w, str))
    wide = "float32" in names | words or "promote_types" in names
    return (wide and bool(names & (_CASTS | {"float32"}))) or "preferred_element_type" in words


# ---- two programs side by side --------------------------------------------------------------------------------------


def _inner(eqn: Any) -> list[Any]:
    """The open jaxprs in an equation's parameters, in order."""
    found = []
    for name in sorted(eqn.params):
        value = eqn.params[name]
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, jex.Jaxpr):
                found.append(item)
    return found


def _is_cast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    return getattr(eqn.invars[0].aval, "dtype", None) in CASTABLE and np.dtype(eqn.params["new_dtype"]) in CASTABLE


def _align(wide: Any, low: Any, found: dict[Any, Marks]) -> None:
    origin: dict[Any, tuple[Any, int]] = {}
    for eqn in low.eqns:
        if _is_cast(eqn):
            up = np.dtype(eqn.params["new_dtype"]) == F32
            origin[eqn.outvars[0]] = (eqn.invars[0], (1 if up else -1) if marks.authored(eqn) else 0)

    def found_on(atom: Any) -> int:
        while not isinstance(atom, jex.Literal) and atom in origin:
            atom, kind = origin[atom]
            if kind:
                return kind
        return 0

    same = len(wide.outvars) == len(low.outvars)
    told = Marks(results=tuple(map(found_on, low.outvars)) if same else ())
    for i, eqn, other in _pairs(wide, low):
        if [v.aval.shape for v in eqn.invars if hasattr(v.aval, "shape")] == [
            v.aval.shape for v in other.invars if hasattr(v.aval, "shape")
        ] and len(eqn.invars) == len(other.invars):
            kinds = tuple(map(found_on, other.invars))
            if any(kinds):
                told.operands[i] = kinds
        asked = other.params.get("preferred_element_type")
        if (
            eqn.primitive.name in CONTRACTIONS
            and asked == F32
            and all(getattr(v.aval, "dtype", F32) != F32 for v in other.invars[:2])
        ):
            told.wide.add(i)
        for one, two in zip(_inner(eqn), _inner(other), strict=False):
            _align(one, two, found)
    if told.operands or told.wide or any(told.results):
        found[wide] = told


def _pairs(wide: Any, low: Any) -> Iterator[tuple[int, Any, Any]]:
    """Equations of two programs that correspond, casts left out; the first with its position."""
    left = [(i, eqn) for i, eqn in enumerate(wide.eqns) if not _is_cast(eqn)]
    right = [eqn for eqn in low.eqns if not _is_cast(eqn)]
    names = [e.primitive.name for _, e in left], [e.primitive.name for e in right]
    if names[0] == names[1]:
        blocks: Sequence[Any] = [(0, 0, len(left))]
    else:
        blocks = difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    for a, b, size in blocks:
        for k in range(size):
            yield left[a + k][0], left[a + k][1], right[b + k]
