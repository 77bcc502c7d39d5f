"""How ``mp.island``, ``mp.op`` and an autocast inside of another are seen in a jaxpr: by a scope on the name stack.

Every equation traced in such a region carries the scope, through ``grad``, ``vmap`` and cached ``jit``s, and no tracing changes.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from precision_jax.opcast import _private

DECLARED = "precision_region"
"""Equations that run in the dtypes they were traced with: the region has made its own casts."""

FOLLOW = "precision_follow"
"""Equations that run in whatever their inputs meet in: ``mp.op`` of a family that promotes or follows."""

ATTENTION = "precision_attention"
"""In the place of a scope: the matrix products inside are an attention function's."""

FUSED = "precision_fused"
"""Equations of a known function that takes and gives a low dtype and computes in float32 inside, as one kernel does."""

INSIDE = frozenset((ATTENTION,))

_MARKS = frozenset((DECLARED, FOLLOW))


def region(mark: str) -> Any:
    """A context in which equations carry a mark."""
    return jax.named_scope(mark)


def mark_of(eqn: Any) -> str | None:
    """The innermost mark that an equation carries."""
    return next((name for name in reversed(_private.scopes(eqn.source_info.name_stack)) if name in _MARKS), None)


_JAX = os.path.dirname(jax.__file__)
_CASTS = frozenset(("astype", "_astype", "convert_element_type", "asarray", "array", "_ScalarMeta.__call__"))
_METHOD = "_forward_method_to_aval.<locals>.meth"  # a method of arrays, which calls the function that does it


def authored(eqn: Any) -> bool:
    """Whether a cast is one that somebody's code asked for, and not JAX's own promotion or widening of sums.

    Told by the frames that it was traced in: which of JAX's functions the first code that is not JAX's has called.
    """
    called = inner = ""
    for code in _private.codes(eqn):
        if not code.co_filename.startswith(_JAX):
            return (inner if called == _METHOD else called) in _CASTS
        called, inner = code.co_qualname, called
    return False
