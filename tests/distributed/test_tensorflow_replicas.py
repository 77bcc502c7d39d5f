"""Several replicas in one process: what one of them overflows, all skip; Keras's own optimizer beside ours."""

import numpy as np
import pytest

import precision
from precision.divergence import NonFiniteTensor
from precision.parity.replicas import replica_specs, tier_replicas
from precision.testing import run_ranks
from tests.distributed import workers_tensorflow as workers

pytestmark = pytest.mark.timeout(600)  # one launch does all of it: a minute on an idle machine

ENV = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def mirrored(tmp_path_factory):
    """The results of all checks, from one launch."""
    folder = str(tmp_path_factory.mktemp("mirrored"))
    (results,) = run_ranks(workers.mirrored, 1, (folder,), env=ENV, timeout=560)
    return results


def check(results, name):
    assert not isinstance(results[name], str), results[name]
    return results[name]


def equal(arrays, want) -> bool:
    return all(np.array_equal(array, np.float32(want)) for array in arrays)


def test_fit_skips_what_the_last_replica_overflows_and_keras_puts_it_into_every_weight(mirrored):
    found = check(mirrored, "fit")
    native = found["native finite"]
    assert (
        native[:4] == [False] * 4 and native[-2:] == [False] * 2
    )  # all trained; the first replica's statistics are well
    for name, replicas in (("ours", 2), ("synchronized", 3)):
        ours = found[name]
        assert ours["alike"] and ours["finite"] and ours["went on"] and ours["unchanged"], name
        assert ours["state"] == {
            "version": 1, "scale": 512.0, "good_steps": 3, "hysteresis_left": 0, "skipped": 1, "consecutive_skips": 0,
        }  # fmt: skip
        assert len(ours["replicas"]) == replicas
        assert all(tuple(map(float, state)) == (0, 256, 0, 2, 1) for state in ours["replicas"])
    assert found["ours"]["statistics differ by replica"] == [True, True]  # and each was restored to its own
    assert found["synchronized"]["statistics differ by replica"] == [False, False]


@pytest.mark.parametrize("how", ["graph", "eager"])
def test_custom_loops_follow_the_plan(mirrored, how):
    found = check(mirrored, "loops")[how]
    assert found["as the plan says"] and found["alike"]
    assert equal(found["weights"], [-5.0, -5.0]) and equal(found["statistic"], 5.0)
    assert found["steps"] == 5


def test_gradients_are_summed_before_they_are_clipped_and_keras_clips_each_replicas(mirrored):
    found = check(mirrored, "order")
    for name in ("inside", "outside", "each", "mode none"):
        for weights in found[name]:
            np.testing.assert_allclose(weights, [-0.6, -0.8], rtol=1e-6)  # the mean gradient is (4.5, 6), of norm 7.5
    for weights in found["native"]:
        np.testing.assert_allclose(weights, [-1.2, -1.6], rtol=1e-6)  # a step of norm 2 with global_clipnorm = 1


def test_without_a_loss_scale_steps_are_keras_own_bit_for_bit(mirrored):
    found = check(mirrored, "order")
    assert np.array_equal(found["none plain"], found["none ours"])


def test_reduce_dtype_is_what_gradients_are_summed_in(mirrored):
    found = check(mirrored, "order")
    for dtype in ("float32", "float16"):  # 1 + 2**-9 fits both, and is 1 in bfloat16
        assert equal(found[dtype], [-1.001953125] * 2)
    assert equal(found["bfloat16"], [-1.0] * 2)
    assert found["keeps"] == "bfloat16"
    weights, skipped = found["sum overflows"]
    assert equal(weights, [-1.0] * 2) and skipped == 1


def test_accumulation_and_averages_work_where_keras_fails(mirrored):
    found = check(mirrored, "cadence")
    assert "merge_call" in found["native"]
    weights, skipped = found["accumulated"]
    assert equal(weights, [-12.0] * 2) and skipped == 2  # minus (3 + 5) / 2 minus (7 + 9) / 2
    assert all(found["as on one device"])


def test_rows_of_an_embedding_are_gathered_and_checked(mirrored):
    tables, skipped = check(mirrored, "sparse")
    assert skipped == 1
    assert equal(tables, [[-1, -1], [-3, -3], [-2, -2], [0, 0]])


def test_a_last_batch_that_leaves_a_replica_empty_trains_as_keras_does(mirrored):
    equal_weights, skipped = check(mirrored, "uneven")
    assert equal_weights and skipped == 0


@pytest.mark.parametrize("how", ["check", "fit", "eager"])
def test_a_run_that_only_skips_ends_with_the_tensors_and_their_replica(mirrored, how):
    tensors, scales, skips, text = check(mirrored, "divergence")[how]
    assert {tensor.rank for tensor in tensors} == {1}
    assert skips == {"check": 3, "fit": 3, "eager": 4}[how]  # eager code looks at every second step
    assert scales == tuple(1024.0 / 2**i for i in range(skips + 1))
    if how == "fit":
        assert [t.name.split("/")[-1] for t in tensors] == ["kernel", "bias", "kernel", "bias"]
        assert [t.size for t in tensors] == [20, 5, 10, 2]
        assert f"{tensors[0].name} (20 NaN of 20, rank 1)" in text
    else:
        assert tensors == (NonFiniteTensor("Variable:0", 0, 1 if how == "check" else 2, 2, 1),)


def test_sums_that_overflow_are_named_without_a_replica(mirrored):
    found = check(mirrored, "divergence")
    assert found["sum"] == (NonFiniteTensor("Variable:0", 0, 2, 2, None),)
    assert found["single"] == (NonFiniteTensor("Variable:0", 1, 0, 2, None),)


def test_the_neutral_scaler_agrees_in_replica_context(mirrored):
    found = check(mirrored, "neutral")
    assert found["grads"] == [2.0, np.inf]
    assert found["scales"] == [512.0, 512.0] and found["good"] == [1, 1]
    assert "differ by replica" in found["across"] and found["one set"] is True


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("outside", "LossScaleError", "made outside strategy.scope"),
        ("inner outside", "LossScaleError", r"the optimizer (SGD) was made outside"),
        ("across", "LossScaleError", "belong into the function given to strategy.run"),
        ("central", "UnsupportedError", "loss scaling under CentralStorageStrategy"),
        ("own sums", "UnsupportedError", "Own does not sum gradients over replicas"),
        ("keras.distribution", "UnsupportedError", "no effect on Keras's TensorFlow backend"),
    ],
)
def test_what_could_not_be_right_is_refused(mirrored, name, kind, says):
    assert check(mirrored, "refusals")[name] is not None
    found, message = check(mirrored, "refusals")[name]
    assert found == kind and says in message


def test_no_collective_lies_in_a_branch_where_keras_has_all_of_them_there(mirrored):
    found = check(mirrored, "graph")
    native, ours, bare, recorded = (found[name] for name in ("native", "ours", "bare", "recorded"))
    assert native["in branches"] == native["in all"] == 2  # the gradient's, on each of two devices
    assert ours["in branches"] == 0 and ours["branches"] == 2  # one conditional
    assert ours["in all"] - bare["in all"] == 2  # one more collective a step: the flag's
    assert recorded["in branches"] == 2  # the counts of NaN, gathered on the agreed side only
    assert not any(each["host"] for each in found.values())


def test_checkpoints_hold_everything_and_go_over_to_other_numbers_of_replicas(mirrored):
    found = check(mirrored, "checkpoints")
    assert found["restored"] == (2, {"file": "a", "at": [1, 2.5]})
    assert found["same copies"] and found["goes on equal"]
    assert found["three alike"] and found["three train"] == [3, 3]
    assert found["none there"] is None
    assert found["objects"] and found["neutral"]
    assert found["keras file"] and found["keras file trains"] == "PrecisionLossScaleOptimizer"


def test_a_checkpoint_that_does_not_fit_changes_nothing(mirrored):
    found = check(mirrored, "checkpoints")
    errors = found["errors"]
    assert "is of another model or optimizer: model variable 2 is" in errors["foreign"]
    assert (
        "state.data-00000-of-00001 has" in errors["truncated"] and "Resume from another: step=2" in errors["truncated"]
    )
    assert "must be JSON values" in errors["json"]
    assert "nothing to save or restore" in errors["nothing"]
    assert "holds no model.keras" in errors["no file"]
    assert found["nothing changed"] and found["an older one"] == 2


def test_fit_resumes_in_the_middle_of_an_epoch_where_keras_loses_position_and_seeds(mirrored):
    found = check(mirrored, "resume")
    assert found["native"]["equal"] is False
    ours = found["ours"]
    assert ours["equal"] and ours["loss"] and ours["epochs"] == 1
    assert ours["skipped"] > 0


def test_random_overflows_on_two_to_four_replicas_part_none_of_them(mirrored):
    details, failures = check(mirrored, "patterns")
    assert not failures, failures[:3]
    assert details == [{"patterns": n, "disagreements": 0} for n in (100, 40, 20)]


def test_the_adapter_runs_patterns_in_processes_of_their_own():
    specs = replica_specs(4, 2, steps=6)
    result = tier_replicas(precision.get_backend("tensorflow").parity(), "mirrored", specs)
    assert result.passed, result.failures[:3]
    assert result.checked == 8 * 6 * 2
