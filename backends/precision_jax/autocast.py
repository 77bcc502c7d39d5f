"""Function wrappers: ``autocast`` op by op or at the boundary, ``island`` and ``op``. All are decorators.

JAX traces functions, so a region is a function here; there is no context manager that could reach into one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from precision import ops
from precision.errors import PolicyError, UnsupportedError
from precision_jax.casting import cast_tree, numpy_dtype
from precision_jax.leaves import cast_leaf, is_array, is_castable, refuse_stateful_modules
from precision_jax.opcast import marks
from precision_jax.opcast.transform import Autocast

if TYPE_CHECKING:
    from precision_jax.bound import JaxPolicy


class CastRegion:
    """A decorator that casts around a function. As a context manager it says that JAX has none.

    Args:
        wrap: turns a function into the wrapped one.
        name: how it is spelt, for messages.
    """

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], name: str) -> None:
        self._wrap = wrap
        self._name = name

    def __call__(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fun):
            raise PolicyError(f"{self._name} decorates a function, not {type(fun).__name__}.")
        return self._wrap(fun)

    def __enter__(self) -> None:
        raise UnsupportedError(
            f"{self._name} is no context manager in JAX, which traces functions: put the region into a function and "
            f"decorate it with @{self._name}."
        )

    def __exit__(self, *_: object) -> None: ...


def autocast(mp: JaxPolicy, fun: Callable[..., Any], keep: Sequence[int | str], recompute: bool) -> Callable[..., Any]:
    """See :meth:`precision_jax.JaxPolicy.autocast`."""
    # A module that is called (Equinox) brings its parameters along: they are traced as an argument is.
    module = _has_parameters(fun)
    run = Autocast(mp, fun, _Kept(fun, keep).names, mp.output_dtype, recompute, module)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return wrapped if module else functools.wraps(fun)(wrapped)


def untouched(mp: JaxPolicy, fun: Callable[..., Any]) -> Autocast:
    """A function op by op, its results as they come: what :meth:`precision_jax.JaxPolicy.value_and_grad` runs."""
    return Autocast(mp, fun, lambda _: set(), None, True, _has_parameters(fun))


def cast_boundary(mp: JaxPolicy, fun: Callable[..., Any], keep: Sequence[int | str]) -> Callable[..., Any]:
    """See :meth:`precision_jax.JaxPolicy.cast_boundary`."""
    kept = _Kept(fun, keep)
    module = _has_parameters(fun)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        names = kept.names(len(args))
        moving = [a for i, a in enumerate(args) if i not in names] + [v for k, v in kwargs.items() if k not in names]
        if module:
            moving.append(fun)
        refuse_stateful_modules(*moving)
        mp.rules.maybe_parameters(*moving)
        with marks.region(marks.DECLARED):
            cast = [a if i in names else mp.cast_arguments(a) for i, a in enumerate(args)]
            cast_kwargs = {k: v if k in names else mp.cast_arguments(v) for k, v in kwargs.items()}
            callee = mp.cast_arguments(fun) if module else fun
            return cast_tree(callee(*cast, **cast_kwargs), mp.policy.output_dtype)

    return wrapped if module else functools.wraps(fun)(wrapped)


def _has_parameters(fun: Any) -> bool:
    return any(is_castable(leaf) for leaf in jax.tree.leaves(fun))


class _Kept:
    """The arguments that stay as they are, by position or name, whichever way they are passed."""

    def __init__(self, fun: Callable[..., Any], keep: Sequence[int | str]) -> None:
        self._keep = (keep,) if isinstance(keep, (int, str)) else tuple(keep)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # a function that does not say
            parameters = [inspect.Parameter(name, kind) for name, kind in _ANY]
        kinds = {p.kind for p in parameters}
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._open = inspect.Parameter.VAR_POSITIONAL in kinds
        names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        for name in self._keep:
            if isinstance(name, str):
                known = name in names or inspect.Parameter.VAR_KEYWORD in kinds
            else:
                known = self._open or -len(self._positional) <= name < len(self._positional)
            if not known:
                raise PolicyError(f"keep names no argument {name!r}; there are {', '.join(names)}.")

    def names(self, positional: int) -> set[int | str]:
        found: set[int | str] = set()
        for name in self._keep:
            if isinstance(name, int):
                index = name if name >= 0 else name + (positional if self._open else len(self._positional))
                found.add(index)
                if 0 <= index < len(self._positional):
                    found.add(self._positional[index])
            else:
                found.add(name)
                if name in self._positional:
                    found.add(self._positional.index(name))
        return found


_ANY = (("args", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD))


def island(dtype: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """See :meth:`precision_jax.JaxPolicy.island`."""

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            refuse_stateful_modules(args, kwargs)
            with marks.region(marks.DECLARED):  # an autocast around it leaves it as it is
                args, kwargs = cast_tree((args, kwargs), dtype)
                return fun(*args, **kwargs)

        return wrapped

    return wrap


def op(mp: JaxPolicy, family: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """See :meth:`precision_jax.JaxPolicy.op`."""
    ops.canonical_family(family)
    fixed = ops.family_dtype(mp.policy, family) is not None
    mark = marks.DECLARED if fixed else marks.FOLLOW  # what an autocast around it makes of it

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            refuse_stateful_modules(args, kwargs)
            leaves, structure = jax.tree.flatten((args, kwargs))
            dtypes = [str(leaf.dtype) if is_array(leaf) else type(leaf).__name__ for leaf in leaves]
            wanted = ops.decide(
                mp.policy, family, [d if is_array(x) else "" for d, x in zip(dtypes, leaves, strict=True)]
            )
            with marks.region(mark):
                cast = [
                    leaf if not want or want == have else cast_leaf(leaf, numpy_dtype(want))
                    for leaf, have, want in zip(leaves, dtypes, wanted, strict=True)
                ]
                args, kwargs = jax.tree.unflatten(structure, cast)
                return fun(*args, **kwargs)

        return wrapped

    return wrap
