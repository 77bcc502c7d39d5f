"""T2: casts to the low formats round as ``ml_dtypes`` does, bit for bit, on probes and on whatever hypothesis finds."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import FloatFormat
from precision.parity.suite import LOW_DTYPES
from precision.parity.tiers import rounding_probes, tier_rounding


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_probes(adapter, dtype):
    result = tier_rounding(adapter, [dtype])
    assert result.failures == ()
    assert result.checked > 40_000


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_every_value_of_the_format_and_every_tie_between(adapter, dtype):
    numpy_dtype = FloatFormat.of(dtype).numpy_dtype
    bits = np.arange(2 ** (8 * numpy_dtype.itemsize), dtype=np.uint32).astype(f"u{numpy_dtype.itemsize}")
    grid = bits.view(numpy_dtype).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)
    assert tier_rounding(adapter, [dtype], np.concatenate([grid, ties])).failures == ()


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_random_floats(adapter, dtype):
    @settings(max_examples=25)
    @given(st.lists(st.floats(width=32), min_size=64, max_size=64))
    def check(values):
        assert tier_rounding(adapter, [dtype], np.array(values, np.float32)).failures == ()

    check()


def test_what_backends_state_is_all_there_is(adapter):
    """Exceptions are stated, few and true: each stated one really differs from ``ml_dtypes`` on this machine."""
    for dtype in adapter.flushes_subnormals:
        fmt = FloatFormat.of(dtype)
        assert adapter.round_to(np.array([fmt.smallest_subnormal], np.float32), dtype)[0] == 0.0
    for dtype in adapter.saturates:
        assert np.isfinite(adapter.round_to(np.array([1e30], np.float32), dtype)[0])


def test_probes_try_what_matters():
    for dtype in LOW_DTYPES:
        fmt, probes = FloatFormat.of(dtype), rounding_probes(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            want = probes.astype(getattr(ml_dtypes, dtype, np.float16)).astype(np.float32)
        assert np.isnan(probes).any() and (np.abs(want) == fmt.smallest_subnormal).any()
        assert (~np.isfinite(want) & np.isfinite(probes)).any()
