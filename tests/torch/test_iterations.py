"""Frameworks that step optimizers one by one: what was unscaled early, to clip it, is neither lost nor unscaled twice."""

import pytest
import torch

import precision
from precision_torch.iterations import Iterations


def made(weights, initial=8.0):
    scale = {"mode": "dynamic", "initial": initial, "growth_interval": 1}
    policy = precision.PrecisionPolicy(compute_dtype="float16", loss_scale=scale)
    iterations = Iterations(precision.bind(policy, backend="torch", device="cpu").grad_scaler())
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(1.0)) for _ in range(weights))
    iterations.watch(module)  # holds it weakly
    iterations.module = module
    return iterations, module, [torch.optim.SGD([weight], lr=0.25) for weight in module]


@pytest.mark.parametrize("early", [(), (0,), (1,), (0, 1)])
def test_optimizers_unscaled_before_any_steps_share_one_update(early):
    iterations, (a, b), optimizers = made(2)
    iterations.scale(a**2).backward()
    iterations.scale(b**2).backward()
    for i in early:
        iterations.unscale(optimizers[i])
        assert optimizers[i].param_groups[0]["params"][0].grad == 2.0
    for optimizer in optimizers:
        assert iterations.step(optimizer).taken
    assert (a.item(), b.item()) == (0.5, 0.5)
    assert iterations.scaler.get_scale() == 16.0


def test_a_backward_after_unscaling_adds_to_it():
    iterations, (a,), (optimizer,) = made(1)
    iterations.scale(a**2).backward()
    iterations.unscale(optimizer)
    torch.nn.utils.clip_grad_norm_([a], 0.5)
    iterations.scale(a**2).backward()
    iterations.step(optimizer)
    assert abs(a.item() - (1 - 0.25 * (0.5 + 2.0))) < 1e-6


def test_a_new_forward_between_unscaling_and_step_leaves_it_unscaled():
    iterations, (a, b), (first, second) = made(2)
    iterations.scale(a**2 + b**2).backward()
    iterations.unscale(second)
    iterations.step(first)
    iterations.settle()
    assert iterations.scaler.get_scale() == 16.0
    assert iterations.step(second).taken
    assert (a.item(), b.item()) == (0.5, 0.5)


def test_an_overflow_seen_early_is_counted_once():
    iterations, (a, b), (first, second) = made(2)
    iterations.scale(a**2).backward()
    iterations.scale(b * float("inf")).backward()
    iterations.unscale(first)
    iterations.unscale(second)
    assert iterations.step(first).taken
    assert not iterations.step(second).taken
    assert (a.item(), b.item()) == (0.5, 1.0)
    assert iterations.scaler.get_scale() == 4.0
    assert int(iterations.scaler.state.skipped) == 1
