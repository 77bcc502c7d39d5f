"""Fault plans and the processes that ranks run in."""

import math
import os
import signal
import time

import numpy as np
import pytest

from precision import LossScale, NonFiniteGradientsError, PolicyError
from precision.testing import Fault, FaultPlan, RankError, run_ranks
from tests.core import ranks_functions
from tests.plain_rule import PlainRule


def test_factors_strike_at_their_step_and_rank():
    plan = FaultPlan([Fault("overflow", 1, 0), Fault("nan", 2), Fault("overflow", 2, 1), Fault("delay", 3, 1, 0.01)])
    want = [[1, 1], [math.inf, 1], [math.nan, math.nan], [1, 1]]
    np.testing.assert_array_equal(plan.factors(4, 2), np.array(want, np.float32))
    assert plan.finite(4) == [True, False, False, True]


def test_the_expected_trajectory_is_the_plain_rules():
    config = LossScale(mode="dynamic", initial=64.0, growth_interval=2, hysteresis=2, minimum=8.0, maximum=128.0)
    plan = FaultPlan.random(3, 40, 3, rate=0.15)
    assert 0 < len(plan.faults) < 120
    rule, want = PlainRule(config), []
    for finite in plan.finite(40):
        want.append(rule.step(finite))
    assert [tuple(state.values())[1:] for state in plan.trajectory(config, 40)] == want


def test_random_plans_are_repeatable_and_from_finite_says_the_same():
    a, b = FaultPlan.random(7, 20, 2, 0.3), FaultPlan.random(7, 20, 2, 0.3)
    assert a.faults == b.faults != FaultPlan.random(8, 20, 2, 0.3).faults
    overflows = FaultPlan.random(7, 20, 2, 0.3, kinds=("overflow",))
    same = FaultPlan.from_finite(np.isfinite(overflows.factors(20, 2)))
    assert set(same.faults) == set(overflows.faults)


def test_a_delay_sleeps_on_its_rank_only():
    plan = FaultPlan([Fault("delay", 0, rank=1, seconds=0.2)])
    start = time.monotonic()
    plan.wait(0, 0)
    plan.wait(1, 1)
    assert time.monotonic() - start < 0.15
    plan.wait(0, 1)
    assert time.monotonic() - start >= 0.2


def test_a_kill_ends_the_process_without_a_word():
    child = os.fork()
    if child == 0:
        try:
            FaultPlan([Fault("kill", 2)]).wait(2, 0)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault("explode", 1),
        lambda: Fault("nan", -1),
        lambda: Fault("nan", True),
        lambda: Fault("nan", 1, rank=-1),
        lambda: Fault("nan", 1, seconds=1.0),
        lambda: Fault("delay", 1),
        lambda: Fault("delay", 1, seconds=math.inf),
        lambda: FaultPlan(["nan"]),
        lambda: FaultPlan.random(0, 1, 1, rate=2.0),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(make):
    with pytest.raises(PolicyError):
        make()


def test_ranks_run_and_return():
    results = run_ranks(ranks_functions.tell, 3, (10,), env={"RANKS_TEST": "set"}, timeout=60)
    assert results == [(0, 3, True, "set"), (10, 3, True, "set"), (20, 3, True, "set")]


def test_a_rank_that_fails_ends_the_others_and_tells():
    start = time.monotonic()
    with pytest.raises(RankError, match="diverged") as caught:
        run_ranks(ranks_functions.fail, 2, timeout=50)
    assert time.monotonic() - start < 40
    assert "rank 1 says so" in str(caught.value)
    assert isinstance(caught.value.errors[1], NonFiniteGradientsError)
    assert caught.value.errors[1].scales == (2.0,)


def test_a_killed_rank_is_reported_or_stands_in_its_place():
    result = run_ranks(ranks_functions.killed, 2, check=False, timeout=60)
    assert result[0] == 0
    assert isinstance(result[1], RankError)
    assert result[1].codes == (-signal.SIGKILL,)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RankError, match="did not end within 3 s") as caught:
        run_ranks(ranks_functions.sleep, 2, timeout=3)
    assert caught.value.codes == (None, None)


def test_a_function_that_cannot_be_imported_is_refused():
    with pytest.raises(RankError, match="can be imported"):
        run_ranks(lambda rank, world, port: None, 1)
