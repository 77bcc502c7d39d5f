"""``TorchPolicy``: a policy tied to a device in PyTorch; what ``precision.bind(policy, backend="torch")`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from precision.backend import BoundPolicy
from precision.errors import LossScaleError, PolicyError
from precision.policy import PrecisionPolicy
from precision_torch import regions
from precision_torch.agreement import Group, require_group
from precision_torch.attachments import attachments
from precision_torch.capabilities import capabilities_of
from precision_torch.clipping import clip, require_clip
from precision_torch.dtypes import NAME, TORCH, cast, torch_dtype
from precision_torch.engines import distributed
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.loss_scaler import TorchLossScaler
from precision_torch.optimizer import ScaledOptimizer
from precision_torch.prepare import prepare
from precision_torch.several_devices import SeveralDevices
from precision_torch.skipped_state import Which
from precision_torch.tree import cast_tree, map_tensors

if TYPE_CHECKING:
    from precision_torch.backend import TorchBackend


class TorchPolicy(SeveralDevices, BoundPolicy):
    """A policy in PyTorch.

    Attributes:
        policy: the policy.
        backend: the backend.
        device: the device it is bound to.
        process_group: who agrees on overflows, if that was given.
        native_autocast: whether ``autocast`` leaves the decisions to ``torch.autocast``.
        loss_scaler: the neutral loss scaler, with explicit state.

    Example:
        >>> import precision, torch
        >>> mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu")
        >>> model = torch.nn.Linear(4, 2)
        >>> model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with mp.autocast():
        ...     loss = model(torch.ones(8, 4)).square().mean()
        >>> mp.backward(loss)
        >>> mp.step(optimizer).taken
        True
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        backend: TorchBackend,
        device: torch.device,
        process_group: Group = None,
        native_autocast: bool = False,
    ) -> None:
        require_group(process_group)
        self.policy = policy
        self.process_group = process_group
        self.backend = backend
        self.device = device
        self.native_autocast = native_autocast
        self.loss_scaler = TorchLossScaler(policy.loss_scale, device, process_group)
        self.param_dtype = TORCH[policy.param_dtype]
        self.compute_dtype = TORCH[policy.compute_dtype]
        self.output_dtype = TORCH[policy.output_dtype]
        self._device_type = device.type
        self._computes = tuple(TORCH[c.dtype] for c in capabilities_of(device) if c.support in ("native", "slow"))
        self._scaler: PrecisionGradScaler | None = None

    def __repr__(self) -> str:
        return f"TorchPolicy({self.policy!r}, device={str(self.device)!r})"

    # ---- regions ------------------------------------------------------------------------------------------------

    def autocast(
        self, fn: Callable[..., Any] | None = None, *, enabled: bool = True, cache_enabled: bool = False
    ) -> Any:
        """``torch.autocast`` by the policy: a context manager and a decorator, op by op as the table and the rules say.

        Native autocasting does what its list for the device has right; what the list leaves out or has otherwise is made up
        for. A policy bound with ``native_autocast=True`` leaves all decisions to ``torch.autocast``. Under a policy in which
        nothing computes low it is switched off, so that an outer autocast does not reach in.

        Args:
            fn: a function to decorate at once.
            enabled: False switches autocasting off for the length of the region.
            cache_enabled: whether a weight's low-precision copy is kept for the length of the region. Off unless asked
                for: the copy goes stale when the weight is updated inside the region, and gradients of a weight used
                several times would add up in low precision.

        Returns:
            A ``torch.autocast``; the decorated function if ``fn`` was given.
        """
        if self.native_autocast:
            self._warn_of_families("torch.autocast keeps its own lists")
        region = regions.autocast_on(
            self.policy, self._device_type, enabled=enabled, cache=cache_enabled, native=self.native_autocast
        )
        return region if fn is None else region(fn)

    def island(self, dtype: Any = "float32") -> regions.Island:
        """A region that keeps a dtype whatever is around it; see :class:`Island`.

        Raises:
            PolicyError: not a policy dtype, or one that the device does not compute in.
        """
        chosen = torch_dtype(dtype)
        if chosen not in self._computes:
            raise PolicyError(
                f"an island in {NAME[chosen]}: {self.device} does not compute in it. It computes in "
                f"{', '.join(NAME[each] for each in self._computes)}."
            )
        return regions.Island(self._device_type, chosen)

    def op(self, family: str) -> Callable[[Callable[..., Any]], Any]:
        """Mark a function with its op family: a decorator.

        The floating tensors among its arguments are cast as :func:`precision.ops.decide` says, and it runs without
        autocasting inside.

        Raises:
            PolicyError: unknown family.
        """
        return regions.mark_op(self.policy, self._device_type, family)

    def custom_fwd(self, fwd: Callable[..., Any] | None = None, *, cast_inputs: Any = None) -> Any:
        """``torch.amp.custom_fwd`` for the ``forward`` of a ``torch.autograd.Function``, for this policy's device.

        Args:
            fwd: the ``forward`` to decorate.
            cast_inputs: a dtype, or ``"compute"`` for the policy's: the inputs are cast to it and ``forward`` runs
                without autocasting. Left out, ``forward`` runs under the autocast around it. Outside of autocast
                neither has an effect.
        """
        if cast_inputs == "compute":
            cast_inputs = self.compute_dtype
        elif cast_inputs is not None:
            cast_inputs = torch_dtype(cast_inputs)
        return torch.amp.custom_fwd(fwd, device_type=self._device_type, cast_inputs=cast_inputs)

    def custom_bwd(self, bwd: Callable[..., Any] | None = None) -> Any:
        """``torch.amp.custom_bwd`` for the ``backward`` that belongs to a ``forward`` under :meth:`custom_fwd`."""
        return torch.amp.custom_bwd(bwd, device_type=self._device_type)

    # ---- casts --------------------------------------------------------------------------------------------------

    def cast_to_param(self, tree: Any) -> Any:
        """Cast a tree's floating tensors (not float64) to the parameter dtype; a rule for a tensor's path wins."""
        return self._cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast a tree's floating tensors (not float64) to the compute dtype; a rule for a tensor's path wins."""
        return self._cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast a tree's floating tensors (not float64) to the output dtype."""
        _refuse_module(tree)
        return cast_tree(tree, self.output_dtype)

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        _refuse_module(tree)
        if not self.policy.module_rules:
            return cast_tree(tree, dtype)

        def cast_one(tensor: torch.Tensor, path: str) -> torch.Tensor:
            rule = self.policy.rule_for(path)
            return cast(tensor, dtype if rule is None else TORCH[rule.dtype])

        return map_tensors(cast_one, tree)

    # ---- training -----------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        master_weights: bool | None = None,
        restore_on_skip: Which = "batch_norm",
    ) -> tuple[torch.nn.Module, Any]:
        """Check a model and its optimizer against the policy, and mend what can be mended, in place.

        Norm layers keep float32 parameters and compute in float32; modules under a rule keep the rule's dtype, in
        parameters and compute; the rest gets ``param_dtype`` if that is low. Buffers keep their dtype, tied weights
        stay tied, the state dict its keys. The model's results leave in ``output_dtype``. Call it before
        ``torch.compile``, and before copying model or optimizer (copies of the optimizer must be prepared again).

        On several devices give it the wrapped or sharded model: from DDP and FSDP1 it takes the group that agrees on overflows,
        and a DDP model gets the hook for ``reduce_dtype``. Only where parameters are to be cast it is called before wrapping too.

        Args:
            model: the model.
            optimizer: the ``torch.optim`` optimizer of its parameters, or a list of them; None for inference.
            master_weights: True keeps float32 masters of low-precision trainable parameters, which the optimizer
                updates; they are in its state dict. None (default) refuses such parameters; False trains bfloat16
                ones as they are.
            restore_on_skip: what goes back to where it was when a step of these optimizers is skipped:
                ``"batch_norm"`` (running statistics), ``"buffers"`` (all buffers), ``"nothing"``, or a list of buffers by
                name or pattern, such as ``["batch_norm", "queue", "encoder.*.ema"]``.

        Returns:
            The same ``(model, optimizer)``.

        Raises:
            MasterWeightsError: trainable parameters are low precision and have no masters, or are sharded; names them.
            PolicyError: float16 compute without loss scaling, a rule that a tied weight cannot follow, a lazy module
                that is not initialised, parameters to cast inside a wrapper, or a wrong argument.
        """
        optimizers: Sequence[Any] = (
            () if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        )
        natives = [getattr(each, "_precision_inner", each) for each in optimizers]
        prepare(self.policy, self._device_type, model, natives, master_weights, restore_on_skip)
        return model, optimizer

    def grad_scaler(self, *, process_group: Group = None) -> PrecisionGradScaler:
        """A new ``torch.amp.GradScaler`` that follows the policy's loss scale; disabled with mode ``none``.

        Args:
            process_group: the ranks that agree on whether a step overflowed, if others than those bound with.

        Raises:
            PolicyError: float16 compute without loss scaling.
        """
        self.policy.require_trainable()
        group = self.process_group if process_group is None else process_group
        return PrecisionGradScaler(self.policy.loss_scale, self.device, group)

    @property
    def scaler(self) -> PrecisionGradScaler:
        """The scaler that :meth:`backward`, :meth:`step` and :meth:`optimizer` share. Save its ``state_dict()``."""
        if self._scaler is None:
            self._scaler = self.grad_scaler()
        return self._scaler

    def backward(self, *losses: torch.Tensor, **kwargs: Any) -> None:
        """Backward on the scaled loss, or on several at once. ``kwargs`` go to ``torch.autograd.backward``."""
        scaler = self.scaler
        if len(losses) == 1:
            torch.autograd.backward(scaler.scale(losses[0]), **kwargs)
        elif not losses:
            raise PolicyError("mp.backward takes the losses of this iteration: mp.backward(loss).")
        else:
            torch.autograd.backward([scaler.scale(loss) for loss in losses], **kwargs)

    def step(
        self,
        *optimizers: torch.optim.Optimizer,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        update: bool = True,
    ) -> Any:
        """Unscale, clip, step or skip, update the scale. Gradients are kept: call ``zero_grad`` before the next backward.

        Args:
            optimizers: all optimizers of this iteration; each has its own flag, and the scale is updated once.
            clip_norm: clip each optimizer's gradients to this total norm, after unscaling. Left out, an optimizer made by
                :meth:`optimizer` keeps its own limits.
            clip_value: clamp gradients to plus or minus this, after unscaling.
            update: whether to update the scale; with False call ``mp.scaler.update()`` at the end of the iteration.

        Returns:
            A :class:`StepResult`; for several optimizers a tuple of them.

        Raises:
            LossScaleError: no loss was scaled since the last update, an optimizer stepped twice or has no gradients, or
                two optimizers hold the same parameter.
        """
        if not optimizers or any(not hasattr(optimizer, "param_groups") for optimizer in optimizers):
            raise PolicyError("mp.step takes the optimizers of this iteration, one by one: mp.step(a, b).")
        scaler = self.scaler
        require_clip(clip_norm, clip_value)
        if len(optimizers) > 1 and scaler.is_enabled():
            _require_gradients_apart(optimizers)
            scaler.unscale_all_(optimizers)  # one collective for all of them
        for optimizer in optimizers:
            norm, value = clip_norm, clip_value
            if norm is None and value is None and isinstance(optimizer, ScaledOptimizer):
                norm, value = optimizer.clip_norm, optimizer.clip_value
            if norm is not None or value is not None:
                if len(optimizers) == 1 or not scaler.is_unscaled(optimizer):
                    scaler.unscale_(optimizer)
                clip(getattr(optimizer, "_precision_inner", optimizer), norm, value, scaler._flag(optimizer))
        results = [scaler.step(optimizer) for optimizer in optimizers]
        if update:
            scaler.update()
        return results[0] if len(results) == 1 else tuple(results)

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: PrecisionGradScaler | None = None,
    ) -> ScaledOptimizer:
        """Wrap an optimizer so that its ``step`` unscales, clips, skips and updates the scale.

        Args:
            optimizer: a ``torch.optim`` optimizer.
            clip_norm: clip the gradients' total norm to this, after unscaling.
            clip_value: clamp gradients to plus or minus this, after unscaling.
            scaler: the scaler to use; by default :attr:`scaler`, so that ``mp.backward(loss)`` fits.

        Raises:
            PolicyError: not a torch optimizer, float16 compute without loss scaling, or a limit that is not positive.
        """
        self.policy.require_trainable()
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ScaledOptimizer):
            raise PolicyError(f"mp.optimizer takes a native torch.optim optimizer, not {type(optimizer).__name__}.")
        return ScaledOptimizer(optimizer, self.scaler if scaler is None else scaler, clip_norm, clip_value)


def _refuse_module(tree: Any) -> None:
    if isinstance(tree, torch.nn.Module):
        raise PolicyError(
            f"a {type(tree).__name__} is not cast as a tree. Give model and optimizer to mp.prepare, or cast "
            "dict(model.named_parameters())."
        )


def _require_gradients_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Before any of several optimizers steps: each has gradients, and none that another would unscale once more."""
    seen: set[int] = set()
    for optimizer in optimizers:
        masters = attachments(optimizer).masters
        low = [] if masters is None else masters.low
        params = [param for group in optimizer.param_groups for param in group["params"]] + low
        ids = {id(param) for param in params if param.grad is not None}
        if not ids and not distributed():  # else another rank may have some
            raise LossScaleError(
                f"{type(optimizer).__name__} has no gradients, and no optimizer has stepped. Leave it out of this mp.step, "
                "or call mp.backward on a loss of its parameters first."
            )
        if not seen.isdisjoint(ids):
            raise LossScaleError(
                "two of the optimizers hold the same parameter, whose gradient would be unscaled twice. Give each "
                "parameter to one optimizer."
            )
        seen |= ids
