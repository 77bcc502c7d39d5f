"""Config files: exact round trips, and errors with file, line and key."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from precision import ConfigError, LossScale, PolicyError, PrecisionPolicy, Rule
from precision.config import json_schema, policy_from_dict, policy_from_text, policy_to_text, resolve_policy
from precision.names import PRESETS

LOW = st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
PATTERN = st.text(min_size=1).filter(lambda t: t.strip("./ "))


@st.composite
def loss_scales(draw):
    mode = draw(st.sampled_from(["none", "static", "dynamic"]))
    skips = draw(st.none() | st.integers(1, 99))
    if mode == "none":
        return LossScale()
    if mode == "static":
        return LossScale(mode=mode, initial=draw(st.floats(2.0**-40, 1e30)), max_consecutive_skips=skips)
    low, high = sorted(draw(st.tuples(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30))))
    return LossScale(
        mode=mode,
        minimum=low,
        maximum=high,
        initial=draw(st.floats(low, high)),
        growth_factor=draw(st.floats(1.0, 1e6, exclude_min=True)),
        backoff_factor=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        growth_interval=draw(st.integers(1, 10**6)),
        hysteresis=draw(st.integers(1, 9)),
        hysteresis_refill=draw(st.sampled_from(["on_growth", "on_finite_step"])),
        max_consecutive_skips=skips,
    )


@st.composite
def policies(draw):
    rules = {}
    for _ in range(draw(st.integers(0, 4))):
        module = draw(st.none() | PATTERN)
        family = None if module else draw(st.sampled_from(["norm", "softmax", "matmul"]))
        rules.setdefault((module, family), Rule(module=module, family=family, dtype=draw(LOW)))
    fields = {f: draw(LOW) for f in ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")}
    return PrecisionPolicy(
        **fields, rules=tuple(rules.values()), loss_scale=draw(loss_scales()), emulate=draw(st.booleans())
    )


@pytest.mark.parametrize("kind", ["toml", "json", "yaml"])
@given(policies())
def test_round_trip_is_exact(kind, policy):
    text = policy_to_text(policy, kind)
    assert policy_from_text(text, kind) == policy
    assert policy_from_dict(policy.to_dict()) == policy


@given(policies())
def test_what_is_written_fits_the_schema(policy):
    jsonschema.validate(json.loads(policy_to_text(policy, "json")), json_schema(), jsonschema.Draft202012Validator)


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml", ".yml", ".TOML"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"precision{suffix}"
    policy = PRESETS["mixed_float16"].with_(rules=[Rule(module="a", dtype="float32")])
    policy.to_file(path)
    assert PrecisionPolicy.from_file(path) == resolve_policy(str(path)) == resolve_policy(path) == policy


def test_the_published_schema_is_current():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    published = Path(__file__).parents[2] / "docs" / "precision.schema.json"
    assert json.loads(published.read_text()) == schema


@pytest.mark.parametrize(
    "bad",
    [
        {"compute_dtyp": "float16"}, {"loss_scale": {"growth_interval": 0}}, {"loss_scale": {"backoff_factor": 1.0}},
        {"rules": [{"dtype": "float32"}]}, {"rules": [{"module": "a", "family": "norm", "dtype": "float32"}]},
        {"loss_scale": {"mode": "dynamik"}}, {"emulate": 1}, {"rules": [{"family": "nrom", "dtype": "float32"}]},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_reading_refuses(bad):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, json_schema(), jsonschema.Draft202012Validator)
    with pytest.raises(PolicyError):
        policy_from_dict(bad)


def test_preset_with_exceptions():
    policy = policy_from_text('preset = "16-mixed"\n[loss_scale]\nmode = "dynamic"\ninitial = 8.0\n', "toml")
    assert policy == PRESETS["mixed_float16"].with_(loss_scale=LossScale(mode="dynamic", initial=8.0))


BAD = [
    ("toml", "compute_dtype = 'bf16'\ncompute_dtyp = 'float16'\n", [":2: compute_dtyp: unknown key", "'compute_dtype'"]),
    ("toml", "\n[loss_scale]\nmode = 'static'\ngrowth_factor = 3.0\n", [":4: loss_scale.growth_factor: has no effect"]),
    ("toml", "[[rules]]\nmodule = 'a'\ndtype = 'f32'\n[[rules]]\nmodule = 'b'\ndtype = 'int8'\n", [":6: rules.1.dtype"]),
    ("toml", "rules = 3\n", [":1: rules: must be a list"]),
    ("toml", "loss_scale = 'dynamic'\n", [":1: loss_scale: must be a table"]),
    ("toml", "preset = 'mixed'\n", [":1: preset: unknown policy 'mixed'"]),
    ("toml", "preset = true\n", [":1: preset: a policy name is a string"]),
    ("toml", "a = [\n", ["not valid TOML"]),
    ("toml", "emulate = false\nemulate = true\n", ["not valid TOML", "line 2"]),
    ("toml", "[loss_scale]\nmode = 'dynamic'\ninitial = nan\n", [":3: loss_scale.initial"]),
    ("json", '{"loss_scale": {"mode": "dynamic",\n "initial": true}}', [":2: loss_scale.initial: Input should be a valid number"]),
    ("json", '{"emulate": false,\n "emulate": true}', [":2: emulate: given twice"]),
    ("json", '{"emulate": false,\n', [":2: not valid JSON"]),
    ("json", "[1]", ["table of settings, not a list"]),
    ("json", "[" * 100000, ["nested too deeply"]),
    ("yaml", "loss_scale:\n  mode: dynamic\n  hysteresis: 0\n", [":3: loss_scale.hysteresis"]),
    ("yaml", "emulate: false\nemulate: true\n", [":2: emulate: given twice"]),
    ("yaml", "rules:\n- module: a\n  dtype: [x\n", ["not valid YAML", ":"]),
    ("yaml", "preset: no\n", [":1: preset: a policy name is a string", "not bool"]),
    ("yaml", "!!python/object:os.system {}\n", ["not valid YAML"]),
    ("yaml", "1: 2\n", ["table of settings"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "parts"), BAD)
def test_bad_files_name_file_line_and_key(tmp_path, kind, text, parts):
    path = tmp_path / f"bad.{kind}"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        PrecisionPolicy.from_file(path)
    assert str(path) in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_two_faults_are_both_told():
    with pytest.raises(ConfigError) as error:
        policy_from_text("[loss_scale]\nmode = 'dynamic'\ninitial = -1.0\nhysteresis = 0\n", "toml", "f.toml")
    assert "f.toml:3: loss_scale.initial" in str(error.value) and "f.toml:4: loss_scale.hysteresis" in str(error.value)


def test_faults_in_a_table_do_not_hide_those_beside_it():
    with pytest.raises(ConfigError) as error:
        policy_from_text("compute_dtyp = 'f16'\n[loss_scale]\nmode = 'dynamic'\ninitial = -1.0\n", "toml", "f.toml")
    assert "f.toml:1: compute_dtyp: unknown key" in str(error.value) and "f.toml:4: loss_scale.initial" in str(
        error.value
    )


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        PrecisionPolicy.from_file(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"unknown ending '\.ini'"):
        PrecisionPolicy.from_file(tmp_path / "a.ini")
    with pytest.raises(ConfigError, match="cannot be written"):
        PrecisionPolicy().to_file(tmp_path / "no" / "a.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        PrecisionPolicy.from_file(tmp_path / "bytes.toml")


def test_empty_files_are_the_default_policy():
    for kind in ("toml", "yaml"):
        assert policy_from_text("", kind) == PrecisionPolicy()


def test_yaml_is_plain_data():
    assert yaml.safe_load(policy_to_text(PRESETS["mixed_float16"], "yaml"))["compute_dtype"] == "float16"
