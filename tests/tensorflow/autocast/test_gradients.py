"""Gradients: tapes outside and inside, float32 at the variables without another rounding, and what is kept for them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision.parity.networks import network_spec
from precision_tensorflow.opcast.saved import saved_tensors
from precision_tensorflow.parity_networks import Network
from tests.tensorflow.autocast.common import MP, bind, close, draw, low, ops_of, run
from tests.tensorflow.autocast.test_control import near

X = draw(16, 8)


def test_a_weights_gradient_is_float32_and_not_rounded():
    w, b = tf.Variable(draw(8, 4, seed=1)), tf.Variable(draw(4, seed=2))

    def loss(x):
        return tf.reduce_sum(tf.matmul(x, w) + b)

    with tf.GradientTape() as tape:
        total = MP.autocast(loss)(X)
    dw, db = tape.gradient(total, [w, b])
    want = tf.matmul(low(X), tf.ones((16, 4)), transpose_a=True)
    assert dw.dtype == db.dtype == tf.float32
    assert close(dw, want) and not np.array_equal(dw, low(dw))
    assert close(db, tf.fill([4], 16.0))

    def inside(x):
        with tf.GradientTape() as tape:
            total = loss(x)
        return tape.gradient(total, [w, b])

    dw, db = run(inside, X)
    assert dw.dtype == db.dtype == tf.float32 and close(dw, want)


def test_a_long_sum_of_bias_gradients_loses_no_terms():
    b = tf.Variable(tf.zeros(2))
    with tf.GradientTape() as tape:
        total = MP.autocast(lambda x: tf.nn.bias_add(tf.matmul(x, tf.ones((3, 2))), b))(tf.ones((4096, 3)))
    assert np.array_equal(tape.gradient(total, b), [4096.0, 4096.0])  # TensorFlow's bfloat16 kernel gives 256


def network():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 2)), layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(), layers.DepthwiseConv2D(3), layers.Conv2DTranspose(3, 2), layers.LayerNormalization(),
        layers.Flatten(), layers.Dense(6, activation="gelu"), layers.Dense(3, activation="softmax"),
    ])  # fmt: skip


def test_a_tape_inside_gives_what_a_tape_outside_and_float32_give():
    keras.utils.set_random_seed(0)
    model = network()
    x, y = draw(8, 8, 8, 2), tf.constant([0, 1, 2, 0, 1, 2, 0, 1])
    loss = keras.losses.SparseCategoricalCrossentropy()
    variables = [v.value for v in model.trainable_variables]

    def forward(x, y):
        return loss(y, model(x, training=True))

    def inside(x, y):
        with tf.GradientTape() as tape:
            total = forward(x, y)
        return tape.gradient(total, variables)

    want = tf.function(inside)(x, y)
    cast = MP.autocast(forward)
    with tf.GradientTape() as tape:
        total = cast(x, y)
    outside = tape.gradient(total, variables)
    got = MP.autocast(inside)(x, y)
    for variable, a, b, c in zip(variables, got, outside, want, strict=True):
        assert a.dtype == b.dtype == tf.float32
        if np.linalg.norm(c) > 1e-4:  # not a bias that batch normalisation takes away
            assert near(a, c, 0.25) and near(b, c, 0.25), variable.name
    types = {op.type for op in ops_of(inside, x, y)}
    assert {"Conv2DBackpropFilter", "ReluGrad", "MaxPoolGrad"} <= types


def test_functions_with_their_backward_pairs_are_replayed():
    inner = tf.function(lambda x, w: tf.nn.relu(tf.matmul(x, w)))
    w = tf.Variable(draw(8, 8, seed=1))

    def inside(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.square(inner(inner(x, w), w)))
        return tape.gradient(total, w)

    assert near(run(inside, X), tf.function(inside)(X), 0.03)


def test_fused_batch_norm_and_its_gradient():
    scale, offset = tf.Variable(tf.ones(2)), tf.Variable(tf.zeros(2))
    x = draw(2, 4, 4, 2)

    def inside(x):
        with tf.GradientTape() as tape:
            y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
            total = tf.reduce_sum(tf.square(y) * tf.range(1.0, 3.0))
        return y, tape.gradient(total, [scale, offset])

    y, grads = run(inside, tf.cast(x, tf.bfloat16))
    assert y.dtype == tf.float32
    for got, want in zip(grads, tf.function(inside)(low(x))[1], strict=True):
        assert got.dtype == tf.float32 and near(got, want)


def test_second_derivatives():
    def function(x):
        return tf.reduce_sum(tf.nn.tanh(x) ** 3)

    cast = MP.autocast(function)
    x = tf.constant([0.25, 0.5])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = cast(x)
        first = inner.gradient(y, x)
    t = np.tanh(np.asarray(x, np.float64))
    assert near(outer.gradient(first, x), 6 * t * (1 - t**2) ** 2 - 6 * t**3 * (1 - t**2))


def test_embeddings_have_sparse_gradients():
    table = tf.Variable(draw(10, 4))
    with tf.GradientTape() as tape:
        total = MP.autocast(lambda i: tf.reduce_sum(tf.nn.embedding_lookup(table, i) * 2.0))(tf.constant([1, 1, 3]))
    grad = tf.convert_to_tensor(tape.gradient(total, table))
    assert np.array_equal(grad[:, 0], [0, 4, 0, 2, 0, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def kept():
    """Bytes kept for the backward pass of the transformer, in float32 and under bfloat16."""
    found = {}
    for name in ("float32", "bfloat16"):
        mp = bind(name)
        net = Network(network_spec("transformer", mp.policy))
        run_it = tf.autograph.experimental.do_not_convert(net.loss)
        cast = tf.function(run_it) if name == "float32" else mp.autocast_as_is(run_it)
        concrete = cast.get_concrete_function(tf.constant(net.spec.inputs), tf.constant(net.spec.labels))
        variables = [getattr(v, "value", v) if isinstance(v, keras.Variable) else v for v in net.weights.values()]
        found[name] = saved_tensors(concrete, variables)
    return found


def test_what_is_kept_for_backward_is_at_most_0_6_of_float32s(kept):
    size = {name: sum(t.dtype.size * t.shape.num_elements() for t in tensors) for name, tensors in kept.items()}
    assert size["bfloat16"] <= 0.6 * size["float32"], size


def test_no_float32_scores_or_probabilities_are_kept(kept):
    square = [
        t for t in kept["bfloat16"] if t.shape.rank == 4 and t.shape[-1] == t.shape[-2] == 16 and t.dtype != tf.bool
    ]
    assert square == []
