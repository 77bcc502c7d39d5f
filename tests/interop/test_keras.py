"""Keras's JSON: the real Keras loads what is exported, and its layers compute and store as the policy says."""

import json

import keras
import numpy as np
import pytest

import precision
from precision import InteropError, LossScale, PrecisionPolicy
from precision.interop.keras import from_keras, layer_patterns, to_keras
from precision.names import PRESETS

RULES = [
    {"module": "head", "dtype": "float32"},
    {"module": "**.norm*", "dtype": "float32"},
    {"module": "block_?", "dtype": "float16"},
]


def loaded(config):
    """What Keras makes of a config, through text; both of its ways in agree."""
    config = json.loads(json.dumps(config))
    policy = keras.dtype_policies.deserialize(config)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(policy) and again.name == policy.name
    return policy


@pytest.mark.parametrize("preset", PRESETS)
def test_keras_loads_it_and_layers_have_its_dtypes(preset):
    policy = PRESETS[preset]
    found = loaded(to_keras(policy).config)
    assert found == precision.bind(policy, backend="keras").keras_policy()
    layer = keras.layers.Dense(2, dtype=found)
    out = layer(np.ones((1, 3), "float32"))
    assert (layer.compute_dtype, layer.variable_dtype) == (policy.compute_dtype, policy.param_dtype)
    assert layer.kernel.dtype == policy.param_dtype and out.dtype == policy.compute_dtype
    assert keras.dtype_policies.serialize(found) == to_keras(policy).config  # nothing that Keras adds


def small_model(policy):
    """A functional model with a sequential one in it; the layers by path."""
    make = lambda layer, name, **k: layer(name=name, dtype=policy, **k)  # noqa: E731
    inputs = keras.Input((4,))
    x = make(keras.layers.Dense, "block_1", units=4)(inputs)
    x = make(keras.layers.LayerNormalization, "norm_1")(x)
    inner = keras.Sequential(
        [make(keras.layers.Dense, "block_12", units=4), make(keras.layers.BatchNormalization, "norm_2")], name="inner"
    )
    x = inner(x)
    x = make(keras.layers.Dense, "head", units=1)(x)
    model = keras.Model(inputs, x)
    layers = [layer for layer in model._flatten_layers() if layer.weights and not isinstance(layer, keras.Model)]
    return model, {layer.path: layer for layer in layers}


@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_rules_reach_the_layers_as_the_policy_says(preset):
    policy = PRESETS[preset].with_(rules=RULES)
    found = loaded(to_keras(policy).config)
    assert isinstance(found, keras.dtype_policies.DTypePolicyMap)
    own = precision.bind(policy, backend="keras").keras_policy()
    assert dict(found.items()) == dict(own.items()) and found.default_policy == own.default_policy
    model, layers = small_model(found)
    _, theirs = small_model(own)
    assert {"block_1", "norm_1", "head"} <= set(layers) and any(path.endswith("norm_2") for path in layers)
    for path, layer in layers.items():
        # a sequential model's own name is in front of its layers' paths
        rule = policy.rule_for(path) or policy.rule_for(path.partition("/")[2])
        compute, param = (rule.dtype,) * 2 if rule else (policy.compute_dtype, policy.param_dtype)
        assert (layer.compute_dtype, layer.variable_dtype) == (compute, param), path
        assert layer.compute_dtype == theirs[path].compute_dtype
    assert layers["head"].compute_dtype == "float32" and layers["block_1"].compute_dtype == "float16"
    assert model(np.ones((2, 4), "float32")).dtype == "float32"


def test_every_path_matches_one_key_at_most():
    # Keras refuses a path that two keys match
    policy = PrecisionPolicy(
        rules=[{"module": "**", "dtype": "float32"}, {"module": "head", "dtype": "bfloat16"}, *RULES[1:]]
    )
    found = loaded(to_keras(policy).config)
    for path in ("head", "model/head", "a/b/norm", "block_1/x", "", "head/"):
        assert found[path].name == "float32", path  # the first rule wins everywhere


def test_a_key_is_a_whole_path_in_keras_and_a_rule_covers_what_is_inside():
    bfloat16 = keras.DTypePolicy("bfloat16")
    theirs = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("float32"), {"decoder": bfloat16, "encoder/.*": bfloat16}
    )
    assert theirs["decoder/dense"].name == "float32"  # no prefixes
    found = from_keras(keras.dtype_policies.serialize(theirs))
    assert [rule.module for rule in found.policy.rules] == ["decoder", "encoder.**"]
    assert any("'decoder' is that layer alone" in note for note in found.notes)
    back = loaded(to_keras(found.policy).config)
    for path in ("decoder", "encoder/dense", "encoder/a/b"):
        assert back[path].name == theirs[path].name == "bfloat16"
    assert back["encoder"].name == theirs["encoder"].name == "float32"


def test_expressions_that_are_no_patterns_are_kept():
    theirs = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_bfloat16"),
        {
            "layer_[0-9]+/.*": keras.DTypePolicy("float32"),
            "head": keras.DTypePolicy("float32"),
            "x": keras.DTypePolicy("mixed_float16"),
        },
    )
    config = keras.dtype_policies.serialize(theirs)
    found = from_keras(config)
    assert [rule.module for rule in found.policy.rules] == ["head"]
    assert set(found.rest["config"]["policy_map"]) == {"layer_[0-9]+/.*", "x"}
    assert any("layer_[0-9]+/.*" in note for note in found.notes)
    back = loaded(to_keras(found.policy, base=found.rest).config)
    for path in ("layer_12/dense", "head", "x", "other"):
        assert back[path].name == theirs[path].name, path
    # without rules of ours they are still a map
    alone = loaded(to_keras(PRESETS["mixed_bfloat16"], base=found.rest).config)
    assert alone["layer_12/dense"].name == "float32" and alone["head"].name == "mixed_bfloat16"


def test_a_lookahead_that_rules_out_something_else_is_not_taken_for_ours():
    (_, _), (second, dtype) = layer_patterns(PrecisionPolicy(rules=RULES[:2]))
    foreign = {
        "class_name": "DTypePolicyMap",
        "config": {"default_policy": "float32", "policy_map": {second: "bfloat16"}},
    }
    assert dtype == "float32" and from_keras(foreign).policy.rules == ()
    assert from_keras(foreign).rest["config"]["policy_map"] == {second: "bfloat16"}


def test_keras_scales_the_loss_by_the_policys_name_alone():
    def optimizer_under(policy):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model.optimizer

    scale = LossScale(mode="dynamic", initial=2.0**15)
    plain = PRESETS["mixed_float16"].with_(loss_scale=scale, output_dtype="float16")
    ruled = plain.with_(rules=RULES[:1])
    try:
        keras.config.set_dtype_policy(loaded(to_keras(plain).config))
        made = optimizer_under(plain)
        assert isinstance(made, keras.optimizers.LossScaleOptimizer)
        assert (made.initial_scale, made.dynamic_growth_steps) == (scale.initial, scale.growth_interval)
        assert to_keras(plain).lost == ()
        keras.config.set_dtype_policy(loaded(to_keras(ruled).config))
        assert not isinstance(optimizer_under(ruled), keras.optimizers.LossScaleOptimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    (lost,) = to_keras(ruled).lost
    assert lost.field == "loss_scale" and "a map's name is another" in lost.instead
    assert {entry.field for entry in to_keras(PRESETS["mixed_float16"]).lost} == {"output_dtype", "loss_scale.initial"}


def test_a_map_without_a_default_loses_its_names_in_keras():
    # Keras writes name = null for every key then; read as the global policy, as Keras does
    theirs = keras.dtype_policies.DTypePolicyMap(policy_map={"head": keras.DTypePolicy("bfloat16")})
    config = keras.dtype_policies.serialize(theirs)
    assert config["config"]["policy_map"]["head"]["config"] == {"name": None}
    found = from_keras(config)
    assert found.policy == PrecisionPolicy() and "head" in found.rest["config"]["policy_map"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (keras.dtype_policies.serialize(keras.dtype_policies.get("int8_from_bfloat16")), "quantizes"),
        ({"class_name": "DTypePolicy", "config": {"name": "float64"}}, "name must be one of"),
        ({"class_name": "DTypePolicy", "config": []}, "table"),
        ({"class_name": "DTypePolicyMap", "config": {"policy_map": 3}}, "table"),
        ({"class_name": "Dense", "config": {}}, "DTypePolicy or DTypePolicyMap"),
        ("mixed_float16", "DTypePolicy or DTypePolicyMap"),
    ],
)
def test_what_is_no_dtype_policy_is_refused(config, says):
    with pytest.raises(InteropError, match=says):
        from_keras(config)


def test_old_names_are_read():
    found = from_keras({"module": "keras", "class_name": "FloatDTypePolicy", "config": {"name": "mixed_bfloat16"}})
    assert found.policy.compute_dtype == "bfloat16" and any("old name" in note for note in found.notes)
    assert keras.dtype_policies.deserialize(
        {"module": "keras", "class_name": "FloatDTypePolicy", "config": {"name": "mixed_bfloat16"}, "registered_name": None}
    ).compute_dtype == "bfloat16"  # fmt: skip
