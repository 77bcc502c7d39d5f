"""Hugging Face's ``Trainer`` under our policy: a mix-in for any ``Trainer``, and the plain one with it.

Rules by module, the loss scale with its bounds and hysteresis (which ``TrainingArguments`` cannot say), and float16 on any
device, with a state that is saved in Trainer's checkpoints. Needs the packages ``transformers`` and ``accelerate``.

>>> from precision_torch.huggingface_trainer import PrecisionTrainer
>>> # trainer = PrecisionTrainer(model, args, train_dataset=data, policy="precision.toml")
"""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from precision.config import resolve_policy
from precision.errors import BackendUnavailableError, PolicyError, UnsupportedError
from precision.policy import PrecisionPolicy
from precision_torch.accelerate_policy import prepare_accelerator, warn_no_state
from precision_torch.skipped_state import Which

try:
    from transformers import Trainer
    from transformers.trainer import SCALER_NAME
except ImportError as error:
    raise BackendUnavailableError(
        f"the Trainer drop-in needs Transformers ({error}). Install it: pip install 'precision-policy[torch,interop]'."
    ) from error

__all__ = ["PrecisionTrainer", "PrecisionTrainerMixin"]


class PrecisionTrainerMixin:
    """Makes a ``Trainer`` follow a policy: ``class MyTrainer(PrecisionTrainerMixin, SFTTrainer): ...``.

    The trainer's accelerator is put under the policy (:func:`precision_torch.accelerate_policy.prepare_accelerator`), so that
    model and optimizer are prepared, autocast, scaled, clipped and skipped by it. Logs get ``loss_scale`` and
    ``skipped_steps``; a schedule waits while steps are skipped.

    Args:
        args, kwargs: for the ``Trainer``. ``fp16`` and ``bf16`` of its arguments may be left out.
        policy: a policy, a name, or the path of a config file.
        master_weights: as for ``mp.prepare``: True keeps float32 masters of low-precision parameters.
        restore_on_skip: as for ``mp.prepare``.

    Raises:
        PolicyError: the arguments say otherwise than the policy.
        UnsupportedError: FSDP, DeepSpeed or DataParallel; or the device cannot do what the policy asks.
        MasterWeightsError: when training begins, for a model in low precision (as ``from_pretrained`` loads one by default
            from a low-precision checkpoint) without ``master_weights=True``.
    """

    accelerator: Any
    args: Any

    def __init__(
        self,
        *args: Any,
        policy: PrecisionPolicy | str | PathLike[str],
        master_weights: bool | None = None,
        restore_on_skip: Which = "batch_norm",
        **kwargs: Any,
    ) -> None:
        self._precision_policy = resolve_policy(policy)
        self._precision_options: dict[str, Any] = {"master_weights": master_weights, "restore_on_skip": restore_on_skip}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as ``Trainer`` does, and put it under the policy."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _require_agreement(self._precision_policy, self.args)
        prepare_accelerator(self._precision_policy, self.accelerator, **self._precision_options)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as ``Trainer`` does, training logs with ``loss_scale`` and ``skipped_steps``."""
        scaler = self.accelerator.scaler
        if scaler is not None and ("loss" in logs or "train_loss" in logs):
            state = scaler.state_dict()
            logs["loss_scale"], logs["skipped_steps"] = state["scale"], state["skipped"]
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.accelerator.scaler is None:
            return
        if os.path.isfile(os.path.join(checkpoint, SCALER_NAME)):
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        else:
            warn_no_state(self._precision_policy)


class PrecisionTrainer(PrecisionTrainerMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` under a policy; see :class:`PrecisionTrainerMixin`.

    Example:
        >>> args = TrainingArguments(output_dir="out", use_cpu=True)                     # doctest: +SKIP
        >>> PrecisionTrainer(model, args, train_dataset=data, policy="16-mixed").train()  # doctest: +SKIP
    """


def _require_agreement(policy: PrecisionPolicy, args: Any) -> None:
    for switch, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        if getattr(args, switch, False) and policy.compute_dtype != dtype:
            raise PolicyError(
                f"TrainingArguments say {switch}, but the policy computes in {policy.compute_dtype}: leave {switch} out."
            )
        if getattr(args, f"{switch}_full_eval", False):
            raise PolicyError(
                f"{switch}_full_eval casts the model for good at the first evaluation outside of training, past the policy: "
                "leave it out; evaluation runs under the policy."
            )
    if getattr(args, "n_gpu", 1) > 1:
        raise UnsupportedError(
            "torch.nn.DataParallel, which Trainer takes with several GPUs in one process, copies the model at every step. "
            "Start one process a GPU (torchrun), or show this one a single GPU."
        )
