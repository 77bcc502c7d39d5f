"""A Keras callback that shows the loss scale and stops a run that only skips, without waiting on the device each step."""

from __future__ import annotations

from typing import Any

import keras

from precision.errors import PolicyError
from precision_tensorflow.optimizer import PrecisionLossScaleOptimizer


class LossScaleCallback(keras.callbacks.Callback):
    """Log ``loss_scale`` and ``skipped_steps`` at the end of each epoch, and look for too many skips in a row.

    Args:
        every: batches between two looks at the device, at least 1; with ``steps_per_execution`` above it, every execution
            looks. Left out, the policy's ``max_consecutive_skips``; where that is not set either, only the end of each
            epoch reads it.

    Raises:
        NonFiniteGradientsError: in ``fit``, more than ``max_consecutive_skips`` steps in a row were skipped; at most
            ``every`` batches late.
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__()
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise PolicyError(f"every must be a whole number of batches of at least 1, not {every!r}.")
        self.every = every
        self._batches = 0
        self._last = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._optimizer()
        every = self.every or optimizer.loss_scale.max_consecutive_skips
        before = self._batches
        self._batches += max(batch - self._last, 1)  # an execution may be of several batches
        self._last = batch
        if every is not None and self._batches // every > before // every:
            optimizer.check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._optimizer()
        optimizer.check()
        if logs is not None:
            state = optimizer.state_dict()
            logs["loss_scale"] = state["scale"]
            logs["skipped_steps"] = state["skipped"]

    def _optimizer(self) -> PrecisionLossScaleOptimizer:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, PrecisionLossScaleOptimizer):
            raise PolicyError(
                f"mp.callback() needs a model compiled with mp.optimizer(...); this one has {type(optimizer).__name__}."
            )
        return optimizer
