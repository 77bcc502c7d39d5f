"""The parity suite's training on several replicas: devices that XLA makes of the CPU, in a process started for it.

The number of devices is fixed once JAX has looked at them, hence the other process. All patterns of one setting are one compiled call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from precision.loss_scale import LossScale
from precision.parity.adapter import Array, ReplicaResult, ReplicaSpec
from precision.parity.replicas import LEARNING_RATE
from precision.policy import PrecisionPolicy
from precision.registry import bind
from precision.testing.ranks import run_ranks

_AXIS = "data"


def replicated(engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
    """Train in a process that has a device a replica; see :meth:`precision.parity.ParityAdapter.replicated`."""
    specs = list(specs)
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0")  # compiling is what takes the time
    devices = f"--xla_force_host_platform_device_count={max(spec.replicas for spec in specs)}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join((*filter(None, flags), devices))}
    results: list[ReplicaResult] = run_ranks(train_all, 1, (engine, specs), env=env, timeout=300)[0]
    return results


def train_all(rank: int, world: int, port: int, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
    """What the process does: the specs of one setting and shape together."""
    groups: dict[tuple[LossScale, tuple[int, ...]], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.config, spec.factors.shape), []).append(index)
    results: dict[int, ReplicaResult] = {}
    for (config, (_, replicas)), indices in groups.items():
        factors = np.stack([specs[i].factors for i in indices])
        states, weights = _RUNS[engine](config, factors, replicas)
        for at, index in enumerate(indices):
            results[index] = ReplicaResult(states[:, at], weights[:, at])
    return [results[index] for index in range(len(specs))]


def _many(config: LossScale, axis_name: str | None) -> Callable[[Any, Any], Any]:
    """A function of slopes (of this replica, or of all) and factors ``(specs, steps, ...)``: state and weights at each step."""
    mp: Any = bind(PrecisionPolicy(loss_scale=config), backend="jax")
    opt = mp.optimizer(optax.sgd(LEARNING_RATE))

    def loss_fn(w: Any, slopes: Any, factor: Any) -> Any:
        return jnp.mean(slopes * w.sum() * factor)

    grad = mp.value_and_grad(loss_fn, axis_name=axis_name)

    def run(slopes: Any, factors: Any) -> Any:
        def step(carry: Any, factor: Any) -> Any:
            w, state = carry
            _, grads = grad(w, slopes, factor, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, w)
            w = optax.apply_updates(w, updates)
            return (w, state), (jnp.stack([field.astype(jnp.float32) for field in state.loss_scale]), w)

        w = jnp.zeros(4, jnp.float32)
        return lax.map(lambda each: lax.scan(step, (w, opt.init(w)), each)[1], factors)

    return run


def _slopes(replicas: int) -> Array:
    return 12 * np.arange(1, replicas + 1, dtype=np.float32)


def _mesh(replicas: int) -> jax.sharding.Mesh:
    return jax.make_mesh((replicas,), (_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:replicas])


def _by_replica(array: Any) -> Array:
    """What each device holds of an array that is the same everywhere, or that has a row a replica."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return np.stack([np.asarray(shard.data) for shard in shards])


def _jit(config: LossScale, factors: Array, replicas: int) -> tuple[Array, Array]:
    mesh = _mesh(replicas)
    slopes = jax.device_put(_slopes(replicas), NamedSharding(mesh, P(_AXIS)))
    factors = jax.device_put(factors, NamedSharding(mesh, P(None, None, _AXIS)))
    run = jax.jit(_many(config, None), out_shardings=NamedSharding(mesh, P()))
    states, weights = run(slopes, factors)
    return _by_replica(states).astype(np.float64), _by_replica(weights)


def _shard_map(config: LossScale, factors: Array, replicas: int) -> tuple[Array, Array]:
    run = _many(config, _AXIS)

    def rows(slopes: Any, factors: Any) -> Any:
        return jax.tree.map(lambda out: out[None], run(slopes, factors[..., 0]))

    specs = (P(_AXIS), P(None, None, _AXIS))
    mapped = jax.jit(jax.shard_map(rows, mesh=_mesh(replicas), in_specs=specs, out_specs=P(_AXIS)))
    states, weights = mapped(_slopes(replicas), factors)
    return np.asarray(states, np.float64), np.asarray(weights)


def _pmap(config: LossScale, factors: Array, replicas: int) -> tuple[Array, Array]:
    run = jax.pmap(_many(config, _AXIS), axis_name=_AXIS, devices=jax.devices()[:replicas])
    states, weights = run(_slopes(replicas)[:, None], np.moveaxis(factors, -1, 0))
    return np.asarray(states, np.float64), np.asarray(weights)


_RUNS: dict[str, Callable[[LossScale, Array, int], tuple[Array, Array]]] = {
    "jit": _jit,
    "shard_map": _shard_map,
    "pmap": _pmap,
}
