"""The parity suite's training on several replicas: ``MirroredStrategy`` over logical CPU devices, in a process of its own.

Logical devices are set up before TensorFlow starts, which a process that has used it cannot do any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import precision
from precision.loss_scale import LossScale
from precision.parity.adapter import ReplicaResult, ReplicaSpec
from precision.policy import PrecisionPolicy
from precision.testing import run_ranks

_SIZE = 4
_RATE = 2.0**-6


def logical_devices(count: int) -> list[str]:
    """Split the CPU into logical devices; before anything runs on it."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"CPU:{i}" for i in range(count)]


def replicated(specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
    """Train the specs, each number of replicas in a process of its own (TensorFlow's collective groups last for one)."""
    numbers = sorted({spec.replicas for spec in specs})
    groups = [[spec for spec in specs if spec.replicas == number] for number in numbers]
    env = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = run_ranks(run_mirrored, len(groups), (groups,), env=env, timeout=60.0 + 0.5 * len(specs))
    results = {number: iter(each) for number, each in zip(numbers, done, strict=True)}
    return [next(results[spec.replicas]) for spec in specs]


def run_mirrored(rank: int, world: int, port: int, groups: Sequence[Sequence[ReplicaSpec]]) -> list[ReplicaResult]:
    """What a process of :func:`precision.testing.run_ranks` calls: the rank's group of specs, under ``MirroredStrategy``."""
    tf.config.set_visible_devices([], "GPU")
    strategy = tf.distribute.MirroredStrategy(logical_devices(groups[rank][0].replicas))

    @functools.cache
    def trainer(config: LossScale) -> ReplicaTrainer:
        return ReplicaTrainer(strategy, config)

    alike: dict[Any, list[int]] = {}
    for index, spec in enumerate(groups[rank]):
        alike.setdefault((spec.config, spec.factors.shape), []).append(index)
    results: dict[int, ReplicaResult] = {}
    for (config, _), places in alike.items():
        patterns = np.stack([groups[rank][index].factors for index in places])
        results.update(zip(places, trainer(config).run(patterns), strict=True))
    return [results[index] for index in range(len(results))]


class ReplicaTrainer:
    """The suite's tiny model under a strategy: one compiled step, in a compiled loop over steps and patterns.

    Args:
        strategy: mirrored, over the replicas of a spec.
        config: the loss scale.
    """

    def __init__(self, strategy: Any, config: LossScale) -> None:
        self._strategy = strategy
        with strategy.scope():
            mp: Any = precision.bind(PrecisionPolicy(loss_scale=config), backend="tensorflow", device="CPU:0")
            self._weights = tf.Variable(tf.zeros(_SIZE))
            self._optimizer = mp.optimizer(keras.optimizers.SGD(_RATE))
            self._optimizer.build([self._weights])
        self._variables = [self._weights, *(v.value for v in self._optimizer.variables)]
        self._fresh = [variable.numpy() for variable in self._variables]
        self._train = tf.function(self._all_patterns)

    def _all_patterns(self, patterns: Any) -> tuple[Any, Any]:
        count, steps = patterns.shape[:2]
        states, weights = tf.TensorArray(tf.float64, count * steps), tf.TensorArray(tf.float32, count * steps)
        for i in tf.range(count * steps):
            if i % steps == 0:
                for variable, value in zip(self._variables, self._fresh, strict=True):
                    variable.assign(value)
            state, weight = self._one_step(patterns[i // steps, i % steps])
            states, weights = states.write(i, state), weights.write(i, weight)
        return states.stack(), weights.stack()

    def _one_step(self, factors: Any) -> tuple[Any, Any]:
        return self._local(self._strategy.run(self._on_replica, args=(factors,)))

    def _on_replica(self, factors: Any) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        factor = tf.gather(factors, replica) * 12.0 * (tf.cast(replica, tf.float32) + 1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self._weights) * factor / float(self._strategy.num_replicas_in_sync)
            scaled = self._optimizer.scale_loss(loss)
        self._optimizer.apply_gradients([(tape.gradient(scaled, self._weights), self._weights)])

    def _local(self, _: Any) -> tuple[Any, Any]:
        """The state's fields and the weights as each local replica holds them."""
        optimizer = self._optimizer
        fields = [
            optimizer.dynamic_scale, optimizer.step_counter, optimizer.hysteresis_left, optimizer.skipped,
            optimizer.consecutive_skips,
        ]  # fmt: skip
        copies = [self._strategy.experimental_local_results(field.value) for field in fields]
        states = tf.stack([tf.stack([tf.cast(c, tf.float64) for c in field]) for field in copies], axis=1)
        return states, tf.stack(self._strategy.experimental_local_results(self._weights))

    def run(self, patterns: Any) -> list[ReplicaResult]:
        """Train anew for each pattern, float32 ``(patterns, steps, replicas)``. Results are of the local replicas."""
        count, steps = patterns.shape[:2]
        states, weights = self._train(tf.constant(patterns))
        shape = (count, steps, states.shape[1], -1)
        return [
            ReplicaResult(np.moveaxis(state, 0, 1), np.moveaxis(weight, 0, 1))
            for state, weight in zip(states.numpy().reshape(shape), weights.numpy().reshape(shape), strict=True)
        ]
