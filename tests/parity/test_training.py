"""T4: the same training in three frameworks: equal skips and scales, and losses as close as reordering one allows."""

import dataclasses
import itertools

import numpy as np
import pytest

from precision import PrecisionError, Rule
from precision.names import PRESETS
from precision.parity import MODELS, initial_weights
from precision.parity.adapter import TrainResult
from precision.parity.models import INPUT, is_statistic, symmetries
from precision.parity.training import guarded, judge, overflow_steps, reordered, tier_training, train_spec

OVERFLOW_AT = (30, 31, 60)
NORMS = [Rule(module="**norm*", dtype="float32")]


def spec_for(model, preset, steps=100):
    return train_spec(model, guarded(PRESETS[preset].with_(rules=NORMS)), steps, 32, OVERFLOW_AT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "preset"),
    [(m, p) for m in MODELS for p in ("mixed_bfloat16", "mixed_float16")] + [("mlp", "float32"), ("cnn", "float32")],
)
def test_t4_training_agrees(adapters, model, preset):
    result = tier_training(adapters, spec_for(model, preset), reorderings=3)
    detail = result.detail
    print(
        f"\n{model} {preset}: gap {detail['gap']:.2g}, bar {detail['bar']:.2g}, gaps {detail['gaps']}, own {detail['own']}"
    )
    assert result.failures == ()
    assert detail["skipped"] >= len(OVERFLOW_AT)
    for name, loss in detail["last_loss"].items():
        assert loss < 0.9 * detail["first_loss"], f"{name} did not learn"


@pytest.mark.parametrize("model", MODELS)
def test_one_step_in_bfloat16_gives_the_same_gradient(adapters, model):
    """Before chaos sets in: gradients differ between backends by far less than bfloat16 differs from float32."""

    def gradients(adapter, preset):
        policy = PRESETS[preset].with_(rules=NORMS)
        rng = np.random.default_rng(5)
        spec = train_spec(model, policy, 1, 32)
        shaken = {
            k: v if k.endswith("var") else (v + 0.1 * rng.standard_normal(v.shape)).astype(np.float32)
            for k, v in spec.weights.items()
        }
        spec = dataclasses.replace(spec, weights=shaken, learning_rate=0.125, momentum=0.0)
        after = adapter.train(spec).weights
        trained = [k for k in sorted(shaken) if not is_statistic(k)]
        return np.concatenate([(shaken[k].astype(np.float64) - after[k]).ravel() / 0.125 for k in trained])

    exact = gradients(adapters[0], "float32")
    low = [gradients(adapter, "mixed_bfloat16") for adapter in adapters]
    rounding = min(np.linalg.norm(g - exact) for g in low)
    gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(low, 2)]
    print(f"\n{model}: gaps / rounding = {[f'{gap / rounding:.1e}' for gap in gaps]}")
    assert rounding > 1e-4 * np.linalg.norm(exact)
    assert max(gaps) < 0.5 * rounding


@pytest.mark.parametrize("model", MODELS)
def test_reordering_permutes_weights_and_nothing_else(model):
    spec = spec_for(model, "float32", steps=70)
    other = reordered(spec, 0)
    touched = {name for _, axes in symmetries(model) for name, _ in axes} - {INPUT}
    assert touched <= set(spec.weights)
    for name, weight in spec.weights.items():
        same = np.array_equal(weight, other.weights[name])
        assert np.array_equal(np.sort(weight, axis=None), np.sort(other.weights[name], axis=None))
        assert same or name in touched
    assert not np.array_equal(spec.inputs, other.inputs) and np.array_equal(spec.poison, other.poison)
    assert np.array_equal(np.sort(spec.labels, 1), np.sort(other.labels, 1))


def test_reordering_an_mlp_changes_nothing_in_exact_arithmetic():
    spec = train_spec("mlp", PRESETS["float32"], 2, 8)

    def loss(s):
        w = {k: v.astype(np.float64) for k, v in s.weights.items()}
        h = s.inputs[0].astype(np.float64)
        for i in ("1", "2"):
            h = np.maximum(h @ w[f"fc{i}.kernel"] + w[f"fc{i}.bias"], 0)
            h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
            h = h * w[f"norm{i}.scale"] + w[f"norm{i}.offset"]
        z = h @ w["head.kernel"] + w["head.bias"]
        z = z - np.log(np.exp(z).sum(-1, keepdims=True))
        return -z[np.arange(8), s.labels[0]].mean()

    assert loss(reordered(spec, 0)) == pytest.approx(loss(spec), rel=1e-13)


@pytest.mark.parametrize("steps", [20, 50, 100, 333])
def test_overflows_are_within_the_run(steps):
    at = overflow_steps(PRESETS["mixed_float16"], steps)
    spec = train_spec("mlp", PRESETS["mixed_float16"], steps, 4, at)
    assert np.flatnonzero(np.isinf(spec.poison)).tolist() == sorted(at) and len(set(at)) == 3
    assert overflow_steps(PRESETS["mixed_bfloat16"], steps) == ()
    with pytest.raises(PrecisionError, match=f"has steps 0 to {steps - 1}"):
        train_spec("mlp", PRESETS["float32"], steps, 4, [steps])


def fake(spec, shift=0.0, **changes):
    skipped = [not np.isfinite(p) for p in spec.poison]
    losses = [1.0 / (1 + i) + shift for i in range(spec.steps)]
    result = TrainResult(losses, [8.0] * spec.steps, skipped, 1.0, {}, [0.0] * spec.steps, {})
    return dataclasses.replace(result, **changes)


def test_the_judge_can_fail():
    spec = spec_for("mlp", "mixed_float16", steps=70)
    good = {"a": [fake(spec), fake(spec, 1e-3)], "b": [fake(spec, 5e-4), fake(spec, 2e-4)]}
    assert judge(spec, good).failures == ()
    far = {**good, "b": [fake(spec, 0.1), fake(spec, 0.1)]}
    assert any("losses typically differ" in f for f in judge(spec, far).failures)
    late = fake(spec, skipped=[False] * spec.steps)
    assert any("overflowed was not skipped" in f for f in judge(spec, {**good, "b": [late, late]}).failures)
    other = fake(spec, scales=[4.0] * spec.steps)
    assert any("loss scale takes another course" in f for f in judge(spec, {**good, "b": [other, other]}).failures)
    nan = fake(spec, losses=[float("nan")] * spec.steps)
    assert any("not finite" in f for f in judge(spec, {**good, "b": [nan, nan]}).failures)


def test_initial_weights_are_fixed_by_the_seed():
    for model in MODELS:
        a, b, c = initial_weights(model), initial_weights(model), initial_weights(model, seed=1)
        assert all(np.array_equal(a[k], b[k]) for k in a)
        assert any(not np.array_equal(a[k], c[k]) for k in a)
