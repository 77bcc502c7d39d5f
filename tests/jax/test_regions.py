"""``mp.cast_boundary``, ``mp.island`` and ``mp.op``: what a function sees and gives. ``mp.autocast`` has a folder of its own."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import precision
from precision import FAMILIES, PolicyError, PrecisionPolicy, PrecisionWarning, Rule, UnsupportedError, decide


def bind(*rules, **fields):
    return precision.bind(PrecisionPolicy(**{"compute_dtype": "bfloat16", **fields}, rules=rules), backend="jax")


def seen_by(mp, fun_of=lambda mp, f: mp.cast_boundary(f)):
    seen = {}

    def fun(*args, **kwargs):
        pairs = jax.tree_util.tree_leaves_with_path((args, kwargs))
        seen.update(
            {jax.tree_util.keystr(p, simple=True, separator="."): str(getattr(x, "dtype", x)) for p, x in pairs}
        )
        return args[0]

    return seen, fun_of(mp, fun)


class TestCastBoundary:
    def test_casts_arguments_in_and_results_out(self):
        seen, fun = seen_by(bind())
        out = fun({"w": jnp.ones(2), "n": jnp.arange(2)}, jnp.ones(1), True, flag=None, scale=jnp.ones(1))
        assert seen == {
            "0.0.n": "int32", "0.0.w": "bfloat16", "0.1": "bfloat16", "0.2": "True", "1.scale": "bfloat16",
        }  # fmt: skip
        assert (out["w"].dtype, out["n"].dtype) == (jnp.float32, jnp.int32)

    def test_rules_hold_within_an_argument(self):
        seen, fun = seen_by(bind(Rule(module="**norm*", dtype="float32")))
        fun({"layer": {"norm1": {"scale": jnp.ones(1)}, "fc": {"kernel": jnp.ones(1)}}}, jnp.ones(1))
        assert seen == {
            "0.0.layer.fc.kernel": "bfloat16", "0.0.layer.norm1.scale": "float32", "0.1": "bfloat16",
        }  # fmt: skip

    @pytest.mark.parametrize("keep", [("stats",), (1,), "stats", 1, -1])
    def test_kept_arguments_stay_however_they_are_passed(self, keep):
        mp = bind()

        @mp.cast_boundary(keep=keep)
        def model(x, stats):
            return {"x": str(x.dtype), "stats": str(stats.dtype)}

        want = {"x": "bfloat16", "stats": "float32"}
        assert model(jnp.ones(1), jnp.ones(1)) == want
        assert model(jnp.ones(1), stats=jnp.ones(1)) == want

    def test_keeping_an_argument_that_is_not_there_is_an_error(self):
        with pytest.raises(PolicyError, match="keep names no argument 'stat'; there are x, stats"):
            bind().cast_boundary(lambda x, stats: x, keep=("stat",))

    def test_keeping_a_position_that_is_not_there_is_an_error(self):
        for position in (2, -3):
            with pytest.raises(PolicyError, match=rf"keep names no argument {position}; there are a, b"):
                bind().cast_boundary(lambda a, b: a, keep=position)

    def test_kept_arguments_beside_a_variable_number_of_others(self):
        seen = []

        def fun(first, *rest, stats=None):
            seen.append([x.dtype.name for x in (first, *rest, stats)])
            return first

        low = jnp.dtype(bind().compute_dtype).name
        one = jnp.ones(1)
        bind().cast_boundary(fun, keep="stats")(one, one, one, stats=one)
        bind().cast_boundary(fun, keep=-1)(one, one, one, stats=one)
        assert seen == [[low, low, low, "float32"], [low, low, "float32", low]]

    def test_gradients_reach_float32_parameters_in_float32(self):
        mp = bind()

        @mp.cast_boundary
        def model(params, x):
            return x @ params["w"]

        w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2)), jnp.float32)
        x = jnp.ones((4, 3))
        grads = jax.grad(lambda p: model(p, x).sum())({"w": w})
        assert grads["w"].dtype == jnp.float32
        np.testing.assert_array_equal(grads["w"], np.full((3, 2), 4.0))

    def test_composes_with_jit_vmap_remat_and_scan(self):
        mp = bind()

        @mp.cast_boundary
        def cell(w, h):
            return jnp.tanh(h @ w)

        w, h = jnp.eye(2) / 2, jnp.ones((3, 2))
        want = cell(w, h)
        np.testing.assert_array_equal(want, np.float32(jnp.tanh(jnp.bfloat16(0.5))))
        # Compiled, XLA may leave out a rounding to bfloat16 whose result is float32: one bfloat16 spacing, 2**-9.
        close = functools.partial(np.testing.assert_allclose, desired=want, atol=2.0**-9)
        close(jax.jit(cell)(w, h))
        close(jax.vmap(cell, in_axes=(None, 0))(w, h))
        close(jax.checkpoint(cell)(w, h))
        out, _ = jax.lax.scan(lambda h, _: (cell(w, h), None), h, length=1)
        close(out)
        assert out.dtype == jnp.float32, "the carry keeps its dtype"

    def test_keeps_name_and_docs(self):
        @bind().cast_boundary
        def model(x):
            """Doc."""
            return x

        assert (model.__name__, model.__doc__) == ("model", "Doc.")

    def test_a_module_that_is_called_brings_its_parameters(self):
        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        mp = bind()
        x = jnp.ones(3)
        want = mp.cast_to_compute(model)(mp.cast_to_compute(x))
        assert want.dtype == jnp.bfloat16
        out = mp.cast_boundary(model)(x)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, want.astype(jnp.float32))
        grads = eqx.filter_grad(lambda m: mp.cast_boundary(m)(x).sum())(model)
        assert grads.weight.dtype == jnp.float32

    def test_an_nnx_module_with_state_is_refused_since_its_updates_would_be_lost(self):
        model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        mp = bind()
        for act in (
            lambda: mp.cast_boundary(lambda m, x: m(x))(model, jnp.ones((3, 2))),
            lambda: mp.cast_boundary(model)(jnp.ones((3, 2))),
            lambda: mp.island()(lambda m, x: m(x))(model, jnp.ones((3, 2))),
            lambda: mp.op("norm")(lambda m, x: m(x))(model, jnp.ones((3, 2))),
            lambda: mp.value_and_grad(lambda m, x: m(x).sum(), cast_argnums=0)(model, jnp.ones((3, 2))),
        ):
            with pytest.raises(UnsupportedError, match="BatchNorm holds BatchStat: a cast runs a copy.*nnx.split"):
                act()
        kept = mp.cast_boundary(lambda m, x: m(x), keep=("m",))(model, jnp.ones((3, 2)))
        assert kept.dtype == jnp.float32
        assert float(model.mean[...][0]) != 0.0, "kept, it is the module itself that runs"
        plain = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        assert mp.cast_boundary(lambda m, x: m(x))(plain, jnp.ones((1, 2))).dtype == jnp.float32

    def test_says_once_that_family_rules_do_not_reach_in(self):
        mp = bind(Rule(family="softmax", dtype="bfloat16"))
        with pytest.warns(PrecisionWarning, match=r"families \(softmax\) reach only functions marked with mp.op"):
            mp.cast_boundary(lambda x: x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mp.cast_boundary(lambda x: x)

    def test_rules_that_match_no_argument_are_reported(self):
        mp = bind(Rule(module="**nrom*", dtype="float32"))
        with pytest.warns(PrecisionWarning, match=r"'\*\*nrom\*' matched nothing in the parameters"):
            mp.cast_boundary(lambda p, x: x)({"norm": {"scale": jnp.ones(1)}}, jnp.ones(1))


class TestIsland:
    def test_inside_autocast(self):
        mp = bind()

        @mp.island("float32")
        def entropy(x):
            assert x.dtype == jnp.float32
            return -(x * jnp.log(x)).sum()

        @mp.cast_boundary
        def model(x):
            assert x.dtype == jnp.bfloat16
            return entropy(x)

        assert float(model(jnp.asarray([0.5, 0.5]))) == pytest.approx(np.log(2), rel=1e-6)

    def test_without_brackets_and_in_another_dtype(self):
        mp = bind()
        assert mp.island(lambda x: x)(jnp.ones(1, jnp.float16)).dtype == jnp.float32
        for dtype in ("bf16", jnp.bfloat16, jnp.dtype("bfloat16")):
            assert mp.island(dtype)(lambda x: x)(jnp.ones(1)).dtype == jnp.bfloat16

    def test_float64_integers_and_keywords(self):
        with jax.enable_x64(True):
            out = bind().island()(lambda **k: k)(
                a=[jnp.ones(1, jnp.float64)], b=jnp.arange(1), c=jnp.ones(1, jnp.float16)
            )
        assert [out["a"][0].dtype, out["b"].dtype, out["c"].dtype] == [jnp.float64, jnp.int64, jnp.float32]

    def test_unknown_dtype(self):
        with pytest.raises(PolicyError, match="unknown dtype 'float31'"):
            bind().island("float31")


class TestOp:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(
        "dtypes", [("float32",), ("bfloat16", "float32"), ("float16", "bfloat16"), ("bfloat16", "int32")]
    )
    def test_inputs_are_cast_as_the_one_table_decides(self, family, dtypes):
        mp = bind(Rule(family="loss", dtype="float16"))
        seen = []

        @mp.op(family)
        def fun(first, *, rest):
            seen.extend(str(x.dtype) for x in (first, *rest))
            return first

        fun(jnp.ones(1, dtypes[0]), rest=[jnp.ones(1, d) for d in dtypes[1:]])
        assert tuple(seen) == decide(mp.policy, family, dtypes)

    def test_float64_leaves_the_op_alone(self):
        with jax.enable_x64(True):
            out = bind().op("matmul")(lambda a, b: (a.dtype, b.dtype))(
                jnp.ones(1, jnp.float64), jnp.ones(1, jnp.float32)
            )
        assert out == (jnp.float64, jnp.float32)

    def test_python_values_stay(self):
        out = bind().op("softmax")(lambda x, axis, t: (x.dtype, axis, t))(jnp.ones(1, jnp.bfloat16), -1, 0.5)
        assert out == (jnp.float32, -1, 0.5)

    def test_the_result_comes_as_the_function_gives_it(self):
        assert bind().op("matmul")(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype == jnp.bfloat16

    def test_a_rule_for_the_family_wins(self):
        mp = bind(Rule(family="matmul", dtype="float32"))
        assert mp.op("matmul")(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2), jnp.bfloat16)).dtype == jnp.float32

    def test_gradients_flow_in_float32(self):
        grad = jax.grad(lambda w: bind().op("matmul")(jnp.dot)(w, w).astype(jnp.float32))(jnp.ones(3))
        assert grad.dtype == jnp.float32
        assert grad.tolist() == [2.0, 2.0, 2.0]

    def test_unknown_family(self):
        with pytest.raises(PolicyError, match="unknown op family 'matmull'.*Did you mean 'matmul'"):
            bind().op("matmull")


@pytest.mark.parametrize("region", ["autocast", "cast_boundary", "island", "op"])
def test_there_is_no_context_manager(region):
    mp = bind()
    made = mp.op("norm") if region == "op" else getattr(mp, region)()
    with pytest.raises(UnsupportedError, match=rf"mp.{region}.*is no context manager in JAX"), made:
        pass
    with pytest.raises(PolicyError, match="decorates a function, not int"):
        made(3)
