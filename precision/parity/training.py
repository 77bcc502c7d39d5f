"""Tier T4: the same training on every backend, compared with what reordering one backend's own reductions does.

The bar is measured, not chosen: each backend is run again with the rows of every batch (hence its reductions over the
batch) in another order, which changes nothing but rounding. Backends must agree with each other at least that well.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from precision.loss_scale import LossScale
from precision.parity.adapter import ParityAdapter, TrainResult, TrainSpec
from precision.parity.data import batches, held_out
from precision.parity.models import initial_weights
from precision.parity.tiers import TierResult
from precision.policy import PrecisionPolicy

LEARNING_RATES = {"mlp": 0.05, "cnn": 0.05, "transformer": 0.05, "chars": 0.1}


def train_spec(
    model: str,
    policy: PrecisionPolicy,
    steps: int = 100,
    batch_size: int = 32,
    overflow_at: Iterable[int] = (),
    seed: int = 0,
) -> TrainSpec:
    """Return the run of a model under a policy; the same arguments give the same numbers.

    Args:
        model: one of :data:`precision.parity.models.MODELS`.
        policy: the policy to train under.
        steps: number of steps.
        batch_size: rows in a batch.
        overflow_at: steps whose loss is multiplied by infinity.
        seed: of weights and batches.
    """
    inputs, labels = batches(model, steps, batch_size, seed)
    eval_inputs, eval_labels = held_out(model)
    poison = np.ones(steps, np.float32)
    poison[list(overflow_at)] = np.inf
    return TrainSpec(
        model=model, policy=policy, weights=initial_weights(model, seed), inputs=inputs, labels=labels, poison=poison,
        eval_inputs=eval_inputs, eval_labels=eval_labels, learning_rate=LEARNING_RATES[model],
    )  # fmt: skip


def reordered(spec: TrainSpec, seed: int) -> TrainSpec:
    """The same run with the rows of each batch in another order: the same sums, added up differently."""
    rng = np.random.default_rng(1000 + seed)
    order = np.stack([rng.permutation(spec.inputs.shape[1]) for _ in range(spec.steps)])
    rows = np.arange(spec.steps)[:, None], order
    return dataclasses.replace(spec, inputs=spec.inputs[rows], labels=spec.labels[rows])


def guarded(policy: PrecisionPolicy, initial: float = 2.0**10, growth_interval: int = 20) -> PrecisionPolicy:
    """The policy with a dynamic loss scale short enough to see: it grows and backs off within a hundred steps."""
    return policy.with_(loss_scale=LossScale(mode="dynamic", initial=initial, growth_interval=growth_interval))


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference between two loss curves at the same step."""
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))


def tier_training(
    adapters: Sequence[ParityAdapter],
    spec: TrainSpec,
    reorderings: int = 4,
    progress: Callable[[str], None] = lambda text: None,
) -> TierResult:
    """T4: train on every backend; skips and scales are equal, and losses agree as well as reordering allows.

    Args:
        adapters: the backends' adapters.
        spec: the run.
        reorderings: how many times each backend is run again reordered, for the bar.
        progress: called with a few words before each run.
    """
    runs: dict[str, TrainResult] = {}
    own: dict[str, list[float]] = {}
    for adapter in adapters:
        progress(f"{spec.model} on {adapter.name}")
        runs[adapter.name] = adapter.train(spec)
        own[adapter.name] = []
        for seed in range(reorderings):
            progress(f"{spec.model} on {adapter.name}, reordered {seed + 1}/{reorderings}")
            again = adapter.train(reordered(spec, seed))
            own[adapter.name].append(distance(runs[adapter.name].losses, again.losses))
    return judge(spec, runs, own)


def judge(spec: TrainSpec, runs: Mapping[str, TrainResult], own: Mapping[str, Sequence[float]]) -> TierResult:
    """Judge runs of one spec: equal skips and scales, and curves within the largest of the backends' own distances.

    Args:
        spec: the run.
        runs: a result a backend.
        own: each backend's distances to itself, reordered.
    """
    failures: list[str] = []
    first = next(iter(runs.values()))
    forced = [bool(p) for p in ~np.isfinite(spec.poison)] if spec.policy.loss_scale.mode != "none" else []
    for name, run in runs.items():
        if not np.all(np.isfinite(run.losses)):
            failures.append(f"{name}: the loss is not finite")
        if run.skipped != first.skipped:
            failures.append(f"{name} skips steps {_steps(run.skipped)}, another backend {_steps(first.skipped)}")
        if run.scales != first.scales:
            failures.append(f"{name}: the loss scale takes another course than on another backend")
        if forced and [s and f for s, f in zip(run.skipped, forced, strict=True)] != forced:
            failures.append(f"{name} did not skip every step with an overflow: {_steps(run.skipped)}")
    bar = max(d for distances in own.values() for d in distances)
    pairs = {f"{a}/{b}": distance(runs[a].losses, runs[b].losses) for a, b in itertools.combinations(runs, 2)}
    for pair, gap in pairs.items():
        if not gap <= bar:
            failures.append(f"{pair}: losses differ by up to {gap:.3g}; reordering one backend gives {bar:.3g}")
    detail = {
        "bar": bar, "own": {k: list(v) for k, v in own.items()}, "pairs": pairs,
        "first_loss": first.losses[0], "last_loss": {k: r.losses[-1] for k, r in runs.items()},
        "accuracy": {k: r.accuracy for k, r in runs.items()}, "skipped": sum(first.skipped),
    }  # fmt: skip
    what = f"training {spec.model}, {spec.policy.compute_dtype}, {spec.steps} steps"
    return TierResult("T4", what, len(pairs) + len(runs), tuple(failures), detail)


def _steps(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]
