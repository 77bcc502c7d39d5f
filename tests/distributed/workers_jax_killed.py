"""Training runs that are killed (SIGKILL) between and during saves, and started again, for ``test_jax_killed.py``.

Imports are done once; each start is then a fork, that is a process of its own without a device yet, which takes a second instead of five.
"""

import hashlib
import os
import random
import select
import signal
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401 - before the forks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import precision
from precision import LossScale, PrecisionPolicy
from precision.testing import Fault, FaultPlan, free_port

STEPS = 8
POLICY = PrecisionPolicy(
    compute_dtype="bfloat16", loss_scale=LossScale(mode="dynamic", initial=64.0, growth_interval=3)
)
FACTORS = FaultPlan([Fault("overflow", 2), Fault("nan", 5), Fault("overflow", 6)]).factors(STEPS, 1)[:, 0]


def train(folder, tell):
    """Save after every step, from wherever the last start came to; give a digest of all that the run holds at its end."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.adam(0.1), master_weights=True)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(params, x, factor):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2) * factor

    @jax.jit
    def step(state, factor):
        params, opt_state, key = state
        key, use = jax.random.split(key)
        x = jax.random.normal(use, (4, 8))
        _, grads = mp.value_and_grad(loss_fn, cast_argnums=(0, 1))(params, x, factor, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    whole = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2).astype(jnp.float16)
    sharding = NamedSharding(mesh, P("data"))
    params = {"w": jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])}
    opt_state = jax.jit(opt.init, out_shardings=mp.state_shardings(opt, params))(params)
    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    state = params, opt_state, gather(jax.random.key(0))
    checkpoints = mp.checkpoints(folder, keep=2)
    restored = checkpoints.restore(state)
    done = 0
    if restored is not None:
        done, state = restored.step, restored.state
        if restored.extra != {"position": done}:
            raise RuntimeError(f"step {done} came with {restored.extra}")
    jax.block_until_ready(step(state, FACTORS[0]))  # compiled before the clock of the kill starts
    tell(f"at {done}")
    for i in range(done, STEPS):
        state = step(state, FACTORS[i])
        checkpoints.save(i + 1, state, extra={"position": i + 1})
        tell(f"saved {i + 1}")
    leaves = jax.tree.leaves(gather((state[0], state[1], jax.random.key_data(state[2]))))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    tell(f"end {digest} {state[1].loss_scale.skipped} {state[1].loss_scale.scale}")


def kill_at(operation):
    """Let the n-th file operation of a save be the last thing that this process does."""
    left = [operation]

    def counted(function):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    os.fsync, os.rename, os.mkdir = counted(os.fsync), counted(os.rename), counted(os.mkdir)
    Path.rename, Path.mkdir, Path.write_text = counted(Path.rename), counted(Path.mkdir), counted(Path.write_text)
    os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)


class Start:
    """One start of a run, as so many processes."""

    def __init__(self, folder, processes=1, operation=None):
        port = free_port()
        self.pids, self.pipes, self.heard = [], [], []
        for rank in range(processes):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _child(folder, rank, processes, port, writer, operation)
            os.close(writer)
            self.pids.append(pid)
            self.pipes.append(reader)
        self.buffers = dict.fromkeys(self.pipes, b"")

    def listen(self, deadline, until=None):
        """Hear what the processes tell, to the deadline, or until they have ended, or rank 0 says a word."""
        open_pipes = [pipe for pipe in self.buffers if self.buffers[pipe] is not None]
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in select.select(open_pipes, [], [], left)[0]:
                data = os.read(pipe, 65536)
                if not data:
                    open_pipes.remove(pipe)
                    self.buffers[pipe] = None
                    continue
                *lines, self.buffers[pipe] = (self.buffers[pipe] + data).split(b"\n")
                self.heard += [(self.pipes.index(pipe), line.decode()) for line in lines]
            if until and any(rank == 0 and line.startswith(until) for rank, line in self.heard):
                return

    def end(self, gap=0.0):
        """Kill what is still there, one after another, and give the exit signals."""
        for pid in random.sample(self.pids, len(self.pids)):
            os.kill(pid, signal.SIGKILL)  # not waited for yet: its number is still its own
            time.sleep(gap)
        self.listen(time.monotonic() + 5)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        for pipe in self.pipes:
            os.close(pipe)
        return codes

    def told(self, word):
        return [line.removeprefix(word).strip() for rank, line in self.heard if rank == 0 and line.startswith(word)]


def _child(folder, rank, processes, port, writer, operation):
    code = 1
    try:
        if processes > 1:
            jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=30)

        def tell(line):
            os.write(writer, f"{line}\n".encode())
            if line.startswith("at ") and operation is not None:
                kill_at(operation)

        train(folder, tell)
        code = 0
        if processes > 1:
            jax.distributed.shutdown()
    except BaseException:
        os.write(writer, f"error {traceback.format_exc()[-800:]}".replace("\n", " | ").encode() + b"\n")
    finally:
        os._exit(code)


def whole_run(folder, processes=1):
    start = Start(folder, processes)
    start.listen(time.monotonic() + 60)
    codes = start.end()
    if codes != [0] * processes:
        raise RuntimeError(f"{codes}: {start.heard}")
    return start.told("end")


def killed_run(folder, seed, kills, processes=1, operations=()):
    """Kill a run so many times, at a random moment within a save or two after it resumed; or at the given file operations.

    Gives what it ended with, how often it was killed, how often in the middle of a save, and how many steps were lost.
    """
    rng = random.Random(seed)
    operations = list(operations)
    saved = killed = within = lost = 0
    while True:
        operation = operations.pop(0) if operations else None
        kill = operation is not None or killed < kills
        start = Start(folder, processes, operation)
        start.listen(time.monotonic() + 60, until="at " if kill and operation is None else None)
        if kill and operation is None:
            start.listen(time.monotonic() + rng.uniform(0.0, 0.4))
            codes = start.end(gap=rng.choice([0.0, 0.05]))
        else:
            codes = start.end()
        at = start.told("at ")
        if not at or (
            start.told("error") and processes == 1
        ):  # of two, the one that lives on fails when it misses the other
            raise RuntimeError(f"{codes}: {start.heard}")
        lost += int(at[0]) < saved
        saved = max([saved, *map(int, start.told("saved"))])
        if ended := start.told("end"):
            return {"end": ended, "killed": killed, "within": within, "lost": lost}
        if -signal.SIGKILL not in codes:
            raise RuntimeError(f"{codes}: {start.heard}")
        killed += 1
        within += (
            any(path.name.startswith(".writing-") for path in Path(folder).iterdir()) if Path(folder).exists() else 0
        )


def killed_runs(rank, world, port, folder, plans):
    """Whole runs of one and of two processes, the latter's last checkpoint read by one; and a killed run for each plan.

    A plan holds the keyword arguments of ``killed_run``.
    """
    results = {number: whole_run(f"{folder}/whole{number}", number) for number in (1, 2)}
    results["moved"] = whole_run(f"{folder}/whole2", 1)
    results["killed"] = [killed_run(f"{folder}/killed{i}", **plan) for i, plan in enumerate(plans)]
    return results
