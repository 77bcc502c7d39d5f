"""Scopes and islands: which policy layers get, what is restored, and what reaches threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision import PolicyError
from tests.tensorflow.helpers import unscaled


def _dtype_of_a_new_layer() -> str:
    return keras.layers.Dense(1).compute_dtype


def test_layers_created_inside_use_the_policy_and_the_former_one_comes_back():
    former = keras.config.dtype_policy()
    with unscaled("mixed_bfloat16").scope():
        assert _dtype_of_a_new_layer() == "bfloat16"
        assert keras.layers.Dense(1, dtype="float32").compute_dtype == "float32"
        with unscaled("mixed_float16").scope():
            assert _dtype_of_a_new_layer() == "float16"
        assert _dtype_of_a_new_layer() == "bfloat16"
    assert keras.config.dtype_policy() is former
    assert _dtype_of_a_new_layer() == "float32"


def test_an_exception_restores_the_former_policy():
    with pytest.raises(ZeroDivisionError), unscaled("bfloat16").scope():
        1 / 0  # noqa: B018
    assert _dtype_of_a_new_layer() == "float32"


def test_one_scope_object_can_be_entered_again_and_inside_itself():
    scope = unscaled("mixed_bfloat16").scope()
    with scope, scope:
        assert _dtype_of_a_new_layer() == "bfloat16"
    assert _dtype_of_a_new_layer() == "float32"
    with scope:
        assert _dtype_of_a_new_layer() == "bfloat16"
    assert _dtype_of_a_new_layer() == "float32"


def test_a_scope_is_a_decorator():
    assert unscaled("mixed_bfloat16").scope()(_dtype_of_a_new_layer)() == "bfloat16"
    assert _dtype_of_a_new_layer() == "float32"


def test_keras_policy_alone_stops_at_the_thread_and_the_scope_goes_on():
    seen: dict[str, str] = {}

    def build(key: str) -> None:
        seen[key] = _dtype_of_a_new_layer()
        seen[f"{key} after"] = keras.config.dtype_policy().name

    with unscaled("mixed_bfloat16").scope() as scope:
        threads = [
            threading.Thread(target=build, args=("native",)),
            threading.Thread(target=scope.wrap(build), args=("ours",)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen["native"] == "float32"  # what Keras does by itself: its default policy is a thread's own
    assert seen["ours"] == "bfloat16"


def test_wrap_leaves_the_thread_as_it_was():
    scope = unscaled("mixed_bfloat16").scope()

    def inside() -> tuple[str, str]:
        return scope.wrap(_dtype_of_a_new_layer)(), keras.config.dtype_policy().name

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == ("bfloat16", "float32")


def test_a_pool_takes_the_policy_through_its_initializer():
    with unscaled("mixed_bfloat16").scope() as scope, ThreadPoolExecutor(3, initializer=scope.attach) as pool:
        assert set(pool.map(lambda _: _dtype_of_a_new_layer(), range(12))) == {"bfloat16"}
    assert _dtype_of_a_new_layer() == "float32"


def test_threads_in_one_scope_at_a_time_do_not_mix():
    scopes = {name: unscaled(name).scope() for name in ("mixed_bfloat16", "mixed_float16", "float32")}
    barrier = threading.Barrier(3, timeout=60)

    def build(name: str) -> list[str]:
        with scopes[name], scopes["mixed_bfloat16"]:
            barrier.wait()
            inner = _dtype_of_a_new_layer()
            barrier.wait()
            with scopes[name]:
                barrier.wait()
                return [inner, _dtype_of_a_new_layer()]

    with ThreadPoolExecutor(3) as pool:
        got = dict(zip(scopes, pool.map(build, scopes), strict=True))
    assert got == {
        "mixed_bfloat16": ["bfloat16", "bfloat16"],
        "mixed_float16": ["bfloat16", "float16"],
        "float32": ["bfloat16", "float32"],
    }


def test_a_scope_survives_clear_session_inside_it():
    with unscaled("mixed_bfloat16").scope():
        keras.utils.clear_session()
    assert _dtype_of_a_new_layer() == "float32"


def test_an_island_holds_for_layers_and_for_a_functions_inputs():
    mp = unscaled("mixed_bfloat16")
    with mp.scope():
        with mp.island():
            head = keras.layers.Dense(2)
        body = keras.layers.Dense(2)
    assert (head.compute_dtype, body.compute_dtype) == ("float32", "bfloat16")

    @mp.island("float32")
    def total(a, *, b, n):
        return a.dtype, b[0].dtype, n.dtype, tf.reduce_sum(a)

    a, b, n, _ = total(tf.ones(3, tf.bfloat16), b=[tf.ones(2, tf.float64)], n=tf.constant(1))
    assert (a, b, n) == (tf.float32, tf.float64, tf.int32)


def test_an_island_keeps_variables_of_a_mixed_layer_as_they_are():
    mp = unscaled("mixed_bfloat16")
    exact = 1.0 + 2.0**-12  # not a bfloat16

    class Mine(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(), initializer=keras.initializers.Constant(exact))

        def call(self, x):
            outside = tf.cast(tf.convert_to_tensor(self.w), tf.float32)
            inside = mp.island("float32")(lambda w: tf.convert_to_tensor(w))(self.w)
            return tf.stack([outside, inside])

    with mp.scope():
        layer = Mine()
    outside, inside = np.asarray(layer(np.zeros((1,), np.float32)))
    assert outside == 1.0  # Keras's autocasting rounds it
    assert inside == np.float32(exact)


def test_an_unknown_island_dtype_is_an_error():
    with pytest.raises(PolicyError, match=r"unknown dtype 'float23'.*Did you mean 'float32'"):
        unscaled().island("float23")
