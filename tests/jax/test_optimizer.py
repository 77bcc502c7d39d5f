"""``mp.optimizer``: skipping, the loss scale, masters, and the optax it wraps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import precision
from precision import (
    LossScale,
    LossScaleError,
    MasterWeightsError,
    PrecisionPolicy,
    PrecisionWarning,
    Rule,
    UnsupportedError,
)
from precision_jax import OptimizerState

SCALED = PrecisionPolicy(loss_scale=LossScale(mode="dynamic", initial=1024.0, growth_interval=3))


def bind(policy=SCALED):
    return precision.bind(policy, backend="jax")


def same(a, b):
    """Bit for bit, structure and dtypes included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def differ(a, b):
    try:
        same(a, b)
    except AssertionError:
        return True
    return False


TRANSFORMS = {
    "adam": optax.adam(0.1),
    "adamw with a schedule": optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(0.1, 10)),
    "two groups": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.5)}, {"w": "a", "v": "b"}
    ),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "v": False}),
    "frozen": optax.multi_transform({"a": optax.rmsprop(0.1), "b": optax.set_to_zero()}, {"w": "a", "v": "b"}),
    "noise, with a key in its state": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "accumulation": optax.MultiSteps(optax.adam(0.1), 2),
    "adafactor": optax.adafactor(0.1),
}


@pytest.mark.parametrize("tx", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_a_skipped_step_changes_no_bit_and_the_others_are_the_bare_optimizers(tx):
    params = {"w": jnp.asarray([1.0, -0.0, 0.0, -3.0]), "v": jnp.asarray([[0.5, -2.0]])}
    good = [{"w": jnp.full(4, 0.1 * i), "v": jnp.full((1, 2), -0.2)} for i in (1.0, 2.0, 3.0, 4.0)]
    bad = {"w": jnp.asarray([0.0, jnp.nan, 0.0, 0.0]), "v": jnp.zeros((1, 2))}
    opt = bind().optimizer(tx)
    step, bare = jax.jit(opt.update), jax.jit(tx.update)
    ours, state = params, opt.init(params)
    theirs, native = params, tx.init(params)
    for grads in (good[0], bad, good[1], bad, bad, good[2], good[3]):
        updates, new = step(grads, state, ours)
        applied = optax.apply_updates(ours, updates)
        if grads is bad:
            assert not bool(new.finite)
            same(new.inner_state, state.inner_state)
            same(applied, ours)
            assert all((np.asarray(u) == 0).all() for u in jax.tree.leaves(updates))
        else:
            assert bool(new.finite)
            assert differ(new.inner_state, state.inner_state)
            native_updates, native = bare(grads, native, theirs)
            theirs = optax.apply_updates(theirs, native_updates)
            same(applied, theirs)
            same(new.inner_state, native)
        ours, state = applied, new
    assert int(state.loss_scale.skipped) == 3


def test_negative_zero_and_params_are_kept_by_a_skip():
    """Adding +0.0 would turn -0.0 into 0.0."""
    params = jnp.asarray([-0.0, 0.0])
    assert not np.signbit(np.asarray(params + 0.0))[0]
    opt = bind().optimizer(optax.sgd(1.0))
    updates, _ = opt.update(jnp.asarray([jnp.inf, 1.0]), opt.init(params), params)
    assert np.signbit(np.asarray(optax.apply_updates(params, updates))).tolist() == [True, False]


def test_the_scale_follows_the_rule():
    opt = bind().optimizer(optax.sgd(0.1))
    params = jnp.ones(1)
    state = opt.init(params)
    scales = []
    for bad in (0, 1, 0, 0, 0, 1, 1, 0):
        _, state = opt.update(jnp.asarray([np.inf if bad else 1.0]), state, params)
        scales.append(float(state.loss_scale.scale))
    assert scales == [1024, 512, 512, 512, 1024, 512, 256, 256]
    assert (int(state.loss_scale.skipped), int(state.loss_scale.consecutive_skips)) == (3, 0)


def test_no_state_is_weakly_typed_and_types_never_change():
    """inject_hyperparams and friends make weak types; a state whose type changes is traced again, and breaks scan."""
    for tx in TRANSFORMS.values():
        opt = bind().optimizer(tx)
        params = {"w": jnp.ones(4), "v": jnp.ones((1, 2))}
        first = jax.eval_shape(opt.init, params)
        second = jax.eval_shape(opt.update, params, first, params)[1]
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert (a.dtype, a.shape, a.weak_type, b.weak_type) == (b.dtype, b.shape, False, False)
        assert not any(x.weak_type for x in jax.tree.leaves(opt.init(params)) if hasattr(x, "weak_type"))


def test_a_learning_rate_can_be_read_and_set_inside():
    opt = bind().optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params = jnp.ones(1)
    state = opt.init(params)
    assert float(state.inner_state.hyperparams["learning_rate"]) == 0.5
    state.inner_state.hyperparams["learning_rate"] = jnp.asarray(2.0)
    updates, _ = opt.update(jnp.ones(1), state, params)
    assert float(updates[0]) == -2.0


def test_extra_arguments_reach_the_inner_transformation():
    seen = {}

    def update(updates, state, params=None, *, value, **extra):
        seen.update(value=value, extra=extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    opt = bind().optimizer(inner)
    opt.update(jnp.ones(1), opt.init(jnp.ones(1)), jnp.ones(1), value=3.0, tag="x")
    assert seen == {"value": 3.0, "extra": {"tag": "x"}}
    plateau = bind().optimizer(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
    state = plateau.init(jnp.ones(1))
    for _ in range(4):
        updates, state = plateau.update(jnp.ones(1), state, jnp.ones(1), value=jnp.asarray(1.0))
    assert float(updates[0]) > -1.0


def test_a_flag_found_elsewhere_is_used_instead_of_looking():
    opt = bind().optimizer(optax.sgd(1.0))
    params = jnp.ones(2)
    state = opt.init(params)
    updates, skipped = opt.update(jnp.ones(2), state, params, finite=jnp.asarray(False))
    assert (updates == 0).all()
    assert float(skipped.loss_scale.scale) == 512
    given = jax.make_jaxpr(lambda g, s: opt.update(g, s, params, finite=jnp.asarray(True)))(params, state)
    assert "is_finite" not in str(given)


def test_a_flag_an_element_is_refused():
    opt = bind().optimizer(optax.sgd(0.1))
    with pytest.raises(LossScaleError, match=r"finite is one flag .* shape \(2,\)"):
        opt.update(jnp.ones(2), opt.init(jnp.ones(2)), jnp.ones(2), finite=jnp.isfinite(jnp.ones(2)))


def test_a_flag_found_elsewhere_skips_without_a_loss_scale_too():
    opt = bind(PrecisionPolicy()).optimizer(optax.adam(0.1))
    params = jnp.ones(2)
    state = opt.init(params)
    updates, new = opt.update(jnp.ones(2), state, params, finite=jnp.asarray(False))
    same((optax.apply_updates(params, updates), new.inner_state), (params, state.inner_state))
    assert not bool(new.finite)


def test_python_numbers_for_gradients_are_looked_at():
    opt = bind().optimizer(optax.sgd(0.1))
    updates, state = opt.update({"w": float("inf")}, opt.init({"w": 1.0}), {"w": 1.0})
    assert not bool(state.finite)
    assert float(optax.apply_updates({"w": 1.0}, updates)["w"]) == 1.0


def test_the_gradients_are_looked_at_once():
    mp = bind()
    opt = mp.optimizer(optax.adam(0.1))
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}

    def step(params, state):
        grads = mp.value_and_grad(lambda p: (p["a"].sum() * p["b"]).sum())(params, loss_scale=state.loss_scale)[1]
        return opt.update(grads, state, params)

    jaxpr = str(jax.make_jaxpr(step)(params, opt.init(params)))
    assert jaxpr.count("is_finite") == 2, "one a leaf"
    assert "callback" not in jaxpr


def test_mode_none_adds_nothing():
    mp = bind(PrecisionPolicy())
    opt, tx = mp.optimizer(optax.adam(0.1)), optax.adam(0.1)
    params = {"w": jnp.ones(3)}
    state = opt.init(params)
    ours = jax.make_jaxpr(lambda g, s: opt.update(g, s, params)[0])(params, state)
    theirs = jax.make_jaxpr(lambda g, s: tx.update(g, s, params)[0])(params, tx.init(params))
    assert len(ours.eqns) == len(theirs.eqns)
    _, state = opt.update({"w": jnp.full(3, jnp.inf)}, state, params)
    assert bool(state.finite), "nothing is checked"
    assert not np.isfinite(np.asarray(state.inner_state[0].mu["w"])).any()


def test_static_scale_skips_but_does_not_move():
    opt = bind(PrecisionPolicy(loss_scale=LossScale(mode="static", initial=8.0))).optimizer(optax.sgd(1.0))
    params = jnp.ones(1)
    _, state = opt.update(jnp.asarray([jnp.nan]), opt.init(params), params)
    assert (float(state.loss_scale.scale), int(state.loss_scale.skipped), bool(state.finite)) == (8.0, 1, False)


class TestAccumulation:
    GRADS = (1.0, np.inf, 3.0, 5.0, 7.0)

    def test_a_non_finite_micro_batch_is_dropped(self):
        opt = bind().optimizer(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2))
        params = jnp.zeros(1)
        state, update = opt.init(params), jax.jit(opt.update)
        for g in self.GRADS:
            updates, state = update(jnp.asarray([g]), state, params)
            params = optax.apply_updates(params, updates)
        # Means of the finite ones, two at a time: (1 + 3) / 2 and (5 + 7) / 2.
        assert float(params[0]) == -(2.0 + 6.0)
        assert int(state.inner_state.gradient_step) == 2

    def test_natively_it_poisons_the_accumulator_for_good(self):
        tx = optax.MultiSteps(optax.apply_if_finite(optax.sgd(1.0), 5), every_k_schedule=2)
        params = jnp.zeros(1)
        state, update = tx.init(params), jax.jit(tx.update)
        for g in (*self.GRADS, 1.0, 1.0):
            updates, state = update(jnp.asarray([g]), state, params)
            params = optax.apply_updates(params, updates)
        assert np.isnan(np.asarray(state.acc_grads)).all(), "emptied by multiplying with zero: 0 * inf"
        assert float(params[0]) == 0.0, "never trains again"


class TestLowPrecisionParameters:
    def test_without_masters_they_are_an_error_that_names_them(self):
        opt = bind().optimizer(optax.sgd(0.1))
        params = {
            "dense": {"kernel": jnp.ones((2, 2), jnp.float16)},
            "norm": {"scale": jnp.ones(2)},
            "n": jnp.arange(2),
        }
        with pytest.raises(MasterWeightsError, match=r"dense.kernel \(float16\)\. .*master_weights=True"):
            opt.init(params)
        many = {f"l{i}": jnp.ones(1, jnp.bfloat16) for i in range(8)}
        with pytest.raises(MasterWeightsError, match=r"l4 \(bfloat16\) and 3 more"):
            opt.init(many)

    def test_masters_take_the_small_steps_that_float16_cannot(self):
        """Each update is 1e-4; float16's spacing at 1 is 1e-3."""
        opt = bind().optimizer(optax.sgd(1.0), master_weights=True)
        params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1)}
        state = opt.init(params)
        grads = {"w": jnp.full(2, 1e-4, jnp.float16), "b": jnp.full(1, 1e-4)}
        step = jax.jit(opt.update)
        for _ in range(100):
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
        assert params["w"].dtype == jnp.float16
        assert float(state.masters["w"][0]) == pytest.approx(1 - 100 * float(jnp.float16(1e-4)), rel=1e-6)
        np.testing.assert_array_equal(params["w"], state.masters["w"].astype(jnp.float16))
        assert state.masters["b"] is None, "a float32 parameter is its own master"
        native = jnp.ones(2, jnp.float16)
        for _ in range(100):
            native = optax.apply_updates(native, -grads["w"])
        assert (native == 1).all(), "without masters nothing moves"

    def test_the_step_lands_on_the_rounded_master(self):
        rng = np.random.default_rng(0)
        params = jnp.asarray(rng.standard_normal(2000), jnp.bfloat16)
        opt = bind().optimizer(optax.adam(0.05), master_weights=True)
        state = opt.init(params)
        for _ in range(5):
            updates, state = opt.update(jnp.asarray(rng.standard_normal(2000), jnp.float32), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, state.masters.astype(jnp.bfloat16))

    def test_a_skip_leaves_masters_alone(self):
        opt = bind().optimizer(optax.adam(0.1), master_weights=True)
        params = jnp.ones(2, jnp.float16)
        state = opt.init(params)
        updates, new = opt.update(jnp.asarray([1.0, jnp.inf]), state, params)
        same((new.masters, new.inner_state), (state.masters, state.inner_state))
        same(optax.apply_updates(params, updates), params)

    def test_a_parameter_without_gradient_keeps_its_master(self):
        params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
        opt = bind().optimizer(optax.sgd(0.5), master_weights=True)
        state = opt.init(params)
        updates, new = opt.update({"a": jnp.ones(2), "b": None}, state, params)
        assert updates["b"] is None
        assert (new.masters["a"].tolist(), new.masters["b"].tolist()) == ([0.5, 0.5], [1.0, 1.0])

    def test_masters_need_the_parameters(self):
        opt = bind().optimizer(optax.sgd(0.1), master_weights=True)
        with pytest.raises(MasterWeightsError, match=r"update needs params"):
            opt.update(jnp.ones(1), opt.init(jnp.ones(1, jnp.float16)))

    def test_going_without_keeps_the_optimizers_state_in_float32(self):
        opt = bind().optimizer(optax.adam(0.1), master_weights=False)
        params = jnp.ones(2, jnp.bfloat16)
        state = opt.init(params)
        assert state.masters is None
        assert state.inner_state[0].nu.dtype == jnp.float32
        updates, _ = opt.update(jnp.ones(2, jnp.bfloat16), state, params)
        assert optax.apply_updates(params, updates).dtype == jnp.bfloat16


def test_rules_that_match_no_parameter_are_reported_once():
    mp = bind(SCALED.with_(rules=(Rule(module="nomr", dtype="float32"), Rule(module="dense", dtype="float32"))))
    opt = mp.optimizer(optax.sgd(0.1))
    with pytest.warns(
        PrecisionWarning, match="rule 'nomr' matched nothing in the parameters: dense.kernel, norm.scale"
    ):
        opt.init({"dense": {"kernel": jnp.ones(1)}, "norm": {"scale": jnp.ones(1)}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.init({"dense": {"kernel": jnp.ones(1)}})


def test_states_and_optimizers_of_another_kind_are_refused():
    mp = bind()
    opt = mp.optimizer(optax.sgd(0.1))
    with pytest.raises(LossScaleError, match="this optimizer's state is the OptimizerState"):
        opt.update(jnp.ones(1), optax.sgd(0.1).init(jnp.ones(1)), jnp.ones(1))
    with pytest.raises(UnsupportedError, match=r"optax.GradientTransformation, such as optax.adam\(1e-3\), not float"):
        mp.optimizer(0.1)
    torch = pytest.importorskip("torch")
    with pytest.raises(precision.MixedFrameworksError, match="torch.optim"):
        mp.optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    with pytest.raises(precision.MixedFrameworksError, match="torch"):
        opt.init({"w": torch.ones(1)})


def test_optax_finds_its_way_in_the_state():
    opt = bind().optimizer(optax.adam(0.1))
    params = {"w": jnp.ones(2)}
    chained = optax.chain(opt, optax.scale(0.5))
    state = chained.init(params)
    assert float(optax.tree.get(state, "loss_scale").scale) == 1024
    assert bool(optax.tree.get(state, "finite"))
    marked = optax.tree.map_params(opt, lambda _: "param", opt.init(params), transform_non_params=lambda _: "other")
    assert marked.inner_state[0].mu == {"w": "param"}
    assert marked.loss_scale.scale == "other"
    assert isinstance(marked, OptimizerState)
