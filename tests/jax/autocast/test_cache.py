"""What is traced when: once for the run, again for other shapes, and whenever a closure may have changed."""

import jax
import jax.numpy as jnp
import numpy as np

from precision_jax.opcast.closures import fingerprint
from tests.jax.autocast.common import BF16, normal

X, W = normal(4, 8), normal(8, 8, seed=1)


def counting():
    traces = []

    def run(x, w):
        traces.append(x.shape)
        return x @ w

    return run, traces


def test_one_trace_for_the_run():
    run, traces = counting()
    step = jax.jit(jax.grad(lambda w, x: BF16.autocast(run)(x, w).sum()))
    for _ in range(3):
        step(W, X)
    assert len(traces) == 1


def test_one_trace_for_equal_layers_and_for_eager_calls(capsys):
    def layer(x, w):
        print("traced")
        return jnp.tanh(x @ w)

    cached = BF16.autocast(layer)
    first = cached(X, W)
    np.testing.assert_array_equal(cached(X, W), first)
    jax.jit(lambda x: cached(cached(cached(x, W), W), W))(X)
    cached(X[:2], W)
    assert capsys.readouterr().out.count("traced") == 2, "once for each shape"


def test_what_it_closes_over_may_change():
    scale = jnp.asarray(2.0)

    def run(x):
        return x * scale

    cast = BF16.autocast(run)
    assert float(cast(jnp.asarray(1.0))) == 2.0
    scale = jnp.asarray(3.0)
    assert float(cast(jnp.asarray(1.0))) == 3.0


def test_objects_may_change_inside():
    class Settings:
        factor = 2.0

    settings, table = Settings(), {"bias": 1.0}
    cast = BF16.autocast(lambda x: x * settings.factor + table["bias"])
    assert float(cast(jnp.asarray(1.0))) == 3.0
    settings.factor, table["bias"] = 4.0, 2.0
    assert float(cast(jnp.asarray(1.0))) == 6.0


def test_values_of_a_trace_around_it():
    def outer(w):
        return BF16.autocast(lambda x: x @ w)(X).sum()

    np.testing.assert_allclose(jax.grad(outer)(W), jax.grad(lambda w: (X @ w).sum())(W), rtol=0.02, atol=0.02)
    assert jax.jit(jax.vmap(outer))(W[None]).shape == (1,)


def test_settings_and_python_numbers():
    cast = BF16.autocast(lambda x, *, power, mode: x**power if mode == "power" else x)
    assert float(cast(jnp.asarray(2.0), power=3, mode="power")) == 8.0
    assert float(cast(jnp.asarray(2.0), power=2, mode="power")) == 4.0
    assert float(cast(jnp.asarray(2.0), power=2, mode="none")) == 2.0


def test_results_that_are_no_arrays():
    out = BF16.autocast(lambda x: {"y": x, "name": "net", "none": None, "n": 3})(X)
    assert (out["name"], out["none"], out["n"]) == ("net", None, 3)


def test_fingerprints():
    factor = 2.0
    assert fingerprint(lambda x: x * factor) is not None
    assert fingerprint(lambda x: jnp.tanh(jax.nn.relu(x))) is not None
    listed = [1]
    assert fingerprint(lambda x: x * listed[0]) is None


def test_configuration_is_part_of_the_key():
    cast = BF16.autocast(lambda x: x * 2)
    assert cast(np.ones(2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert cast(np.ones(2)).dtype == jnp.float64
    assert cast(np.ones(2)).dtype == jnp.float32
