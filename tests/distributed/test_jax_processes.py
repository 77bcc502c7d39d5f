"""JAX in two processes on loopback addresses: what ``workers_jax_processes.py`` checks in both."""

import jax
import jax.numpy as jnp
import pytest

import precision
from precision.testing import run_ranks
from tests.distributed import workers_jax_processes

ENV = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("processes"))
    one = precision.bind("float32", backend="jax").checkpoints(f"{folder}/one")
    one.save(5, {"w": jnp.arange(8.0), "key": jax.random.key(3)})
    return run_ranks(workers_jax_processes.run_cases, 2, (folder,), env=ENV, timeout=150)


@pytest.mark.parametrize("name", workers_jax_processes.case)
def test_two_processes(name, outcomes):
    for rank, outcome in enumerate(outcomes):
        assert outcome[name] is None, f"rank {rank}: {outcome[name]}"
