"""The error that ends a diverging run: what it names, and the way of the scale worked out from the state alone."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision import LossScale, NonFiniteGradientsError
from precision.divergence import NonFiniteTensor, divergence_error, recent_scales
from precision.loss_scale import LossScaleState, initial_state, next_state


def run(config: LossScale, pattern: list[bool]) -> tuple[list[float], LossScaleState]:
    state, scales = initial_state(config), []
    for finite in pattern:
        scales.append(float(state.scale))
        state = next_state(config, state, np.bool_(finite), np)
    return [*scales, float(state.scale)], state


@given(
    st.lists(st.booleans(), max_size=12),
    st.integers(0, 14),
    st.integers(1, 4),
    st.sampled_from(["on_growth", "on_finite_step"]),
    st.sampled_from([2.0**-24, 1.0, 2.0**6]),
)
def test_the_scales_worked_out_are_those_that_were_used(before, skips, hysteresis, refill, minimum):
    config = LossScale(
        mode="dynamic",
        initial=2.0**8,
        growth_interval=3,
        minimum=minimum,
        hysteresis=hysteresis,
        hysteresis_refill=refill,
    )
    used, state = run(config, [*before, True, *[False] * skips])
    told = list(recent_scales(config, state))
    assert told == used[-len(told) :]
    assert len(told) <= skips + 1
    if skips and hysteresis == 1 and used[-1] > minimum:
        assert len(told) == skips + 1  # nothing is left out where the state does tell


def test_the_scales_of_a_backoff_that_is_no_power_of_two_are_near():
    config = LossScale(mode="dynamic", initial=1000.0, backoff_factor=0.3)
    used, state = run(config, [False] * 5)
    assert recent_scales(config, state) == pytest.approx(used, rel=1e-6)


def test_a_static_scale_stays():
    config = LossScale(mode="static", initial=8.0)
    _, state = run(config, [True, False, False])
    assert recent_scales(config, state) == (8.0, 8.0, 8.0)


def test_the_error_names_the_first_tensors_the_way_down_and_what_to_try():
    config = LossScale(mode="dynamic", initial=8.0, minimum=0.5, max_consecutive_skips=2)
    _, state = run(config, [True, False, False, False])
    tensors = [NonFiniteTensor(f"layer.{i}.weight", nan=3, inf=1, size=12, rank=i % 2) for i in range(10)]
    error = divergence_error(config, state, lambda: tensors)
    text = str(error)
    assert "3 steps in a row" in text
    assert "max_consecutive_skips = 2" in text
    assert "layer.0.weight (3 NaN and 1 inf of 12, rank 0)" in text
    assert "layer.7.weight" in text
    assert "layer.8.weight" not in text
    assert "and 2 more" in text
    assert "8 -> 4 -> 2 -> 1" in text
    assert "log of 0" in text
    assert error.tensors == tuple(tensors)
    assert error.scales == (8.0, 4.0, 2.0, 1.0)
    assert error.consecutive_skips == 3


def test_the_error_crosses_processes_whole():
    error = NonFiniteGradientsError("m", tensors=[NonFiniteTensor("w", inf=1)], scales=[2.0], consecutive_skips=4)
    same = pickle.loads(pickle.dumps(error))
    assert (str(same), same.tensors, same.scales, same.consecutive_skips) == ("m", error.tensors, (2.0,), 4)


def test_at_a_high_scale_the_advice_is_to_let_it_come_down():
    config = LossScale(mode="dynamic", max_consecutive_skips=1)
    _, state = run(config, [False, False])
    assert "allow more skips" in str(divergence_error(config, state))
    config = LossScale(mode="dynamic", initial=1.0, minimum=1.0, max_consecutive_skips=1)
    _, state = run(config, [False, False])
    assert "no scale can mend that" in str(divergence_error(config, state))
    assert "1 (the minimum)" in str(divergence_error(config, state))
