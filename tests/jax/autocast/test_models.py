"""Whole models under autocast: layers scanned and computed again, what is kept for the backward pass.

The networks are the parity suite's, which compares them across frameworks.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import precision
from precision import LossScale, PrecisionPolicy
from precision.parity.networks import is_trained, network_spec
from precision_jax.autocast import untouched
from precision_jax.parity_networks import block, kept, layer, loss_of, lstm, transformer
from tests.jax.autocast.common import BF16, FP16, equations, normal, products, traced

SPEC = network_spec("transformer", PrecisionPolicy())
WEIGHTS = {name: jnp.asarray(value) for name, value in SPEC.weights.items()}
DATA = jnp.asarray(SPEC.inputs), jnp.asarray(SPEC.labels)
VARIANTS = {
    "plain": {},
    "layers scanned": {"scan": True},
    "remat": {"remat": True},
    "scanned and remat": {"scan": True, "remat": True},
}
CASES = [
    ("plain", BF16, 0.02),
    ("layers scanned", BF16, 0.02),
    ("scanned and remat", BF16, 0.02),
    ("plain", FP16, 0.003),
    ("remat", FP16, 0.003),
]
LOSSES = {name: loss_of(functools.partial(transformer, **settings)) for name, settings in VARIANTS.items()}


def distance(got, want):
    """How far two trees are apart, relative to the second."""
    square = lambda tree: sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree))  # noqa: E731
    return (square(jax.tree.map(lambda a, b: a - b, got, want)) / square(want)) ** 0.5


@pytest.fixture(scope="module")
def gradients():
    """Of every variant in both low dtypes, and of the plain one in float32: one compiled program."""

    def every(weights):
        def grad(run):
            return jax.grad(lambda w: run(w, *DATA)[0])(weights)

        low = {f"{n} in {mp.policy.compute_dtype}": grad(untouched(mp, LOSSES[n])) for n, mp, _ in CASES}
        return {**low, "float32": grad(LOSSES["plain"])}

    return jax.jit(every)(WEIGHTS)


@pytest.mark.parametrize(("variant", "mp", "bar"), CASES)
def test_gradients_are_close_to_float32_s_and_the_same_for_every_variant(gradients, variant, mp, bar):
    dtype = mp.policy.compute_dtype
    grads = gradients[f"{variant} in {dtype}"]
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    assert 1e-7 < distance(grads, gradients["float32"]) < bar
    assert distance(grads, gradients[f"plain in {dtype}"]) < bar / 2
    assert set(products(untouched(mp, LOSSES[variant]), WEIGHTS, *DATA)) == {dtype}, "every product is low"


STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), layer(WEIGHTS, "block0"))
STREAM = normal(2, 16, 32)


def scanned(weights, h):
    """Three layers of the transformer, whose weights came stacked."""
    return jax.lax.scan(lambda h, w: (block(w, h), None), h, weights)[0].sum(), None


@pytest.mark.parametrize(
    ("loss", "args"), [(LOSSES["plain"], (WEIGHTS, *DATA)), (scanned, (STACKED, STREAM))], ids=["plain", "scanned"]
)
def test_at_most_six_tenths_of_the_bytes_are_kept_for_the_backward_pass(loss, args):
    low, full = (kept(run, *args)[1] for run in (untouched(BF16, loss), loss))
    assert full > 100_000
    assert 0.2 < low / full <= 0.6


def test_no_second_copy_of_the_weights_where_layers_are_scanned():
    """The stacked weights are scanned over in float32, and cast inside of the loop, a layer at a time."""
    eqns = traced(jax.grad(untouched(BF16, scanned), has_aux=True), STACKED, STREAM)
    kernels = [v.aval for e in eqns for v in (*e.invars, *e.outvars) if getattr(v.aval, "shape", ()) == (3, 32, 128)]
    assert {aval.dtype.name for aval in kernels} == {"float32"}, "neither forward nor backward"


class ResNet(nn.Module):
    """A residual block as Flax' users write it."""

    @nn.compact
    def __call__(self, x):
        norm = lambda y: nn.BatchNorm(use_running_average=False, momentum=0.9)(y)  # noqa: E731
        y = nn.relu(norm(nn.Conv(8, (3, 3), use_bias=False)(x)))
        y = norm(nn.Conv(8, (3, 3))(y))
        return nn.Dense(10)(nn.relu(y + nn.Conv(8, (1, 1))(x)).mean((1, 2)))


def test_layers_of_flax():
    images = normal(2, 8, 8, 3)
    variables = jax.eval_shape(ResNet().init, jax.random.key(0), images)

    def apply(v, x):
        return ResNet().apply(v, x, mutable=["batch_stats"])

    assert set(products(untouched(BF16, apply), variables, images)) == {"bfloat16"}
    out, state = jax.eval_shape(untouched(BF16, apply), variables, images)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32"}
    sums = [e for e in traced(untouched(BF16, apply), variables, images) if e.primitive.name == "reduce_sum"]
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}


def test_code_is_traced_once_and_with_casts_of_its_author_twice():
    """What tracing costs in time is measured by benchmarks/autocast_jax.py."""
    calls = []

    def plain(params, x):
        calls.append("plain")
        return transformer(params, x)

    def casting(params, x):
        calls.append("casting")
        return transformer(params, x).astype(jnp.float32)

    for network, times in ((plain, 1), (casting, 2)):
        calls.clear()
        step = jax.jit(jax.grad(untouched(BF16, loss_of(network)), has_aux=True))
        for _ in range(2):
            step.trace(WEIGHTS, *DATA)
        assert len(calls) == times


def test_a_loss_curve_stays_with_that_of_float32():
    spec = network_spec("lstm", PrecisionPolicy())
    weights = {name: jnp.asarray(value) for name, value in spec.weights.items() if is_trained(name)}
    loss, data = loss_of(lstm), (jnp.asarray(spec.inputs), jnp.asarray(spec.labels))

    def train(policy):
        mp = precision.bind(policy, backend="jax")
        opt = mp.optimizer(optax.adam(1e-2))
        grad = mp.value_and_grad(loss, has_aux=True)

        def step(carry, _):
            params, state = carry
            (value, _), grads = grad(params, *data, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (weights, opt.init(weights)), None, length=30)[1]

    low = PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic", initial=1024.0))
    got, want = jax.jit(lambda: (train(low), train(PrecisionPolicy())))()
    assert want[-1] < 0.5 * want[0], "it learns"
    np.testing.assert_allclose(got, want, rtol=0.01, atol=0.005)


def test_the_lstm_s_cell_state_is_float32_and_its_products_are_low():
    spec = network_spec("lstm", PrecisionPolicy())
    jaxpr = jax.make_jaxpr(untouched(BF16, lstm))(spec.weights, spec.inputs).jaxpr
    (scan,) = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    assert [v.aval.dtype.name for v in scan.outvars[:2]] == ["float32", "float32"]
    assert set(products(untouched(BF16, lstm), spec.weights, spec.inputs)) == {"bfloat16"}


def test_a_resize_is_a_reduction_and_a_nearest_one_moves_values():
    for method, want in (("bilinear", "float32"), ("cubic", "float32"), ("nearest", "bfloat16")):
        run = untouched(BF16, lambda x, w, method=method: jax.image.resize(x @ w, (8, 16), method))
        assert jax.eval_shape(run, normal(4, 8), normal(8, 8)).dtype == want, method
