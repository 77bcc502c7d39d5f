"""What single ops and small patterns become: author's casts, constants, masks, islands, marked functions, what is left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision import PolicyError, PrecisionPolicy, Rule, UnsupportedError
from precision.errors import PrecisionWarning
from tests.tensorflow.autocast.common import MP, bind, close, draw, dtypes_of, low, ops_of, run


def test_a_product_takes_low_operands_sums_in_float32_and_rounds_once():
    x, w = draw(4, 64), draw(64, 8, seed=1)
    got = run(tf.matmul, x, w)
    assert got.dtype == tf.bfloat16
    exact = np.asarray(low(x), np.float64) @ np.asarray(low(w), np.float64)
    assert np.array_equal(got, tf.cast(tf.constant(exact.astype(np.float32)), tf.bfloat16))


def test_a_bias_belongs_to_its_product():
    x, w, b = draw(4, 16), tf.Variable(draw(16, 8, seed=1)), tf.Variable(1e-3 + draw(8, seed=2))
    for add in (lambda y: y + b, lambda y: tf.nn.bias_add(y, b), lambda y: tf.reshape(y, (2, 2, 8)) + b):
        got = run(lambda x, add=add: add(tf.matmul(x, w)), x)
        want = tf.cast(tf.matmul(low(x), low(w)) + low(b), tf.bfloat16)
        assert got.dtype == tf.bfloat16
        assert np.array_equal(tf.reshape(got, (4, 8)), want)


def test_something_added_that_is_no_bias_promotes():
    assert run(lambda x, w, r: tf.matmul(x, w) + r, draw(4, 4), draw(4, 4), draw(4, 4)).dtype == tf.float32


def test_an_authors_cast_to_float32_survives_though_it_makes_no_op():
    def with_cast(x, w):
        h = tf.matmul(x, w)
        return tf.matmul(tf.cast(h, tf.float32), w)

    def without(x, w):
        return tf.matmul(tf.matmul(x, w), w)

    x, w = draw(4, 8), draw(8, 8, seed=1)
    assert run(with_cast, x, w).dtype == tf.float32
    assert close(run(with_cast, x, w), tf.matmul(low(tf.matmul(low(x), low(w))), w))
    assert run(without, x, w).dtype == tf.bfloat16


def test_an_authors_cast_of_a_low_value_survives():
    def function(x):
        y = tf.cast(tf.cast(x, tf.float16), tf.float32)
        return y, y * 2.0, tf.matmul(y, y)

    first, second, third = run(function, draw(4, 4))
    assert first.dtype == second.dtype == third.dtype == tf.float32
    assert np.array_equal(first, low(draw(4, 4), "float16"))


def test_numbers_take_the_dtype_of_what_they_meet_and_are_not_rounded_before():
    x, w = draw(4, 4), draw(4, 4, seed=1)
    got = run(lambda x, w: tf.matmul(x, w) * 0.1, x, w)
    assert got.dtype == tf.bfloat16
    product = low(tf.matmul(low(x), low(w)))
    assert np.array_equal(got, tf.cast(product * 0.1, tf.bfloat16))
    assert run(lambda x, w: 2.0 * tf.matmul(x, w) - 1.0, x, w).dtype == tf.bfloat16
    assert run(lambda x, w: tf.matmul(x, w) * tf.constant([0.1, 0.2, 0.3, 0.4]), x, w).dtype == tf.float32


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", [np.finfo(np.float32).min, -1e9])
def test_masks_do_not_become_infinite(compute, number):
    mask = tf.constant(np.tril(np.ones((4, 4), bool)))

    def function(q):
        scores = tf.matmul(q, q, transpose_b=True)
        masked = tf.where(mask, scores, tf.constant(number, tf.float32))
        return masked, tf.nn.softmax(masked)

    masked, weights = run(function, draw(4, 8), mp=bind(compute))
    assert masked.dtype == tf.as_dtype(compute)
    assert np.isfinite(np.asarray(masked, np.float32)).all()
    assert np.allclose(np.asarray(weights).sum(-1), 1) and np.all(np.asarray(weights)[~np.asarray(mask)] == 0)


def test_a_row_masked_throughout_gives_no_nan_in_float16():
    def function(q):
        scores = tf.matmul(q, q, transpose_b=True) + tf.constant(np.full((4, 4), np.finfo(np.float32).min))
        return tf.nn.softmax(scores)

    assert np.isfinite(run(function, draw(4, 8), mp=bind("float16"))).all()


def test_softmax_and_its_kin_are_float32_whatever_comes_in():
    def function(x, w):
        h = tf.matmul(x, w)
        return h, tf.nn.softmax(h), tf.nn.log_softmax(h), tf.reduce_logsumexp(h, -1), tf.math.l2_normalize(h, -1)

    h, *rest = run(function, draw(4, 8), draw(8, 8, seed=1))
    wide = tf.cast(h, tf.float32)
    plain = (
        tf.nn.softmax(wide),
        tf.nn.log_softmax(wide),
        tf.reduce_logsumexp(wide, -1),
        tf.math.l2_normalize(wide, -1),
    )
    for got, want in zip(rest, plain, strict=True):
        assert got.dtype == tf.float32 and close(got, want)


def test_what_only_float32_ops_use_is_not_rounded():
    x, t = draw(4, 8), draw(4, 8, seed=1)

    def function(x, w, t):
        return tf.reduce_mean(tf.abs(tf.matmul(x, w) - tf.matmul(t, w)))

    w = draw(8, 8, seed=2)
    a, b = (low(tf.matmul(low(z), low(w))) for z in (x, t))
    assert close(run(function, x, w, t), tf.reduce_mean(tf.abs(a - b)))


def test_reciprocals_powers_and_sums_are_float32_and_other_divisions_are_not():
    def function(x, w):
        h = tf.matmul(x, w)
        return 1 / h, h**2, tf.square(h), tf.reduce_sum(h), h / 2.0, h / h

    got = run(function, draw(4, 4), draw(4, 4, seed=1))
    assert [t.dtype.name for t in got] == ["float32"] * 4 + ["bfloat16"] * 2


@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "tanh", "sigmoid", "selu", "softsign"])
def test_activations_compute_in_float32_and_round_once(name):
    activation = getattr(tf.nn, name)
    x = tf.cast(draw(64), tf.bfloat16)
    got = run(activation, x)
    assert got.dtype == tf.bfloat16
    assert np.array_equal(got, tf.cast(activation(tf.cast(x, tf.float32)), tf.bfloat16))


def test_float64_and_integers_are_left_alone():
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 4)))
    assert np.array_equal(run(lambda x: tf.nn.softmax(tf.matmul(x, x)), x), tf.nn.softmax(tf.matmul(x, x)))
    n = tf.constant([[2**24 + 1, 3], [4, 5]])
    assert np.array_equal(run(lambda n: tf.matmul(n, n) + 1, n), tf.matmul(n, n) + 1)
    assert run(lambda x, w: tf.cast(tf.matmul(x, w), tf.float64), draw(2, 2), draw(2, 2)).dtype == tf.float64


def test_an_island_keeps_its_dtype_as_decorator_and_as_context():
    w = draw(8, 8, seed=1)

    def with_context(x):
        h = tf.matmul(x, w)
        with MP.island("float32"):
            h = tf.matmul(h, w)
        return h, tf.matmul(tf.nn.relu(h), w)

    @MP.island("float32")
    def inner(h):
        return tf.matmul(h, w)

    x = draw(4, 8)
    kept, after = run(with_context, x)
    assert kept.dtype == tf.float32
    assert close(kept, tf.matmul(low(tf.matmul(low(x), low(w))), w))
    assert close(run(lambda x: inner(tf.matmul(x, w)), x), kept)
    del after

    def nested(x):
        with MP.island("float32"):
            with MP.island("bfloat16"):
                a = tf.matmul(x, w)
            return a, tf.matmul(x, w)

    assert [t.dtype.name for t in run(nested, x)] == ["bfloat16", "float32"]


def test_an_island_in_a_dtype_the_device_lacks_is_an_error():
    with pytest.raises(UnsupportedError, match=r"an island in float8_e5m2: CPU:0 does not compute in it"):
        MP.island("float8_e5m2")


def test_a_marked_function_is_of_its_family():
    double = MP.op("matmul")(lambda x: x + x)
    assert run(double, draw(4)).dtype == tf.bfloat16
    exact = MP.op("softmax")(lambda x: x + x)
    assert run(lambda x, w: exact(tf.matmul(x, w)), draw(4, 4), draw(4, 4)).dtype == tf.float32


def test_rules_for_families_and_contradictions():
    x = draw(4, 8)
    ruled = bind("bfloat16", {"family": "softmax", "dtype": "bfloat16"}, {"family": "matmul", "dtype": "float32"})
    assert run(tf.nn.softmax, x, mp=ruled).dtype == tf.bfloat16
    assert np.array_equal(run(tf.matmul, x, tf.transpose(x), mp=ruled), tf.matmul(x, tf.transpose(x)))
    with pytest.raises(PolicyError, match="two rules give family 'norm' different dtypes"):
        PrecisionPolicy(rules=[Rule(family="norm", dtype="float32"), Rule(family="norm", dtype="bfloat16")])


def test_rules_for_modules_go_by_name_scope_and_the_first_wins():
    mp = bind("bfloat16", {"module": "net.last", "dtype": "float32"}, {"module": "net", "dtype": "float16"})
    w = draw(8, 8)

    def function(x):
        with tf.name_scope("net"):
            with tf.name_scope("first"):
                a = tf.matmul(x, w)
            with tf.name_scope("last"):
                b = tf.matmul(x, w)
        return a, b, tf.matmul(x, w)

    assert [t.dtype.name for t in run(function, draw(4, 8), mp=mp)] == ["float16", "float32", "bfloat16"]


def test_a_rule_that_matched_nothing_is_reported():
    with pytest.warns(PrecisionWarning, match="rule 'decoder' matched nothing"):
        run(tf.matmul, draw(2, 2), draw(2, 2), mp=bind("bfloat16", {"module": "decoder", "dtype": "float32"}))


def test_a_policy_with_nothing_to_do_leaves_the_function_alone():
    assert bind("float32").autocast(tf.matmul) is tf.matmul


def test_results_leave_in_the_output_dtype():
    assert MP.autocast(tf.matmul)(draw(2, 2), draw(2, 2)).dtype == tf.float32
    assert bind(output="bfloat16").autocast(tf.nn.softmax)(draw(2, 2)).dtype == tf.bfloat16


def test_what_cannot_be_called_is_refused():
    with pytest.raises(PolicyError, match="mp.autocast takes a function"):
        MP.autocast(3)


def test_mixed_inputs_meet_though_tensorflow_would_not_have_them():
    a, b = tf.cast(draw(4), tf.bfloat16), draw(4, seed=1)
    assert np.array_equal(run(tf.add, a, b), tf.cast(a, tf.float32) + b)


def test_names_and_devices_are_kept():
    def function(x):
        with tf.device("/CPU:0"), tf.name_scope("block"):
            return tf.matmul(x, x, name="scores")

    found = next(op for op in ops_of(function, draw(2, 2)) if op.type == "MatMul")
    assert found.name == "block/scores" and "CPU:0" in found.device


def test_kernels_that_are_missing_are_made_up_for():
    x, k = tf.cast(draw(1, 3, 3, 3, 2), tf.float16), draw(2, 2, 2, 2, 3, seed=1)
    got = run(lambda x, k: tf.nn.conv3d(x, k, (1,) * 5, "VALID"), x, k, mp=bind("float16"))
    want = tf.nn.conv3d(tf.cast(x, tf.float32), low(k, "float16"), (1,) * 5, "VALID")
    assert got.dtype == tf.float16 and close(got, tf.cast(want, tf.float16))
    assert run(tf.nn.elu, x, mp=bind("float16")).dtype == tf.float16


def test_resizing_reduces_or_moves():
    x = tf.cast(draw(1, 2, 2, 1), tf.bfloat16)
    assert run(lambda x: tf.image.resize(x, (4, 4), "bilinear"), x).dtype == tf.float32
    nearest = run(lambda x: tf.image.resize(x, (4, 4), "nearest"), x)
    assert nearest.dtype == tf.bfloat16 and np.array_equal(nearest[:, ::2, ::2], x)


def test_the_low_kernel_of_a_device_is_used_where_it_has_one():
    cast = MP.autocast_as_is(tf.matmul)
    cast.native = True
    ops = cast.get_concrete_function(draw(4, 4), draw(4, 4)).graph.get_operations()
    assert {x.dtype.name for op in ops if op.type == "MatMul" for x in op.inputs} == {"bfloat16"}
    assert dtypes_of(tf.matmul, draw(4, 4), draw(4, 4), op="MatMul") == {"float32"}


def test_two_calls_of_one_activation_keep_each_its_own_dtype():
    """Also where Python gives the second call's frame the address of the first's."""

    def run(x, w):
        low = x @ w
        activations = (tf.nn.gelu, tf.nn.silu, keras.ops.gelu, keras.activations.mish)
        return [activation(each) for activation in activations for _ in range(5) for each in (x, low)]

    function = MP.autocast_as_is(run)
    assert [out.dtype.name for out in function(tf.ones((4, 8)), tf.ones((8, 8)))] == ["float32", "bfloat16"] * 20
