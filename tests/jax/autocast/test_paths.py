"""Rules by module path: scopes of Flax linen, Haiku and ``jax.named_scope``, and paths of parameters everywhere."""

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from precision import PolicyError, PrecisionWarning, Rule
from tests.jax.autocast.common import bind, normal, products

X = normal(4, 8)
HEAD = Rule(module="head", dtype="float32")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="body")(x))
        return nn.Dense(3, name="head")(nn.LayerNorm(name="norm")(x))


def linen():
    params = jax.jit(Linen().init)(jax.random.key(0), X)
    return Linen().apply, (params, X)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body, self.norm, self.head = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.LayerNorm(8, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.head(self.norm(nnx.relu(self.body(x))))


class Equinox(eqx.Module):
    body: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self):
        self.body, self.norm = eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.LayerNorm(8)
        self.head = eqx.nn.Linear(8, 3, key=jax.random.key(1))

    def __call__(self, x):
        return self.head(self.norm(jax.nn.relu(self.body(x))))


def haiku():
    def model(x):
        x = jax.nn.relu(hk.Linear(8, name="body")(x))
        return hk.Linear(3, name="head")(hk.LayerNorm(-1, True, True, name="norm")(x))

    net = hk.without_apply_rng(hk.transform(model))
    return net.apply, (net.init(jax.random.key(0), X), X)


def plain():
    params = {"body": {"w": normal(8, 8)}, "head": {"w": normal(8, 3)}}
    return lambda p, x: jax.nn.relu(x @ p["body"]["w"]) @ p["head"]["w"], (params, X)


MODELS = {
    "linen": linen,
    "nnx": lambda: (lambda m, x: m(x), (Nnx(), X)),
    "equinox": lambda: (lambda m, x: jax.vmap(m)(x), (Equinox(), X)),
    "haiku": haiku,
    "plain": plain,
}


@pytest.mark.parametrize("library", MODELS)
def test_the_same_rule_keeps_the_same_module(library):
    fun, args = MODELS[library]()
    assert products(bind().autocast(fun), *args) == ["bfloat16", "bfloat16"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products(bind(HEAD).autocast(fun), *args) == ["bfloat16", "float32"]
    if library in ("linen", "plain"):
        out, want = jax.jit(lambda *args: (bind(HEAD).autocast(fun)(*args), fun(*args)))(*args)
        np.testing.assert_allclose(out, want, atol=0.05)


@pytest.mark.parametrize("library", MODELS)
def test_a_rule_that_matches_nothing_is_reported(library):
    fun, args = MODELS[library]()
    with pytest.warns(PrecisionWarning, match="'haed' matched nothing in the parameters"):
        jax.make_jaxpr(bind(Rule(module="haed", dtype="float32")).autocast(fun))(*args)


def test_gradients_in_scanned_layers():
    params = {"layers": {"w": normal(3, 8, 8)}, "head": {"w": normal(8, 3)}}

    def model(p, x):
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"]["w"])
        return (x @ p["head"]["w"]).sum()

    mp = bind(Rule(module="layers", dtype="float32"))
    assert products(mp.autocast(model), params, X) == ["float32", "bfloat16"]


def test_named_scopes():
    def model(x, w):
        with jax.named_scope("Model"):
            with jax.named_scope("router"):
                h = x @ w
            return jnp.exp(h) @ w

    w = normal(8, 8)
    assert products(bind(Rule(module="router", dtype="float32")).autocast(model), X, w) == ["float32", "bfloat16"]
    assert products(bind(Rule(module="Model.router", dtype="float32")).autocast(model), X, w) == ["float32", "bfloat16"]
    assert set(
        products(
            bind(Rule(module="router", dtype="float32")).autocast(jax.jit(jax.grad(lambda w: model(X, w).sum()))), w
        )
    ) == {"float32", "bfloat16"}


def test_the_first_rule_that_matches_wins():
    fun, args = plain()
    first = Rule(module="head", dtype="bfloat16"), Rule(module="**", dtype="float32")
    assert products(bind(*first).autocast(fun), *args) == ["float32", "bfloat16"]
    family = Rule(family="matmul", dtype="float32"), Rule(module="head", dtype="bfloat16")
    assert products(bind(*family).autocast(fun), *args) == ["float32", "float32"]


def test_rules_that_disagree_on_one_op_are_an_error():
    params = {"encoder": {"w": normal(8, 8)}, "decoder": {"w": normal(8, 8)}}
    mp = bind(
        Rule(module="encoder", dtype="float32"), Rule(module="decoder", dtype="float16"), loss_scale={"mode": "dynamic"}
    )
    with pytest.raises(
        PolicyError, match="rules disagree on the dtype of one op.*encoder.w.*float32.*decoder.w.*float16"
    ):
        mp.autocast(lambda p: p["encoder"]["w"] @ p["decoder"]["w"])(params)


class TestModulesWithState:
    def test_running_statistics_of_nnx_modules_reach_the_module(self):
        def make():
            return nnx.BatchNorm(8, rngs=nnx.Rngs(0), momentum=0.5)

        plain, cast = make(), make()
        want = plain(X)
        got = bind().autocast(lambda m, x: m(x))(cast, X)
        np.testing.assert_allclose(got, want, atol=0.02)
        np.testing.assert_allclose(cast.mean[...], plain.mean[...], rtol=1e-6)
        assert cast.mean[...].dtype == jnp.float32
        assert float(jnp.abs(cast.mean[...]).sum()) > 0
        bind().autocast(cast)(X)
        plain(X)
        np.testing.assert_allclose(cast.mean[...], plain.mean[...], rtol=1e-6)

    def test_batch_stats_of_linen_stay_float32_and_exact(self):
        """0.99 is 0.98828125 in bfloat16: a thousand steps with that are another average."""
        norm = nn.BatchNorm(use_running_average=False, momentum=0.99)
        variables = norm.init(jax.random.key(0), X)
        apply = lambda v, x: norm.apply(v, x, mutable=["batch_stats"])  # noqa: E731
        _, want = apply(variables, X)
        _, got = jax.jit(bind().autocast(apply))(variables, X)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
