"""DeepSpeed: its own parser takes our configs, and its engine does what they say; what it does silently stands beside."""

import math

import pytest
from hypothesis import given, settings

from precision import InteropError, LossScale, NonFiniteGradientsError
from precision.interop import convert, diff, read
from precision.interop.base import differing_fields
from precision.interop.deepspeed import from_deepspeed, to_deepspeed
from precision.names import PRESETS
from precision.testing import run_ranks
from tests.interop import workers_deepspeed as workers
from tests.interop.strategies import any_policies
from tests.plain_rule import PlainRule  # written apart from the library's rule

STAGES = (0, 1, 2)
each_stage = pytest.mark.parametrize("stage", STAGES)
MIXED = PRESETS["mixed_float16"]
INF = math.inf


def dynamic(**settings):
    return LossScale(mode="dynamic", **{"minimum": 1.0, **settings})


# ---- the config alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"zero_stage": s, "low_params": low} for s in range(4) for low in (False, True)], ids=str
)
@settings(max_examples=60, deadline=None)
@given(policy=any_policies())
def test_what_is_not_said_to_be_lost_comes_back_at_every_stage(options, policy):
    export = to_deepspeed(policy, **options)
    found = from_deepspeed(export.config)
    lost = {entry.field for entry in export.lost}
    differ = differing_fields(policy, found.policy)
    assert {field for field in differ if field not in lost and field.partition(".")[0] not in lost} == set()
    again = to_deepspeed(found.policy, base=found.rest)
    assert again.config == export.config
    assert again.config["zero_optimization"] == {"stage": options["zero_stage"]}


def test_float32_parameters_are_autocast_and_low_ones_are_not():
    mixed, low = to_deepspeed(PRESETS["mixed_bfloat16"]).config, to_deepspeed(PRESETS["bfloat16"]).config
    assert mixed["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert not mixed["bf16"]["enabled"] and not mixed["fp16"]["enabled"]
    assert low["bf16"]["enabled"] and not low["torch_autocast"]["enabled"]
    option = to_deepspeed(PRESETS["mixed_bfloat16"], low_params=True)
    assert option.config["bf16"]["enabled"] and "param_dtype" in {entry.field for entry in option.lost}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_switch_is_written_and_the_autocast_dtype_always(preset):
    config = to_deepspeed(PRESETS[preset]).config
    assert config["torch_autocast"]["dtype"] in ("float32", "float16", "bfloat16")
    assert {"fp16", "bf16", "communication_data_type", "gradient_clipping", "data_types"} <= set(config)
    assert not (config["fp16"]["enabled"] and config["bf16"]["enabled"])
    if config["bf16"]["enabled"]:
        assert config["bf16"]["check_grad_overflow"] is False  # loss_scale.mode none: no check


def test_a_loss_scale_is_written_in_deepspeeds_fields():
    scale = dynamic(initial=2.0**12, growth_interval=500, hysteresis=2, hysteresis_refill="on_finite_step")
    export = to_deepspeed(PRESETS["float16"].with_(loss_scale=scale), zero_stage=1)
    assert {key: export.config["fp16"][key] for key in export.config["fp16"] if key not in ("enabled", "auto_cast")} == {
        "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2,
        "consecutive_hysteresis": True, "min_loss_scale": 1, "fp16_master_weights_and_grads": False,
    }  # fmt: skip
    assert not [entry for entry in export.lost if entry.field.startswith("loss_scale")]
    assert any("one step late" in note for note in export.notes)
    assert from_deepspeed(export.config).policy.loss_scale == scale


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"initial": 1000.0}, "initial", "1024"),
        ({"minimum": 2.0**-24}, "minimum", "it will be 1"),
        ({"growth_factor": 1.5}, "growth_factor", "fixed at 2"),
        ({"backoff_factor": 0.25}, "backoff_factor", "fixed at 0.5"),
        ({"maximum": 2.0**20}, "maximum", "without bound"),
        ({"hysteresis": 2}, "hysteresis", "stage 0"),
        ({"max_consecutive_skips": 5}, "max_consecutive_skips", "goes on skipping"),
    ],
)
def test_what_the_loss_scale_loses_is_said(settings, field, words):
    export = to_deepspeed(PRESETS["float16"].with_(loss_scale=dynamic(**settings)))
    found = {entry.field: entry.instead for entry in export.lost if entry.field.startswith("loss_scale")}
    assert set(found) == {f"loss_scale.{field}"} and words in found[f"loss_scale.{field}"]


def test_a_base_is_kept_and_gradient_clipping_with_it():
    base = {"train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": True},
            "bf16": {"enabled": True, "immediate_grad_update": True}, "fp16": {"enabled": False, "type": "fp16"}}  # fmt: skip
    config = convert(base, "deepspeed").config
    assert config["gradient_clipping"] == 0.5 and config["zero_optimization"] == base["zero_optimization"]
    assert config["bf16"]["immediate_grad_update"] is True and config["fp16"]["type"] == "fp16"
    assert config["bf16"]["check_grad_overflow"] is True  # DeepSpeed's default, now written
    assert to_deepspeed(MIXED).config["gradient_clipping"] == 0.0
    assert to_deepspeed(MIXED, base={"zero_optimization": {"stage": 3}}).config["zero_optimization"] == {"stage": 3}
    assert "zero_optimization" not in to_deepspeed(MIXED).config


def test_the_stage_decides_what_hysteresis_means():
    config = {"fp16": {"enabled": True, "hysteresis": 4}}
    assert from_deepspeed(config).policy.loss_scale.hysteresis == 1
    assert any("hysteresis 4 is ignored" in note for note in from_deepspeed(config).notes)
    assert from_deepspeed({**config, "zero_optimization": {"stage": 1}}).policy.loss_scale.hysteresis == 4
    with pytest.raises(InteropError, match="stage = 1"):
        to_deepspeed(MIXED, base={"zero_optimization": {"stage": 1}}, zero_stage=2)


def test_old_and_automatic_spellings_are_read_with_a_note():
    old = read({"bfloat16": {"enabled": True, "check_grad_overflow": False}})
    assert old.policy == PRESETS["bfloat16"].with_(reduce_dtype="bfloat16") and any("old name" in n for n in old.notes)
    auto = read({"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}})
    assert auto.policy == PRESETS["float32"] and sum("'auto'" in note for note in auto.notes) == 2
    checked = read({"bf16": {"enabled": True}}).policy
    assert checked.loss_scale == LossScale(mode="static", initial=1.0)  # DeepSpeed skips steps that are not finite
    assert {d.field for d in diff("bfloat16", {"bf16": {"enabled": True}})} >= {"loss_scale.mode", "reduce_dtype"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "exclude"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "fp32, fp16, bf16"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "hysteresis"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "loss_scale"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0.5}}, "min_loss_scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": 15.5}}, "initial_scale_power"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "stage 0"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "param_dtype"),
        ({"fp16": {"enabled": "yes"}}, "true or false"),
        ({"fp16": {}, "zero_optimization": {"stage": 7}}, "0, 1, 2 or 3"),
    ],
)
def test_what_deepspeed_would_refuse_or_leave_open_is_an_error(config, words):
    with pytest.raises(InteropError, match=words):
        from_deepspeed(config)


# ---- the real one ------------------------------------------------------------------------------------------------

SCALES = [
    dynamic(initial=2.0**8, growth_interval=3),
    dynamic(initial=2.0**8, growth_interval=1),
    dynamic(initial=2.0**20, growth_interval=5, hysteresis=2),
    dynamic(initial=2.0**20, growth_interval=4, hysteresis=3, hysteresis_refill="on_finite_step"),
    LossScale(mode="static", initial=128.0),
]
PATTERNS = [
    (scale, stage, [True] * 12 if seed == 0 else workers.random_flags(seed))
    for scale in SCALES
    for stage in (0, 1)
    for seed in range(13)
]
CONFIGS = [(name, stage) for name in PRESETS for stage in STAGES]


def written(name, stage):
    return to_deepspeed(
        PRESETS[name].with_(loss_scale=SCALES[2]) if name == "float16" else PRESETS[name], zero_stage=stage
    )


def fields(scale, stage):
    return to_deepspeed(PRESETS["float16"].with_(loss_scale=scale), zero_stage=stage).config["fp16"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    configs = [written(name, stage).config for name, stage in CONFIGS]
    patterns = [(fields(scale, stage), stage, flags) for scale, stage, flags in PATTERNS]
    args = (configs, patterns, str(tmp_path_factory.mktemp("deepspeed")))
    return run_ranks(workers.one, 1, args, env=workers.ENV, timeout=240)[0]


def test_its_own_parser_reads_what_was_written(seen):
    assert len(seen["parsed"]) == len(CONFIGS)
    for (name, stage), found in zip(CONFIGS, seen["parsed"], strict=True):
        config, policy = written(name, stage).config, PRESETS[name]
        assert found["fp16"]["enabled"] == (name == "float16") and found["bf16"]["enabled"] == (name == "bfloat16")
        assert found["autocast"] == name.startswith("mixed") and found["dtype"] == policy.compute_dtype
        assert found["listed"] == [] and found["communication"] == "float32" and found["clip"] == 0.0
        assert found["stage"] == stage and found["param"] == config["data_types"]["param_dtype"]
        for section in ("fp16", "bf16"):
            assert config[section].items() <= found[section].items()
            if config[section]["enabled"]:
                assert set(config[section]) == set(found[section])  # every field of the mode is written


def test_its_defaults_are_those_the_pages_name(seen):
    assert seen["default clip"] == 1.0 and seen["default check"] is True and seen["auto"] is False
    assert seen["both"][0] == "AssertionError" and "initial_scale_power" in seen["half power"][1]
    assert "min_loss_scale" in seen["half minimum"][1]
    assert seen["accumulate"][0] == "NotImplementedError"  # float32 accumulation of low gradients at stage 0


def late(scale, stage, flags):
    """DeepSpeed's trajectory by the plain rule: the count of finite steps starts one lower; no hysteresis at stage 0."""
    one_less = scale if stage or scale.mode == "static" else LossScale(**{**scale.effective(), "hysteresis": 1})
    rule = PlainRule(one_less)
    rule.good -= 1
    scales = [rule.scale]
    for finite in flags:
        if stage and not finite and rule.scale == scale.minimum and rule.left <= 1 and scale.mode == "dynamic":
            return scales, True
        rule.step(finite)
        if not finite:
            rule.good -= 1
        scales.append(rule.scale)
    return scales, False


def test_its_scale_is_ours_one_step_late(seen):
    ended = 0
    for (scale, stage, flags), found in zip(PATTERNS, seen["trajectories"], strict=True):
        expected, stops = late(scale, stage, flags)
        assert found[: len(expected)] == expected
        if stops:
            assert "cannot decrease scale anymore" in found[-1] and len(found) == len(expected) + 1
        ended += stops
        if all(flags) and scale.mode == "dynamic":
            plain = PlainRule(scale)
            ours = [plain.scale, *(plain.step(True)[0] for _ in flags)]
            assert found[1:] == ours[:-1] and found != ours
    assert ended > 0  # under ZeRO, an overflow at the minimum ends the run


def test_the_step_on_which_its_scale_grows_is_halved(seen):
    for before, after, update in seen["grown"]:
        assert update == before / after  # 1.0 for the gradient 1.0, unless the scale has just grown
    assert any(before != after for before, after, _ in seen["grown"])


@each_stage
def test_autocast_and_low_parameters_compute_and_keep_what_the_policy_says(seen, stage):
    mixed, low = seen["ours bf16", stage], seen["ours low bf16", stage]
    for step in (*mixed["steps"], *low["steps"]):
        assert step["linear"] == "bfloat16" and step["loss"] == "float32" and step["update"] == -1.0
    assert mixed["param"] == "float32" and low["param"] == "bfloat16"
    assert (
        seen["native low bf16", stage]["masters"] == ["float32"]
        and seen["native low bf16", stage]["param"] == "bfloat16"
    )
    assert {step["norm"] for step in low["steps"]} == {"bfloat16"}  # every op runs low
    assert [t for t in low["told"] if "accumulated in bfloat16" in t] if stage == 0 else low["told"] == []


@each_stage
def test_float16_autocast_keeps_our_loss_scale_at_every_stage(seen, stage):
    factors = [1.0, 1.0, INF, 0.01]  # at 65536 a gradient of 1 overflows in float16
    rule = PlainRule(MIXED.loss_scale)
    for step, factor in zip(seen["ours f16", stage]["steps"], factors, strict=True):
        assert step["linear"] == "float16" and step["scale"] == rule.scale
        overflow = not factor * rule.scale <= 65504
        assert step["update"] == pytest.approx(0.0 if overflow else -factor, rel=1e-3)
        rule.step(not overflow)
        assert step["next"] == rule.scale
    assert seen["ours f16", stage]["told"] == [] and rule.scale == 2.0**14
    assert seen["ours f16", stage]["steps"][-1]["skipped"] == (
        2 if stage else 0
    )  # stage 0: DeepSpeed does not see the skip


@pytest.mark.parametrize("stage", [1, 2])
def test_natively_the_scale_never_backs_off_under_zero(seen, stage):
    for number, step in enumerate(seen["native f16", stage]["steps"], 1):
        assert step["scale"] == step["next"] == 65536.0 and step["update"] == 0.0 and step["skipped"] == number
    assert [step["next"] for step in seen["native f16", 0]["steps"]] == [2.0**15] * 3  # stage 0 does back off
    assert "loss_scale" in {entry.field for entry in to_deepspeed(MIXED, zero_stage=stage).lost}
    assert "loss_scale" not in {entry.field for entry in to_deepspeed(MIXED, zero_stage=0).lost}


@pytest.mark.parametrize("stage", [1, 2])
def test_natively_scaled_gradients_are_clipped_under_zero(seen, stage):
    (step,), (ours,) = seen["native f16 clipped", stage]["steps"], seen["ours f16 clipped", stage]["steps"]
    assert step["update"] == pytest.approx(-0.25 / 65536, rel=1e-3)  # norm 1 for 16 scaled gradients, then unscaled
    assert ours["update"] == pytest.approx(-0.01, rel=1e-3)  # norm 0.04: nothing to clip


@each_stage
def test_every_setting_of_our_scale_holds_in_its_engine(seen, stage):
    rule = PlainRule(LossScale(mode="dynamic", initial=4.0, growth_interval=2, maximum=16.0))
    for step in seen["ours quick", stage]["steps"]:
        assert step["scale"] == rule.scale and step["update"] == pytest.approx(-0.01, rel=1e-3)  # also where it grows
        rule.step(True)
        assert step["next"] == rule.scale
    assert rule.scale == 16.0
    name, message = seen["counted", stage]
    assert (
        name == NonFiniteGradientsError.__name__
        and "max_consecutive_skips = 2" in message
        and "8 -> 2 -> 0.5" in message
    )


@each_stage
def test_check_grad_overflow_skips_and_is_ignored_at_stage_0(seen, stage):
    assert [s["applied"] for s in seen["native low bf16", stage]["steps"]] == [True, False, True]
    updates = [s["update"] for s in seen["check off", stage]["steps"]]
    assert updates == [-1.0, 0.0, -1.0] if stage == 0 else math.isnan(updates[1]) or math.isinf(updates[1])
    notes = to_deepspeed(PRESETS["bfloat16"].with_(reduce_dtype="bfloat16"), zero_stage=stage).notes
    assert any(("whatever check_grad_overflow says" in note) == (stage == 0) for note in notes if "check_grad" in note)


def test_gradients_of_listed_modules_are_reduced_low_under_zero(seen):
    usual, none = seen["listed"]  # with communication_data_type fp32
    assert usual == ["bfloat16", "float32"] and none == ["float32"]
    assert from_deepspeed({"torch_autocast": {"enabled": True, "dtype": "bf16"}, "communication_data_type": "fp32",
                           "zero_optimization": {"stage": 1}}).policy.reduce_dtype == "bfloat16"  # fmt: skip


def test_without_a_dtype_autocasting_goes_unsaid(seen):
    (step,) = seen["no dtype"]["steps"]
    assert step["linear"] == "bfloat16" and step["scale"] is None  # on this device; float16 on CUDA, unscaled as well


def test_float16_parameters_are_refused_on_the_cpu_with_a_way_out(seen):
    assert seen["fp16 mode"] == ("ValueError", "Type fp16 is not supported on your device.")
    for key in ("ours fp16 mode", "ours fp16 option"):
        assert seen[key][0] == "UnsupportedError" and "bfloat16" in seen[key][1] and "torch_autocast" in seen[key][1]


def test_what_it_would_do_silently_is_said_before_training(seen):
    assert seen["low model native"] == "bfloat16"  # natively, a policy of float32 parameters trains low ones
    assert seen["low model"][0] == "MasterWeightsError" and "linear.weight is bfloat16" in seen["low model"][1]
    assert seen["earlier engine"][0] == "UnsupportedError" and "process of its own" in seen["earlier engine"][1]
    assert seen["strict"][0] == "InteropError" and "reduce_dtype" in seen["strict"][1]
    assert seen["not scaled"][0] == "PolicyError"


def test_at_stage_0_adam_has_taken_a_step_before_training(seen):
    assert seen["adam"] == {0: (1, 0.5), 1: (0, 1.0), 2: (0, 1.0)}  # count, and a weight of 1 under a decay of 0.5


def test_a_float16_loss_is_scaled_in_float32(seen):
    assert seen["half loss"] == (math.inf, 131072.0)  # natively, then ours


@each_stage
@pytest.mark.parametrize("kind", ["bf16", "low bf16", "f16", "float32", "low option"])
def test_a_tiny_gpt_trains(seen, stage, kind):
    found = seen["gpt", stage][kind]
    assert found["losses"] == sorted(found["losses"], reverse=True) and found["losses"][-1] < found["losses"][0] - 0.3
    assert found["params"] == (["bfloat16"] if kind.startswith("low") else ["float32"])
    exact = seen["gpt", stage]["float32"]["losses"]
    if not kind.startswith("low"):
        assert found["losses"] == pytest.approx(exact, rel=2e-3)


@each_stage
def test_the_loss_scale_is_saved_with_the_engine(seen, stage):
    found = seen["checkpoint", stage]
    assert found["saved"]["skipped"] == 1 and found["saved"]["scale"] == 128.0 and found["fresh"]["scale"] == 256.0
    assert found["loaded"] == (found["fresh"] if stage == 0 else found["saved"])  # at stage 0 DeepSpeed saves none
    assert found["by_hand"] == found["saved"]


def test_two_ranks_skip_and_scale_alike():
    first, second = run_ranks(workers.two, 2, env=workers.ENV, timeout=240)
    assert first == second
    for stage in STAGES:
        scales, weight = first[stage]
        assert scales == [(2.0**16, 2.0**16), (2.0**16, 2.0**15), (2.0**15, 2.0**15)]
        assert weight[0][0] == pytest.approx(-0.02, rel=1e-3)  # the second step was skipped by both
