"""What PyTorch's engines do to a model and its tensors: wrappers and their names, DTensors and their meshes.

``torch.distributed.tensor`` is imported by whoever makes DTensors, never from here: without it there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What ``torch.compile``, FSDP1 and activation checkpointing put into the names of what is inside."""


def distributed() -> bool:
    """Whether this process belongs to a process group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def dtensor_type() -> type | None:
    """``DTensor``, if anything in this process can have made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: a ``DTensor``'s local tensor (sharing its memory), any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def reduced(grad: torch.Tensor) -> torch.Tensor:
    """A ``DTensor`` whose values still are to be added up over its mesh (``Partial``), added up; any other as it is.

    Parts that are finite may have a sum that is not, so a flag of the parts would not hold for what the optimizer gets.
    """
    placements = getattr(grad, "placements", None)
    if placements is None or not any(placement.is_partial() for placement in placements):
        return grad
    from torch.distributed.tensor import Replicate

    done = [Replicate() if placement.is_partial() else placement for placement in placements]
    return grad.redistribute(placements=done)  # type: ignore[attr-defined]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``DistributedDataParallel`` and ``torch.compile``; FSDP leaves or replaces the model itself."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


def canonical(name: str) -> str:
    """A parameter's or module's name as it was before the model was wrapped by anything inside it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def parameter_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """The canonical name of each parameter of a model; of a tied one the first."""
    return {param: canonical(name) for name, param in unwrapped(model).named_parameters()}


def wrappers_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that keep a process group: ``DistributedDataParallel`` and FSDP1."""
    fsdp1 = _fsdp1_type()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or (fsdp1 is not None and isinstance(module, fsdp1)):
            yield module


def ddp_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The outermost ``DistributedDataParallel`` in a model, if there is one."""
    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether a module is wrapped by FSDP1."""
    kind = _fsdp1_type()
    return kind is not None and isinstance(module, kind)


def _fsdp1_type() -> type | None:
    module = sys.modules.get("torch.distributed.fsdp")
    return None if module is None else getattr(module, "FullyShardedDataParallel", None)


def fsdp2_modules(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that ``fully_shard`` was applied to, by canonical name."""
    found = sys.modules.get("torch.distributed.fsdp")
    kind = None if found is None else getattr(found, "FSDPModule", None)
    if kind is None:
        return {}
    return {canonical(name): module for name, module in unwrapped(model).named_modules() if isinstance(module, kind)}
