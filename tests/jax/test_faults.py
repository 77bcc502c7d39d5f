"""Faults of other tools (the design, section 7): the native object showing each, beside ours not having it."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import precision
from precision import LossScale, PrecisionPolicy
from precision_jax import JaxLossScaler


def scaler(**settings):
    return JaxLossScaler(LossScale(mode="dynamic", **settings))


def test_jmp_loses_its_minimum_across_jit_and_we_do_not():
    native = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(4.0))
    adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
    ours = scaler(initial=8.0, minimum=4.0)
    state, update = ours.init(), jax.jit(ours.update)
    for _ in range(5):
        native = adjust(native, jnp.asarray(False))
        state = update(state, jnp.asarray(False))
    assert float(native.loss_scale) == 1.0, "its pytree forgets min_loss_scale, and the default comes back"
    assert float(state.scale) == 4.0


def test_flax_grows_one_step_late_and_we_do_not():
    native, ours = (
        DynamicScale(scale=jnp.float32(4.0), fin_steps=jnp.int32(0), growth_interval=3),
        scaler(initial=4.0, growth_interval=3),
    )
    state = ours.init()
    native_scales, our_scales = [], []
    for _ in range(4):
        native = native.value_and_grad(lambda p: p**2)(jnp.float32(1.0)).dynamic_scale
        state = ours.update(state, True)
        native_scales.append(float(native.scale))
        our_scales.append(float(state.scale))
    assert native_scales == [4, 4, 4, 8]
    assert our_scales == [4, 4, 8, 8], "as torch.amp.GradScaler and Keras do"


def test_flax_reports_nan_on_a_float16_loss_at_the_first_step_and_we_do_not():
    """Its scale is a Python float, 65536, which becomes float16's infinity beside a float16 loss."""

    def loss_fn(w):
        return w.astype(jnp.float16) ** 2

    w = jnp.float32(3.0)
    first = DynamicScale().value_and_grad(loss_fn)(w)
    assert np.isnan(float(first.aux))
    mp = precision.bind("mixed_float16", backend="jax")
    state = mp.loss_scaler.init()
    loss, _ = mp.value_and_grad(loss_fn)(w, loss_scale=state)
    assert float(loss) == 9.0
    scaled = mp.loss_scaler.scale(loss_fn(w), state)
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 9.0 * 65536)


def test_a_python_float_scale_is_traced_twice_and_ours_once():
    traces = {"native": 0, "ours": 0}

    @jax.jit
    def native_step(scale, w):
        traces["native"] += 1
        out = scale.value_and_grad(lambda w: w**2)(w)
        return out.dynamic_scale, w - 0.1 * out.grad

    mp = precision.bind(PrecisionPolicy(loss_scale=LossScale(mode="dynamic")), backend="jax")
    opt = mp.optimizer(optax.sgd(0.1))

    @jax.jit
    def our_step(state, w):
        traces["ours"] += 1
        _, grad = mp.value_and_grad(lambda w: w**2)(w, loss_scale=state.loss_scale)
        updates, state = opt.update(grad, state, w)
        return state, optax.apply_updates(w, updates)

    native, w = DynamicScale(), jnp.float32(1.0)
    for _ in range(4):
        native, w = native_step(native, w)
    state, w = opt.init(w), jnp.float32(1.0)
    for _ in range(4):
        state, w = our_step(state, w)
    assert traces == {"native": 2, "ours": 1}


def test_unscaling_with_the_new_scale_as_mpx_does_and_with_the_old_as_we_do():
    """mpx (not installed here) computes ``grads / update(scale)``. Written out: on a growing step gradients come out halved."""
    config = LossScale(mode="dynamic", initial=8.0, growth_interval=1)
    true_grad = 3.0
    scaled = true_grad * config.initial
    with_new_scale = scaled / (config.initial * config.growth_factor)
    assert with_new_scale == 1.5
    mp = precision.bind(PrecisionPolicy(loss_scale=config), backend="jax")
    opt = mp.optimizer(optax.sgd(1.0))
    w = jnp.float32(10.0)
    state = opt.init(w)
    for scale in (8.0, 16.0, 32.0):
        assert float(state.loss_scale.scale) == scale
        _, grad = mp.value_and_grad(lambda w: true_grad * w)(w, loss_scale=state.loss_scale)
        assert float(grad) == true_grad
        updates, state = opt.update(grad, state, w)
        assert float(updates) == -true_grad


def test_the_scale_neither_reaches_zero_nor_infinity():
    ours = scaler()
    low = high = ours.init()
    update = jax.jit(ours.update)
    for _ in range(200):
        low = update(low, jnp.asarray(False))
    grower = scaler(growth_interval=1)
    grow = jax.jit(grower.update)
    for _ in range(200):
        high = grow(high, jnp.asarray(True))
    assert float(low.scale) == 2.0**-24
    assert float(high.scale) == 2.0**126
    for state in (low, high):
        grads, finite = ours.unscale(jnp.float32(1.0), state)
        assert bool(finite)
        assert float(grads) == 1.0 / float(state.scale)
    # What a scale of zero does: the check sees 0, and 0 * (1 / 0) is NaN.
    assert np.isnan(float(jnp.float32(0.0) * (1.0 / jnp.float32(0.0))))


class TestPureBfloat16WithAdam:
    """bfloat16(0.999) is 1: the second moment never decays, and steps below the spacing of the weights are lost."""

    TARGET, STEPS = 3.0, 300

    def loss(self, w):
        return jnp.sum((w - self.TARGET).astype(jnp.float32) ** 2)

    def test_natively_it_does_not_train(self):
        assert float(jnp.bfloat16(0.999)) == 1.0
        tx = optax.adam(1e-3)
        w = jnp.ones(2, jnp.bfloat16)
        state = tx.init(w)
        step = jax.jit(lambda w, state: self.native_step(tx, w, state))
        for _ in range(self.STEPS):
            w, state = step(w, state)
        assert state[0].nu.dtype == jnp.bfloat16
        assert (w == 1).all()

    def native_step(self, tx, w, state):
        grads = jax.grad(self.loss)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def test_here_it_is_an_error_or_trains_as_float32_does(self):
        mp = precision.bind("bfloat16", backend="jax")
        with pytest.raises(precision.MasterWeightsError):
            mp.optimizer(optax.adam(1e-3)).init(jnp.ones(2, jnp.bfloat16))
        opt = mp.optimizer(optax.adam(1e-3), master_weights=True)
        w = jnp.ones(2, jnp.bfloat16)
        state = opt.init(w)
        assert state.inner_state[0].nu.dtype == jnp.float32

        @jax.jit
        def step(w, state):
            _, grads = mp.value_and_grad(self.loss)(w)
            updates, state = opt.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        tx, full = optax.adam(1e-3), jnp.ones(2)
        native, native_step = tx.init(full), jax.jit(lambda w, s: self.native_step(tx, w, s))
        for _ in range(self.STEPS):
            w, state = step(w, state)
            full, native = native_step(full, native)
        assert w.dtype == jnp.bfloat16
        np.testing.assert_allclose(state.masters, full, rtol=2e-3)
        assert float(full[0]) > 1.25


class TestBatchNormStatistics:
    """A skipped step natively still lets the statistics take the infinity that caused it."""

    def step(self, mp, opt, params, stats, state, x):
        def loss_fn(params, stats, x):
            mean = x.mean(0)
            new = {"mean": 0.9 * stats["mean"] + 0.1 * mean}
            return ((x - mean) * params["w"]).sum(), new

        (_, new), grads = mp.value_and_grad(loss_fn, has_aux=True, cast_argnums=())(
            params, stats, x, loss_scale=state.loss_scale
        )
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), new, state

    def test_select_keeps_them(self):
        mp = precision.bind(PrecisionPolicy(loss_scale=LossScale(mode="dynamic")), backend="jax")
        opt = mp.optimizer(optax.sgd(0.1))
        params, stats = {"w": jnp.ones(2)}, {"mean": jnp.zeros(2)}
        good, bad = jnp.ones((3, 2)), jnp.ones((3, 2)).at[0, 0].set(jnp.inf)
        _, natively, state = self.step(mp, opt, params, stats, opt.init(params), bad)
        assert not bool(state.finite)
        assert np.isinf(float(natively["mean"][0])), "what a step that only guards its weights keeps"
        kept = mp.select(state.finite, natively, stats)
        assert kept["mean"].tolist() == [0.0, 0.0]
        _, new, state = self.step(mp, opt, params, kept, state, good)
        assert mp.select(state.finite, new, kept)["mean"].tolist() == pytest.approx([0.1, 0.1])


def test_optax_apply_if_finite_gives_up_and_we_do_not():
    """After max_consecutive_errors it applies the infinity; ours never does (LossScaler.check raises on the host instead)."""
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    w = jnp.ones(1)
    state = tx.init(w)
    for _ in range(3):
        updates, state = tx.update(jnp.asarray([jnp.inf]), state, w)
    assert not np.isfinite(np.asarray(updates)).all()
    mp = precision.bind(PrecisionPolicy(loss_scale=LossScale(mode="dynamic", max_consecutive_skips=2)), backend="jax")
    opt = mp.optimizer(optax.sgd(1.0))
    state = opt.init(w)
    for _ in range(3):
        updates, state = opt.update(jnp.asarray([jnp.inf]), state, w)
        assert (updates == 0).all()
    with pytest.raises(precision.NonFiniteGradientsError, match="3 steps in a row"):
        mp.loss_scaler.check(state.loss_scale)
