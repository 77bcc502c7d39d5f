"""What a jaxpr shows beyond its single primitives: biases, what float32 ops ask of their inputs, known functions.

A plan is made once a jaxpr, from its structure and the names of the functions it was traced in; it knows no dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from precision_jax.opcast import _private, marks
from precision_jax.opcast.families import CONTRACTIONS, FAMILY, VIEW

FLOAT32 = frozenset(("reduction", "transcendental", "linalg"))

KNOWN: dict[tuple[str, str], str] = {
    (file, name): family
    for family, file, names in (
        ("softmax", "jax/_src/nn/functions.py", "softmax _softmax log_softmax"),
        ("softmax", "jax/_src/ops/special.py", "logsumexp"),
        ("norm", "jax/_src/nn/functions.py", "standardize"),
        ("norm", "jax/_src/numpy/reductions.py", "_var"),
        ("norm", "flax/linen/normalization.py", "_compute_stats _normalize _l2_normalize"),
        ("norm", "flax/nnx/nn/normalization.py", "_compute_stats _normalize _l2_normalize"),
        ("norm", "equinox/nn/_normalisation.py", "__call__"),
        ("norm", "equinox/nn/_batch_norm.py", "__call__"),
        ("norm", "haiku/_src/layer_norm.py", "__call__"),
        ("norm", "haiku/_src/batch_norm.py", "__call__"),
        ("norm", "haiku/_src/group_norm.py", "__call__"),
        ("norm", "haiku/_src/rms_norm.py", "__call__"),
        (
            "linalg",
            "jax/_src/numpy/linalg.py",
            "cholesky svd qr eigh eigvalsh eig eigvals pinv inv solve lstsq det slogdet cond",
        ),
        ("linalg", "jax/_src/numpy/linalg.py", "matrix_rank tensorsolve tensorinv"),
        ("transcendental", "jax/_src/nn/functions.py", "softplus"),
        ("transcendental", "jax/_src/lax/other.py", "logaddexp logaddexp2"),
        ("reduction", "jax/_src/image/scale.py", "_scale_and_translate"),
        ("elementwise", "jax/_src/nn/functions.py", "gelu silu sigmoid elu celu selu mish glu squareplus soft_sign"),
    )
    for name in names.split()
}
"""Functions recognised by file and name, and their family. The elementwise ones compute in float32 inside, as kernels do,
and give what they were given."""

LIBRARIES: dict[str, str] = {"optax/losses/": "loss", "jax/_src/scipy/linalg.py": "linalg"}
"""Folders all of whose functions are of one family."""

ATTENTION: tuple[tuple[str, str], ...] = tuple(
    (file, name)
    for file in (
        "jax/_src/nn/functions.py",
        "flax/linen/attention.py",
        "flax/nnx/nn/attention.py",
        "equinox/nn/_attention.py",
    )
    for name in ("dot_product_attention", "dot_product_attention_weights")
)
"""Functions whose matrix products are of the family ``attention``."""

_NAMES = frozenset(name for _, name in (*KNOWN, *ATTENTION))


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive equations of one known function; ``traced_wide`` if they were traced in float32 throughout."""

    family: str
    start: int
    stop: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    traced_wide: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found in a jaxpr; equations are named by position.

    Attributes:
        biased: contractions whose result a bias is added to (also by way of a sum of such results).
        additions: the additions that do so.
        asked: elementwise equations computed in float32 since all that use them are.
        scores: products inside of an attention function whose results go to its softmax.
        attention: equations inside of an attention function.
        attentions: whole attention functions, by the position of their first equation.
        regions: by the position of their first equation.
    """

    biased: frozenset[int]
    additions: frozenset[int]
    asked: frozenset[int]
    scores: frozenset[int]
    attention: frozenset[int]
    attentions: dict[int, Region]
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
    regions = _regions(jaxpr, uses, made)
    attention = frozenset(i for i, eqn in enumerate(jaxpr.eqns) if _attends(eqn))
    wide = frozenset(i for r in regions.values() if r.family != "elementwise" for i in range(r.start, r.stop))
    asked = _asked(jaxpr, uses, additions, wide, attention)
    scores = frozenset(i for i in asked if jaxpr.eqns[i].primitive.name in CONTRACTIONS)
    return Plan(biased, additions, asked - scores, scores, attention, _attentions(jaxpr, uses, attention), regions)


def _attentions(jaxpr: Any, uses: dict[Any, list[int]], attention: frozenset[int]) -> dict[int, Region]:
    found = {}
    for start in sorted(attention):
        if start - 1 in attention:
            continue
        stop = start
        while stop in attention:
            stop += 1
        if any(jaxpr.eqns[i].primitive.name in CONTRACTIONS for i in range(start, stop)):
            found[start] = _region(jaxpr, uses, "attention", start, stop)
    return found


def family_of(eqn: Any) -> str | None:
    """The op family of an equation, from its primitive; ``1 / x`` is a reciprocal."""
    if eqn.primitive.name == "div" and isinstance(eqn.invars[0], jex.Literal) and np.all(eqn.invars[0].val == 1):
        return "transcendental"
    return FAMILY.get(eqn.primitive.name)


def _biases(jaxpr: Any, uses: dict[Any, list[int]], made: dict[Any, int]) -> tuple[frozenset[int], frozenset[int]]:
    products: dict[Any, frozenset[int]] = {}  # values that are still a product (or a sum of products): which
    biased: set[int] = set()
    additions: set[int] = set()
    for i, eqn in enumerate(jaxpr.eqns):
        if not eqn.outvars:
            continue
        name, var = eqn.primitive.name, eqn.outvars[0]
        once = len(uses.get(var, [])) == 1
        found = [products.get(a) for a in eqn.invars if not isinstance(a, jex.Literal)]
        if name in CONTRACTIONS and once:
            products[var] = frozenset([i])
        elif name in VIEW and len(eqn.invars) == 1 and found and found[0] and once:
            products[var] = found[0]
        elif name == "add" and len(found) == 2:
            if found[0] and found[1]:  # an RNN's cell: two products, then the bias
                if once:
                    products[var] = found[0] | found[1]
            elif found[0] or found[1]:
                other = eqn.invars[1] if found[0] else eqn.invars[0]
                if _is_row(jaxpr, other, made):
                    these = found[0] or found[1] or frozenset()
                    biased |= these
                    additions.add(i)
                    additions |= _sums(jaxpr, eqn, made, these)
    return frozenset(biased), frozenset(additions)


def _sums(jaxpr: Any, eqn: Any, made: dict[Any, int], products: frozenset[int]) -> set[int]:
    """The additions between several products and the addition of their bias."""
    found: set[int] = set()
    waiting = [made[a] for a in eqn.invars if not isinstance(a, jex.Literal) and a in made]
    while waiting and len(products) > 1:
        position = waiting.pop()
        inner = jaxpr.eqns[position]
        if inner.primitive.name == "add":
            found.add(position)
        if inner.primitive.name == "add" or inner.primitive.name in VIEW:
            waiting += [made[a] for a in inner.invars if not isinstance(a, jex.Literal) and a in made]
    return found


def _is_row(jaxpr: Any, var: Any, made: dict[Any, int]) -> bool:
    """Whether a value is one row (or one number a channel) put into the shape of a result."""
    while var in made and jaxpr.eqns[made[var]].primitive.name in VIEW:
        source = jaxpr.eqns[made[var]].invars[0]
        if isinstance(source, jex.Literal):
            return False
        var = source
    return var not in made and sum(size != 1 for size in var.aval.shape) <= 1 and var.aval.ndim > 0


def _asked(
    jaxpr: Any, uses: dict[Any, list[int]], additions: frozenset[int], known: frozenset[int], attention: frozenset[int]
) -> frozenset[int]:
    wide: set[Any] = set()  # results that are float32 whatever comes in
    for i, eqn in enumerate(jaxpr.eqns):
        if (
            i in known
            or family_of(eqn) in FLOAT32
            or (
                (family_of(eqn) == "elementwise" or _passes(eqn))
                and any(not isinstance(a, jex.Literal) and a in wide for a in eqn.invars)
            )
        ):
            wide.update(v for v in eqn.outvars if _floating(v))
    asked: set[int] = set()
    passing: set[int] = set()
    for i in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[i]
        candidate = family_of(eqn) == "elementwise" or (i in attention and eqn.primitive.name in CONTRACTIONS)
        if not eqn.outvars or i in additions or not (candidate or _passes(eqn)) or not _floating(eqn.outvars[0]):
            continue
        places = [p for v in eqn.outvars for p in uses.get(v, [])]
        wanting = asked | passing | known
        if places and all(p >= 0 and _asks(jaxpr.eqns[p], p, eqn.outvars, wide, wanting) for p in places):
            (passing if _passes(eqn) else asked).add(i)
    return frozenset(asked)


def _passes(eqn: Any) -> bool:
    """Whether an equation gives on what it is given: a view, a cast of JAX's own, elementwise functions compiled for themselves."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return _floating(eqn.invars[0]) and _floating(eqn.outvars[0]) and not marks.authored(eqn)
    if name == "jit":
        inner = eqn.params["jaxpr"].jaxpr.eqns
        return (
            len(eqn.outvars) == 1
            and 0 < len(inner) < 8
            and all(family_of(e) == "elementwise" or _passes(e) for e in inner)
        )
    return name in VIEW


def _asks(user: Any, place: int, results: Sequence[Any], wide: set[Any], asked: set[int] | frozenset[int]) -> bool:
    if family_of(user) in FLOAT32 or place in asked:
        return True
    others = [a for a in user.invars if not isinstance(a, jex.Literal) and a not in results]
    return family_of(user) == "elementwise" and any(a in wide for a in others)


def _floating(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.floating)


def _own(eqn: Any) -> Iterator[Any]:
    """The code that an equation was traced in, innermost first, up to what called the function under autocast."""
    for code in _private.codes(eqn):
        if code.co_name == "flat" and code.co_filename.endswith("transform.py"):
            return
        yield code


def _attends(eqn: Any) -> bool:
    return any(code.co_name in _NAMES and _place(code) == "attention" for code in _own(eqn))


def _known(eqn: Any) -> str | None:
    found = None
    for code in _own(eqn):  # the outermost counts: logsumexp inside of softmax is softmax
        family = _place(code)
        found = family if family not in (None, "attention") else found
    if found is None and eqn.primitive.name == "logistic":  # XLA rounds inside of a low one
        found = "elementwise"
    if found is None and eqn.primitive.name == "jit" and eqn.params["name"] in _NAMES:
        found = next(iter(map(_known, eqn.params["jaxpr"].jaxpr.eqns)), None)  # a known function, compiled for itself
    return found


@functools.lru_cache(maxsize=8192)
def _place(code: Any) -> str | None:
    path = code.co_filename.replace("\\", "/")
    for folder, family in LIBRARIES.items():
        if folder in path:
            return family
    if code.co_name not in _NAMES:
        return None
    if any(name == code.co_name and path.endswith(file) for file, name in ATTENTION):
        return "attention"
    return next((f for (file, name), f in KNOWN.items() if name == code.co_name and path.endswith(file)), None)


def _regions(jaxpr: Any, uses: dict[Any, list[int]], made: dict[Any, int]) -> dict[int, Region]:
    found = {}
    names = [_known(eqn) for eqn in jaxpr.eqns]
    start = 0
    while start < len(names):
        stop = start + 1
        while stop < len(names) and names[stop] == names[start]:
            if names[start] == "elementwise" and not _goes_on(jaxpr, uses, names, start, stop):
                break  # another call, whose inputs may have another dtype
            stop += 1
        if names[start] == "norm":
            stop = _affine(jaxpr, uses, made, names, start, stop)
        single = names[start] == "elementwise" or _holds_a_program(jaxpr.eqns[start])
        if names[start] is not None and (stop - start > 1 or single):
            found[start] = _region(jaxpr, uses, names[start], start, stop)
        start = stop
    return found


def _goes_on(jaxpr: Any, uses: dict[Any, list[int]], names: list[str | None], start: int, stop: int) -> bool:
    """Whether the call of an activation goes on at ``stop``: what it has made is used there or later in the same run.

    One that is compiled for itself (as most of ``jax.nn`` are) is one equation.
    """
    if _holds_a_program(jaxpr.eqns[start]) or _holds_a_program(jaxpr.eqns[stop]):
        return False
    end = next((p for p in range(stop, len(names)) if names[p] != names[start]), len(names))
    return any(stop <= p < end for eqn in jaxpr.eqns[start:stop] for v in eqn.outvars for p in uses.get(v, []))


def _affine(
    jaxpr: Any, uses: dict[Any, list[int]], made: dict[Any, int], names: list[str | None], start: int, stop: int
) -> int:
    """Where a norm ends if what follows it at once is its scale and its offset: one row each, multiplied and added."""
    wanted = ["mul", "add"]
    outputs = [v for e in jaxpr.eqns[start:stop] for v in e.outvars if any(p >= stop or p < 0 for p in uses.get(v, []))]
    if len(outputs) != 1:
        return stop
    var, end = outputs[0], stop
    for position in range(stop, len(jaxpr.eqns)):
        eqn = jaxpr.eqns[position]
        if names[position] is not None or len(uses.get(var, [])) != 1:
            break
        if eqn.primitive.name in VIEW and len(eqn.invars) == 1:
            if eqn.invars[0] is var:
                var = eqn.outvars[0]
            elif eqn.invars[0] in made:
                break  # not the view of a parameter
            continue
        if not wanted or eqn.primitive.name not in wanted or var not in eqn.invars:
            break
        other = eqn.invars[1] if eqn.invars[0] is var else eqn.invars[0]
        if isinstance(other, jex.Literal) or not _is_row(jaxpr, other, made):
            break
        wanted = wanted[wanted.index(eqn.primitive.name) + 1 :]
        var, end = eqn.outvars[0], position + 1
    return end


def _holds_a_program(eqn: Any) -> bool:
    return eqn.primitive.name in ("jit", "custom_jvp_call")


def _region(jaxpr: Any, uses: dict[Any, list[int]], family: str | None, start: int, stop: int) -> Region:
    eqns = jaxpr.eqns[start:stop]
    inside = {v for eqn in eqns for v in eqn.outvars}
    inputs = dict.fromkeys(a for eqn in eqns for a in eqn.invars if not isinstance(a, jex.Literal) and a not in inside)
    outputs = [v for eqn in eqns for v in eqn.outvars if any(p < start or p >= stop for p in uses.get(v, []))]
    floats = [v.aval.dtype for eqn in eqns for v in (*eqn.invars, *eqn.outvars) if _floating(v)]
    return Region(str(family), start, stop, tuple(inputs), tuple(outputs), all(d == np.float32 for d in floats))
