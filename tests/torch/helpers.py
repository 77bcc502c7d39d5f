"""Small things the torch tests share: policies, a counter of host reads, and a model that overflows on demand."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import precision
from precision import LossScale, PrecisionPolicy


def bind(policy: Any = "mixed_bfloat16", **loss_scale: Any) -> Any:
    """A policy on the CPU; keywords give it a dynamic loss scale (``mode`` may be given too)."""
    if isinstance(policy, str):
        policy = PrecisionPolicy.from_name(policy)
    if loss_scale:
        policy = policy.with_(loss_scale=LossScale(**{"mode": "dynamic", **loss_scale}))
    return precision.bind(policy, backend="torch", device="cpu")


class HostReads(TorchDispatchMode):
    """Counts the ops that make the host wait for a value on the device."""

    READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in self.READS
        return func(*args, **(kwargs or {}))


def weight(*values: float) -> torch.nn.Parameter:
    """A float32 parameter."""
    return torch.nn.Parameter(torch.tensor(values or (1.0,)))


def overflow(scaler: Any, param: torch.nn.Parameter) -> None:
    """A backward pass whose gradients are infinite."""
    scaler.scale(param.sum() * float("inf")).backward()


def finite(scaler: Any, param: torch.nn.Parameter) -> None:
    """A backward pass whose unscaled gradients are 1."""
    scaler.scale(param.sum()).backward()
