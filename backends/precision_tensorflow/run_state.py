"""What a run depends on, as lists of variables that can be described, compared, written and read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

# The generator behind keras.random functions without a seed of their own; Keras has no public way to it.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from precision.errors import CheckpointError

_RESERVED = ("model", "optimizer", "metrics", "global_seed")
_OPTIONAL = ("global_seed", "metrics")  # made late in a run: a run that is restored may not have them yet


class RunState:
    """The variables of a run, in groups of a fixed order.

    Args:
        model: a built Keras model, or None.
        optimizer: a Keras optimizer; None for the model's own, if it was compiled.
        objects: other trackables by name.

    Raises:
        CheckpointError: nothing was given, the model is not built, or an object cannot be saved.
    """

    def __init__(self, model: Any, optimizer: Any, objects: Mapping[str, Any]) -> None:
        if model is not None and not isinstance(model, keras.Model):
            raise CheckpointError(f"the model to save or restore must be a keras.Model, not {type(model).__name__}.")
        if model is not None and not model.built:
            raise CheckpointError(
                f"{model.name} has no variables yet: call it on a batch first, or start it with keras.Input, or build()."
            )
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise CheckpointError(f"the optimizer must be a Keras optimizer, not {type(optimizer).__name__}.")
        for name, item in objects.items():
            if name in _RESERVED:
                raise CheckpointError(f"{name} is a name that a checkpoint keeps for itself: give the object another.")
            if not isinstance(item, tf.__internal__.tracking.Trackable):
                raise CheckpointError(f"{name}: tf.train.Checkpoint cannot save a {type(item).__name__}.")
        if model is None and optimizer is None and not objects:
            raise CheckpointError("nothing to save or restore: give a model, an optimizer, or objects by name.")
        self.model, self.optimizer, self.objects = model, optimizer, dict(objects)

    @property
    def strategy(self) -> Any:
        """The ``tf.distribute`` strategy of the run."""
        if self.model is not None:
            return self.model.distribute_strategy
        return tf.distribute.get_strategy() if self.optimizer is None else self.optimizer._distribution_strategy

    @property
    def replicas(self) -> int:
        """How many replicas step together."""
        return int(self.strategy.num_replicas_in_sync)

    def build(self) -> None:
        """Give the optimizer its variables, at their initial values."""
        if self.optimizer is not None and not self.optimizer.built:
            if self.model is None:
                raise CheckpointError(
                    "the optimizer is not built: call optimizer.build(variables), or give the model too."
                )
            with self.strategy.scope():
                self.optimizer.build(self.model.trainable_variables)

    @property
    def variables(self) -> dict[str, list[Any]]:
        """The variables by group: ``model``, ``optimizer``, ``metrics``, ``global_seed``, and one for each object."""
        groups: dict[str, list[Any]] = {}
        if self.model is not None:
            metrics = _unique(self.model.metrics_variables)
            known = {id(v) for v in metrics}
            groups["model"] = [v for v in _unique(self.model.variables) if id(v) not in known]
            groups["metrics"] = metrics
        if self.optimizer is not None:
            groups["optimizer"] = _unique(self.optimizer.variables)
        seed = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        if seed is not None:
            groups["global_seed"] = [seed.state]
        for name, item in self.objects.items():
            found = tf.train.TrackableView(item).descendants()
            groups[f"object {name}"] = _unique(v for v in found if isinstance(v, (tf.Variable, keras.Variable)))
        return groups

    def write(self, path: Path) -> None:
        """Write everything, as ``tf.train.Checkpoint`` does."""
        self._checkpoint(self.variables).write(str(path))

    def read(self, path: Path) -> None:
        """Read everything back; what is optional, if it is there and fits."""
        saved = tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
        if any(key.startswith("global_seed/") for key in saved):
            global_seed_generator()
        groups = self.variables
        for name in _OPTIONAL:
            if name in groups and not _fits(saved, name, groups[name]):
                del groups[name]
        self._checkpoint(groups).read(str(path)).assert_existing_objects_matched().expect_partial()

    def _checkpoint(self, groups: Mapping[str, list[Any]]) -> Any:
        lists = {name: [_native(v) for v in group] for name, group in groups.items() if not name.startswith("object ")}
        return tf.train.Checkpoint(**lists, **self.objects)

    # ---- what differs by replica ---------------------------------------------------------------------------------

    def _copies(self) -> dict[str, list[Any]]:
        """This process's copies of the model's non-trainable variables, which forward passes write on each replica."""
        if self.model is None or self.replicas == 1:
            return {}
        groups = self.variables
        return {
            name: [self.strategy.experimental_local_results(_native(v)) for v in groups[name] if not v.trainable]
            for name in ("model", "metrics")
        }

    def write_copies(self, path: Path) -> None:
        """Write each local replica's own values."""
        if copies := self._copies():
            tf.train.Checkpoint(**{name: [list(each) for each in group] for name, group in copies.items()}).write(
                str(path)
            )

    def read_copies(self, path: Path) -> None:
        """Read them back, by as many replicas as wrote them."""
        if not (copies := self._copies()):
            return
        reader = tf.train.load_checkpoint(str(path))
        saved = reader.get_variable_to_shape_map()
        for name, group in copies.items():
            if all(
                list(v.shape) == saved.get(_key(name, i, r)) for i, each in enumerate(group) for r, v in enumerate(each)
            ):
                for i, each in enumerate(group):
                    for replica, variable in enumerate(each):
                        variable.assign(reader.get_tensor(_key(name, i, replica)))


def _key(*parts: Any) -> str:
    return "/".join(map(str, parts)) + "/.ATTRIBUTES/VARIABLE_VALUE"


def described(groups: Mapping[str, list[Any]]) -> dict[str, list[list[Any]]]:
    """Name, shape and dtype of each variable, as JSON values."""
    return {
        name: [[getattr(v, "path", v.name), list(map(int, v.shape)), _dtype(v)] for v in group]
        for name, group in groups.items()
        if name not in _OPTIONAL
    }


def differences(saved: Any, here: Mapping[str, list[list[Any]]]) -> str:
    """What does not fit between the descriptions of two runs, in words; empty if they fit. Names alone may differ."""
    if not isinstance(saved, dict):
        return "it does not say what it holds"
    for name in sorted({*saved, *here}):
        if name not in saved or name not in here:
            return (
                f"it has {'no' if name in here else 'a'} {name}, and this run has {'one' if name in here else 'none'}"
            )
        theirs, ours = saved[name], here[name]
        for i, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            if one[1:] != other[1:]:
                return (
                    f"{name} variable {i} is {one[0]} {tuple(one[1])} {one[2]} there, and {other[0]} {tuple(other[1])} "
                    f"{other[2]} here"
                )
        if len(theirs) != len(ours):
            first = (theirs if len(theirs) > len(ours) else ours)[min(len(theirs), len(ours))][0]
            where = "there" if len(theirs) > len(ours) else "here"
            return f"{name} has {len(theirs)} variables there and {len(ours)} here ({first} is {where} only)"
    return ""


def _fits(saved: Mapping[str, list[int]], name: str, variables: list[Any]) -> bool:
    shapes = [saved.get(_key(name, i)) for i in range(len(variables) + 1)]
    return shapes == [*(list(map(int, v.shape)) for v in variables), None]


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(v): v for v in variables}.values())


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))
