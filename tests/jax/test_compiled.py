"""One trace for a whole run, and everything inside jit, scan, vmap, remat and with donated buffers."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import precision
from precision import LossScale, PrecisionPolicy

POLICY = PrecisionPolicy(
    compute_dtype="float16", loss_scale=LossScale(mode="dynamic", initial=2.0**10, growth_interval=4)
)
X = np.random.default_rng(0).standard_normal((20, 8, 3)).astype(np.float32)
BAD = {3, 4, 11}


class Run:
    """A small training step that counts its traces."""

    def __init__(self, policy=POLICY, donate=()):
        self.mp = precision.bind(policy, backend="jax")
        self.opt = self.mp.optimizer(optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 20)))
        self.traces = 0
        self.step = jax.jit(self.raw_step, donate_argnums=donate)

    def init(self):
        params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
        return params, self.opt.init(params)

    def raw_step(self, params, opt_state, x, poison=1.0):
        self.traces += 1
        mp = self.mp

        @mp.autocast
        def model(params, x):
            return jnp.tanh(x @ params["w"] + params["b"])

        def loss_fn(params, x):
            return jnp.mean(jax.checkpoint(model)(params, x) ** 2) * poison

        loss, grads = mp.value_and_grad(loss_fn)(params, x, loss_scale=opt_state.loss_scale)
        updates, opt_state = self.opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


def poison(i):
    return np.float32(np.inf if i in BAD else 1.0)


def train(run, state, steps):
    scales = []
    for i in steps:
        *state, _ = run.step(*state, X[i], poison(i))
        scales.append(float(state[1].loss_scale.scale))
    return tuple(state), scales


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("policy", [POLICY, PrecisionPolicy.from_name("mixed_bfloat16"), PrecisionPolicy()], ids=str)
def test_one_trace_for_the_whole_run(policy):
    run = Run(policy)
    state, _ = train(run, run.init(), range(20) if policy is POLICY else [i for i in range(20) if i not in BAD])
    assert run.traces == 1
    assert run.step._cache_size() == 1
    if policy is POLICY:
        assert int(state[1].loss_scale.skipped) == len(BAD)


@pytest.mark.parametrize("how", ["numpy", "python"])
def test_still_one_after_a_restore(how):
    """What a checkpoint gives back (NumPy arrays, or a dict of plain numbers) must not look like another type."""
    run = Run()
    state, _ = train(run, run.init(), range(8))
    if how == "numpy":
        restored = jax.tree.map(np.asarray, state)
    else:
        params, opt_state = state
        saved = run.mp.loss_scaler.state_dict(opt_state.loss_scale)
        restored = params, opt_state._replace(loss_scale=run.mp.loss_scaler.load_state_dict(saved))
    after, _ = train(run, restored, range(8, 20))
    assert run.traces == 1
    straight, _ = train(run, state, range(8, 20))
    equal(after, straight)


def test_donated_buffers():
    run = Run(donate=(0, 1))
    state = run.init()
    donated = state[0]["w"]
    state, scales = train(run, state, range(20))
    assert donated.is_deleted()
    plain, want = train(Run(), Run().init(), range(20))
    assert scales == want
    equal(state, plain)


def test_scan_takes_the_steps_that_a_loop_takes():
    run = Run()
    want, scales = train(run, run.init(), range(20))
    flags = np.asarray([poison(i) for i in range(20)])

    def body(state, batch):
        *state, loss = run.raw_step(*state, *batch)
        return tuple(state), (loss, state[1].loss_scale.scale)

    got, (_, scanned) = jax.jit(lambda state: jax.lax.scan(body, state, (X, flags)))(run.init())
    assert scanned.tolist() == scales
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_vmap_trains_several_models_each_with_its_own_scale():
    run = Run()
    step = jax.jit(jax.vmap(run.raw_step, in_axes=(0, 0, None, 0)))
    params = {"w": jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), 0.5)]), "b": jnp.zeros((2, 2))}
    state = params, jax.vmap(run.opt.init)(params)
    for i in range(6):
        before = state[0]
        *state, _ = step(*state, X[i], jnp.asarray([1.0, np.inf if i == 2 else 1.0]))
        moved = (np.asarray(state[0]["w"]) != np.asarray(before["w"])).any((1, 2))
        assert moved.tolist() == [True, i != 2]
    assert state[1].loss_scale.scale.tolist() == [2048.0, 512.0]
    assert state[1].loss_scale.skipped.tolist() == [0, 1]


def test_pmap_like_replicas_step_or_skip_together():
    """Four replicas under one mapped axis: one overflows, none steps."""
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.sgd(0.1))
    params = jnp.ones(2)
    opt_state = opt.init(params)
    grad = mp.value_and_grad(lambda w, x: (w * x).astype(jnp.float32).mean(), cast_argnums=0, axis_name="replica")

    def step(x):
        _, grads = grad(params, x, loss_scale=opt_state.loss_scale)
        updates, new = opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new.finite, new.loss_scale.scale

    x = jnp.ones((4, 2)).at[2, 1].set(jnp.inf)
    weights, finite, scales = jax.vmap(step, axis_name="replica")(x)
    assert finite.tolist() == [False] * 4
    assert (weights == 1).all()
    assert scales.tolist() == [512.0] * 4


FOUR_DEVICES = """
import jax, jax.numpy as jnp, optax, precision
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
policy = precision.PrecisionPolicy(loss_scale=precision.LossScale(mode="dynamic", initial=8.0))
mp = precision.bind(policy, backend="jax")
opt = mp.optimizer(optax.sgd(1.0))
grad = mp.value_and_grad(lambda w, x: (w * x).mean(), axis_name="d")

def step(w, state, x):
    loss, grads = grad(w, x, loss_scale=state.loss_scale)
    updates, state = opt.update(grads, state, w)
    return loss, grads, optax.apply_updates(w, updates), state.finite

mesh = jax.make_mesh((4,), ("d",))
with jax.set_mesh(mesh):
    for x in ([1.0, 2.0, 3.0, 4.0], [1.0, jnp.inf, 3.0, 4.0]):
        x = jax.reshard(jnp.asarray(x), P("d"))
        w, state = jax.tree.map(lambda a: jax.reshard(a, P()), (jnp.float32(2.0), opt.init(jnp.float32(2.0))))
        for check in (True, False):
            run = jax.shard_map(step, in_specs=(P(), P(), P("d")), out_specs=P(), check_vma=check)
            print([float(v) for v in jax.jit(run)(w, state, x)])

both = mp.value_and_grad(lambda w, x: (w * x).mean(), axis_name=("a", "b"))
mesh = jax.make_mesh((2, 2), ("a", "b"))
with jax.set_mesh(mesh):
    w, scale = jax.tree.map(lambda a: jax.reshard(a, P()), (jnp.float32(2.0), mp.loss_scaler.init()))
    x = jax.reshard(jnp.arange(1.0, 5.0), P(("a", "b")))
    for check in (True, False):
        run = lambda w, scale, x: both(w, x, loss_scale=scale)
        run = jax.shard_map(run, in_specs=(P(), P(), P(("a", "b"))), out_specs=P(), check_vma=check)
        print([float(v) for v in jax.jit(run)(w, scale, x)])
"""


def test_shard_map_averages_once_and_skips_everywhere():
    """With check_vma, shard_map sums gradients of replicated parameters itself: averaged after that they are 4 times too large."""
    done = subprocess.run([sys.executable, "-c", FOUR_DEVICES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines[:2] == ["[5.0, 2.5, -0.5, 1.0]"] * 2
    assert lines[2:4] == ["[inf, inf, 2.0, 0.0]"] * 2
    assert lines[4:] == ["[5.0, 2.5]"] * 2, "over two axes, too"


def test_the_policy_is_a_static_argument():
    calls = []

    @jax.jit
    def plain(x):
        return x

    def cast(x, policy):
        calls.append(policy)
        return precision.bind(policy, backend="jax").cast_to_compute(x)

    compiled = jax.jit(cast, static_argnums=1)
    for _ in range(2):
        for name in ("mixed_float16", "mixed_bfloat16"):
            out = compiled(plain(jnp.ones(1)), PrecisionPolicy.from_name(name))
            assert out.dtype.name == name.removeprefix("mixed_")
    assert len(calls) == 2


def test_the_whole_step_exports_without_callbacks():
    run = Run()
    text = jax.jit(run.raw_step).lower(*run.init(), X[0], np.float32(1)).as_text()
    assert "callback" not in text
    assert "f16" in text


def test_an_uncompiled_step_reads_nothing_from_the_device(monkeypatch):
    """Every read of an array goes through the property ``_value``; counted here, with a read to prove that it counts."""
    run = Run()
    params, opt_state = run.init()
    params, opt_state, _ = run.raw_step(params, opt_state, jnp.asarray(X[0]))
    x = jnp.asarray(X[1])
    array = type(x)
    value, reads = array._value, []
    monkeypatch.setattr(array, "_value", property(lambda self: reads.append(1) or value.fget(self)))
    scaler = run.mp.loss_scaler

    def step(params, opt_state):
        def loss_fn(params, x):
            return jnp.mean(run.mp.autocast(lambda p, x: x @ p["w"] + p["b"])(params, x) ** 2)

        loss, grads = run.mp.value_and_grad(loss_fn)(params, x, loss_scale=opt_state.loss_scale)
        updates, new = run.opt.update(grads, opt_state, params)
        _, finite = scaler.unscale(grads, new.loss_scale)
        scaler.update(new.loss_scale, finite)
        return run.mp.select(new.finite, optax.apply_updates(params, updates), params), new, loss

    for _ in range(3):
        params, opt_state, loss = step(params, opt_state)
    assert reads == []
    float(loss)
    assert len(reads) == 1
