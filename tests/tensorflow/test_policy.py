"""The policy as Keras's own: names, rules as a map, what layers then do, and saving."""

import json
import string
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import precision
from precision import LossScale, PrecisionPolicy, PrecisionWarning, Rule, UnsupportedError
from tests.tensorflow.helpers import bind, unscaled

HALF = {"float32": ("float32", "float32"), "mixed_bfloat16": ("float32", "bfloat16"),
        "mixed_float16": ("float32", "float16"), "bfloat16": ("bfloat16", "bfloat16"), "float16": ("float16", "float16")}  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_presets_become_the_policy_of_that_name(name):
    policy = precision.bind(name, backend="keras").keras_policy()
    assert type(policy) is keras.DTypePolicy
    assert (policy.name, (policy.variable_dtype, policy.compute_dtype)) == (name, HALF[name])


def test_a_pair_keras_has_no_name_for_is_an_error():
    mp = precision.bind(PrecisionPolicy(param_dtype="bfloat16", compute_dtype="float32"), backend="keras")
    with pytest.raises(UnsupportedError, match=r"no dtype policy with param_dtype bfloat16 and compute_dtype float32"):
        mp.keras_policy()


def _build(mp):
    with mp.scope():
        inner = keras.Sequential(
            [keras.layers.Dense(3, name="proj"), keras.layers.LayerNormalization(name="norm")], name="block"
        )
        x = keras.Input((5, 4))
        h = inner(x)
        h = keras.layers.MultiHeadAttention(2, 2, name="attn")(h, h)
        h = keras.layers.Dense(4, name="mid")(h)
        return keras.Model(x, keras.layers.Dense(2, name="head")(h))


def test_rules_cover_a_layer_and_what_is_inside_and_the_first_wins():
    mp = unscaled("mixed_bfloat16", rules=(
        Rule(module="attn.query", dtype="bfloat16"), Rule(module="attn", dtype="float32"),
        Rule(module="**norm*", dtype="float32"), Rule(module="head", dtype="float32"),
    ))  # fmt: skip
    model = _build(mp)
    dtypes = {
        layer.path: (layer.variable_dtype, layer.compute_dtype) for layer in model._flatten_layers() if layer.path
    }
    low, full, pure = ("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")
    assert dtypes["block/proj"] == low
    assert dtypes["block/norm"] == full
    assert dtypes["attn"] == full
    assert dtypes["attn/key"] == full
    assert dtypes["attn/query"] == pure
    assert dtypes["mid"] == low
    assert dtypes["head"] == full
    assert {v.dtype for v in model.get_layer("attn").query_dense.variables} == {"bfloat16"}
    assert model(np.ones((1, 5, 4), np.float32)).dtype == tf.float32


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_one_pattern_reaches_the_same_layer_in_each_kind_of_model(kind):
    mp = unscaled("mixed_bfloat16", rules=(Rule(module="head", dtype="float32"),))
    with mp.scope():
        body, head = keras.layers.Dense(3, name="body"), keras.layers.Dense(2, name="head")
        if kind == "sequential":
            model = keras.Sequential([keras.Input((4,)), body, head])
        elif kind == "functional":
            x = keras.Input((4,))
            model = keras.Model(x, head(body(x)))
        else:
            model = type("Mine", (keras.Model,), {"call": lambda self, x: self.b(self.a(x))})()
            model.a, model.b = body, head
    model(np.ones((1, 4), np.float32))
    assert (body.compute_dtype, head.compute_dtype) == ("bfloat16", "float32")


NAMES = st.text("ab1_", min_size=1, max_size=3)
PARTS = st.one_of(NAMES, st.sampled_from(["*", "**", "?", "a*", "**norm*", "*_1", "a.b"]))


@given(
    st.lists(st.lists(PARTS, min_size=1, max_size=3).map(".".join), min_size=1, max_size=4, unique=True),
    st.lists(st.one_of(NAMES, st.sampled_from(["norm", "layer_norm_1", "a"])), min_size=1, max_size=4).map("/".join),
)
def test_the_map_looks_up_what_the_rules_say(patterns, path):
    dtypes = ["float32", "bfloat16", "float16"]
    rules = tuple(Rule(module=p, dtype=dtypes[i % 3]) for i, p in enumerate(patterns))
    mp = unscaled("mixed_bfloat16", rules=rules)
    tries = [path, path.partition("/")[2]] if "/" in path else [path]
    want = next((rule.dtype for rule in rules if any(rule.matches(p) for p in tries)), "mixed_bfloat16")
    assert mp.keras_policy()[path].name == want


def test_special_characters_of_a_pattern_are_taken_literally():
    mp = unscaled("mixed_bfloat16", rules=(Rule(module="a+b(c)[d]", dtype="float32"),))
    assert mp.keras_policy()["a+b(c)[d]/inner"].name == "float32"
    assert mp.keras_policy()["aab(c)[d]"].name == "mixed_bfloat16"
    assert all(mp.keras_policy()[character].name == "mixed_bfloat16" for character in string.ascii_letters)


def test_policies_are_serialised_by_keras_itself():
    mp = unscaled(
        "mixed_bfloat16", rules=(Rule(module="**norm*", dtype="float32"), Rule(module="h?ad", dtype="float16"))
    )
    policy = mp.keras_policy()
    again = keras.dtype_policies.deserialize(json.loads(json.dumps(keras.dtype_policies.serialize(policy))))
    assert type(again) is keras.dtype_policies.DTypePolicyMap
    for path in ("x/norm_1/gamma", "head", "other"):
        assert again[path] == policy[path]
    assert again.default_policy == policy.default_policy


def test_a_saved_model_keeps_its_dtypes_and_loads_without_this_library(tmp_path):
    mp = unscaled("mixed_bfloat16", rules=(Rule(module="head", dtype="float32"),))
    model = _build(mp)
    model.save(tmp_path / "m.keras")
    code = (
        "import sys, keras\n"
        f"m = keras.models.load_model({str(tmp_path / 'm.keras')!r})\n"
        "print(m.get_layer('mid').compute_dtype, m.get_layer('head').compute_dtype, 'precision' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240).stdout
    assert out.split() == ["bfloat16", "float32", "False"]


NORMS = {
    "batch": lambda: keras.layers.BatchNormalization(epsilon=1e-3), "layer": lambda: keras.layers.LayerNormalization(epsilon=1e-3),
    "group": lambda: keras.layers.GroupNormalization(2, epsilon=1e-3), "rms": lambda: keras.layers.RMSNormalization(epsilon=1e-3),
}  # fmt: skip


@pytest.mark.parametrize("kind", NORMS)
def test_keras_norm_layers_normalise_in_float32_under_any_policy(kind):
    """Squares of 1000 overflow float16; the layer must not. This is why no rule is added for them."""
    x = (1000 * np.random.default_rng(0).standard_normal((8, 4)) + 300).astype(np.float16)
    with bind("mixed_float16").scope():
        layer = NORMS[kind]()
    got = np.asarray(layer(x, training=True) if kind == "batch" else layer(x)).astype(np.float64)
    wide = x.astype(np.float64)
    axis = {"batch": 0, "layer": -1, "rms": -1}.get(kind)
    if kind == "rms":
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    else:
        grouped = wide.reshape(8, 2, 2) if kind == "group" else wide
        axis = -1 if kind == "group" else axis
        want = (grouped - grouped.mean(axis, keepdims=True)) / np.sqrt(grouped.var(axis, keepdims=True) + 1e-3)
    assert np.max(np.abs(got - want.reshape(8, 4))) < 2 * 2.0**-10 * np.max(np.abs(want))
    assert {v.dtype for v in layer.variables} <= {"float32"}


def test_family_rules_are_warned_of_once():
    policy = PrecisionPolicy.from_name("mixed_bfloat16").with_(
        rules=(Rule(family="softmax", dtype="bfloat16"),), loss_scale=LossScale()
    )
    mp = precision.bind(policy, backend="tensorflow")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mp.keras_policy()
        mp.cast_boundary(tf.identity)
        mp.scope()
    assert [w.category for w in seen] == [PrecisionWarning]
    assert "op families (softmax) reach only functions marked with mp.op" in str(seen[0].message)
