"""JAX in two processes: run without arguments, it starts itself twice on this machine's loopback address.

Process 1 alone overflows at one step. Both skip that step, and hold the same weights and loss scale after each. Give it a folder to keep
checkpoints in; started again with that folder, it goes on from the last one.
"""

import os
import subprocess
import sys
import tempfile

PROCESSES, DEVICES_EACH, STEPS, BATCH, OVERFLOW_AT = 2, 2, 40, 64, 5


def start(folder: str) -> int:
    """Start both processes. On a cluster its scheduler would, and ``jax.distributed.initialize()`` would need no arguments."""
    from precision.testing import free_port

    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES_EACH}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    port = free_port()
    started = [
        subprocess.Popen([sys.executable, __file__, folder, str(port), str(rank)], env=environment)
        for rank in range(PROCESSES)
    ]
    try:
        return max(abs(process.wait(timeout=200)) for process in started)
    finally:
        for process in started:
            process.kill()


def work(folder: str, port: int, rank: int) -> None:
    """Train as one of the processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from sklearn.datasets import load_digits

    import precision
    from precision.testing import Fault, FaultPlan

    jax.distributed.initialize(
        f"127.0.0.1:{port}", PROCESSES, rank
    )  # before precision.bind, which looks at the devices
    scale = precision.LossScale(mode="dynamic", initial=1024.0, max_consecutive_skips=10)
    mp = precision.bind(precision.PrecisionPolicy(compute_dtype="bfloat16", loss_scale=scale), backend="jax")
    opt = mp.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    plan = FaultPlan([Fault("overflow", OVERFLOW_AT, rank=1)])

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")

    def batch(step):
        """This process's half of a batch, as its part of an array over all devices."""
        half = BATCH // PROCESSES
        mine = (step * BATCH + rank * half + np.arange(half)) % len(labels)
        factors = np.full(half, plan.factor(step, rank), np.float32)
        parts = images[mine], labels[mine].astype("int32"), factors
        return [jax.make_array_from_process_local_data(rows, part) for part in parts]

    @mp.autocast(keep=("stats",))
    def model(params, stats, x):
        h = jax.nn.relu(x @ params["fc"])
        mean = h.mean(0).astype(jnp.float32)  # of the whole batch, on all devices
        return (h - mean) @ params["head"], {"mean": 0.9 * stats["mean"] + 0.1 * mean}

    def loss_fn(params, stats, x, y, factors):
        logits, stats = model(params, stats, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return (losses * factors).mean(), stats

    @jax.jit
    def train_step(state, x, y, factors):
        params, opt_state, stats = state
        grad = mp.value_and_grad(loss_fn, has_aux=True)
        (loss, new_stats), grads = grad(params, stats, x, y, factors, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        stats = mp.select(opt_state.finite, new_stats, stats)  # a skipped step leaves the statistics alone
        return (optax.apply_updates(params, updates), opt_state, stats), loss

    def init(key):
        fc, head = jax.random.split(key)
        params = {"fc": jax.random.normal(fc, (64, 32)) / 8, "head": jax.random.normal(head, (32, 10)) / 6}
        return params, opt.init(params), {"mean": jnp.zeros(32)}

    state = jax.jit(init, out_shardings=everywhere)(jax.random.key(0))
    checkpoints = mp.checkpoints(folder, keep=2)
    restored = checkpoints.restore(state)  # None: this run is new
    first = 0
    if restored is not None:
        first, state = restored.step, restored.state
    for step in range(first, STEPS):
        state, loss = train_step(state, *batch(step))
        mp.check(state[1])  # ends a run that only skips, in both processes
        if (step + 1) % 20 == 0:
            checkpoints.save(step + 1, state, extra={"loss": float(loss)})

    params, opt_state, _ = state
    scaler = mp.loss_scaler.state_dict(opt_state.loss_scale)
    total = sum(float(np.abs(weights.addressable_data(0)).sum()) for weights in jax.tree.leaves(params))
    loss = checkpoints.restore(state).extra["loss"]
    sys.stdout.write(
        f"process {rank}: from step {first}, loss {loss:.4f}, {scaler['skipped']} skipped, loss scale {scaler['scale']:g}, "
        f"weights {total:.6f}, checkpoints {checkpoints.steps()}\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 3:
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) > 1:
        sys.exit(start(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(start(folder))
