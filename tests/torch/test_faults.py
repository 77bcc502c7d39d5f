"""Faults of ``torch.amp.GradScaler``: each is shown on the native object, beside ours without it."""

import math

import pytest
import torch

from precision import LossScaleError, MasterWeightsError, PolicyError

from .helpers import bind, finite, overflow, weight


def step(scaler, optimizer, param, *, ok=True):
    optimizer.zero_grad()
    (finite if ok else overflow)(scaler, param)
    scaler.step(optimizer)
    scaler.update()


def test_the_scale_does_not_decay_to_zero():
    ours, theirs = bind("float32", initial=1.0).grad_scaler(), torch.amp.GradScaler("cpu", init_scale=1.0)
    weights = {}
    for name, scaler in (("ours", ours), ("theirs", theirs)):
        w = weights[name] = weight(1.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        for _ in range(150):
            step(scaler, optimizer, w, ok=False)
        step(scaler, optimizer, w)
    assert theirs.get_scale() == 0.0 and math.isnan(weights["theirs"].item())  # stepped on NaN
    assert ours.get_scale() == 2.0**-24 and weights["ours"].item() == 0.5


def test_a_gradient_that_overflows_when_unscaled_is_not_stepped_on():
    """With a scale below 1 a finite scaled gradient may be infinite once divided: the check must see the result."""
    results = {}
    for name, scaler in (
        ("ours", bind("float32", initial=2.0**-24).grad_scaler()),
        ("theirs", torch.amp.GradScaler("cpu", init_scale=2.0**-24)),
    ):
        w = weight(1.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler.scale(w.sum() * 2.0**24 * 1e36).backward()
        scaler.step(optimizer)
        results[name] = w.item()
    assert results == {"ours": 1.0, "theirs": -math.inf}


@pytest.mark.parametrize("fused", [False, True])
def test_the_result_is_looked_at_once_the_scale_has_fallen_below_one(fused):
    scaler, w = bind("float32", initial=2.0).grad_scaler(), weight(1.0)
    optimizer = torch.optim.SGD([w], lr=0.5, fused=fused)
    for _ in range(20):
        step(scaler, optimizer, w, ok=False)
    assert scaler.get_scale() == 2.0**-19
    optimizer.zero_grad()
    scaler.scale(w.sum() * 2.0**19 * 1e34).backward()
    assert torch.isfinite(w.grad).all()
    assert scaler.step(optimizer).skipped and w.item() == 1.0


@pytest.mark.parametrize(
    "bad", [{"backoff_factor": -1.0}, {"init_scale": math.inf}, {"growth_interval": 0}, {"init_scale": -8.0}]
)
def test_settings_that_cannot_work_are_refused(bad):
    torch.amp.GradScaler("cpu", **bad)  # accepted without a word
    ours = {"initial" if key == "init_scale" else key: value for key, value in bad.items()}
    with pytest.raises(PolicyError, match=next(iter(ours))):
        bind("float32", **ours)


def test_a_restored_counter_above_the_interval_still_grows():
    ours = bind("float32", initial=8.0, growth_interval=3).grad_scaler()
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    saved = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100).state_dict() | {"_growth_tracker": 50}
    theirs.load_state_dict(saved)
    theirs.set_growth_interval(3)  # resumed with a shorter interval
    ours.load_state_dict(saved)
    scales = {}
    for name, scaler in (("ours", ours), ("theirs", theirs)):
        w = weight(1.0)
        optimizer = torch.optim.SGD([w], lr=0.0)
        for _ in range(10):
            step(scaler, optimizer, w)
        scales[name] = scaler.get_scale()
    assert scales["theirs"] == 8.0  # never again
    assert scales["ours"] == 8.0 * 2**4  # at once, then after 3, 6 and 9


def test_an_update_per_optimizer_is_an_error_not_a_wrong_step():
    weights = {}
    for name, scaler in (
        ("ours", bind("float32", initial=8.0, growth_interval=1).grad_scaler()),
        ("theirs", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)),
    ):
        a, b = weight(1.0), weight(1.0)
        first, second = (torch.optim.SGD([p], lr=0.5) for p in (a, b))
        scaler.scale(a.sum() + b.sum()).backward()
        scaler.step(first)
        scaler.update()
        if name == "theirs":
            scaler.step(second)
            scaler.update()
        else:
            with pytest.raises(LossScaleError, match="one update"):
                scaler.step(second)
        weights[name] = (a.item(), b.item())
    assert weights["theirs"] == (0.5, 0.75)  # the same gradient, unscaled by twice the scale
    assert weights["ours"] == (0.5, 1.0)


def test_low_gradients_without_masters_are_named():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([w], lr=0.5)
    native, ours = torch.amp.GradScaler("cpu"), bind("float32", initial=8.0).grad_scaler()
    finite(native, w)
    with pytest.raises(ValueError, match="FP16"):
        native.step(optimizer)
    w.grad = None
    finite(ours, w)
    with pytest.raises(MasterWeightsError, match=r"param_groups\[0\]\['params'\]\[0\].*float16.*master_weights=True"):
        ours.step(optimizer)


def test_native_unscales_bfloat16_gradients_in_bfloat16_and_ours_refuses_to():
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([w], lr=0.5)
    native, ours = torch.amp.GradScaler("cpu", init_scale=3.0), bind("float32", initial=3.0).grad_scaler()
    finite(native, w)
    native.unscale_(optimizer)
    assert w.grad.dtype is torch.bfloat16
    finite(ours, w)
    with pytest.raises(MasterWeightsError, match="bfloat16"):
        ours.unscale_(optimizer)


def test_pure_bfloat16_with_adam_does_not_train_and_is_refused():
    assert float(torch.tensor(0.999).bfloat16()) == 1.0
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with pytest.raises(MasterWeightsError, match=r"weight, bias.*bfloat16\(0.999\) is 1"):
        bind("bfloat16").prepare(model, optimizer)


def test_batch_norm_statistics_stay_finite_through_a_skipped_step():
    def poisoned(model, scaler, optimizer):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[1.0], [math.inf]])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return model[0].running_mean.item()

    native_model, model = (torch.nn.Sequential(torch.nn.BatchNorm1d(1)) for _ in range(2))
    native = torch.amp.GradScaler("cpu")
    assert not math.isfinite(poisoned(native_model, native, torch.optim.SGD(native_model.parameters(), lr=0.1)))
    mp = bind("float32", initial=8.0)
    model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert poisoned(model, mp.grad_scaler(), optimizer) == 0.0
