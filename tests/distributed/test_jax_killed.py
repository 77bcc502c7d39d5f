"""JAX runs killed by SIGKILL, between and during saves, end with the bits of a run that nobody killed."""

import pytest

from precision.testing import run_ranks
from tests.distributed import workers_jax_killed

ENV = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
}

# File operations from the first of a save to the deletion of what it replaces.
PLANS = [
    {"seed": 0, "kills": 5, "operations": [2, 15, 40]},
    {"seed": 2, "kills": 2, "operations": [6], "processes": 2},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("killed"))
    return run_ranks(workers_jax_killed.killed_runs, 1, (folder, PLANS), env=ENV, timeout=240)[0]


@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_a_killed_run_ends_as_one_that_was_not(plan, runs):
    """Weights, masters, moments, keys and loss scale; no step that was saved is done twice."""
    run = runs["killed"][plan]
    assert run["end"] == runs[PLANS[plan].get("processes", 1)]
    assert run["killed"] == PLANS[plan]["kills"]
    assert run["lost"] == 0


def test_some_were_killed_in_the_middle_of_a_save(runs):
    assert sum(run["within"] for run in runs["killed"]) >= 3


def test_one_process_reads_what_two_have_saved(runs):
    assert runs["moved"] == runs[2]
    for number in (1, 2):
        digest, skipped, scale = runs[number][0].split()
        assert (len(digest), skipped, scale) == (64, "3", "8.0")
