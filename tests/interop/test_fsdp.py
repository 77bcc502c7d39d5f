"""FSDP: the arguments go into PyTorch's own classes, and sharded models compute, reduce and keep what the policy says."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from precision import InteropError, PrecisionPolicy, Rule
from precision.interop.base import differing_fields
from precision.interop.fsdp import from_fsdp, to_fsdp
from precision.names import PRESETS
from precision.testing import run_ranks
from tests.interop import workers_fsdp as workers
from tests.interop.strategies import any_policies

CLASSES = {1: MixedPrecision, 2: MixedPrecisionPolicy}
each_version = pytest.mark.parametrize("version", CLASSES)
MIXED = PRESETS["mixed_bfloat16"]


@each_version
@settings(max_examples=80, deadline=None)
@given(policy=any_policies())
def test_what_is_not_said_to_be_lost_comes_back(version, policy):
    export = to_fsdp(policy, version=version)
    found = from_fsdp(export.config).policy
    lost = {entry.field for entry in export.lost}
    differ = differing_fields(policy, found)
    assert {field for field in differ if field not in lost and field.partition(".")[0] not in lost} == set()
    assert to_fsdp(found, version=version).config == export.config
    assert found.module_rules == policy.module_rules


@each_version
@pytest.mark.parametrize("preset", PRESETS)
def test_every_argument_is_written_for_the_real_class(version, preset):
    policy = PRESETS[preset].with_(rules=(Rule(module="head", dtype="float32"),))
    config = to_fsdp(policy, version=version).config
    public = {field.name for field in dataclasses.fields(CLASSES[version]) if not field.name.startswith("_")}
    for values in (config["mixed_precision"], config["modules"][0]["mixed_precision"]):
        assert set(values) == public
    made = CLASSES[version](**workers.arguments(config["mixed_precision"]))
    assert made.param_dtype == getattr(torch, policy.compute_dtype)
    assert made.reduce_dtype == getattr(torch, policy.reduce_dtype)
    head = CLASSES[version](**workers.arguments(config["modules"][0]["mixed_precision"]))
    assert head.param_dtype == torch.float32


def test_its_defaults_are_those_assumed_on_reading():
    for version, cls in CLASSES.items():
        plain = cls(param_dtype=torch.bfloat16)
        assert plain.reduce_dtype is None  # then the compute dtype
        found = from_fsdp({"fsdp_version": version, "mixed_precision": {"param_dtype": "bfloat16"}})
        assert found.policy.reduce_dtype == "bfloat16" and found.policy.output_dtype == "bfloat16"
        assert found.policy.param_dtype == "float32" and any("reduce_dtype is not said" in note for note in found.notes)
    assert MixedPrecisionPolicy().cast_forward_inputs is True and MixedPrecision().cast_forward_inputs is False


def test_what_a_policy_does_not_decide_stays_with_the_base():
    base = {"fsdp_version": 1, "mixed_precision": {"buffer_dtype": "bf16", "keep_low_precision_grads": True}, "mine": 1}
    found = from_fsdp(base)
    assert found.rest == {"mixed_precision": {"buffer_dtype": "bfloat16", "keep_low_precision_grads": True}, "mine": 1}
    assert any("BatchNorm" in note for note in found.notes)
    config = to_fsdp(MIXED, base=base).config
    assert config["fsdp_version"] == 1 and config["mine"] == 1
    assert config["mixed_precision"]["buffer_dtype"] == "bf16" and config["mixed_precision"]["keep_low_precision_grads"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fsdp_version": 3, "mixed_precision": {}}, "1 or 2"),
        ({"fsdp_version": 2, "mixed_precision": {"buffer_dtype": "float32"}}, "belongs to FSDP1"),
        ({"fsdp_version": 1, "mixed_precision": {"output_dtype": "float32"}}, "belongs to FSDP2"),
        ({"fsdp_version": 2, "mixed_precision": {"param_dtype": "float9"}}, "unknown dtype"),
        ({"fsdp_version": 2, "mixed_precision": {}, "modules": [{"module": ""}]}, "pattern"),
        ({"fsdp_version": 2, "mixed_precision": {}, "modules": 3}, "list"),
    ],
)
def test_what_fsdp_would_not_take_is_an_error(config, words):
    with pytest.raises(InteropError, match=words):
        from_fsdp(config)
    with pytest.raises(InteropError, match="version = 2"):
        to_fsdp(MIXED, base={"fsdp_version": 1}, version=2)


RULED = {1: Rule(module="head", dtype="float32"), 2: Rule(module="norm", dtype="float32")}
KINDS = {
    "mixed": MIXED, "low": PRESETS["bfloat16"], "reduce low": MIXED.with_(reduce_dtype="bfloat16"),
    "float16": PRESETS["mixed_float16"], "float32": PRESETS["float32"],
}  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    cases = {(version, kind): policy for version in CLASSES for kind, policy in KINDS.items()}
    cases.update({(version, "ruled"): MIXED.with_(rules=(RULED[version],)) for version in CLASSES})
    configs = [(to_fsdp(policy, version=key[0]).config, policy) for key, policy in cases.items()]
    first, second = run_ranks(workers.work, 2, (configs,), timeout=120)
    assert [one["mean"] for one in first] == [one["mean"] for one in second]
    return dict(zip(cases, first, strict=True))


@each_version
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_does_what_the_policy_says(seen, version, kind):
    policy, found = KINDS[kind], seen[version, kind]
    assert found["stored"] == [policy.param_dtype] == found["grads"]
    assert found["body"] == found["weight"] == found["norm"] == policy.compute_dtype  # norm too, as the note says
    assert found["output"] == (policy.output_dtype if version == 2 else policy.compute_dtype)
    assert ("output_dtype" in {entry.field for entry in to_fsdp(policy, version=version).lost}) == (
        version == 1 and policy.output_dtype != policy.compute_dtype
    )
    assert found["losses"] == sorted(found["losses"], reverse=True) and found["losses"][-1] < found["losses"][0] / 10
    low = policy.reduce_dtype == "bfloat16" or policy.param_dtype == "bfloat16"  # rounded on the way, or when stored
    assert found["mean"] == (128.0 if low else 128.5)
    assert found["table"] == (
        "bfloat16" if policy.param_dtype == "bfloat16" else "float32"
    )  # buffers: as the model has them


def test_rules_become_modules_with_a_mixed_precision_of_their_own(seen):
    assert seen[2, "ruled"]["norm_weight"] == "float32" and seen[2, "mixed"]["norm_weight"] == "bfloat16"
    assert seen[2, "ruled"]["norm"] == "bfloat16"  # its result, cast for the next module
    assert seen[1, "ruled"]["output"] == "float32" and seen[1, "mixed"]["output"] == "bfloat16"
    for version in CLASSES:
        assert seen[version, "ruled"]["body"] == "bfloat16"
        assert any(
            "with a rule" in note for note in to_fsdp(MIXED.with_(rules=(RULED[version],)), version=version).notes
        )
    family = to_fsdp(PrecisionPolicy(rules=(Rule(family="norm", dtype="float32"),)))
    assert [entry.field for entry in family.lost] == ["rules"] and family.config["modules"] == []
