"""torchtitan: its own parser and config take our values, and its own sharding does what they say."""

import dataclasses

import pytest
from hypothesis import given, settings

from precision import InteropError, LossScale, Rule
from precision.interop import convert, read
from precision.interop.base import differing_fields
from precision.interop.torchtitan import arguments, from_torchtitan, to_torchtitan
from precision.names import PRESETS
from precision.testing import run_ranks
from tests.interop import workers_torchtitan as workers
from tests.interop.strategies import any_policies

EXPRESSIBLE = ("float32", "mixed_bfloat16")


@pytest.mark.parametrize("preset", EXPRESSIBLE)
def test_nothing_is_lost_of_what_it_has(preset):
    export = to_torchtitan(PRESETS[preset], strict=True)
    assert from_torchtitan(export.config).policy == PRESETS[preset]
    assert export.config["training"]["mixed_precision_reduce"] == "float32"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"compute_dtype": "float16"}, "compute_dtype", "it will be bfloat16"),
        ({"param_dtype": "float16"}, "param_dtype", "it will be float32"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype", "float32 only"),
        ({"output_dtype": "bfloat16"}, "output_dtype", "leaves in float32"),
        ({"rules": (Rule(module="head", dtype="float32"),)}, "rules", "same dtypes"),
        ({"loss_scale": LossScale(mode="dynamic")}, "loss_scale", "scales no loss"),
        ({"emulate": True}, "emulate", "itself"),
    ],
)
def test_what_it_has_not_is_said(change, field, words):
    export = to_torchtitan(PRESETS["mixed_bfloat16"].with_(**change))
    assert {entry.field for entry in export.lost} == {field} and words in export.lost[0].instead


def test_a_job_config_keeps_what_is_not_about_precision(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[job]\ndump_folder = "out"\n[training]\nmixed_precision_param = "bfloat16"\nsteps = 10\n')
    found = read(path)
    assert found.source == "torchtitan" and found.policy == PRESETS["mixed_bfloat16"]
    assert found.rest == {"job": {"dump_folder": "out"}, "training": {"steps": 10}}
    assert sum("own default" in note for note in found.notes) == 2
    config = convert(path, "torchtitan").config
    assert config["job"] == {"dump_folder": "out"} and config["training"]["steps"] == 10
    assert config["training"]["dtype"] == "float32"  # now written
    with pytest.raises(InteropError, match="bfloat16, float32"):
        from_torchtitan({"training": {"mixed_precision_param": "float16"}})


def options(args):
    """What torchtitan's command line makes of options for its ``[training]``, by its own parser and its own class."""
    import tyro
    from torchtitan.config import TrainingConfig
    from torchtitan.config.manager import custom_registry

    job = dataclasses.make_dataclass(
        "Job", [("training", TrainingConfig, dataclasses.field(default_factory=TrainingConfig))]
    )
    return tyro.cli(job, args=args, registry=custom_registry).training


@pytest.mark.parametrize("preset", PRESETS)
def test_its_command_line_takes_our_options(preset, capsys):
    export = to_torchtitan(PRESETS[preset])
    found = options(arguments(export.config))
    assert {key: getattr(found, key) for key in export.config["training"]} == export.config["training"]
    with pytest.raises(SystemExit):
        options(["--training.mixed-precision-param=float16"])
    with pytest.raises(SystemExit):
        options(["--training.mixed-precision-reduce=bfloat16"])
    said = capsys.readouterr()
    assert "bfloat16" in said.out + said.err


def test_its_defaults_are_those_assumed_on_reading():
    from torchtitan.config import TrainingConfig

    plain = TrainingConfig()
    assert from_torchtitan({"training": {}}).policy == from_torchtitan(
        {"training": {key: getattr(plain, key) for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}}
    ).policy  # fmt: skip


def test_its_own_sharding_does_what_the_policy_says():
    presets = ("float32", "mixed_bfloat16", "bfloat16")
    (found,) = run_ranks(workers.work, 1, ([to_torchtitan(PRESETS[name]).config for name in presets],), timeout=100)
    for name, one in zip(presets, found, strict=True):
        policy = PRESETS[name]
        assert one["stored"] == one["grad"] == policy.param_dtype and one["linear"] == policy.compute_dtype
        assert one["loss"] == "float32"  # also for bfloat16, whose output_dtype is said to be lost
        assert one["logits"] == one["norm"] == policy.compute_dtype  # every op of a block, as the note says
    assert "output_dtype" in {entry.field for entry in to_torchtitan(PRESETS["bfloat16"]).lost}


@settings(max_examples=60, deadline=None)
@given(policy=any_policies())
def test_what_is_not_said_to_be_lost_comes_back(policy):
    export = to_torchtitan(policy)
    lost = {entry.field for entry in export.lost}
    differ = differing_fields(policy, from_torchtitan(export.config).policy)
    assert {field for field in differ if field not in lost and field.partition(".")[0] not in lost} == set()
