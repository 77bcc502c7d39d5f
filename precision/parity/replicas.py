"""T1 on several replicas: whichever of them overflows, all skip the same steps and hold the same scale and weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from precision.loss_scale import LossScale, LossScaleState
from precision.parity.adapter import Array, ParityAdapter, ReplicaResult, ReplicaSpec
from precision.parity.tiers import TierResult
from precision.testing.faults import Fault, FaultPlan

LEARNING_RATE = 2.0**-6

_SETTINGS = (
    LossScale(mode="dynamic", growth_interval=3),
    LossScale(mode="dynamic", growth_interval=2, hysteresis=2),
    LossScale(mode="dynamic", initial=4.0, minimum=1.0, maximum=16.0, growth_interval=1),
    LossScale(mode="static", initial=128.0),
)


def replica_specs(count: int, replicas: int, steps: int = 12, seed: int = 0) -> list[ReplicaSpec]:
    """Overflow patterns: first, for each setting, one replica alone at each step in turn; then ``count`` random ones.

    Args:
        count: how many random patterns.
        replicas: of each.
        steps: of each; all have the same shape, so that what is compiled is compiled once a setting.
        seed: of the random ones.
    """
    alone = FaultPlan(Fault("nan" if s % 3 else "overflow", s, s % replicas) for s in range(0, steps, 2))
    specs = [ReplicaSpec(config, alone.factors(steps, replicas)) for config in _SETTINGS]
    rng = np.random.default_rng(seed)
    for i in range(count):
        plan = FaultPlan.random(
            int(rng.integers(2**31)), steps, replicas, rate=float(rng.uniform(0.02, 0.5)) / replicas
        )
        specs.append(ReplicaSpec(_SETTINGS[i % len(_SETTINGS)], plan.factors(steps, replicas)))
    return specs


def expected(spec: ReplicaSpec) -> ReplicaResult:
    """What must come of a spec: the pure rule's states, and the closed form of the weights, on every replica."""
    finite: Array = np.asarray(np.isfinite(spec.factors).all(axis=1))
    plan = FaultPlan.from_finite(finite[:, None])
    states = [[state[name] for name in LossScaleState._fields] for state in plan.trajectory(spec.config, len(finite))]
    gradient = np.float32(12 * np.mean(np.arange(1, spec.replicas + 1)))
    weights = -np.cumsum(finite).astype(np.float32) * gradient * np.float32(LEARNING_RATE)
    return ReplicaResult(
        states=np.repeat(np.array(states, np.float64)[None], spec.replicas, axis=0),
        weights=np.repeat(np.repeat(weights[None, :, None], 4, axis=2), spec.replicas, axis=0).astype(np.float32),
    )


def tier_replicas(adapter: ParityAdapter, engine: str, specs: Sequence[ReplicaSpec]) -> TierResult:
    """T1 over replicas: after every step, every replica's state and weights are bit-equal to the rule and the closed form."""
    checked, failures, disagreements = 0, [], 0
    for spec, result in zip(specs, adapter.replicated(engine, specs), strict=True):
        want = expected(spec)
        checked += spec.factors.size
        for what, got, right in (("state", result.states, want.states), ("weights", result.weights, want.weights)):
            if got.shape != right.shape:
                failures.append(f"{adapter.name}/{engine}: {what} of shape {got.shape}, not {right.shape}")
                continue
            disagreements += int(_parted(got))
            wrong = np.argwhere(np.asarray(got != right).any(axis=-1))
            if len(wrong):
                replica, step = map(int, wrong[np.argmin(wrong[:, 1])])
                failures.append(
                    f"{adapter.name}/{engine}: {spec.replicas} replicas, {what} of replica {replica} after step {step} is "
                    f"{got[replica, step].tolist()}, not {right[replica, step].tolist()}"
                )
    what = f"overflows on any of several replicas, {adapter.name} {engine}"
    return TierResult("T1", what, checked, tuple(failures), {"patterns": len(specs), "disagreements": disagreements})


def run_replicas(adapter: ParityAdapter, count: int = 24, replicas: Sequence[int] = (2,)) -> list[TierResult]:
    """The tier for each engine of a backend; nothing if it trains on one device only."""
    return [
        tier_replicas(adapter, engine, replica_specs(count, number))
        for engine, number in product(adapter.engines, replicas)
    ]


def _parted(values: Array) -> bool:
    """Whether any replica differs from the first (NaN is equal to NaN here)."""
    return not all(np.array_equal(values[0], each, equal_nan=True) for each in values[1:])
