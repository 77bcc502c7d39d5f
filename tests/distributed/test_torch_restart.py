"""PyTorch: a killed run resumes bit-equal, a checkpoint loads into any number of ranks, and a bad one loses nothing."""

import pytest

from precision.testing import run_ranks
from tests.distributed.forked_torch import launches

KILLS = 5
ENGINES = ["alone", "masters", "ddp", "fsdp2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    wanted = [
        ("run_checks", 2, (["resharding", "bad_checkpoints"], folder)),
        ("loading", 1, (folder, ["ddp-2", "fsdp2-2"], ["alone"])),
        ("loading", 4, (folder, ["ddp-2", "fsdp2-2"], ["ddp", "fsdp2"])),
        ("loading", 2, (folder, ["alone-1", "fsdp2-4"], ["ddp", "fsdp2"])),
        ("run_checks", 4, (["resumed_on_four"], folder)),
        ("killed_runs", 1, (folder, ENGINES, KILLS, 3)),
    ]
    names = ("saved by two", "one", "four", "two", "resumed on four", "killed")
    return dict(zip(names, run_ranks(launches, 1, [wanted], timeout=250)[0], strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_killed_again_and_again_ends_as_one_never_killed(results, engine):
    got = results["killed"][0][engine]
    assert got["equal"] and all(got["equal"])  # weights, statistics, optimizer, loss scale and generators, bit for bit
    assert got["resumes"] >= 2
    assert all(steps == [8, 10] for steps in got["steps"])
    assert all(state["skipped"] == 2 for state in got["scale"])
    assert got["left over"] == []
    assert got["resumed at"] == sorted(got["resumed at"])  # nothing that was complete was lost


@pytest.mark.parametrize("saved", ["ddp", "fsdp2"])
@pytest.mark.parametrize("loaded", ["ddp", "fsdp2"])
def test_the_same_ranks_load_it_into_either_engine(results, saved, loaded):
    got = results["saved by two"][0]["resharding"]
    assert got[f"{saved} to {loaded}"] == [((3, {"batch": 3}), True)] * 2


def expect(results, saved):
    if saved in ("ddp-2", "fsdp2-2"):
        return results["saved by two"][0]["resharding"][f"{saved[:-2]} saved"]
    return results[{"alone-1": "one", "fsdp2-4": "four"}[saved]][0]["saved"]


@pytest.mark.parametrize(
    ("world", "saved", "loaded"),
    [("one", s, "alone") for s in ("ddp-2", "fsdp2-2")]
    + [("four", s, e) for s in ("ddp-2", "fsdp2-2") for e in ("ddp", "fsdp2")]
    + [("two", s, e) for s in ("alone-1", "fsdp2-4") for e in ("ddp", "fsdp2")],
)
def test_another_number_of_ranks_loads_it(results, world, saved, loaded):
    weights, moments, scale, statistics = expect(results, saved)
    ranks = results[world]
    saved_by = int(saved[-1])
    for rank, got in enumerate(ranks):
        restored, now, told, trained = got[f"{saved} to {loaded}"]
        assert restored[0] == (4 if world == "two" else 3)
        assert now[:3] == (weights, moments, scale) and trained
        if rank == 0 or rank >= saved_by:  # others have statistics of their own
            assert now[3] == statistics
        assert len(told) == (rank >= saved_by)
        assert all("keeps its random generators" in text for text in told)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp, buckets as they are"])
def test_four_ranks_resume_bit_equal(results, engine):
    """DDP adds up its first iteration in other buckets unless it looks for unused parameters."""
    assert results["resumed on four"][0]["resumed_on_four"][engine] == [True] * 4


def test_an_empty_folder_is_a_fresh_start(results):
    assert results["saved by two"][0]["bad_checkpoints"]["none"] == [None, None]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("none of that step", "CheckpointError.*no complete checkpoint of step 7"),
        ("not JSON", "CheckpointError.*JSON values"),
        ("another model", "CheckpointError.*lacks bias, weight"),
        ("another optimizer", "CheckpointError.*AdamW, not of SGD"),
        ("other groups", r"CheckpointError.*groups of \[4, 2\] parameters, not of \[6\]"),
        ("several", "CheckpointError.*holds 1 optimizers; 2 were given"),
        ("scale out of bounds", "StateError.*outside"),
        ("truncated", "CheckpointError.*bytes, not"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_on_all_ranks(results, what, error):
    import re

    got = results["saved by two"][0]["bad_checkpoints"][what]
    assert len(got) == 2 and all(re.match(error, each, re.DOTALL) for each in got), got


def test_one_rank_that_fails_is_an_error_on_all(results):
    first, second = results["saved by two"][0]["bad_checkpoints"]["one rank fails"]
    assert "not str" in first and "another rank failed" in second


def test_an_error_changes_nothing_and_the_mended_checkpoint_loads(results):
    got = results["saved by two"][0]["bad_checkpoints"]
    assert got["unchanged"] == [True, True]
    assert got["mended"] == [(1, None), (1, None)]
