"""``mp.optimizer``: a ``torch.optim.Optimizer`` around another, whose ``step`` unscales, clips, skips and updates the scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precision.errors import LossScaleError
from precision_torch.clipping import clip, require_clip
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.step_result import StepResult

LOSS_SCALE = "loss_scale"
"""The key under which the state dict holds the scaler's state."""


class ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the loss and leaves out non-finite steps. Made by ``mp.optimizer(native)``.

    It shares groups, state and defaults with the optimizer inside, so learning-rate schedulers work on it.

    Args:
        inner: the native optimizer.
        scaler: the scaler that scales the loss.
        clip_norm: the gradients' total norm is clipped to this, after unscaling.
        clip_value: gradients are clamped to plus or minus this, after unscaling.

    Example:
        >>> import precision, torch
        >>> mp = precision.bind("mixed_float16", backend="torch", device="cpu")
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> optimizer = mp.optimizer(torch.optim.SGD([weight], lr=0.25))
        >>> optimizer.backward(weight**2)
        >>> optimizer.step().taken, weight.item()
        (True, 0.5)
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        scaler: PrecisionGradScaler,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        # Not Optimizer.__init__: everything it sets up is the inner optimizer's.
        require_clip(clip_norm, clip_value)
        self._precision_inner = inner
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.clip_value = clip_value

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The native optimizer."""
        return self._precision_inner

    def scale(self, loss: Any) -> Any:
        """The loss times the scale, to call ``backward`` on."""
        return self.scaler.scale(loss)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward(...)`` on the scaled loss."""
        self.scaler.scale(loss).backward(**kwargs)

    def step(self, closure: Any = None) -> StepResult:  # type: ignore[override]
        """Unscale, clip, step if all gradients are finite, and update the scale.

        Raises:
            LossScaleError: the loss was not scaled (by ``backward``, ``scale`` or ``mp.backward``). Two optimizers that
                share a loss step together: ``mp.step(a, b)``.
        """
        if closure is not None and self.scaler.is_enabled():
            raise LossScaleError("closures are not supported with loss scaling: the loss inside would not be scaled.")
        if closure is not None and (self.clip_norm is not None or self.clip_value is not None):
            raise LossScaleError(
                "gradients made by a closure are not clipped here: clip them at the end of the closure."
            )
        inner = self._precision_inner
        if self.scaler.is_enabled():
            self.scaler.unscale_(inner)
        clip(inner, self.clip_norm, self.clip_value, self.scaler._flag(inner))
        result = self.scaler.step(inner) if closure is None else self.scaler.step(inner, closure)
        self.scaler.update()
        return result

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with the loss-scale state under ``"loss_scale"``."""
        return {**self._precision_inner.state_dict(), LOSS_SCALE: self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what :meth:`state_dict` gave, or a native optimizer's state dict (the loss scale then stays)."""
        rest = dict(state_dict)
        saved = rest.pop(LOSS_SCALE, None)
        if saved is not None:
            self.scaler.load_state_dict(saved)
        self._precision_inner.load_state_dict(rest)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's ``zero_grad``."""
        self._precision_inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The inner optimizer's ``add_param_group``."""
        self._precision_inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self._precision_inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self._precision_inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self._precision_inner.defaults

    def __getattr__(self, name: str) -> Any:  # hooks and whatever else the inner one has
        if name.startswith("__") or name == "_precision_inner":
            raise AttributeError(name)
        return getattr(self._precision_inner, name)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_precision_inner", "scaler", "clip_norm", "clip_value")  # not a scheduler's patch of step
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ScaledOptimizer({self._precision_inner!r})"
