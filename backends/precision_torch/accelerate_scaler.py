"""The scaler that an ``Accelerator`` under our policy has: Accelerate steps and updates it after every optimizer.

Needs the package ``accelerate``; it is what :mod:`precision_torch.accelerate_policy` puts in ``accelerator.scaler``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from precision.errors import LossScaleError
from precision.loss_scale import LossScale
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.iterations import Iterations
from precision_torch.step_result import StepResult


class AcceleratorScaler(PrecisionGradScaler):
    """A :class:`PrecisionGradScaler` for ``AcceleratedOptimizer``, which calls ``step`` and ``update`` for every optimizer.

    The scale is updated once an iteration, when no gradient waits for another optimizer's step. A step that is left out is
    never begun, for fused optimizers too: Accelerate sees by that whether it was skipped, and its schedulers wait.

    Args:
        config: the loss-scale settings of a policy.
        device: where the scale and the counters live.
    """

    def __init__(self, config: LossScale, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self.iterations = Iterations(_Plain(self))  # type: ignore[arg-type]

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale. A new backward begins: an update that was due is done first."""
        return self.iterations.scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale an optimizer's gradients, unless it was done since its last step."""
        self.iterations.unscale(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Unscale (unless done), step or skip, and update the scale if the iteration ends with it.

        Raises:
            LossScaleError: nothing was scaled, no gradients, or a closure.
        """
        if any(arg is not None for arg in (*args, kwargs.pop("closure", None))):
            raise LossScaleError("closures are not supported with loss scaling: the loss inside would not be scaled.")
        return self.iterations.step(optimizer, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Nothing: :meth:`step` has updated the scale, or will when the iteration ends. With ``new_scale`` it is set."""
        if new_scale is not None:
            self.iterations.settle()
            super().update(new_scale)

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has stepped since the last backward, so that its gradients are used up."""
        return self.iterations._stage(optimizer) is OptState.STEPPED

    def state_dict(self) -> dict[str, float | int]:
        """The neutral flat dict, after an update that is due."""
        self.iterations.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state saved under any backend, or that of a native ``GradScaler``."""
        super().load_state_dict(state_dict)
        self.iterations.pending = False

    def _step_fused(self, optimizer: Any, found: torch.Tensor, args: Any, kwargs: Any) -> StepResult:
        if bool(found.item()):
            return StepResult(None, taken=False)
        return super()._step_fused(optimizer, found, args, kwargs)


class _Plain:
    """The scaler without what is overridden above, for what steps the optimizers."""

    def __init__(self, scaler: AcceleratorScaler) -> None:
        self._of = scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def scale(self, loss: Any) -> Any:
        return PrecisionGradScaler.scale(self._of, loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        PrecisionGradScaler.unscale_(self._of, optimizer)

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> StepResult:
        return PrecisionGradScaler.step(self._of, optimizer, **kwargs)

    def update(self) -> None:
        PrecisionGradScaler.update(self._of)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_of":
            object.__setattr__(self, name, value)
        else:
            setattr(self._of, name, value)
