"""Keras models: ``fit`` op by op, layer paths for rules, saving and loading, added losses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import precision
from precision import PolicyError
from tests.tensorflow.autocast.common import bind, draw, run

L = keras.layers


def model(name="net"):
    x = keras.Input((8,))
    h = L.Dense(16, activation="gelu", name="fc", activity_regularizer=keras.regularizers.L2(0.1))(x)
    h = L.BatchNormalization(name="norm")(h)
    return keras.Model(x, L.Dense(3, name="head")(h), name=name)


@pytest.fixture(scope="module")
def fitted():
    """A model trained with and without autocast, from the same weights, on the same data."""
    mp = precision.bind("mixed_float16", backend="tensorflow")
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    plain, low = model(), model()
    low.set_weights(plain.get_weights())
    low = mp.prepare(low, autocast=True)
    histories = []
    for each, optimizer in ((plain, keras.optimizers.Adam(0.01)), (low, mp.optimizer(keras.optimizers.Adam(0.01)))):
        each.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
        histories.append(each.fit(x, y, epochs=3, batch_size=16, verbose=0, shuffle=False).history)
    return mp, low, x, y, histories


def test_fit_casts_op_by_op_and_trains_as_float32_does(fitted):
    _, low, _, _, (plain, ours) = fitted
    assert np.allclose(plain["loss"], ours["loss"], rtol=0.02) and plain["loss"] != ours["loss"]
    assert ours["loss"][-1] < ours["loss"][0]
    assert {v.dtype for v in low.variables} == {"float32"}


def test_evaluate_and_predict_go_through_it_too(fitted):
    _, low, x, y, _ = fitted
    predicted = low.predict(x, verbose=0)
    assert predicted.dtype == np.float32
    exact = np.asarray(type(low).call(low, tf.constant(x)))
    assert 0 < np.abs(predicted - exact).max() < 0.02
    assert np.array_equal(predicted, predicted.astype(np.float16).astype(np.float32))
    assert np.isfinite(low.evaluate(x, y, verbose=0)).all()


def test_saved_and_loaded_it_is_a_plain_model(fitted, tmp_path):
    mp, low, x, _, _ = fitted
    low.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in low.layers]
    assert np.allclose(loaded.predict(x, verbose=0), low.predict(x, verbose=0), atol=0.02)
    again = mp.prepare(loaded, autocast=True)
    assert again is loaded and np.array_equal(again.predict(x, verbose=0), low.predict(x, verbose=0))
    assert mp.prepare(again, autocast=True).call is again.call


def test_layers_of_the_low_policy_are_refused():
    mp = precision.bind("mixed_bfloat16", backend="tensorflow")
    with mp.scope():
        low = model()
    with pytest.raises(PolicyError, match="takes float32 layers; fc computes in another dtype already"):
        mp.prepare(low, autocast=True)


def test_rules_go_by_layer_paths_whatever_names_the_graph_has():
    mp = bind("bfloat16", {"module": "head", "dtype": "float32"}, {"module": "**norm*", "dtype": "bfloat16"})
    net = model("outer")
    found = {}

    def function(x):
        for layer in net.layers[1:]:
            with keras.name_scope("outer"):
                x = layer(x)
            found[layer.name] = x
        return dict(found)

    got = run(function, draw(4, 8), mp=mp)
    assert {name: x.dtype.name for name, x in got.items()} == {
        "fc": "bfloat16", "norm": "bfloat16", "head": "float32"}  # fmt: skip
    assert run(net, draw(4, 8), mp=mp).dtype == tf.float32


def test_a_module_rule_covers_the_layers_backward_pass_in_a_tape_inside():
    mp = bind("bfloat16", {"module": "head", "dtype": "float32"})
    net = keras.Sequential([keras.Input((8,)), L.Dense(8, name="fc"), L.Dense(3, name="head")])
    variables = [v.value for v in net.trainable_variables]

    def inside(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(net(x))
        return tape.gradient(total, variables)

    concrete = mp.autocast_as_is(inside).get_concrete_function(draw(4, 8))
    head = [op for op in concrete.graph.get_operations() if op.type == "MatMul" and "head" in op.name]
    assert len(head) == 3
    assert not any("_precision_kernel" in x.op.node_def.attr for op in head for x in op.inputs)


def test_recurrent_layers():
    net = keras.Sequential([keras.Input((6, 4)), L.GRU(8, return_sequences=True), L.LSTM(8), L.Dense(2)])
    x = draw(3, 6, 4)
    got = run(net, x)
    assert got.dtype == tf.bfloat16
    assert np.allclose(np.asarray(got, np.float32), net(x), atol=0.03)
