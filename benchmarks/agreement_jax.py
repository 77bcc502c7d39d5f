"""What agreement between JAX replicas costs: a training step with it against the same step without, as ratios of medians.

    python benchmarks/agreement_jax.py                  two devices of one process, and two processes with one device each
    python benchmarks/agreement_jax.py --rounds 400

The two steps take turns within one process, in an order that alternates. Steps without agreement are for measuring only: with
``axis_name=()`` replicas part ways. Also measured: ``mp.select`` over BatchNorm statistics, and the flags that
``max_consecutive_skips`` keeps for the names in its error. Each ratio comes with that of the first step to itself.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from precision.testing import run_ranks

WIDTH, BATCH = 512, 64


def _steps() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, the step without, and the step with."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import precision

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    scale = precision.LossScale(mode="dynamic")

    def put(spec: Any, tree: Any) -> Any:
        def whole(value: Any) -> Any:
            value = np.asarray(value)
            return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])

        return jax.tree.map(whole, tree)

    rng = np.random.default_rng(0)
    params = {f"fc{i}": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for i in range(3)}
    stats = {name: np.zeros(WIDTH, np.float32) for name in params}
    x = rng.standard_normal((BATCH * jax.device_count(), WIDTH)).astype(np.float32)

    def loss_fn(params: Any, x: Any, stats: Any) -> Any:
        new = {}
        for name, kernel in params.items():
            x = jax.nn.relu(x @ kernel)
            new[name] = 0.9 * stats[name] + 0.1 * jax.lax.pmean(x.mean(0).astype(jnp.float32), "data")
        return jnp.mean(jnp.square(x.astype(jnp.float32))), new

    def made(check: bool, guard: bool = True, axis_name: Any = None, limit: int | None = None) -> Callable[[], Any]:
        policy = precision.PrecisionPolicy(
            compute_dtype="bfloat16", loss_scale=scale.with_(max_consecutive_skips=limit)
        )
        mp: Any = precision.bind(policy, backend="jax")
        opt = mp.optimizer(optax.adam(1e-3), axis_name=axis_name)
        grad = mp.value_and_grad(loss_fn, has_aux=True, axis_name="data", cast_argnums=(0, 1))

        def step(params: Any, state: Any, stats: Any, x: Any) -> Any:
            (_, new), grads = grad(params, x, stats, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state, mp.select(state.finite, new, stats) if guard else new

        specs = (P(), P(), P(), P("data"))
        run = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check), donate_argnums=(0, 1, 2)
        )
        placed = put(P(), params)
        held = [(placed, opt.init(placed), put(P(), stats))]
        batch = put(P("data"), x)

        def turn() -> Any:
            held[0] = run(*held[0], batch)
            return jax.block_until_ready(held[0])

        return turn

    yield "agreement, check_vma=False", made(False, axis_name=()), made(False)
    yield "agreement, check_vma=True", made(True, axis_name=()), made(True)
    yield "statistics kept by mp.select", made(True, guard=False), made(True)
    yield "max_consecutive_skips", made(False), made(False, limit=10)


def measure(rank: int, world: int, port: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """Name, milliseconds without, ratio, and the ratio of the step without to itself."""
    import jax

    if world > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
    rows = []
    for name, without, with_it in _steps():
        times = np.empty((rounds, 2))
        for _ in range(5):
            without(), with_it()
        gc.disable()
        for i in range(rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                start = time.perf_counter()
                (with_it if which else without)()
                times[i, which] = time.perf_counter() - start
        gc.enable()
        median = np.median(times, axis=0)
        itself = np.median(times[::2, 0]) / np.median(times[1::2, 0])
        rows.append((name, 1e3 * float(median[0]), float(median[1] / median[0]), float(itself)))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    from agreement_jax import measure as imported  # by its module's name: the ranks import it

    print(f"{'where':<14} {'what':<30} {'without':>10} {'ratio':>6}  itself")
    for where, world, devices in (("two devices", 1, 2), ("two processes", 2, 1)):
        env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
        for name, without, ratio, itself in run_ranks(imported, world, (rounds,), env=env, timeout=550)[0]:
            print(f"{where:<14} {name:<30} {without:>8.2f}ms {ratio:>6.3f}  {itself:.3f}", flush=True)


if __name__ == "__main__":
    main()
