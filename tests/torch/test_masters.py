"""Float32 masters of low-precision parameters: updates too small for the low format add up, and nothing goes stale."""

import copy
import math

import pytest
import torch
from torch import nn

from precision import MasterWeightsError, StateError
from precision_torch.attachments import attachments

from .helpers import bind


def make(policy="float16", lr=2.0**-13, optimizer=torch.optim.SGD, **kwargs):
    """One weight at 1, whose gradient is 1: a step of 2**-13 is lost in float16 and in bfloat16."""
    mp = bind(policy, initial=1024.0) if policy == "float16" else bind(policy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optim = mp.prepare(model, optimizer(model.parameters(), lr=lr, **kwargs), master_weights=True)
    return mp, model, optim


def step(mp, model, optim, factor=1.0):
    optim.zero_grad()
    with mp.autocast():
        loss = model(torch.ones(1, 1)).sum()
    mp.backward(loss * factor)
    return mp.step(optim)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("fused", [False, True])
def test_small_updates_add_up_in_the_masters(policy, fused):
    mp, model, optim = make(policy, fused=fused)
    (master,) = optim.param_groups[0]["params"]
    assert master.dtype is torch.float32 and model.weight.dtype is mp.param_dtype
    for _ in range(64):
        step(mp, model, optim)
    assert master.item() == 1 - 64 * 2.0**-13
    assert model.weight.item() == float(torch.tensor(1 - 64 * 2.0**-13).to(mp.param_dtype))
    assert float(torch.tensor(1 - 2.0**-13).to(mp.param_dtype)) == 1.0  # what no masters would give, every step


def test_without_masters_the_same_run_stands_still():
    mp = bind("bfloat16")
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optim = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-13), master_weights=False)
    for _ in range(64):
        step(mp, model, optim)
    assert model.weight.item() == 1.0


def test_a_skip_leaves_masters_copies_and_state_alone():
    mp, model, optim = make(optimizer=torch.optim.AdamW, lr=0.1)
    step(mp, model, optim)
    (master,) = optim.param_groups[0]["params"]
    before = master.item(), model.weight.item(), copy.deepcopy(optim.state[master])
    assert step(mp, model, optim, math.inf).skipped
    assert (master.item(), model.weight.item()) == before[:2]
    assert all(torch.equal(optim.state[master][k], v) for k, v in before[2].items())


def test_gradients_accumulate_in_float32():
    mp, model, optim = make()
    optim.zero_grad()
    mp.scaler.load_state_dict({**mp.scaler.state_dict(), "scale": 1.0, "skipped": 16})
    for factor in (1.0, 2.0**-12):
        with mp.autocast():
            loss = model(torch.full((1, 1), factor)).sum()
        mp.backward(loss)
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 1 + 2.0**-12  # float16 would round it to 1


def test_clipping_through_model_or_optimizer_is_the_same():
    for params in (lambda m, o: m.parameters(), lambda m, o: o.param_groups[0]["params"]):
        mp, model, optim = make(lr=1.0)
        with mp.autocast():
            mp.backward(model(torch.full((1, 1), 8.0)).sum())
        mp.scaler.unscale_(optim)
        torch.nn.utils.clip_grad_norm_(params(model, optim), 0.25)
        mp.step(optim)
        assert optim.param_groups[0]["params"][0].item() == pytest.approx(0.75, abs=1e-5)


@pytest.mark.parametrize("through", ["model", "optimizer", "optimizer to zero"])
def test_zeroing_gradients_either_way_clears_both(through):
    mp, model, optim = make(lr=0.125)
    with mp.autocast():
        mp.backward(model(torch.ones(1, 1)).sum())
    mp.scaler.unscale_(optim)
    if through == "model":
        model.zero_grad()
    else:
        optim.zero_grad(set_to_none=through == "optimizer")
    if through != "model":
        assert model.weight.grad is None or model.weight.grad.item() == 0.0
    mp.step(optim)
    with mp.autocast():
        mp.backward(model(torch.ones(1, 1)).sum())
    mp.step(optim)
    assert optim.param_groups[0]["params"][0].item() == 0.875  # one gradient's worth: the cleared one is gone


def test_state_dict_holds_the_masters_and_resumes():
    mp, model, optim = make(optimizer=torch.optim.Adam, lr=2.0**-12)
    for _ in range(5):
        step(mp, model, optim)
    saved = copy.deepcopy((model.state_dict(), optim.state_dict(), mp.scaler.state_dict()))
    assert saved[1]["precision_master_weights"]["weight"].dtype is torch.float32
    for order in ("model first", "optimizer first"):
        mp2, model2, optim2 = make(optimizer=torch.optim.Adam, lr=2.0**-12)
        loads = [lambda m=model2: m.load_state_dict(saved[0]), lambda o=optim2: o.load_state_dict(saved[1])]
        for load in loads if order == "model first" else loads[::-1]:
            load()
        mp2.scaler.load_state_dict(saved[2])
        assert optim2.param_groups[0]["params"][0].item() == saved[1]["precision_master_weights"]["weight"].item()
        assert torch.equal(model2.weight, saved[0]["weight"])
        for _ in range(5):
            step(mp2, model2, optim2)
        if order == "model first":
            resumed = optim2.param_groups[0]["params"][0].item()
    for _ in range(5):
        step(mp, model, optim)
    assert optim.param_groups[0]["params"][0].item() == resumed == optim2.param_groups[0]["params"][0].item()


def test_loading_the_model_alone_moves_the_masters():
    mp, model, optim = make(lr=0.0)
    model.load_state_dict({"weight": torch.full((1, 1), 3.0, dtype=torch.float16)})
    assert optim.param_groups[0]["params"][0].item() == 3.0
    step(mp, model, optim)
    assert model.weight.item() == 3.0  # a stale master would have put 1 back


def test_a_native_optimizers_state_loads_and_a_truncated_one_does_not():
    _, _, optim = make(optimizer=torch.optim.Adam)
    native = torch.optim.Adam(nn.Linear(1, 1, bias=False).parameters(), lr=0.5)
    optim.load_state_dict(native.state_dict())
    assert optim.param_groups[0]["lr"] == 0.5
    bad = optim.state_dict()
    bad["precision_master_weights"] = {}
    with pytest.raises(StateError, match=r"lacks the master weights of weight"):
        optim.load_state_dict(bad)
    bad["precision_master_weights"] = {"weight": torch.ones(2, 2)}
    with pytest.raises(StateError, match=r"\(2, 2\)"):
        optim.load_state_dict(bad)


def test_masters_start_from_the_unrounded_values():
    mp = bind("float16")
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 + 2.0**-12)
    _, optim = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), master_weights=True)
    assert optim.param_groups[0]["params"][0].item() == 1 + 2.0**-12
    assert model.weight.item() == 1.0


def test_existing_optimizer_state_is_kept_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optim.step()
    mp = bind("bfloat16")
    mp.prepare(model, optim, master_weights=True)
    (master,) = optim.param_groups[0]["params"]
    assert optim.state[master]["momentum_buffer"].dtype is torch.float32
    assert model.weight not in optim.state
    step(mp, model, optim)
    assert optim.state[master]["momentum_buffer"].item() == pytest.approx(1.9)


def test_the_plain_optimizer_works_without_any_scaler():
    _, model, optim = make("bfloat16")
    for _ in range(64):
        optim.zero_grad()
        model(torch.ones(1, 1).bfloat16()).sum().backward()
        optim.step()
    assert optim.param_groups[0]["params"][0].item() == 1 - 64 * 2.0**-13


def test_a_scheduler_and_a_moved_model():
    mp, model, optim = make(lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    step(mp, model, optim)
    scheduler.step()
    assert optim.param_groups[0]["lr"] == 0.25
    attachments(optim).masters.high[0] = nn.Parameter(torch.empty(1, 1, device="meta"))  # as after model.to(device)
    with pytest.raises(MasterWeightsError, match=r"weight was moved from meta to cpu"):
        optim.step()


def test_copies_of_the_model_do_not_hold_the_masters():
    _, model, optim = make()
    other = copy.deepcopy(model)
    other.load_state_dict({"weight": torch.full((1, 1), 3.0)})
    assert optim.param_groups[0]["params"][0].item() == 1.0


def two_layers():
    """Two layers whose gradients, at inputs of 1, are small whole numbers; the first is frozen."""
    mp = bind("bfloat16", initial=1024.0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    model[0].requires_grad_(False)
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    return mp, *mp.prepare(model, optim, master_weights=True)


def backward(mp, model, ins=2):
    with mp.autocast():
        loss = model(torch.ones(1, ins)).sum()
    mp.backward(loss)


def test_a_layer_unfrozen_later_is_refused_until_it_has_masters_and_then_trains():
    mp, model, optim = two_layers()
    model[0].requires_grad_(True)
    plain = bind("bfloat16")  # no loss scale, so that only the optimizer can notice
    backward(plain, model)
    with pytest.raises(MasterWeightsError, match=r"param_groups\[0\]\['params'\]\[0\].*bfloat16.*unfrozen"):
        plain.step(optim)
    optim.zero_grad()
    model[0].zero_grad()
    mp.prepare(model, optim, master_weights=True)
    backward(mp, model)
    assert mp.step(optim).taken
    # d/dW0 = 1 (times 1) and d/dW1 = 2: both unscaled, the ones that had masters before and the new ones
    assert torch.equal(model[0].weight.float(), torch.full((2, 2), 0.5))
    assert torch.equal(model[1].weight.float(), torch.zeros(1, 2))
    assert set(optim.state_dict()["precision_master_weights"]) == {"0.weight", "1.weight"}


def test_two_models_of_one_optimizer_keep_apart():
    mp = bind("bfloat16", initial=1024.0)
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optim = torch.optim.SGD([a.weight, b.weight], lr=0.5)
    for model, value in ((a, 1.0), (b, 4.0)):
        nn.init.constant_(model.weight, value)
        mp.prepare(model, optim, master_weights=True)
    backward(mp, nn.Sequential(a, b), ins=1)
    mp.step(optim)
    assert (a.weight.item(), b.weight.item()) == (-1.0, 3.5)
    saved = optim.state_dict()
    assert {k: v.item() for k, v in saved["precision_master_weights"].items()} == {"weight": -1.0, "weight#2": 3.5}
    nn.init.zeros_(a.weight)
    optim.load_state_dict(saved)
    assert (a.weight.item(), b.weight.item()) == (-1.0, 3.5)


@pytest.mark.parametrize("change", ["load a part", "init", "clamp"])
def test_parameters_changed_in_place_are_taken_over(change):
    mp = bind("bfloat16")
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.init.constant_(model[0].weight, 9.0)
    mp.prepare(model, optim, master_weights=True)
    if change == "load a part":
        model[0].load_state_dict({"weight": torch.full((1, 1), 3.0)})
    elif change == "init":
        nn.init.constant_(model[0].weight, 3.0)
    else:
        with torch.no_grad():
            model[0].weight.clamp_(max=3.0)
    assert optim.state_dict()["precision_master_weights"]["0.weight"].item() == 3.0
    backward(mp, model, ins=1)
    mp.step(optim)
    assert model[0].weight.item() == 2.5


@pytest.mark.parametrize("as_keyword", [False, True])
def test_closures_see_the_weights_and_give_the_gradients(as_keyword):
    mp = bind("bfloat16")
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optim = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)
    mp.prepare(model, optim, master_weights=True)

    def closure():
        optim.zero_grad()
        with mp.autocast():
            loss = (model(torch.ones(1, 1)) - 3).square().sum()
        loss.backward()
        return loss

    first = optim.step(closure=closure) if as_keyword else optim.step(closure)
    assert first.item() == 4.0
    assert abs(model.weight.item() - 3.0) < 2**-5
