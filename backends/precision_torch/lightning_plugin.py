"""Lightning under our policy: precision plugins for ``Trainer`` and for ``Fabric``.

Rules by module, the loss scale with its bounds and hysteresis, and float16 on any device, with a state that is saved in the
checkpoint. Needs the package ``lightning``, or ``pytorch_lightning`` and ``lightning_fabric``.

>>> from precision_torch.lightning_plugin import PrecisionPlugin
>>> PrecisionPlugin("mixed_float16").precision          # for Trainer(plugins=[plugin]), on a CPU too
'16-mixed'
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch

from precision.errors import (
    BackendUnavailableError,
    MasterWeightsError,
    PrecisionWarning,
    UnsupportedError,
)
from precision.policy import PrecisionPolicy
from precision_torch.attachments import attach, attachments
from precision_torch.lightning_shared import LightningPlugin, to_cast, unwrapped
from precision_torch.skipped_state import SkippedState

try:
    from lightning.fabric.plugins.precision import Precision as _FabricPrecision
    from lightning.pytorch.plugins.precision import Precision as _TrainerPrecision
except ImportError:
    try:
        from lightning_fabric.plugins.precision import Precision as _FabricPrecision
        from pytorch_lightning.plugins.precision import Precision as _TrainerPrecision
    except ImportError as error:
        raise BackendUnavailableError(
            f"the Lightning plugin needs Lightning ({error}). Install it: pip install 'precision-policy[torch,interop]'."
        ) from error

__all__ = ["FabricPrecisionPlugin", "PrecisionPlugin"]

_OWN_PRECISION = (
    "FSDPStrategy",
    "ModelParallelStrategy",
    "DeepSpeedStrategy",
    "XLAStrategy",
    "SingleDeviceXLAStrategy",
)
"""Strategies that carry out the precision themselves, so that a plugin would not be asked."""


class PrecisionPlugin(LightningPlugin, _TrainerPrecision):
    """A precision plugin for a Lightning ``Trainer`` that follows a policy.

    It prepares model and optimizers when Lightning has made them (:meth:`TorchPolicy.prepare`), runs the steps under
    ``mp.autocast()``, scales the loss, unscales before hooks and clipping look at gradients, and leaves out steps with
    non-finite ones. Several optimizers share one update of the scale an iteration, in manual optimization too.

    Args:
        policy: a policy, a name, or the path of a config file.
        device: the device; by default the one that Lightning puts the model on.
        master_weights: as for ``mp.prepare``: True keeps float32 masters of low-precision parameters.
        restore_on_skip: as for ``mp.prepare``.

    Raises:
        PolicyError, UnsupportedError, MasterWeightsError: when ``fit`` sets up the model, before the first step.

    Example:
        >>> plugin = PrecisionPlugin("mixed_bfloat16")
        >>> # trainer = lightning.pytorch.Trainer(plugins=[plugin])
        >>> plugin.precision
        'bf16-mixed'
    """

    def connect(
        self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[torch.nn.Module, list[Any], list[Any]]:
        """Bind to the model's device and prepare model and optimizers."""
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        module: Any = model.module if wrapped else model
        strategy = module.trainer.strategy
        if names := [kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in _OWN_PRECISION]:
            raise UnsupportedError(
                f"{names[0]} carries out the precision itself and would not ask this plugin. Export the policy instead "
                "(precision convert), or use a single device or DDPStrategy."
            )
        mp = self.bind(strategy.root_device)
        if wrapped:
            _require_no_casts(self.policy, module)
        natives = [unwrapped(optimizer) for optimizer in optimizers]
        for optimizer in natives:
            self.require_no_closure(optimizer)
        fitting = natives if module.trainer.training else []
        if fitting or not _prepared(self, module):
            mp.prepare(
                module, fitting or None, master_weights=self.master_weights if fitting else None,
                restore_on_skip=self.restore_on_skip,
            )  # fmt: skip
            self._prepared_module = weakref.ref(module)
        self.iterations.watch(module)
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale the loss, then run the hooks."""
        scaled: torch.Tensor = super().pre_backward(self.iterations.scale(tensor), module)
        return scaled

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] = lambda: None, **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, run the hooks and clip, step or skip, and update the scale when the iteration ends.

        Returns:
            What the optimizer's ``step`` returned; None if it was skipped.
        """
        if not self.scaler.is_enabled():
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        inner = unwrapped(optimizer)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None: there was no backward
            self._after_closure(model, optimizer)
            return result
        self.iterations.unscale(inner)
        self._after_closure(model, optimizer)
        return self.iterations.step(inner, whole=model.automatic_optimization, **kwargs).value

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip gradients, unscaled ones: in manual optimization too, and with fused optimizers."""
        if clip_val > 0:
            self.iterations.unscale(unwrapped(optimizer))
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """``mp.autocast()``. An update that is due is done first, so that a skipped step has left no trace."""
        self.iterations.settle()
        with self.mp.autocast():
            yield

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the state of Lightning's own MixedPrecision; say so if there is no state to resume from."""
        if type(self).__qualname__ in checkpoint or self.policy.loss_scale.mode == "none":
            return
        native = checkpoint.get("MixedPrecision") or checkpoint.get("native_amp_scaling_state")
        if native:
            self.load_state_dict(native)
        else:
            warnings.warn(
                "the checkpoint holds no loss-scale state: it was saved without loss scaling. The scale starts at "
                f"{self.policy.loss_scale.initial_scale:g}.",
                PrecisionWarning,
                stacklevel=2,
            )


class FabricPrecisionPlugin(LightningPlugin, _FabricPrecision):
    """A precision plugin for Lightning's ``Fabric`` that follows a policy.

    Rules are in force from the model's first forward on. Optimizers are met when they step, so low-precision parameters with
    masters need :meth:`prepare` before ``fabric.setup``. Save it with the rest: ``fabric.save(path, {"precision": plugin, ...})``.

    Args:
        policy: a policy, a name, or the path of a config file.
        device: the device; by default that of the model's parameters.
        master_weights: as for ``mp.prepare``.
        restore_on_skip: as for ``mp.prepare``.

    Example:
        >>> plugin = FabricPrecisionPlugin("mixed_float16", device="cpu")
        >>> # fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[plugin])
        >>> plugin.scaler.get_scale()
        65536.0
    """

    def __init__(self, policy: PrecisionPolicy | str | PathLike[str], **options: Any) -> None:
        super().__init__(policy, **options)
        self._waiting: list[weakref.ref[torch.nn.Module]] = []  # set up, and not prepared yet
        self._done: list[weakref.ref[torch.nn.Module]] = []
        self._guards: list[tuple[weakref.ref[torch.nn.Module], SkippedState]] = []

    def prepare(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        """``mp.prepare`` before ``fabric.setup``: needed for low-precision parameters, which get float32 masters.

        On an accelerator move the model there first (``fabric.to_device(model)``), then make the optimizer.
        """
        mp = self.bind(next(model.parameters()).device)
        mp.prepare(model, optimizer, master_weights=self.master_weights, restore_on_skip=self.restore_on_skip)
        self._done.append(weakref.ref(model))
        self.iterations.watch(model)
        return model, optimizer

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Note the module; it is prepared at its first forward, when it is where it will run."""
        if not any(known() is module for known in self._done):
            if low := to_cast(self.policy, module, trained=True):
                raise MasterWeightsError(
                    f"{len(low)} trainable parameters would be low precision ({', '.join(low[:5])}): call "
                    "plugin.prepare(model, optimizer) before fabric.setup, with master_weights=True."
                )
            self._waiting.append(weakref.ref(module))
        return module

    def forward_context(self) -> Any:
        """``mp.autocast()``, after an update that is due and the preparation of modules that were set up."""
        for known in self._waiting:
            module = known()
            if module is not None:
                self._prepare_late(module)
        self._waiting.clear()
        if self._iterations is not None:
            self._iterations.settle()
        return self.mp.autocast()

    def _prepare_late(self, module: torch.nn.Module) -> None:
        where = next((param.device for param in module.parameters()), torch.device("cpu"))
        self.bind(where).prepare(module)
        self._done.append(weakref.ref(module))
        self.iterations.watch(module)
        if self.scaler.is_enabled() and self.restore_on_skip != "nothing":
            self._guards.append((weakref.ref(module), SkippedState(module, self.restore_on_skip)))

    def _meet(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Guard what an optimizer's skipped steps would leave behind, the first time it is seen."""
        inner = unwrapped(optimizer)
        self.require_no_closure(inner)
        held = {id(param) for group in inner.param_groups for param in group["params"]}
        for known, guard in self._guards:
            module = known()
            if module is None or any(old.model() is module for old in attachments(inner).guards):
                continue
            if any(id(param) in held for param in module.parameters()):
                attach(inner).guards.append(guard)
        return inner

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> None:
        """Do an update that is due: a new backward begins."""
        self.iterations.settle()

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Backward on the scaled loss."""
        super().backward(self.iterations.scale(tensor), model, *args, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale before ``fabric.clip_gradients``; with fused optimizers too."""
        self.iterations.unscale(self._meet(optimizer))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run a closure, unscale, step or skip, and update the scale when the iteration ends.

        Returns:
            What the closure returned, or else the optimizer's ``step``; None if it was skipped.
        """
        inner = unwrapped(optimizer)
        self.require_no_closure(inner)
        if self.policy.loss_scale.mode == "none":
            return super().optimizer_step(inner, **kwargs, **({} if closure is None else {"closure": closure}))
        loss = None if closure is None else closure()
        result = self.iterations.step(self._meet(inner), **kwargs)
        return result.value if closure is None else loss


def _prepared(plugin: PrecisionPlugin, module: torch.nn.Module) -> bool:
    known = getattr(plugin, "_prepared_module", None)
    return known is not None and known() is module


def _require_no_casts(policy: PrecisionPolicy, module: torch.nn.Module) -> None:
    if found := to_cast(policy, module):
        raise UnsupportedError(
            f"DDP has taken the parameters in before they could be cast ({', '.join(found[:5])}). Cast the model when it is "
            "made, or keep parameters in float32 (param_dtype, and rules that agree with it)."
        )
