"""Unscaling and the finite check, in one multi-tensor pass a device and dtype, on tensors that are float32 or wider.

The check must hold for what the optimizer gets. ``torch._amp_foreach_non_finite_check_and_unscale_`` looks at its input, so
where the scale may be below 1 (and a finite gradient may overflow when divided) the result is looked at too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from precision.errors import LossScaleError


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """``1 / scale`` rounded once to float32, as ``torch.amp.GradScaler`` takes it (through float64)."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor to unscale in place: complex as pairs of reals, sparse by its values."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def unscale_in_place(
    tensors: Iterable[torch.Tensor], inverse: torch.Tensor, *, check_result: bool
) -> dict[torch.device, torch.Tensor]:
    """Multiply real float32 (or wider) tensors by ``inverse`` in place and look for non-finite values.

    Args:
        tensors: the gradients, on any devices.
        inverse: float32 scalar.
        check_result: whether a finite value may become infinite when multiplied, so that the result must be looked at.

    Returns:
        For each device a float32 scalar: 1 where something is not finite, else 0. Nothing is read on the host.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found: dict[torch.device, torch.Tensor] = {}
    for (device, _), group in groups.items():
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        here = inverse if inverse.device == device else inverse.to(device=device, non_blocking=True)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], here)
        if check_result:
            one = torch.ones((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], one)
    return found


def combine(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The maximum of float32 flags, on a device."""
    found = None
    for flag in flags:
        if flag.device != device:
            flag = flag.to(device=device, non_blocking=True)
        found = flag if found is None else torch.maximum(found, flag)
    if found is None:
        raise LossScaleError("there are no flags to combine: no gradient was looked at.")
    return found
