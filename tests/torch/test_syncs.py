"""No step reads the device more often than the native one does; with a fused optimizer it never does."""

import pytest
import torch

from .helpers import HostReads, bind


def counted(scaler, optimizer, model, steps, clip=False):
    x = torch.ones(4, 3)
    with HostReads() as reads:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return reads.count


def build(fused):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_host_reads_per_step(fused, clip):
    steps = 5
    native = counted(torch.amp.GradScaler("cpu"), *build(fused)[::-1], steps, clip)
    mp = bind("float32", initial=8.0, hysteresis=2, max_consecutive_skips=100)
    model, optimizer = mp.prepare(*build(fused))
    ours = counted(mp.grad_scaler(), optimizer, model, steps, clip)
    assert ours == native == (0 if fused else steps)


def test_convenience_forms_read_no_more():
    for form in ("mp.step", "mp.optimizer"):
        mp = bind("float32", initial=8.0)
        model, optimizer = mp.prepare(*build(fused=True))
        wrapped = mp.optimizer(optimizer, clip_norm=1.0)
        with HostReads() as reads:
            for _ in range(3):
                optimizer.zero_grad()
                mp.backward(model(torch.ones(4, 3)).square().mean())
                if form == "mp.step":
                    result = mp.step(optimizer, clip_norm=1.0, clip_value=1.0)
                else:
                    result = wrapped.step()
            assert reads.count == 0
            assert result.taken
            assert reads.count == 1  # asking is what reads


def test_the_neutral_scaler_reads_nothing():
    scaler = bind("float32", initial=8.0, growth_interval=1, hysteresis=3).loss_scaler
    state = scaler.init()
    grads = {"a": torch.ones(2), "b": [torch.ones(3).half()]}
    with HostReads() as reads:
        for _ in range(3):
            scaler.scale(torch.ones(()), state)
            _, finite = scaler.unscale(grads, state)
            state = scaler.update(state, finite)
    assert reads.count == 0
    assert float(state.scale) == 64.0


def test_the_counter_counts():
    with HostReads() as reads:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert reads.count == 2
