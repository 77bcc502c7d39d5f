"""Whether a function is still what it was when it was traced: what it closes over, as far as that can be told.

A trace may be used again only for a function that would be traced to the same. Numbers, arrays and functions are compared;
of anything that could change inside (a list, an object) nothing is promised, and the function is traced anew.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    np.dtype,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
)


class Same:
    """An object, compared by identity; it is held, so that its identity stays its own."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held


def fingerprint(fun: Callable[..., Any] | None) -> tuple[Any, ...] | None:
    """What a function depends on besides its arguments, hashable; None if that cannot be told.

    Example:
        >>> scale = 2.0
        >>> fingerprint(lambda x: x * scale) == fingerprint(lambda x: x * scale)
        False
        >>> fingerprint([].append) is None
        True
    """
    found: list[Any] = []
    return tuple(found) if fun is None or _walk(fun, found, set()) else None


def _walk(value: Any, found: list[Any], seen: set[int]) -> bool:
    if id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        found.append(Same(value))
        if _library(value):
            return True
        return all(_walk(part, found, seen) for part in parts_of(value))
    if isinstance(value, (jax.Array, *_PLAIN)):
        if isinstance(value, jax.core.Tracer):
            return False
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(
            value.__self__, (types.ModuleType, type(None))
        ):
            return False  # a method of an object
        found.append(value if isinstance(value, (int, float, complex, str, bytes)) else Same(value))
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(_walk(part, found, seen) for part in value)
    if callable(value) and _library(value):  # jnp.matmul, jax.nn.relu: objects of JAX's own
        found.append(Same(value))
        return True
    return False


def parts_of(fun: types.FunctionType) -> list[Any]:
    """What a function refers to: what it closes over, the globals it names, its defaults."""
    return [
        *(cell.cell_contents for cell in fun.__closure__ or () if _filled(cell)),
        *(fun.__globals__[n] for n in _names(fun.__code__) if n in fun.__globals__),
        *(fun.__defaults__ or ()),
        *(fun.__kwdefaults__ or {}).values(),
    ]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is not bound yet
        return False


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _library(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in ("jax", "jaxlib", "numpy", "optax")
