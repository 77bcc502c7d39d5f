"""Activation checkpointing: what is computed again in the backward pass is computed under the same table.

``torch.utils.checkpoint`` remembers native autocasting, and nothing of modes. So where a function is treated inside a
checkpoint, the checkpoint is told to recompute with the mode in force.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

_REENTRANT = getattr(getattr(checkpoint, "CheckpointFunction", None), "forward", None)
_CODE = getattr(_REENTRANT, "__code__", None)


_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_due() -> bool:
    """Whether somebody, perhaps a checkpoint, keeps track of saved tensors. (What is traced is never computed again here.)"""
    return _hooks(False) is not None and not torch.compiler.is_compiling()


def note(mode: Any, treatment: str) -> None:
    """If this call runs inside a checkpoint, make it recompute under ``mode``."""
    if torch.compiler.is_compiling():
        return
    if treatment == "grad_mode":
        _reentrant(mode)
        return
    hooks = _hooks(False)
    if hooks is not None and hooks[0].__module__ == checkpoint.__name__:
        for cell in hooks[0].__closure__ or ():
            frame = cell.cell_contents
            if hasattr(frame, "recompute_fn"):
                frame.recompute_fn = _under(mode, frame.recompute_fn)


def _reentrant(mode: Any) -> None:
    """A reentrant checkpoint enters ``no_grad`` just before it calls the function that it will call again."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_code is _CODE:
            ctx = frame.f_locals["ctx"]
            ctx.run_function = _under(mode, ctx.run_function)
            return


def _under(mode: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs with a mode in force, whatever mode that was before."""
    if isinstance(function, functools.partial) and function.func is _run:
        return function
    return functools.partial(_run, mode, function)


def _run(mode: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from precision_torch.autocast_mode import table

    with table(mode):
        return function(*args, **kwargs)
