"""Tier T4: the same training on every backend, compared with what reordering one backend's own reductions does.

The bar is measured, not chosen: each backend is run again with the rows of every batch and the hidden units of the model
in another order. That reorders every sum, over the batch (gradients) and over features (matmuls, norms), and so changes
nothing but rounding. Backends must agree with each other at least that well.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from precision.errors import PrecisionError
from precision.loss_scale import LossScale
from precision.parity.adapter import ParityAdapter, TrainResult, TrainSpec
from precision.parity.data import batches, held_out
from precision.parity.models import INPUT, initial_weights, symmetries
from precision.parity.tiers import TierResult
from precision.policy import PrecisionPolicy

LEARNING_RATES = {"mlp": 0.02, "cnn": 0.05, "transformer": 0.05, "chars": 0.1}


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

    Raises:
        PrecisionError: a step of ``overflow_at`` is not in the run.
    """
    inputs, labels = batches(model, steps, batch_size, seed)
    eval_inputs, eval_labels = held_out(model)
    poison = np.ones(steps, np.float32)
    chosen = list(overflow_at)
    if any(not 0 <= step < steps for step in chosen):
        raise PrecisionError(f"overflow_at {chosen}: a run of {steps} steps has steps 0 to {steps - 1}.")
    poison[chosen] = np.inf
    return TrainSpec(
        model=model, policy=policy, weights=initial_weights(model, seed), inputs=inputs, labels=labels, poison=poison,
        eval_inputs=eval_inputs, eval_labels=eval_labels, learning_rate=LEARNING_RATES[model],
    )  # fmt: skip


def overflow_steps(policy: PrecisionPolicy, steps: int) -> tuple[int, ...]:
    """Where a run is made to overflow: two steps in a row and one later; none where the policy would not skip them."""
    if policy.loss_scale.mode == "none":
        return ()
    third = 3 * steps // 10
    return third, third + 1, 6 * steps // 10


def reordered(spec: TrainSpec, seed: int) -> TrainSpec:
    """The same run with the rows of each batch, and the model's hidden units, in another order.

    The same sums, added up differently: in exact arithmetic the losses would be equal.
    """
    rng = np.random.default_rng(1000 + seed)
    order = np.stack([rng.permutation(spec.inputs.shape[1]) for _ in range(spec.steps)])
    rows = np.arange(spec.steps)[:, None], order
    weights, inputs, eval_inputs = dict(spec.weights), spec.inputs[rows], spec.eval_inputs
    for size, axes in symmetries(spec.model):
        units = rng.permutation(size)
        for name, axis in axes:
            if name == INPUT:
                inputs, eval_inputs = inputs.take(units, axis), eval_inputs.take(units, axis)
            else:
                weights[name] = weights[name].take(units, axis)
    return dataclasses.replace(spec, weights=weights, inputs=inputs, labels=spec.labels[rows], eval_inputs=eval_inputs)


def guarded(policy: PrecisionPolicy, initial: float = 2.0**10, growth_interval: int = 20) -> PrecisionPolicy:
    """The policy with a dynamic loss scale short enough to see: it grows and backs off within a hundred steps."""
    return policy.with_(loss_scale=LossScale(mode="dynamic", initial=initial, growth_interval=growth_interval))


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference between two loss curves at the same step."""
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))


def tier_training(
    adapters: Sequence[ParityAdapter],
    spec: TrainSpec,
    reorderings: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> TierResult:
    """T4: train on every backend; skips and scales are equal, and losses agree as well as reordering allows.

    Args:
        adapters: the backends' adapters.
        spec: the run.
        reorderings: how many times each backend is run again reordered, for the bar.
        progress: called with a few words before each run.
    """
    specs = [spec, *(reordered(spec, seed) for seed in range(reorderings))]
    runs: dict[str, list[TrainResult]] = {adapter.name: [] for adapter in adapters}
    for number, variant in enumerate(specs):
        for adapter in adapters:
            progress(f"{spec.model} on {adapter.name}" + (f", reordered {number}/{reorderings}" if number else ""))
            runs[adapter.name].append(adapter.train(variant))
    return judge(spec, runs)


def judge(spec: TrainSpec, runs: Mapping[str, Sequence[TrainResult]]) -> TierResult:
    """Judge the runs of one spec.

    Skips and scales must be equal on all backends in every run. Of the losses: ``own`` are the distances of each backend
    from itself reordered, and their largest is the bar; ``gaps`` are the distances between two backends on the same run,
    and their median, the typical gap, must lie within the bar. (The largest of many draws would exceed the largest of
    fewer by chance alone; a backend that really differs is in two of every three pairs and lifts the median.)

    Args:
        spec: the run.
        runs: for each backend the result of ``spec`` and then of its reorderings, at least one.
    """
    failures: list[str] = []
    overflow = [bool(p) for p in ~np.isfinite(spec.poison)] if spec.policy.loss_scale.mode != "none" else []
    first = next(iter(runs.values()))
    for name, results in runs.items():
        for number, (run, other) in enumerate(zip(results, first, strict=True)):
            where = f"{name}, reordered {number}" if number else name
            if not np.all(np.isfinite(run.losses)):
                failures.append(f"{where}: the loss is not finite")
            if run.skipped != other.skipped:
                failures.append(f"{where}: skips steps {_steps(run.skipped)}, another backend {_steps(other.skipped)}")
            if run.scales != other.scales:
                failures.append(f"{where}: the loss scale takes another course than on another backend")
            if overflow and any(f and not s for s, f in zip(run.skipped, overflow, strict=True)):
                failures.append(f"{where}: a step that overflowed was not skipped: {_steps(run.skipped)}")
    own = {name: [distance(results[0].losses, r.losses) for r in results[1:]] for name, results in runs.items()}
    gaps = {
        f"{a}/{b}": [distance(x.losses, y.losses) for x, y in zip(runs[a], runs[b], strict=True)]
        for a, b in itertools.combinations(runs, 2)
    }
    bar = max(d for distances in own.values() for d in distances)
    gap = statistics.median(d for distances in gaps.values() for d in distances) if gaps else 0.0
    if not gap <= bar:
        failures.append(f"losses typically differ by {gap:.3g} between backends; reordering one gives up to {bar:.3g}")
    detail = {
        "gap": gap, "bar": bar, "own": own, "gaps": gaps, "first_loss": first[0].losses[0],
        "last_loss": {name: results[0].losses[-1] for name, results in runs.items()},
        "accuracy": {name: results[0].accuracy for name, results in runs.items()}, "skipped": sum(first[0].skipped),
    }  # fmt: skip
    what = f"training {spec.model}, {spec.policy.compute_dtype}, {spec.steps} steps"
    return TierResult("T4", what, len(runs) * len(first), tuple(failures), detail)


def _steps(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]
