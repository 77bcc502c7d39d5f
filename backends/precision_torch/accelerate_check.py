"""What an ``Accelerator`` would really do, compared with a policy before anything is trained. Needs ``accelerate``."""

from __future__ import annotations

from os import PathLike
from typing import Any

from precision.config import resolve_policy
from precision.errors import UnsupportedError
from precision.interop._accelerate_read import meaning
from precision.interop.base import require_same_effect
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy
from precision_torch.bound import TorchPolicy
from precision_torch.dtypes import NAME

NOT_SAID = ("loss_scale.minimum", "loss_scale.maximum")
"""What no Accelerator says; an export tells of it."""


def effective_policy(accelerator: Any) -> PrecisionPolicy:
    """The policy that an ``Accelerator`` amounts to, as it stands after its own decisions.

    Raises:
        UnsupportedError: its precision is no dtype policy (fp8), or DeepSpeed's or Megatron's.
    """
    own = getattr(accelerator, "mp", None)
    if isinstance(own, TorchPolicy):
        return own.policy
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or accelerator.mixed_precision == "fp8":
        raise UnsupportedError(f"what {kind} with mixed_precision {accelerator.mixed_precision} does is not told here.")
    handler = accelerator.autocast_handler
    word = accelerator.mixed_precision if accelerator.native_amp and (handler is None or handler.enabled) else "no"
    sharded = None
    if kind == "FSDP":
        plugin = accelerator.state.fsdp_plugin
        given = plugin.mixed_precision_policy
        names = ("param_dtype", "reduce_dtype", "output_dtype")
        dtypes = {name: NAME.get(getattr(given, name, None), "float32") for name in names}
        sharded = (plugin.fsdp_version, dtypes)
    return meaning(word, sharded).with_(loss_scale=_scale_of(accelerator.scaler))


def _scale_of(scaler: Any) -> LossScale:
    if scaler is None or not scaler.is_enabled():
        return LossScale()
    return LossScale(
        mode="dynamic",
        initial=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def require_same(policy: PrecisionPolicy | str | PathLike[str], accelerator: Any) -> None:
    """Refuse to go on if an ``Accelerator`` would train under another policy than the one asked for.

    Accelerate trains ``fp16`` on a CPU as float32, and reduces in the compute dtype under FSDP. Call this between making it
    and training.

    Args:
        policy: the policy asked for: itself, a name, or the path of a config file.
        accelerator: the ``Accelerator``.

    Raises:
        UnsupportedError: it would train under another; names each field with what is asked for and what would happen.

    Example:
        >>> from accelerate import Accelerator
        >>> require_same("bf16", Accelerator(cpu=True, mixed_precision="bf16"))   # doctest: +SKIP
    """
    require_same_effect(
        resolve_policy(policy),
        effective_policy(accelerator),
        "Accelerate",
        "precision_torch.accelerate_policy",
        NOT_SAID,
    )
