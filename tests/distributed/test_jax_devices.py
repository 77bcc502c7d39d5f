"""JAX on several devices of one process: what ``workers_jax.py`` checks there."""

import pytest

from precision.testing import run_ranks
from tests.distributed import workers_jax
from tests.distributed.jax_cases import DEVICES


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(workers_jax.run_cases, 1, env=DEVICES, timeout=200)[0]


@pytest.mark.parametrize("name", workers_jax.case)
def test_four_devices(name, outcomes):
    assert outcomes[name] is None, outcomes[name]
