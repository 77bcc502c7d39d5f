"""``TableMode``: the part of the table that ``torch.autocast`` does not do on a device, for the length of a region.

A ``TorchFunctionMode`` sees every call of a torch function in the thread that entered it. Nearly all of them it hands on after
one look into a dict.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from precision.policy import PrecisionPolicy
from precision_torch import recompute
from precision_torch.op_plan import Plan, code_of, plan_for, treatment_of
from precision_torch.op_treatments import (
    BODIES,
    DIRECT,
    SDPA,
    cast_arguments,
    cell_of,
    in_range,
    into_first,
    masked,
    resize_family,
    with_statistics,
)


class TableMode(TorchFunctionMode):
    """Casts the inputs of the functions in a plan, and runs them without native autocasting.

    It holds nothing that changes, so that one serves all regions of a plan, in all threads. Where native autocasting is
    switched off (an island, ``torch.autocast(enabled=False)``, ``custom_fwd(cast_inputs=...)``), so is this.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.policy, self.device_type, self.only = plan.policy, plan.device_type, plan.only
        self.number = plan.number
        self.enabled = plan.enabled

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = treatment_of(self.number, function)
        if found is None or torch.is_autocast_enabled(self.device_type) != self.enabled:
            return function(*args, **kwargs) if kwargs else function(*args)
        treatment, off = found
        if treatment == "grad_mode" or recompute.is_due():
            recompute.note(self, treatment)
        if treatment in DIRECT:
            args, kwargs = cast_arguments(treatment, self.device_type, args, kwargs or {})
        else:
            function, args, kwargs = self.prepared(treatment, function, args, kwargs or {})
        return self.off(function, args, kwargs) if off else function(*args, **kwargs)

    def off(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function without native autocasting."""
        device_type = self.device_type
        if torch.compiler.is_compiling():
            with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), enabled=False):
                return function(*args, **kwargs)
        torch.set_autocast_enabled(device_type, False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    def prepared(self, treatment: str, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """What to run, and on what, for a function with a treatment of its own."""
        device_type = self.device_type
        if treatment == "grad_mode":
            return function, args, kwargs
        if treatment == "unflatten":  # the compiler does not trace the method under any mode
            return torch.unflatten, args, kwargs
        if treatment in ("cell", "body"):
            return self.inside, (cell_of(function) if treatment == "cell" else BODIES[function], args, kwargs), {}
        if treatment == "into":
            return function, into_first(args, device_type), kwargs
        if treatment == "attention":
            treatment = self.of("attention" if function is SDPA else "matmul")
            args, kwargs = masked(function, treatment, device_type, args, kwargs)
        elif treatment == "constants":
            args, kwargs = in_range(args, kwargs)
            treatment = self.of("shape" if function != torch.where else "elementwise")
            if treatment == "promote":  # torch does that by itself
                return function, args, kwargs
        elif treatment == "resize":
            treatment = self.of(resize_family(args, kwargs))
        elif treatment == "quotient":
            one = isinstance(args[1], (int, float)) and args[1] == 1
            treatment = self.of("transcendental" if one else "elementwise")
        elif treatment == "statistics":
            return with_statistics(function, self.of("norm"), device_type), args, kwargs
        args, kwargs = cast_arguments(treatment, device_type, args, kwargs)
        return function, args, kwargs

    def inside(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function with the mode in force for its parts."""
        with self:
            return function(*args, **kwargs)

    def of(self, family: str) -> str:
        """The treatment of a family."""
        return code_of(self.number, family)

    def __reduce__(self) -> Any:
        return mode_for, (self.policy, self.device_type, self.only)


@functools.lru_cache(maxsize=256)
def _mode_for(plan: Plan) -> TableMode | None:
    return TableMode(plan) if plan.treatments else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def mode_for(policy: PrecisionPolicy, device_type: str, only: frozenset[str] | None = None) -> TableMode | None:
    """The one mode of a policy's plan, see :func:`precision_torch.op_plan.plan_for`; None where nothing is to be done."""
    return _mode_for(plan_for(policy, device_type, only))


def swap_in(mode: TableMode | None) -> tuple[TableMode | None, int]:
    """Put a mode in the place of the one that is in force, of which there is at most one.

    The innermost region decides alone: an outer one would cast once more, by its own plan.

    Returns:
        The mode that was in force, and how many other modes are above it.
    """
    above: list[Any] = []
    outer = None
    for _ in range(torch._C._len_torch_function_stack()):
        top = torch._C._pop_torch_function_stack()
        if isinstance(top, TableMode):
            outer = top
            break
        above.append(top)
    depth = len(above)
    while above:
        torch._C._push_on_torch_function_stack(above.pop())
    if mode is not None:
        torch._C._push_on_torch_function_stack(mode)
    return outer, depth


def swap_out(mode: TableMode | None, outer: TableMode | None, depth: int) -> None:
    """Undo :func:`swap_in`."""
    if mode is not None:
        torch._C._pop_torch_function_stack()
    if outer is None:
        return
    above = [torch._C._pop_torch_function_stack() for _ in range(depth)]
    torch._C._push_on_torch_function_stack(outer)
    while above:
        torch._C._push_on_torch_function_stack(above.pop())


@contextlib.contextmanager
def table(mode: TableMode | None) -> Iterator[None]:
    """A mode in force for the length of a region, in the place of an outer one."""
    outer, depth = swap_in(mode)
    try:
        yield
    finally:
        swap_out(mode, outer, depth)
