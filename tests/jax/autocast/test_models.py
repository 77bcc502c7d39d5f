"""Whole models under autocast: forward and gradients against float32, what is kept for the backward pass, what tracing costs."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import print_saved_residuals

import precision
from precision import LossScale, PrecisionPolicy
from tests.jax.autocast import nets
from tests.jax.autocast.common import BF16, FP16, equations, normal, products, traced

TOKENS, LABELS = nets.tokens()
IMAGES = normal(2, 8, 8, 3)


def transformer_loss(params, remat=False):
    return nets.cross_entropy(nets.transformer(params, TOKENS, remat), LABELS)


def resnet():
    variables = nets.ResNet().init(jax.random.key(0), IMAGES)

    def loss(params):
        out, _ = nets.ResNet().apply({**variables, "params": params}, IMAGES, mutable=["batch_stats"])
        return nets.cross_entropy(out, jnp.asarray([1, 2]))

    return loss, variables["params"]


MODELS = {
    "transformer": lambda: (transformer_loss, nets.transformer_params()),
    "transformer, layers scanned": lambda: (transformer_loss, nets.transformer_params(stacked=True)),
    "transformer, remat": lambda: (functools.partial(transformer_loss, remat=True), nets.transformer_params()),
    "transformer, scanned and remat": lambda: (
        functools.partial(transformer_loss, remat=True),
        nets.transformer_params(stacked=True),
    ),
    "resnet": resnet,
    "lstm": lambda: (
        lambda p: nets.cross_entropy(nets.lstm(p, normal(12, 4, 8)), jnp.arange(4) % 3),
        nets.lstm_params(),
    ),
    "unet": lambda: (lambda p: (nets.unet(p, IMAGES) ** 2).mean(), nets.unet_params()),
}


def distance(got, want):
    """How far two trees are apart, relative to the second."""
    square = lambda tree: sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree))  # noqa: E731
    return (square(jax.tree.map(lambda a, b: a - b, got, want)) / square(want)) ** 0.5


@functools.cache
def in_float32(name):
    loss, params = MODELS[name]()
    return loss, params, *jax.jit(jax.value_and_grad(loss))(params)


CASES = [
    *[(name, BF16, 0.03) for name in MODELS if name not in ("transformer", "transformer, remat")],
    *[(name, FP16, 0.004) for name in ("transformer, layers scanned", "resnet", "lstm")],
]


@pytest.mark.parametrize(("name", "mp", "bar"), CASES, ids=[f"{n} in {m.policy.compute_dtype}" for n, m, _ in CASES])
def test_loss_and_gradients_are_close_to_float32(name, mp, bar):
    loss, params, want, want_grads = in_float32(name)
    got, grads = jax.jit(jax.value_and_grad(mp.autocast(loss)))(params)
    assert abs(float(got - want)) <= bar / 10 * max(1.0, abs(float(want)))
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    assert 1e-7 < distance(grads, want_grads) < bar
    assert set(products(mp.autocast(loss), params)) == {mp.policy.compute_dtype}, "every product is low"


def test_not_compiled_it_is_the_same_up_to_roundings():
    loss, params, _, _ = in_float32("lstm")
    run = BF16.autocast(loss)
    assert float(run(params)) == pytest.approx(float(jax.jit(run)(params)), rel=2e-3)


def residual_bytes(loss, params, capsys):
    """Bytes kept for the backward pass, as JAX tells them, what the arguments hold anyway left out."""
    capsys.readouterr()
    print_saved_residuals(loss, params)
    total = 0
    for dtype, sizes, why in re.findall(r"^(\w+)\[([\d,]*)\] (.*)$", capsys.readouterr().out, re.M):
        if "from the argument" not in why:
            width = 1 if dtype == "bool" else int(re.sub(r"\D", "", dtype)) // 8
            total += width * int(np.prod([int(n) for n in sizes.split(",") if n]))
    return total


@pytest.mark.parametrize("stacked", [False, True])
def test_at_most_six_tenths_of_the_bytes_are_kept_for_the_backward_pass(stacked, capsys):
    params = nets.transformer_params(stacked)
    low, full = (residual_bytes(f, params, capsys) for f in (BF16.autocast(transformer_loss), transformer_loss))
    assert full > 100_000
    assert 0.2 < low / full <= 0.6


def test_no_second_copy_of_the_weights_where_layers_are_scanned(capsys):
    params = nets.transformer_params(stacked=True)
    print_saved_residuals(BF16.autocast(transformer_loss), params)
    told = capsys.readouterr().out
    kernel = f"[{nets.LAYERS},{nets.WIDTH},{nets.HIDDEN}]"
    assert f"f32{kernel} from the argument" in told
    assert f"bf16{kernel}" not in told
    (scan,) = [e for e in traced(BF16.autocast(transformer_loss), params) if e.primitive.name == "scan"]
    stacked = [v.aval for v in scan.invars if v.aval.shape == (nets.LAYERS, nets.WIDTH, nets.HIDDEN)]
    assert [a.dtype.name for a in stacked] == ["float32"], "cast inside of the loop, a layer at a time"


def test_tracing_costs_at_most_twice_as_much():
    params = nets.transformer_params()

    def cost(fun):
        jax.clear_caches()
        start = time.process_time()
        jax.jit(fun()).trace(params)
        return time.process_time() - start

    kinds = {
        "plain": lambda: transformer_loss,
        "ours": lambda: BF16.autocast(transformer_loss),
        "plain gradient": lambda: jax.grad(transformer_loss),
        "our gradient": lambda: jax.grad(BF16.autocast(transformer_loss)),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(6):  # in turns, so that a busy moment of the machine meets them all
        best = {name: min(best[name], cost(fun)) for name, fun in kinds.items()}
    assert best["ours"] <= 2.0 * best["plain"]
    assert best["our gradient"] <= 2.0 * best["plain gradient"]


def test_a_loss_curve_stays_with_that_of_float32():
    def train(policy):
        mp = precision.bind(policy, backend="jax")
        opt = mp.optimizer(optax.adam(1e-2))
        grad = mp.value_and_grad(lambda p: nets.cross_entropy(nets.lstm(p, normal(6, 4, 8)), jnp.arange(4) % 3))

        def step(carry, _):
            params, state = carry
            loss, grads = grad(params, loss_scale=state.loss_scale)
            updates, state = opt.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        params = nets.lstm_params()
        return np.asarray(jax.jit(lambda c: jax.lax.scan(step, c, None, length=30)[1])((params, opt.init(params))))

    want = train(PrecisionPolicy())
    assert want[-1] < 0.5 * want[0], "it learns"
    low = PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic", initial=1024.0))
    np.testing.assert_allclose(train(low), want, rtol=0.01, atol=0.003)


def test_the_resize_and_the_concatenation_stay_low():
    eqns = traced(BF16.autocast(lambda p: nets.unet(p, IMAGES)), nets.unet_params())
    joined = [e for e in eqns if e.primitive.name == "concatenate" and e.outvars[0].aval.shape[-1] == 16]
    assert [e.outvars[0].aval.dtype.name for e in joined] == ["bfloat16"]


def test_the_lstm_s_cell_state_is_float32_and_its_products_are_low():
    jaxpr = jax.make_jaxpr(BF16.autocast(nets.lstm))(nets.lstm_params(), normal(12, 4, 8)).jaxpr
    (scan,) = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    assert [v.aval.dtype.name for v in scan.outvars[:2]] == ["float32", "float32"]
