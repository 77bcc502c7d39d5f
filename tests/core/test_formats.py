"""Formats against the closed forms of IEEE 754 and the OCP float8 paper, and rounding against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision import DTYPES, FloatFormat

BITS = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7), "float8_e5m2": (5, 2), "float8_e4m3fn": (4, 3)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_follow_from_the_bit_widths(dtype):
    e, m = BITS[dtype]
    fmt, bias = FloatFormat.of(dtype), 2 ** (e - 1) - 1
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bits) == (e, m, 1 + e + m)
    assert fmt.eps == 2.0**-m
    assert fmt.smallest_normal == 2.0 ** (1 - bias)
    assert fmt.smallest_subnormal == 2.0 ** (1 - bias - m)
    if dtype == "float8_e4m3fn":  # all ones is NaN, there is no infinity (Micikevicius et al., 2022)
        assert (fmt.max, fmt.has_inf) == (448.0, False)
    else:
        assert (fmt.max, fmt.has_inf) == ((2 - 2.0**-m) * 2.0**bias, True)


def exact_round(x: float, fmt: FloatFormat) -> float:
    """Round to nearest, ties to even, in exact rational arithmetic."""
    if not np.isfinite(x):
        return x if fmt.has_inf else np.nan
    q = Fraction(x) / Fraction(fmt.spacing(x))
    n = round(q)  # Python rounds halves to even
    y = float(n * Fraction(fmt.spacing(x)))
    if abs(y) > fmt.max:
        return np.copysign(np.inf if fmt.has_inf else np.nan, x)
    return y


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float32"])
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_rounding_is_exact(dtype, values):
    fmt = FloatFormat.of(dtype)
    got = fmt.round(np.array(values, np.float32))
    want = np.array([exact_round(v, fmt) for v in values], np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    assert fmt.round(got).tobytes() == got.tobytes()


@given(st.floats(1e-30, 1e30))
def test_spacing_is_the_distance_to_the_next_float32(value):
    v = np.float32(value)
    assert FloatFormat.of("float32").spacing(float(v)) == float(np.nextafter(v, np.float32(np.inf)) - v)


def test_spacing_of_what_is_not_finite_is_nan():
    assert np.isnan(FloatFormat.of("float16").spacing(float("inf")))
