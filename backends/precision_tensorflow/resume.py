"""A Keras callback that saves a run during ``fit`` and lets a new process go on where a killed one stopped, mid-epoch too."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from precision.errors import CheckpointError
from precision_tensorflow.checkpoints import Checkpoints


class ResumeCallback(keras.callbacks.Callback):
    """Restore the last checkpoint at the start of ``fit``, skip the batches it has seen, and save as training goes on.

    Where Keras's ``BackupAndRestore`` begins the epoch again with the weights of its middle, without the seeds of dropout,
    this goes on at the next batch. A run goes on bit-equal if its batches come in the same order again: with
    ``shuffle=False``, or a ``tf.data.Dataset`` whose order its seeds fix (``reshuffle_each_iteration=False``). State that
    other callbacks keep in Python (patience counters) is not saved. A finished run, fitted again, has nothing left to do.

    Args:
        checkpoints: where to save.
        save_every: ``"epoch"``, or a number of batches; the end of an epoch is saved in any case.

    Raises:
        CheckpointError: ``save_every`` is neither; or, in ``fit``, the checkpoint cannot be restored.
    """

    def __init__(self, checkpoints: Checkpoints, save_every: int | str = "epoch") -> None:
        super().__init__()
        whole = isinstance(save_every, int) and not isinstance(save_every, bool) and save_every >= 1
        if save_every != "epoch" and not whole:
            raise CheckpointError(f"save_every is 'epoch' or a number of batches of at least 1, not {save_every!r}.")
        self.checkpoints = checkpoints
        self.save_every = save_every
        self._epoch = self._batch = self._total = self._to_skip = self._since = 0
        self._train_function: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._epoch = self._batch = self._total = self._to_skip = self._since = 0
        restored = self.checkpoints.restore(self.model)
        if restored is None:
            return
        try:
            self._epoch, self._batch = int(restored.extra["epoch"]), int(restored.extra["batch"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"the checkpoint of step {restored.step} in {self.checkpoints.store.directory} was not saved by this "
                "callback: it does not say at which epoch and batch. The model was restored; fit without the callback."
            ) from None
        self._total, self._to_skip = restored.step, self._batch
        self.model._initial_epoch = self._epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if not self._to_skip:
            self._batch = 0
            return
        per_call = self.model.steps_per_execution
        if self._to_skip % per_call:
            raise CheckpointError(
                f"{self._to_skip} batches of epoch {epoch} are done, which steps_per_execution = {per_call} does not divide."
            )
        self._train_function, self.model.train_function = self.model.train_function, self._skip

    def _skip(self, iterator: Any) -> dict[str, Any]:
        """In place of a step: take its batches from the data. After the last one the steps come back."""
        batch = None
        for _ in range(self.model.steps_per_execution):
            batch = next(iterator)
        self._to_skip -= self.model.steps_per_execution
        if self._to_skip > 0:
            return {}
        self.model.train_function, self._train_function = self._train_function, None
        self._restore_metrics(batch)
        return dict(self.model.get_metrics_result())

    def _restore_metrics(self, batch: Any) -> None:
        """Metrics were reset at the epoch's beginning, and in a new process are made at the first batch."""
        local = tf.nest.map_structure(lambda v: self.model.distribute_strategy.experimental_local_results(v)[0], batch)
        with self.model.distribute_strategy.scope():
            self.model._symbolic_build(data_batch=local)
        self.checkpoints.restore(self.model, step=self._total)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch < self._batch:  # skipped: done before this process began
            return
        done = batch + 1 - self._batch
        self._batch += done
        self._total += done
        self._since += done
        if self.save_every != "epoch" and self._since >= int(self.save_every):
            self._save(self._epoch, self._batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._restore_function()
        self._save(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore_function()
        self.model._initial_epoch = None

    def _restore_function(self) -> None:
        """For an epoch that ended before all the batches to skip had come."""
        if self._train_function is not None:
            self.model.train_function, self._train_function = self._train_function, None
        self._to_skip = 0

    def _save(self, epoch: int, batch: int) -> None:
        self._since = 0
        self.checkpoints.save(self._total, self.model, extra={"epoch": epoch, "batch": batch})
