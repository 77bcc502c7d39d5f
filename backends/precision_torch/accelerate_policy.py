"""Accelerate under our policy: an ``Accelerator`` whose autocasting, scaler and preparation follow it.

Rules by module, the loss scale with its bounds and hysteresis, and float16 on any device. Needs the package ``accelerate``.

>>> from precision_torch.accelerate_policy import PrecisionAccelerator
>>> accelerator = PrecisionAccelerator("mixed_float16", cpu=True)
>>> accelerator.scaler.get_scale()
65536.0
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from precision.config import resolve_policy
from precision.errors import BackendUnavailableError, PolicyError, PrecisionWarning, UnsupportedError
from precision.interop._accelerate_read import low_word
from precision.policy import PrecisionPolicy
from precision.registry import bind
from precision_torch import regions
from precision_torch.accelerate_scaler import AcceleratorScaler
from precision_torch.attachments import attachments
from precision_torch.bound import TorchPolicy
from precision_torch.optimizer import ScaledOptimizer
from precision_torch.skipped_state import Which

try:
    from accelerate import Accelerator
    from accelerate.utils import SCALER_NAME
except ImportError as error:
    raise BackendUnavailableError(
        f"the Accelerate drop-in needs Accelerate ({error}). Install it: pip install 'precision-policy[torch,interop]'."
    ) from error

__all__ = ["PrecisionAccelerator", "prepare_accelerator"]

_OWN_PRECISION = {
    "FSDP": "precision.interop.convert(policy, 'accelerate', form='arguments', fsdp=2)",
    "DEEPSPEED": "precision_torch.deepspeed_engine, or an export to deepspeed",
    "MEGATRON_LM": "Megatron's own settings",
    "XLA": "another device",
}
"""Ways of distributing that carry out the precision themselves, and what to use there."""
_HOOKS = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}


class _UnderPolicy:
    """What an ``Accelerator`` does otherwise; mixed into its class."""

    mp: TorchPolicy
    scaler: AcceleratorScaler | None
    _precision_options: dict[str, Any]
    _precision_known: list[weakref.ref[torch.nn.Module]]

    def prepare(self: Any, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models and optimizers by the policy, then as Accelerate does."""
        optimizers = [_native(arg) for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for optimizer in optimizers:
            _require_steps(self, optimizer)
        given = [arg for arg in args if isinstance(arg, torch.nn.Module)]
        for model in [*given, *(model for model in self._models if all(model is not one for one in given))]:
            own = [optimizer for optimizer in optimizers if _holds(optimizer, model)]
            if own:
                _prepare(self, model, own)
        return super().prepare(*args, device_placement=device_placement)  # type: ignore[misc]

    def prepare_model(
        self: Any, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model by the policy, and run its forward under ``mp.autocast()``."""
        if not getattr(model, "_is_accelerate_prepared", False):
            if not any(known() is model for known in self._precision_known):
                _prepare(self, model, [])
            _autocast_forward(self.mp, model)
        prepared: torch.nn.Module = super().prepare_model(  # type: ignore[misc]
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        return prepared

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """``mp.autocast()``. A handler may switch autocasting off, or its cache on, for the length of the region."""
        if autocast_handler is not None and not autocast_handler.enabled:
            region: Any = regions.autocast_off(self.mp.device.type)
        else:
            region = self.mp.autocast(cache_enabled=bool(getattr(autocast_handler, "cache_enabled", None)))
        with region:
            yield

    def unscale_gradients(self: Any, optimizer: Any = None) -> None:
        """Unscale the gradients of an optimizer, of several, or of all; once an iteration, whoever asks again."""
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            native = _native(each)
            if _has_gradients(native) and not (optimizer is None and self.scaler.has_stepped(native)):
                self.scaler.unscale_(native)

    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerate does; a folder that was saved without loss scaling starts the scale anew, with a warning."""
        scaler = self.scaler
        if scaler is None or input_dir is None or (Path(input_dir).expanduser() / SCALER_NAME).exists():
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
            return
        self.scaler = None
        try:
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.scaler = scaler
        warn_no_state(self.mp.policy)


class PrecisionAccelerator(_UnderPolicy, Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` that follows a policy.

    Give models and optimizers to ``prepare`` together: parameters are cast and checked there (:meth:`TorchPolicy.prepare`).
    Several optimizers share one update of the scale an iteration. The scale's state is saved and loaded with the rest.

    Args:
        policy: a policy, a name, or the path of a config file.
        master_weights: as for ``mp.prepare``: True keeps float32 masters of low-precision parameters.
        restore_on_skip: as for ``mp.prepare``.
        kwargs: for ``Accelerator``. ``mixed_precision`` may be left out.

    Raises:
        PolicyError: ``mixed_precision``, a ``GradScalerKwargs`` or an ``AutocastKwargs`` says what the policy says already.
        UnsupportedError: FSDP, DeepSpeed, Megatron or XLA, which carry out the precision themselves; or the device cannot do
            what the policy asks.

    Example:
        >>> accelerator = PrecisionAccelerator("mixed_bfloat16", cpu=True)   # doctest: +SKIP
        >>> model, optimizer = accelerator.prepare(model, optimizer)         # doctest: +SKIP
    """

    def __init__(
        self,
        policy: PrecisionPolicy | str | PathLike[str],
        *,
        master_weights: bool | None = None,
        restore_on_skip: Which = "batch_norm",
        **kwargs: Any,
    ) -> None:
        chosen = resolve_policy(policy)
        super().__init__(**{"mixed_precision": low_word(chosen), **kwargs})
        _install(self, chosen, None, master_weights, restore_on_skip)


def prepare_accelerator(
    policy: TorchPolicy | PrecisionPolicy | str | PathLike[str],
    accelerator: Any,
    *,
    master_weights: bool | None = None,
    restore_on_skip: Which = "batch_norm",
) -> Any:
    """Put an ``Accelerator`` that exists under a policy: in place, and before it has prepared anything.

    Its class becomes one that is both its own and what :class:`PrecisionAccelerator` is.

    Args:
        policy: a bound policy (``mp``), a policy, a name, or the path of a config file.
        accelerator: the ``Accelerator``.
        master_weights: as for ``mp.prepare``.
        restore_on_skip: as for ``mp.prepare``.

    Returns:
        The same accelerator.

    Raises:
        PolicyError, UnsupportedError: as :class:`PrecisionAccelerator`; or it has prepared something already.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = prepare_accelerator("mixed_float16", Accelerator(cpu=True))
        >>> accelerator.scaler.get_scale()
        65536.0
    """
    if not isinstance(accelerator, Accelerator):
        raise PolicyError(f"prepare_accelerator takes an accelerate.Accelerator, not {type(accelerator).__name__}.")
    if accelerator._models or accelerator._optimizers:
        raise PolicyError(
            "the accelerator has prepared a model or an optimizer already: they keep the scaler and autocasting they were "
            "given. Call prepare_accelerator before accelerator.prepare."
        )
    bound = policy if isinstance(policy, TorchPolicy) else None
    chosen = bound.policy if bound is not None else resolve_policy(policy)  # type: ignore[arg-type]
    _install(accelerator, chosen, bound, master_weights, restore_on_skip)
    return accelerator


def _mixed(kind: type) -> type:
    if issubclass(kind, _UnderPolicy):
        return kind
    return type(f"Precision{kind.__name__}", (_UnderPolicy, kind), {"__module__": __name__})


def _install(
    accelerator: Any, policy: PrecisionPolicy, bound: TorchPolicy | None, master_weights: bool | None, restore: Which
) -> None:
    _require_room(accelerator, policy)
    mp: Any = bound if bound is not None else bind(policy, "torch", device=accelerator.device)
    if mp.device.type != accelerator.device.type:
        raise PolicyError(f"the policy is bound to {mp.device}, but the accelerator runs on {accelerator.device}.")
    accelerator.__class__ = _mixed(type(accelerator))
    accelerator.mp = mp
    accelerator.native_amp = False  # autocasting is ours
    scaled = policy.loss_scale.mode != "none"
    accelerator.scaler = AcceleratorScaler(policy.loss_scale, accelerator.device) if scaled else None
    accelerator._precision_options = {"master_weights": master_weights, "restore_on_skip": restore}
    accelerator._precision_known = []


def _require_room(accelerator: Any, policy: PrecisionPolicy) -> None:
    """Refuse what would carry out the precision itself, or says otherwise than the policy."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _OWN_PRECISION:
        raise UnsupportedError(f"{kind} carries out the precision itself. Use {_OWN_PRECISION[kind]}.")
    word, said = low_word(policy), accelerator.mixed_precision
    if said not in ("no", word):
        raise PolicyError(
            f"the accelerator has mixed_precision {said!r}, but the policy computes in {policy.compute_dtype}: give it "
            f"mixed_precision={word!r}, or leave that out."
        )
    for handler in (accelerator.scaler_handler, accelerator.autocast_handler):
        if handler is not None:
            raise PolicyError(f"the policy says what {type(handler).__name__} says; leave that out.")
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    reduces = _HOOKS.get(str(hook) if hook is not None else "no")
    if accelerator.num_processes > 1 and reduces != policy.reduce_dtype:
        raise UnsupportedError(
            f"{'DDP reduces' if reduces else f'the communication hook {hook} does not reduce'} gradients in "
            f"{reduces or policy.reduce_dtype}, but the policy says reduce_dtype {policy.reduce_dtype}. Give a "
            "DistributedDataParallelKwargs with a comm_hook that does so, or change the policy."
        )


def _require_steps(accelerator: Any, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, ScaledOptimizer):
        raise PolicyError(
            "an optimizer made by mp.optimizer scales by itself; give accelerator.prepare the native one."
        )
    if accelerator.scaler is not None and isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS computes the loss several times a step, which cannot be skipped as one. Use bfloat16 with "
            "loss_scale.mode 'none', or another optimizer."
        )


def _prepare(accelerator: Any, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """``mp.prepare``, where the model will run. Without an optimizer nothing is trained, so nothing needs masters yet."""
    module = getattr(model, "module", model) if _is_ddp(model) else model
    if accelerator.device_placement and getattr(module, "hf_device_map", None) is None:
        module.to(accelerator.device)
    if optimizers:
        accelerator.mp.prepare(module, optimizers, **accelerator._precision_options)
        if accelerator.num_processes > 1 and any(attachments(optimizer).masters for optimizer in optimizers):
            raise UnsupportedError(
                "DDP cannot reduce the float32 gradients of low-precision parameters. Keep the parameters in float32 "
                "(param_dtype, and rules that agree with it) when training with several processes."
            )
    else:
        trained = [param for param in module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            accelerator.mp.prepare(module, restore_on_skip=accelerator._precision_options["restore_on_skip"])
        finally:
            for param in trained:
                param.requires_grad_(True)
    if accelerator.scaler is not None:
        accelerator.scaler.iterations.watch(module)
    if all(known() is not module for known in accelerator._precision_known):
        accelerator._precision_known.append(weakref.ref(module))


def _autocast_forward(mp: TorchPolicy, model: torch.nn.Module) -> None:
    """Run a model's forward under ``mp.autocast()``; ``unwrap_model(keep_fp32_wrapper=False)`` undoes it."""
    forward = model.forward
    function = getattr(forward, "__func__", None)

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    inner: Any = plain if function is None else function

    @functools.wraps(inner)
    def under(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mp.autocast():
            return inner(self, *args, **kwargs)

    model._original_forward = forward  # type: ignore[assignment]
    model.forward = MethodType(under, model)  # type: ignore[method-assign]


def warn_no_state(policy: PrecisionPolicy) -> None:
    """Say that there was no loss-scale state to resume from."""
    warnings.warn(
        "the checkpoint holds no loss-scale state: it was saved without loss scaling. The scale starts at "
        f"{policy.loss_scale.initial_scale:g}.",
        PrecisionWarning,
        stacklevel=3,
    )


def _is_ddp(model: torch.nn.Module) -> bool:
    return isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel))


def _native(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer in one that Accelerate has wrapped."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    masters = attachments(optimizer).masters
    held = [param for group in optimizer.param_groups for param in group["params"]]
    return held if masters is None else [*held, *masters.low]


def _holds(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    held = {id(param) for param in _params(optimizer)}
    return any(id(param) in held for param in model.parameters())


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for param in _params(optimizer))
