"""Casting trees, and functions at their boundary."""

from collections import namedtuple

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch

import precision
from precision import FAMILIES, LossScale, MixedFrameworksError, PolicyError, PrecisionPolicy, Rule, decide
from tests.tensorflow.helpers import unscaled

Pair = namedtuple("Pair", "first second")


def test_only_floating_leaves_are_cast_and_float64_never():
    mp = unscaled("mixed_bfloat16")
    tree = {
        "f": tf.ones(2), "h": tf.ones(2, tf.float16), "d": tf.ones(2, tf.float64), "i": tf.ones(2, tf.int32),
        "b": tf.constant(True), "s": tf.constant("x"), "none": None, "text": "y", "python": 1.5,
        "nested": [Pair(tf.Variable([1.0]), np.ones(2, np.float32)), (np.ones(1), np.arange(2))],
        "rows": tf.IndexedSlices(tf.ones((1, 2)), [0], [3, 2]), "ragged": tf.ragged.constant([[1.0], [2.0, 3.0]]),
    }  # fmt: skip
    out = mp.cast_to_compute(tree)
    names = {k: getattr(getattr(out[k], "dtype", None), "name", None) for k in tree}
    assert names == {
        "f": "bfloat16", "h": "bfloat16", "d": "float64", "i": "int32", "b": "bool", "s": "string", "none": None,
        "text": None, "python": None, "nested": None, "rows": "bfloat16", "ragged": "bfloat16",
    }  # fmt: skip
    pair, (double, ints) = out["nested"]
    assert isinstance(pair, Pair)
    assert (pair.first.dtype, pair.second.dtype) == (tf.bfloat16, tf.bfloat16)
    assert (double.dtype, ints.dtype.kind) == (np.float64, "i")
    assert out["python"] == 1.5
    assert out["text"] == "y"
    assert tree["f"].dtype == tf.float32  # the input is left alone


def test_a_rule_for_the_path_wins_in_params_and_compute_but_not_outputs():
    mp = unscaled("mixed_bfloat16", rules=(Rule(module="norm", dtype="float16"),))
    tree = {"norm": {"scale": tf.ones(1)}, "fc": tf.ones(1, tf.float16)}
    dtypes = [
        {k: v.dtype.name for k, v in {"norm": out["norm"]["scale"], "fc": out["fc"]}.items()}
        for out in (mp.cast_to_param(tree), mp.cast_to_compute(tree), mp.cast_to_output(tree))
    ]
    assert dtypes == [
        {"norm": "float16", "fc": "float32"}, {"norm": "float16", "fc": "bfloat16"}, {"norm": "float32", "fc": "float32"},
    ]  # fmt: skip


def test_a_keras_variable_is_known_by_its_own_path():
    mp = unscaled("mixed_bfloat16", rules=(Rule(module="**norm*", dtype="float32"),))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="fc"), keras.layers.LayerNormalization()])
    cast = mp.cast_to_compute(list(model.trainable_variables))
    assert [t.dtype.name if hasattr(t.dtype, "name") else t.dtype for t in cast] == ["bfloat16"] * 2 + ["float32"] * 2


def test_casts_round_as_ml_dtypes_does():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 100
    for name, dtype in (("mixed_bfloat16", ml_dtypes.bfloat16), ("mixed_float16", np.float16)):
        mp = precision.bind(name, backend="tensorflow")
        assert np.array_equal(mp.cast_to_compute(x).numpy().astype(np.float32), x.astype(dtype).astype(np.float32))


def test_symbolic_tensors_are_cast_in_functional_models():
    mp = unscaled("mixed_bfloat16")
    x = keras.Input((2,))
    model = keras.Model(x, mp.cast_to_output(mp.cast_to_compute({"y": x}))["y"])
    got = model(np.array([[1.0 + 2.0**-12, 3.0]], np.float32))
    assert got.dtype == tf.float32
    assert np.array_equal(got, [[1.0, 3.0]])


def test_cast_boundary_eagerly_and_in_graphs():
    mp = unscaled("mixed_bfloat16")

    @mp.cast_boundary
    def double(x, *, scale):
        """Doubles."""
        seen.append((x["a"].dtype.name, scale.dtype.name))
        return {"y": x["a"] * scale, "n": x["n"]}

    for run in (double, tf.function(double)):
        seen: list = []
        out = run({"a": tf.ones(2), "n": tf.constant(3)}, scale=tf.constant(2.0))
        assert seen == [("bfloat16", "bfloat16")]
        assert (out["y"].dtype.name, out["n"].dtype.name) == ("float32", "int32")
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")


def test_autograph_still_converts_the_wrapped_function():
    mp = unscaled("mixed_bfloat16")

    @tf.function
    @mp.cast_boundary
    def halve_while_large(x):
        while tf.reduce_max(x) > 1.0:
            x = x / 2
        return x

    assert float(halve_while_large(tf.constant([12.0]))[0]) == 0.75


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float64", "float16")]
)
def test_op_casts_as_the_one_table_decides(family, dtypes):
    mp = unscaled("mixed_bfloat16")

    @mp.op(family)
    def mine(a, n, *, b):
        return a.dtype.name, n.dtype.name, b[0].dtype.name

    got = mine(tf.ones(2, dtypes[0]), tf.constant(1), b=[tf.ones(2, dtypes[1])])
    assert got == decide(mp.policy, family, [dtypes[0], "int32", dtypes[1]])


def test_a_family_rule_reaches_marked_functions():
    mp = unscaled("mixed_bfloat16", rules=(Rule(family="softmax", dtype="float16"),))
    assert mp.op("softmax")(lambda x: x.dtype)(tf.ones(2)) == tf.float16


def test_op_sees_a_layers_variables_unrounded():
    mp = unscaled("mixed_bfloat16")

    class Mine(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(1,), initializer=keras.initializers.Constant(1.0 + 2.0**-12))

        def call(self, x):
            return mp.op("norm")(lambda x, w: x * 0 + w)(x, self.w)

    with mp.scope():
        layer = Mine()
    assert float(layer(np.zeros((1,), np.float32))[0]) == 1.0 + 2.0**-12


def test_an_unknown_family_is_an_error_when_marking():
    with pytest.raises(PolicyError, match=r"unknown op family 'sofmax'.*Did you mean 'softmax'"):
        unscaled().op("sofmax")


def test_another_frameworks_tensor_is_refused():
    mp = precision.bind(PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic")), backend="tf")
    tree = {"ours": tf.ones(1), "theirs": torch.ones(1)}
    calls = (
        mp.cast_to_compute, mp.cast_to_param, mp.cast_to_output, mp.op("norm")(lambda t: t), mp.cast_boundary(lambda t: t),
        lambda t: mp.loss_scaler.unscale(t, mp.loss_scaler.init()),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(MixedFrameworksError, match=r"tensorflow backend holds a torch.Tensor, which is torch's"):
            call(tree)


def test_methods_of_layers_can_be_marked_and_a_spec_is_no_tensor():
    """``self`` is a layer, which has a dtype as a tensor has."""
    mp = unscaled("mixed_bfloat16")

    class Mine(keras.layers.Layer):
        @mp.op("matmul")
        def product(self, x):
            return self, x

        @mp.island("bfloat16")
        def low(self, x):
            return self, x

        @mp.cast_boundary
        def both(self, x):
            return self, tf.convert_to_tensor(x.dtype.name), x

    layer, x = Mine(), tf.ones(3)
    for method in (layer.product, layer.low):
        given, seen = method(x)
        assert given is layer
        assert seen.dtype == tf.bfloat16
    given, inside, outside = layer.both(x)
    assert given is layer
    assert (inside.numpy(), outside.dtype) == (b"bfloat16", tf.float32)
    spec = tf.TensorSpec((), tf.float32)
    assert mp.cast_to_compute([spec])[0] is spec
