"""The neutral loss scaler in JAX: its numbers, its types, and where it can be used."""

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.dynamic_scale import DynamicScale

import precision
from precision import LossScale, LossScaleError, LossScaleState, NonFiniteGradientsError, StateError
from precision_jax import JaxLossScaler, all_finite, select

DYNAMIC = LossScale(mode="dynamic", initial=1024.0, growth_interval=2)


def scaler(**settings):
    return JaxLossScaler(DYNAMIC.with_(**settings) if settings else DYNAMIC)


def assert_strong(state):
    for field in state:
        assert isinstance(field, jax.Array)
        assert not field.weak_type
    assert state.scale.dtype == jnp.float32
    assert {field.dtype for field in state[1:]} == {np.dtype(np.int32)}


def test_state_is_strongly_typed_at_every_step():
    s = scaler()
    state = s.init()
    assert_strong(state)
    for finite in (True, True, False, True):
        state = s.update(state, jnp.asarray(finite))
        assert_strong(state)
    assert_strong(s.load_state_dict(s.state_dict(state)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scaling_is_in_float32_whatever_the_loss(dtype):
    s = scaler(initial=2.0**20)
    scaled = s.scale(jnp.asarray(3.0, dtype), s.init())
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 3.0 * 2**20)


def test_scaling_and_unscaling_keep_float64():
    with jax.enable_x64(True):
        s = scaler(initial=3.0)
        state = s.init()
        assert s.scale(jnp.asarray(1.0, jnp.float64), state).dtype == jnp.float64
        grads, _ = s.unscale({"w": jnp.ones(2, jnp.float64)}, state)
        assert grads["w"].dtype == jnp.float64
        assert_strong(s.update(state, True))


@pytest.mark.parametrize("scale", [3.0, 1000.0, 2.0**16, 2.0**-24, 12345.678])
def test_unscaling_multiplies_by_the_rounded_reciprocal(scale):
    """As torch.amp.GradScaler does (``scale.double().reciprocal().float()``), bit for bit; here against NumPy."""
    s = scaler(initial=scale)
    grads = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    inverse = np.float32(1.0 / np.float64(np.float32(scale)))
    for unscale in (s.unscale, jax.jit(s.unscale)):
        got, finite = unscale({"w": jnp.asarray(grads)}, s.init())
        np.testing.assert_array_equal(np.asarray(got["w"]), grads * inverse)
        assert bool(finite)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unscaling_gives_float32_that_the_low_dtype_could_not_hold(dtype):
    s = scaler(initial=2.0**20)
    grads, finite = s.unscale(jnp.asarray(2.0**-10, dtype), s.init())
    assert (grads.dtype, float(grads), bool(finite)) == (jnp.float32, 2.0**-30, True)


def test_a_scale_above_the_reciprocals_range_divides():
    """1 / 2**127 is subnormal, and XLA flushes it to zero: the gradients would vanish, and inf * 0 be NaN."""
    assert float(1.0 / jnp.float32(2.0**127)) == 0.0
    s = JaxLossScaler(LossScale(mode="static", initial=2.0**127))
    grads, finite = s.unscale({"a": jnp.float32(2.0**100), "b": jnp.float32(jnp.inf)}, s.init())
    assert (float(grads["a"]), float(grads["b"]), bool(finite)) == (2.0**-27, np.inf, False)


def test_what_is_no_gradient_passes_through():
    s = scaler()
    float0 = np.zeros((2,), jax.dtypes.float0)
    grads = {
        "w": jnp.ones(1),
        "none": None,
        "ids": jnp.arange(2),
        "float0": float0,
        "key": jax.random.key(0),
        "name": "x",
    }
    out, finite = s.unscale(grads, s.init())
    assert float(out["w"][0]) == 1 / 1024
    for name in grads.keys() - {"w"}:
        assert out[name] is grads[name], name
    assert bool(finite)


def test_complex_gradients_are_unscaled_and_looked_at():
    s = scaler()
    out, finite = s.unscale(jnp.asarray([1024.0 + 2048.0j], jnp.complex64), s.init())
    assert (out.dtype, complex(out[0]), bool(finite)) == (jnp.complex64, 1 + 2j, True)
    _, finite = s.unscale(jnp.asarray([1.0 + 1j * np.inf], jnp.complex64), s.init())
    assert not bool(finite)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_value_anywhere_is_seen(bad):
    tree = {"a": jnp.zeros((3, 5)), "b": [jnp.zeros(7), jnp.zeros(())]}
    assert bool(all_finite(tree))
    for where in (("a", (2, 4)), ("b", (6,))):
        poisoned = dict(tree)
        if where[0] == "a":
            poisoned["a"] = tree["a"].at[where[1]].set(bad)
        else:
            poisoned["b"] = [tree["b"][0].at[where[1]].set(bad), tree["b"][1]]
        assert not bool(all_finite(poisoned))
        assert not bool(scaler().unscale(poisoned, scaler().init())[1])
    assert bool(all_finite({})), "nothing is finite"
    assert not bool(all_finite({"a": float(bad)})), "a Python number counts"
    assert bool(all_finite({"a": 1.0, "n": 3, "name": "x"}))


def test_replicas_agree_on_the_flag():
    grads = jnp.asarray([[1.0], [jnp.inf], [1.0]])
    alone = jax.vmap(all_finite)(grads)
    agreed = jax.vmap(lambda g: all_finite(g, axis_name="replicas"), axis_name="replicas")(grads)
    assert alone.tolist() == [True, False, True]
    assert agreed.tolist() == [False, False, False]


def test_unscaling_that_overflows_is_not_finite():
    """A scale below 1 makes the unscaled gradient larger: the check looks at what the optimizer will see."""
    s = scaler(initial=2.0**-24)
    grads, finite = s.unscale(jnp.float32(2.0**110), s.init())
    assert np.isinf(float(grads))
    assert not bool(finite)


def test_mode_none_is_the_identity():
    s = JaxLossScaler(LossScale())
    loss, grads, state = jnp.float16(1.5), {"w": jnp.full(2, jnp.inf, jnp.bfloat16)}, s.init()
    assert s.scale(loss, state) is loss
    out, finite = s.unscale(grads, state)
    assert out is grads
    assert bool(finite)
    assert s.update(state, False) == state


def test_under_jit_scan_and_vmap_the_trajectory_is_the_rules():
    s = scaler()
    flags = np.random.default_rng(0).random((3, 30)) < 0.7

    def run(flags):
        def step(state, flag):
            _, finite = s.unscale(s.scale(jnp.where(flag, 1.0, jnp.nan), state), state)
            state = s.update(state, finite)
            return state, state

        return jax.lax.scan(step, s.init(), flags)[1]

    states = jax.jit(jax.vmap(run))(flags)
    for row in range(3):
        plain = precision.loss_scale.initial_state(DYNAMIC)
        for step in range(30):
            plain = precision.next_state(DYNAMIC, plain, flags[row, step], np)
            assert tuple(float(f[row, step]) for f in states) == tuple(float(f) for f in plain)


def test_a_batch_of_states():
    s = scaler()
    states = jax.vmap(lambda _: s.init())(jnp.arange(2))
    states = jax.vmap(s.update)(states, jnp.asarray([True, False]))
    assert states.scale.tolist() == [1024.0, 512.0]


def test_state_dict_is_plain_and_goes_both_ways():
    s = scaler()
    state = s.update(s.update(s.init(), True), False)
    saved = s.state_dict(state)
    assert saved == {
        "version": 1, "scale": 512.0, "good_steps": 0, "hysteresis_left": 0, "skipped": 1, "consecutive_skips": 1,
    }  # fmt: skip
    assert all(type(v) in (int, float) for v in saved.values())
    assert [float(f) for f in s.load_state_dict(saved)] == [float(f) for f in state]


def test_native_states_load():
    s = scaler()
    flax_scale = DynamicScale(scale=jnp.float32(64.0), fin_steps=jnp.int32(1))
    as_dict = serialization.to_state_dict(flax_scale)
    jmp_scale = jmp.DynamicLossScale(jnp.float32(64.0), jnp.int32(1))
    keras = {"dynamic_scale": np.float32(64.0), "step_counter": np.int32(1)}
    torch = {"scale": 64.0, "_growth_tracker": 1, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    for native in (flax_scale, as_dict, jmp_scale, keras, torch):
        state = s.load_state_dict(native)
        assert_strong(state)
        assert (float(state.scale), int(state.good_steps)) == (64.0, 1)
        assert float(s.update(state, True).scale) == 128.0, "the second good step of two: it grows"


def test_what_is_no_state_is_refused():
    s = scaler()
    with pytest.raises(StateError, match="not a loss-scale state|mapping of names"):
        s.load_state_dict(object())
    with pytest.raises(StateError, match="truncated"):
        s.load_state_dict({"version": 1, "scale": 2.0})
    with pytest.raises(LossScaleError, match="LossScaleState.*not dict.*load_state_dict"):
        s.scale(jnp.float32(1), s.state_dict(s.init()))
    opt_state = precision.bind("mixed_float16", backend="jax").optimizer(optax.sgd(0.1)).init(jnp.ones(1))
    for call in (s.state_dict, s.check, lambda state: s.update(state, True)):
        with pytest.raises(LossScaleError, match="opt_state.loss_scale.* not OptimizerState"):
            call(opt_state)
    with pytest.raises(LossScaleError, match="not float"):
        s.unscale({"w": jnp.ones(1)}, 1024.0)


def test_check_raises_after_too_many_skips_in_a_row():
    s = scaler(max_consecutive_skips=2)
    state = s.init()
    for _ in range(2):
        state = s.update(state, False)
        s.check(state)
    with pytest.raises(NonFiniteGradientsError, match="3 steps in a row"):
        s.check(s.update(state, False))


def test_nothing_reads_the_device():
    """Traced values cannot be read (JAX raises); what could still reach the host is a callback, and there is none."""
    s = scaler()
    grads = {"w": jnp.ones(4)}
    jaxpr = jax.make_jaxpr(lambda state, g: s.update(state, s.unscale(g, state)[1]))(s.init(), grads)
    assert "is_finite" in str(jaxpr)
    assert "callback" not in str(jaxpr)


class TestSelect:
    def test_takes_one_tree_or_the_other(self):
        new, old = (
            {"mean": jnp.asarray([jnp.nan]), "n": jnp.asarray(2)},
            {"mean": jnp.asarray([1.0]), "n": jnp.asarray(1)},
        )
        assert int(select(jnp.asarray(True), new, old)["n"]) == 2
        kept = jax.jit(select)(jnp.asarray(False), new, old)
        assert (float(kept["mean"][0]), int(kept["n"])) == (1.0, 1)

    def test_python_numbers_are_chosen_too(self):
        new, old = (
            {"mean": float("nan"), "count": 2, "rate": 0.5, "on": True},
            {"mean": 0.0, "count": 1, "rate": 0.5, "on": True},
        )
        kept, taken = select(jnp.asarray(False), new, old), select(jnp.asarray(True), new, old)
        assert (float(kept["mean"]), int(kept["count"]), int(taken["count"])) == (0.0, 1, 2)
        assert type(kept["rate"]) is float, "settings that are the same stay what they are"
        assert kept["on"] is True

    def test_keeps_the_old_dtypes(self):
        out = select(True, {"m": jnp.ones(1, jnp.float32)}, {"m": jnp.ones(1, ml_dtypes.bfloat16)})
        assert out["m"].dtype == jnp.bfloat16

    def test_keys_none_and_functions(self):
        a, b = jax.random.key(1), jax.random.key(2)
        out = select(False, {"k": a, "n": None, "f": jnp.tanh}, {"k": b, "n": None, "f": jnp.tanh})
        assert jax.random.key_data(out["k"]).tolist() == jax.random.key_data(b).tolist()
        assert out["n"] is None
        assert out["f"] is jnp.tanh


def test_state_is_a_named_tuple_of_the_core():
    assert isinstance(scaler().init(), LossScaleState)
