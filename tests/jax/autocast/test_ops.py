"""What autocast makes of single ops: dtypes, float32 sums, one rounding, masks and constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precision import Rule
from precision_jax.autocast import untouched
from tests.jax.autocast.common import BF16, FP16, bind, dtypes, normal, products, rounded, traced

X, W, B = normal(5, 64), normal(64, 6, seed=1), normal(6, seed=2)


def given(fun, *args, mp=BF16):
    """The dtype a function's result has before it leaves: the output dtype would hide it."""
    seen = []

    def look(*args):
        out = fun(*args)
        seen.append(out)
        return out

    closed = jax.make_jaxpr(lambda *a: mp_untouched(mp, look)(*a))(*args)
    return closed.out_avals[0].dtype.name


def mp_untouched(mp, fun):
    from precision_jax.autocast import untouched

    return untouched(mp, fun)


class TestFamilies:
    @pytest.mark.parametrize(
        ("fun", "want"),
        [
            (lambda x, w: x @ w, "bfloat16"),
            (lambda x, w: jnp.einsum("ij,jk->ki", x, w), "bfloat16"),
            (lambda x, w: jax.nn.softmax(x @ w), "float32"),
            (lambda x, w: jax.nn.log_softmax(x @ w), "float32"),
            (lambda x, w: jax.nn.logsumexp(x @ w, -1), "float32"),
            (lambda x, w: jax.nn.standardize(x @ w), "float32"),
            (lambda x, w: (x @ w).sum(), "float32"),
            (lambda x, w: (x @ w).mean(-1), "float32"),
            (lambda x, w: jnp.var(x @ w, -1), "float32"),
            (lambda x, w: jnp.cumsum(x @ w, -1), "float32"),
            (lambda x, w: jnp.exp(x @ w), "float32"),
            (lambda x, w: (x @ w) ** 3, "float32"),
            (lambda x, w: jnp.linalg.norm(x @ w, axis=-1), "float32"),
            (lambda x, w: jax.nn.relu(x @ w), "bfloat16"),
            (lambda x, w: jax.nn.gelu(x @ w), "bfloat16"),
            (lambda x, w: jax.nn.gelu(x @ w, approximate=False), "bfloat16"),
            (lambda x, w: jax.nn.silu(x @ w), "bfloat16"),
            (lambda x, w: jnp.tanh(x @ w) * 0.3 + 1, "bfloat16"),
            (lambda x, w: jax.nn.softplus(x @ w), "float32"),
            (lambda x, w: (x @ w) + x[:, :6], "float32"),
            (lambda x, w: jnp.sort((x @ w).T.reshape(-1)), "bfloat16"),
            (lambda x, w: (x @ w).max(-1), "bfloat16"),
            (lambda x, w: jnp.where(x[:, :6] > 0, x @ w, 0.0), "bfloat16"),
            (lambda x, w: jnp.pad(x @ w, 1), "bfloat16"),
            (lambda x, w: jnp.linalg.qr(x @ w)[1], "float32"),
            (lambda x, w: jnp.abs(jnp.fft.fft(x @ w)), "float32"),
            (lambda x, w: jnp.take(x @ w, jnp.asarray([0, 1]), axis=0), "bfloat16"),
        ],
    )
    def test_results(self, fun, want):
        assert given(fun, X, W) == want

    def test_convolutions(self):
        x, k = normal(2, 6, 6, 3), normal(3, 3, 3, 4)

        def conv(x, k):
            return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        assert given(conv, x, k) == "bfloat16"
        assert given(lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), x, k) == "bfloat16"

    def test_the_result_leaves_in_the_output_dtype(self):
        assert BF16.autocast(lambda x, w: x @ w)(X, W).dtype == jnp.float32
        assert bind(output_dtype="bfloat16").autocast(lambda x, w: x @ w)(X, W).dtype == jnp.bfloat16

    def test_family_rules_hold(self):
        assert products(bind(Rule(family="matmul", dtype="float32")).autocast(jnp.dot), X, W) == ["float32"]
        soft = bind(Rule(family="transcendental", dtype="bfloat16"))
        assert given(lambda x, w: jnp.exp(x @ w), X, W, mp=soft) == "bfloat16"

    def test_float64_and_integers_are_left_alone(self):
        with jax.enable_x64(True):
            x = np.ones((2, 2), np.float64)
            assert BF16.autocast(lambda x: jnp.exp(x @ x))(x).dtype == jnp.float64
            n = jnp.arange(4).reshape(2, 2)
            assert BF16.autocast(lambda n: n @ n)(n).dtype == n.dtype


class TestProducts:
    def test_they_are_summed_in_float32_and_rounded_once(self):
        """1 + 4096 * 2**-9: a bfloat16 sum would stay at 1, and one rounded twice would miss the tie."""
        x = jnp.concatenate([jnp.ones((1, 1)), jnp.full((1, 4096), 2.0**-9)], 1)
        out = jax.jit(BF16.autocast(jnp.dot))(x, jnp.ones((4097, 1)))
        assert float(out[0, 0]) == float(jnp.bfloat16(9.0))

    @pytest.mark.parametrize(("mp", "dtype"), [(BF16, "bfloat16"), (FP16, "float16")])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_against_float64(self, mp, dtype, compiled):
        run = mp.autocast(lambda x, w, b: x @ w + b)
        run = jax.jit(run) if compiled else run
        want = (rounded(X, dtype) @ rounded(W, dtype) + rounded(B, dtype)).astype(np.float32)
        got = np.asarray(run(X, W, B), np.float64)
        spacing = np.abs(want) * float(jnp.finfo(dtype).eps)
        assert (np.abs(got - want) <= spacing / 2 * 1.01).all(), "one rounding, after the bias"

    def test_the_bias_belongs_to_the_product(self):
        """The sum is rounded once: 256 + 1 is 256 in bfloat16, and the bias -256 would leave 0."""
        x = jnp.asarray([[256.0, 1.0]])
        out = jax.jit(BF16.autocast(lambda x, w, b: x @ w + b))(x, jnp.ones((2, 1)), jnp.asarray([-256.0]))
        assert float(out[0, 0]) == 1.0
        assert given(lambda x, w, b: x @ w + b, X, W, B) == "bfloat16"
        conv = lambda x, k, b: lax.conv(x, k, (1, 1), "SAME") + b[:, None, None]  # noqa: E731
        assert given(conv, normal(1, 2, 4, 4), normal(3, 2, 3, 3), normal(3)) == "bfloat16"

    @pytest.mark.parametrize("compiled", [False, True])
    def test_weight_gradients_reach_float32_masters_without_a_rounding(self, compiled):
        """Products of bfloat16 numbers summed in float64: what is left is float32's own error."""
        cts = normal(5, 6, seed=3)
        run = BF16.autocast(lambda w, b: ((X @ w + b) * lax.stop_gradient(cts)).sum())
        grad = jax.grad(run, argnums=(0, 1))
        dw, db = (jax.jit(grad) if compiled else grad)(W, B)
        want = rounded(X).T @ rounded(cts)
        assert dw.dtype == jnp.float32
        np.testing.assert_allclose(dw, want, rtol=0, atol=2e-6 * np.abs(want).max())
        assert np.abs(rounded(want) - want).max() > 1e-3 * np.abs(want).max(), "rounding it would have shown"
        np.testing.assert_allclose(db, rounded(cts).sum(0), rtol=1e-6)

    def test_a_weight_used_twice_sums_its_gradients_in_float32(self):
        w = jnp.asarray([[1.0]])
        grad = jax.grad(BF16.autocast(lambda w: (jnp.full((1, 1), 256.0) @ w + jnp.ones((1, 1)) @ w).sum()))(w)
        assert float(grad[0, 0]) == 257.0

    def test_nothing_computes_the_gradient_in_float32(self):
        eqns = traced(jax.grad(BF16.autocast(lambda w: ((X @ w) @ w.T).sum())), W)
        found = [e for e in eqns if e.primitive.name in ("precision_contract", "dot_general")]
        assert len(found) == 5
        assert {e.primitive.name for e in found} == {"precision_contract"}
        assert {e.params["compute"].name for e in found} == {"bfloat16"}

    def test_an_input_is_cast_once_for_all_that_use_it(self):
        def qkv(x, q, k, v):
            h = jax.nn.standardize(x)
            return h @ q + h @ k + h @ v

        casts = [e for e in traced(BF16.autocast(qkv), X, W, W, W) if e.primitive.name == "convert_element_type"]
        assert [e.invars[0].aval.shape for e in casts if e.outvars[0].aval.dtype == jnp.bfloat16] == [X.shape]

    def test_forward_mode_and_second_derivatives(self):
        run = BF16.autocast(lambda w: ((X @ w) ** 2).sum())
        out, slope = jax.jvp(run, (W,), (W,))
        np.testing.assert_allclose(slope, 2 * out, rtol=1e-2)
        hessian = jax.jit(jax.hessian(BF16.autocast(lambda w: ((X[:, :3] @ w) ** 2).sum())))(W[:3, 0])
        np.testing.assert_allclose(hessian, 2 * X[:, :3].T @ X[:, :3], rtol=3e-2, atol=0.2)

    def test_batched_over_either_operand(self):
        run = BF16.autocast(lambda x, w: x @ w)
        want = run(X, W)
        np.testing.assert_array_equal(jax.vmap(run, (0, None))(X, W), want)
        np.testing.assert_array_equal(jax.vmap(run, (None, 1), out_axes=1)(X, W), want)
        np.testing.assert_array_equal(jax.vmap(run)(X[None], W[None])[0], want)

    def test_an_algorithm_that_the_author_chose_stays(self):
        run = BF16.autocast(lambda x, w: jnp.matmul(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32))
        assert products(run, X, W) == ["float32"]

    def test_the_checkpoint_policy_for_products_sees_ours(self):
        from precision_jax.opcast import saving

        policy = saving(jax.checkpoint_policies.dots_saveable)
        assert policy is saving(jax.checkpoint_policies.dots_saveable), (
            "one object, or compiled functions are not found"
        )
        inner = BF16.autocast(lambda w: jnp.sin(X @ w).sum())
        counts = {}
        for name, kept in (("kept", policy), ("none", jax.checkpoint_policies.nothing_saveable)):
            eqns = traced(jax.grad(jax.checkpoint(inner, policy=kept)), W)
            counts[name] = sum(e.primitive.name == "precision_contract" for e in eqns)
        assert counts == {"kept": 2, "none": 3}


class TestConstants:
    @pytest.mark.parametrize(("mp", "dtype"), [(BF16, "bfloat16"), (FP16, "float16")])
    @pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9, jnp.finfo(jnp.float32).min])
    def test_masks_do_not_become_infinite(self, mp, dtype, fill):
        keep = jnp.zeros((5, 6), bool)

        def scores(x, w):
            return jnp.where(keep, x @ w, fill)

        assert given(scores, X, W, mp=mp) == dtype
        assert np.isfinite(np.asarray(mp.autocast(scores)(X, W))).all()
        probs = jax.jit(mp.autocast(lambda x, w: jax.nn.softmax(scores(x, w))))(X, W)
        np.testing.assert_allclose(probs, 1 / 6, rtol=1e-6)

    def test_a_mask_that_is_added_goes_to_float32(self):
        mask = jnp.full((5, 6), -1e9)
        out = FP16.autocast(lambda x, w, m: jax.nn.softmax(x @ w + m))(X, W, mask)
        np.testing.assert_allclose(out, 1 / 6, rtol=1e-6)
        out = FP16.autocast(lambda x, w: jax.nn.softmax(x @ w + -1e9))(X, W)
        np.testing.assert_allclose(out, 1 / 6, rtol=1e-6)

    def test_an_author_s_infinity_stays(self):
        out = BF16.autocast(lambda x, w: jnp.where(False, x @ w, -jnp.inf))(X, W)
        assert np.isneginf(np.asarray(out)).all()

    def test_an_epsilon_below_float16_is_not_lost(self):
        out = FP16.autocast(lambda x, w: 1e-9 / (x @ w * 0 + 1e-9))(X, W)
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)

    def test_a_factor_that_a_low_dtype_lacks_is_not_rounded(self):
        """0.3 is 0.30078125 in bfloat16: 200 times that is 60.15625, which would become 60.25."""
        out = jax.jit(BF16.autocast(lambda x, w: (x @ w) * 0.3))(jnp.full((1, 1), 200.0), jnp.ones((1, 1)))
        assert float(out[0, 0]) == 60.0

    def test_constants_take_the_dtype_of_what_they_meet(self):
        assert given(lambda x, w: (x @ w) * jnp.sqrt(1 / 64) + jnp.zeros((6,)), X, W) == "bfloat16"


class TestPatterns:
    def test_a_softmax_by_hand_is_float32_throughout(self):
        def softmax(s):
            e = jnp.exp(s - s.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)

        run = BF16.autocast(lambda x, w: softmax(x @ w))
        assert set(dtypes(run, X, W, of="sub")) == {"float32,float32->float32"}
        want = softmax(jnp.asarray(rounded(rounded(X) @ rounded(W)), jnp.float32))
        np.testing.assert_allclose(run(X, W), want, rtol=1e-5)

    def test_a_log_softmax_by_hand_is_float32_throughout(self):
        def log_softmax(s):
            s = s - lax.stop_gradient(s.max(-1, keepdims=True))
            return s - jnp.log(jnp.exp(s).sum(-1, keepdims=True))

        run = BF16.autocast(lambda x, w: log_softmax(x @ w))
        assert set(dtypes(run, X, W, of="sub")) == {"float32,float32->float32"}

    @pytest.mark.parametrize("square", [jnp.square, lambda x: x * x, lambda x: x**2])
    def test_a_norm_by_hand_does_not_overflow(self, square):
        def rms(x):
            return x * lax.rsqrt(square(x).mean(-1, keepdims=True) + 1e-6)

        out = FP16.autocast(lambda x, w: rms(x @ w))(jnp.full((1, 2), 150.0), jnp.ones((2, 3)))
        np.testing.assert_allclose(out, 1.0, rtol=1e-3)

    def test_a_squared_error_does_not_overflow(self):
        out = FP16.autocast(lambda x, w, y: jnp.mean((x @ w - y) ** 2))(
            jnp.full((1, 2), 150.0), jnp.ones((2, 3)), jnp.zeros((1, 3))
        )
        assert float(out) == 90000.0

    def test_the_residual_stream_stays_low(self):
        """A norm reads it, but so does the next addition: that one norm wants float32 does not widen the stream."""

        def block(h, w):
            return h + jax.nn.standardize(h) @ w

        def model(x, w):
            h = x @ w
            return block(block(h, w[:6]), w[:6])

        assert given(model, X, W) == "bfloat16"

    def test_known_functions_are_computed_again_instead_of_kept(self):
        def kept(recompute):
            run = BF16.autocast(lambda x, w: jax.nn.gelu(jax.nn.softmax(x @ w) @ w.T), recompute=recompute)
            _, vjp = jax.vjp(run, X, W)
            return sum(x.nbytes for x in jax.tree.leaves(vjp))

        assert kept(True) < 0.7 * kept(False)


def test_two_calls_of_one_activation_keep_each_its_own_dtype():
    def run(x, w):
        low = x @ w
        activations = (jax.nn.gelu, jax.nn.silu, jax.nn.sigmoid, jax.nn.elu, jax.nn.softplus)
        return [activation(each) for activation in activations for each in (x, low, x)]

    got = [out.dtype.name for out in jax.eval_shape(untouched(BF16, run), jnp.ones((4, 8)), jnp.ones((8, 8)))]
    assert got == ["float32", "bfloat16", "float32"] * 4 + ["float32"] * 3
