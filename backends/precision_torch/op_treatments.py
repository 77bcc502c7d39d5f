"""The treatments: how the inputs of a function are cast before it runs. Each is small enough for the compiler to trace."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch

from precision_torch.dtypes import NAME, TORCH

SDPA = torch.nn.functional.scaled_dot_product_attention
LOW = (torch.bfloat16, torch.float16)
DIRECT = frozenset(["compute", "float32", "bfloat16", "float16", "promote", "follow"])
"""Treatments that only cast; the others are told apart in :class:`precision_torch.autocast_mode.TableMode`."""
KEPT: Any = "kept"
_ON = {name: f"is_{name}" for name in ("cpu", "cuda", "mps", "xpu")}


def cast_arguments(treatment: str, device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, cast as a treatment says.

    Left as they are if one is float64, or if the call says itself in which dtype it is to run: with ``dtype=``, or into
    ``out=``.
    """
    if treatment == "follow":
        return args, kwargs
    found: list[torch.dtype] = []
    look(args, device_type, found)
    if kwargs:
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return args, kwargs
        look(kwargs.values(), device_type, found)
    if not found or KEPT in found or torch.float64 in found:
        return args, kwargs
    target = target_of(treatment, found, device_type)
    if len(found) == found.count(target):
        return args, kwargs
    if kwargs:
        kwargs = dict(zip(kwargs, cast_all(list(kwargs.values()), device_type, target), strict=True))
    return tuple(cast_all(args, device_type, target)), kwargs


def look(tree: Any, device_type: str, found: list[Any]) -> None:
    """Add the floating dtypes of a device's tensors to ``found``; :data:`KEPT` for a dtype among the arguments."""
    on_device = _ON[device_type]
    for item in tree:
        if isinstance(item, torch.Tensor):
            if item.dtype in NAME and getattr(item, on_device):
                found.append(item.dtype)
        elif isinstance(item, (list, tuple)):
            look(item, device_type, found)
        elif isinstance(item, torch.dtype):
            found.append(KEPT)


def cast_all(tree: Any, device_type: str, dtype: torch.dtype) -> list[Any]:
    """The items of a list or tuple, the floating tensors of a device cast to a dtype."""
    on_device = _ON[device_type]
    items = []
    for item in tree:
        if isinstance(item, torch.Tensor):
            if item.dtype is not dtype and item.dtype in NAME and getattr(item, on_device):
                item = item.to(dtype)
        elif type(item) is list:
            item = cast_all(item, device_type, dtype)
        elif type(item) is tuple:
            item = tuple(cast_all(item, device_type, dtype))
        items.append(item)
    return items


def target_of(treatment: str, dtypes: list[torch.dtype], device_type: str) -> torch.dtype:
    """The dtype that inputs of these dtypes are cast to."""
    if treatment == "compute":
        return torch.get_autocast_dtype(device_type)
    if treatment != "promote":
        return TORCH[treatment]
    first = dtypes[0]
    return first if dtypes.count(first) == len(dtypes) else torch.float32  # as precision.ops.widest


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


def into_first(args: Any, device_type: str) -> Any:
    """Arguments of a function that writes into its first: the values come in its dtype, as they do in ``copy_``."""
    target = args[0].dtype
    found: list[Any] = []
    look(args, device_type, found)
    if target not in NAME or torch.float64 in found or found.count(target) == len(found):
        return args
    return (args[0], *cast_all(args[1:], device_type, target))


def narrow_mask(mask: Any, dtype: torch.dtype) -> Any:
    """An additive mask in a low dtype: finite stays finite, minus infinity stays."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.float32, *LOW) or mask.dtype is dtype:
        return mask
    if dtype is torch.float32:
        return mask.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most)).to(dtype)


def masked(function: Any, treatment: str, device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of attention, or of ``baddbmm``, with the mask made low in range; the others are cast after."""
    position, key = (3, "attn_mask") if function is SDPA else (0, "input")
    mask = args[position] if len(args) > position else kwargs.get(key)
    found: list[Any] = []
    look((*args, *kwargs.values()), device_type, found)
    if not isinstance(mask, torch.Tensor) or torch.float64 in found:
        return args, kwargs
    mask = narrow_mask(mask, target_of(treatment, found, device_type))
    if len(args) > position:
        return (*args[:position], mask, *args[position + 1 :]), kwargs
    return args, {**kwargs, key: mask}


def with_statistics(function: Any, treatment: str, device_type: str) -> Callable[..., Any]:
    """Batch and instance norm, with running statistics that are updated in the dtype they are kept in.

    In float32 everything is cast, and what was a low statistic written back. In a low dtype, where they are updated, only the
    input is: the kernels take float32 parameters and statistics beside it.
    """
    places = (1, 2) if isinstance(function, types.FunctionType) else (3, 4)
    default = function is torch.nn.functional.instance_norm

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("training", kwargs.get("use_input_stats", args[5] if len(args) > 5 else default))
        statistics = [args[i] for i in places if i < len(args)] + [
            kwargs.get("running_mean"),
            kwargs.get("running_var"),
        ]
        updates = given and any(each is not None for each in statistics)
        if updates and treatment not in ("float32", "promote", "follow"):
            cast, _ = cast_arguments(treatment, device_type, args[:1], {})
            return function(*cast, *args[1:], **kwargs)
        cast, named = cast_arguments(treatment, device_type, args, kwargs)
        result = function(*cast, **named)
        pairs = [(args[i], cast[i]) for i in places if i < len(args)]
        pairs += [(kwargs[key], named[key]) for key in ("running_mean", "running_var") if key in kwargs]
        for old, new in pairs if updates else ():
            if new is not old and isinstance(old, torch.Tensor):
                with torch.no_grad():
                    old.copy_(new)
        return result

    return run


# Recurrent cells by their parts: two linear maps, gates, and a state that meets them elementwise.


def _maps(x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> tuple[Any, Any]:
    linear = torch.nn.functional.linear
    return linear(x, w_ih, b_ih), linear(h, w_hh, b_hh)


def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``torch.lstm_cell``."""
    x, r = _maps(input, hx[0], w_ih, w_hh, b_ih, b_hh)
    i, f, g, o = (x + r).chunk(4, -1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``torch.gru_cell``."""
    x, r = _maps(input, hx, w_ih, w_hh, b_ih, b_hh)
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), r.chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (hx - n)


def rnn_tanh_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``torch.rnn_tanh_cell``."""
    x, r = _maps(input, hx, w_ih, w_hh, b_ih, b_hh)
    return (x + r).tanh()


def rnn_relu_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``torch.rnn_relu_cell``."""
    x, r = _maps(input, hx, w_ih, w_hh, b_ih, b_hh)
    return (x + r).relu()


def cell_of(function: Any) -> Callable[..., Any]:
    """The cell that stands for one of torch's."""
    if function == torch.lstm_cell:
        return lstm_cell
    if function == torch.gru_cell:
        return gru_cell
    return rnn_relu_cell if function == torch.rnn_relu_cell else rnn_tanh_cell


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
