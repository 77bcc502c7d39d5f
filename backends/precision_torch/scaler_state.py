"""What a scaler remembers, behind ``torch.amp.GradScaler``'s interface: state, settings, saving; moved by the neutral rule."""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from precision.divergence import NonFiniteTensor
from precision.errors import LossScaleError, StateError
from precision.loss_scale import LossScale, LossScaleState, next_state, state_to_dict
from precision_torch.agreement import Group, require_group
from precision_torch.loss_scaler import HostOps, TorchLossScaler

_HOST_OPS = HostOps()


class ScalerState(torch.amp.GradScaler):
    """A native scaler whose state and settings are the neutral ones; the calls of an iteration are the subclass's."""

    def __init__(self, config: LossScale, device: torch.device | str = "cpu", process_group: Group = None) -> None:
        require_group(process_group)
        where = torch.device(device)
        super().__init__(device=where.type, enabled=config.mode != "none", init_scale=config.initial_scale)
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        self._scaler = TorchLossScaler(config, where)
        self._group = process_group
        self._scaled = False  # whether a loss was scaled since the last update
        self._updates = 0  # since max_consecutive_skips was last looked at
        self._set_state(self._scaler.init(), config.initial_scale)

    @property
    def config(self) -> LossScale:
        """The loss-scale settings."""
        return self._scaler.config

    @property
    def state(self) -> LossScaleState:
        """The state as 0-d tensors on the device; updated in place by :meth:`update`."""
        return self._state

    def _set_state(self, state: LossScaleState, scale: float) -> None:
        self._state = state
        self._scale, self._growth_tracker = state.scale, state.good_steps  # where the base class looks
        on_cpu = self._scaler.device.type == "cpu"
        self._views = LossScaleState(*(field.numpy() for field in state)) if on_cpu else None
        self._scale_floor = scale  # a bound from below on the scale, known without reading the device

    def state_dict(self) -> dict[str, float | int]:
        """The neutral flat dict, the same on every backend; see :func:`precision.loss_scale.state_to_dict`."""
        return state_to_dict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state saved under any backend, or that of a native ``GradScaler``; the settings stay the policy's.

        Raises:
            StateError: not a loss-scale state, truncated, or of another version. Nothing is changed then.
        """
        if not self._enabled and not state_dict:  # what a disabled native scaler saves
            return
        if not state_dict:
            raise StateError(
                "the saved state is empty: it was saved from a disabled GradScaler, which has no scale. Start from a "
                "fresh state instead of loading it."
            )
        loaded = self._scaler.load_state_dict(state_dict)
        scale = float(loaded.scale)
        with torch.no_grad():
            for mine, new in zip(self._state, loaded, strict=True):
                mine.copy_(new)
        self._scale_floor = scale
        self._updates = 0  # on every rank alike
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states or self._scaled:
            raise LossScaleError("copy or pickle the scaler after update(), not within an iteration.")
        if self._group not in (None, "none"):
            raise LossScaleError(
                "a scaler with a process group cannot be copied or pickled, as the group cannot. Save its state_dict()."
            )
        return {
            "config": self.config, "device": self._scaler.device, "process_group": self._group, "state": self.state_dict(),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"], state["device"], state["process_group"])  # type: ignore[misc]
        self.load_state_dict(state["state"])

    def _advance(self, found: torch.Tensor, skipped: bool | None) -> None:
        """Move the state by the rule, in place and without reading it from a device.

        On the CPU the tensors' memory is at hand: NumPy scalars apply the rule to it, many times faster than torch.
        """
        if self._views is not None:
            finite = not skipped if skipped is not None else found.numpy()[()] == 0
            scalars = LossScaleState._make([view[()] for view in self._views])
            with np.errstate(over="ignore"):  # a growth factor that overflows before the maximum cuts it
                moved = next_state(self._scaler.config, scalars, finite, _HOST_OPS)
            for view, value in zip(self._views, moved, strict=True):
                view[...] = value
            return
        with torch.no_grad():
            new = next_state(self.config, self._state, found == 0, self._scaler.xp)
            torch._foreach_copy_(list(self._state), list(new))

    def _replace_scale(self, new_scale: float | torch.Tensor) -> None:
        config = self.config
        if config.mode != "dynamic":
            raise LossScaleError("the scale is fixed by loss_scale.mode 'static'; change the policy instead.")
        if isinstance(new_scale, torch.Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise LossScaleError("new_scale must be a number, or a one-element tensor that needs no gradient.")
            value = new_scale.detach().reshape(()).to(self._state.scale, non_blocking=True)
            bounded = value.clamp(config.minimum, config.maximum)
            self._state.scale.copy_(torch.where(value.isfinite(), bounded, self._state.scale))
            self._scale_floor = config.minimum
            return
        number = isinstance(new_scale, numbers.Real) and not isinstance(new_scale, bool)
        if not number or not config.minimum <= new_scale <= config.maximum:
            raise LossScaleError(
                f"new_scale {new_scale!r} is outside [minimum, maximum] = [{config.minimum!r}, {config.maximum!r}]."
            )
        self._state.scale.fill_(new_scale)
        self._scale_floor = float(new_scale)

    def _begin(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._scaled = False

    def _check_skips(self, tensors: Callable[[], Iterable[NonFiniteTensor]]) -> None:
        limit = self.config.max_consecutive_skips
        if limit is None:
            return
        self._updates += 1
        if self._updates >= limit:
            self._updates = 0
            self._scaler.check(self._state, tensors)

    # ---- settings, as GradScaler gives them ----------------------------------------------------------------------

    def get_growth_factor(self) -> float:
        """The policy's ``growth_factor``."""
        return self.config.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change ``growth_factor``. Raises ``PolicyError`` if it is out of range."""
        self._scaler.config = self.config.with_(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The policy's ``backoff_factor``."""
        return self.config.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change ``backoff_factor``. Raises ``PolicyError`` if it is out of range."""
        self._scaler.config = self.config.with_(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """The policy's ``growth_interval``, in finite steps."""
        return self.config.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change ``growth_interval``. Raises ``PolicyError`` if it is out of range."""
        self._scaler.config = self.config.with_(growth_interval=new_interval)

    def __repr__(self) -> str:  # reads nothing from the device
        return f"PrecisionGradScaler({self.config!r}, device={str(self._scaler.device)!r})"
