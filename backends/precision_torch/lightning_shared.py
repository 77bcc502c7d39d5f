"""What the Lightning plugins of ``Trainer`` and ``Fabric`` share: the policy, bound once the device is known, and its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch

from precision.config import resolve_policy
from precision.errors import PolicyError, UnsupportedError
from precision.interop.lightning import nearest_string
from precision.policy import PrecisionPolicy
from precision.registry import bind
from precision_torch.attachments import attachments
from precision_torch.bound import TorchPolicy
from precision_torch.dtypes import LOW, TORCH
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.iterations import Iterations
from precision_torch.skipped_state import Which


class LightningPlugin:
    """What both plugins share: the policy, bound once the device is known; the scaler; and its state."""

    def __init__(
        self,
        policy: PrecisionPolicy | str | PathLike[str],
        *,
        device: torch.device | str | None = None,
        master_weights: bool | None = None,
        restore_on_skip: Which = "batch_norm",
    ) -> None:
        self.policy = resolve_policy(policy)
        self.precision: Any = nearest_string(self.policy)
        self.master_weights = master_weights
        self.restore_on_skip = restore_on_skip
        self._device = device
        self._mp: TorchPolicy | None = None
        self._iterations: Iterations | None = None
        self._loaded: Mapping[str, Any] | None = None
        if device is not None:
            self.bind(device)

    def bind(self, device: torch.device | str) -> TorchPolicy:
        """The policy bound to a device; Lightning's is taken where none was given.

        Raises:
            UnsupportedError: the device cannot do what the policy asks, or is of another type than the one given.
        """
        where = torch.device(self._device if self._device is not None else device)
        if where.type != torch.device(device).type:
            raise UnsupportedError(
                f"the plugin was made for {where.type}, and the model is on {torch.device(device).type}."
            )
        if self._mp is None or self._mp.device.type != where.type:
            state = {} if self._iterations is None else self.state_dict()
            bound: TorchPolicy = bind(self.policy, "torch", device=where)  # type: ignore[assignment]
            self._mp, self._iterations = bound, Iterations(bound.grad_scaler())
            if saved := self._loaded or state:
                self._loaded = None
                self._iterations.scaler.load_state_dict(saved)
        return self._mp

    @property
    def mp(self) -> TorchPolicy:
        """The bound policy. Raises ``PolicyError`` before Lightning has set up the model."""
        if self._mp is None:
            raise PolicyError(
                "the plugin is bound when Lightning sets up the model; give it device= to have it before."
            )
        return self._mp

    @property
    def iterations(self) -> Iterations:
        """What steps the optimizers."""
        if self._iterations is None:
            raise PolicyError(
                "the plugin is bound when Lightning sets up the model; give it device= to have it before."
            )
        return self._iterations

    @property
    def scaler(self) -> PrecisionGradScaler:
        """The scaler; its ``state`` has the scale and the counters."""
        return self.iterations.scaler

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The parameters that the optimizer updates, with their gradients: float32 masters where there are any."""
        inner = unwrapped(optimizer)
        masters = attachments(inner).masters
        if masters is not None:
            masters.pull()
        for group in inner.param_groups:
            yield from group["params"]

    def state_dict(self) -> dict[str, Any]:
        """The loss scale's state: plain numbers, the same as every backend's. Empty without loss scaling."""
        if self._iterations is None:
            return dict(self._loaded or {})
        self._iterations.settle()
        return self.scaler.state_dict() if self.scaler.is_enabled() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of a native ``GradScaler``.

        Raises:
            StateError: not a loss-scale state.
        """
        if self._iterations is None:
            self._loaded = dict(state_dict)
        elif state_dict or self.scaler.is_enabled():
            self._iterations.pending = False
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Do an update that is due."""
        if self._iterations is not None:
            self._iterations.settle()

    def require_no_closure(self, optimizer: torch.optim.Optimizer) -> None:
        if self.policy.loss_scale.mode != "none" and isinstance(unwrapped(optimizer), torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS computes the loss several times a step, which cannot be skipped as one. Use bfloat16 with "
                "loss_scale.mode 'none', or another optimizer."
            )


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer in one that Lightning or we have wrapped."""
    for name in ("_precision_inner", "_optimizer"):
        optimizer = getattr(optimizer, name, optimizer)
    return optimizer


def to_cast(policy: PrecisionPolicy, module: torch.nn.Module, *, trained: bool = False) -> list[str]:
    """The parameters that preparing would cast; only those that are trained and become low, if asked."""
    found = []
    for name, param in module.named_parameters():
        rule = policy.rule_for(name)
        low = None if policy.param_dtype == "float32" else TORCH[policy.param_dtype]
        dtype = low if rule is None else TORCH[rule.dtype]
        if dtype is None or not param.is_floating_point():
            continue
        if (param.requires_grad and dtype in LOW) if trained else param.dtype is not dtype:
            found.append(name)
    return found
