"""The tier over replicas can fail, and its closed form is a plain loop's."""

import dataclasses

import numpy as np
import pytest

from precision.parity.replicas import expected, replica_specs, tier_replicas
from tests.plain_rule import PlainRule


class Copies:
    """Hands back what is expected, so that a test can spoil it."""

    name = "copies"

    def __init__(self, spoil=lambda result: result):
        self.spoil = spoil

    def replicated(self, engine, specs):
        return [self.spoil(expected(spec)) for spec in specs]


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_expectation_is_a_plain_loops(replicas):
    for spec in replica_specs(8, replicas):
        rule, weight = PlainRule(spec.config), 0.0
        want = expected(spec)
        for step, factors in enumerate(spec.factors):
            finite = all(f == 1.0 for f in factors)
            state = rule.step(finite)
            weight -= finite * sum(12 * (r + 1) for r in range(replicas)) / replicas / 64
            for replica in range(replicas):
                assert tuple(want.states[replica, step]) == state
                assert want.weights[replica, step].tolist() == [weight] * 4


def test_the_patterns_strike_on_every_replica_and_on_one_alone():
    factors = np.stack([spec.factors for spec in replica_specs(50, 3)])
    bad = ~np.isfinite(factors)
    assert bad.any(axis=(0, 1)).all()
    assert (bad.sum(axis=-1) == 1).any()
    assert np.isnan(factors).any() and np.isinf(factors).any()
    assert 0.02 < bad.any(axis=-1).mean() < 0.6


def test_the_tier_holds_for_what_is_right_and_says_what_is_not():
    specs = replica_specs(4, 2)
    result = tier_replicas(Copies(), "none", specs)
    assert result.passed and result.checked == 8 * 12 * 2
    assert result.detail == {"patterns": 8, "disagreements": 0}

    def parted(result):
        states = result.states.copy()
        states[1, 5, 0] *= 2
        return dataclasses.replace(result, states=states)

    result = tier_replicas(Copies(parted), "none", specs)
    assert len(result.failures) == 8 and result.detail["disagreements"] == 8
    assert "state of replica 1 after step 5" in result.failures[0]
    result = tier_replicas(Copies(lambda r: dataclasses.replace(r, weights=r.weights[:1])), "none", specs)
    assert "shape" in result.failures[0]
    result = tier_replicas(Copies(lambda r: dataclasses.replace(r, weights=r.weights * np.nan)), "none", specs)
    assert len(result.failures) == 8
