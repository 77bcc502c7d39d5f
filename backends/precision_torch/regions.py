"""Regions of code under a policy: autocast, islands that keep a dtype, and functions marked with their op family."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from precision.ops import canonical_family, decide
from precision.policy import PrecisionPolicy
from precision_torch.autocast_mode import TableMode, mode_for, swap_in, swap_out, table
from precision_torch.dtypes import NAME, TORCH, castable, dtype_name
from precision_torch.op_plan import native_dtype
from precision_torch.tree import cast_tree, map_tensors, tensors_of


class Autocast(torch.autocast):
    """A ``torch.autocast`` that gives the table's decisions, where the native lists give others.

    Beside native autocasting it puts a :class:`~precision_torch.autocast_mode.TableMode` in force. It may be entered again
    while it is open, and functions it decorates may call themselves, nest and run in threads. (The native decorator enters one
    region for all calls, which forgets what was around the first of them: after a function that calls itself, autocasting
    stays switched on.)
    """

    def __init__(self, device_type: str, mode: TableMode | None, **settings: Any) -> None:
        super().__init__(device_type, **settings)
        self._mode = mode
        self._again = functools.partial(torch.autocast, device_type, **settings)
        self._open: list[Any] = []

    def __enter__(self) -> Any:
        native = self._again()
        native.__enter__()
        self._open.append((native, *swap_in(self._mode)))
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        native, outer, depth = self._open.pop()
        swap_out(self._mode, outer, depth)
        return native.__exit__(exc_type, exc_val, exc_tb)

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: each call is a region of its own."""
        if not callable(func):
            raise TypeError(f"mp.autocast() decorates a function, not {type(func).__name__}")
        again = functools.partial(_region, self.device, self._mode, self._again)

        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            with again():
                return func(*args, **kwargs)

        return run


@contextlib.contextmanager
def _region(device_type: str, mode: TableMode | None, native: Callable[[], torch.autocast]) -> Iterator[None]:
    """The same in a form that the compiler traces."""
    with native(), table(mode):
        yield


def autocast_on(policy: PrecisionPolicy, device_type: str, *, enabled: bool, cache: bool, native: bool) -> Any:
    """Autocasting as a policy says; switched off, whatever is around it, where nothing in it computes low.

    Args:
        policy: the policy.
        device_type: the device type whose tensors are cast.
        enabled: whether to switch it on, rather than off.
        cache: whether a weight's low copy is kept for the length of the region.
        native: whether to leave the decisions to ``torch.autocast``.
    """
    low = policy.compute_dtype if native else native_dtype(policy)
    if not enabled or low in (None, "float32"):
        settings = {"dtype": torch.get_autocast_dtype(device_type), "enabled": False}
        mode = None
    else:
        settings = {"dtype": TORCH[str(low)], "enabled": True, "cache_enabled": cache}
        mode = None if native else mode_for(policy, device_type)
    if torch.compiler.is_compiling():
        return _region(device_type, mode, functools.partial(torch.autocast, device_type, **settings))
    return Autocast(device_type, mode, **settings)


def autocast_off(device_type: str) -> torch.autocast:
    """``torch.autocast`` switched off. The dtype stays what it was, for a user's own autocast inside."""
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), enabled=False)


@contextlib.contextmanager
def _off(device_type: str) -> Iterator[None]:
    with autocast_off(device_type):
        yield


class Island:
    """A region that keeps a dtype whatever is around it; decorator and context manager. Made by ``mp.island(dtype)``.

    As a decorator it casts the floating tensors (not float64) among the arguments and runs the function without
    autocasting. As a context manager it switches autocasting off and gives a function that casts: tensors made before
    it keep their dtype until they are cast.

    Example:
        >>> import precision, torch
        >>> mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu")
        >>> x = torch.ones(2, 2)
        >>> with mp.autocast():
        ...     low = x @ x
        ...     with mp.island("float32") as cast:
        ...         exact = cast(low) @ x
        >>> low.dtype, exact.dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._device_type = device_type
        self._open: list[Any] = []

    def cast(self, tree: Any) -> Any:
        """Cast the floating tensors (not float64) of a tree to the island's dtype."""
        return cast_tree(tree, self.dtype)

    def __enter__(self) -> Callable[[Any], Any]:
        region = _off(self._device_type)
        region.__enter__()
        self._open.append(region)
        return self.cast

    def __exit__(self, *error: Any) -> Any:
        return self._open.pop().__exit__(*error)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        device_type, dtype = self._device_type, self.dtype

        @functools.wraps(fn)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast_off(device_type):
                return fn(*cast_tree(args, dtype), **cast_tree(kwargs, dtype))

        return inside


def mark_op(policy: PrecisionPolicy, device_type: str, family: str) -> Callable[[Callable[..., Any]], Any]:
    """The decorator behind ``mp.op(family)``: casts as :func:`precision.ops.decide` says, no autocasting inside."""
    canonical_family(family)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs: list[Any] = [args, kwargs]
            names = [dtype_name(tensor.dtype) for tensor in tensors_of(inputs)]
            targets = list(decide(policy, family, names))
            if targets != names:
                targets.reverse()
                inputs = map_tensors(lambda tensor, _: _to(tensor, targets.pop()), inputs)
            with autocast_off(device_type):
                return fn(*inputs[0], **inputs[1])

        return run

    return decorate


def _to(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.to(TORCH[name]) if castable(tensor) and NAME.get(tensor.dtype) != name else tensor
