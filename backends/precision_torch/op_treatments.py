"""The treatments: how the inputs of a function are cast before it runs. Each is small enough for the compiler to trace."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch

from precision_torch.dtypes import TORCH

SDPA = torch.nn.functional.scaled_dot_product_attention
LOW = (torch.bfloat16, torch.float16)


def kept(args: Any, kwargs: Any) -> bool:
    """Whether a call says itself in which dtype it is to run: with ``dtype=``, or into ``out=``."""
    if kwargs and (kwargs.get("dtype") is not None or kwargs.get("out") is not None):
        return True
    return any(isinstance(arg, torch.dtype) for arg in args)


def floating(tree: Any, device_type: str) -> list[torch.dtype]:
    """The floating dtypes of the tensors of a device among arguments (lists and tuples of them included)."""
    found: list[torch.dtype] = []
    for item in tree:
        if isinstance(item, torch.Tensor):
            if item.is_floating_point() and item.device.type == device_type:
                found.append(item.dtype)
        elif isinstance(item, (list, tuple)):
            found += floating(item, device_type)
    return found


def cast_all(tree: Any, device_type: str, dtype: torch.dtype) -> Any:
    """The arguments with the floating tensors of a device cast to a dtype."""
    items = []
    for item in tree:
        if isinstance(item, torch.Tensor):
            if item.dtype is not dtype and item.is_floating_point() and item.device.type == device_type:
                item = item.to(dtype)
        elif isinstance(item, (list, tuple)) and type(item) in (list, tuple):
            item = cast_all(item, device_type, dtype)
        items.append(item)
    return items if isinstance(tree, list) else tuple(items)


def target_of(treatment: str, dtypes: list[torch.dtype], device_type: str) -> torch.dtype | None:
    """The dtype that inputs of these dtypes are cast to; None to leave them."""
    if not dtypes or torch.float64 in dtypes or treatment == "follow":
        return None
    if treatment == "compute":
        return torch.get_autocast_dtype(device_type)
    if treatment != "promote":
        return TORCH[treatment]
    first = dtypes[0]
    return first if all(dtype is first for dtype in dtypes) else torch.float32  # as precision.ops.widest


def cast_arguments(treatment: str, device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, cast as a treatment says."""
    values = tuple(kwargs.values())
    target = target_of(treatment, floating(args, device_type) + floating(values, device_type), device_type)
    if target is None:
        return args, kwargs
    if kwargs:
        kwargs = dict(zip(kwargs, cast_all(values, device_type, target), strict=True))
    return cast_all(args, device_type, target), kwargs


# ---- functions with a treatment of their own ----------------------------------------------------------------------


def resize_family(args: Any, kwargs: Any) -> str:
    """The family of ``interpolate``: nearest moves values, the others average them."""
    mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
    return "shape" if mode in ("nearest", "nearest-exact") else "reduction"


def in_range(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments whose Python numbers the low tensor among them can hold: the largest it has instead of infinity."""
    dtypes = [item.dtype for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if not floats or any(dtype not in LOW for dtype in floats):
        return args, kwargs
    most = min(torch.finfo(dtype).max for dtype in floats)

    def bound(item: Any) -> Any:
        if isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item):
            return max(-most, min(most, item))
        return item

    return tuple(bound(item) for item in args), {key: bound(item) for key, item in kwargs.items()}


def narrow_mask(mask: Any, dtype: torch.dtype) -> Any:
    """An additive mask in a low dtype: finite stays finite, minus infinity stays."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.float32, *LOW) or mask.dtype is dtype:
        return mask
    if dtype is torch.float32:
        return mask.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most)).to(dtype)


def masked(function: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Arguments of attention, or of ``baddbmm``, with the mask made low in range; the others are cast after."""
    attention = function is SDPA
    position, key = (3, "attn_mask") if attention else (0, "input")
    if len(args) > position:
        args = (*args[:position], narrow_mask(args[position], dtype), *args[position + 1 :])
    elif key in kwargs:
        kwargs = {**kwargs, key: narrow_mask(kwargs[key], dtype)}
    return args, kwargs


def with_statistics(function: Any, treatment: str, device_type: str) -> Callable[..., Any]:
    """Batch and instance norm, with running statistics that are updated in the dtype they are kept in.

    In float32 everything is cast, and what was a low statistic written back. In a low dtype only the input is: the kernels
    take float32 parameters and statistics beside it.
    """
    places = (1, 2) if isinstance(function, types.FunctionType) else (3, 4)

    def run(*args: Any, **kwargs: Any) -> Any:
        target = target_of(treatment, floating((*args, *kwargs.values()), device_type), device_type)
        if target in LOW:
            cast, _ = cast_arguments(treatment, device_type, args[:1], {})
            return function(*cast, *args[1:], **kwargs)
        cast, named = cast_arguments(treatment, device_type, args, kwargs)
        result = function(*cast, **named)
        pairs = [(args[i], cast[i]) for i in places if i < len(args)]
        pairs += [(kwargs[key], named[key]) for key in ("running_mean", "running_var") if key in kwargs]
        for old, new in pairs:
            if new is not old and isinstance(old, torch.Tensor):
                with torch.no_grad():
                    old.copy_(new)
        return result

    return run


def cell(function: Any, args: Any, kwargs: Any) -> Any:
    """A recurrent cell by its parts: two linear maps, gates, and a state that meets them elementwise."""
    names = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    state, linear = given["hx"], torch.nn.functional.linear
    h = state[0] if isinstance(state, (list, tuple)) else state
    x = linear(given["input"], given["w_ih"], given["b_ih"])
    r = linear(h, given["w_hh"], given["b_hh"])
    if function == torch.lstm_cell:
        i, f, g, o = (x + r).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if function == torch.gru_cell:
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), r.chunk(3, -1)
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return n + (xz + hz).sigmoid() * (h - n)
    return (x + r).relu() if function == torch.rnn_relu_cell else (x + r).tanh()


def _never(*tensors: Any) -> bool:
    return False


def body(function: types.FunctionType) -> types.FunctionType:
    """A function of ``torch.nn.functional`` past its question whether somebody else wants to run it: its parts are seen."""
    questions = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    seen = {**function.__globals__, **dict.fromkeys(questions, _never)}
    inside = types.FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    inside.__kwdefaults__ = function.__kwdefaults__
    return inside


BODIES: dict[Any, types.FunctionType] = {
    each: body(each)
    for each in (
        torch.nn.functional.multi_head_attention_forward,
        getattr(torch.nn.functional, "linear_cross_entropy", None),
    )
    if each is not None
}
