"""Clipping an optimizer's gradients, after they were unscaled."""

from __future__ import annotations

import math

import torch

from precision.errors import PolicyError
from precision_torch.attachments import attachments


def require_clip(clip_norm: float | None, clip_value: float | None) -> None:
    """Refuse limits that are not positive numbers. Raises ``PolicyError``."""
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit) or limit <= 0:
            raise PolicyError(f"{name} must be a finite number above 0, or None (given: {limit!r}).")


def clip(optimizer: torch.optim.Optimizer, clip_norm: float | None, clip_value: float | None) -> None:
    """Clamp the gradients to ``clip_value``, then scale them down to a total norm of ``clip_norm``. Reads nothing back."""
    if clip_norm is None and clip_value is None:
        return
    masters = attachments(optimizer).masters
    if masters is not None:
        masters.pull()
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if clip_value is not None:
        torch.nn.utils.clip_grad_value_(params, clip_value)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(params, clip_norm)
