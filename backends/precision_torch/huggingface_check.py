"""What a ``Trainer`` would really do, compared with a policy before anything is trained. Needs ``transformers``."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from precision.config import resolve_policy
from precision.errors import PolicyError
from precision.interop.base import require_same_effect
from precision.policy import PrecisionPolicy
from precision_torch import accelerate_check
from precision_torch.dtypes import LOW, NAME


def effective_policy(trainer: Any) -> PrecisionPolicy:
    """The policy that a ``Trainer`` amounts to: that of its accelerator, with the dtype its trainable parameters have.

    Raises:
        UnsupportedError: as :func:`precision_torch.accelerate_check.effective_policy`.
    """
    policy = accelerate_check.effective_policy(trainer.accelerator)
    low = [param.dtype for param in trainer.model.parameters() if param.requires_grad and param.dtype in LOW]
    if not low or "mp" in vars(trainer.accelerator):
        return policy
    name = NAME[max(set(low), key=low.count)]
    computes = name if policy.compute_dtype == "float32" else policy.compute_dtype
    return policy.with_(param_dtype=name, compute_dtype=computes, reduce_dtype=name)


def require_same(policy: PrecisionPolicy | str | PathLike[str], trainer: Any) -> None:
    """Refuse to go on if a ``Trainer`` would train under another policy than the one asked for.

    Trainer trains ``fp16`` on a CPU as float32; a model that came in float16 there in float16, with no loss scaling. And
    ``from_pretrained`` loads a model in its checkpoint's dtype, so that bfloat16 ones train without float32 master weights.
    Call this between making the ``Trainer`` and ``train()``.

    Args:
        policy: the policy asked for: itself, a name, or the path of a config file.
        trainer: the ``Trainer``.

    Raises:
        UnsupportedError: it would train under another; names each field with what is asked for and what would happen.
    """
    if not isinstance(getattr(trainer, "model", None), torch.nn.Module):
        raise PolicyError(f"require_same takes a transformers.Trainer with a model, not {type(trainer).__name__}.")
    require_same_effect(
        resolve_policy(policy),
        effective_policy(trainer),
        "Trainer",
        "precision_torch.huggingface_trainer",
        accelerate_check.NOT_SAID,
    )
