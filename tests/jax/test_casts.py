"""Casts over every kind of JAX tree: what moves, what does not, and which rule a path answers to."""

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import precision
from precision import MixedFrameworksError, PrecisionPolicy, PrecisionWarning, Rule


def bound(*rules: tuple[str, str], **fields):
    policy = PrecisionPolicy(
        **{"compute_dtype": "bfloat16", **fields}, rules=tuple(Rule(module=m, dtype=d) for m, d in rules)
    )
    return precision.bind(policy, backend="jax")


def dtypes(tree):
    """Dtype names of the array leaves by key path, as JAX itself spells it."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): str(x.dtype) for p, x in pairs if hasattr(x, "dtype")}


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.layers = nnx.List([nnx.LayerNorm(4, rngs=rngs)])


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(2)(x)


class EqxNet(eqx.Module):
    norm: eqx.nn.LayerNorm
    layers: list
    rate: float
    name: str = eqx.field(static=True)

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(3)
        self.layers = [eqx.nn.Linear(3, 2, key=key), jax.nn.relu]
        self.rate = 0.5
        self.name = "net"


def test_what_is_not_floating_point_stays():
    tree = {
        "w": jnp.ones(2),
        "numpy": np.ones(2, np.float32),
        "scalar": np.float32(2),
        "half": jnp.ones(2, jnp.float16),
        "ids": jnp.arange(3),
        "mask": jnp.ones(2, bool),
        "key": jax.random.key(0),
        "raw_key": jax.random.PRNGKey(0),
        "z": jnp.ones(1, jnp.complex64),
        "np64": np.ones(2, np.float64),
        "rate": 0.1,
        "name": "adam",
        "none": None,
        "f": jnp.tanh,
    }
    out = bound().cast_to_compute(tree)
    moved = {name for name in ("w", "numpy", "scalar", "half") if out[name].dtype == jnp.bfloat16}
    assert moved == {"w", "numpy", "scalar", "half"}
    assert isinstance(out["numpy"], jax.Array)
    for name in tree.keys() - moved:
        assert out[name] is tree[name], name


def test_float64_stays_where_jax_has_it():
    with jax.enable_x64(True):
        tree = {"w": jnp.ones(2, jnp.float64), "v": jnp.ones(2, jnp.float32)}
        mp = bound()
        for cast in (mp.cast_to_param, mp.cast_to_compute, mp.cast_to_output):
            assert cast(tree)["w"].dtype == jnp.float64
        assert mp.cast_to_compute(tree)["v"].dtype == jnp.bfloat16


def test_casts_leave_no_weak_type():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    mp = bound()
    for cast in (mp.cast_to_param, mp.cast_to_compute, mp.cast_to_output):
        assert not cast(weak).weak_type
    assert isinstance(mp.cast_to_compute(2.0), float), "Python numbers stay Python numbers"
    traced = jax.eval_shape(mp.cast_to_compute, 2.0)
    assert (traced.dtype, traced.weak_type) == (jnp.bfloat16, False)


def test_a_leaf_that_needs_no_cast_is_the_same_object():
    x = jnp.ones(3, jnp.float32)
    assert bound().cast_to_param(x) is x


def test_abstract_leaves_are_cast_too():
    tree = jax.eval_shape(lambda: {"w": jnp.ones((2, 3)), "n": jnp.arange(2)})
    out = bound().cast_to_compute(tree)
    assert out["w"] == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert out["n"] == tree["n"]


def test_values_round_as_ml_dtypes_rounds():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    out = np.asarray(bound().cast_to_compute(x))
    np.testing.assert_array_equal(out.view(np.uint16), x.astype(out.dtype).view(np.uint16))


def test_linen_rules_read_paths_without_the_collection():
    variables = LinenNet().init(jax.random.key(0), jnp.ones((2, 3)))
    out = dtypes(bound(("Dense_1", "float32")).cast_to_compute(variables))
    assert out["params.Dense_0.kernel"] == "bfloat16"
    assert out["params.Dense_1.kernel"] == out["params.Dense_1.bias"] == "float32"
    assert out["params.BatchNorm_0.scale"] == "bfloat16"


def test_linen_batch_statistics_keep_their_dtype():
    variables = LinenNet().init(jax.random.key(0), jnp.ones((2, 3)))
    out = dtypes(bound().cast_to_compute(variables))
    assert {out["batch_stats.BatchNorm_0.mean"], out["batch_stats.BatchNorm_0.var"]} == {"float32"}


def test_nnx_state_and_modules():
    model = NnxNet(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    mp = bound(("layers.0.scale", "float32"), ("dense.bias", "float16"))
    for tree in (state, model):
        out = mp.cast_to_compute(tree)
        got = dtypes(out)
        assert type(out) is type(tree)
        assert got["dense.kernel.value"] == "bfloat16"
        assert got["dense.bias.value"] == "float16"
        assert got["layers.0.scale.value"] == "float32"
        assert got["layers.0.bias.value"] == "bfloat16"
        assert got["bn.mean.value"] == got["bn.var.value"] == "float32", "BatchStat keeps its dtype"
        assert got["drop.rngs.count.value"] == "uint32"
        assert got["drop.rngs.key.value"] == "key<fry>"
    assert nnx.merge(graphdef, mp.cast_to_compute(state)).dense.kernel.dtype == jnp.bfloat16
    assert mp.cast_to_compute(graphdef) == graphdef
    assert dtypes(state)["dense.kernel.value"] == "float32", "the tree given is not changed"


def test_equinox_modules_keep_functions_and_static_fields():
    net = EqxNet(jax.random.key(0))
    out = bound(("norm", "float32")).cast_to_compute(net)
    assert isinstance(out, EqxNet)
    assert out.norm.weight.dtype == jnp.float32
    assert out.layers[0].weight.dtype == jnp.bfloat16
    assert out.layers[1] is net.layers[1]
    assert (out.rate, out.name) == (0.5, "net")


def test_haiku_slashes_count_as_dots():
    def net(x):
        return hk.LayerNorm(-1, True, True)(hk.nets.MLP([4, 2])(x))

    params = hk.transform(net).init(jax.random.key(0), jnp.ones((1, 3)))
    out = bound(("**layer_norm*", "float32")).cast_to_compute(params)
    assert out["layer_norm"]["scale"].dtype == jnp.float32
    assert out["mlp/~/linear_0"]["w"].dtype == jnp.bfloat16


@jax.tree_util.register_pytree_node_class
class Flattened:
    """A node without keys: JAX numbers its children (FlattenedIndexKey)."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_every_kind_of_key_reads_as_a_dotted_path():
    tree = {"a": [{"b": jnp.ones(1)}, Flattened(jnp.ones(1), jnp.ones(1))], "c": {3: jnp.ones(1)}}
    out = bound(("a.0.b", "float32"), ("a.1.1", "float16"), ("c.3", "float32")).cast_to_compute(tree)
    got = {
        "a.0.b": out["a"][0]["b"].dtype,
        "a.1.0": out["a"][1].children[0].dtype,
        "a.1.1": out["a"][1].children[1].dtype,
        "c.3": out["c"][3].dtype,
    }
    assert {k: str(v) for k, v in got.items()} == {
        "a.0.b": "float32", "a.1.0": "bfloat16", "a.1.1": "float16", "c.3": "float32",
    }  # fmt: skip


def test_the_first_rule_wins_for_parameters_and_compute_but_not_output():
    mp = bound(("norm", "float32"), ("*", "float16"))
    tree = {"norm": {"scale": jnp.ones(1, jnp.bfloat16)}, "dense": {"kernel": jnp.ones(1)}}
    assert dtypes(mp.cast_to_compute(tree)) == {"norm.scale": "float32", "dense.kernel": "float16"}
    assert dtypes(mp.cast_to_param(tree)) == {"norm.scale": "float32", "dense.kernel": "float16"}
    assert set(dtypes(mp.cast_to_output(tree)).values()) == {"float32"}


def test_a_rule_that_matches_nothing_is_reported_once():
    mp = bound(("nrom", "float32"))
    params = {"norm": {"scale": jnp.ones(1)}}
    with pytest.warns(PrecisionWarning, match="rule 'nrom' matched nothing in the parameters: norm.scale"):
        mp.cast_to_compute(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.cast_to_compute(params)
        mp.cast_to_param(params)


def test_a_batch_is_no_parameter_tree():
    mp = bound(("norm", "float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.cast_to_compute({"image": jnp.ones(2), "label": jnp.ones(2)})
        mp.cast_to_compute(jnp.ones(2))
        mp.cast_to_compute([jnp.ones(2), {"x": jnp.ones(1)}])


def test_other_frameworks_tensors_are_refused():
    torch = pytest.importorskip("torch")
    mp = bound()
    tree = {"w": torch.ones(2)}
    for act in (
        mp.cast_to_param,
        mp.cast_to_compute,
        mp.cast_to_output,
        mp.island()(lambda t: t),
        mp.autocast(lambda t: t),
    ):
        with pytest.raises(MixedFrameworksError, match="jax backend holds a torch.Tensor.*backend='torch'"):
            act(tree)
    tree = {"w": torch.nn.Parameter(torch.ones(2))}
    with pytest.raises(MixedFrameworksError):
        mp.cast_to_compute(tree)
