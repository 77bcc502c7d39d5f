"""``mp.optimizer``, ``mp.backward`` and ``mp.step``: the short forms of a training step."""

import copy
import math
import pickle

import pytest
import torch

from precision import LossScaleError, PolicyError

from .helpers import bind, weight


def wrapped(mp, *params, **kwargs):
    return mp.optimizer(torch.optim.SGD(list(params), lr=0.5), **kwargs)


def test_it_is_an_optimizer_that_scales_clips_skips_and_updates():
    mp, w = bind("float32", initial=8.0, growth_interval=1), weight(1.0, 1.0)
    optimizer = wrapped(mp, w, clip_norm=1.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.backward((w * torch.tensor([3.0, 4.0])).sum())
    assert optimizer.step().taken
    assert torch.allclose(w.detach(), torch.tensor([0.7, 0.6]))
    assert optimizer.scaler.get_scale() == 16.0
    optimizer.zero_grad()
    optimizer.backward(w.sum() * math.inf)
    assert optimizer.step().skipped
    assert torch.allclose(w.detach(), torch.tensor([0.7, 0.6]))
    assert optimizer.scaler.get_scale() == 8.0


def test_clip_value():
    mp, w = bind("float32", initial=8.0), weight(1.0, 1.0)
    optimizer = wrapped(mp, w, clip_value=0.5)
    optimizer.scale((w * torch.tensor([3.0, -0.25])).sum()).backward()
    optimizer.step()
    assert w.detach().tolist() == [0.75, 1.125]


def test_it_shares_the_scaler_with_mp_backward():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    optimizer = wrapped(mp, w)
    mp.backward(w.sum())
    assert optimizer.step().taken and w.item() == 0.5
    with pytest.raises(LossScaleError, match="before any loss was scaled"):
        optimizer.step()
    own = wrapped(mp, w, scaler=mp.grad_scaler())
    assert own.scaler is not mp.scaler


def test_schedulers_groups_hooks_and_copies():
    mp, w, v = bind("float32", initial=8.0), weight(1.0), weight(1.0)
    optimizer = wrapped(mp, w)
    optimizer.add_param_group({"params": [v], "lr": 1.0})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.backward(w.sum() + v.sum())
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5]
    assert calls == [1] and (w.item(), v.item()) == (0.5, 0.0)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [g["lr"] for g in other.param_groups] == [0.25, 0.5]
        other.backward(other.param_groups[0]["params"][0].sum())
        assert other.step().taken
    assert w.item() == 0.5


def test_state_dict_carries_the_loss_scale():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    optimizer = mp.optimizer(torch.optim.Adam([w], lr=0.5))
    optimizer.backward(w.sum() * math.inf)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["loss_scale"]["scale"] == 4.0 and "param_groups" in saved
    fresh = bind("float32", initial=8.0).optimizer(torch.optim.Adam([weight(1.0)], lr=0.1))
    fresh.load_state_dict(saved)
    assert fresh.scaler.get_scale() == 4.0 and fresh.param_groups[0]["lr"] == 0.5
    fresh.load_state_dict(torch.optim.Adam([weight(1.0)], lr=0.25).state_dict())
    assert fresh.scaler.get_scale() == 4.0 and fresh.param_groups[0]["lr"] == 0.25


def test_closures():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    with pytest.raises(LossScaleError, match="closures"):
        wrapped(mp, w).step(lambda: 0.0)
    lbfgs = bind("mixed_bfloat16").optimizer(torch.optim.LBFGS([w], line_search_fn="strong_wolfe"))

    def closure():
        lbfgs.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        lbfgs.step(closure)
    assert abs(w.item()) < 1e-3


def test_step_takes_several_optimizers_and_updates_once():
    mp, a, b = bind("float32", initial=8.0, growth_interval=1), weight(1.0), weight(1.0)
    first, second = (torch.optim.SGD([p], lr=0.5) for p in (a, b))
    mp.backward(a.sum(), b.sum() * 2)
    assert [r.taken for r in mp.step(first, second)] == [True, True]
    assert (a.item(), b.item(), mp.scaler.get_scale()) == (0.5, 0.0, 16.0)


def test_step_without_update_leaves_it_to_the_caller():
    mp, a, b = bind("float32", initial=8.0, growth_interval=1), weight(1.0), weight(1.0)
    mp.backward(a.sum() + b.sum())
    mp.step(torch.optim.SGD([a], lr=0.5), update=False)
    mp.step(torch.optim.SGD([b], lr=0.5), update=False)
    assert mp.scaler.get_scale() == 8.0
    mp.scaler.update()
    assert (a.item(), b.item(), mp.scaler.get_scale()) == (0.5, 0.5, 16.0)


def test_clipping_works_without_loss_scaling_too():
    mp, w = bind("mixed_bfloat16"), weight(1.0, 1.0)
    mp.backward((w * torch.tensor([3.0, 4.0])).sum())
    assert mp.step(torch.optim.SGD([w], lr=0.5), clip_norm=1.0).taken
    assert torch.allclose(w.detach(), torch.tensor([0.7, 0.6]))


def test_gradients_are_kept_until_zeroed():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    mp.backward(w.sum())
    mp.step(torch.optim.SGD([w], lr=0.5))
    assert w.grad.item() == 1.0  # unscaled, to be looked at


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_limits_must_be_positive_numbers(bad):
    mp, w = bind("float32"), weight(1.0)
    native = torch.optim.SGD([w], lr=0.5)
    for call in (
        lambda: mp.step(native, clip_norm=bad),
        lambda: mp.step(native, clip_value=bad),
        lambda: mp.optimizer(native, clip_norm=bad),
    ):
        with pytest.raises(PolicyError, match=r"clip_(norm|value)"):
            call()


def test_wrong_optimizers_are_refused():
    mp, w = bind("float32"), weight(1.0)
    with pytest.raises(PolicyError, match="torch.optim"):
        mp.optimizer("sgd")
    with pytest.raises(PolicyError, match="ScaledOptimizer"):
        mp.optimizer(wrapped(mp, w))
    with pytest.raises(PolicyError, match="optimizers of this iteration"):
        mp.step()


def test_a_wrapped_optimizer_may_be_given_to_step_and_to_a_scaler():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    optimizer = wrapped(mp, w)
    mp.backward(w.sum())
    assert mp.step(optimizer).taken
    optimizer.zero_grad()
    scaler = mp.grad_scaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer).taken
    scaler.update()
    assert w.item() == 0.0


def test_step_keeps_the_limits_of_a_wrapped_optimizer():
    mp, w = bind("float32", initial=8.0), weight(0.0)
    optimizer = wrapped(mp, w, clip_norm=1.0)
    for clip, moved in (({}, 0.5), ({"clip_norm": 2.0}, 1.0)):
        optimizer.zero_grad()
        before = w.item()
        mp.backward(w.sum() * 100)
        mp.step(optimizer, **clip)
        assert before - w.item() == pytest.approx(moved, rel=1e-5)


def test_step_refuses_optimizers_that_share_a_parameter():
    mp, w = bind("float32", initial=8.0), weight(1.0)
    a, b = (torch.optim.SGD([w], lr=0.5) for _ in range(2))
    mp.backward(w.sum())
    with pytest.raises(LossScaleError, match="same parameter"):
        mp.step(a, b)
    assert w.item() == 1.0


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_lists_and_nothing_are_refused(policy):
    mp, w = bind(policy), weight(1.0)
    with pytest.raises(PolicyError, match="one by one"):
        mp.step([torch.optim.SGD([w], lr=0.5)])
    with pytest.raises(PolicyError, match=r"mp.backward\(loss\)"):
        mp.backward()


def test_a_closures_gradients_are_not_left_unclipped():
    w = weight(1.0)
    with pytest.raises(LossScaleError, match="not clipped"):
        wrapped(bind("float32"), w, clip_norm=1.0).step(lambda: w.sum())


def test_no_optimizer_steps_if_another_has_no_gradients():
    mp = bind("float32", initial=8.0)
    a, b = weight(1.0), weight(1.0)
    optimizers = [torch.optim.SGD([w], lr=0.5) for w in (a, b)]
    mp.backward(a.sum())
    with pytest.raises(LossScaleError, match="no gradients, and no optimizer has stepped"):
        mp.step(*optimizers)
    assert (a.item(), b.item()) == (1.0, 1.0)
    assert mp.step(optimizers[0]).taken
    assert (a.item(), b.item()) == (0.5, 1.0)


def test_several_optimizers_with_masters_step_together():
    mp = bind("bfloat16", initial=8.0)
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = []
    for model in models:
        torch.nn.init.ones_(model.weight)
        optimizers.append(mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), master_weights=True)[1])
    with mp.autocast():
        loss = models[1](models[0](torch.ones(1, 1))).sum()
    mp.backward(loss)
    assert all(mp.step(*optimizers))
    assert [model.weight.item() for model in models] == [0.5, 0.5]
