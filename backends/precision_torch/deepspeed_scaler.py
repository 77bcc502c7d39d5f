"""A DeepSpeed loss scaler that keeps the policy's rule. Needs the ``deepspeed`` package; imported only on request.

DeepSpeed's own grows one step late, unscales the step on which it grows with the grown scale (halving its gradients), scales
a float16 loss in float16, and ends the run at the minimum. Here the new scale takes effect at the next backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from precision.divergence import divergence_error
from precision.errors import BackendUnavailableError, LossScaleError
from precision.loss_scale import LossScale, LossScaleState, initial_state, next_state, state_from_dict, state_to_dict

try:
    from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
except ImportError as error:
    raise BackendUnavailableError(
        f"this needs DeepSpeed, which cannot be imported ({error}): pip install deepspeed"
    ) from error


class PolicyLossScaler(LossScalerBase):  # type: ignore[misc]
    """A loss scaler for DeepSpeed's ZeRO optimizers: ``optimizer.loss_scaler``.

    DeepSpeed itself finds the overflows and agrees on them over all ranks; this decides what the scale does then. The state
    is on the host, where DeepSpeed has the flag anyway, and is saved with the engine's checkpoints.

    Args:
        config: the policy's loss scale.

    Example:
        >>> scaler = PolicyLossScaler(LossScale(mode="dynamic", growth_interval=1))
        >>> scaler.update_scale(overflow=False)
        >>> scaler.cur_scale, float(scaler.scale_loss(torch.tensor(1.0))), scaler.cur_scale
        (65536.0, 131072.0, 131072.0)
    """

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self._used = self._next = initial_state(config)
        super().__init__(float(self._used.scale))
        self.dynamic = config.mode == "dynamic"

    def __repr__(self) -> str:
        return f"PolicyLossScaler({self.config!r}, scale={self.cur_scale!r})"

    @property
    def cur_scale(self) -> float:
        """The scale of the last backward pass, with which the step unscales."""
        return float(self._used.scale)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        low, high = (self.config.minimum, self.config.maximum) if self.config.mode == "dynamic" else (0.0, np.inf)
        if not low <= float(value) <= high:
            raise LossScaleError(f"the scale {value!r} lies outside [{low!r}, {high!r}], the bounds of the policy.")
        self._used = self._next = self._next._replace(scale=np.float32(value))

    @property
    def state(self) -> LossScaleState:
        """The state after the last step, as NumPy scalars; its scale is that of the next backward pass."""
        return self._next

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale, in float32 or its wider dtype."""
        self._used = self._next
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Scale a loss and run its backward pass."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: Any) -> None:
        """Move the scale on after a step; DeepSpeed calls it before it unscales that step.

        Raises:
            NonFiniteGradientsError: more steps in a row were skipped than the policy allows; on all ranks alike.
        """
        state = next_state(self.config, self._next, np.bool_(not overflow), np)  # type: ignore[arg-type]
        self._next = LossScaleState(np.float32(state.scale), *(np.int32(count) for count in state[1:]))
        limit = self.config.max_consecutive_skips
        if limit is not None and self._next.consecutive_skips > limit:
            raise divergence_error(self.config, self._next)

    def state_dict(self) -> dict[str, float | int]:
        """The state as plain numbers, the same on every backend."""
        return state_to_dict(self._next)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a state saved under any backend. Raises ``StateError`` if it is none."""
        self._used = self._next = state_from_dict(self.config, saved)
