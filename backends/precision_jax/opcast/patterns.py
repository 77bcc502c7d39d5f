"""What a jaxpr shows beyond its single primitives: biases, what float32 ops ask of their inputs, known functions.

A plan is made once a jaxpr, from its structure and the names of the functions it was traced in; it knows no dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from precision_jax.opcast import _private
from precision_jax.opcast.families import CONTRACTIONS, FAMILY, VIEW

FLOAT32 = frozenset(n for n, f in FAMILY.items() if f in ("reduction", "transcendental", "linalg"))

KNOWN: dict[tuple[str, str], str] = {
    ("jax/_src/nn/functions.py", "softmax"): "softmax",
    ("jax/_src/nn/functions.py", "_softmax"): "softmax",
    ("jax/_src/nn/functions.py", "log_softmax"): "softmax",
    ("jax/_src/nn/functions.py", "standardize"): "norm",
    ("jax/_src/ops/special.py", "logsumexp"): "softmax",
    ("jax/_src/nn/functions.py", "gelu"): "elementwise",
    ("jax/_src/nn/functions.py", "softplus"): "transcendental",
    ("jax/_src/numpy/reductions.py", "_var"): "norm",
}
"""Functions recognised by file and name, and their family. The elementwise ones compute in float32 inside, as kernels do,
and give what they were given."""

_NAMES = frozenset(name for _, name in KNOWN)


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive equations of one known function."""

    family: str
    start: int
    stop: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found in a jaxpr; equations are named by position.

    Attributes:
        biased: contractions whose result a bias is added to, and the additions that do so.
        asked: elementwise equations computed in float32 since all that use them are.
        regions: by the position of their first equation.
    """

    biased: frozenset[int]
    additions: frozenset[int]
    asked: frozenset[int]
    regions: dict[int, Region]


@functools.lru_cache(maxsize=1024)
def plan(jaxpr: Any) -> Plan:
    """The plan of an open jaxpr (hashed by identity)."""
    uses: dict[Any, list[int]] = {}
    made: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if not isinstance(atom, jex.Literal):
                uses.setdefault(atom, []).append(i)
        made.update(dict.fromkeys(eqn.outvars, i))
    for atom in jaxpr.outvars:
        if not isinstance(atom, jex.Literal):
            uses.setdefault(atom, []).append(-1)
    biased, additions = _biases(jaxpr, uses, made)
    return Plan(biased, additions, _asked(jaxpr, uses, additions), _regions(jaxpr, uses))


def _biases(jaxpr: Any, uses: dict[Any, list[int]], made: dict[Any, int]) -> tuple[frozenset[int], frozenset[int]]:
    biased, additions = set(), set()
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in CONTRACTIONS:
            continue
        var = eqn.outvars[0]
        while (place := uses.get(var, [-1])) and len(place) == 1 and place[0] >= 0:
            user = jaxpr.eqns[place[0]]
            if user.primitive.name in VIEW and len(user.invars) == 1:
                var = user.outvars[0]
                continue
            if user.primitive.name == "add" and place[0] not in additions:
                other = user.invars[1] if user.invars[0] is var else user.invars[0]
                if not isinstance(other, jex.Literal) and _is_row(jaxpr, other, made):
                    biased.add(i)
                    additions.add(place[0])
            break
    return frozenset(biased), frozenset(additions)


def _is_row(jaxpr: Any, var: Any, made: dict[Any, int]) -> bool:
    """Whether a value is one row (or one number a channel) put into the shape of a result."""
    while var in made and jaxpr.eqns[made[var]].primitive.name in VIEW:
        source = jaxpr.eqns[made[var]].invars[0]
        if isinstance(source, jex.Literal):
            return False
        var = source
    return var not in made and sum(size != 1 for size in var.aval.shape) <= 1 and var.aval.ndim > 0


def _asked(jaxpr: Any, uses: dict[Any, list[int]], additions: frozenset[int]) -> frozenset[int]:
    wide: set[Any] = set()  # results that are float32 whatever comes in
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in FLOAT32 or (
            (FAMILY.get(name) == "elementwise" or name in VIEW)
            and any(not isinstance(a, jex.Literal) and a in wide for a in eqn.invars)
        ):
            wide.update(v for v in eqn.outvars if _floating(v))
    asked: set[int] = set()
    passing: set[int] = set()
    for i in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[i]
        name = eqn.primitive.name
        if i in additions or not (name in VIEW or FAMILY.get(name) == "elementwise") or not _floating(eqn.outvars[0]):
            continue
        places = [p for v in eqn.outvars for p in uses.get(v, [])]
        if places and all(p >= 0 and _asks(jaxpr.eqns[p], p, eqn.outvars, wide, asked | passing) for p in places):
            (passing if name in VIEW else asked).add(i)
    return frozenset(asked)


def _asks(user: Any, place: int, results: Sequence[Any], wide: set[Any], asked: set[int]) -> bool:
    name = user.primitive.name
    if name in FLOAT32 or place in asked:
        return True
    others = [a for a in user.invars if not isinstance(a, jex.Literal) and a not in results]
    return FAMILY.get(name) == "elementwise" and any(a in wide for a in others)


def _floating(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.floating)


def _known(eqn: Any) -> str | None:
    found = None
    for code in _private.codes(eqn):
        if code.co_name == "flat" and code.co_filename.endswith("transform.py"):
            break  # what called the function is no part of it
        if code.co_name in _NAMES:  # the outermost counts: logsumexp inside of softmax is softmax
            found = _family_of(code) or found
    return found


@functools.lru_cache(maxsize=1024)
def _family_of(code: Any) -> str | None:
    path = code.co_filename.replace("\\", "/")
    return next((f for (file, name), f in KNOWN.items() if name == code.co_name and path.endswith(file)), None)


def _regions(jaxpr: Any, uses: dict[Any, list[int]]) -> dict[int, Region]:
    found = {}
    names = [_known(eqn) for eqn in jaxpr.eqns]
    start = 0
    while start < len(names):
        stop = start + 1
        while stop < len(names) and names[stop] == names[start]:
            stop += 1
        if names[start] is not None and stop - start > 1:
            found[start] = _region(jaxpr, uses, names[start], start, stop)
        start = stop
    return found


def _region(jaxpr: Any, uses: dict[Any, list[int]], family: str | None, start: int, stop: int) -> Region:
    eqns = jaxpr.eqns[start:stop]
    inside = {v for eqn in eqns for v in eqn.outvars}
    inputs = dict.fromkeys(a for eqn in eqns for a in eqn.invars if not isinstance(a, jex.Literal) and a not in inside)
    outputs = [v for eqn in eqns for v in eqn.outvars if any(p < start or p >= stop for p in uses.get(v, []))]
    return Region(str(family), start, stop, tuple(inputs), tuple(outputs))
