"""Clipping an optimizer's gradients, after they were unscaled. The norm is that of the full gradient, wherever its parts are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from precision.errors import PolicyError
from precision_torch.agreement import all_reduce
from precision_torch.attachments import attachments
from precision_torch.dtypes import LOW
from precision_torch.engines import distributed, is_dtensor, is_fsdp1, local, reduced


def require_clip(clip_norm: float | None, clip_value: float | None) -> None:
    """Refuse limits that are not positive numbers. Raises ``PolicyError``."""
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit) or limit <= 0:
            raise PolicyError(f"{name} must be a finite number above 0, or None (given: {limit!r}).")


def clip(
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    clip_value: float | None,
    found: torch.Tensor | None = None,
) -> None:
    """Clamp the gradients to ``clip_value``, then scale them down to a total norm of ``clip_norm``. Reads nothing back.

    Args:
        optimizer: its parameters' gradients are changed in place.
        clip_norm: limit of the 2-norm of all of them together, the parts on other ranks included.
        clip_value: limit of each value.
        found: the agreed flag (1 where something is not finite): the gradients of a step that will be skipped are not
            scaled down, so that those that are finite stay so, and the others can be named.
    """
    if clip_norm is None and clip_value is None:
        return
    masters = attachments(optimizer).masters
    if masters is not None:
        masters.pull()
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    elsewhere = _sharded_by_fsdp1(optimizer) if distributed() else {}
    if not elsewhere and not any(is_dtensor(param.grad) for param in params):
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(params, clip_value)
        # on a rank without gradients there is nothing to clip
        if clip_norm is not None and params:
            total = torch.nn.utils.get_total_norm([param.grad for param in params])
            torch.nn.utils.clip_grads_with_norm_(params, clip_norm, _unless(found, total))
        return
    with torch.no_grad():
        for param in params:
            param.grad = reduced(param.grad)
        parts = [local(param.grad) for param in params]
        if clip_value is not None:
            for part in parts:
                part.clamp_(-clip_value, clip_value)
        if clip_norm is not None:
            total = _unless(found, _full_norm(optimizer, params, elsewhere))
            factor = torch.clamp(clip_norm / (total + 1e-6), max=1.0)
            for part in parts:
                part.mul_(factor.to(device=part.device, dtype=part.dtype))


def _unless(found: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor:
    return total if found is None else torch.where(found.to(total.device) > 0, torch.zeros_like(total), total)


def _full_norm(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], elsewhere: dict[int, Any]
) -> torch.Tensor:
    """The 2-norm over all ranks: squares are added up over the groups that a gradient is sharded over, and only those.

    One collective for all gradients that are sharded over the same groups. The groups are found from all parameters, those
    without gradients here included.
    """
    groups: dict[tuple[str, ...], tuple[Any, ...]] = {}
    norms: dict[tuple[str, ...], list[torch.Tensor]] = {}
    given = {id(param) for param in params}
    device = next((local(param).device for group in optimizer.param_groups for param in group["params"]), None)
    wide = torch.float32 if device is not None and device.type == "mps" else torch.float64
    for group in optimizer.param_groups:
        for param in group["params"]:
            over = _sharded_over(param, elsewhere)
            key = tuple(each.group_name for each in over)
            groups[key] = over
            norms.setdefault(key, [])
            if id(param) in given:
                part = local(param.grad)
                part = part.float() if part.dtype in LOW else part
                norms[key].append(torch.linalg.vector_norm(part).to(device, wide))
    total = torch.zeros((), dtype=wide, device=device)
    for key, over in groups.items():
        squares = torch.stack(norms[key]).square().sum() if norms[key] else torch.zeros((), dtype=wide, device=device)
        total = total + all_reduce(squares, over, dist.ReduceOp.SUM)
    return total.sqrt().to(torch.float32)


def _sharded_over(param: torch.Tensor, elsewhere: dict[int, Any]) -> tuple[Any, ...]:
    """The groups along which each rank holds another part of a gradient."""
    if not is_dtensor(param):
        group = elsewhere.get(id(param))
        return () if group is None else (group,)
    source: Any = param if param.grad is None else param.grad
    return tuple(
        group
        for dim, placement in enumerate(source.placements)
        if not placement.is_replicate() and (group := source.device_mesh.get_group(dim)).size() > 1
    )


def _sharded_by_fsdp1(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """FSDP1's parameters are plain tensors that hold a shard: the group of each, by the parameter's id."""
    modules: Iterable[Any] = (module for each in attachments(optimizer).wrappers if (module := each()) is not None)
    found: dict[int, Any] = {}
    for module in modules:
        handle = getattr(module, "_handle", None) if is_fsdp1(module) else None
        if handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            for param in (flat, *(flat._params or () if handle._use_orig_params else ())):
                found[id(param)] = module.process_group
    return found
