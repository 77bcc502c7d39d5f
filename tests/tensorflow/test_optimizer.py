"""The optimizer's arithmetic and state: what a step, a skip and a wrapped setting do, against plain Keras optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from precision import (
    LossScale,
    LossScaleError,
    MasterWeightsError,
    MixedFrameworksError,
    NonFiniteGradientsError,
    PolicyError,
)
from precision_tensorflow import PrecisionLossScaleOptimizer
from tests.tensorflow.helpers import apply, bind, equal, unscaled, values

NAN = np.float32(np.nan)


def variables(*arrays, dtype="float32"):
    return [keras.Variable(a, dtype=dtype, name=f"v{i}") for i, a in enumerate(arrays)]


def grads_at(step: int, shapes=((3,), (2, 2))) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


START = [np.array([1.0, -2.0, 0.5], np.float32), np.array([[0.25, 3.0], [-1.0, 2.0]], np.float32)]

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.3),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.3),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("kind", INNER)
def test_steps_equal_the_inner_optimizers_own_and_a_skip_changes_nothing(kind):
    """Scales are powers of two, so unscaling is exact: the wrapped optimizer must do, bit for bit, what the bare one does."""
    bare, wrapped = INNER[kind](), bind().optimizer(INNER[kind]())
    a, b = variables(*START), variables(*START)
    for step in range(7):
        bare.apply([tf.constant(g) for g in grads_at(step)], a)
        apply(wrapped, b, grads_at(step))
        before = values(b), values(wrapped.inner_optimizer.variables)
        poisoned = grads_at(step)
        poisoned[step % 2].flat[0] = (np.inf, NAN)[step % 2]
        apply(wrapped, b, poisoned)
        assert equal(before[0], values(b))
        assert equal(before[1], values(wrapped.inner_optimizer.variables))
        assert equal(values(a), values(b))
        assert equal(values(bare.variables), values(wrapped.inner_optimizer.variables))
    assert int(wrapped.iterations) == int(bare.iterations)
    assert wrapped.state_dict()["skipped"] == 7


@pytest.mark.parametrize("setting", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_set_on_the_wrapper_sees_unscaled_gradients(setting):
    bare = keras.optimizers.SGD(0.1, **{setting: 0.3})
    wrapped = bind().optimizer(keras.optimizers.SGD(0.1), **{setting: 0.3})
    a, b = variables(*START), variables(*START)
    for step in range(3):
        bare.apply([tf.constant(g) for g in grads_at(step)], a)
        apply(wrapped, b, grads_at(step))
    assert equal(values(a), values(b))


def test_an_accumulation_leaves_a_non_finite_micro_batch_out():
    wrapped = bind().optimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    (v,) = variables([0.0, 0.0])
    first, second = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
    apply(wrapped, [v], [first])
    apply(wrapped, [v], [np.array([np.inf, 0.0], np.float32)])
    assert values([v])[0].tolist() == [0.0, 0.0]
    apply(wrapped, [v], [second])
    assert values([v])[0].tolist() == [-2.0, -3.0]  # minus the mean of the two finite ones


def test_rows_of_an_embedding_are_updated_sparsely_and_checked():
    wrapped = bind().optimizer(keras.optimizers.SGD(1.0))
    (table,) = variables(np.zeros((4, 2), np.float32))
    wrapped.build([table])
    scale = wrapped.scale
    good = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]]) * scale, [2, 0, 2], [4, 2])
    wrapped.apply([good], [table])
    want = np.array([[-3.0, -4.0], [0.0, 0.0], [-2.0, -3.0], [0.0, 0.0]])
    assert np.array_equal(values([table])[0], want)
    wrapped.apply([tf.IndexedSlices(tf.constant([[np.nan, 0.0]]), [1], [4, 2])], [table])
    assert np.array_equal(values([table])[0], want)
    assert wrapped.state_dict()["skipped"] == 1


@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue"])
def test_sparse_gradients_are_clipped_unscaled(clip):
    wrapped = bind().optimizer(keras.optimizers.SGD(1.0), **{clip: 1.0})
    (table,) = variables(np.zeros((3, 1), np.float32))
    wrapped.build([table])
    wrapped.apply([tf.IndexedSlices(tf.constant([[8.0]]) * wrapped.scale, [1], [3, 1])], [table])
    assert values([table])[0].ravel().tolist() == [0.0, -1.0, 0.0]


def test_variables_without_gradient_are_left_to_the_inner_optimizer():
    wrapped = bind().optimizer(keras.optimizers.SGD(1.0))
    a, b = variables([1.0], [2.0])
    wrapped.build([a, b])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        wrapped.apply([tf.constant([1.0]) * wrapped.scale, None], [a, b])
    assert [v.tolist() for v in values([a, b])] == [[0.0], [2.0]]


def test_the_scale_follows_the_rule_and_unscales_the_step_it_scaled():
    wrapped = bind(initial=8.0, growth_interval=2, maximum=16.0, minimum=2.0).optimizer(keras.optimizers.SGD(1.0))
    (v,) = variables([0.0])
    scales, one = [], [np.array([1.0], np.float32)]
    for good in (1, 1, 1, 1, 0, 0, 0, 0, 1):
        scales.append(float(wrapped.scale))
        apply(wrapped, [v], one if good else [np.array([NAN])])
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 8.0, 4.0, 2.0, 2.0]
    assert values([v])[0].tolist() == [-5.0]


def test_hysteresis_counts_and_refills():
    wrapped = bind(initial=8.0, growth_interval=1000, hysteresis=2, hysteresis_refill="on_finite_step").optimizer("sgd")
    (v,) = variables([0.0])
    scales = []
    for good in (0, 1, 0, 0, 0):
        apply(wrapped, [v], [np.array([1.0 if good else np.inf], np.float32)])
        scales.append(float(wrapped.scale))
    assert scales == [8.0, 8.0, 8.0, 4.0, 2.0]


def test_a_gradient_that_overflows_only_when_unscaled_is_skipped():
    """With a scale below 1 the division makes an infinity of a finite number; the check looks at the result."""
    wrapped = bind(initial=2.0**-10, minimum=2.0**-24).optimizer(keras.optimizers.SGD(1.0))
    (v,) = variables([0.5])
    wrapped.build([v])
    assert wrapped.scale_loss(1.0) == 2.0**-10
    wrapped.apply([tf.constant([3e38])], [v])
    assert values([v])[0].tolist() == [0.5]
    assert wrapped.state_dict()["skipped"] == 1


def test_a_scale_whose_reciprocal_is_subnormal_does_not_flush_gradients():
    wrapped = PrecisionLossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale(mode="static", initial=2.0**127))
    (v,) = variables([0.0])
    wrapped.build([v])
    wrapped.apply([tf.constant([0.5]) * wrapped.scale], [v])
    assert values([v])[0].tolist() == [-0.5]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_loss_is_scaled_in_float32_or_wider(dtype):
    scaled = bind(initial=2.0**20).optimizer("sgd").scale_loss(tf.constant(3.0, dtype))
    assert float(scaled) == 3.0 * 2.0**20  # infinite in float16
    assert scaled.dtype.name == ("float64" if dtype == "float64" else "float32")


def test_a_static_scale_stays_and_still_skips():
    wrapped = PrecisionLossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale(mode="static", initial=128.0))
    (v,) = variables([0.0])
    for bad in (False, True, False):
        apply(wrapped, [v], [np.array([np.inf if bad else 1.0], np.float32)])
    assert values([v])[0].tolist() == [-2.0]
    assert {k: wrapped.state_dict()[k] for k in ("scale", "skipped")} == {"scale": 128.0, "skipped": 1}


def test_without_loss_scaling_it_passes_everything_through():
    wrapped = unscaled("mixed_bfloat16").optimizer(keras.optimizers.SGD(1.0))
    assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
    (v,) = variables([1.0])
    loss = tf.constant(2.0, tf.float16)
    assert wrapped.scale_loss(loss) is loss
    wrapped.apply([tf.constant([0.25])], [v])
    assert values([v])[0].tolist() == [0.75]
    wrapped.apply([tf.constant([np.inf])], [v])  # no check, no skip: what mode "none" says
    assert values([v])[0].tolist() == [-np.inf]
    assert wrapped.state_dict()["scale"] == 1.0


def test_learning_rate_and_iterations_are_the_inner_optimizers():
    inner = keras.optimizers.SGD(0.5)
    wrapped = bind().optimizer(inner)
    wrapped.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    (v,) = variables([0.0])
    assert int(wrapped.apply_gradients([(tf.constant([1.0]) * wrapped.scale, v)])) == 1
    assert int(wrapped.iterations) == int(inner.iterations) == 1
    assert wrapped.apply_gradients([]) is not None
    assert values([v])[0].tolist() == [-0.25]


def test_weights_can_be_read_and_set():
    mp, (v,), (w,) = bind(), variables([1.0, 2.0]), variables([1.0, 2.0])
    one, two = mp.optimizer(keras.optimizers.Adam(0.1)), mp.optimizer(keras.optimizers.Adam(0.1))
    for i in range(3):
        apply(one, [v], [np.array([i, 1.0], np.float32)])
    two.build([w])
    for target, source in zip(two.variables, one.variables, strict=True):
        target.assign(source)
    w.assign(v)
    for optimizer, variable in ((one, v), (two, w)):
        apply(optimizer, [variable], [np.array([0.5, 0.5], np.float32)])
    assert equal(values([v]), values([w]))
    assert one.state_dict() == two.state_dict()


# ---- low-precision variables -------------------------------------------------------------------------------------


def test_low_precision_variables_without_masters_are_refused_by_name():
    wrapped = bind("bfloat16").optimizer(keras.optimizers.Adam(1e-3))
    low, full = keras.Variable([1.0], dtype="bfloat16", name="kernel"), keras.Variable([1.0], name="scale")
    with pytest.raises(MasterWeightsError, match=r"low precision: kernel \(bfloat16\)\. .*master_weights=True"):
        wrapped.build([low, full])


def _pure(dtype: str, master_weights: bool, steps: int = 60) -> float:
    wrapped = bind(dtype).optimizer(keras.optimizers.Adam(1e-3), master_weights=master_weights)
    v = keras.Variable([1.0], dtype=dtype)
    wrapped.build([v])
    for _ in range(steps):
        apply(wrapped, [v], [np.array([0.01], np.float32)])
    return float(values([v])[0][0])


def test_master_weights_train_where_plain_bfloat16_stands_still():
    reference = keras.optimizers.Adam(1e-3)
    (exact,) = variables([1.0])
    for _ in range(60):
        reference.apply([tf.constant([0.01])], [exact])
    want = float(values([exact])[0][0])
    assert _pure("bfloat16", master_weights=False) == 1.0  # the fault: nothing moves
    assert abs(_pure("bfloat16", master_weights=True) - want) <= 2.0**-9  # half a unit in the last place near 0.94
    assert abs(_pure("float16", master_weights=True) - want) <= 2.0**-12


def test_master_weights_follow_values_written_from_outside_and_skip_with_the_rest():
    wrapped = bind("bfloat16").optimizer(keras.optimizers.SGD(2.0**-12), master_weights=True)
    v = keras.Variable([1.0, 1.0], dtype="bfloat16")
    for _ in range(4):
        apply(wrapped, [v], [np.array([1.0, 0.0], np.float32)])
    (master,) = [w for w in wrapped.variables if w.name.endswith("_master")]
    assert values([master])[0].tolist() == [1.0 - 4 * 2.0**-12, 1.0]
    v.assign([1.0, 4.0])
    apply(wrapped, [v], [np.array([np.nan, 0.0], np.float32)])
    apply(wrapped, [v], [np.array([1.0, 1.0], np.float32)])
    assert values([master])[0].tolist() == [1.0 - 5 * 2.0**-12, 4.0 - 2.0**-12]


def test_master_weights_hold_with_average_and_constraint():
    wrapped = bind("bfloat16").optimizer(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5), master_weights=True)
    v = keras.Variable([1.0], dtype="bfloat16")
    v.constraint = keras.constraints.NonNeg()
    apply(wrapped, [v], [np.array([0.5], np.float32)])
    apply(wrapped, [v], [np.array([5.0], np.float32)])
    assert values([v])[0].tolist() == [0.0]
    wrapped.finalize_variable_values([v])
    bare = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    (w,) = variables([1.0])
    w.constraint = keras.constraints.NonNeg()
    for g in (0.5, 5.0):
        bare.apply([tf.constant([g])], [w])
    bare.finalize_variable_values([w])
    assert equal(values([v]), values([w]))


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_applying_before_any_loss_was_scaled_is_an_error():
    wrapped = bind().optimizer("sgd")
    with pytest.raises(LossScaleError, match=r"no loss was scaled.*optimizer.scale_loss"):
        wrapped.apply([tf.constant([1.0])], variables([1.0]))


def test_gradients_and_variables_must_match():
    wrapped = bind().optimizer("sgd")
    with pytest.raises(LossScaleError, match=r"needs a built optimizer: call build"):
        wrapped.apply([tf.constant([1.0])])
    with pytest.raises(LossScaleError, match="1 gradients were given for 2 variables"):
        wrapped.apply([tf.constant([1.0])], variables([1.0], [2.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mp: mp.optimizer(mp.optimizer("sgd")), "wrapped already"),
        (lambda mp: mp.optimizer(keras.optimizers.SGD(loss_scale_factor=8.0)), "loss_scale_factor set, so gradients would be"),
        (lambda mp: mp.optimizer("sgd", clipnorm=1.0, clipvalue=1.0), "at most one of clipnorm"),
        (lambda mp: PrecisionLossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), LossScale()), "pass the optimizer it wraps"),
        (lambda mp: PrecisionLossScaleOptimizer("sgd", LossScale()), "must be a keras.optimizers.Optimizer, not str"),
        (lambda mp: PrecisionLossScaleOptimizer(keras.optimizers.SGD(), {"mode": "dynamic", "growth_factor": True}), "growth_factor"),
        (lambda mp: mp.optimizer("sgd", gradient_accumulation_steps=2), "gradient_accumulation_steps is not a setting of the wrapper .*on the optimizer inside"),
        (lambda mp: mp.callback(every=0), "at least 1, not 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_right_are_refused(make, message):
    with pytest.raises(PolicyError, match=message):
        make(bind())


def test_stateless_apply_says_what_to_use_instead():
    with pytest.raises(ValueError, match=r"stateless_apply: .*mp.loss_scaler, whose state is explicit"):
        bind().optimizer("sgd").stateless_apply([], [], [])


def test_eager_loops_stop_after_too_many_skips_in_a_row():
    wrapped = bind(max_consecutive_skips=3).optimizer("sgd")
    (v,) = variables([1.0])

    def skip_for_ever() -> None:
        for _ in range(20):
            apply(wrapped, [v], [np.array([NAN])])

    message = r"steps in a row had non-finite gradients .*max_consecutive_skips = 3"
    with pytest.raises(NonFiniteGradientsError, match=message):
        skip_for_ever()
    assert 3 < wrapped.state_dict()["consecutive_skips"] <= 6  # looked at every third step only


def test_the_end_of_fit_does_not_bring_old_master_weights_back():
    wrapped = bind("bfloat16").optimizer(keras.optimizers.SGD(1.0), master_weights=True)
    v = keras.Variable([1.0], dtype="bfloat16")
    apply(wrapped, [v], [np.array([0.5], np.float32)])
    v.assign([8.0])  # weights loaded after the last step
    wrapped.finalize_variable_values([v])
    assert values([v])[0].tolist() == [8.0]


def test_numpy_gradients_are_unscaled_and_checked():
    wrapped = bind().optimizer(keras.optimizers.SGD(1.0))
    (v,) = variables([0.0, 0.0])
    scale = float(wrapped.scale)
    wrapped.apply([np.array([1.0, 2.0], np.float32) * np.float32(scale)], [v])
    assert values([v])[0].tolist() == [-1.0, -2.0]
    wrapped.apply([np.array([1.0, NAN], np.float32)], [v])
    assert values([v])[0].tolist() == [-1.0, -2.0]
    assert wrapped.state_dict()["skipped"] == 1
    wrapped.apply([[float(wrapped.scale)] * 2], [v])
    assert values([v])[0].tolist() == [-2.0, -3.0]
    with pytest.raises(MixedFrameworksError, match=r"holds a torch\.Tensor"):
        wrapped.apply([torch.ones(2)], [v])


def test_a_complex_variable_steps_as_the_bare_optimizer_steps_it():
    """A complex gradient is unscaled and checked as any other."""
    bare, wrapped = keras.optimizers.SGD(1.0), bind().optimizer(keras.optimizers.SGD(1.0))
    a, b = tf.Variable([0j], dtype=tf.complex64), tf.Variable([0j], dtype=tf.complex64)
    grad = tf.constant([1 + 2j], tf.complex64)
    bare.apply([grad], [a])
    wrapped.apply([grad * tf.cast(wrapped.scale, tf.complex64)], [b])
    wrapped.apply([tf.constant([complex(0, np.nan)], tf.complex64)], [b])
    assert a.numpy().tolist() == b.numpy().tolist() == [-1 - 2j]


def test_exclusions_from_weight_decay_reach_the_inner_optimizer():
    wrapped = bind().optimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    wrapped.exclude_from_weight_decay(var_names=["bias"])
    bias, kernel = keras.Variable([1.0], name="bias"), keras.Variable([1.0], name="kernel")
    apply(wrapped, [bias, kernel], [np.zeros(1, np.float32)] * 2)
    assert values([bias])[0].tolist() == [1.0]
    assert values([kernel])[0][0] == pytest.approx(0.95)


@pytest.mark.parametrize("made", ["adamm", 3])
def test_what_is_no_optimizer_is_refused(made):
    with pytest.raises(PolicyError, match="mp.optimizer takes a Keras optimizer") as error:
        bind().optimizer(made)
    assert ("Did you mean 'adam'" in str(error.value)) == (made == "adamm")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_clipping_bounds_are_validated(value):
    with pytest.raises(PolicyError, match="clipvalue must be a finite number above 0"):
        bind().optimizer("sgd", clipvalue=value)
