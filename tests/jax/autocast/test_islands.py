"""Islands: an author's casts to float32, ``mp.island`` and ``mp.op`` inside, arguments that are kept, autocast in autocast."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precision import PolicyError, PrecisionWarning
from precision_jax.autocast import untouched
from tests.jax.autocast.common import BF16, bind, dtypes, normal, products

X, W = normal(4, 8), normal(8, 8, seed=1)


def to_float32(x):
    return x.astype(jnp.float32)


class TestAnAuthorsCasts:
    """Traced in float32 they leave no equation behind, and survive all the same."""

    def test_a_router_in_float32(self):
        def router(x, w):
            h = x @ w
            logits = h.astype(jnp.float32) @ w.astype(jnp.float32)
            return logits, h @ w

        assert products(BF16.autocast(router), X, W) == ["bfloat16", "float32", "bfloat16"]

    def test_one_cast_is_enough(self):
        assert products(BF16.autocast(lambda x, w: (x @ w).astype(jnp.float32) @ w), X, W) == ["bfloat16", "float32"]

    @pytest.mark.parametrize(
        "cast",
        [
            lambda x: x.astype("float32"),
            lambda x: jnp.asarray(x, jnp.float32),
            lambda x: jax.lax.convert_element_type(x, jnp.float32),
            lambda x: jnp.float32(x),
            lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)),
            to_float32,
        ],
    )
    def test_however_it_is_spelt(self, cast):
        assert products(BF16.autocast(lambda x, w: cast(x @ w) @ cast(w)), X, W) == ["bfloat16", "float32"]

    def test_the_island_ends_where_the_author_casts_back(self):
        def run(x, w):
            h = x @ w
            h = (h.astype(jnp.float32) + 1.0).astype(h.dtype)
            return h @ w

        assert products(BF16.autocast(run), X, W) == ["bfloat16", "bfloat16"]

    def test_a_norm_that_ends_in_float32_does_not_widen_the_next_product(self):
        def run(x, w):
            h = (x @ w).astype(jnp.float32)
            return (h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True))) @ w

        assert products(BF16.autocast(run), X, W) == ["bfloat16", "bfloat16"]

    def test_elementwise_in_an_island_is_float32(self):
        run = BF16.autocast(lambda x, w: to_float32(x @ w) * 2.0)
        assert dtypes(run, X, W, of="mul") == ["float32,float32->float32"]

    def test_casting_to_another_s_dtype_is_no_island(self):
        assert products(BF16.autocast(lambda x, w: x.astype(w.dtype) @ w), X, W) == ["bfloat16"]

    def test_inside_of_jit_scan_and_grad(self):
        def loss(x, w):
            def step(h, _):
                logits = jax.jit(lambda h: to_float32(h) @ to_float32(w))(h)
                return (h @ w + logits).astype(h.dtype), None

            return jax.lax.scan(step, x, None, length=2)[0].sum()

        assert sorted(products(BF16.autocast(loss), X, W)) == ["bfloat16", "float32"]
        assert set(products(jax.grad(BF16.autocast(loss)), X, W)) == {"bfloat16", "float32"}
        assert set(products(BF16.autocast(jax.grad(loss)), X, W)) == {"bfloat16", "float32"}

    def test_the_dtype_that_a_product_was_asked_for(self):
        run = untouched(BF16, functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
        closed = jax.make_jaxpr(untouched(BF16, lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32)))(
            X, W
        )
        assert closed.out_avals[0].dtype == jnp.float32
        assert products(run, X, W) == ["bfloat16"]

    def test_low_inputs(self):
        low = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
        assert products(BF16.autocast(lambda x, w: to_float32(x) @ to_float32(w) + x @ w), *low) == [
            "float32",
            "bfloat16",
        ]

    def test_a_function_that_cannot_be_traced_low_is_told_of(self):
        def run(x, w):
            if x.dtype != jnp.float32:
                raise TypeError("float32 only")
            return x.astype(jnp.float32) @ w

        with pytest.warns(
            PrecisionWarning, match="run cannot be traced in bfloat16.*TypeError: float32 only.*mp.island"
        ):
            BF16.autocast(run)(X, W)

    def test_a_function_without_casts_is_traced_once(self):
        traces = []

        def run(x, w):
            traces.append(x.dtype)
            return x @ w

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.jit(BF16.autocast(run))(X, W)
        assert traces == [jnp.float32]


class TestMarkedRegions:
    @pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: jax.vmap(f, (0, None)), jax.checkpoint])
    def test_mp_island_keeps_its_dtype(self, around):
        island = around(BF16.island("float32")(lambda x, w: x @ w))
        assert products(BF16.autocast(lambda x, w: island(x @ w, w) @ w), X, W) == ["bfloat16", "float32", "bfloat16"]

    def test_through_grad_inside_and_outside(self):
        island = BF16.island("float32")(lambda x, w: jnp.tanh(x @ w))

        def loss(w):
            return island(X, w).sum()

        for run in (
            BF16.autocast(jax.grad(loss)),
            jax.grad(BF16.autocast(loss)),
            jax.jit(jax.grad(BF16.autocast(loss))),
        ):
            assert set(products(run, W)) == {"float32"}

    def test_a_low_island(self):
        seen = []

        @BF16.island("bfloat16")
        def low(x):
            seen.append(x.dtype)
            return jnp.exp(x)

        assert dtypes(BF16.autocast(lambda x, w: low(x @ w)), X, W, of="exp") == ["bfloat16->bfloat16"]
        assert seen[0] == jnp.bfloat16, "as outside of autocast"

    def test_mp_op_decides_for_what_it_marks(self):
        norm = BF16.op("norm")(lambda x: x * 2.0)
        assert dtypes(BF16.autocast(lambda x, w: norm(x @ w)), X, W, of="mul") == ["float32,float32->float32"]
        product = BF16.op("matmul")(lambda x, w: jnp.exp(x) @ w)
        run = BF16.autocast(lambda x, w: product(x, w))
        assert dtypes(run, X, W, of="exp") == ["bfloat16->bfloat16"]

    def test_mp_op_of_a_family_that_follows(self):
        follow = BF16.op("elementwise")(lambda x: jnp.exp(x) * 2.0)
        assert dtypes(BF16.autocast(lambda x, w: follow(x @ w)), X, W, of="exp") == ["bfloat16->bfloat16"]
        assert dtypes(BF16.autocast(lambda x, w: follow(x)), X, W, of="exp") == ["float32->float32"]

    def test_side_effects_in_a_region_work(self):
        state = {}

        @BF16.op("norm")
        def norm(x):
            state["mean"] = x.mean()
            return x - state["mean"]

        out, mean = BF16.autocast(lambda x, w: (norm(x @ w), state["mean"]))(X, W)
        np.testing.assert_allclose(mean, np.asarray(X @ W).mean(), atol=0.02)
        assert out.shape == (4, 8)

    def test_of_nested_islands_the_innermost_counts(self):
        inner = BF16.island("bfloat16")(jnp.exp)
        run = BF16.autocast(lambda x, w: BF16.island("float32")(lambda x: inner(x * 2.0))(x @ w))
        assert dtypes(run, X, W, of="exp") == ["bfloat16->bfloat16"]
        assert dtypes(run, X, W, of="mul") == ["float32,float32->float32"]

    def test_a_dtype_that_nothing_computes_in_is_refused(self):
        with pytest.raises(PolicyError, match="an island in float8_e4m3fn: cpu:0 does not compute in it"):
            BF16.island("float8_e4m3fn")


class TestNested:
    def test_the_inner_policy_holds_inside(self):
        inner = bind(compute="float32").autocast(lambda x, w: x @ w)
        assert products(BF16.autocast(lambda x, w: inner(x @ w, w) @ w), X, W) == ["bfloat16", "float32", "bfloat16"]

    def test_the_same_twice_is_the_same_as_once(self):
        once = BF16.autocast(lambda x, w: jax.nn.softmax(x @ w) @ w)
        np.testing.assert_array_equal(BF16.autocast(once)(X, W), once(X, W))

    def test_a_boundary_inside(self):
        inner = BF16.cast_boundary(lambda x, w: jnp.exp(x) @ w)
        assert dtypes(BF16.autocast(lambda x, w: inner(x, w)), X, W, of="exp") == ["bfloat16->bfloat16"]


class TestKept:
    def test_an_op_that_takes_a_kept_argument_runs_in_its_dtype(self):
        run = BF16.autocast(lambda x, w, y: (x @ w, x @ y, (x @ w) - y[:4]), keep="y")
        assert sorted(products(run, X, W, W)) == ["bfloat16", "bfloat16", "float32"]
        assert dtypes(run, X, W, W, of="sub") == ["float32,float32->float32"]

    def test_it_has_to_be_there(self):
        with pytest.raises(PolicyError, match="keep names no argument 'z'; there are x, w"):
            BF16.autocast(lambda x, w: x, keep=("z",))
