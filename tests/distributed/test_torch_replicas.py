"""T1 over replicas: random overflow patterns on two to four ranks, in each of torch's engines."""

import pytest

from precision import get_backend
from precision.parity.replicas import replica_specs, tier_replicas

PATTERNS = {"ddp": 12, "fsdp2": 4, "all_reduce": 24}  # for each number of ranks


@pytest.mark.parametrize("engine", sorted(PATTERNS))
def test_all_ranks_hold_what_the_rule_says_after_every_step(engine):
    specs = [spec for world in (2, 3, 4) for spec in replica_specs(PATTERNS[engine], world, steps=8, seed=world)]
    result = tier_replicas(get_backend("torch").parity(), engine, specs)
    assert result.passed, result.failures
    assert result.detail["disagreements"] == 0
    assert result.checked == sum(spec.factors.size for spec in specs)


def test_every_engine_is_tried():
    assert set(get_backend("torch").parity().engines) == set(PATTERNS)
