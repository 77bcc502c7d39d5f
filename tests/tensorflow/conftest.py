"""Every test leaves Keras's default policy as it found it; a test that does not is told so."""

import keras
import pytest


@pytest.fixture(autouse=True)
def _policy_left_alone():
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    yield
    after = keras.config.dtype_policy()
    keras.config.set_dtype_policy(before)
    assert after == before, "the test left another default dtype policy behind"
