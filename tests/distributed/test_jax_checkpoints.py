"""Checkpoints of JAX runs: what ``workers_jax_checkpoints.py`` checks on four devices of one process."""

import pytest

from precision.testing import run_ranks
from tests.distributed import workers_jax_checkpoints
from tests.distributed.jax_cases import DEVICES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(workers_jax_checkpoints.run_cases, 1, (folder,), env=DEVICES, timeout=200)[0]


@pytest.mark.parametrize("name", workers_jax_checkpoints.case)
def test_saving_and_restoring(name, outcomes):
    assert outcomes[name] is None, outcomes[name]
