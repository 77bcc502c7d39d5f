"""Rewritten bodies and traced functions, kept: a body that is met again with the same dtypes is not rewritten again."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from precision_jax.opcast import _private
from precision_jax.opcast.notes import CASTABLE, Note, cast
from precision_jax.opcast.rewrite import Rewriter, _widest


class Kept:
    """A dictionary of bounded size that forgets what was not asked for longest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is kept under a key, made if need be."""
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key]
        made = self._items[key] = make()
        if len(self._items) > self._size:
            self._items.popitem(last=False)
        return made

    def forget(self, key: Any) -> None:
        """Drop what is kept under a key."""
        self._items.pop(key, None)


_BODIES = Kept(2048)


def body(
    rw: Rewriter,
    closed: Any,
    dtypes: tuple[Any, ...],
    notes: tuple[Note, ...],
    scope: tuple[str, ...],
    atleast: Sequence[Any] = (),
) -> tuple[Any, tuple[Note, ...]]:
    """A closed jaxpr rewritten for inputs of some dtypes.

    Args:
        rw: what rewrites.
        closed: the jaxpr.
        dtypes: of its inputs.
        notes: what is known of them.
        scope: the scopes that it is in.
        atleast: dtypes that the first results are widened to.

    Returns:
        The closed jaxpr, and what is known of its results.
    """
    avals = tuple(
        var.aval.update(dtype=dtype, weak_type=False) if dtype in CASTABLE and dtype != var.aval.dtype else var.aval
        for var, dtype in zip(closed.jaxpr.invars, dtypes, strict=True)
    )

    def make() -> Any:
        found: list[Note] = []

        def run(*args: Any) -> list[Any]:
            results, known = rw.run_closed(closed, args, notes, scope)
            found.extend(known)
            return [_widen(x, d) for x, d in zip(results, [*atleast, *[None] * len(results)], strict=False)]

        new = _private.trace_closed(run, avals, closed.jaxpr.debug_info)
        return closed, new, tuple(found)  # the original is held, so that its identity stays its own

    key = (
        id(closed.jaxpr),
        tuple(map(id, closed.consts)),
        avals,
        notes,
        scope,
        tuple(atleast),
        rw.key(),
        _private.context_key(),
    )
    _, new, known = _BODIES.get(key, make)
    return new, known


def _widen(x: Any, dtype: Any) -> Any:
    have = getattr(x, "dtype", None)
    if dtype in CASTABLE and have in CASTABLE and _widest([have, dtype]) != have:
        return cast(x, _widest([have, dtype]))
    return x
