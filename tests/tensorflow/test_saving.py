"""Saving and loading: scale, counters and the inner optimizer's state come back, and training goes on as if uninterrupted."""

import copy
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision import LossScale, StateError
from precision.loss_scale import initial_state, state_to_dict
from precision_tensorflow import PrecisionLossScaleOptimizer
from tests.tensorflow.helpers import apply, bind, data, equal, small_model, values

X, Y = data()
BAD = np.where(np.arange(16)[:, None] == 3, np.inf, X).astype(np.float32)


def trained(mp, **options):
    with mp.scope():
        model = mp.prepare(small_model(norm=True))
    model.compile(optimizer=mp.optimizer(keras.optimizers.Adam(0.02), **options), loss="mse", run_eagerly=True)
    for x in (X, X, BAD, X, BAD, X, X):
        model.train_on_batch(x, Y)
    return model


SCALING = {"initial": 64.0, "growth_interval": 2, "hysteresis": 2, "hysteresis_refill": "on_finite_step"}


@pytest.mark.parametrize("preset", ["mixed_bfloat16", "bfloat16"])
def test_a_keras_file_carries_everything(tmp_path, preset):
    mp = bind(preset, **SCALING)
    options = {"clipnorm": 5.0, "master_weights": preset == "bfloat16"}
    model = trained(mp, **options)
    state = model.optimizer.state_dict()
    assert (state["skipped"], state["consecutive_skips"]) == (2, 0)
    model.save(tmp_path / "m.keras")
    loaded = mp.prepare(keras.models.load_model(tmp_path / "m.keras"))
    optimizer = loaded.optimizer
    assert type(optimizer) is PrecisionLossScaleOptimizer
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    assert optimizer.loss_scale == mp.policy.loss_scale
    assert (optimizer.clipnorm, optimizer.master_weights) == (5.0, options["master_weights"])
    assert optimizer.state_dict() == state
    assert int(optimizer.iterations) == 5
    assert equal(values(model.optimizer.variables), values(optimizer.variables))
    for x in (X, BAD, X):  # and both go on alike
        for one in (model, loaded):
            one.train_on_batch(x, Y)
    assert equal(values(model.weights), values(loaded.weights))
    assert model.optimizer.state_dict() == optimizer.state_dict()


def test_a_file_loads_in_a_fresh_process_without_custom_objects(tmp_path):
    model = trained(bind(**SCALING))
    model.save(tmp_path / "m.keras")
    code = (
        "import json, keras, precision_tensorflow\n"
        f"m = keras.models.load_model({str(tmp_path / 'm.keras')!r})\n"
        "print(json.dumps([type(m.optimizer).__name__, m.optimizer.state_dict()]))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240).stdout
    assert json.loads(out) == ["PrecisionLossScaleOptimizer", model.optimizer.state_dict()]


@pytest.mark.parametrize("when", ["built", "before it is built"])
@pytest.mark.parametrize("master_weights", [None, True])
def test_a_tf_checkpoint_carries_everything(tmp_path, when, master_weights):
    mp = bind("float32" if master_weights is None else "bfloat16", **SCALING)
    model = trained(mp, master_weights=master_weights)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    with mp.scope():
        other = mp.prepare(small_model(norm=True, seed=5))
    optimizer = mp.optimizer(keras.optimizers.Adam(0.02), master_weights=master_weights)
    if when == "built":
        optimizer.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=optimizer).restore(path)
    assert optimizer.state_dict() == model.optimizer.state_dict()
    if when != "built":
        optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert equal(values(model.optimizer.variables), values(optimizer.variables))
    other.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    for x in (X, BAD, X):
        for one in (model, other):
            one.train_on_batch(x, Y)
    assert equal(values(model.weights), values(other.weights))


def test_a_native_checkpoint_restores_into_the_wrapper(tmp_path):
    variable = keras.Variable([1.0, 2.0])
    native = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=256.0)
    for _ in range(3):
        native.apply([tf.constant([1.0, 2.0])], [variable])
    path = tf.train.Checkpoint(optimizer=native).save(str(tmp_path / "c"))
    ours = bind().optimizer(keras.optimizers.Adam(0.1))
    ours.build([variable])
    tf.train.Checkpoint(optimizer=ours).restore(path)
    assert {k: ours.state_dict()[k] for k in ("scale", "good_steps")} == {"scale": 256.0, "good_steps": 3}
    assert equal(values(native.inner_optimizer.variables), values(ours.inner_optimizer.variables))


def test_wrapping_a_native_scaler_takes_its_inner_optimizer_and_its_scale_over():
    native = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
    variable = keras.Variable([1.0])
    native.apply([tf.constant([1.0])], [variable])
    native.apply([tf.constant([np.inf])], [variable])
    native.apply([tf.constant([1.0])], [variable])
    ours = bind().optimizer(native)
    assert ours.inner_optimizer is native.inner_optimizer
    assert ours.state_dict() == {
        "version": 1, "scale": 128.0, "good_steps": 1, "hysteresis_left": 1, "skipped": 0, "consecutive_skips": 0,
    }  # fmt: skip
    fresh = bind().optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=32.0))
    assert fresh.state_dict()["scale"] == 32.0


@pytest.mark.parametrize(
    ("saved", "scale", "good"),
    [
        ({"scale": 512.0, "_growth_tracker": 7}, 512.0, 7),
        ({"dynamic_scale": 512.0, "step_counter": 7}, 512.0, 7),
        ({"scale": 512.0, "fin_steps": 7}, 512.0, 7),
        ({"dynamic_scale": tf.constant(512.0), "step_counter": np.int64(7)}, 512.0, 7),
        ({"dynamic_scale": keras.Variable(512.0), "step_counter": tf.Variable(7)}, 512.0, 7),
    ],
)
def test_native_states_load(saved, scale, good):
    optimizer = bind().optimizer("sgd")
    optimizer.load_state_dict(saved)
    assert (optimizer.state_dict()["scale"], optimizer.state_dict()["good_steps"]) == (scale, good)


def test_a_state_moves_between_the_neutral_scaler_and_the_optimizer():
    mp = bind(**SCALING)
    optimizer, scaler = mp.optimizer("sgd"), mp.loss_scaler
    v, state = keras.Variable([1.0]), mp.loss_scaler.init()
    for flag in (1, 1, 0, 1, 0, 0, 0, 1):
        apply(optimizer, [v], [np.array([1.0 if flag else np.inf], np.float32)])
        state = scaler.update(state, tf.constant(bool(flag)))
    assert optimizer.state_dict() == scaler.state_dict(state)
    again = mp.optimizer("sgd")
    again.load_state_dict(scaler.state_dict(state))
    assert scaler.state_dict(scaler.load_state_dict(again.state_dict())) == optimizer.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "version": 2}, "version 2; this release reads version 1"),
        (lambda s: {k: v for k, v in s.items() if k != "skipped"}, "truncated: it lacks skipped"),
        (lambda s: {**s, "scale": float("inf")}, "scale must be a finite number"),
        (lambda s: {}, "not a loss-scale state: it holds nothing"),
        (lambda s: [1.0], "not list"),
    ],
)
def test_a_bad_state_is_refused_and_nothing_changes(change, message):
    optimizer = bind().optimizer("sgd")
    before = optimizer.state_dict()
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(change(state_to_dict(initial_state(LossScale(mode="dynamic", initial=2.0)))))
    assert optimizer.state_dict() == before


def test_settings_survive_get_config_and_clone_with_compile():
    mp = bind("mixed_float16", **SCALING, max_consecutive_skips=9)
    model = trained(mp, global_clipnorm=2.0)
    config = model.optimizer.get_config()
    kept = json.dumps(config)
    again = PrecisionLossScaleOptimizer.from_config(config)
    assert json.dumps(config) == kept  # not eaten by reading it
    assert again.get_config() == config
    assert again.loss_scale == mp.policy.loss_scale
    assert float(again.scale) == 64.0
    assert keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer)).get_config() == config
    clone = keras.models.clone_model(model)
    clone.compile(optimizer=again, loss="mse")
    assert clone.optimizer is again
    assert clone.get_layer("fc").compute_dtype == "float16"
    clone.train_on_batch(X, Y)
    assert int(again.iterations) == 1


def test_model_weights_alone_do_not_touch_the_optimizer(tmp_path):
    model = trained(bind(**SCALING))
    before = model.optimizer.state_dict()
    model.save_weights(tmp_path / "m.weights.h5")
    model.load_weights(tmp_path / "m.weights.h5")
    assert model.optimizer.state_dict() == before


@pytest.mark.parametrize("master_weights", [None, True])
def test_a_deep_copy_carries_everything_and_goes_its_own_way(master_weights):
    """Keras's own deep copy of a built optimizer drops its variables."""
    mp = bind("float32" if master_weights is None else "bfloat16", **SCALING)
    optimizer = trained(mp, master_weights=master_weights, clipnorm=5.0).optimizer
    other = copy.deepcopy(optimizer)
    assert other.get_config() == optimizer.get_config()
    assert other.state_dict() == optimizer.state_dict()
    assert equal(values(other.variables), values(optimizer.variables))
    assert {id(v) for v in other.variables}.isdisjoint(id(v) for v in optimizer.variables)
    before = values(optimizer.variables)
    variables = optimizer._trainable_variables
    other.apply([tf.ones(v.shape, v.dtype) for v in variables], variables)
    assert equal(values(optimizer.variables), before)
    assert int(other.iterations) == int(optimizer.iterations) + 1


def test_a_deep_copy_of_a_wrapped_native_run_keeps_its_slots():
    native = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=64.0)
    native.apply([tf.constant([64.0])], [keras.Variable([1.0])])
    ours = bind().optimizer(native)
    other = copy.deepcopy(ours)
    assert other.state_dict() == ours.state_dict()
    assert len(other.variables) > 7
    assert equal(values(other.variables), values(ours.variables))
