"""PyTorch on several ranks: an overflow on any of them is seen by all, whatever holds the gradients."""

import math

import pytest

from precision.testing import run_ranks
from tests.distributed.forked_torch import launches

TWO = [
    "shards_of_one_model", "partial_gradients", "neutral_scaler", "where_ddp_does_not_spread_it", "accumulation",
    "reduce_dtypes", "idle_reduce_dtypes", "uneven_gradients", "diverging", "joined", "statistics", "wrapped_too_early",
    "ddp_training", "single_process_reference", "host_reads", "dtensor_loss",
]  # fmt: skip
FOUR = [
    "mesh_of_placements",
    "masters_in_ddp",
    "groups_given_and_found",
    "fsdp2_dtypes",
    "fsdp2_training",
    "tensor_parallel",
]


@pytest.fixture(scope="module")
def results():
    wanted = [("run_checks", 2, (TWO,)), ("run_checks", 4, (FOUR,))]
    return run_ranks(launches, 1, [wanted], timeout=200)[0]


@pytest.fixture(scope="module")
def two(results):
    return results[0][0]


@pytest.fixture(scope="module")
def four(results):
    return results[1][0]


SKIPPED, TAKEN = (False, 4.0), (True, 8.0)


# ---- shards, meshes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_one_ranks_shard_overflows(two, fused):
    got = two["shards_of_one_model"]
    assert [state[:2] for state in got[f"ours fused={fused}"]] == [SKIPPED] * 2
    assert [state[:2] for state in got[f"native fused={fused}"]] == [TAKEN, SKIPPED]  # GradScaler asks nobody


def test_native_sharded_grad_scaler_lets_ranks_part_ways_with_a_fused_optimizer(two):
    got = two["shards_of_one_model"]
    assert [state[:2] for state in got["sharded fused=False"]] == [SKIPPED] * 2
    assert [state[:2] for state in got["sharded fused=True"]] == [TAKEN, SKIPPED]
    assert [state[:2] for state in got["ours fused=True"]] == [SKIPPED] * 2


def test_native_sharded_grad_scaler_overflows_a_float16_loss(two):
    assert two["shards_of_one_model"]["float16 loss"] == {"sharded": False, "ours": True}


def weights_and_scale(states):
    return {(tuple(weights), scale) for weights, scale in states}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["replicated first", "sharded first", "all kinds", "all kinds, plain first"])
def test_placements_in_any_order_on_a_2d_mesh(four, order, fused):
    got = four["mesh_of_placements"][f"ours, {order}, fused={fused}"]
    ((weights, scale),) = weights_and_scale(got)
    assert set(weights) == {2.0} and scale == 4.0  # all kept their ones, and all backed off


def test_native_flag_follows_the_first_gradients_placement(four):
    got = four["mesh_of_placements"]
    for order in ("replicated first", "all kinds"):
        states = got[f"native, {order}, fused=False"]
        assert [scale for _, scale in states] == [8.0, 4.0, 8.0, 4.0]
        assert set(states[0][0]) == {1.0} and set(states[1][0]) == {2.0}  # two stepped, two did not
    assert len(weights_and_scale(got["native, sharded first, fused=False"])) == 1
    assert "mixed torch.Tensor and DTensor" in got["native, all kinds, plain first, fused=False"][0]


def test_partial_gradients_are_added_up_before_they_are_judged(two):
    got = two["partial_gradients"]
    for taken, weights, finite, values in got["overflows"]:
        assert not taken and not finite and weights == [1.0, 1.0] and values == [math.inf] * 2
    for taken, weights, finite, values in got["fits"]:  # (8 + 16) / 8 = 3, times a rate of 0.5
        assert taken and finite and weights == [-0.5, -0.5] and values == [3.0, 3.0]


# ---- DDP ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["fused=False compiled=False", "fused=True compiled=False", "fused=True compiled=True"])
def test_ddp_training_skips_what_the_plan_says(two, run):
    got, expected = two["ddp_training"][run], two["ddp_training"]["expected"]
    assert got["states"] == [expected, expected]
    assert got["weights"][0] == got["weights"][1]
    assert got["weights"][0] == pytest.approx(two["single_process_reference"], abs=1e-5)
    taken = [state["consecutive_skips"] == 0 for state in expected]
    assert 0 < sum(taken) < len(taken)
    for stats in got["stats"]:
        assert [count for _, count in stats] == [sum(taken[: i + 1]) for i in range(len(taken))]
        assert all(math.isfinite(mean) for mean, _ in stats)


@pytest.mark.parametrize("case", ["local hook", "ignored parameter"])
def test_where_ddp_does_not_spread_an_overflow(two, case):
    got = two["where_ddp_does_not_spread_it"]
    assert got[f"native, {case}"] == [TAKEN, SKIPPED]
    assert got[f"ours, {case}"] == [SKIPPED, SKIPPED]


@pytest.mark.parametrize("case", ["reduced", "no_sync"])
def test_where_ddp_spreads_it_both_agree(two, case):
    got = two["where_ddp_does_not_spread_it"]
    assert got[f"native, {case}"] == got[f"ours, {case}"] == [SKIPPED, SKIPPED]


def test_any_micro_batch_on_any_rank_skips_the_accumulated_step(two):
    got = two["accumulation"]
    good = got.pop("None")
    assert good[0] == good[1] and good[0][:2] == TAKEN
    weights = {tuple(state[2]) for states in got.values() for state in states}
    assert len(weights) == 1 and tuple(good[0][2]) not in weights
    assert len(got) == 3 and all(state[:2] == SKIPPED for states in got.values() for state in states)


def test_reduce_dtypes_through_the_communication_hook(two):
    got = two["reduce_dtypes"]
    a, b = 2.0**-11, 1 + 2.0**-10
    assert got["float32, fits"] == [(0, (a + b) / 2, True, 1.0)] * 2  # no hook, nothing lost
    assert got["bfloat16, fits"] == [(1, 0.5, True, 1.0)] * 2  # 8 bits
    assert (
        got["float16, fits"] == [(1, 0.5 + 2.0**-10, True, 1.0)] * 2
    )  # each half rounded to 11 bits, and so their sum
    assert [state[2] for state in got["bfloat16, too large"]] == [True, True]


def test_a_mean_that_overflows_in_float16_is_seen(two):
    assert two["reduce_dtypes"]["float16, too large"] == [(1, math.inf, False, 2.0**16)] * 2


def test_native_float16_hook_overflows_a_mean_that_float16_has(two):
    got = two["reduce_dtypes"]
    assert got["mean in float16, native"] == [math.inf] * 2  # narrowed, then divided
    assert got["mean in float16, ours"] == [49152.0] * 2  # divided, then narrowed


def test_communication_hooks_that_cannot_be(two):
    got = two["reduce_dtypes"]
    assert "has a communication hook already" in got["own hook"]
    assert "not Linear" in got["not DDP"]
    assert got["twice"] == (True, True, 1)
    assert "reduces in bfloat16 already" in got["another policy"]
    assert got["unchecked"].startswith("PolicyError: reduce_dtype float16 with loss_scale.mode 'none'")
    assert two["reduce_dtypes:warnings"] == []


def test_idle_reduce_dtypes_are_warned_of(two):
    plain, hooked = two["idle_reduce_dtypes:warnings"]
    assert "mp.register_comm_hook(ddp)" in plain
    assert "has a communication hook already" in hooked


def test_masters_in_ddp_are_reduced_in_the_reduce_dtype(four):
    got = four["masters_in_ddp"]
    for dtype, hooked in (("float32", ["float32"]), ("bfloat16", [])):  # bfloat16 buckets need no hook
        assert len({state[1:] for state in got[dtype]}) == 1
        dtypes, master, low, kind = got[dtype][0]
        assert dtypes == hooked and kind == "torch.float32"
        assert master == low == pytest.approx(-2 * (256 + 3) / 4, rel=2**-8)


def test_a_wrapped_model_is_not_cast_and_rules_find_its_modules(two):
    got = two["wrapped_too_early"]
    assert "Call mp.prepare on the model first" in got["cast"]
    assert got["rules"] == ["torch.float32", "torch.bfloat16"]
    assert two["wrapped_too_early:warnings"] == []


# ---- who agrees --------------------------------------------------------------------------------------------------------


def test_the_neutral_scaler_agrees_where_it_is_told_with_whom(two):
    got = two["neutral_scaler"]
    for together in ("given", "mesh given", "bound", "dtensor", "no gradients here"):
        assert got[together] == [False, False], together
    for alone in ("alone", "dtensor, none"):
        assert got[alone] == [True, False], alone


def test_a_rank_without_gradients_takes_part(two):
    got = two["uneven_gradients"]
    for bad in (False, True):
        for rank, (taken, scale, weights, calls) in enumerate(got[f"bad={bad}"]):
            assert taken == [True, not bad] and scale == (4.0 if bad else 8.0)
            assert weights == ([0.5, 0.5] if rank == 1 and not bad else [1.0, 1.0])
            assert calls == [("all_reduce", 4)]  # one small collective for both optimizers


def test_no_gradients_on_any_rank_is_an_error_on_all(two):
    got = two["uneven_gradients"]["none anywhere"]
    assert len(got) == 2 and all("no gradients, on any rank" in each for each in got)


def test_each_process_for_itself_on_request(two):
    assert two["uneven_gradients"]["each for itself"] == [(8.0, []), (4.0, [])]


@pytest.mark.parametrize("how", ["found from DDP", "given to bind", "given to grad_scaler"])
def test_halves_of_the_ranks_train_models_of_their_own(four, how):
    assert four["groups_given_and_found"][how] == [TAKEN, SKIPPED, TAKEN, SKIPPED]  # the last rank, and its partner


def test_a_group_that_is_none_and_one_that_cannot_be_copied(four):
    got = four["groups_given_and_found"]
    assert got["wrong"].startswith("PolicyError: process_group is a torch.distributed")
    assert got["pickled"].startswith("LossScaleError") and "state_dict" in got["pickled"]
    assert got["copied"] == "'none'"


def test_agreement_reads_nothing_on_the_host(two):
    got = two["host_reads"]
    for fused in (False, True):
        assert got[f"ours fused={fused}"] == got[f"native fused={fused}"]  # DDP itself reads some
    assert got["ours fused=False"] - got["ours fused=True"] == 3  # whether to step, in three steps


def test_a_loss_that_is_a_dtensor(two):
    assert two["dtensor_loss"] == [(True, [0.0, 0.0])] * 2  # a gradient of 3, clamped to 2, times a rate of 0.5


def test_join_is_refused_rather_than_waited_for(two):
    assert two["joined"].startswith("UnsupportedError") and "process_group='none'" in two["joined"]


# ---- divergence, statistics --------------------------------------------------------------------------------------------


def test_divergence_is_raised_on_every_rank_and_names_tensors(two):
    got = two["diverging"]
    tensors = {
        "ddp": [("1.weight", 0, 1, 2, None), ("2.weight", 2, 0, 2, None)],
        "shards": [("param_groups[0]['params'][1]", 1, 0, 3, 1)],
        "named by the optimizer": [("b", 1, 0, 3, 1)],
    }
    for what, expected in tensors.items():
        assert got[what][0] == got[what][1]
        steps, found, scales, message = got[what][0]
        assert steps == 5 and found == expected  # skipped 2, 3, 4, 5: more than three in a row
        assert scales == [1024.0, 512.0, 256.0, 128.0, 64.0]
        assert expected[0][0] in message


def test_statistics_go_back_on_every_rank(two):
    got = two["statistics"]
    for rank in range(2):
        counts, variances, calls = zip(*got["batch_norm"][rank], strict=True)
        assert counts == (1, 1, 2) and variances[0] == variances[1] and calls == (1, 2, 3)
        assert [each[2] for each in got["buffers"][rank]] == [1, 1, 2]
        assert [each[0] for each in got["nothing"][rank]] == [1, 2, 3]
    assert math.isnan(got["nothing"][1][1][1])  # what is kept from the others
    assert got["sync"] == [("SyncBatchNorm", [0.0] * 4)] * 2


# ---- FSDP2, tensor parallel --------------------------------------------------------------------------------------------

NORMS = ("norm", "blocks.0.norm", "blocks.1.norm")


def test_fsdp2_computes_as_the_policy_says(four):
    got = four["fsdp2_dtypes"]
    for how in ("compute float32", "mixed", "mixed, autocast", "mixed, reduce bfloat16", "rules"):
        low = "float32" if how == "compute float32" else "bfloat16"
        for name, dtypes in got[how]["modules"].items():
            if name in NORMS:
                assert dtypes == ("float32", "float32", low), (how, name)
            elif how == "rules" and name == "head":
                assert dtypes == ("float32",) * 3
            else:
                assert dtypes == (low,) * 3, (how, name)
        assert got[how]["result"] == "torch.float32" and got[how]["buffer"] == "torch.float32"
        assert got[how]["stored"] == ["torch.float32"]  # the shards are the masters
        assert got[how]["taken"]


def test_fsdp2_policy_maps_field_by_field(four):
    got = four["fsdp2_dtypes"]
    assert got["policy"] == ("torch.bfloat16", "torch.float32", "torch.float32", "True")
    assert "output_dtype=None, cast_forward_inputs=False" in got["inner policy"]


def test_fsdp2_refuses_what_cannot_be_had(four):
    got = four["fsdp2_dtypes"]
    assert "they are the master weights" in got["low parameters"]
    assert "loss_scale.mode 'none'" in got["unchecked"]
    assert "mp.fsdp_policy()" in got["own policy"]
    assert "modules of the model" in got["foreign unit"]
    assert "sharded already" in got["twice"]
    assert got["masters"].startswith("MasterWeightsError") and "as their own masters" in got["masters"]
    (warned,) = got["another reduce dtype"]
    assert "reduces in bfloat16, not reduce_dtype float32" in warned


@pytest.mark.parametrize("mesh", ["1d", "2d"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipping", ["native", "ours"])
def test_fsdp2_training_through_one_shards_overflow(four, mesh, fused, clipping):
    got = four["fsdp2_training"]
    run = got[f"{mesh} fused={fused} {clipping}"]
    assert run["taken"] == [[True, False, True, True]] * 4
    assert run["scale"] == [4.0] * 4
    assert run["weights"] == pytest.approx(got["reference"], abs=2e-5)
    if clipping == "ours":
        assert run["collectives"] == 2  # the flag, and the norm


@pytest.mark.parametrize("how", ["tp", "tp and fsdp"])
def test_tensor_parallel(four, how):
    got = four["tensor_parallel"]
    for taken, scale, weights in got[f"{how}, bad=None"]:
        assert (taken, scale) == TAKEN
        assert weights == pytest.approx(got[f"{how}, reference"], abs=2e-5)
    for bad in ("up", "norm"):
        assert [state[:2] for state in got[f"{how}, bad={bad}"]] == [SKIPPED] * 4
