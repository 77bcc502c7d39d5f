"""Public reports of mixed precision that goes wrong in TensorFlow and Keras, each as a small model of our own, under autocast.

The first line of a test names the report. None of its code is used.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.autocast.common import bind, draw, low, run
from tests.tensorflow.autocast.test_control import near

FP16 = bind("float16")
L = keras.layers


def both(layer, x, **options):
    """A layer under float16 autocast, and in float32."""
    want = layer(x, **options)
    return run(lambda x: layer(x, **options), x, mp=FP16), want


def test_a_custom_activation_with_numbers_and_a_computed_factor():
    """tensorflow/tensorflow#45919: float32 constants computed inside an activation do not match float16 features."""

    def activation(x, alpha=0.9, beta=2.0):
        return tf.nn.relu(x) * (1 + tf.math.sigmoid(beta)) - tf.nn.relu(-x) * tf.clip_by_value(alpha, 0.01, 0.99)

    got, want = both(L.Dense(4, activation=activation), draw(4, 8))
    assert got.dtype == tf.float16 and near(got, want, 0.005)


@pytest.mark.parametrize("layer", [L.GaussianNoise(0.1), L.AlphaDropout(0.2), L.GaussianDropout(0.2)])
def test_noise_layers(layer):
    """tensorflow/tensorflow#38850, #35883: noise drawn in float32 does not match float16 features."""
    dense = L.Dense(4)
    got = run(lambda x: layer(dense(x), training=True), draw(4, 8), mp=FP16)
    assert np.isfinite(np.asarray(got, np.float32)).all()


def test_masked_attention_in_float16():
    """keras-team/keras#17571, tensorflow/tensorflow#59657: the mask's large number overflows when it is added to scores."""
    x = 4.0 * draw(2, 5, 8)
    mask = np.zeros((2, 5, 5), bool)
    mask[:, :, :2] = True
    mask[0, 3] = False  # one that may look at nobody
    got, want = both(L.MultiHeadAttention(2, 4), x, value=x, attention_mask=mask)
    assert got.dtype == tf.float16 and np.isfinite(np.asarray(got, np.float32)).all() and near(got, want, 0.02)


def test_scores_less_1e30_where_masked():
    """huggingface/transformers#6915: 1e30 times the inverted mask is infinite in float16, and times zero no number."""
    mask = tf.constant([[1, 1, 0, 0]])

    def attend(q, w):
        scores = tf.matmul(tf.matmul(q, w), q, transpose_b=True)
        return tf.nn.softmax(scores - 1e30 * (1.0 - tf.cast(mask, tf.float32)))

    q, w = draw(4, 8), draw(8, 8, seed=1)
    assert near(run(attend, q, w, mp=FP16), attend(q, w), 0.02)


def test_preprocessing_in_a_lambda_layer():
    """tensorflow/tensorflow#50668: float32 constants in a Lambda layer's function do not match float16 images."""
    means = np.array([103.9, 116.8, 123.7], np.float32)
    layer = L.Lambda(lambda x: (x[..., ::-1] - tf.constant(means)) / 255.0)
    images = tf.constant(np.random.default_rng(0).integers(0, 256, (1, 2, 2, 3)).astype(np.float32))
    got, want = both(layer, images)
    assert got.dtype == tf.float32 and near(
        got, want, 1e-6
    )  # and the image is not rounded before its mean is taken away


def test_group_normalisation_of_large_features():
    """keras-team/keras#22666: group normalisation gives NaN under mixed_float16 where the variance exceeds 65504."""
    dense, norm = L.Dense(8), L.GroupNormalization(2)
    x = 3000.0 * draw(4, 8)
    got, want = run(lambda x: norm(dense(x)), x, mp=FP16), norm(dense(x))
    assert got.dtype == tf.float32 and near(got, want, 0.005)


def test_labels_that_go_through_a_layer_are_not_rounded():
    """keras-team/keras-cv#1092, #734: a layer's autocasting rounds labels that are passed along with the images."""

    class Mix(L.Layer):
        def call(self, inputs):
            return {"images": inputs["images"] * 0.5, "labels": inputs["labels"] * 1.0}

    labels = tf.constant([2049.0, 4097.0])  # float16 has no such numbers
    inputs = {"images": draw(2, 4), "labels": labels}
    assert np.array_equal(run(Mix(), inputs, mp=FP16)["labels"], labels)
    native = Mix(dtype="mixed_float16")(inputs)["labels"]
    assert not np.array_equal(tf.cast(native, tf.float32), labels)  # the fault


def test_a_float32_branch_is_concatenated_with_a_low_one():
    """JanMarcelKezmann/TensorFlow-Advanced-Segmentation-Models#29: a resized float32 branch and float16 ones."""
    conv = L.Conv2D(2, 1)

    def function(x):
        pooled = tf.image.resize(tf.reduce_mean(x, (1, 2), keepdims=True), (4, 4))
        return tf.concat([pooled, conv(x)], -1)

    x = draw(1, 4, 4, 2)
    assert near(run(function, x, mp=FP16), function(x), 0.005)


def test_cross_entropy_of_probabilities_near_one():
    """tensorflow/tensorflow#38457: in float16 the epsilon of binary cross-entropy is zero and the loss is not a number."""
    model = keras.Sequential([keras.Input((2,)), L.Dense(1, activation="sigmoid", kernel_initializer="ones")])
    loss = keras.losses.BinaryCrossentropy()
    x, y = tf.constant([[30.0, 30.0], [-30.0, -30.0]]), tf.constant([[0.0], [1.0]])
    got = run(lambda x: loss(y, model(x)), x, mp=FP16)
    assert np.isfinite(got) and near(got, loss(y, model(x)), 1e-3)


def test_a_softmax_at_the_end_of_a_model_leaves_in_float32():
    """tensorflow/models#6309: the last layer's softmax in float16; its probabilities add up to something else than one."""
    model = keras.Sequential([keras.Input((8,)), L.Dense(2000, activation="softmax")])
    got = run(model, draw(2, 8), mp=FP16)
    assert got.dtype == tf.float32 and np.allclose(np.asarray(got).sum(-1), 1, atol=1e-6)


def test_statistics_stay_float32_in_batch_normalisation():
    """keras-team/keras#9582: batch normalisation refuses float16; in float32 its statistics must not be rounded either."""
    norm = L.BatchNormalization(momentum=0.0)
    x = 1000.0 + draw(64, 4)
    run(lambda x: norm(x, training=True), x, mp=FP16)
    assert norm.moving_mean.dtype == "float32" and near(norm.moving_mean.value, tf.reduce_mean(x, 0), 1e-6)


def test_what_runs_is_visible():
    """The graph rewrite ``auto_mixed_precision`` happens behind Python: dtypes there are those of before. Here they are seen."""

    def function(x, w):
        return tf.matmul(x, w)

    concrete = FP16.autocast_as_is(function).get_concrete_function(draw(2, 2), draw(2, 2))
    assert concrete.outputs[0].dtype == tf.float16
    x = draw(2, 2)
    assert np.array_equal(concrete(x, x), tf.cast(tf.matmul(low(x, "float16"), low(x, "float16")), tf.float16))
