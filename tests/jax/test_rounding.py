"""Rounding to low formats: bit-equal to ``ml_dtypes``, compiled or not, even where XLA would rather keep the digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import FloatFormat, PolicyError
from precision.parity.tiers import rounding_probes
from precision_jax import round_to

LOW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


@pytest.mark.parametrize("dtype", LOW)
def test_bit_equal_to_ml_dtypes(dtype):
    """Ties and their neighbours, subnormals, overflow, NaN, random bits; nothing is flushed."""
    probes = rounding_probes(dtype)
    want = FloatFormat.of(dtype).round(probes)
    subnormal = np.abs(want) < FloatFormat.of(dtype).smallest_normal
    assert (want[subnormal] != 0).any(), "the probes have subnormal results"
    assert_same_bits(round_to(probes, dtype), want)
    assert_same_bits(jax.jit(round_to, static_argnums=1)(probes, dtype), want)


@settings(max_examples=50)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64), dtype=st.sampled_from(LOW))
def test_any_bits(bits, dtype):
    values = np.asarray(bits, np.uint32).view(np.float32)
    assert_same_bits(round_to(values, dtype), FloatFormat.of(dtype).round(values))


@pytest.mark.parametrize("dtype", LOW)
def test_rounding_happens_between_other_operations(dtype):
    """XLA may drop a pair of casts between float32 operations; the barrier in round_to keeps it."""
    x = np.linspace(0.1, 1.5, 64, dtype=np.float32)
    got = jax.jit(lambda x: round_to(round_to(x, dtype) * 3.0, dtype) - 1.0)(x)
    fmt = FloatFormat.of(dtype)
    assert_same_bits(got, fmt.round(fmt.round(x) * np.float32(3.0)) - np.float32(1.0))


def test_reduce_precision_would_not_do():
    """It flushes float16's subnormals and gives float8_e4m3fn infinities."""
    assert float(jax.lax.reduce_precision(jnp.float32(2.0**-20), 5, 10)) == 0.0
    assert float(round_to(2.0**-20, "float16")) == 2.0**-20
    assert np.isinf(float(jax.lax.reduce_precision(jnp.float32(1e4), 4, 3)))
    assert np.isnan(float(round_to(1e4, "float8_e4m3fn")))


def test_arithmetic_flushes_float32_subnormals_on_cpus_but_casts_do_not():
    """Stated because other frameworks keep them: XLA:CPU computes with subnormals flushed to zero."""
    tiny = np.float32(1e-40)
    if jax.default_backend() == "cpu":
        assert float(jax.jit(lambda x: x * 1.5)(tiny)) == 0.0
    assert float(jnp.asarray(tiny).astype(jnp.bfloat16)) != 0.0


def test_unknown_format():
    with pytest.raises(PolicyError, match="unknown dtype 'float17'"):
        round_to(1.0, "float17")
