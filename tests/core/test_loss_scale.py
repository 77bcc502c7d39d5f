"""The loss-scale rule against an independent restatement of it in plain Python, and its settings, state and errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision import LossScale, LossScaleState, NonFiniteGradientsError, PolicyError, StateError, next_state
from precision.loss_scale import LossScaler, initial_state, state_from_dict, state_to_dict
from tests.plain_rule import PlainRule, configs


def step(config: LossScale, state: LossScaleState, finite: bool) -> LossScaleState:
    with np.errstate(over="ignore"):  # a huge growth factor overflows before the maximum cuts it
        return next_state(config, state, np.bool_(finite), np)


@given(configs(), st.lists(st.booleans(), max_size=60))
def test_rule_equals_the_plain_program(config, pattern):
    rule, state = PlainRule(config), initial_state(config)
    for finite in pattern:
        state = step(config, state, finite)
        assert tuple(v.item() for v in state) == rule.step(finite)
        assert [v.dtype for v in state] == [np.float32] + 4 * [np.int32]
        assert config.minimum <= state.scale <= config.maximum


@pytest.mark.parametrize("mode", ["static", "none"])
def test_scale_stays_put_in_other_modes(mode):
    config = LossScale(mode=mode, **({"initial": 128.0} if mode == "static" else {}))
    state = initial_state(config)
    for finite in (True, False, False, True):
        state = next_state(config, state, np.bool_(finite), np)
    assert state.scale == (128.0 if mode == "static" else 1.0)
    assert (int(state.skipped), int(state.consecutive_skips)) == ((2, 0) if mode == "static" else (0, 0))


def test_scale_reaches_neither_zero_nor_infinity():
    config = LossScale(mode="dynamic", growth_interval=1)
    up = down = initial_state(config)
    for _ in range(400):
        up, down = (next_state(config, s, np.bool_(f), np) for s, f in ((up, True), (down, False)))
    assert (up.scale, down.scale) == (2.0**126, 2.0**-24)


def test_counter_above_the_interval_still_grows():
    config = LossScale(mode="dynamic", initial=4.0, growth_interval=10)
    state = state_from_dict(config, {"scale": 4.0, "_growth_tracker": 50})
    assert next_state(config, state, np.bool_(True), np).scale == 8.0


BAD_SETTINGS = [
    ({"initial": True}, "initial"), ({"initial": float("nan")}, "initial"), ({"initial": -1.0}, "initial"),
    ({"initial": float("inf")}, "initial"), ({"initial": "8"}, "initial"), ({"growth_factor": 1.0}, "growth_factor"),
    ({"growth_factor": -2.0}, "growth_factor"), ({"growth_factor": True}, "growth_factor"),
    ({"backoff_factor": -1.0}, "backoff_factor"), ({"backoff_factor": 1.0}, "backoff_factor"),
    ({"backoff_factor": 0.0}, "backoff_factor"), ({"backoff_factor": float("nan")}, "backoff_factor"),
    ({"growth_interval": 0}, "growth_interval"), ({"growth_interval": 2.5}, "growth_interval"),
    ({"growth_interval": True}, "growth_interval"), ({"growth_interval": 2**31}, "growth_interval"),
    ({"minimum": 0.0}, "minimum"), ({"minimum": -1.0}, "minimum"), ({"maximum": float("inf")}, "maximum"),
    ({"maximum": 1e39}, "maximum"), ({"initial": 2.0**-30}, "initial"), ({"initial": 4.0, "maximum": 2.0}, "initial"),
    ({"hysteresis": 0}, "hysteresis"), ({"hysteresis": False}, "hysteresis"),
    ({"hysteresis_refill": "never"}, "hysteresis_refill"), ({"max_consecutive_skips": 0}, "max_consecutive_skips"),
    ({"max_consecutive_skips": True}, "max_consecutive_skips"), ({"mode": "dynamik"}, "mode"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "field"), BAD_SETTINGS)
def test_bad_settings_are_named(bad, field):
    with pytest.raises(PolicyError) as error:
        LossScale(**{"mode": "dynamic", **bad})
    assert field in [key for key, _ in error.value.problems]
    assert f"{field}:" in str(error.value)


def test_settings_that_contradict_the_mode():
    with pytest.raises(PolicyError, match="growth_factor: has no effect with mode = 'static'"):
        LossScale(mode="static", growth_factor=3.0)
    with pytest.raises(PolicyError, match="initial: has no effect with mode = 'none'"):
        LossScale(initial=8.0)


def test_unknown_setting_gives_the_nearest():
    with pytest.raises(PolicyError, match="Did you mean 'growth_interval'"):
        LossScale(mode="dynamic", growth_intervall=3)


@given(configs(), st.lists(st.booleans(), max_size=30))
def test_state_round_trips_through_json(config, pattern):
    state = initial_state(config)
    for finite in pattern:
        state = step(config, state, finite)
    saved = json.loads(json.dumps(state_to_dict(state)))
    assert state_to_dict(state_from_dict(config, saved)) == state_to_dict(state)
    assert set(saved) == {"version", *LossScaleState._fields}
    assert all(type(v) in (int, float) for v in saved.values())


@pytest.mark.parametrize(
    ("native", "scale", "good"),
    [
        (
            {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 7},
            512,
            7,
        ),
        ({"dynamic_scale": np.float32(64), "step_counter": np.int32(3)}, 64, 3),
        ({"scale": np.array(32.0, np.float32), "fin_steps": np.array(5)}, 32, 5),
    ],
)
def test_native_states_load(native, scale, good):
    state = state_from_dict(LossScale(mode="dynamic", hysteresis=2), native)
    assert [v.item() for v in state] == [scale, good, 2, 0, 0]


GOOD = {"version": 1, "scale": 8.0, "good_steps": 0, "hysteresis_left": 1, "skipped": 0, "consecutive_skips": 0}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({**GOOD, "version": 2}, "version 2; this release reads version 1"),
        ({**GOOD, "version": True}, "has version True"),
        ({k: v for k, v in GOOD.items() if k != "skipped"}, "truncated: it lacks skipped"),
        ({**GOOD, "more": 1}, "unknown entries: more"),
        ({**GOOD, "scale": float("nan")}, "scale must be a finite number"),
        ({**GOOD, "scale": True}, "scale must be a finite number"),
        ({**GOOD, "scale": "8"}, "scale must be a finite number"),
        ({**GOOD, "good_steps": -1}, "good_steps must be a whole number"),
        ({**GOOD, "good_steps": 1.5}, "good_steps must be a whole number"),
        ({**GOOD, "scale": 0.0}, "lies outside"),
        ({}, "holds nothing"),
        ({"a": 1}, "not a loss-scale state: it holds a"),
        ([1], "mapping of names to numbers, not list"),
    ],
)
def test_bad_states_are_refused(saved, message):
    with pytest.raises(StateError, match=message):
        state_from_dict(LossScale(mode="dynamic"), saved)


def test_a_state_without_loss_scaling_is_not_taken_for_a_scale_of_one():
    unscaled = state_to_dict(initial_state(LossScale()))
    with pytest.raises(StateError, match="run without loss scaling"):
        state_from_dict(LossScale(mode="dynamic"), unscaled)
    assert state_from_dict(LossScale(), unscaled).scale == 1.0
    assert state_from_dict(LossScale(mode="dynamic", initial=1.0), unscaled).scale == 1.0
    native = {"scale": 1.0, "_growth_tracker": 0}  # it may have come down: skips are not in it
    assert state_from_dict(LossScale(mode="dynamic"), native).scale == 1.0
    came_down = {**unscaled, "skipped": 16, "consecutive_skips": 1}
    assert state_from_dict(LossScale(mode="dynamic"), came_down).scale == 1.0


class NumpyScaler(LossScaler):
    """The smallest backend there can be."""

    xp = np

    def from_host(self, state):
        return state

    def scale(self, loss, state):
        return np.float32(loss) * state.scale

    def unscale(self, grads, state):
        grads = [np.float32(g) / state.scale for g in grads]
        return grads, np.bool_(all(np.isfinite(g).all() for g in grads))


def test_scaler_protocol_and_divergence():
    scaler = NumpyScaler(LossScale(mode="dynamic", initial=4.0, max_consecutive_skips=2))
    state = scaler.init()
    grads, finite = scaler.unscale([scaler.scale(np.float32(3.0), state)], state)
    assert (grads, bool(finite)) == ([3.0], True)
    for _ in range(2):
        state = scaler.update(state, scaler.unscale([np.inf], state)[1])
        scaler.check(state)
    state = scaler.update(state, np.bool_(False))
    with pytest.raises(NonFiniteGradientsError, match=r"3 steps in a row .*max_consecutive_skips = 2"):
        scaler.check(state)
    assert scaler.load_state_dict(scaler.state_dict(state)) == state
