"""Control flow, functions, custom gradients, lists, callbacks and side effects inside of what is autocast."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.autocast.common import MP, bind, close, draw, low, ops_of, run

X, W = draw(4, 8), draw(8, 8, seed=1)


def product(x, w):
    """What a product of two matrices is under bfloat16."""
    return tf.cast(tf.matmul(low(x), low(w)), tf.bfloat16)


def gradient(function, *args, mp=MP, **options):
    """Of the sum of a function's first result, tape outside."""
    cast = mp.autocast_as_is(function, **options)
    with tf.GradientTape() as tape:
        tape.watch(args)
        total = tf.reduce_sum(tf.cast(tf.nest.flatten(cast(*args))[0], tf.float32))
    return tape.gradient(total, args)


def near(a, b, bar: float = 0.02) -> bool:
    """Whether two tensors are equal but for bfloat16."""
    a, b = (np.asarray(tf.cast(x, tf.float64)) for x in (a, b))
    return np.linalg.norm(a - b) <= bar * np.linalg.norm(b)


def plain_gradient(function, *args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        total = tf.reduce_sum(tf.nest.flatten(tf.function(function)(*args))[0])
    return tape.gradient(total, args)


@pytest.mark.parametrize("flag", [True, False])
def test_branches_are_entered_and_agree(flag):
    def function(x, w, flag):
        return tf.cond(flag, lambda: tf.matmul(x, w), lambda: tf.nn.softmax(x) * 2.0), tf.cond(
            flag, lambda: tf.matmul(x, w), lambda: tf.nn.relu(tf.matmul(x, w))
        )

    mixed, same = run(function, X, W, tf.constant(flag))
    assert mixed.dtype == tf.float32 and same.dtype == tf.bfloat16
    assert close(mixed, product(X, W) if flag else tf.nn.softmax(X) * 2.0)
    grads = gradient(lambda x, w: function(x, w, tf.constant(flag))[0], X, W)
    wants = plain_gradient(lambda x, w: function(x, w, tf.constant(flag))[0], X, W)
    assert near(grads[0], wants[0])


def test_python_conditions_are_turned_into_branches():
    def function(x, w):
        if tf.reduce_sum(x) > 0:
            y = tf.matmul(x, w)
        else:
            y = tf.matmul(x, -w)
        return y

    sign = 1.0 if float(tf.reduce_sum(X)) > 0 else -1.0
    assert np.array_equal(run(function, X, W), product(X, sign * W))


def test_cases_are_entered():
    def function(x, w, i):
        return tf.switch_case(i, [lambda: tf.matmul(x, w), lambda: tf.exp(x), lambda: x])

    got = run(function, X, W, tf.constant(0))
    assert got.dtype == tf.float32 and close(got, product(X, W))
    assert close(run(function, X, W, tf.constant(1)), tf.exp(X))


def test_loops_are_entered_and_carries_come_to_one_dtype():
    def low_carry(x, w):
        h = tf.matmul(x, w)
        for _ in tf.range(3):
            h = tf.nn.relu(tf.matmul(h, w))
        return h

    def wide_carry(x, w):
        h, total = tf.matmul(x, w), 0.0
        for _ in tf.range(3):
            h = tf.matmul(h, w)
            total += tf.reduce_sum(h)
        return total, h

    h = product(X, W)
    for _ in range(3):
        h = tf.nn.relu(product(tf.cast(h, tf.float32), W))
    assert np.array_equal(run(low_carry, X, W), h)
    total, h = run(wide_carry, X, W)
    assert total.dtype == tf.float32 and h.dtype == tf.bfloat16
    for got, want in zip(gradient(low_carry, X, W), plain_gradient(low_carry, X, W), strict=True):
        assert got.dtype == tf.float32 and near(got, want, 0.1)


def test_a_carry_that_starts_low_and_comes_back_wide_is_wide():
    def function(x, w):
        h = tf.matmul(x, w)
        for _ in tf.range(2):
            h = tf.nn.softmax(h)
        return h

    got = run(function, X, W)
    assert got.dtype == tf.float32
    assert close(got, tf.nn.softmax(tf.nn.softmax(tf.cast(product(X, W), tf.float32))))


def test_tensor_arrays_keep_their_dtype():
    def function(x, w):
        array = tf.TensorArray(tf.float32, size=3)
        for i in tf.range(3):
            array = array.write(i, tf.matmul(x, w))
        return array.stack()

    got = run(function, X, W)
    assert got.dtype == tf.float32 and np.array_equal(got[2], tf.cast(product(X, W), tf.float32))
    assert near(gradient(function, X, W)[1], plain_gradient(function, X, W)[1])


def test_functions_are_entered_and_those_compiled_stay_compiled():
    inner = tf.function(tf.matmul)
    compiled = tf.function(lambda x, w: tf.nn.softmax(tf.matmul(x, w)), jit_compile=True)
    assert np.array_equal(run(lambda x, w: inner(x, w), X, W), product(X, W))

    def function(x, w):
        return compiled(x, w)

    assert near(run(function, X, W), tf.nn.softmax(tf.cast(product(X, W), tf.float32)))
    calls = [o for o in ops_of(function, X, W) if o.type.endswith("PartitionedCall")]
    assert [c.get_attr("_XlaMustCompile") for c in calls] == [True]

    def squared(x, w):
        return tf.square(compiled(x, w))

    assert near(gradient(squared, X, W)[1], plain_gradient(squared, X, W)[1], 0.1)


def test_xla_compiles_what_is_autocast():
    def function(x, w):
        for _ in tf.range(2):
            x = tf.nn.gelu(tf.matmul(x, w))
        return tf.nn.softmax(x)

    outer = tf.function(MP.autocast(function), jit_compile=True)
    assert near(outer(X, W), run(function, X, W))
    own = MP.autocast(tf.function(function, jit_compile=True))
    assert near(own(X, W), run(function, X, W))

    @tf.function(jit_compile=True)
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            total = tf.reduce_sum(tf.square(MP.autocast(lambda x, w: tf.nn.gelu(tf.matmul(x, w)))(x, w)))
        return tape.gradient(total, w)

    def plain(w):
        return tf.square(tf.nn.gelu(tf.matmul(X, w)))

    assert near(step(X, W), plain_gradient(plain, W)[0])


def test_a_custom_gradient_keeps_its_rule():
    @tf.custom_gradient
    def halved(x):
        y = tf.exp(x)

        def grad(dy):
            return 0.5 * dy * y + tf.matmul(dy, W) * 0.0

        return y, grad

    def function(x):
        return halved(tf.matmul(x, W))

    def want(x):
        return 0.5 * tf.exp(tf.matmul(x, W))

    assert near(gradient(function, X)[0], plain_gradient(want, X)[0])

    def inside(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(halved(tf.matmul(x, W)))
        return tape.gradient(y, x)

    assert near(run(inside, X), plain_gradient(want, X)[0])


def test_recomputed_functions_and_stopped_gradients():
    recomputed = tf.recompute_grad(lambda x: tf.nn.relu(tf.matmul(x, W)))
    assert near(gradient(lambda x: recomputed(x), X)[0], plain_gradient(lambda x: tf.nn.relu(tf.matmul(x, W)), X)[0])
    assert gradient(lambda x: tf.stop_gradient(tf.matmul(x, W)), X)[0] is None


def test_python_on_the_host_sees_the_dtypes_it_declares():
    seen = []

    def host(x):
        seen.append(x.dtype)
        return x + np.float32(1)

    def function(x, w):
        h = tf.matmul(x, w)
        a = tf.numpy_function(host, [h], tf.float32)
        return tf.py_function(lambda t: t * 2.0, [h], tf.float32), a

    doubled, added = run(function, X, W)
    assert seen == [np.float32] and doubled.dtype == added.dtype == tf.float32
    assert close(doubled, 2.0 * tf.cast(product(X, W), tf.float32))


def test_random_numbers_and_datasets_keep_their_dtype():
    def function(x, w):
        noise = tf.random.stateless_normal(x.shape, (1, 2))
        total = tf.zeros(())
        for batch in tf.data.Dataset.from_tensor_slices(np.ones((3, 2), np.float32)):
            total += tf.reduce_sum(batch)
        return noise, total, tf.matmul(x, w) + tf.random.stateless_normal((4, 8), (1, 2))

    noise, total, both = run(function, X, W)
    assert np.array_equal(noise, tf.random.stateless_normal((4, 8), (1, 2))) and float(total) == 6
    assert both.dtype == tf.float32


def test_side_effects_keep_their_order_and_variables_their_dtype(capfd):
    log = tf.Variable(tf.zeros(3))
    count = tf.Variable(0)

    def function(x, w):
        h = tf.matmul(x, w)
        tf.print("first", tf.shape(h))
        count.assign_add(1)
        log.scatter_nd_update([[0]], [h[0, 0]])
        log.assign(log * 2.0)
        tf.debugging.assert_less(tf.reduce_max(tf.abs(h)), 1e4)
        tf.print("second")
        return h

    run(function, X, W)
    shown = capfd.readouterr().err
    assert shown.index("first") < shown.index("second")
    assert log.dtype == tf.float32 and int(count) == 1
    assert float(log[0]) == 2 * float(product(X, W)[0, 0])


def test_an_assertion_that_fails_names_the_op():
    def function(x):
        with tf.name_scope("checked"):
            tf.debugging.assert_less(x, -1e4, message="too large")
        return tf.matmul(x, W)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"too large(.|\n)*checked/assert_less"):
        run(function, X)


def test_a_function_is_traced_once_a_signature():
    traced = []

    def function(x):
        traced.append(x.shape)
        return tf.matmul(x, W)

    cast = MP.autocast(function)
    for rows in (4, 4, 4, 2, 2):
        cast(draw(rows, 8))
    assert len(traced) == 2


def test_autocast_inside_of_autocast_is_one():
    inner = MP.autocast(lambda x: tf.matmul(x, W))
    assert run(lambda x: inner(x), X).dtype == tf.bfloat16


def test_methods_captured_tensors_and_nested_arguments():
    captured = tf.constant(np.float32(3.0))

    class Model(tf.Module):
        def __init__(self):
            self.w = tf.Variable(W)

        @MP.autocast
        def step(self, batch, *, scale):
            return {"y": tf.matmul(batch["x"], self.w) * captured * scale, "n": batch["n"]}

    got = Model().step({"x": X, "n": tf.constant(2)}, scale=2.0)
    assert got["y"].dtype == tf.float32 and int(got["n"]) == 2
    assert near(got["y"], 6.0 * tf.matmul(X, W))


def test_variables_may_be_made_in_the_first_call():
    made = []

    def function(x):
        if not made:
            made.append(tf.Variable(W))
        return tf.matmul(x, made[0])

    assert np.array_equal(run(function, X), product(X, W))


def test_float16_too():
    def function(x, w):
        for _ in tf.range(2):
            x = tf.nn.tanh(tf.matmul(x, w))
        return x

    got = run(function, X, W, mp=bind("float16"))
    assert got.dtype == tf.float32  # the loop starts with the float32 it is given
    assert np.array_equal(got, low(got, "float16")) and near(got, tf.function(function)(X, W))
