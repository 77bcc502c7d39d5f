"""T1: the loss scale takes the plain rule's course bit for bit, and a state saved anywhere resumes anywhere."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import LossScale, LossScaleState
from precision.parity.suite import trajectory_patterns
from precision.parity.tiers import rule_trajectory, tier_trajectories
from tests.parity.conftest import BACKENDS
from tests.plain_rule import PlainRule, configs

FORMS = ("neutral", "native")
STEPS = 24  # one length, so that what is compiled is compiled once a setting


def plain(config, pattern):
    rule = PlainRule(config)
    return [{"version": 1, **dict(zip(LossScaleState._fields, rule.step(f), strict=True))} for f in pattern]


@pytest.mark.parametrize("form", FORMS)
def test_random_settings_and_patterns(adapter, form):
    @settings(max_examples=15 if form == "native" else 30)
    @given(configs(), st.lists(st.booleans(), min_size=STEPS, max_size=STEPS))
    def check(config, pattern):
        assert adapter.trajectory(config, pattern, form) == plain(config, pattern)

    check()


@pytest.mark.parametrize("form", FORMS)
def test_many_patterns_under_the_usual_setting(adapter, form):
    config = LossScale(mode="dynamic", growth_interval=3)
    rng = np.random.default_rng(7)
    for share in (0.05, 0.5, 0.95, 0.99):
        pattern = [bool(f) for f in rng.random(400) < share]
        assert adapter.trajectory(config, pattern, form) == plain(config, pattern)


def test_adversarial_patterns(adapter):
    result = tier_trajectories(adapter, trajectory_patterns())
    assert result.failures == ()
    assert result.checked > 500


@pytest.mark.parametrize("form", FORMS)
def test_static_scale(adapter, form):
    config = LossScale(mode="static", initial=64.0)
    pattern = [True, False, False, True] * 3
    assert adapter.trajectory(config, pattern, form) == plain(config, pattern)


@pytest.mark.parametrize(("saver", "loader"), list(itertools.product(BACKENDS, BACKENDS)))
def test_a_state_saved_anywhere_resumes_anywhere(adapters, saver, loader):
    config = LossScale(mode="dynamic", growth_interval=4, hysteresis=2, growth_factor=1.5, backoff_factor=0.7)
    pattern = [bool(f) for f in np.random.default_rng(3).random(2 * STEPS) < 0.7]
    source, target = (adapters[BACKENDS.index(name)] for name in (saver, loader))
    whole = plain(config, pattern)
    for form in FORMS:
        saved = source.trajectory(config, pattern[:STEPS], form)[-1]
        assert set(saved) == {"version", *LossScaleState._fields}
        resumed = target.trajectory(config, pattern[STEPS:], form, json.loads(json.dumps(saved)))
        assert resumed == whole[STEPS:]


def test_the_tier_can_fail():
    class Wrong:
        name = "wrong"

        def trajectory(self, config, finite, form):
            return rule_trajectory(config.with_(growth_interval=config.growth_interval + 1), finite)

    result = tier_trajectories(Wrong(), [(LossScale(mode="dynamic", growth_interval=2), [True] * 5)])
    assert len(result.failures) == 2 and "step 1" in result.failures[0]
