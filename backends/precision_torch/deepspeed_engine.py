"""``deepspeed.initialize`` under a policy. Needs the ``deepspeed`` package; imported only on request.

Writes the policy into the config, says before training what DeepSpeed would silently do otherwise, and puts the policy's
loss scaler in the place of DeepSpeed's wherever it has one that can be replaced.
"""

from __future__ import annotations

import json
import warnings
from os import PathLike
from typing import Any

import torch

from precision._files import parse, read_text
from precision.errors import InteropError, MasterWeightsError, PrecisionWarning, UnsupportedError
from precision.interop.deepspeed import to_deepspeed
from precision_torch.bound import TorchPolicy
from precision_torch.deepspeed_scaler import PolicyLossScaler  # first: says how to install DeepSpeed
from precision_torch.dtypes import dtype_name

import deepspeed  # isort: skip
from deepspeed.accelerator import get_accelerator  # isort: skip
from deepspeed.runtime import torch_autocast  # isort: skip


def initialize(
    mp: TorchPolicy,
    model: torch.nn.Module,
    optimizer: Any = None,
    config: Any = None,
    *,
    low_params: bool = False,
    strict: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` with the policy in its config.

    Args:
        mp: the bound policy.
        model: the model.
        optimizer: its optimizer, as DeepSpeed takes it; None for the one that ``config`` names.
        config: the rest of DeepSpeed's config, plain values or the path of a JSON file. What it says about precision is
            replaced.
        low_params: whether float32 parameters computed low become low parameters with float32 masters in the optimizer
            (``fp16``/``bf16`` in place of ``torch_autocast``).
        strict: whether it is an error that DeepSpeed cannot do something of the policy, not a ``PrecisionWarning``.
        options: for ``deepspeed.initialize``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, schedule.

    Raises:
        UnsupportedError: DeepSpeed's accelerator cannot run this, or an earlier engine of the process stands in the way.
        MasterWeightsError: the policy keeps parameters in float32 and the model's are low.
        InteropError: ``config`` is not valid; or ``strict`` and something is lost.
        PolicyError: float16 without a loss scale.

    Example:
        >>> mp = precision.bind("mixed_bfloat16", backend="torch")   # doctest: +SKIP
        >>> engine, *_ = initialize(mp, model, optimizer, {"train_batch_size": 8})   # doctest: +SKIP
    """
    policy = mp.policy
    policy.require_trainable()
    base = _values(config)
    export = to_deepspeed(policy, base=base, low_params=low_params)
    made = export.config
    stage = _stage(made)
    autocast = bool(made["torch_autocast"]["enabled"])
    _require_runnable(mp, model, made, stage)
    ours = policy.loss_scale.mode != "none" and (
        (autocast and policy.compute_dtype == "float16") or (made["fp16"]["enabled"] and stage > 0)
    )
    lost = [entry for entry in export.lost if not (ours and entry.field.startswith("loss_scale"))]
    lost = [entry for entry in lost if not (low_params and entry.field == "param_dtype")]
    if strict and lost:
        raise InteropError(f"DeepSpeed cannot do all of this policy: {'; '.join(map(str, lost))}.", lost=lost)
    for entry in lost:
        warnings.warn(f"DeepSpeed: {entry}", PrecisionWarning, stacklevel=2)
    result = deepspeed.initialize(model=model, optimizer=optimizer, config=made, **options)
    if ours:
        _replace_scaler(mp, result[0], stage)
    return result  # type: ignore[no-any-return]


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, PathLike)):
        values: Any = parse(read_text(config), "json", str(config)).values
    else:
        values = {} if config is None else config
    if not isinstance(values, dict):
        raise InteropError(f"DeepSpeed's config is a table or the path of one, not {type(values).__name__}.")
    return values


def _stage(config: dict[str, Any]) -> int:
    zero = config.get("zero_optimization", {})
    return int(zero) if isinstance(zero, bool) else int(zero.get("stage", 0))


def _require_runnable(mp: TorchPolicy, model: torch.nn.Module, config: dict[str, Any], stage: int) -> None:
    accelerator = get_accelerator()
    name = accelerator.device_name()
    if mp.device.type != name:
        raise UnsupportedError(
            f"the policy is bound to {mp.device.type}, but DeepSpeed runs on {name}: bind it to that device, or set "
            f"DS_ACCELERATOR={mp.device.type} before DeepSpeed is imported."
        )
    if config["fp16"]["enabled"] and not accelerator.is_fp16_supported():
        raise UnsupportedError(
            f"DeepSpeed's accelerator here ({name}) refuses float16 parameters. Use param_dtype = 'float32', which trains in "
            "float16 by torch_autocast, or bfloat16."
        )
    low = next((f"{name} is {dtype_name(p.dtype)}" for name, p in model.named_parameters() if p.dtype in _LOW), None)
    if low and not (config["fp16"]["enabled"] or config["bf16"]["enabled"]):
        raise MasterWeightsError(
            f"the policy keeps parameters in float32, but {low}, and DeepSpeed would leave it so: call model.float() first, or "
            "use low_params=True."
        )
    if stage > 0 and torch_autocast.is_autocast_initialized() and not config["torch_autocast"]["enabled"]:
        raise UnsupportedError(
            "an earlier engine of this process used torch_autocast, which DeepSpeed keeps for the whole process: under ZeRO "
            "this engine would reduce its gradients, and scale its loss, as that one did. Use a process of its own."
        )


_LOW = (torch.float16, torch.bfloat16)


def _replace_scaler(mp: TorchPolicy, engine: Any, stage: int) -> None:
    """Give an engine the policy's loss scaler."""
    if stage == 0:
        engine.torch_autocast_z0_gradscaler = mp.grad_scaler()
        return
    optimizer = engine.optimizer
    optimizer.torch_autocast_gradscaler = None  # it is never updated on an overflow, and clipped before it unscales
    optimizer.loss_scaler = PolicyLossScaler(mp.policy.loss_scale)
    optimizer.dynamic_loss_scale = True  # so that a backward pass without the scale is refused
    optimizer.check_grad_overflow = True


def loss_scale_state(engine: Any) -> dict[str, float | int]:
    """The loss-scale state of an engine made by :func:`initialize`, as plain numbers, the same on every backend.

    At ZeRO stage 0 DeepSpeed saves no loss scale in its checkpoints: save this as ``client_state``, and give it to
    :func:`load_loss_scale_state` on resuming.

    Raises:
        InteropError: the engine has no loss scaler of a policy.
    """
    return json.loads(json.dumps(_scaler(engine).state_dict()))  # type: ignore[no-any-return]


def load_loss_scale_state(engine: Any, saved: dict[str, Any]) -> None:
    """Take over a loss-scale state saved under any backend.

    Raises:
        InteropError: the engine has no loss scaler of a policy. StateError: not a loss-scale state.
    """
    _scaler(engine).load_state_dict(saved)


def _scaler(engine: Any) -> Any:
    found = getattr(engine.optimizer, "loss_scaler", None) or engine.torch_autocast_z0_gradscaler
    if not hasattr(found, "state_dict"):
        raise InteropError(
            "this engine has no loss scaler of a policy: its loss is not scaled, or DeepSpeed scales it."
        )
    return found
