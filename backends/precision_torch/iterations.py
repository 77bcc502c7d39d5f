"""One scale update an iteration, for frameworks that step optimizers one by one and never say when an iteration ends.

Between the steps of two optimizers the scale must not move, or gradients already there are divided by another scale than they
were multiplied with. Where it must move meanwhile (a new backward begins), those gradients are carried over to the new scale.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from precision_torch.attachments import attachments
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.step_result import StepResult


class Iterations:
    """Steps optimizers with a scaler, and updates it when no gradient waits for another optimizer's step.

    Args:
        scaler: the scaler; with mode ``none`` everything passes through.

    Example:
        >>> import precision, torch
        >>> iterations = Iterations(precision.bind("mixed_float16", backend="torch", device="cpu").grad_scaler())
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> optimizer = torch.optim.SGD([weight], lr=0.25)
        >>> iterations.scale(weight**2).backward()
        >>> iterations.step(optimizer).taken, weight.item(), iterations.pending
        (True, 0.5, False)
    """

    def __init__(self, scaler: PrecisionGradScaler) -> None:
        self.scaler = scaler
        self.pending = False  # whether an optimizer has stepped and the scale was not updated yet
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._earlier = 0

    def watch(self, module: torch.nn.Module) -> None:
        """Look at a module's parameters for gradients that wait for a step."""
        if all(known() is not module for known in self._modules):
            self._modules.append(weakref.ref(module))

    def scale(self, loss: Any) -> Any:
        """The loss times the scale. A new backward begins, so an update that was due is done first.

        Gradients that were unscaled (to clip them) and wait for their step are multiplied by the scale again, as scaled ones
        will be added to them.
        """
        self.settle()
        self._scale_again()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale an optimizer's gradients, unless it was done since its last step."""
        if not self.scaler.is_enabled():
            return
        stage = self._stage(optimizer)
        if stage is OptState.STEPPED:
            # it steps again while another's gradients wait: its flag stays for the update that is due
            states = self.scaler._per_optimizer_states
            self._earlier -= 1  # no id is negative
            states[self._earlier] = states.pop(id(optimizer))
            stage = OptState.READY
        if stage is OptState.READY:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *, whole: bool = False, **kwargs: Any) -> StepResult:
        """Unscale (unless done) and step or skip.

        Args:
            optimizer: the optimizer.
            whole: whether it is the only one of this iteration, so that the scale is updated in any case.
            kwargs: for the optimizer's ``step``.
        """
        self.unscale(optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        if self.scaler.is_enabled():
            self.pending = True
            if whole or not (self._waiting() or self._unscaled()):
                self._update()
        return result

    def settle(self) -> None:
        """Do an update that is due. Scaled gradients that wait for a step are carried over to the new scale."""
        if not self.pending:
            return
        waiting = self._waiting()
        old = self.scaler.state.scale.clone() if waiting else None
        self._update()
        if old is not None:
            with torch.no_grad():
                ratio = self.scaler.state.scale / old
                for grad in waiting:
                    grad.mul_(ratio.to(grad.device))

    def _update(self) -> None:
        """Update the scale. Optimizers that were unscaled and not stepped stay so; their flags count in the next update."""
        self.pending = False
        states = self.scaler._per_optimizer_states
        kept = {key: states.pop(key) for key in self._unscaled()}
        self.scaler.update()
        if kept:
            self.scaler._per_optimizer_states.update(kept)
            self.scaler._scaled = True

    def _unscaled(self) -> list[int]:
        """The optimizers whose gradients were unscaled and wait for their step, as the scaler calls them."""
        states = self.scaler._per_optimizer_states
        return [key for key, s in states.items() if s["stage"] is OptState.UNSCALED and s["found_inf_per_device"]]

    def _scale_again(self) -> None:
        states = self.scaler._per_optimizer_states
        for key in self._unscaled():
            optimizer = states.pop(key)["optimizer"]
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        if param.grad is not None:
                            param.grad.mul_(self.scaler.state.scale.to(param.grad.device))

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        states = self.scaler._per_optimizer_states
        stage: OptState = states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY
        return stage

    def _waiting(self) -> list[torch.Tensor]:
        """The gradients, still scaled, of watched parameters whose optimizer has not stepped in this iteration."""
        done: set[int] = set()
        for state in self.scaler._per_optimizer_states.values():
            optimizer = state.get("optimizer")
            if optimizer is not None:
                done |= {id(param) for group in optimizer.param_groups for param in group["params"]}
                masters = attachments(optimizer).masters
                done |= {id(param) for param in masters.low} if masters is not None else set()
        seen: dict[int, torch.Tensor] = {}
        for known in self._modules:
            module = known()
            for param in () if module is None else module.parameters():
                if param.grad is not None and id(param) not in done:
                    seen[id(param)] = param.grad
        return list(seen.values())
