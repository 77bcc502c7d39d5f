"""How ``mp.island``, ``mp.op`` and an autocast inside of another are seen in a jaxpr: by a scope on the name stack.

Every equation traced in such a region carries the scope, through ``grad``, ``vmap`` and cached ``jit``s, and no tracing changes.
"""

from __future__ import annotations

from typing import Any

import jax

from precision_jax.opcast import _private

DECLARED = "precision_region"
"""Equations that run in the dtypes they were traced with: the region has made its own casts."""

FOLLOW = "precision_follow"
"""Equations that run in whatever their inputs meet in: ``mp.op`` of a family that promotes or follows."""

_MARKS = frozenset((DECLARED, FOLLOW))


def region(mark: str) -> Any:
    """A context in which equations carry a mark."""
    return jax.named_scope(mark)


def mark_of(eqn: Any) -> str | None:
    """The innermost mark that an equation carries."""
    return next((name for name in reversed(_private.scopes(eqn.source_info.name_stack)) if name in _MARKS), None)
