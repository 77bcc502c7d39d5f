"""A ``torch.amp.GradScaler`` that follows the neutral loss-scale rule and keeps its counters on the device.

Whatever takes a ``GradScaler`` takes this one. Calls in an order that cannot be right are errors, not wrong numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from precision.divergence import NonFiniteTensor
from precision.errors import LossScaleError, MasterWeightsError
from precision_torch.agreement import Groups, agree, groups_of_optimizer
from precision_torch.attachments import attachments
from precision_torch.dtypes import LOW
from precision_torch.engines import dtensor_type, local, reduced
from precision_torch.loss_scaler import scale_tensor
from precision_torch.nonfinite import named_gradients, nonfinite_tensors
from precision_torch.scaler_state import ScalerState
from precision_torch.skipped_state import SkippedState
from precision_torch.step_result import StepResult
from precision_torch.tree import map_tensors
from precision_torch.unscaling import combine, reciprocal, unscale_in_place, widened


class PrecisionGradScaler(ScalerState):
    """A gradient scaler with floors, caps, hysteresis, and one update an iteration for any number of optimizers.

    Made by ``mp.grad_scaler()``. With mode ``none`` it is disabled and passes everything through.

    Args:
        config: the loss-scale settings of a policy.
        device: where the scale and the counters live.
        process_group: the ranks that agree on whether a step overflowed: a process group, a device mesh, None for those
            found from the model and its parameters, or ``"none"``.

    Example:
        >>> import precision, torch
        >>> scaler = precision.bind("mixed_float16", backend="torch", device="cpu").grad_scaler()
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> optimizer = torch.optim.SGD([weight], lr=0.25)
        >>> scaler.scale(weight**2).backward()
        >>> result = scaler.step(optimizer)
        >>> scaler.update()
        >>> result.taken, weight.item(), scaler.get_scale()
        (True, 0.5, 65536.0)
    """

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss (or an iterable or dict of losses) by the scale, in float32 whatever the loss's dtype."""
        if not self._enabled:
            return outputs
        self._scaled = True
        if isinstance(outputs, torch.Tensor):
            return scale_tensor(outputs, self._state.scale)
        if isinstance(outputs, (list, tuple, Mapping)):
            return map_tensors(lambda tensor, _: scale_tensor(tensor, self._state.scale), outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            return map(self.scale, outputs)
        raise LossScaleError(f"scale() takes a tensor or an iterable of tensors, not {type(outputs).__name__}.")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and note whether all are finite, on all ranks.

        Every rank calls it for the same optimizers in the same order, whether or not it has gradients for them. Call it before clipping or looking at gradients; ``step`` calls it otherwise.

        Raises:
            LossScaleError: called twice in an iteration, after ``step``, or before any loss was scaled; or no rank has any
                gradients.
            MasterWeightsError: a gradient is low precision and no master weights are kept.
        """
        if self._enabled:
            self._unscale([_native(optimizer)])

    def unscale_all_(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """:meth:`unscale_` for several optimizers of an iteration, whose flags are agreed on in one collective.

        Those that were unscaled already, and those that call the scaler themselves, are left alone.
        """
        if not self._enabled:
            return
        natives = [_native(optimizer) for optimizer in optimizers]
        ready = [each for each in natives if self._state_of(each)["stage"] is OptState.READY]
        if waiting := [each for each in ready if not _calls_the_scaler(each)]:
            self._unscale(waiting)

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's gradients were unscaled in this iteration, and it has not stepped since."""
        return self._enabled and self._state_of(_native(optimizer))["stage"] is OptState.UNSCALED

    def _unscale(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            state = self._state_of(optimizer)
            if state["stage"] is OptState.UNSCALED:
                raise LossScaleError("unscale_() was already called for this optimizer since the last update().")
            if state["stage"] is OptState.STEPPED:
                raise LossScaleError("unscale_() is called after step(): unscale first, then clip, step, update.")
        self._require_scaled("unscale_()")
        inverse = reciprocal(self._state.scale)
        flags = [self._unscale_grads_(optimizer, inverse, torch.empty(0), False) for optimizer in optimizers]
        self._note(optimizers, flags)
        for optimizer in optimizers:
            state = self._state_of(optimizer)
            state["guards"] = attachments(optimizer).guards
            state["stage"] = OptState.UNSCALED

    def _note(self, optimizers: list[torch.optim.Optimizer], flags: list[dict[torch.device, torch.Tensor]]) -> None:
        """Note the flags of optimizers, as all ranks that train them agree on them."""
        together: dict[Groups, list[int]] = {}
        for i, optimizer in enumerate(optimizers):
            state = self._state_of(optimizer)
            state["groups"] = groups_of_optimizer(optimizer, self._group)
            state["found_inf_per_device"] = flags[i]
            if state["groups"]:
                together.setdefault(state["groups"], []).append(i)
        device = self._state.scale.device
        for groups, those in together.items():
            own = [combine(flags[i].values(), device) if flags[i] else None for i in those]
            for i, flag in zip(those, agree(own, groups, device), strict=True):
                self._state_of(optimizers[i])["found_inf_per_device"] = {device: flag}

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What is noted of an optimizer in this iteration. Holds it, so that no other can get its id meanwhile."""
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer
        return state

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        masters = attachments(optimizer).masters
        if masters is not None:
            masters.pull()
        grads: list[torch.Tensor] = []
        kind = dtensor_type()
        with torch.no_grad():
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    grad = param.grad
                    if grad is None:
                        continue
                    if kind is not None and isinstance(grad, kind):
                        whole = reduced(grad)
                        if whole is not grad:
                            param.grad = whole
                        grad = local(whole)
                    if grad.dtype in LOW:
                        _refuse_low(grad, f"param_groups[{g}]['params'][{i}]")
                    if grad.is_conj() or grad.is_neg():  # lazy views, which cannot be written to
                        grad = param.grad = grad.resolve_conj().resolve_neg()
                    if grad.layout is not torch.strided or grad.is_complex():
                        grad = widened(grad)
                    grads.append(grad)
            return unscale_in_place(grads, inv_scale, check_result=self._scale_floor < 1.0)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Unscale (unless done), then take the optimizer's step if all gradients are finite.

        Fused optimizers skip on the device; for others one flag is read on the host, as ``torch.amp.GradScaler`` does.

        Args:
            optimizer: the optimizer; ``args`` and ``kwargs`` go to its ``step``. Closures are not supported.

        Returns:
            A :class:`StepResult`: ``.value`` is what the optimizer returned, ``.taken`` whether it stepped.

        Raises:
            LossScaleError: step called twice, nothing scaled, no gradients, or a closure.
        """
        optimizer = _native(optimizer)
        if not self._enabled:
            return StepResult(optimizer.step(*args, **kwargs), taken=True)
        if kwargs.get("closure") is not None or (args and callable(args[0])):
            raise LossScaleError(
                "closures are not supported with loss scaling: the loss inside would not be scaled. Use bfloat16 with "
                "loss_scale.mode 'none' for optimizers that need one, such as LBFGS."
            )
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise LossScaleError("step() was already called for this optimizer since the last update().")
        self._require_scaled("step()")
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if _calls_the_scaler(optimizer):
            state["guards"] = attachments(optimizer).guards
            value = optimizer.step(*args, grad_scaler=self, **kwargs)
            result = StepResult(value, found_inf=self._found_inf(state))
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            found = self._found_inf(state)
            if fused:
                result = self._step_fused(optimizer, found, args, kwargs)
            else:
                skip = state["skipped"] = bool(found.item())
                result = StepResult(None if skip else optimizer.step(*args, **kwargs), taken=not skip)
        state["stage"] = OptState.STEPPED
        return result

    def _step_fused(
        self, optimizer: Any, found: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepResult:
        """Hand the flag to a kernel that skips on the device. Gradients are unscaled already, so it gets no scale."""
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        optimizer.found_inf = found
        try:
            return StepResult(optimizer.step(*args, **kwargs), found_inf=found)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _found_inf(self, state: dict[str, Any]) -> torch.Tensor:
        flags = state["found_inf_per_device"]
        if not flags:
            raise LossScaleError("the optimizer has no gradients: call scale(loss).backward() before step().")
        return combine(flags.values(), self._state.scale.device)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by the rule, once an iteration, after all optimizers have stepped.

        Args:
            new_scale: a scale to set instead, within the policy's bounds; a tensor is clamped to them on the device.

        Raises:
            LossScaleError: nothing was scaled or checked since the last update, or ``new_scale`` is out of bounds.
            NonFiniteGradientsError: more steps in a row were skipped than ``max_consecutive_skips`` allows (looked at
                every so many updates, so that no step waits for the device).
        """
        if not self._enabled:
            return
        states = list(self._per_optimizer_states.values())
        if new_scale is not None:
            self._replace_scale(new_scale)
        else:
            self._require_scaled("update()")
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if not flags:
                raise LossScaleError("update() before any step(optimizer) or unscale_(optimizer) in this iteration.")
            found = combine(flags, self._state.scale.device)
            known = [state.get("skipped") for state in states]
            host = None if None in known else any(known)
            self._advance(found, host)
            if host is not False and self.config.mode == "dynamic":
                self._scale_floor = max(self._scale_floor * self.config.backoff_factor, self.config.minimum)
            guards = _guards(states)
            if guards:
                finite = found == 0
                for guard in guards:
                    guard.settle(finite, host)
        self._begin()
        self._check_skips(functools.partial(_nonfinite, states))

    def _require_scaled(self, what: str) -> None:
        if not self._scaled:
            raise LossScaleError(
                f"{what} before any loss was scaled since the last update(). In an iteration: scale(loss).backward() for "
                "every loss, step(optimizer) for every optimizer, then one update()."
            )

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:  # type: ignore[override]
        one = torch.ones((), dtype=torch.float32, device=self._state.scale.device)
        native = _native(optimizer)
        self._note([native], [self._unscale_grads_(native, one, torch.empty(0), True)])
        found: dict[torch.device, torch.Tensor] = self._state_of(native)["found_inf_per_device"]
        return found

    def _flag(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The agreed flag of an optimizer that was unscaled; None with mode ``none``."""
        return self._found_inf(self._state_of(_native(optimizer))) if self._enabled else None


def _native(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside one of ours."""
    return getattr(optimizer, "_precision_inner", optimizer)


def _calls_the_scaler(optimizer: Any) -> bool:
    """Whether an optimizer is of an older contract: it gets the scaler, to call it itself."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and "grad_scaler" in inspect.signature(optimizer.step).parameters


def _nonfinite(states: list[dict[str, Any]]) -> list[NonFiniteTensor]:
    """The gradients of an iteration that are not finite, on any rank."""
    return [
        tensor
        for state in states
        for tensor in nonfinite_tensors(named_gradients([state["optimizer"]]), state.get("groups", ()))
    ]


def _guards(states: list[dict[str, Any]]) -> list[SkippedState]:
    if not any(state.get("guards") for state in states):
        return []
    unique = {id(guard): guard for state in states for guard in state.get("guards", ())}
    return list(unique.values())


def _refuse_low(grad: torch.Tensor, where: str) -> None:
    raise MasterWeightsError(
        f"the gradient of {where} (shape {tuple(grad.shape)}) is {str(grad.dtype).removeprefix('torch.')}: unscaled in that "
        "dtype, small gradients become zero. Keep the parameters in float32, or give model and optimizer to "
        "mp.prepare(model, optimizer, master_weights=True)."
    )
