"""The neutral, explicit-state loss scaler on torch tensors; pure, and traceable by ``torch.compile``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from precision.loss_scale import LossScale, LossScaler, LossScaleState
from precision_torch.agreement import Group, all_reduce, groups_of_tensors, require_group
from precision_torch.dtypes import LOW
from precision_torch.engines import local, reduced
from precision_torch.tree import map_tensors, tensors_of
from precision_torch.unscaling import combine, reciprocal, unscale_in_place, widened


class TorchOps:
    """``where``, ``minimum`` and ``maximum`` for :func:`precision.next_state`; the bounds are Python numbers."""

    where = staticmethod(torch.where)

    @staticmethod
    def minimum(x: torch.Tensor, y: float) -> torch.Tensor:
        return torch.clamp_max(x, y)

    @staticmethod
    def maximum(x: torch.Tensor, y: float) -> torch.Tensor:
        return torch.clamp_min(x, y)


class HostOps:
    """The same for NumPy scalars, where plain Python is faster than NumPy's functions."""

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    @staticmethod
    def minimum(x: Any, y: float) -> Any:
        return x if x <= y else type(x)(y)

    @staticmethod
    def maximum(x: Any, y: float) -> Any:
        return x if x >= y else type(x)(y)


def scale_tensor(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply a loss by the scale in float32, or in the loss's wider dtype."""
    if loss.dtype in LOW:
        loss = loss.to(torch.float32)
    return loss * (scale if scale.device == loss.device else scale.to(device=loss.device, non_blocking=True))


class TorchLossScaler(LossScaler):
    """:class:`precision.LossScaler` over torch tensors; see there for the calls.

    Args:
        config: the settings.
        device: where the state lives.
        process_group: the ranks that agree, unless :meth:`unscale` is given others.

    Example:
        >>> import precision, torch
        >>> scaler = precision.bind("mixed_float16", backend="torch", device="cpu").loss_scaler
        >>> state = scaler.init()
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> grads = torch.autograd.grad(scaler.scale(w**2, state), [w])
        >>> (grad,), finite = scaler.unscale(grads, state)
        >>> float(grad), bool(finite)
        (6.0, True)
        >>> state = scaler.update(state, finite)
    """

    xp = TorchOps()

    def __init__(self, config: LossScale, device: torch.device, process_group: Group = None) -> None:
        super().__init__(config)
        self.device = device
        self.process_group = process_group

    def from_host(self, state: LossScaleState) -> LossScaleState:
        """Turn NumPy scalars into 0-d tensors (float32, int32) on the device."""
        scale, *counters = state
        return LossScaleState(
            torch.tensor(float(scale), dtype=torch.float32, device=self.device),
            *(torch.tensor(int(count), dtype=torch.int32, device=self.device) for count in counters),
        )

    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """Multiply a loss, or a tree of losses, by the scale in float32 (or wider). Mode ``none``: as it is."""
        if self.config.mode == "none":
            return loss
        return map_tensors(lambda tensor, _: scale_tensor(tensor, state.scale), loss)

    def unscale(self, grads: Any, state: LossScaleState, *, process_group: Group = None) -> tuple[Any, torch.Tensor]:
        """Divide gradients by the scale and say whether all are finite, on all ranks of a group.

        Args:
            grads: a tree of tensors; or a module, whose parameters' ``.grad`` are taken (by parameter name). Nothing
                in it is changed. Integer and boolean tensors pass through.
            state: the state that scaled the loss.
            process_group: the ranks that agree: a process group or device mesh; they all make this call. Left out: those
                the scaler was made with, or else the meshes of the ``DTensor`` among the gradients; plain tensors alone
                tell of no ranks, and this process decides for itself.

        Returns:
            The tree with new tensors (float32, or the gradient's wider dtype), and a 0-d bool tensor.
        """
        require_group(process_group)
        if isinstance(grads, torch.nn.Module):
            grads = {name: p.grad for name, p in grads.named_parameters() if p.grad is not None}
        if self.config.mode == "none":
            return grads, torch.ones((), dtype=torch.bool, device=self.device)
        copies = map_tensors(lambda tensor, _: _copy(tensor), grads)
        tensors = [t for t in tensors_of(copies) if t.is_floating_point() or t.is_complex()]
        inexact = [widened(local(tensor)) for tensor in tensors]
        found = unscale_in_place(inexact, reciprocal(state.scale), check_result=True)
        groups = groups_of_tensors(tensors, self.process_group if process_group is None else process_group)
        flag = combine(found.values(), self.device) if found else torch.zeros((), device=self.device)
        if groups:
            flag = all_reduce(flag, groups, dist.ReduceOp.MAX)
        return copies, flag == 0

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """The state after a step; ``finite`` is a bool tensor or a Python bool."""
        if not isinstance(finite, torch.Tensor):
            finite = torch.tensor(bool(finite), device=self.device)
        return super().update(state, finite)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh float32 (or wider) copy of a floating or complex gradient; sparse ones coalesced in that dtype."""
    tensor = reduced(tensor)
    if tensor.dtype in LOW:
        copied = tensor.detach().to(torch.float32)
    elif tensor.dtype is torch.complex32:
        copied = tensor.detach().resolve_conj().to(torch.complex64)
    elif tensor.is_floating_point() or tensor.is_complex():
        copied = tensor.detach().resolve_conj().resolve_neg().clone()
    else:
        return tensor
    return copied.coalesce() if copied.layout is torch.sparse_coo else copied
