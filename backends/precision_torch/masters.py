"""Float32 master weights for low-precision parameters: the optimizer updates the masters, the model holds rounded copies.

The gradient of a low-precision parameter is kept in float32 (``Tensor.grad_dtype``), so it accumulates in float32, and the
master's ``.grad`` is that same tensor: clipping through the model's parameters or through the optimizer's is the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from precision.errors import MasterWeightsError, StateError
from precision_torch.dtypes import LOW, dtype_name

STATE_KEY = "precision_master_weights"
"""The key under which the optimizer's state dict holds the masters."""


class MasterWeights:
    """The pairs of low-precision parameter and float32 master of one optimizer.

    Made by ``mp.prepare(model, optimizer, master_weights=True)``. The optimizer's own ``step``, ``zero_grad``,
    ``state_dict`` and ``load_state_dict`` keep both sides together. A parameter that was changed in place since the last
    step (loaded, initialised, clamped) is taken over by its master; a change through ``.data`` cannot be seen.

    Args:
        optimizer: the optimizer; :meth:`add` changes its parameter groups and state to hold the masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.names: list[str] = []
        self.low: list[torch.nn.Parameter] = []
        self.high: list[torch.nn.Parameter] = []
        self._versions: list[int] = []  # of the low ones, when they were last known to be their master rounded
        optimizer.zero_grad = functools.partial(_zero_both, weakref.ref(optimizer), self)  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        originals: dict[torch.nn.Parameter, torch.Tensor],
        names: dict[torch.nn.Parameter, str],
    ) -> None:
        """Make masters for more parameters of the optimizer.

        Args:
            optimizer: the optimizer.
            originals: for each low-precision parameter of the optimizer, its values before they were rounded.
            names: for each, its name in the model. A name that is taken (by another model) gets a number.
        """
        for group in optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if param in originals:
                    group["params"][i] = self._add(optimizer, param, originals[param], names[param])

    def _add(
        self, optimizer: torch.optim.Optimizer, low: torch.nn.Parameter, original: torch.Tensor, name: str
    ) -> torch.nn.Parameter:
        high = torch.nn.Parameter(original.detach().to(torch.float32, copy=True))
        low.grad = None
        low.grad_dtype = torch.float32
        if low in optimizer.state:
            state = optimizer.state.pop(low)
            optimizer.state[high] = {
                key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for key, value in state.items()
            }
        taken = sum(known == name or known.startswith(f"{name}#") for known in self.names)
        self.names.append(f"{name}#{taken + 1}" if taken else name)
        self.low.append(low)
        self.high.append(high)
        self._versions.append(low._version)
        return high

    def pull(self) -> None:
        """Let every master have its parameter's gradient (the same float32 tensor)."""
        for name, low, high in zip(self.names, self.low, self.high, strict=True):
            if low.device != high.device:
                raise MasterWeightsError(
                    f"parameter {name} was moved from {high.device} to {low.device} after mp.prepare made its master "
                    "weights. Move the model first, then make the optimizer and call mp.prepare."
                )
            if low.grad is not None and low.grad.dtype in LOW:  # DistributedDataParallel's, whose buckets are low
                low.grad = low.grad.float()
            high.grad = low.grad

    @torch.no_grad()
    def push(self) -> None:
        """Round the masters into the model's parameters."""
        torch._foreach_copy_(self.low, self.high)
        self._versions = [low._version for low in self.low]

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over parameters that were changed in place and are no longer their master rounded."""
        for i, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if low._version != self._versions[i]:
                high.copy_(torch.where(low == high.to(low.dtype), high, low.to(high.dtype)))
                self._versions[i] = low._version

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if param.dtype in LOW and param.grad is not None:
                    raise MasterWeightsError(
                        f"param_groups[{g}]['params'][{i}] (shape {tuple(param.shape)}) is {dtype_name(param.dtype)} and "
                        "has no master weights, unlike others of this optimizer: it was added or unfrozen after "
                        "mp.prepare. Call mp.prepare(model, optimizer, master_weights=True) again."
                    )
        self.adopt()
        self.pull()
        # a closure computes gradients of the model, at the weights the optimizer has come to
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._around(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._around(kwargs["closure"])}
        return None

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def run() -> Any:
            self.push()
            loss = closure()
            self.pull()
            return loss

        return run

    def _after_step(self, *_: Any) -> None:
        self.push()

    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self.adopt()
        state_dict[STATE_KEY] = {name: high.detach() for name, high in zip(self.names, self.high, strict=True)}

    @torch.no_grad()
    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get(STATE_KEY)
        if saved is None:
            return
        if missing := [name for name in self.names if name not in saved]:
            raise StateError(f"the optimizer's state dict lacks the master weights of {', '.join(missing)}.")
        for name, high in zip(self.names, self.high, strict=True):
            if saved[name].shape != high.shape:
                raise StateError(
                    f"the saved master weight of {name} has shape {tuple(saved[name].shape)}, the parameter "
                    f"{tuple(high.shape)}."
                )
        for name, high in zip(self.names, self.high, strict=True):
            high.copy_(saved[name])
        self.push()


def _zero_both(optimizer: Any, masters: MasterWeights, set_to_none: bool = True) -> None:
    """``optimizer.zero_grad`` for masters and parameters, which share their gradients."""
    masters.pull()
    type(optimizer()).zero_grad(optimizer(), set_to_none)
    for low in masters.low:
        if set_to_none or low.grad_dtype is None:  # DistributedDataParallel wants the next one low again
            low.grad = None


class AdoptOnLoad:
    """A load-state-dict hook of the model; it does not follow the model into its copies and pickles."""

    def __init__(self, masters: MasterWeights | None) -> None:
        self._masters = None if masters is None else weakref.ref(masters)

    def __call__(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        masters = None if self._masters is None else self._masters()
        if masters is not None:
            masters.adopt()

    def __reduce__(self) -> tuple[Any, ...]:
        return (AdoptOnLoad, (None,))
