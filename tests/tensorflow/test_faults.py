"""Faults of Keras's own ``LossScaleOptimizer`` that show in one process: shown on it, and absent here."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision import LossScale, PolicyError, Rule
from tests.tensorflow.helpers import apply, bind, data, small_model

X, Y = data()


def _native(scale: float, interval: int = 2000):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=scale, dynamic_growth_steps=interval
    )


def _drive(optimizer, grads) -> tuple[float, float]:
    """Apply gradients as they would come scaled; return the scale and the variable."""
    v = keras.Variable([1.0])
    optimizer.build([v])
    for g in grads:
        scale = tf.convert_to_tensor(optimizer.dynamic_scale.value)
        optimizer.scale_loss(tf.constant(0.0))
        optimizer.apply([tf.constant([g]) * scale], [v])
    return float(optimizer.dynamic_scale.numpy()), float(v.numpy()[0])


def test_the_scale_does_not_grow_to_infinity_and_stay_there():
    """A gradient of zero is finite at any scale, so a frozen or masked-out model grows it without end."""
    grads = [0.0] * 8 + [0.5] * 40
    native_scale, native_v = _drive(_native(2.0**124, interval=1), grads)
    assert native_scale == np.inf
    assert native_v == 1.0  # no step is ever taken again
    ours = bind(initial=2.0**124, growth_interval=1, maximum=2.0**126).optimizer(keras.optimizers.SGD(0.5))
    scale, v = _drive(ours, grads)
    assert scale == 2.0**126
    assert v == 1.0 - 40 * 0.25


def test_the_scale_does_not_decay_to_zero():
    grads = [np.nan] * 200 + [1.0]
    native_scale, native_v = _drive(_native(2.0**15), grads)
    assert native_scale == 0.0 or not np.isfinite(native_v)
    scale, v = _drive(bind(initial=2.0**15, minimum=2.0**-10).optimizer(keras.optimizers.SGD(0.5)), grads)
    assert (scale, v) == (2.0**-10, 0.5)


def test_the_wrapper_is_there_whatever_the_policys_name():
    """Keras wraps the optimizer only if the model's policy is called exactly ``mixed_float16``."""
    mp = bind("mixed_float16", rules=(Rule(module="norm", dtype="float32"),))
    with mp.scope():
        model = small_model(norm=True)
        model.compile(optimizer="sgd", loss="mse")
        assert model.get_layer("fc").compute_dtype == "float16"
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)  # float16 without a loss scale
        model.compile(optimizer=mp.optimizer("sgd"), loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.state_dict()["scale"] == 1024.0


def test_a_loss_in_float16_is_not_scaled_in_float16():
    loss = tf.constant(2.0, tf.float16)
    assert not np.isfinite(_native(2.0**16).scale_loss(loss))
    assert float(bind(initial=2.0**16).optimizer("sgd").scale_loss(loss)) == 2.0**17


def test_clipping_set_on_the_wrapper_has_an_effect():
    """On Keras's wrapper the attribute can be set and is never read."""
    for optimizer, want in ((_native(8.0), -3.0), (bind(initial=8.0).optimizer(keras.optimizers.SGD(0.5)), 0.5)):
        optimizer.clipvalue = 1.0
        assert _drive(optimizer, [8.0])[1] == want


def test_a_global_norm_beyond_float32_is_an_overflow_and_no_nan():
    """Gradients of 1e25 are finite and the sum of their squares is not: Keras's clipping then writes NaN."""
    huge = [np.float32(1e25), 1.0]
    native = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, global_clipnorm=1.0), initial_scale=8.0)
    assert np.isnan(_drive(native, huge)[1])
    inside = bind(initial=8.0).optimizer(keras.optimizers.SGD(0.5, global_clipnorm=1.0))
    outside = bind(initial=8.0).optimizer(keras.optimizers.SGD(0.5), global_clipnorm=1.0)
    for optimizer in (inside, outside):
        assert _drive(optimizer, huge) == (4.0, 0.5)


def test_a_restored_counter_above_the_interval_still_grows():
    """Keras tests the counter for equality, so one restored from a run with a longer interval never grows again."""
    native = _native(8.0, interval=4)
    native.build([keras.Variable([1.0])])
    native.step_counter.assign(10)
    assert _drive_more(native, 8) == 8.0
    ours = bind(initial=8.0, growth_interval=4).optimizer(keras.optimizers.SGD(0.5))
    ours.load_state_dict({"dynamic_scale": 8.0, "step_counter": 10})
    ours.build([keras.Variable([1.0])])
    assert _drive_more(ours, 8) == 32.0  # at once, and after four more


def _drive_more(optimizer, steps: int) -> float:
    (v,) = optimizer._trainable_variables
    for _ in range(steps):
        optimizer.scale_loss(tf.constant(0.0))
        optimizer.apply([tf.constant([0.0])], [v])
    return float(optimizer.dynamic_scale.numpy())


def test_batch_statistics_do_not_take_a_skipped_steps_values():
    bad = np.where(np.arange(16)[:, None] == 0, np.inf, X).astype(np.float32)
    finite = {}
    for ours in (False, True):
        mp = bind("mixed_float16")
        with mp.scope():
            model = small_model(norm=True)
        if ours:
            model = mp.prepare(model)
        model.compile(optimizer=mp.optimizer("sgd") if ours else _native(1024.0), loss="mse")
        model.train_on_batch(bad, Y)
        finite[ours] = bool(np.all(np.isfinite(model.get_layer("norm").moving_variance.numpy())))
    assert finite == {False: False, True: True}


def test_settings_are_validated():
    """Keras takes any number for a scale; the rule's own checks stand before ours."""
    native = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=-1.0, dynamic_growth_steps=0)
    assert native.initial_scale == -1.0
    for bad in ({"initial": -1.0}, {"initial": float("inf")}, {"growth_interval": 0}, {"backoff_factor": -1.0}):
        with pytest.raises(PolicyError, match=next(iter(bad))):
            LossScale(mode="dynamic", **bad)


def test_steps_after_a_long_overflow_are_those_of_plain_training():
    optimizer, bare = bind(initial=2.0**20).optimizer(keras.optimizers.Adam(0.1)), keras.optimizers.Adam(0.1)
    a, b = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    for step in range(12):
        good = np.array([0.5 + step, -1.0], np.float32)
        for _ in range(3):
            apply(optimizer, [a], [np.array([np.nan, 1.0], np.float32)])
        apply(optimizer, [a], [good])
        bare.apply([tf.constant(good)], [b])
    assert np.array_equal(a.numpy(), b.numpy())


def test_bias_gradients_that_tensorflow_sums_in_bfloat16_are_warned_of():
    """4096 rows of ones: the gradient of a bias is 4096. TensorFlow's CPU kernel stops at 256, compiled by XLA or not."""
    rows = np.ones((4096, 4), np.float32)
    mp = bind("mixed_bfloat16", rules=[Rule(module="**norm*", dtype="float32")])

    def gradient(model, weight):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.cast(model(rows), tf.float32))
        return tape.gradient(total, weight.value).numpy()

    with mp.scope():
        dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
        without = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, use_bias=False), keras.layers.LayerNormalization(name="norm")]
        )
    native = gradient(dense, dense.layers[0].bias)
    exact = bool((native == 4096).all())
    assert exact or (native == 256).all()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mp.prepare(dense)
        said = [str(w.message) for w in caught if "gradient of the bias" in str(w.message)]
        assert [w for w in said if "dense" in w] == ([] if exact else said) and bool(said) is not exact
        assert all(w.filename == __file__ for w in caught if "gradient of the bias" in str(w.message))
        caught.clear()
        mp.prepare(without)
        assert not [w for w in caught if "gradient of the bias" in str(w.message)]
    assert (gradient(without, without.layers[-1].beta) == 4096).all()
