"""Agreement on the finite flag: the MAX of 0/1 over the ranks that train together, in one small collective for a step.

Without it a rank that alone saw an overflow skips alone, and the ranks part ways without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from precision.errors import LossScaleError, PolicyError, UnsupportedError
from precision_torch.attachments import attachments
from precision_torch.engines import distributed, dtensor_type

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | Literal['none'] | None"
"""Who agrees: a process group or a device mesh; None for those found from the parameters; ``"none"`` for nobody."""

Groups: TypeAlias = "tuple[Any, ...]"
"""Process groups of several ranks, to be gone through in order."""


def require_group(group: Any) -> None:
    """Refuse what is no process group. Raises ``PolicyError``."""
    if group is None or group == "none" or hasattr(group, "get_all_groups"):
        return
    if dist.is_available() and (isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        return
    raise PolicyError(
        "process_group is a torch.distributed process group or DeviceMesh, None (found from the model), or 'none' (every "
        f"process for itself); not {group!r}."
    )


def groups_of_optimizer(optimizer: torch.optim.Optimizer, given: Any) -> Groups:
    """The groups over which an optimizer's flag is agreed on; empty for a process by itself.

    Found from its parameters, not from their gradients, so that a rank without gradients knows them as well: the whole
    meshes of DTensors, and the process groups of the DDP or FSDP1 model it was prepared with. Plain parameters that were
    prepared with neither may be replicated anywhere: for them all ranks agree.

    Args:
        optimizer: the optimizer.
        given: a group, a mesh or ``"none"``; None to find them.

    Raises:
        UnsupportedError: the model is inside ``ddp.join()``, where some ranks no longer step.
    """
    if not distributed() or given == "none":
        return ()
    if given is not None:
        return _of(given)
    attached = attachments(optimizer)
    kind = dtensor_type()
    found: dict[str, Any] = {}
    meshes: dict[int, Any] = {}
    plain = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            if kind is not None and isinstance(param, kind):
                meshes.setdefault(id(param.device_mesh), param.device_mesh)  # type: ignore[attr-defined]
            else:
                plain = True
    for mesh in meshes.values():
        _add(found, _whole(mesh))
    wrappers = [wrapper for each in attached.wrappers if (wrapper := each()) is not None]
    for wrapper in wrappers:
        _refuse_join(wrapper)
        _add(found, _of_wrapper(wrapper))
    if (plain and not wrappers) or not found:
        return (dist.group.WORLD,)
    return _simplest(found)


def groups_of_tensors(tensors: Iterable[torch.Tensor], given: Any) -> Groups:
    """The groups for a tree of gradients: the one given, or the whole meshes of the DTensors among them."""
    if not distributed() or given == "none":
        return ()
    if given is not None:
        return _of(given)
    kind = dtensor_type()
    found: dict[str, Any] = {}
    for tensor in tensors:
        if kind is not None and isinstance(tensor, kind):
            _add(found, _whole(tensor.device_mesh))  # type: ignore[attr-defined]
    return _simplest(found)


def agree(flags: Sequence[torch.Tensor | None], groups: Groups, device: torch.device) -> list[torch.Tensor]:
    """Take the maximum of each flag over the ranks of the groups, all flags in one collective a group.

    Args:
        flags: float32 scalars on ``device``, 1 where something is not finite; None where this rank has no gradients.
        groups: gone through in order.
        device: where the results are.

    Returns:
        The agreed flags, as float32 scalars. Nothing is read on the host, but by a rank that has no gradients.

    Raises:
        LossScaleError: no rank has any gradients (raised on all of them).
    """
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    payload = torch.stack([part for flag in flags for part in ((zero, zero) if flag is None else (flag, one))])
    payload = all_reduce(payload, groups, dist.ReduceOp.MAX)
    found, has = payload[0::2], payload[1::2]
    for i, flag in enumerate(flags):
        if flag is None and not bool(has[i]):
            raise LossScaleError(
                "the optimizer has no gradients, on any rank: call scale(loss).backward() before step()."
            )
    return list(found.unbind())


def all_reduce(tensor: torch.Tensor, groups: Groups, op: Any) -> torch.Tensor:
    """Reduce a small tensor over groups in order, on a device that each of them can work on; back on its own device."""
    own = tensor.device
    for group in groups:
        where = device_for(group, own)
        tensor = tensor.to(where)
        dist.all_reduce(tensor, op=op, group=group)
    return tensor.to(own)


def device_for(group: Any, preferred: torch.device) -> torch.device:
    """A device that a group's backend works on: the preferred one where it does (NCCL does not on the CPU)."""
    kinds = [device.type for device in group._device_types]
    if preferred.type in kinds or not kinds:
        return preferred
    kind = kinds[0]
    return torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device(kind)


def _of(given: Any) -> Groups:
    if hasattr(given, "get_all_groups"):
        found: dict[str, Any] = {}
        _add(found, _of_mesh(given))
        return _simplest(found)
    return (given,) if _counts(given) else ()


def _of_mesh(mesh: Any) -> list[Any]:
    if mesh.get_coordinate() is None:  # this rank is not in it
        return []
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return list(mesh.get_all_groups())


def _whole(mesh: Any) -> list[Any]:
    """Of the mesh that a mesh is a part of: replicas along its other dimensions must skip the same steps too."""
    return _of_mesh(mesh._get_root_mesh())


def _of_wrapper(wrapper: Any) -> list[Any]:
    if isinstance(wrapper, DistributedDataParallel):
        mesh = getattr(wrapper, "device_mesh", None)
        return [wrapper.process_group] if mesh is None else _whole(mesh)
    mesh = wrapper.__dict__.get("_device_mesh")  # FSDP1 looks in the module inside for what it has not
    if mesh is not None:
        return _whole(mesh)
    return [group for name in ("process_group", "_inter_node_pg") if (group := wrapper.__dict__.get(name)) is not None]


def _add(found: dict[str, Any], groups: Iterable[Any]) -> None:
    for group in groups:
        if _counts(group):
            found.setdefault(group.group_name, group)


def _counts(group: Any) -> bool:
    """Whether there is anyone to agree with in a group, and this rank is in it."""
    return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0 and group.size() > 1


def _simplest(found: dict[str, Any]) -> Groups:
    everyone = dist.get_world_size()
    return next(((group,) for group in found.values() if group.size() == everyone), tuple(found.values()))


def _refuse_join(wrapper: Any) -> None:
    if isinstance(wrapper, DistributedDataParallel) and wrapper._join_config.enable:
        raise UnsupportedError(
            "a model inside join() goes on stepping on some ranks only, which the agreement on overflows would wait for. "
            "Give every rank as many batches, or bind with process_group='none' and leave it to DDP's own reduction to "
            "spread an overflow."
        )
