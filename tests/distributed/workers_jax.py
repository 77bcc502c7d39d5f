"""Checks on four CPU devices of one process, for ``test_jax_devices.py``: shard_map, pmap, jit with NamedSharding."""

import flax.training.dynamic_scale as flax_scale
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precision
from precision import LossScale, NonFiniteGradientsError, PolicyError, PrecisionPolicy, UnsupportedError
from precision.testing import FaultPlan
from precision_jax import all_finite
from tests.distributed.jax_cases import Cases, replicas_of

case = Cases()
SCALED = PrecisionPolicy(loss_scale=LossScale(mode="dynamic", initial=8.0, growth_interval=3))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def run_cases(rank, world, port):
    return case.run()


def bind(policy=SCALED, **scale):
    return precision.bind(policy.with_(loss_scale=policy.loss_scale.with_(**scale)) if scale else policy, backend="jax")


def mesh_of(shape=(4,), names=("data",), kind=AUTO):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(mesh, spec, tree):
    return jax.tree.map(lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec)), tree)


def shard_map(function, mesh, in_specs, out_specs, check=True):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check))


def same_on_all(*arrays):
    for array in arrays:
        first, *others = replicas_of(array)
        for other in others:
            np.testing.assert_array_equal(other, first)


# ---- autocast ------------------------------------------------------------------------------------------------------


@case
def autocast_enters_shard_map_and_keeps_shardings():
    """On four devices as on one: forward, gradients (summed over the mesh), and where the results are."""
    mp, mesh = bind(PrecisionPolicy(compute_dtype="bfloat16")), mesh_of()
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (16, 16)))

    def local(w, x):
        return jnp.mean(jax.nn.softmax(jnp.tanh(x @ w) @ w.T) ** 2)

    def averaged(w, x):
        return lax.pmean(local(w, x), "data")

    want = jax.jit(jax.value_and_grad(mp.autocast(local)))(w, x)
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    split = put(mesh, P("data"), x)
    for run in (
        mp.autocast(jax.shard_map(averaged, **specs)),
        jax.shard_map(mp.autocast(averaged), **specs),
        mp.autocast(local),  # jit with a sharded batch
    ):
        step = jax.jit(jax.value_and_grad(run))
        jaxpr = str(step.trace(w, split).jaxpr)
        assert "precision_contract" in jaxpr and "dot_general[" not in jaxpr, "every product is low"
        value, grad = step(w, split)
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(value, want[0], rtol=1e-3)
        np.testing.assert_allclose(grad, want[1], rtol=0.02, atol=1e-2 * float(jnp.abs(want[1]).max()))
        same_on_all(grad)
    out = jax.jit(mp.autocast(lambda x: jax.nn.relu(x @ w)))(split)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


# ---- agreement -----------------------------------------------------------------------------------------------------


def sharded_step(mp, opt):
    """A model whose weights are split over "model" (each device its piece), the batch over "data"; nothing names the axes."""

    def step(w, state, x):
        def loss_fn(w):
            return lax.pmean(lax.psum((x * w).sum(), "model"), "data")

        _, grads = mp.value_and_grad(loss_fn)(w, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    return step


@case
def shards_of_other_parameters_agree_over_all_axes():
    """Piece 3 of the weights overflows on the devices that hold it; the others see finite gradients of their own pieces."""
    mesh = mesh_of((2, 2), ("data", "model"))
    mp = bind()
    opt = mp.optimizer(optax.adam(0.5))
    w = put(mesh, P("model"), np.ones(4, np.float32))
    state = opt.init(w)
    specs = jax.tree.map(lambda s: s.spec, mp.state_shardings(opt, w))
    for check in (True, False):
        run = shard_map(
            sharded_step(mp, opt), mesh, (P("model"), specs, P("data", "model")), (P("model"), specs), check
        )
        for bad in (None, 0, 3):
            x = np.ones((2, 4), np.float32)
            if bad is not None:
                x[1, bad] = np.inf
            new, after = run(w, state, put(mesh, P("data", "model"), x))
            assert replicas_of(after.finite) == [bad is None] * 4
            assert replicas_of(after.loss_scale.scale) == [8.0 if bad is None else 4.0] * 4
            assert bool((new == w).all()) == (bad is not None)
            assert int(after.inner_state[0].count) == (bad is None)


@case
def a_thousand_random_patterns_on_four_shards():
    """Each device's own parameters overflow or not; state and weights of each after every step against the rule's."""
    steps, count = 12, 1000
    plans = [FaultPlan.random(seed, steps, 4, rate=0.02 + seed % 10 / 100) for seed in range(count)]
    factors = np.stack([plan.factors(steps, 4) for plan in plans])
    mp = bind()
    opt = mp.optimizer(optax.sgd(1.0))

    def run(slopes, factors):
        def step(carry, factor):
            w, state = carry
            grad = mp.value_and_grad(lambda w: (w * slopes * factor).sum())
            _, grads = grad(w, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, w)
            w = optax.apply_updates(w, updates)
            return (w, state), (jnp.stack([field.astype(jnp.float32) for field in state.loss_scale])[None], w)

        return lax.map(lambda each: lax.scan(step, (slopes * 0, opt.init(slopes)), each)[1], factors)

    want = np.float32(
        [[list(state.values())[1:] for state in plan.trajectory(mp.policy.loss_scale, steps)] for plan in plans]
    )
    taken = np.cumsum([plan.finite(steps) for plan in plans], axis=1)
    args = put(mesh_of(), P("data"), np.float32([1, 2, 3, 4])), put(mesh_of(), P(None, None, "data"), factors)
    for check in (True, False):
        specs = (P("data"), P(None, None, "data"))
        states, weights = shard_map(run, mesh_of(), specs, P(None, None, "data"), check)(*args)
        np.testing.assert_array_equal(states, np.repeat(want[:, :, None], 4, axis=2))
        np.testing.assert_array_equal(weights, -taken[:, :, None] * np.float32([1, 2, 3, 4]))


@case
def natively_the_shards_part_ways():
    """The same model under jmp's flag and optax.apply_if_finite, and flax's DynamicScale: each device asks itself only."""
    mesh = mesh_of()
    x = np.ones(4, np.float32)
    x[2] = np.inf
    w, x = put(mesh, P("data"), (np.ones(4, np.float32), x))

    def with_jmp(w, x):
        scale = jmp.DynamicLossScale(jnp.float32(8.0))
        grads = scale.unscale(jax.grad(lambda w: scale.scale((w * x).sum()))(w))
        finite = jmp.all_finite(grads)
        return jmp.select_tree(finite, w - grads, w), scale.adjust(finite).loss_scale[None]

    def with_flax(w, x):
        scale = flax_scale.DynamicScale(scale=jnp.float32(8.0), fin_steps=jnp.int32(0))
        new, finite, _, grads = scale.value_and_grad(lambda w: (w * x).sum())(w)
        return jnp.where(finite, w - grads, w), new.scale[None]

    def with_optax(w, x):
        tx = optax.apply_if_finite(optax.sgd(1.0), 5)
        grads = jax.grad(lambda w: (w * x).sum())(w)
        updates, state = tx.update(grads, tx.init(w), w)
        return optax.apply_updates(w, updates), state.total_notfinite[None]

    def with_ours(w, x):
        mp = bind()
        opt = mp.optimizer(optax.sgd(1.0))
        state = opt.init(w)
        _, grads = mp.value_and_grad(lambda w: (w * x).sum())(w, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state.loss_scale.scale[None]

    def run(step):
        return [v.tolist() for v in shard_map(step, mesh, (P("data"), P("data")), P("data"), check=False)(w, x)]

    assert run(with_jmp) == [[0, 0, 1, 0], [8, 8, 4, 8]], "three devices step, and the scales differ"
    assert run(with_flax) == [[0, 0, 1, 0], [8, 8, 4, 8]]
    assert run(with_optax) == [[0, 0, 1, 0], [0, 0, 1, 0]]
    assert run(with_ours) == [[1, 1, 1, 1], [4, 4, 4, 4]]


@case
def flax_without_its_axis_lets_replicas_of_one_model_part_ways():
    """Gradients averaged by the user afterwards do not mend it: the flag was each replica's own."""
    mesh = mesh_of()
    w, x = put(mesh, P(), np.float32(2.0)), put(mesh, P("data"), np.float32([1, np.inf, 1, 1]))

    def native(w, x):
        scale = flax_scale.DynamicScale(scale=jnp.float32(8.0), fin_steps=jnp.int32(0))
        new, finite, _, grad = scale.value_and_grad(lambda w: (w * x).sum())(w)
        return jnp.where(finite, w - lax.pmean(grad, "data"), w)[None], new.scale[None]

    weights, scales = shard_map(native, mesh, (P(), P("data")), P("data"), check=False)(w, x)
    assert not np.isfinite(np.asarray(weights)).all(), "those that saw nothing bad step on the others' infinity"
    assert scales.tolist() == [8, 4, 8, 8]
    mp = bind()
    opt = mp.optimizer(optax.sgd(1.0))
    grad = mp.value_and_grad(lambda w, x: (w * x).sum(), axis_name="data")

    def ours(w, x):
        state = opt.init(w)
        _, grads = grad(w, x, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates)[None], state.loss_scale.scale[None]

    weights, scales = shard_map(ours, mesh, (P(), P("data")), P("data"), check=False)(w, x)
    assert (weights.tolist(), scales.tolist()) == ([2.0] * 4, [4.0] * 4)


@case
def gradients_that_the_user_reduces_himself():
    """He takes a median, which hides one replica's infinity from three of them: the flag was found before, and is agreed on."""
    mesh = mesh_of()
    mp = bind()
    opt = mp.optimizer(optax.sgd(1.0))

    def step(w, state, x):
        loss = lambda w: (w * x).sum()  # noqa: E731
        _, grads = mp.value_and_grad(loss)(w, loss_scale=state.loss_scale)
        finite = jnp.isfinite(grads).all()
        grads = jnp.median(lax.all_gather(grads, "data"), 0)
        updates, state = opt.update(grads, state, w, finite=finite)
        return optax.apply_updates(w, updates), state

    w = put(mesh, P(), np.float32(2.0))
    run = shard_map(step, mesh, (P(), P(), P("data")), P(), check=False)
    for x, want in (([1, 1, 1, 1], (1.0, 8.0)), ([1, 1, np.inf, 1], (2.0, 4.0))):
        new, state = run(w, put(mesh, P(), opt.init(w)), put(mesh, P("data"), np.float32(x)))
        same_on_all(new, state.loss_scale.scale)
        assert (float(new), float(state.loss_scale.scale)) == want


@case
def the_neutral_scaler_agrees():
    mesh = mesh_of((2, 2), ("a", "b"))
    scaler = bind().loss_scaler

    def step(axis_name, grads):
        state = scaler.init()
        _, finite = scaler.unscale(grads, state, axis_name)
        finite = finite[None, None]
        return finite, all_finite(grads, axis_name)[None, None]

    grads = put(mesh, P("a", "b"), np.float32([[1, 1], [1, np.nan]]))
    for check in (True, False):
        for axis_name, want in (
            (None, [[False, False], [False, False]]),
            (("a", "b"), [[False, False], [False, False]]),
            ("a", [[True, False], [True, False]]),
            ("b", [[True, True], [False, False]]),
            ((), [[True, True], [True, False]]),
        ):
            run = shard_map(lambda g, n=axis_name: step(n, g), mesh, P("a", "b"), P("a", "b"), check)
            assert [out.tolist() for out in run(grads)] == [want, want], (axis_name, check)


@case
def an_axis_that_is_none_is_refused():
    with pytest.raises(PolicyError, match="axis_name is the name of a mapped axis"):
        bind().optimizer(optax.sgd(0.1), axis_name=3)
    mp = bind()
    opt = mp.optimizer(optax.sgd(0.1), axis_name="nowhere")
    with pytest.raises(NameError, match="nowhere"):
        opt.update(jnp.ones(2), opt.init(jnp.ones(2)), jnp.ones(2))


@case
def pmap_needs_no_name():
    """Each device its own data, gradients not reduced (the weights are pieces): they agree all the same."""
    mp = bind()
    opt = mp.optimizer(optax.sgd(1.0))

    def step(w, x):
        state = opt.init(w)
        _, grads = mp.value_and_grad(lambda w: (w * x).sum())(w, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    x = np.ones((4, 2), np.float32)
    for bad in (False, True):
        x[1, 1] = np.inf if bad else 1
        w, state = jax.pmap(step)(np.ones((4, 2), np.float32), x)
        assert state.finite.tolist() == [not bad] * 4
        assert state.loss_scale.scale.tolist() == [4.0 if bad else 8.0] * 4
        assert w.tolist() == [[1.0 if bad else 0.0] * 2] * 4
    assert mp.loss_scaler.state_dict(state.loss_scale)["scale"] == 4.0, "one state, kept four times"


@case
def each_replica_a_model_of_its_own():
    """An empty tuple: no agreement. And an axis of vmap inside counts only if it is named."""
    mesh = mesh_of()
    mp = bind()
    alone = mp.optimizer(optax.sgd(1.0), axis_name=())
    two = mp.optimizer(optax.sgd(1.0), axis_name=("data", "inner"))

    def ensemble(w, x):
        _, state = alone.update(w * x, alone.init(w), w)
        return state.loss_scale.scale[None]

    def both(w, x):
        return jax.vmap(lambda w, x: two.update(w * x, two.init(w), w)[1].loss_scale.scale, axis_name="inner")(w, x)

    x = np.ones(8, np.float32)
    x[3] = np.nan
    w, x = put(mesh, P("data"), (np.ones(8, np.float32), x))
    for check in (True, False):
        assert shard_map(ensemble, mesh, P("data"), P("data"), check)(w, x).tolist() == [8, 4, 8, 8]
    # With check_vma JAX 0.10.2 has no collective over an axis of vmap.
    assert shard_map(both, mesh, P("data"), P("data"), False)(w, x).tolist() == [4] * 8


@case
def one_small_collective_a_step_and_none_where_all_hold_the_same():
    mesh = mesh_of()
    for settings, size in (({}, ""), ({"max_consecutive_skips": 3}, "2")):
        mp = bind(**settings)
        opt = mp.optimizer(optax.adam(0.1))
        grad = mp.value_and_grad(lambda w, x: (w["a"] * w["b"] * x).sum(), axis_name="data")

        def step(w, state, x, grad=grad, opt=opt):
            _, grads = grad(w, x, loss_scale=state.loss_scale)
            return opt.update(grads, state, w)

        w = put(mesh, P(), {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})
        args = w, put(mesh, P(), opt.init(w)), put(mesh, P("data"), np.ones(12, np.float32))
        for check, want in ((True, 0), (False, 1)):
            jaxpr = str(jax.make_jaxpr(shard_map(step, mesh, (P(), P(), P("data")), P(), check))(*args))
            assert jaxpr.count("pmin") == want, "the averaged gradients are known to be the same everywhere"
            if want:
                assert f"i32[{size}]" in next(line for line in jaxpr.splitlines() if "pmin" in line)
            assert "callback" not in jaxpr


@case
def the_state_stays_replicated_through_a_scan():
    """check_vma would refuse a carry whose type changes, or an output that may differ."""
    mesh = mesh_of()
    mp = bind(max_consecutive_skips=5)
    opt = mp.optimizer(optax.MultiSteps(optax.adam(0.1), 2), master_weights=True)
    grad = mp.value_and_grad(lambda w, x: (w * x).mean(), axis_name="data")

    def train(w, state, xs):
        def step(carry, x):
            w, state = carry
            _, grads = grad(w, x, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), state.loss_scale.scale

        return lax.scan(step, (w, state), xs)

    xs = np.ones((7, 4, 2), np.float32)
    xs[2, 1, 0], xs[3, 3, 1] = np.inf, np.nan
    w = put(mesh, P(), jnp.ones((), jnp.float16))
    args = w, put(mesh, P(), opt.init(w)), put(mesh, P(None, "data"), xs)
    results = []
    for check in (True, False):
        (w_new, state), scales = shard_map(train, mesh, (P(), P(), P(None, "data")), P(), check)(*args)
        assert scales.tolist() == [8, 8, 4, 2, 2, 2, 4]
        assert int(state.inner_state.gradient_step) == 2 and int(state.loss_scale.skipped) == 2
        same_on_all(w_new, *jax.tree.leaves(state))
        results.append((float(w_new), float(state.masters)))
    assert results[0] == results[1]

    # One device on the finite rows does the same accumulation: five micro-batches, two steps.
    @jax.jit
    def one(w, state, x):
        _, grads = mp.value_and_grad(lambda w, x: (w * x).mean())(w, x, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    alone, state = jnp.ones((), jnp.float16), jax.jit(opt.init)(jnp.ones((), jnp.float16))
    for x in xs[[0, 1, 4, 5, 6]]:
        alone, state = one(alone, state, x)
    assert results[0] == (float(alone), float(state.masters))


# ---- reduction -------------------------------------------------------------------------------------------------------


@case
def an_overflow_in_the_reduce_dtype_is_seen():
    """30000 on each of four replicas: the mean is a float16 number, the sum on the way to it is not."""
    mesh = mesh_of()
    for reduce_dtype, finite in (("float16", False), ("float32", True), ("bfloat16", True)):
        policy = SCALED.with_(compute_dtype="float16", reduce_dtype=reduce_dtype)
        mp = bind(policy.with_(loss_scale=LossScale(mode="dynamic", initial=1.0)))
        opt = mp.optimizer(optax.sgd(2.0**-20))
        grad = mp.value_and_grad(lambda w, x: (w * x).astype(jnp.float32).sum(), axis_name="data", cast_argnums=(0, 1))

        def step(w, state, x, grad=grad, opt=opt):
            _, grads = grad(w, x, loss_scale=state.loss_scale)
            return grads, opt.update(grads, state, w)[1]

        w = put(mesh, P(), np.float32(1.0))
        run = shard_map(step, mesh, (P(), P(), P("data")), P())
        grads, state = run(w, put(mesh, P(), opt.init(w)), put(mesh, P("data"), np.full(4, 30000, np.float32)))
        assert bool(state.finite) is finite, reduce_dtype
        assert grads.dtype == jnp.float32
        if finite:
            assert float(grads) == float(jnp.asarray(30000, reduce_dtype))


@case
def averaging_the_gradients_of_sharded_parameters_is_refused():
    """Over the axis that shards them, the gradients belong to different parameters."""
    mesh = mesh_of()
    mp = bind()
    grad = mp.value_and_grad(lambda w, x: (w["kernel"] * x).sum(), axis_name="data")
    w, x = put(mesh, P("data"), ({"kernel": np.ones(4, np.float32)}, np.ones(4, np.float32)))
    run = shard_map(lambda w, x: grad(w, x, loss_scale=mp.loss_scaler.init())[1], mesh, P("data"), P("data"))
    with pytest.raises(PolicyError, match="kernel is sharded over axis 'data'.*pmean"):
        run(w, x)


@case
def fully_sharded_parameters_in_shard_map():
    """The recipe of the docs: gather inside the function, average the loss there; gradients come back scattered."""
    mesh = mesh_of()
    mp = bind(SCALED.with_(compute_dtype="bfloat16"))
    opt = mp.optimizer(optax.chain(mp.clip_by_global_norm(0.5, P("data")), optax.adam(0.1)))
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((8, 3)).astype(np.float32), rng.standard_normal((4, 5, 8)).astype(np.float32)

    def whole_loss(w, x):
        return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    def shard_loss(piece, x):
        return lax.pmean(whole_loss(lax.all_gather(piece, "data", tiled=True), x[0]), "data")

    def step(loss_fn, w, state, x):
        loss, grads = mp.value_and_grad(loss_fn, cast_argnums=(0, 1))(w, x, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss

    pieces, state = put(mesh, P("data"), w), opt.init(jnp.asarray(w))
    specs = jax.tree.map(lambda s: s.spec, mp.state_shardings(opt, pieces))
    run = shard_map(
        lambda w, s, x: step(shard_loss, w, s, x), mesh, (P("data"), specs, P("data")), (P("data"), specs, P())
    )
    alone, alone_state = jnp.asarray(w), opt.init(jnp.asarray(w))
    single = jax.jit(lambda w, s, x: step(whole_loss, w, s, x.reshape(-1, 8)))
    for i in range(4):
        batch = x * np.float32(np.inf) if i == 1 else x
        pieces, state, loss = run(pieces, state, put(mesh, P("data"), batch))
        alone, alone_state, alone_loss = single(alone, alone_state, batch)
        np.testing.assert_allclose(pieces, alone, atol=2e-2)
        assert bool(state.finite) == bool(alone_state.finite) == (i != 1)
    assert float(loss) == pytest.approx(float(alone_loss), rel=1e-2)


# ---- clipping --------------------------------------------------------------------------------------------------------


@case
def clipping_takes_the_norm_of_all_the_shards():
    mesh = mesh_of((2, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    grads = {"kernel": rng.standard_normal((4, 3)), "deep": rng.standard_normal(8), "bias": rng.standard_normal(3)}
    grads = {k: v.astype(np.float32) for k, v in grads.items()}
    specs = {"kernel": P("model"), "deep": P(("data", "model")), "bias": P()}
    want, _ = optax.clip_by_global_norm(0.7).update(grads, optax.EmptyState())
    placed = {k: put(mesh, specs[k], v) for k, v in grads.items()}
    mp = bind()

    def clip(tx):
        return lambda g: tx.update(g, optax.EmptyState())[0]

    def norm(g):
        return mp.global_norm(g), mp.global_norm(g, specs)

    for got in shard_map(norm, mesh, (specs,), P())(placed):
        assert float(got) == pytest.approx(float(optax.global_norm(grads)), rel=1e-6)
    for check, ours in (
        (True, mp.clip_by_global_norm(0.7)),
        (True, mp.clip_by_global_norm(0.7, specs)),
        (False, mp.clip_by_global_norm(0.7, specs)),
    ):
        got = shard_map(clip(ours), mesh, (specs,), specs, check)(placed)
        for k in grads:
            np.testing.assert_allclose(got[k], want[k], rtol=1e-6)
    native = shard_map(clip(optax.clip_by_global_norm(0.7)), mesh, (specs,), specs, False)(placed)
    factors = np.asarray(native["deep"]) / grads["deep"]
    assert np.ptp(factors) > 0.05, "optax: every shard by another factor"
    with pytest.raises(UnsupportedError, match=r"give specs"):
        shard_map(clip(mp.clip_by_global_norm(0.7)), mesh, (specs,), specs, False)(placed)


@case
def clipping_elsewhere_is_optaxs_bit_for_bit():
    mp = bind()
    for big in (1.0, 1e-3):
        grads = {"a": jnp.arange(5.0) * big, "b": jnp.asarray([[1 + 2j]]) * big, "n": jnp.arange(2)}
        ours, _ = jax.jit(lambda g: mp.clip_by_global_norm(1.0).update(g, None))(grads)
        theirs, _ = jax.jit(lambda g: optax.clip_by_global_norm(1.0).update(g, None))(
            {k: v for k, v in grads.items() if k != "n"}
        )
        for k in theirs:
            np.testing.assert_array_equal(ours[k], theirs[k])
        assert ours["n"] is not None
    with pytest.raises(PolicyError, match="above 0"):
        mp.clip_by_global_norm(-1.0)


# ---- jit with NamedSharding ------------------------------------------------------------------------------------------


def mlp_loss(params, x, y):
    h = jnp.tanh(x @ params["in"]["kernel"])
    return jnp.mean(((h @ params["out"]["kernel"]).astype(jnp.float32) - y) ** 2)


LAYOUTS = {
    "data": ((4,), ("data",), {"in": P(), "out": P()}, P("data")),
    "fully sharded": ((4,), ("data",), {"in": P("data", None), "out": P("data", None)}, P("data")),
    "two axes": ((2, 2), ("data", "model"), {"in": P(None, "model"), "out": P("model", None)}, P("data")),
}


def jit_step(mp, opt):
    traces = []

    def step(params, state, x, y, factor):
        traces.append(1)
        loss, grads = mp.value_and_grad(lambda p: mlp_loss(p, x, y) * factor, cast_argnums=())(
            params, loss_scale=state.loss_scale
        )
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, traces


@case
def under_jit_the_flag_covers_every_device():
    """On 1-D and 2-D meshes, Auto and Explicit, with donated buffers: as one device does; one trace; the scale on every device."""
    rng = np.random.default_rng(0)
    params = {
        "in": {"kernel": rng.standard_normal((8, 8)).astype(np.float32) / 3},
        "out": {"kernel": rng.standard_normal((8, 4)).astype(np.float32) / 3},
    }
    x, y = rng.standard_normal((8, 8)).astype(np.float32), rng.standard_normal((8, 4)).astype(np.float32)
    factors = np.ones((6, 8, 1), np.float32)
    factors[2, 7], factors[4, 0] = np.inf, np.nan  # one row of the batch: one device's
    mp = bind(max_consecutive_skips=4)
    opt = mp.optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)))

    def batch(i):
        return x * factors[i], y, np.float32(1)

    step, _ = jit_step(mp, opt)
    alone, alone_state = params, opt.init(params)
    single, scales = jax.jit(step), []
    for i in range(6):
        alone, alone_state, _ = single(alone, alone_state, *batch(i))
        scales.append(float(alone_state.loss_scale.scale))
    assert scales == [8, 8, 4, 4, 2, 2]
    for name, (shape, names, specs, rows) in LAYOUTS.items():
        for kind in (AUTO, EXPLICIT):
            if kind is (AUTO if name == "data" else EXPLICIT):
                continue  # one kind each: under Explicit a model must say how its products of sharded matrices are sharded
            mesh = mesh_of(shape, names, kind)
            placed = {k: put(mesh, specs[k], v) for k, v in params.items()}
            shardings = mp.state_shardings(opt, placed)
            state = jax.jit(opt.init, out_shardings=shardings)(placed)
            step, traces = jit_step(mp, opt)
            run = jax.jit(step, donate_argnums=(0, 1))
            for i in range(6):
                bx, by, one = batch(i)
                kept = placed
                placed, state, _ = run(placed, state, put(mesh, rows, bx), put(mesh, rows, by), one)
                assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
                assert replicas_of(state.loss_scale.scale) == [scales[i]] * 4, (name, kind)
            assert len(traces) == 1, (name, kind)
            assert run._cache_size() <= 2  # the first call's state may be laid out otherwise
            for got, want in zip(jax.tree.leaves(placed), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)
            assert int(state.loss_scale.skipped) == 2


@case
def the_states_shardings_are_the_parameters():
    mp = bind(max_consecutive_skips=4)
    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of((2, 2), ("data", "model"), kind)
        params = {
            "in": {
                "kernel": put(mesh, P(None, "model"), jnp.ones((4, 8), jnp.bfloat16)),
                "bias": put(mesh, P(), jnp.ones(8)),
            },
            "out": put(mesh, P(("data", "model")), jnp.ones((4, 3))),
        }
        counts = []
        for tx in (
            optax.adamw(1e-3),
            optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
            optax.multi_transform(
                {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"in": {"kernel": "a", "bias": "b"}, "out": "a"}
            ),
            optax.adafactor(0.1, min_dim_size_to_factor=2),
        ):
            opt = mp.optimizer(tx, master_weights=True)
            shardings = mp.state_shardings(opt, params)
            state = jax.jit(opt.init, out_shardings=shardings)(params)
            assert jax.tree.structure(state) == jax.tree.structure(shardings)
            assert state.masters["in"]["kernel"].sharding.spec == P(None, "model")
            assert state.masters["in"]["kernel"].dtype == jnp.float32
            for leaf in jax.tree.leaves((state.loss_scale, state.finite, state.finite_leaves)):
                assert leaf.sharding.is_fully_replicated and len(leaf.addressable_shards) == 4
            known = {(4, 8): P(None, "model"), (4, 3): P(("data", "model"))}
            sharded = 0
            for leaf in jax.tree.leaves(state.inner_state):
                assert leaf.sharding.spec == known.get(leaf.shape, P()), leaf.shape
                sharded += leaf.shape in known
            counts.append(sharded)
        assert counts == [4, 4, 4, 0], (
            "mu, nu; the momentum and the accumulator; those of each group; what is factored is not"
        )
        # From shapes alone, without any array.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        assert mp.state_shardings(opt, shapes) == shardings
    bare = put(mesh, P("data"), jnp.ones(4))
    moments = mp.state_shardings(mp.optimizer(optax.adam(0.1)), bare).inner_state[0]
    assert (moments.mu.spec, moments.count.spec) == (P("data"), P())
    with pytest.raises(UnsupportedError, match="on no mesh: w"):
        mp.state_shardings(mp.optimizer(optax.sgd(0.1)), {"w": jnp.ones(3)})


@case
def a_shard_map_over_one_axis_leaves_the_other_to_jit():
    mesh = mesh_of((2, 2), ("data", "model"))
    mp = bind()
    opt = mp.optimizer(optax.sgd(1.0))
    grad = mp.value_and_grad(lambda w, x: (x @ w).sum(), axis_name="data")

    def step(w, state, x):
        _, grads = grad(w, x, loss_scale=state.loss_scale)
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), axis_names={"data"}))
    for row, want in ((None, 8.0), (0, 4.0), (1, 4.0)):
        x = np.ones((2, 4), np.float32)
        if row is not None:
            x[row, 3] = np.inf
        w = put(mesh, P("model"), np.ones(4, np.float32))
        new, state = run(w, put(mesh, P(), opt.init(w)), put(mesh, P("data", "model"), x))
        assert float(state.loss_scale.scale) == want
        assert new.tolist() == ([0.0] * 4 if row is None else [1.0] * 4)


# ---- statistics and divergence -----------------------------------------------------------------------------------------


@case
def statistics_stay_where_any_replica_skipped():
    mesh = mesh_of()
    mp = bind()
    opt = mp.optimizer(optax.sgd(0.1))

    def loss_fn(w, mean, x):
        return (w * x).sum(), 0.5 * mean + 0.5 * lax.pmean(x.mean(), "data")

    def local_loss(w, mean, x):
        return (w * x).sum(), 0.5 * mean + 0.5 * x.mean()

    def step(fun, w, state, mean, x):
        (_, new), grads = mp.value_and_grad(fun, has_aux=True, axis_name="data")(
            w, mean, x, loss_scale=state.loss_scale
        )
        updates, state = opt.update(grads, state, w)
        return optax.apply_updates(w, updates), state, mp.select(state.finite, new, mean)

    w = put(mesh, P(), np.float32(1.0))
    for spec, fun in ((P(), loss_fn), (P("data"), local_loss)):  # statistics of all, or each replica its own
        run = shard_map(lambda *args, fun=fun: step(fun, *args), mesh, (P(), P(), spec, P("data")), (P(), P(), spec))
        mean = put(mesh, spec, np.zeros(4, np.float32))
        for x, want in ((np.ones(4), 0.5), (np.array([1, 1, 1, np.inf]), 0.0)):
            _, state, kept = run(w, put(mesh, P(), opt.init(w)), mean, put(mesh, P("data"), x.astype(np.float32)))
            assert kept.tolist() == [want] * 4, "on every replica, also those whose own batch was good"
            assert bool(state.finite) == (want != 0)


@case
def a_run_that_only_skips_names_the_shards_parameters():
    """Only one device's piece of one parameter is NaN; the name is known everywhere, and only every other call looks."""
    mesh = mesh_of()
    mp = bind(max_consecutive_skips=2)
    opt = mp.optimizer(optax.adam(0.1))
    params = {
        "dense": {"kernel": np.ones(8, np.float32), "bias": np.ones(4, np.float32)},
        "scale": np.ones(4, np.float32),
    }
    params = put(mesh, P("data"), params)
    state = opt.init(params)
    specs = jax.tree.map(lambda s: s.spec, mp.state_shardings(opt, params))

    def step(params, state, bad):
        grads = jax.tree.map(jnp.ones_like, params)
        grads["dense"]["kernel"] = grads["dense"]["kernel"].at[1].multiply(bad[0])
        return opt.update(grads, state, params)[1]

    run = shard_map(step, mesh, (P("data"), specs, P("data")), specs)
    bad = put(mesh, P("data"), np.float32([1, 1, np.nan, 1]))
    for calls in range(1, 6):
        state = run(params, state, bad)
        if calls < 4:  # 2 calls: 2 skips are allowed; 3: not looked at
            mp.check(state)
    with pytest.raises(
        NonFiniteGradientsError, match=r"First gradients that are not finite: dense\.kernel \(not finite\)\."
    ) as e:
        mp.check(state)
    assert [t.name for t in e.value.tensors] == ["dense.kernel"]
    assert e.value.consecutive_skips == 5
    assert e.value.scales == (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
