"""All tiers over all given backends and policies, as ``precision parity`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product

import numpy as np

from precision.loss_scale import LossScale
from precision.parity.remote import PolicyOnly, RemoteAdapter
from precision.parity.tiers import (
    TierResult,
    tier_decisions,
    tier_ops,
    tier_rounding,
    tier_trajectories,
)
from precision.parity.training import overflow_steps, tier_training, train_spec
from precision.policy import PrecisionPolicy

LOW_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def trajectory_patterns(count: int = 8, steps: int = 40, seed: int = 0) -> list[tuple[LossScale, list[bool]]]:
    """Loss-scale settings with patterns of finite steps: the corners, then random ones.

    The corners reach the floor, the ceiling, growth at every step, and the hysteresis with both refills.
    """
    rng = np.random.default_rng(seed)
    corners = [
        (LossScale(mode="dynamic", initial=2.0, minimum=0.5, growth_interval=3), [False] * steps),
        (LossScale(mode="dynamic", initial=2.0, maximum=64.0, growth_interval=1), [True] * steps),
        (LossScale(mode="static", initial=128.0), [i % 3 > 0 for i in range(steps)]),
    ]
    refills = ("on_growth", "on_finite_step")
    for refill, hysteresis in product(refills, (1, 3)):
        config = LossScale(mode="dynamic", growth_interval=4, hysteresis=hysteresis, hysteresis_refill=refill)  # type: ignore[arg-type]
        corners += [(config, [bool(f) for f in rng.random(steps) < p]) for p in rng.uniform(0.2, 0.95, count // 4)]
    return corners


def run_suite(
    policies: Mapping[str, PrecisionPolicy],
    backends: Sequence[str],
    models: Sequence[str],
    steps: int = 100,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[TierResult]:
    """Run tiers T0 to T4.

    Args:
        policies: by name.
        backends: names of installed backends.
        models: the models of T4.
        steps: steps a run of T4.
        progress: called with what comes next and how many of how many parts are done.
    """
    results: list[TierResult] = []
    total = 2 * len(policies) + 2 * len(backends) + len(policies) * len(models)
    with ExitStack() as stack:
        progress("starting the frameworks", 0, total)
        adapters = [stack.enter_context(RemoteAdapter(name)) for name in backends]
        for name, policy in policies.items():
            bound = [(adapter, PolicyOnly(policy)) for adapter in adapters]
            progress(f"decisions and ops, {name}", len(results), total)
            results += [_named(tier_decisions(bound), name), _named(tier_ops(bound), name)]
        for adapter in adapters:
            progress(f"trajectories, {adapter.name}", len(results), total)
            results.append(_named(tier_trajectories(adapter, trajectory_patterns()), adapter.name))
            progress(f"rounding, {adapter.name}", len(results), total)
            results.append(_named(tier_rounding(adapter, LOW_DTYPES), adapter.name))
        for policy, model in product(policies.values(), models):
            spec = train_spec(model, policy, steps, overflow_at=overflow_steps(policy, steps))

            def report(text: str) -> None:
                progress(text, len(results), total)

            results.append(tier_training(adapters, spec, reorderings=2, progress=report))
    return sorted(results, key=lambda result: result.tier)


def _named(result: TierResult, name: str) -> TierResult:
    return TierResult(result.tier, f"{result.what}, {name}", result.checked, result.failures, result.detail)
