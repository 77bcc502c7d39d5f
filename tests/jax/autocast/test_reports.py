"""Public reports of mixed precision that goes wrong in JAX, each as a small model of our own, under autocast.

The first line of a test names the report. None of its code is used.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import precision
from tests.jax.autocast.common import BF16, FP16, bind, dtypes, normal, products

X = normal(4, 6, 8)


def test_attention_with_a_mask_in_float16():
    """google/flax#982: masked attention in float16 gives NaN."""
    net = nn.MultiHeadDotProductAttention(num_heads=2)
    mask = jnp.zeros((4, 1, 6, 6), bool)  # nobody may look at anybody

    @jax.jit
    def both(x):
        variables = net.init(jax.random.key(0), x, mask=mask)
        apply = lambda v, x: net.apply(v, x, mask=mask)  # noqa: E731
        return FP16.autocast(apply)(variables, x), apply(variables, x)

    out, want = both(X)
    np.testing.assert_allclose(out, want, atol=0.01)


def test_scanned_layers_with_float32_parameters():
    """marin-community/levanter#569: low activations and float32 parameters in scanned layers are a carry of two dtypes."""

    def model(params, x):
        return jax.lax.scan(lambda h, p: (jnp.tanh(h @ p["w"] + p["b"]), None), x @ params["in"], params["layers"])[0]

    params = {"in": normal(8, 8), "layers": {"w": normal(3, 8, 8), "b": normal(3, 8)}}
    assert set(products(BF16.autocast(model), params, X)) == {"bfloat16"}
    np.testing.assert_allclose(jax.jit(BF16.autocast(model))(params, X), model(params, X), atol=0.1)


def test_a_backward_rule_wider_than_the_forward_inside_of_a_scan():
    """jax-ml/jax#27144: scan over a custom_vjp whose backward pass computes in another precision than its forward."""

    @jax.custom_vjp
    def f(h, w):
        return h @ w

    f.defvjp(lambda h, w: (f(h, w), (h, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

    def loss(w):
        return jax.lax.scan(lambda h, _: (f(h, w), None), X[0], None, length=3)[0].sum()

    w = normal(8, 8, scale=0.3)
    got, want = jax.jit(lambda w: (jax.grad(BF16.autocast(loss))(w), jax.grad(loss)(w)))(w)
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * float(jnp.abs(want).max()))


def test_float32_gradients_of_low_products():
    """jax-ml/jax#30337: a low product gives low weight gradients; here they are float32 and not rounded."""
    w = jnp.ones((1, 1))
    x = jnp.concatenate([jnp.full((1, 1), 256.0), jnp.ones((1, 1))])
    native = jax.grad(lambda w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum())(w)
    assert float(native[0, 0]) == 256.0, "257 is no bfloat16 number"
    assert float(jax.grad(BF16.autocast(lambda w: (x @ w).sum()))(w)[0, 0]) == 257.0


def test_the_softmax_inside_of_equinox_attention():
    """patrick-kidger/equinox#553: how to have the softmax of MultiheadAttention in float32, with the products low?"""
    attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    run = BF16.autocast(lambda m, x: m(x, x, x))
    assert set(products(lambda x: run(attention, x), X[0])) == {"bfloat16"}
    assert set(dtypes(lambda x: run(attention, x), X[0], of="exp")) == {"float32->float32"}
    out, want = jax.jit(lambda x: (run(attention, x), attention(x, x, x)))(X[0])
    np.testing.assert_allclose(out, want, atol=0.03)


def test_norms_of_equinox_need_no_second_implementation():
    """mixed_precision_for_JAX#3: Equinox computes its norms in float32 by itself; a transform must not undo or double that."""
    norm = eqx.nn.LayerNorm(8)
    big = jnp.full((8,), 300.0).at[0].set(-300.0)
    run = FP16.autocast(lambda m, w, x: m(x @ w))
    np.testing.assert_allclose(run(norm, jnp.eye(8), big), norm(big), rtol=1e-3)


def test_batch_norm_of_haiku_in_bfloat16():
    """google-deepmind/dm-haiku#396: BatchNorm with low activations becomes NaN."""

    def model(x):
        x = hk.Linear(8)(x)
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    net = hk.without_apply_rng(hk.transform_with_state(model))
    params, state = net.init(jax.random.key(0), X)
    steady = 3.0 + X
    out, new = jax.jit(BF16.autocast(net.apply))(params, state, steady)
    assert np.isfinite(np.asarray(out)).all()
    _, want_state = net.apply(params, state, steady)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want_state), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05 * float(jnp.abs(b).max() + 1))


def test_parameters_stay_float32_and_products_do_not():
    """google/flax#2384: which of a half-precision Flax model is low? With a layer's ``dtype=`` and without."""

    class Net(nn.Module):
        dtype: object = None

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, dtype=self.dtype)(nn.relu(nn.Dense(8, dtype=self.dtype)(x)))

    for net in (Net(), Net(dtype=jnp.bfloat16)):
        variables = jax.eval_shape(net.init, jax.random.key(0), X)
        assert set(products(BF16.autocast(net.apply), variables, X)) == {"bfloat16"}
        grads = jax.eval_shape(jax.grad(lambda v, net=net: BF16.autocast(net.apply)(v, X).sum()), variables)
        assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


def test_low_gradients_accumulate_in_float32():
    """google-deepmind/optax#377: low gradients meet float32 accumulators; here gradients are float32 to begin with."""
    mp = bind()
    grads = mp.value_and_grad(lambda p: (X @ p["w"]).mean())({"w": normal(8, 2)})[1]
    total = jax.lax.scan(lambda acc, _: (jax.tree.map(jnp.add, acc, grads), None), grads, None, length=2)[0]
    assert total["w"].dtype == jnp.float32


def test_dot_product_attention_of_jax_in_float16_on_cpus():
    """jax-ml/jax#24047 and others: attention's inner dtypes; on CPUs float16 is refused natively."""
    q = normal(2, 6, 2, 8)
    run = FP16.autocast(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True))
    out, want = jax.jit(lambda q: (run(q), jax.nn.dot_product_attention(q, q, q, is_causal=True)))(q)
    np.testing.assert_allclose(out, want, atol=5e-3)
    assert set(dtypes(run, q, of="exp")) == {"float32->float32"}


def test_a_policy_under_jit_is_one_trace():
    """google-deepmind/jmp#28 asks where the speed-up went: something cast, or did not, on the way. Nothing is traced twice."""
    mp = precision.bind("mixed_bfloat16", backend="jax")
    traces = []

    @jax.jit
    def step(w, x):
        traces.append(x.dtype)
        return mp.autocast(lambda w, x: x @ w)(w, x)

    for _ in range(3):
        step(normal(8, 8), X)
    assert len(traces) == 1
