"""Checks in two JAX processes with two devices each, for ``test_jax_processes.py``. Each runs in both at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import precision
from precision import CheckpointError, LossScale, NonFiniteGradientsError, PrecisionPolicy
from precision.testing import Fault, FaultPlan
from tests.distributed.jax_cases import Cases, replicas_of

case = Cases()
POLICY = PrecisionPolicy(loss_scale=LossScale(mode="dynamic", initial=8.0, growth_interval=3, max_consecutive_skips=2))


def run_cases(rank, world, port, folder):
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, initialization_timeout=60)
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    return case.run(folder)


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def spread(mesh, spec, value):
    """A global array of which each process makes its own pieces."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


PLAN = FaultPlan([Fault("overflow", 1, 3), Fault("nan", 4, 0), Fault("overflow", 5, 1), Fault("delay", 2, 1, 0.2)])


def steps(engine, spec):
    """Seven steps under the plan, an overflow on one device of one process at a time; gives weights and states."""
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.adam(0.5))
    grid = mesh()
    factors = PLAN.factors(7, 4)

    def loss_fn(w, x, factor):
        return ((w * x).sum(-1) * factor).mean()

    def jit_step(w, state, x, factor):
        _, grads = mp.value_and_grad(loss_fn)(w, x, factor, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def shard_step(w, state, x, factor):
        axis = "data" if spec == P() else None
        _, grads = mp.value_and_grad(loss_fn, axis_name=axis)(w, x, factor, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = spread(grid, spec, np.ones(4, np.float32))
    state = opt.init(w)
    specs = jax.tree.map(lambda s: s.spec, mp.state_shardings(opt, w))
    step = jit_step
    rows = P("data", None)
    if engine == "shard_map":
        ins = (spec, specs, rows if spec == P() else P(None, "data"), P("data"))
        step = jax.shard_map(shard_step, mesh=grid, in_specs=ins, out_specs=(spec, specs))
    step = jax.jit(step, donate_argnums=(0, 1))
    x = spread(grid, rows if spec == P() else P(None, "data"), np.ones((4, 4), np.float32))
    states = []
    for i in range(7):
        PLAN.wait(i, jax.process_index())
        w, state = step(w, state, x, spread(grid, P("data"), factors[i]))
        states.append(mp.loss_scaler.state_dict(state.loss_scale))
    assert step._cache_size() == 1
    return w, state, states


@case
def an_overflow_in_one_process_is_seen_by_both(folder):
    for engine, spec in (("jit", P()), ("jit", P("data")), ("shard_map", P())):
        w, state, states = steps(engine, spec)
        assert states == PLAN.trajectory(POLICY.loss_scale, 7), (engine, spec)
        assert replicas_of(state.loss_scale.scale) == [states[-1]["scale"]] * 2
        assert all(np.isfinite(piece).all() for piece in replicas_of(w))
        assert int(replicas_of(state.inner_state[0].count)[0]) == 4


@case
def shards_in_two_processes_agree(folder):
    """The weights are split over all devices; each sees its own gradients only."""
    w, _, states = steps("shard_map", P("data"))
    assert states == PLAN.trajectory(POLICY.loss_scale, 7)
    assert [piece.tolist() for piece in replicas_of(w)] == [[pytest.approx(1 - 0.5 * 4, abs=1e-3)]] * 2


@case
def divergence_ends_both_at_the_same_step_with_the_same_names(folder):
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.sgd(0.1))
    grid = mesh()
    params = {
        "embed": spread(grid, P("data"), np.ones(4, np.float32)),
        "head": spread(grid, P(), np.ones(4, np.float32)),
    }
    state = opt.init(params)
    bad = spread(grid, P("data"), np.float32([1, 1, 1, np.nan]))  # in the second process only

    @jax.jit
    def step(params, state, bad):
        grads = {"embed": params["embed"] * bad, "head": params["head"]}
        return opt.update(grads, state, params)[1]

    for _ in range(3):
        state = step(params, state, bad)
        mp.check(state)
    state = step(params, state, bad)
    with pytest.raises(NonFiniteGradientsError, match="4 steps in a row.*\n.*embed") as error:
        mp.check(state)
    assert [t.name for t in error.value.tensors] == ["embed"]


@case
def statistics_of_both_stay_where_one_skipped(folder):
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.sgd(0.1))
    grid = mesh()

    def step(w, state, mean, x):
        def loss_fn(w, x):
            return (w * x).sum(), 0.5 * mean + 0.5 * lax.pmean(x.mean(), "data")

        (_, new), grads = mp.value_and_grad(loss_fn, has_aux=True, axis_name="data")(w, x, loss_scale=state.loss_scale)
        _, state = opt.update(grads, state, w)
        return mp.select(state.finite, new, mean)

    run = jax.jit(jax.shard_map(step, mesh=grid, in_specs=(P(), P(), P(), P("data")), out_specs=P()))
    w, mean = spread(grid, P(), np.float32(1)), spread(grid, P(), np.float32(0))
    for x, want in ((np.ones(4), 0.5), (np.float32([1, 1, np.inf, 1]), 0.0)):
        kept = run(w, opt.init(w), mean, spread(grid, P("data"), np.float32(x)))
        assert replicas_of(kept) == [want] * 2


@case
def checkpoints_of_both(folder):
    mp = precision.bind(POLICY, backend="jax")
    saves = mp.checkpoints(f"{folder}/both", keep=2)
    grid, rank = mesh(), jax.process_index()
    keys = jax.jit(lambda: jax.random.split(jax.random.key(1), 4), out_shardings=NamedSharding(grid, P("data")))()
    state = {
        "w": spread(grid, P("data"), np.arange(8, dtype=np.float32)),
        "keys": keys,
        "host": np.arange(3),
        "local": jnp.float32(2.5),
        "n": 3,
    }
    assert saves.restore(state) is None
    saves.save(1, state, extra=[rank * 0])
    blank = {
        **state,
        "w": spread(grid, P("data"), np.zeros(8, np.float32)),
        "host": np.zeros(3, int),
        "local": jnp.float32(0),
    }
    step, got, extra = saves.restore(blank)
    assert (step, extra, got["n"]) == (1, [0], 3)
    assert [p.tolist() for p in replicas_of(got["w"])] == [
        [4.0 * rank, 4.0 * rank + 1],
        [4.0 * rank + 2, 4.0 * rank + 3],
    ]
    assert got["host"].tolist() == [0, 1, 2] and float(got["local"]) == 2.5 and got["local"].is_fully_addressable
    data = [jax.random.key_data(shard.data).tolist() for shard in got["keys"].addressable_shards]
    assert data == [jax.random.key_data(shard.data).tolist() for shard in keys.addressable_shards]
    assert saves.store.open()[1].world_size == 2
    # What only one process knows is nothing that one checkpoint could hold.
    with pytest.raises(CheckpointError, match="host, local: each process has its own"):
        saves.save(2, {**state, "host": np.full(3, rank), "local": jnp.float32(rank)})
    # One process fails: both say so, and what was there is there.
    with pytest.raises(CheckpointError, match="another process failed" if rank == 0 else "must be JSON"):
        saves.save(3, state, extra=None if rank == 0 else {1, 2})
    # They disagree about what to restore, or one cannot.
    with pytest.raises(
        CheckpointError,
        match="do not all see the same" if rank == 0 else r"host is int64\[3\] in the checkpoint and int64\[4\]",
    ):
        saves.restore({**blank, "host": np.zeros(3 + rank, np.int64)})
    saves.save(4, state)
    with pytest.raises(CheckpointError, match="do not all see the same"):
        saves.restore(blank, step=(1, 4)[rank])
    assert saves.steps() == [1, 4]


@case
def what_one_process_saved_comes_to_both(folder):
    saves = precision.bind(POLICY, backend="jax").checkpoints(f"{folder}/one")
    grid, rank = mesh(), jax.process_index()
    shapes = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(grid, P("data"))),
        "key": jax.random.key(0),
    }
    step, got, _ = saves.restore(shapes)
    assert step == 5
    assert np.concatenate(replicas_of(got["w"])).tolist() == [4.0 * rank + i for i in range(4)]
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
