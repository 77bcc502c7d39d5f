"""Binding: what devices are said to do, and the errors for what cannot be had."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import precision
from precision import PolicyError, PrecisionPolicy, Rule, UnsupportedError
from precision.formats import DTYPES
from precision_tensorflow import TensorFlowBackend, TensorFlowPolicy, devices
from tests.tensorflow.helpers import bind, data, equal, small_model, values


def test_every_alias_gives_the_same_backend():
    backends = {id(precision.get_backend(name)) for name in ("tensorflow", "tf", "keras", " TF ")}
    assert len(backends) == 1
    assert isinstance(precision.get_backend("tf"), TensorFlowBackend)
    assert isinstance(precision.bind("float32", backend="tf"), TensorFlowPolicy)
    assert precision.get_backend("tf").versions()["tensorflow"] == tf.__version__


def test_capabilities_are_what_the_device_really_does():
    found = {c.dtype: c for c in precision.get_backend("tf").capabilities() if c.device == "CPU:0"}
    assert tuple(found) == ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    assert set(found) == set(DTYPES)
    for dtype, capability in found.items():
        x = tf.cast(tf.constant([[1.0, 2.0], [3.0, 4.0]]), dtype)
        assert np.array_equal(tf.cast(x, tf.float32), [[1.0, 2.0], [3.0, 4.0]])
        if capability.support in ("native", "slow"):
            assert np.array_equal(tf.cast(tf.matmul(x, x), tf.float32), [[7.0, 10.0], [15.0, 22.0]])
        else:
            with pytest.raises((tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
                tf.matmul(x, x)
        assert len(capability.reason) > 10


@pytest.mark.parametrize(
    ("flags", "bfloat16", "float16"),
    [
        ({"avx512f", "avx512_bf16"}, "native", "slow"), ({"amx_bf16", "amx_fp16"}, "native", "native"),
        ({"avx2"}, "slow", "slow"), (set(), "slow", "slow"),
    ],
)  # fmt: skip
def test_a_cpus_flags_decide(flags, bfloat16, float16):
    support = {dtype: s for dtype, s, _ in devices._cpu(frozenset(flags))}
    assert (support["bfloat16"], support["float16"], support["float32"]) == (bfloat16, float16, "native")


@pytest.mark.parametrize(
    ("details", "bfloat16", "float16"),
    [
        ({"device_name": "H100", "compute_capability": (9, 0)}, "native", "native"),
        ({"device_name": "V100", "compute_capability": (7, 0)}, "slow", "native"),
        ({"device_name": "P100", "compute_capability": (6, 0)}, "slow", "slow"),
        ({}, "slow", "slow"),
    ],
)
def test_a_gpus_compute_capability_decides(details, bfloat16, float16):
    rows = {dtype: (s, why) for dtype, s, why in devices._gpu(details)}
    assert (rows["bfloat16"][0], rows["float16"][0]) == (bfloat16, float16)
    assert details.get("device_name", "GPU") in rows["float16"][1]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (PrecisionPolicy(compute_dtype="float8_e5m2"), {}, "compute_dtype float8_e5m2: not on CPU:0: TensorFlow casts to and from it.*has float32, bfloat16, float16"),
        (PrecisionPolicy(rules=(Rule(module="a", dtype="float8_e4m3fn"),)), {}, "rule 'a': dtype float8_e4m3fn not on CPU:0"),
        (PrecisionPolicy(emulate=True), {}, "emulate = true"),
        (PrecisionPolicy(), {"device": "GPU:7"}, "unknown device 'GPU:7'. TensorFlow sees CPU:0"),
        (PrecisionPolicy(), {"devise": "CPU:0"}, "unknown option 'devise'. Did you mean 'device'"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_an_error_that_says_what_can(policy, options, message):
    with pytest.raises(UnsupportedError, match=message):
        precision.bind(policy, backend="tensorflow", **options)


def test_float16_training_without_a_loss_scale_is_refused():
    mp = precision.bind(PrecisionPolicy(compute_dtype="float16"), backend="tensorflow")
    with pytest.raises(PolicyError, match="compute_dtype float16 and loss_scale.mode 'none' loses small gradients"):
        mp.optimizer("adam")


def test_keras_on_another_backend_is_an_error_that_says_what_to_set():
    code = (
        "import os; os.environ['KERAS_BACKEND'] = 'jax'\n"
        "import precision\n"
        "try:\n    precision.bind('float32', backend='keras')\n"
        "except precision.BackendUnavailableError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert "Keras runs on 'jax' in this process" in done.stdout
    assert "KERAS_BACKEND=tensorflow" in done.stdout


@pytest.mark.parametrize(
    "make", [lambda: tf.distribute.MirroredStrategy(["CPU:0"]), lambda: tf.distribute.OneDeviceStrategy("CPU:0")]
)
def test_strategies_with_one_replica_train_and_skip(make):
    mp = bind("mixed_bfloat16")
    x, y = data()
    with make().scope():
        with mp.scope():
            model = mp.prepare(small_model(norm=True))
        model.compile(optimizer=mp.optimizer(keras.optimizers.Adam(0.02)), loss="mse")
    model.fit(x, y, batch_size=8, verbose=0)
    before = values(model.weights)
    model.fit(np.full_like(x, np.inf), y, batch_size=8, verbose=0)
    assert equal(before, values(model.weights))
    assert (model.optimizer.state_dict()["skipped"], int(model.optimizer.iterations.numpy())) == (2, 2)


def test_a_reduce_dtype_that_has_no_effect_is_said():
    with pytest.warns(precision.PrecisionWarning, match="reduce_dtype bfloat16 has no effect here") as caught:
        precision.bind(precision.PrecisionPolicy(reduce_dtype="bfloat16"), backend="tensorflow").optimizer("sgd")
    assert caught[0].filename == __file__
