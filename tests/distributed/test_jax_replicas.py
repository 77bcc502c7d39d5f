"""Overflows on any of two to four replicas: over a thousand random patterns, bit for bit the rule's state on every device."""

import pytest

from precision.parity.replicas import replica_specs, tier_replicas
from precision_jax.parity import JaxParity

# Patterns cost next to nothing, compiling for a number of replicas a second: one engine takes all numbers.
RUNS = {"shard_map": {2: 500, 4: 500}, "jit": {3: 200}, "pmap": {4: 200}}


@pytest.mark.parametrize("engine", RUNS)
def test_every_replica_follows_the_rule(engine):
    assert engine in JaxParity.engines
    specs = [spec for number, count in RUNS[engine].items() for spec in replica_specs(count, number, seed=number)]
    result = tier_replicas(JaxParity(), engine, specs)
    assert result.passed, result.failures[:3]
    assert result.detail["patterns"] == len(specs) and result.detail["disagreements"] == 0
