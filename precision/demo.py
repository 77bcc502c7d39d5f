"""The demo: one config file, the same models on real data in every installed framework, and whether they agree.

Each (backend, policy) has a process of its own, so that peak memory can be told apart; the runs of a model take turns,
so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from precision.parity.adapter import TrainResult, TrainSpec
from precision.parity.remote import PolicyOnly, RemoteAdapter
from precision.parity.tiers import TierResult, tier_decisions
from precision.parity.training import judge, overflow_steps, reordered, train_spec
from precision.policy import PrecisionPolicy

MODELS = ("mlp", "cnn", "transformer")
WARM_UP = 10
"""Steps at the start of a run that compile and warm up; they are left out of step times."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the demo's table: a model on a backend under a policy.

    Attributes:
        model, policy, backend: what ran.
        first_loss, last_loss: training loss at the first step, and the mean of the last ten.
        accuracy: on held-out data, 0 to 1.
        scale: loss scale at the end.
        skipped: steps skipped.
        step_ratio: median step time over that of float32 on the same backend, runs taking turns; below 1 is faster.
        memory_ratio: peak process memory over that of the float32 process, all models together.
        gap: typical difference between two backends' loss curves (median over pairs and runs of the largest difference).
        bar: the largest such difference of one backend from itself with its reductions reordered.
        agrees: whether skips and scales are equal and the gap is within the bar.
    """

    model: str
    policy: str
    backend: str
    first_loss: float
    last_loss: float
    accuracy: float
    scale: float
    skipped: int
    step_ratio: float
    memory_ratio: float
    gap: float
    bar: float
    agrees: bool


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """All the demo found.

    Attributes:
        decisions: tier T0 by policy name.
        training: tier T4 by (policy name, model).
        rows: the table.
    """

    decisions: dict[str, TierResult]
    training: dict[tuple[str, str], TierResult]
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether every tier held."""
        return all(tier.passed for tier in (*self.decisions.values(), *self.training.values()))


def run_demo(
    policies: dict[str, PrecisionPolicy],
    backends: Sequence[str],
    models: Sequence[str] = MODELS,
    steps: int = 100,
    batch_size: int = 32,
    reorderings: int = 2,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> DemoResult:
    """Train and compare.

    Args:
        policies: by name; must hold ``"float32"``, against which time and memory are given.
        backends: names of installed backends.
        models: of :data:`precision.parity.MODELS`.
        steps, batch_size: of each run.
        reorderings: runs with reordered batches a model, backend and policy; they measure what rounding alone does.
        progress: called with what comes next and how many of how many runs are done.
    """
    total = len(backends) * len(policies) * len(models) * (1 + reorderings)
    done = 0
    results: dict[tuple[str, str, str], list[TrainResult]] = {}
    specs: dict[tuple[str, str], TrainSpec] = {}
    memory: dict[tuple[str, str], int] = {}
    decisions: dict[str, list[tuple[RemoteAdapter, PolicyOnly]]] = {name: [] for name in policies}
    tiers: dict[str, TierResult] = {}
    for model in models:
        for name, policy in policies.items():
            specs[name, model] = train_spec(model, policy, steps, batch_size, overflow_steps(policy, steps))
    with ExitStack() as stack:
        for backend in backends:
            progress(f"starting {backend}", done, total)
            workers = {name: RemoteAdapter(backend) for name in policies}
            for name, worker in workers.items():
                stack.enter_context(worker)
                decisions[name].append((worker, PolicyOnly(policies[name])))
            for model, name, again in _turns(models, list(policies), 1 + reorderings):
                progress(f"{model}, {name}, {backend}", done, total)
                spec = specs[name, model]
                result = workers[name].train(reordered(spec, again) if again else spec)
                results.setdefault((backend, name, model), []).append(result)
                done += 1
            for name, worker in workers.items():
                memory[backend, name] = worker.peak_bytes()
        progress("comparing", done, total)
        tiers = {name: tier_decisions(bound) for name, bound in decisions.items()}
    return _conclude(results, specs, memory, tiers, list(backends), list(policies), models)


def _turns(models: Sequence[str], policies: Sequence[str], rounds: int) -> Iterator[tuple[str, str, int]]:
    for model in models:
        for again in range(rounds):
            for name in policies:
                yield model, name, again


def _conclude(
    results: dict[tuple[str, str, str], list[TrainResult]],
    specs: dict[tuple[str, str], TrainSpec],
    memory: dict[tuple[str, str], int],
    decisions: dict[str, TierResult],
    backends: list[str],
    policies: list[str],
    models: Sequence[str],
) -> DemoResult:
    rows, training = [], {}
    for model in models:
        for name in policies:
            runs = {backend: results[backend, name, model] for backend in backends}
            tier = training[name, model] = judge(specs[name, model], runs)
            for backend in backends:
                run = runs[backend][0]
                base = _median_step(results[backend, "float32", model])
                rows.append(
                    Row(
                        model=model, policy=name, backend=backend, first_loss=run.losses[0],
                        last_loss=statistics.fmean(run.losses[-10:]), accuracy=run.accuracy,
                        scale=float(run.state["scale"]), skipped=sum(run.skipped),
                        step_ratio=_median_step(results[backend, name, model]) / base,
                        memory_ratio=memory[backend, name] / max(memory[backend, "float32"], 1),
                        gap=tier.detail["gap"], bar=tier.detail["bar"], agrees=tier.passed,
                    )
                )  # fmt: skip
    return DemoResult(decisions, training, rows)


def _median_step(runs: Sequence[TrainResult]) -> float:
    return statistics.median(t for run in runs for t in run.step_seconds[WARM_UP:])


def to_json(result: DemoResult) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "passed": result.passed,
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "decisions": {name: dataclasses.asdict(tier) for name, tier in result.decisions.items()},
        "training": {f"{name}/{model}": dataclasses.asdict(tier) for (name, model), tier in result.training.items()},
    }
