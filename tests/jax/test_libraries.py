"""Whole training steps with Flax linen, Flax NNX, Equinox and Haiku: float16, an overflow, one trace, nothing poisoned."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import precision
from precision import LossScale, PrecisionPolicy

MP = precision.bind(
    PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic", initial=256.0)), backend="jax"
)
X = np.random.default_rng(0).standard_normal((6, 16, 4)).astype(np.float32)
BAD = 2
X_BAD = X.copy()
X_BAD[BAD, 0, 0] = np.inf
Y = X.sum(-1, keepdims=True)


def mse(prediction, y):
    return jnp.mean((MP.cast_to_output(prediction) - y) ** 2)


def linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dtype=MP.compute_dtype)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            return nn.Dense(1, dtype=MP.compute_dtype)(x)

    net = Net()
    variables = net.init(jax.random.key(0), X[0])
    opt = MP.optimizer(optax.adam(1e-2))

    def loss_fn(params, stats, x, y):
        out, new = net.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return mse(out, y), new["batch_stats"]

    grad = MP.value_and_grad(loss_fn, has_aux=True, cast_argnums=())

    def step(state, x, y):
        params, stats, opt_state = state
        (loss, new_stats), grads = grad(params, stats, x, y, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), MP.select(opt_state.finite, new_stats, stats), opt_state), loss

    state = variables["params"], variables["batch_stats"], opt.init(variables["params"])
    return state, step, lambda state: (state[:2], state[2])


def haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x)))
    params = net.init(jax.random.key(0), X[0])
    opt = MP.optimizer(optax.adam(1e-2))
    grad = MP.value_and_grad(lambda params, x, y: mse(MP.autocast(net.apply)(params, x), y))

    def step(state, x, y):
        params, opt_state = state
        loss, grads = grad(params, x, y, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, opt.init(params)), step, lambda state: state


def equinox():
    net = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    opt = MP.optimizer(optax.adam(1e-2))
    arrays, static = eqx.partition(net, eqx.is_inexact_array)
    grad = MP.value_and_grad(lambda net, x, y: mse(jax.vmap(net)(x), y), cast_argnums=(0, 1))

    def step(state, x, y):
        arrays, opt_state = state
        loss, grads = grad(eqx.combine(arrays, static), x, y, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, arrays)
        return (eqx.apply_updates(arrays, updates), opt_state), loss

    return (arrays, opt.init(arrays)), step, lambda state: state


@pytest.mark.parametrize("library", [linen, haiku, equinox])
def test_trains_in_one_trace_and_an_overflow_changes_nothing(library):
    state, step, parts = library()
    traces = []
    compiled = jax.jit(lambda state, x, y: traces.append(1) or step(state, x, y))
    losses = []
    for i in range(12):
        overflow = i == BAD
        old = parts(state)
        state, loss = compiled(state, X_BAD[BAD] if overflow else X[i % 6], Y[i % 6])
        new = parts(state)
        same = jax.tree.map(
            lambda a, b: np.array_equal(a, b), (old[0], old[1].inner_state), (new[0], new[1].inner_state)
        )
        assert bool(new[1].finite) is not overflow
        assert jax.tree.all(same) is overflow
        if not overflow:
            losses.append(float(loss))
    assert len(traces) == 1
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(new[0]))
    assert float(new[1].loss_scale.scale) == 128.0


def test_nnx_optimizer_holds_the_scale_and_batch_statistics_survive():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 8, dtype=MP.compute_dtype, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(8, 1, dtype=MP.compute_dtype, rngs=rngs)

        def __call__(self, x):
            return self.head(self.drop(self.norm(self.fc(x))))

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, MP.optimizer(optax.adam(1e-2)), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(net, optimizer, x, y):
        traces.append(1)
        graphdef, params, rest = nnx.split(net, nnx.Param, ...)

        def loss_fn(params):
            copy = nnx.merge(graphdef, params, rest, copy=True)
            return mse(copy(x), y), nnx.state(copy, nnx.Not(nnx.Param))

        grad = MP.value_and_grad(loss_fn, has_aux=True, cast_argnums=())
        (loss, new_rest), grads = grad(params, loss_scale=optimizer.opt_state.loss_scale)
        optimizer.update(net, grads)
        nnx.update(net, MP.select(optimizer.opt_state.finite, new_rest, rest))
        return loss

    for i in range(6):
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, (nnx.Param, nnx.BatchStat))))
        step(net, optimizer, X_BAD[BAD] if i == BAD else X[i], Y[i])
        after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, (nnx.Param, nnx.BatchStat))))
        unchanged = jax.tree.map(np.array_equal, before, after)
        assert jax.tree.all(unchanged) is (i == BAD)
        assert jax.tree.leaves(unchanged["norm"]["mean"]) == [i == BAD]
    assert len(traces) == 1
    saved = MP.loss_scaler.state_dict(optimizer.opt_state.loss_scale)
    assert (saved["scale"], saved["skipped"], saved["good_steps"]) == (128.0, 1, 3)


def test_two_optimizers_of_one_loss_share_a_flag():
    first, second = MP.optimizer(optax.sgd(0.1)), MP.optimizer(optax.adam(0.1))
    a, b = jnp.ones(2), jnp.ones(2)
    states = first.init(a), second.init(b)
    for slope in (1.0, np.inf, 1.0):
        grad = MP.value_and_grad(lambda a, b: (a.sum() + b * slope).sum().astype(jnp.float32), argnums=(0, 1))  # noqa: B023
        _, grads = grad(a, b, loss_scale=states[0].loss_scale)
        finite = MP.all_finite(grads)
        assert bool(MP.all_finite(grads[0])), "only the second's gradients overflow"
        (step_a, new_a), (step_b, new_b) = (
            opt.update(g, state, w, finite=finite)
            for opt, g, state, w in zip((first, second), grads, states, (a, b), strict=True)
        )
        states = new_a, new_b
        assert bool((step_a != 0).all()) is bool((step_b != 0).all()) is bool(np.isfinite(slope))
        assert float(new_a.loss_scale.scale) == float(new_b.loss_scale.scale)
