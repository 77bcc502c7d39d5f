"""``mp.checkpoints(directory)``: a run's variables through ``tf.train.Checkpoint``, whole after a kill at any moment.

Everything a step depends on is saved: weights, statistics, seeds of dropout (which Keras's own savers leave out), optimizer
with slots and masters, loss scale, and each replica's own statistics where those differ.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import keras

from precision.checkpoint import CheckpointStore, Manifest
from precision.errors import CheckpointError
from precision_tensorflow import workers
from precision_tensorflow.run_state import RunState, described, differences

_STATE, _COPIES, _KERAS = "state", "copies", "model.keras"


class Restored(NamedTuple):
    """What a checkpoint was of.

    Attributes:
        step: the step it was saved after.
        extra: what was given to ``save`` beside model and optimizer.
    """

    step: int
    extra: Any


class Checkpoints:
    """Checkpoints of a run in one folder; ``mp.checkpoints(directory)`` makes it.

    Under ``MultiWorkerMirroredStrategy`` every worker calls ``save`` and ``restore`` at the same steps, with a folder that
    all of them see; the chief writes what counts.

    Args:
        directory: made when the first checkpoint is saved.
        keep: how many complete checkpoints to keep; None keeps all.
        keras_file: whether each also holds the model as a ``.keras`` file, for :meth:`load_model` and other programs.

    Example:
        >>> checkpoints = mp.checkpoints("run", keep=2)                            # doctest: +SKIP
        >>> restored = checkpoints.restore(model, optimizer)                       # doctest: +SKIP
        >>> for step in range(restored.step if restored else 0, 1000):             # doctest: +SKIP
        ...     train_step(batches[step])
        ...     if (step + 1) % 100 == 0:
        ...         checkpoints.save(step + 1, model, optimizer, extra={"file": name})
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = None, *, keras_file: bool = False) -> None:
        self.store = CheckpointStore(directory, keep)
        self.keras_file = keras_file

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return self.store.steps()

    def latest(self) -> int | None:
        """The last complete checkpoint's step; None if there is none."""
        return self.store.latest()

    def save(
        self,
        step: int,
        model: keras.Model | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        extra: Any = None,
        **objects: Any,
    ) -> None:
        """Save a run's state after a step. It counts once it is whole on disk; until then the ones before do.

        Args:
            step: training steps taken so far, at least 0.
            model: a built Keras model: weights, statistics, seeds and metrics.
            optimizer: left out, the one the model was compiled with.
            extra: JSON values, the position in the data for example.
            objects: by name, anything else that ``tf.train.Checkpoint`` saves: variables, a ``tf.random.Generator``, the
                iterator of a ``tf.data.Dataset``.

        Raises:
            CheckpointError: it could not be written (on all workers alike), or ``extra`` is no JSON.
        """
        state = RunState(model, optimizer, objects)
        state.build()
        strategy = state.strategy
        chief = workers.is_chief(strategy)
        about = {"extra": extra, "variables": described(state.variables), "workers": workers.count(strategy),
                 "keras_file": self.keras_file}  # fmt: skip
        with self.store.saving(
            step,
            backend="tensorflow",
            world_size=state.replicas,
            coordinator=chief,
            agree=lambda well: workers.all_well(strategy, well),
            about=about,
        ) as folder:
            with tempfile.TemporaryDirectory() as unused:
                state.write((folder if chief else Path(unused)) / _STATE)
            state.write_copies(folder / f"{_COPIES}-{workers.index(strategy)}")
            if self.keras_file and chief:
                _require_model(model).save(folder / _KERAS)

    def restore(
        self,
        model: keras.Model | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        step: int | None = None,
        **objects: Any,
    ) -> Restored | None:
        """Put a run back to where a checkpoint was taken. Everything is verified before anything is changed.

        The number of replicas may be another; each then starts with the first replica's BatchNorm statistics.

        Args:
            model, optimizer, objects: as given to :meth:`save`. The optimizer need not be built.
            step: which checkpoint; None for the last complete one.

        Returns:
            Its step and ``extra``; None if the folder holds none (and ``step`` was left out).

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer. Nothing was loaded, on any worker.
        """
        state = RunState(model, optimizer, objects)
        if step is None and not workers.all_well(state.strategy, self.latest() is not None):
            return None
        found: tuple[Path, Manifest] | None = None
        error: Exception | None = None
        try:
            found = folder, manifest = self.store.open(step, backend="tensorflow")
            state.build()
            wrong = differences(manifest.about["variables"], described(state.variables))
            if wrong:
                raise CheckpointError(f"{folder} is of another model or optimizer: {wrong}. Nothing was loaded.")
        except Exception as problem:  # noqa: BLE001 - raised below, after the other workers have been told
            error = problem
        together = workers.all_well(state.strategy, error is None)
        if error is not None:
            raise error
        if not together or found is None:
            raise CheckpointError(
                "the checkpoint was not loaded: another worker could not read it. Nothing was loaded."
            )
        folder, manifest = found
        state.read(folder / _STATE)
        if (manifest.world_size, manifest.about["workers"]) == (state.replicas, workers.count(state.strategy)):
            state.read_copies(folder / f"{_COPIES}-{workers.index(state.strategy)}")
        return Restored(manifest.step, manifest.about["extra"])

    def load_model(self, step: int | None = None) -> keras.Model:
        """The model in a checkpoint's ``.keras`` file, compiled as it was; for use, or to train on with a policy.

        Raises:
            CheckpointError: the checkpoint is damaged, or holds no ``.keras`` file.
        """
        folder, manifest = self.store.open(step, backend="tensorflow")
        if _KERAS not in manifest.files:
            raise CheckpointError(f"{folder} holds no {_KERAS}: save with mp.checkpoints(..., keras_file=True).")
        return keras.models.load_model(folder / _KERAS)

    def callback(self, save_every: int | str = "epoch") -> Any:
        """A Keras callback that saves during ``fit``, and resumes a killed one; see :class:`.resume.ResumeCallback`."""
        from precision_tensorflow.resume import ResumeCallback

        return ResumeCallback(self, save_every)


def _require_model(model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"keras_file = True needs a Keras model to save, not {type(model).__name__}.")
    return model
