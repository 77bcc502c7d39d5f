"""``mp.value_and_grad``: what is cast, what is scaled, what comes back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import precision
from precision import (
    LossScale,
    LossScaleError,
    MixedFrameworksError,
    PolicyError,
    PrecisionPolicy,
    PrecisionWarning,
    Rule,
)

FP16 = PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic", initial=2.0**12))
BF16 = PrecisionPolicy.from_name("mixed_bfloat16")


def bind(policy=FP16):
    return precision.bind(policy, backend="jax")


def test_loss_and_gradients_are_the_true_ones_in_float32():
    mp = bind()
    state = mp.loss_scaler.init()
    params = {"w": jnp.asarray([1.0, -2.0, 0.5])}
    loss, grads = mp.value_and_grad(lambda p: (p["w"] ** 2).sum())(params, loss_scale=state)
    assert (loss.dtype, float(loss)) == (jnp.float32, 5.25)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], [2.0, -4.0, 1.0])


def test_the_function_computes_in_the_compute_dtype():
    seen = {}

    def loss_fn(params, x):
        seen.update(params=params["w"].dtype, x=x.dtype)
        return (x @ params["w"]).sum()

    mp = bind(BF16)
    mp.value_and_grad(loss_fn, cast_argnums=(0, 1))({"w": jnp.ones((2, 2))}, jnp.ones((2, 2)))
    assert seen == {"params": jnp.bfloat16, "x": jnp.bfloat16}
    mp.value_and_grad(loss_fn, cast_argnums=())({"w": jnp.ones((2, 2))}, jnp.ones((2, 2)))
    assert seen == {"params": jnp.float32, "x": jnp.float32}
    third = 1 / 3
    loss, _ = mp.value_and_grad(loss_fn)({"w": jnp.full((1, 1), third)}, jnp.ones((1, 1)))
    assert seen == {"params": jnp.float32, "x": jnp.float32}, "traced as it is written"
    assert float(loss) == float(jnp.bfloat16(third)) != np.float32(third), "and computed low where products are"


def test_rules_hold_for_parameters():
    mp = bind(BF16.with_(rules=(Rule(module="norm", dtype="float32"),)))
    seen = {}

    def loss_fn(params):
        seen.update({k: v["w"].dtype for k, v in params.items()})
        return sum(v["w"].astype(jnp.float32).sum() for v in params.values())

    mp.value_and_grad(loss_fn, cast_argnums=0)({"norm": {"w": jnp.ones(2)}, "dense": {"w": jnp.ones(2)}})
    assert seen == {"norm": jnp.float32, "dense": jnp.bfloat16}


def test_a_gradient_that_float16_flushes_survives_the_scale():
    """1e-8 is below float16's smallest subnormal, 6e-8. Natively it is lost; scaled it arrives."""

    def loss_fn(w):
        return (w * w.dtype.type(1.0)).astype(jnp.float16).astype(jnp.float32) * 1e-8

    w = jnp.asarray(1.0)
    native = jax.grad(lambda w: loss_fn(w.astype(jnp.float16)))(w)
    assert float(native) == 0.0
    mp = bind()
    _, grad = mp.value_and_grad(loss_fn)(w, loss_scale=mp.loss_scaler.init())
    assert float(grad) == pytest.approx(1e-8, rel=1e-3)


def test_a_float16_loss_reports_its_true_value():
    """The scale, 2**12, times the loss, 20, is beyond float16."""
    mp = bind()
    loss, grad = mp.value_and_grad(lambda w: (w * 10 + 10).astype(jnp.float16))(
        jnp.asarray(1.0), loss_scale=mp.loss_scaler.init()
    )
    assert float(loss) == 20.0
    assert float(grad) == 10.0


def test_an_overflow_stays_visible():
    mp = bind()
    state = mp.loss_scaler.init()
    grad = mp.value_and_grad(lambda w: (w * 60.0).astype(jnp.float32).sum(), cast_argnums=0)
    _, grads = grad(jnp.ones(2), loss_scale=state)
    assert not np.isfinite(np.asarray(grads)).any(), "60 * 2**12 is beyond float16 on its way back"
    smaller = mp.loss_scaler.update(mp.loss_scaler.update(state, False), False)
    _, grads = grad(jnp.ones(2), loss_scale=smaller)
    np.testing.assert_array_equal(grads, [60.0, 60.0])


def test_argnums_and_aux_and_keywords():
    mp = bind()
    state = mp.loss_scaler.init()

    def loss_fn(a, b, c, *, power):
        return (a * b**power).sum() + c.sum(), {"shape": a.shape, "a": a}

    args = jnp.asarray([2.0]), jnp.asarray([3.0]), jnp.asarray([1.0])
    run = mp.value_and_grad(loss_fn, argnums=(0, -2), has_aux=True, cast_argnums=(0, -2))
    (loss, aux), grads = run(*args, loss_scale=state, power=2)
    assert float(loss) == 19.0
    assert [float(g[0]) for g in grads] == [9.0, 12.0]
    assert aux["shape"] == (1,)
    assert aux["a"].dtype == jnp.float16, "aux comes back as it is"
    _, grads = mp.value_and_grad(loss_fn, argnums=(1,), has_aux=True)(*args, loss_scale=state, power=2)
    assert isinstance(grads, tuple)
    with pytest.raises(IndexError, match="argnums 5 is out of range: .* 3 positional"):
        mp.value_and_grad(loss_fn, argnums=5, has_aux=True)(*args, loss_scale=state, power=2)


def test_leaves_without_gradient_get_none_as_in_equinox():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    x = jnp.ones((3, 2))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)

    mp = bind(PrecisionPolicy())
    loss, grads = mp.value_and_grad(loss_fn)(model, x)
    want_loss, want = eqx.filter_value_and_grad(loss_fn)(model, x)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)  # one is compiled and the other is not
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-6), grads, want))
    assert grads.activation is None
    _, grads = mp.value_and_grad(lambda p: p["w"] * p["n"])(
        {"w": jnp.asarray(2.0), "n": jnp.asarray(3), "k": jax.random.key(0)}
    )
    assert (float(grads["w"]), grads["n"], grads["k"]) == (3.0, None, None)


def test_python_floats_are_parameters_but_settings_inside_equinox_modules():
    """The rate of a Dropout is a Python float: ``eqx.filter_grad`` gives None for it, and so do the trees of optimizers."""

    class Net(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.linear(self.dropout(x, key=key))

    net = Net(eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5))

    def loss_fn(net, x):
        keys = jax.random.split(jax.random.key(1), len(x))
        return jnp.mean(jax.vmap(net)(x, keys).astype(jnp.float32) ** 2)

    mp = bind(PrecisionPolicy(loss_scale=LossScale(mode="static", initial=8.0)))
    x, trainable = jnp.ones((3, 3)), eqx.filter(net, eqx.is_inexact_array)
    opt = mp.optimizer(optax.sgd(0.1))
    opt_state = opt.init(trainable)
    _, grads = mp.value_and_grad(loss_fn)(net, x, loss_scale=opt_state.loss_scale)
    want = eqx.filter_grad(loss_fn)(net, x)
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    np.testing.assert_allclose(grads.linear.weight, want.linear.weight, rtol=1e-6)
    updates, _ = opt.update(grads, opt_state, trainable)
    assert eqx.apply_updates(net, updates).dropout.p == 0.5
    _, grads = mp.value_and_grad(lambda p: p["w"] * p["net"].linear.weight.sum())(
        {"w": 2.0, "net": net}, loss_scale=opt_state.loss_scale
    )
    assert float(grads["w"]) == pytest.approx(float(net.linear.weight.sum()), rel=1e-6)
    assert grads["net"].dropout.p is None


def test_a_loss_without_a_gradient_is_refused_as_jax_refuses_it():
    mp = bind()
    with pytest.raises(TypeError, match="got int32"):
        mp.value_and_grad(lambda w: (w > 0).sum())(jnp.ones(2), loss_scale=mp.loss_scaler.init())


def test_aux_that_is_not_there_is_an_error():
    """An array of two would otherwise unpack into a loss and an aux."""
    mp = bind(PrecisionPolicy())
    with pytest.raises(TypeError, match=r"has_aux=True the function gives \(loss, aux\)"):
        mp.value_and_grad(lambda w: w * 2, has_aux=True)(jnp.ones(2))


def test_argnums_from_numpy_and_named_twice():
    mp = bind(PrecisionPolicy())
    _, grad = mp.value_and_grad(lambda a, b: a * b, argnums=np.int64(1))(jnp.float32(2), jnp.float32(3))
    assert float(grad) == 2.0
    with pytest.raises(PolicyError, match=r"argnums \(0, -2\) name an argument twice"):
        mp.value_and_grad(lambda a, b: a * b, argnums=(0, -2))(jnp.float32(2), jnp.float32(3))


def test_float64_parameters_keep_float64_gradients():
    with jax.enable_x64(True):
        mp = bind()
        w = jnp.asarray(1.0 + 2.0**-40, jnp.float64)
        _, grad = mp.value_and_grad(lambda w: w**2)(w, loss_scale=mp.loss_scaler.init())
        assert (grad.dtype, float(grad)) == (jnp.float64, 2.0 + 2.0**-39)


def test_the_loss_leaves_in_the_output_dtype():
    mp = bind(PrecisionPolicy.from_name("float16").with_(loss_scale=LossScale(mode="static", initial=8.0)))
    loss, grad = mp.value_and_grad(lambda w: w.sum())(jnp.ones(2, jnp.float16), loss_scale=mp.loss_scaler.init())
    assert (loss.dtype, grad.dtype) == (jnp.float16, jnp.float32)


def test_without_a_loss_scale_it_is_jax_value_and_grad():
    def loss_fn(w):
        return jnp.sin(w).sum()

    w = jnp.linspace(0, 1, 5)
    loss, grads = bind(PrecisionPolicy()).value_and_grad(loss_fn)(w)
    want_loss, want = jax.value_and_grad(loss_fn)(w)
    assert float(loss) == float(want_loss)
    np.testing.assert_array_equal(grads, want)
    jaxpr = str(jax.make_jaxpr(bind(PrecisionPolicy()).value_and_grad(loss_fn))(w))
    assert "is_finite" not in jaxpr


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_replicas_average_in_the_reduce_dtype(reduce_dtype):
    mp = bind(FP16.with_(reduce_dtype=reduce_dtype))
    state = mp.loss_scaler.init()
    run = mp.value_and_grad(lambda w, x: (w * x).astype(jnp.float32), cast_argnums=(), axis_name="batch")
    x = jnp.asarray([1.0, 1.0 + 2.0**-8, 3.0])

    def replica(x):
        return run(jnp.asarray(1.0), x, loss_scale=state)

    loss, grads = jax.vmap(replica, axis_name="batch")(x)
    exact = float(np.mean(np.asarray(x, np.float64)))
    assert grads.dtype == jnp.float32
    assert loss.tolist() == pytest.approx([exact] * 3, rel=1e-6)
    error = abs(float(grads[0]) - exact)
    assert (error > 1e-4) == (reduce_dtype == "bfloat16"), "bfloat16 has eight bits; float32 loses none of these"
    poisoned = jax.vmap(replica, axis_name="batch")(x.at[1].set(jnp.inf))[1]
    assert not np.isfinite(np.asarray(poisoned)).any(), "an overflow on one replica is seen on all"


def test_composes_with_remat_vmap_and_higher_order():
    mp = bind(BF16)
    w, x = jnp.ones((3, 3)) / 3, jnp.ones((4, 3))

    def loss_fn(w, x):
        return jnp.tanh(x.astype(w.dtype) @ w).astype(jnp.float32).sum()

    loss, grads = jax.jit(mp.value_and_grad(loss_fn, cast_argnums=0))(w, x)
    again, remat = jax.jit(mp.value_and_grad(jax.checkpoint(loss_fn), cast_argnums=0))(w, x)
    assert float(loss) == float(again)
    np.testing.assert_array_equal(grads, remat)
    per_sample = jax.vmap(mp.value_and_grad(loss_fn, cast_argnums=0), in_axes=(None, 0))(w, x[:, None])[1]
    assert per_sample.shape == (4, 3, 3)
    np.testing.assert_allclose(per_sample.sum(0), grads, rtol=0.02)
    curvature = jax.grad(lambda w: mp.value_and_grad(lambda w: (w.astype(jnp.float32) ** 3).sum())(w)[1].sum())
    np.testing.assert_allclose(curvature(jnp.asarray([2.0])), [12.0])


def test_needs_the_loss_scale():
    mp = bind()
    grad = mp.value_and_grad(lambda w: w)
    with pytest.raises(LossScaleError, match="loss_scale.mode is 'dynamic': pass the state.*opt_state.loss_scale"):
        grad(jnp.asarray(1.0))
    with pytest.raises(LossScaleError, match="LossScaleState.*not OptimizerState"):
        grad(jnp.asarray(1.0), loss_scale=mp.optimizer(optax.sgd(0.1)).init(jnp.asarray(1.0)))


def test_float16_without_a_loss_scale_is_an_error():
    mp = bind(PrecisionPolicy(compute_dtype="float16"))
    with pytest.raises(PolicyError, match="float16 and loss_scale.mode 'none' loses small gradients"):
        mp.value_and_grad(lambda w: w)
    with pytest.raises(PolicyError, match="Set loss_scale.mode to 'dynamic'"):
        mp.optimizer(optax.sgd(0.1))


def test_another_frameworks_tensor_anywhere_is_an_error():
    torch = pytest.importorskip("torch")
    mp = bind(BF16)
    with pytest.raises(MixedFrameworksError, match="torch"):
        mp.value_and_grad(lambda w, x: w)(jnp.asarray(1.0), torch.ones(2))


class TestFloat32DataMeetsLowParameters:
    """The silent way to lose mixed precision in JAX: float32 data times bfloat16 parameters is a float32 product."""

    params, x = {"w": jnp.full((1, 1), 1 / 3)}, jnp.ones((1, 1))
    low = float(jnp.bfloat16(1 / 3))

    @staticmethod
    def loss_fn(params, x):
        return (x @ params["w"]).sum()

    def test_here_the_product_is_low_whoever_casts(self):
        mp = bind(BF16)
        for grad in (
            mp.value_and_grad(self.loss_fn),
            mp.value_and_grad(mp.autocast(self.loss_fn)),
            mp.value_and_grad(mp.autocast(self.loss_fn), cast_argnums=()),
            mp.value_and_grad(lambda p, x: mp.op("matmul")(jnp.dot)(x, p["w"]).sum()),
            mp.value_and_grad(self.loss_fn, cast_argnums=(0, 1)),
        ):
            assert float(grad(self.params, self.x)[0]) == self.low

    def test_also_through_a_compiled_model_that_is_not_traced_again(self):
        mp = bind(BF16)
        model = jax.jit(mp.autocast(lambda p, x: x @ p["w"]))
        for _ in range(3):
            loss, _ = mp.value_and_grad(lambda p, x: model(p, x).sum())(self.params, self.x)
            assert float(loss) == self.low

    def test_cast_at_the_boundary_only_it_promotes_as_jax_does(self):
        loss, _ = bind(BF16).value_and_grad(self.loss_fn, cast_argnums=0)(self.params, self.x * 1.0001)
        assert float(loss) != float(jnp.bfloat16(float(loss)))


def test_a_reduce_dtype_that_cannot_take_effect_or_would_overflow_unseen_is_told():
    def loss_fn(w):
        return (w**2).sum()

    mp = precision.bind(FP16.with_(reduce_dtype="bfloat16"), backend="jax")
    with pytest.warns(PrecisionWarning, match="reduce_dtype bfloat16 has no effect without axis_name"):
        mp.value_and_grad(loss_fn)
    unscaled = precision.bind(precision.PrecisionPolicy(reduce_dtype="float16"), backend="jax")
    with pytest.raises(precision.PolicyError, match="reduce_dtype float16 with loss_scale.mode none"):
        unscaled.value_and_grad(loss_fn, axis_name="data")
