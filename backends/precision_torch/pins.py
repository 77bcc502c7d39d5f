"""Modules kept in a dtype: their ``forward`` casts its inputs, and, where asked, runs without autocasting.

The wrapper is the instance's ``forward``. It is a plain object that copies and pickles with its module, leaves the state
dict alone, and is traced through by ``torch.compile``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from precision_torch.autocast_mode import TableMode, table
from precision_torch.dtypes import cast
from precision_torch.regions import autocast_off
from precision_torch.tree import cast_tree

NORMS = (
    _NormBase,  # BatchNorm, InstanceNorm and SyncBatchNorm, of any dimension
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
    torch.nn.CrossMapLRN2d,
)
"""The layers of the ``norm`` family."""


class PinnedForward:
    """A module's ``forward`` in a dtype.

    Args:
        module: the module.
        dtype: what the floating inputs (not float64) are cast to.
        device_type: where to switch autocasting off inside; None leaves it (no norm is autocast from float32).
        mode: what treats op families whose rules come before the module's; None without any.

    Every module under a rule has its own, not only the topmost: a part may be called past its parent.
    """

    def __init__(
        self, module: torch.nn.Module, dtype: torch.dtype, device_type: str | None, mode: TableMode | None = None
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.device_type = device_type
        self.mode = mode
        earlier = module.__dict__.get("forward")
        self.earlier: Any = earlier.earlier if isinstance(earlier, PinnedForward) else earlier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = (
            (cast(args[0], self.dtype),)
            if len(args) == 1 and isinstance(args[0], torch.Tensor)
            else cast_tree(args, self.dtype)
        )
        if kwargs:
            kwargs = cast_tree(kwargs, self.dtype)
        if self.device_type is None or not torch.is_autocast_enabled(self.device_type):
            return self._forward(args, kwargs)
        with autocast_off(self.device_type), table(self.mode):
            return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self.earlier is not None:
            return self.earlier(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own ``forward``, for those who inspect it."""
        return inspect.signature(self.earlier or type(self.module).forward.__get__(self.module))


class CastOutput:
    """A forward hook: results leave in a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return cast_tree(output, self.dtype)


def pin(module: torch.nn.Module, dtype: torch.dtype, device_type: str | None, mode: TableMode | None = None) -> None:
    """Make a module compute in a dtype. Pinned again, the last dtype holds."""
    module.forward = PinnedForward(module, dtype, device_type, mode)  # type: ignore[method-assign]


def cast_output(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a model's results leave in a dtype. Called again, the last dtype holds."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, CastOutput):
            del model._forward_hooks[key]
    model.register_forward_hook(CastOutput(dtype))
