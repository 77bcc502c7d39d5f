"""Primitives that hold programs: bodies are entered, carries and branches agree, rules and policies are the author's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.jax.autocast.common import BF16, FP16, equations, normal, products, rounded, traced

X, W = normal(4, 8), normal(8, 8, seed=1, scale=0.3)


def close(got, want, bar=0.02):
    want = np.asarray(want, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bar * max(1.0, np.abs(want).max())


class TestEntered:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda f: f,
            jax.jit,
            jax.checkpoint,
            lambda f: jax.jit(jax.jit(f)),
            lambda f: jax.vmap(f, (0, None)),
            lambda f: lambda x, w: lax.cond(x.sum() > 0, f, lambda x, w: x @ w, x, w),
            lambda f: lambda x, w: lax.switch(1, [f, f], x, w),
            lambda f: lambda x, w: lax.scan(lambda h, _: (f(h, w), None), x, None, length=3)[0],
            lambda f: lambda x, w: lax.fori_loop(0, 3, lambda _, h: f(h, w), x),
            lambda f: lambda x, w: lax.while_loop(lambda c: c[1] < 3, lambda c: (f(c[0], w), c[1] + 1), (x, 0))[0],
            lambda f: lambda x, w: lax.map(lambda row: f(row, w), x),
            lambda f: lambda x, w: jax.nn.relu(f(x, w)),
            lambda f: lambda x, w: jax.grad(lambda w: f(x, w).sum())(w),
            lambda f: lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (w,))[1],
            lambda f: lambda x, w: lax.associative_scan(lambda a, b: f(a, w) + b, x),
        ],
    )
    def test_products_inside_are_low_and_the_result_is_close(self, wrap):
        fun = wrap(lambda x, w: jnp.tanh(x @ w))
        found = products(BF16.autocast(fun), X, W)
        assert found, "there are products inside"
        assert set(found) == {"bfloat16"}
        got, want = jax.jit(lambda x, w: (BF16.autocast(fun)(x, w), fun(x, w)))(X, W)
        assert got.dtype == jnp.float32
        close(got, want)

    def test_gradients_through_all_of_them(self):
        def body(h, w):
            h = jax.checkpoint(lambda h: jax.nn.silu(h @ w))(h)
            return lax.cond(h.sum() > 0, lambda h: h, lambda h: jnp.tanh(h), h), None

        def loss(w):
            h, _ = lax.scan(jax.jit(body), X, jnp.stack([w, w]))
            return (h**2).mean()

        runs = jax.grad(loss), jax.grad(BF16.autocast(loss)), BF16.autocast(jax.grad(loss))
        want, *found = jax.jit(lambda w: [run(w) for run in runs])(W)
        for got in found:
            close(got, want, 0.03)


class TestCarriesAndBranches:
    def test_a_carry_keeps_the_wider_of_what_it_starts_and_comes_back_with(self):
        def run(x, w):
            low = x @ w
            kept, _ = lax.scan(lambda h, _: (h @ w, None), x, None, length=2)
            grown, _ = lax.scan(lambda h, _: (jnp.exp(h), None), low, None, length=2)
            stays, _ = lax.scan(lambda h, _: (h @ w, None), low, None, length=2)
            return kept, grown, stays

        scans = [e for e in traced(BF16.autocast(run), X, W) if e.primitive.name == "scan"]
        assert [e.outvars[0].aval.dtype.name for e in scans] == ["float32", "float32", "bfloat16"]

    def test_a_fixed_point_that_takes_two_turns(self):
        def step(carry, _):
            _, b, c = carry
            return (b, c, jnp.exp(c)), None

        def run(x, w):
            low = x @ w
            return lax.scan(step, (low, low, low), None, length=1)[0]

        (scan,) = [e for e in traced(BF16.autocast(run), X, W) if e.primitive.name == "scan"]
        assert [v.aval.dtype.name for v in scan.outvars] == ["float32"] * 3

    def test_while_carries(self):
        run = BF16.autocast(lambda x, w: lax.while_loop(lambda h: (h < 9).any(), lambda h: jnp.exp(h) + h, x @ w))
        (loop,) = [e for e in traced(run, X, W) if e.primitive.name == "while"]
        assert loop.outvars[0].aval.dtype == jnp.float32

    def test_branches_agree_on_the_widest(self):
        run = BF16.autocast(lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.exp(x @ w)))
        (cond,) = [e for e in traced(run, X, W) if e.primitive.name == "cond"]
        assert [b.out_avals[0].dtype.name for b in cond.params["branches"]] == ["float32", "float32"]
        close(run(X, W), X @ W if X.sum() > 0 else jnp.exp(X @ W))


class TestRemat:
    def test_its_policy_is_kept(self):
        def loss(policy, w):
            return jax.checkpoint(lambda w: jnp.sin(X @ w) @ w, policy=policy)(w).sum()

        counts = {}
        for policy in (jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable):
            eqns = traced(jax.grad(BF16.autocast(functools.partial(loss, policy))), W)
            counts[policy is jax.checkpoint_policies.nothing_saveable] = sum(
                e.primitive.name == "precision_contract" for e in eqns
            )
        assert counts[True] > counts[False]

    def test_names_to_save(self):
        from jax.ad_checkpoint import checkpoint_name

        policy = jax.checkpoint_policies.save_only_these_names("h")

        def loss(w):
            return jax.checkpoint(lambda w: jnp.sin(checkpoint_name(X @ w, "h")).sum(), policy=policy)(w)

        eqns = traced(jax.grad(BF16.autocast(loss)), W)
        assert sum(e.primitive.name == "precision_contract" for e in eqns) == 2, "the product is not computed again"


class TestCustomDerivatives:
    def test_the_jvp_rule_is_the_author_s(self):
        @jax.custom_jvp
        def f(x):
            return jnp.sin(x @ W)

        f.defjvp(lambda p, t: (f(*p), 3.0 * (t[0] @ W)))
        run = BF16.autocast(lambda x: f(x).sum())
        slope, along = jax.jit(lambda x: (jax.grad(run)(x), jax.jvp(run, (x,), (x,))[1]))(X)
        close(slope, 3.0 * jnp.ones((4, 8)) @ W.T)
        close(along, 3.0 * (X @ W).sum())
        assert set(products(jax.grad(run), X)) == {"bfloat16"}, "the rule is rewritten, too"

    def test_the_vjp_rule_is_the_author_s(self):
        @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
        def f(x, w, factor):
            return jnp.sin(x @ w)

        def bwd(factor, kept, ct):
            x, w = kept
            return factor * (ct @ w.T), factor * (x.T @ ct)

        f.defvjp(lambda x, w, factor: (f(x, w, factor), (x, w)), bwd)
        run = BF16.autocast(lambda x, w: f(x, w, 3.0).sum())
        dx, dw = jax.jit(jax.grad(run, (0, 1)))(X, W)
        assert (dx.dtype, dw.dtype) == (jnp.float32, jnp.float32)
        close(dx, 3.0 * jnp.ones((4, 8)) @ W.T)
        close(dw, 3.0 * X.T @ jnp.ones((4, 8)))
        assert set(products(jax.grad(run, (0, 1)), X, W)) == {"bfloat16"}

    def test_a_function_that_closes_over_a_traced_value(self):
        """It comes first among the arguments; a residual that is an argument is still found."""

        def outer(x, w):
            @jax.custom_vjp
            def f(x):
                return jnp.sin(x @ w)

            f.defvjp(lambda x: (jnp.sin(x), x), lambda kept, ct: (3.0 * kept,))
            return f(X * x).sum()

        close(jax.jit(jax.grad(BF16.autocast(outer)))(X, W), 3.0 * X * X * X)

    def test_vjp_rules_with_integers_none_and_low_inputs(self):
        @jax.custom_vjp
        def f(h, n):
            return h * n

        f.defvjp(lambda h, n: (h * n, n), lambda n, ct: (ct * 10.0, None))
        grad = jax.grad(BF16.autocast(lambda w: f(X @ w, jnp.arange(8)).sum()))(W)
        close(grad, 10.0 * X.T @ jnp.ones((4, 8)))
        batched = jax.vmap(jax.grad(BF16.autocast(lambda x: f(x @ W, 2).sum())))(X)
        close(batched, 10.0 * jnp.ones((4, 8)) @ W.T)

    def test_the_derivative_of_relu_at_zero_is_still_zero(self):
        assert float(jax.grad(BF16.autocast(lambda x: jax.nn.relu(x).sum()))(jnp.zeros(1))[0]) == 0.0


class TestOpaque:
    def test_callbacks_see_the_dtypes_they_declare(self):
        seen = []

        def host(h):
            seen.append(h.dtype.name)
            return np.linalg.inv(h)

        def run(x, w):
            h = x @ w
            return jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h) @ w

        out = jax.jit(BF16.autocast(run))(W, W)
        assert seen == ["float32"]
        close(out, np.linalg.inv(np.asarray(W @ W, np.float64)) @ np.asarray(W, np.float64), 0.2)

    def test_io_and_debug_callbacks_keep_their_effects(self, capsys):
        told = []

        def run(x, w):
            h = x @ w
            io_callback(lambda v: told.append(v.dtype.name), None, h[0, 0], ordered=True)
            jax.debug.print("h is {}", h[0, 0])
            return h

        closed = jax.make_jaxpr(BF16.autocast(run))(X, W)
        assert len(closed.effects) == 2
        jax.block_until_ready(jax.jit(BF16.autocast(run))(X, W))
        jax.effects_barrier()
        assert told == ["float32"]
        assert "h is" in capsys.readouterr().out

    def test_pallas_kernels_run_in_the_dtypes_they_were_written_for(self):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        def run(x, w):
            h = x @ w
            double = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)
            return double(h) @ w

        (call,) = [e for e in traced(BF16.autocast(run), X, W) if e.primitive.name == "pallas_call"]
        assert call.invars[0].aval.dtype == jnp.float32
        close(jax.jit(BF16.autocast(run))(X, W), 2 * X @ W @ W)

    def test_linear_solves_are_float32(self):
        a = W @ W.T + 4 * jnp.eye(8)

        def run(a, b):
            x, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, b)
            return x + jnp.linalg.solve(a @ jnp.eye(8), b)

        want = 2 * np.linalg.solve(np.asarray(a, np.float64), np.asarray(X[0], np.float64))
        close(jax.jit(BF16.autocast(run))(a, X[0]), want)
        assert jax.eval_shape(jax.grad(lambda a: BF16.autocast(run)(a, X[0]).sum()), a).dtype == jnp.float32


class TestShardMap:
    def test_it_is_entered_and_gradients_are_summed_over_the_mesh(self):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

        def model(x, w):
            return lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "data")

        fun = jax.shard_map(model, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
        for run in (
            BF16.autocast(fun),
            jax.shard_map(BF16.autocast(model), mesh=mesh, in_specs=(P("data"), P()), out_specs=P()),
        ):
            assert set(products(run, X, W)) == {"bfloat16"}
            got, want = jax.jit(lambda w, run=run: [jax.value_and_grad(f, 1)(X, w) for f in (run, fun)])(W)
            assert got[1].dtype == jnp.float32
            close(got[0], want[0])
            close(got[1], want[1], 0.03)

    def test_shardings_survive(self):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, P("data"))
        run = BF16.autocast(lambda x, w: lax.with_sharding_constraint(x @ w, sharding))
        (kept,) = [e for e in traced(run, X, W) if e.primitive.name == "sharding_constraint"]
        assert kept.params["sharding"].spec == P("data")
        assert jax.jit(run)(jax.device_put(X, sharding), W).sharding.spec == P("data")

    def test_shardings_in_types(self):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
            run = jax.jit(BF16.autocast(lambda x, w: jax.nn.softmax(x @ w) @ w))
            assert jax.typeof(run(x, W)).sharding.spec[0] == "data"
            grad = jax.jit(jax.grad(BF16.autocast(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())))(W, x)
        close(grad, jax.grad(lambda w: (jnp.tanh(X @ w) ** 2).sum())(W), 0.03)


class TestWhatSurvives:
    def test_donation(self):
        step = jax.jit(BF16.autocast(lambda x, w: x @ w), donate_argnums=0)
        x = X + 0
        jax.block_until_ready(step(x, W))
        assert x.is_deleted()

    def test_name_stacks_and_tracebacks(self):
        def layer(x, w):
            with jax.named_scope("my_layer"):
                return x @ w

        (eqn,) = [e for e in traced(BF16.autocast(layer), X, W) if e.primitive.name == "precision_contract"]
        assert "my_layer" in str(eqn.source_info.name_stack)
        files = [frame.file_name for frame in eqn.source_info.traceback.frames]
        assert any(name.endswith("test_control.py") for name in files)

    def test_errors_of_the_function_are_its_own(self):
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
            BF16.autocast(lambda x, w: x @ w[:3])(X, W)

    def test_nan_checks_name_the_user_s_line(self):
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jax.block_until_ready(jax.jit(BF16.autocast(lambda x: jnp.log(x - 100)))(X))

    def test_random_numbers_are_those_of_the_plain_function(self):
        def noisy(x, key):
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) + jax.random.normal(key, x.shape)

        key = jax.random.key(0)
        got, want = jax.jit(lambda x: (BF16.autocast(noisy)(x, key), noisy(x, key)))(X)
        np.testing.assert_array_equal(got, want)

    def test_every_transformation_in_a_row(self):
        run = jax.jit(jax.vmap(jax.grad(jax.checkpoint(BF16.autocast(lambda w, x: jnp.tanh(x @ w).sum()))), (None, 0)))
        want = jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0))(W, X)
        close(run(W, X), want, 0.03)


def test_float16_through_a_loop_is_rounded_as_numpy_rounds():
    run = FP16.autocast(lambda x, w: lax.scan(lambda h, _: (h @ w, None), x @ w, None, length=1)[0])
    first = rounded(rounded(X, "float16") @ rounded(W, "float16"), "float16")
    want = rounded(first @ rounded(W, "float16"), "float16")
    np.testing.assert_allclose(jax.jit(run)(X, W), want, rtol=2e-3, atol=1e-3)


def test_equations_reach_into_every_body():
    """The helper of these tests itself."""
    nested = jax.jit(
        lambda x: lax.cond(x[0, 0] > 0, lambda: lax.scan(lambda c, _: (c @ W, 0), x, None, 2)[0], lambda: x)
    )
    names = {e.primitive.name for e in equations(jax.make_jaxpr(nested)(X).jaxpr)}
    assert "dot_general" in names
