"""Loaded files are data: whatever is in them, there is a policy or an error of ours, at once, and nothing is run."""

import os
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision import PrecisionError, Rule
from precision.interop import convert, diff, list_targets, read
from tests.interop.hostile import CRAFTED, mutated, valid_files

FILES = valid_files()
SECONDS = 10  # for a file that takes a fraction of one, on a machine that does other things too


def outcome(path, tool=None):
    """What comes of a file: a policy that every tool's config can be written from, or the error, which is ours."""
    begun = time.monotonic()
    try:
        found = read(path, tool)
        for target in list_targets():
            target.export(found.policy)
        result = found
    except PrecisionError as error:
        assert str(error).strip() and len(str(error)) < 20_000
        result = error
    assert time.monotonic() - begun < SECONDS
    return result


VALID = {"a BOM in front": "deepspeed", "many keys in a map": "keras", "a pattern that backtracks": "precision"}
"""Those that are odd, but say something, and whose."""


@pytest.mark.parametrize("name", CRAFTED)
def test_files_that_people_have_made_up(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, content = CRAFTED[name]
    path = tmp_path / f"config.{kind}"
    path.write_bytes(content)
    result = outcome(path)
    for target in list_targets() if len(content) < 20_000 else ():
        outcome(path, target.name)
    if name in VALID:
        assert result.source == VALID[name]
    else:
        assert isinstance(result, PrecisionError), result
        assert str(path) in str(result) or "Keras" in str(result)
    assert os.listdir(tmp_path) == [path.name]  # nothing was run


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_mutations_of_valid_files(seed, tmp_path):
    kind, content = mutated(random.Random(seed), FILES)
    path = tmp_path / f"config.{kind}"
    path.write_bytes(content)
    outcome(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), kind=st.sampled_from(["toml", "json", "yaml"]), data=st.data())
def test_any_bytes(content, kind, data, tmp_path):
    path = tmp_path / f"config.{kind}"
    path.write_bytes(content)
    outcome(path, data.draw(st.sampled_from([None, "precision", *(target.name for target in list_targets())])))


def test_valid_files_are_read():
    for kind, content in FILES:
        assert content.decode() and kind in ("toml", "json", "yaml")
    assert len(FILES) > 100


@pytest.mark.parametrize("kind", ["toml", "json", "yaml"])
def test_what_is_no_regular_file_is_not_waited_for(kind, tmp_path):
    os.mkfifo(tmp_path / f"pipe.{kind}")
    (tmp_path / f"folder.{kind}").mkdir()
    for name in (f"pipe.{kind}", f"folder.{kind}", f"missing.{kind}", f"{'x' * 300}.{kind}", f"nul\x00.{kind}"):
        assert isinstance(outcome(tmp_path / name), PrecisionError)


def test_values_that_never_were_a_file():
    deep, loop = {}, {"precision": "16-mixed"}
    part = deep
    for _ in range(5000):
        part["trainer"] = part = {}
    loop["trainer"] = loop
    for values in (deep, loop, {"fp16": {"enabled": True, "loss_scale": 10**5000}}, {1: 2}, {"precision": object()}):
        for target in (None, *(target.name for target in list_targets())):
            try:
                read(values, target)
            except PrecisionError as error:
                assert str(error)
    for call in (convert, diff):
        with pytest.raises(PrecisionError):
            call({"nothing": "known"}, "keras")


def test_a_rules_pattern_takes_no_time_however_many_wildcards_it_has():
    begun = time.monotonic()
    rule = Rule(module="**a" * 200 + "*b*" * 50, dtype="float32")
    assert not rule.matches("a" * 150 + ".bc" * 30)
    assert rule.matches("a" * 200 + "b" * 50)
    assert time.monotonic() - begun < SECONDS


PIECES = st.lists(st.sampled_from(["a", "b", ".", "?", "*", "**", "a."]), min_size=1, max_size=5).map("".join)


@settings(max_examples=300, deadline=None)
@given(pattern=PIECES, path=st.text("ab.", max_size=8))
def test_the_two_ways_to_match_a_pattern_agree(pattern, path):
    many = pattern.replace("**", "\0").replace("\0", "**" * 6)  # says the same, with more wildcards
    if pattern.strip("."):
        few, walked = Rule(module=pattern, dtype="float32"), Rule(module=many, dtype="float32")
        assert few.matches(path) == walked.matches(path)
