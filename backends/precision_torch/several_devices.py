"""What a policy in PyTorch offers for several devices: FSDP2, DDP's communication hook, checkpoints; mixed into ``TorchPolicy``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from precision.divergence import NonFiniteTensor
from precision.policy import PrecisionPolicy
from precision_torch import fsdp
from precision_torch.agreement import groups_of_optimizer
from precision_torch.checkpoints import Checkpoints
from precision_torch.comm_hooks import register_comm_hook
from precision_torch.nonfinite import named_gradients, nonfinite_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class SeveralDevices:
    """The part of :class:`~precision_torch.bound.TorchPolicy` that is about more than one device."""

    policy: PrecisionPolicy
    process_group: Any
    compute_dtype: torch.dtype
    output_dtype: torch.dtype

    def fsdp_policy(self, *, root: bool = False, cast_forward_inputs: bool = True) -> MixedPrecisionPolicy:
        """The policy in FSDP2's words, for ``torch.distributed.fsdp.fully_shard(module, mp_policy=...)``.

        ``param_dtype`` is the policy's ``compute_dtype`` (what is gathered and computed in; what is kept and updated is the
        sharded parameter, in float32), ``reduce_dtype`` is its ``reduce_dtype``. Buffers are neither sharded nor cast.
        FSDP2 takes one policy a call: :meth:`fully_shard` makes the calls that norms and rules need.

        Args:
            root: whether it is for the whole model, whose results leave in ``output_dtype``.
            cast_forward_inputs: whether floating inputs are cast to the compute dtype.

        Raises:
            UnsupportedError: ``param_dtype`` is low: the sharded parameters are the master weights.
            PolicyError: gradients would be reduced in float16, with nobody looking for infinities.
        """
        fsdp.require_float32_storage(self.policy)
        return fsdp.fsdp_policy(
            self.policy,
            compute=self.compute_dtype,
            output=self.output_dtype if root else None,
            cast_forward_inputs=cast_forward_inputs,
        )

    def fully_shard(
        self, model: torch.nn.Module, units: Iterable[torch.nn.Module] = (), **kwargs: Any
    ) -> torch.nn.Module:
        """``torch.distributed.fsdp.fully_shard`` on units and then the model, in place, in the policy's dtypes.

        Norm layers are gathered and computed in float32, modules under a rule in the rule's dtype: those of a unit form one
        more group (one more gather) a dtype. Then make the optimizer, and call :meth:`prepare`.

        Args:
            model: the model, with float32 parameters.
            units: the modules that are gathered and freed one after the other, such as ``model.layers``.
            kwargs: ``mesh``, ``reshard_after_forward``, ``offload_policy`` and so on, for each call.

        Returns:
            The same model.

        Raises:
            UnsupportedError: ``param_dtype`` is low.
            PolicyError: ``mp_policy`` is given, units are not the model's, or it is sharded already.
        """
        return fsdp.fully_shard(self.policy, model, units, **kwargs)

    def register_comm_hook(self, ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
        """Make a DDP model reduce its gradients in the policy's ``reduce_dtype``; :meth:`prepare` does it as well.

        Gradients in that dtype need no hook. Wider ones are narrowed after they were divided, so that only a mean that
        overflows does; the loss scaler sees the infinity. Low parameters' gradients are added up in the wider dtype.

        Returns:
            Whether a hook was needed.

        Raises:
            PolicyError: not a DDP model, a hook is there already, or float16 without loss scaling.
            UnsupportedError: the model has a ``mixed_precision`` of DDP's own.
        """
        return register_comm_hook(self.policy, ddp)

    def nonfinite_gradients(self, *optimizers: torch.optim.Optimizer) -> list[NonFiniteTensor]:
        """The first gradients of optimizers that hold NaN or infinity, on any rank. Reads the device; all ranks call it."""
        found: list[NonFiniteTensor] = []
        for optimizer in optimizers:
            native = getattr(optimizer, "_precision_inner", optimizer)
            groups = groups_of_optimizer(native, self.process_group)
            found += nonfinite_tensors(named_gradients([native]), groups)
        return found

    def checkpoints(
        self, directory: str | os.PathLike[str], keep: int | None = None, *, process_group: Any = None
    ) -> Checkpoints:
        """Checkpoints of a run in a folder: whole after a kill at any moment, and for any number of ranks.

        Args:
            directory: a folder that all ranks see; made when the first checkpoint is saved.
            keep: how many complete checkpoints to keep; None keeps all.
            process_group: the ranks that save together; None for all.

        Returns:
            A :class:`Checkpoints`: ``save(step, model, optimizer, extra=...)``, ``restore(model, optimizer)``, ``steps()``.
        """
        return Checkpoints(self, directory, keep, process_group)
