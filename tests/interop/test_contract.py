"""What holds for every target: nothing is lost silently, on the way out or in, and what is there comes back."""

import copy
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from precision import InteropError, PrecisionError
from precision.interop import convert, list_targets, read
from precision.interop.base import differing_fields, plain_field
from precision.interop.convert import to_text
from precision.names import PRESETS
from tests.interop.strategies import any_policies

TARGETS = {target.name: target for target in list_targets()}
each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keys_of(config, prefix=""):
    """The dotted keys of a config's leaves; a list's items count as one."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from keys_of(value, f"{prefix}{key}.")
    elif prefix:
        yield prefix[:-1]


@each_target
@few
@given(policy=any_policies())
@example(policy=PRESETS["float32"])
@example(policy=PRESETS["mixed_float16"])
@example(policy=PRESETS["mixed_bfloat16"])
@example(policy=PRESETS["float16"])
@example(policy=PRESETS["bfloat16"])
def test_what_is_not_said_to_be_lost_comes_back(target, policy):
    export = target.export(policy)
    config = copy.deepcopy(export.config)
    assert json.loads(json.dumps(config)) == config
    found = target.read(config)
    assert found.source == target.name and config == export.config  # reading changes nothing
    lost = {entry.field for entry in export.lost}
    differ = differing_fields(policy, found.policy)
    assert {field for field in differ if field not in lost and field.partition(".")[0] not in lost} == set()
    if not export.lost:
        assert found.policy == policy
    for entry in export.lost:
        assert entry.instead and entry.value == plain_field(policy, entry.field)
    again = target.export(found.policy)
    assert again.config == export.config  # the config means one thing


@each_target
@few
@given(policy=any_policies())
def test_strict_refuses_exactly_what_loses_something(target, policy):
    export = target.export(policy)
    if export.lost:
        with pytest.raises(InteropError) as caught:
            target.export(policy, strict=True)
        assert caught.value.lost == export.lost
        assert all(entry.field in str(caught.value) and entry.instead in str(caught.value) for entry in export.lost)
    else:
        assert target.export(policy, strict=True) == export


@each_target
@pytest.mark.parametrize("preset", PRESETS)
def test_a_config_is_recognised_as_its_own_tools_only(target, preset):
    config = target.export(PRESETS[preset]).config
    assert [t.name for t in TARGETS.values() if t.recognises(config)] == [target.name]
    if isinstance(config, dict):
        assert read(config).source == target.name


@each_target
@pytest.mark.parametrize("preset", PRESETS)
def test_every_key_it_writes_is_in_its_table(target, preset):
    config = target.export(PRESETS[preset]).config
    table = {field.theirs for field in target.fields}
    written = set(keys_of(config)) if isinstance(config, dict) else set()
    unknown = {key for key in written if not any(key == row or key.startswith(f"{row}.") for row in table)}
    assert unknown == set()
    assert all(field.how for field in target.fields)


@each_target
def test_what_it_does_not_know_is_kept_unchanged(target):
    config = target.export(PRESETS["mixed_bfloat16"]).config
    if not isinstance(config, dict):
        return
    other = {"train_batch_size_of_mine": 8, "nested_of_mine": {"a": [1, 2], "b": None}}
    found = target.read({**config, **other})
    assert found.policy == target.read(config).policy
    assert {key: found.rest[key] for key in other} == other
    base = {**config, **other}
    back = target.export(PRESETS["mixed_float16"], base=base).config
    assert {key: back[key] for key in other} == other
    assert base == {**config, **other}  # the base was not touched
    assert target.read(back).policy == target.read(target.export(PRESETS["mixed_float16"]).config).policy
    converted = convert({**config, **other}, target.name, tool=target.name)
    assert converted.config == {**config, **other}
    told = convert({**config, **other}, "precision", tool=target.name).notes
    assert any("train_batch_size_of_mine" in note and "nested_of_mine" in note for note in told)


@each_target
@pytest.mark.parametrize("preset", PRESETS)
def test_its_files_read_back(target, preset, tmp_path):
    export = target.export(PRESETS[preset])
    for kind in target.kinds:
        if kind == "text":
            assert to_text(export, kind).rstrip("\n") == export.config
            continue
        path = tmp_path / f"{target.name}.{kind}"
        path.write_text(to_text(export, kind))
        found = read(path)
        assert found.source == target.name
        assert found.policy == target.read(export.config).policy


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "bf16", "no"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@each_target
@few
@given(data=st.data())
def test_a_value_of_any_kind_at_any_key_is_read_or_is_our_error(target, data):
    config = copy.deepcopy(target.export(data.draw(any_policies())).config)
    if isinstance(config, dict):
        for _ in range(data.draw(st.integers(1, 3))):
            part = config
            while isinstance(part, dict) and part:
                key = data.draw(
                    st.sampled_from(sorted(part)) | st.sampled_from([f.theirs.split(".")[-1] for f in target.fields])
                )
                if not isinstance(part.get(key), dict) or data.draw(st.booleans()):
                    part[key] = data.draw(ODD)
                    break
                part = part[key]
    else:
        config = data.draw(ODD)
    try:
        found = target.read(config)
    except PrecisionError as error:
        assert str(error)
    else:
        assert found.source == target.name
        target.export(found.policy)
