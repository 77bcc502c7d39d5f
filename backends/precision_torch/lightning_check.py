"""What a Lightning ``Trainer``, ``Fabric`` or strategy would really do, compared with a policy before anything is trained."""

from __future__ import annotations

from os import PathLike
from typing import Any

from precision.config import resolve_policy
from precision.errors import UnsupportedError
from precision.interop.base import require_same_effect
from precision.interop.lightning import from_lightning
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy
from precision_torch.dtypes import NAME

_NOT_LIGHTNINGS = ("output_dtype", "loss_scale.minimum", "loss_scale.maximum")
"""What no precision of Lightning's says; an export tells of it."""


def effective_policy(runner: Any) -> PrecisionPolicy:
    """The policy that a ``Trainer``, ``Fabric`` or strategy amounts to, as it stands after Lightning's own decisions.

    Raises:
        UnsupportedError: its precision is no dtype policy (float64, Transformer Engine, bitsandbytes).
    """
    strategy = getattr(runner, "strategy", runner)
    plugin = _precision_of(runner) or _precision_of(strategy)
    own = getattr(plugin, "policy", None)
    if isinstance(own, PrecisionPolicy):
        return own
    if type(plugin).__name__ not in ("Precision", "MixedPrecision", "HalfPrecision", "FSDPPrecision"):
        raise UnsupportedError(f"{type(plugin).__name__} is no dtype policy.")
    policy = from_lightning({"precision": plugin.precision}).policy
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        policy = policy.with_(loss_scale=LossScale())
    else:
        settings = {
            "init_scale": scaler.get_scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }
        args = {"precision": "16-mixed", "scaler": {"init_args": settings}}
        policy = from_lightning({"plugins": [{"class_path": "MixedPrecision", "init_args": args}]}).policy
    sharded = getattr(strategy, "mixed_precision_config", None)
    if sharded is not None and sharded.reduce_dtype is not None:
        policy = policy.with_(reduce_dtype=NAME[sharded.reduce_dtype])
    return policy


def require_same(policy: PrecisionPolicy | str | PathLike[str], runner: Any) -> None:
    """Refuse to go on if Lightning would train under another policy than the one asked for.

    Lightning turns ``16-mixed`` into ``bf16-mixed`` on a CPU, scales no loss under ``16-true``, and reduces in the compute
    dtype under FSDP. Call this between making the ``Trainer`` or ``Fabric`` and training.

    Args:
        policy: the policy asked for: itself, a name, or the path of a config file.
        runner: a ``Trainer``, a ``Fabric`` or a strategy.

    Raises:
        UnsupportedError: it would train under another; names each field with what is asked for and what would happen.

    Example:
        >>> from lightning.fabric import Fabric
        >>> require_same("bf16-mixed", Fabric(accelerator="cpu", precision="bf16-mixed"))
    """
    require_same_effect(
        resolve_policy(policy),
        effective_policy(runner),
        "Lightning",
        "precision_torch.lightning_plugin",
        _NOT_LIGHTNINGS,
    )


def _precision_of(runner: Any) -> Any:
    return next((found for name in ("precision_plugin", "_precision") if (found := getattr(runner, name, None))), None)
