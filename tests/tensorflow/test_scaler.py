"""The neutral scaler over TensorFlow tensors: explicit state, compiled, bit-equal to the rule, never waiting on the host."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import LossScale, PrecisionPolicy, bind
from precision.loss_scale import initial_state, next_state, state_to_dict
from precision_tensorflow import TensorFlowLossScaler

DYNAMIC = LossScale(mode="dynamic", initial=8.0, growth_interval=2, minimum=2.0, maximum=32.0, hysteresis=2)


def test_scale_unscale_update_in_a_compiled_function():
    scaler = TensorFlowLossScaler(DYNAMIC)
    traces = []

    def step(state, w, poison):
        traces.append(1)
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(w["a"] ** 2) * poison + tf.cast(w["b"][0], tf.float32)
            scaled = scaler.scale(loss, state)
        grads, finite = scaler.unscale(tape.gradient(scaled, w), state)
        return grads, finite, scaler.update(state, finite)

    for jit in (False, True):
        traces.clear()
        run, state = tf.function(step, jit_compile=jit), scaler.init()
        expected = initial_state(DYNAMIC)
        w = {"a": tf.constant([1.0, 2.0]), "b": [tf.constant(3.0, tf.float16)]}
        for flag in (1, 1, 0, 0, 0, 1, 1, 1, 1):
            grads, finite, state = run(state, w, tf.constant(1.0 if flag else np.inf))
            expected = next_state(DYNAMIC, expected, np.bool_(flag), np)
            assert bool(finite) is bool(flag)
            assert scaler.state_dict(state) == state_to_dict(expected)
            if flag:
                assert grads["a"].numpy().tolist() == [2.0, 4.0]
                assert (grads["b"][0].dtype, float(grads["b"][0])) == (tf.float32, 1.0)
        assert len(traces) == 1
        assert [v.dtype for v in state] == [tf.float32] + [tf.int32] * 4


@settings(max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from(["on_growth", "on_finite_step"]),
    st.lists(st.booleans(), max_size=30), st.sampled_from([0.5, 0.25, 0.7]), st.sampled_from([2.0, 1.5]),
)  # fmt: skip
def test_trajectories_equal_the_rule(interval, hysteresis, refill, pattern, backoff, growth):
    config = LossScale(
        mode="dynamic", initial=24.0, growth_interval=interval, hysteresis=hysteresis, hysteresis_refill=refill,
        backoff_factor=backoff, growth_factor=growth, minimum=3.0, maximum=100.0,
    )  # fmt: skip
    scaler = TensorFlowLossScaler(config)
    state, expected = scaler.init(), initial_state(config)
    for flag in pattern:
        state, expected = scaler.update(state, tf.constant(flag)), next_state(config, expected, np.bool_(flag), np)
        assert scaler.state_dict(state) == state_to_dict(expected)


def test_unscaling_multiplies_by_torchs_reciprocal():
    """Not a power of two: the float32 reciprocal is what ``torch.amp.GradScaler`` multiplies with."""
    import torch

    scale = np.float32(3.0 * 1.7)
    grads = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    inverse = torch.tensor(scale).double().reciprocal().float()
    want = (torch.tensor(grads) * inverse).numpy()
    scaler = TensorFlowLossScaler(LossScale(mode="static", initial=float(scale)))
    for run in (scaler.unscale, tf.function(scaler.unscale), tf.function(scaler.unscale, jit_compile=True)):
        got, finite = run([tf.constant(grads)], scaler.init())
        assert np.array_equal(got[0].numpy(), want)
        assert bool(finite)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", range(4))
def test_any_non_finite_value_is_found(value, where):
    scaler = TensorFlowLossScaler(DYNAMIC)
    grads = [np.ones(5, np.float32), np.ones((2, 2), np.float16), np.ones(3), np.ones((1, 2), np.float32)]
    grads[where].flat[-1] = value
    tensors = [*map(tf.constant, grads[:3]), tf.IndexedSlices(tf.constant(grads[3]), [0], [4, 2])]
    out, finite = scaler.unscale(tensors, scaler.init())
    assert not bool(finite)
    assert [t.dtype.name for t in out] == ["float32", "float32", "float64", "float32"]


def test_leaves_that_are_no_gradients_pass_through():
    scaler = TensorFlowLossScaler(DYNAMIC)
    tree = {"none": None, "step": tf.constant(3), "g": np.full(2, 16.0, np.float32)}
    out, finite = scaler.unscale(tree, scaler.init())
    assert out["none"] is None
    assert int(out["step"]) == 3
    assert out["g"].numpy().tolist() == [2.0, 2.0]
    assert bool(finite)
    assert bool(scaler.unscale({}, scaler.init())[1])


def test_mode_none_changes_nothing():
    scaler = TensorFlowLossScaler(LossScale())
    loss, grads = tf.constant(1.0, tf.float16), [tf.constant([np.nan])]
    assert scaler.scale(loss, scaler.init()) is loss
    out, finite = scaler.unscale(grads, scaler.init())
    assert out is grads
    assert bool(finite)


def _count_reads(monkeypatch, run) -> int:
    """How often a run fetches a tensor's value to the host."""
    from tensorflow.python.framework import ops

    reads = []
    original = ops._EagerTensorBase._numpy
    monkeypatch.setattr(ops._EagerTensorBase, "_numpy", lambda self: reads.append(1) or original(self))
    run()
    monkeypatch.undo()
    return len(reads)


def test_the_scaler_and_the_optimizer_do_not_wait_on_the_host(monkeypatch):
    mp = bind(PrecisionPolicy(loss_scale=DYNAMIC), backend="tensorflow")
    scaler, grads = mp.loss_scaler, [tf.ones(3), tf.ones(2)]

    def neutral():
        state = scaler.init()
        for _ in range(5):
            scaler.scale(tf.constant(1.0), state)
            _, finite = scaler.unscale(grads, state)
            state = scaler.update(state, finite)

    def compiled(optimizer):
        v = keras.Variable([1.0, 1.0, 1.0])
        optimizer.build([v])
        optimizer.scale_loss(tf.constant(1.0))
        step = tf.function(lambda g: optimizer.apply([g], [v]))
        step(grads[0])
        return lambda: [step(grads[0]) for _ in range(5)]

    def eager(optimizer):
        v = keras.Variable([1.0, 1.0, 1.0])
        optimizer.build([v])
        optimizer.scale_loss(tf.constant(1.0))
        return lambda: [optimizer.apply([grads[0]], [v]) for _ in range(5)]

    probe = _count_reads(monkeypatch, lambda: bool(tf.constant(True)))
    assert probe == 1  # the counter does count
    assert _count_reads(monkeypatch, neutral) == 0
    assert _count_reads(monkeypatch, compiled(mp.optimizer("sgd"))) == 0
    ours = _count_reads(monkeypatch, eager(mp.optimizer("sgd")))
    native = _count_reads(monkeypatch, eager(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())))
    assert ours <= native  # eager code has to ask whether to step; once a step, no more than Keras does


def test_arrays_and_numbers_and_variables_are_gradients_too():
    scaler = TensorFlowLossScaler(DYNAMIC)
    leaves = [np.float32(16.0), 16.0, np.full((), 16.0), keras.Variable(16.0), tf.Variable(16.0), tf.constant(16.0)]
    out, finite = scaler.unscale(leaves, scaler.init())
    assert [float(x) for x in out] == [2.0] * 6
    assert bool(finite)
    for bad in (np.float32(np.nan), float("inf"), np.full(2, np.nan), keras.Variable(np.inf)):
        assert not bool(scaler.unscale([bad, tf.constant(1.0)], scaler.init())[1])


@pytest.mark.parametrize("jit", [False, True])
def test_complex_gradients_are_unscaled_and_checked(jit):
    scaler = TensorFlowLossScaler(DYNAMIC)
    unscale = tf.function(scaler.unscale, jit_compile=jit)
    (got,), finite = unscale([tf.constant([16 + 8j], tf.complex64)], scaler.init())
    assert got.numpy().tolist() == [2 + 1j]
    assert bool(finite)
    for bad in (complex(np.nan, 0), complex(0, np.inf)):
        assert not bool(unscale([tf.constant([1 + 1j, bad], tf.complex64)], scaler.init())[1])
