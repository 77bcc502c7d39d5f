"""BatchNorm statistics and skipped steps."""

import copy
import math

import pytest
import torch
from torch import nn

from precision import PolicyError

from .helpers import HostReads, bind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layers[2](self.layers[1](self.layers[0](x))[:, :, None].expand(-1, -1, 3) * x[:, :1, None])


def make(fused=False, **kwargs):
    torch.manual_seed(0)
    mp = bind("float32", initial=8.0)
    model = Net()
    model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), **kwargs)
    return mp, model, optimizer


def step(mp, model, optimizer, x):
    optimizer.zero_grad()
    mp.backward(model(x).square().sum())
    return mp.step(optimizer)


GOOD, BAD = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, math.inf], [3.0, 5.0]])


def test_buffers_come_back_by_name_beside_the_statistics_or_alone():
    for which, back, stay in (
        (["batch_norm", "calls"], {"calls", "layers.1.running_mean", "layers.2.running_var"}, set()),
        (["calls"], {"calls"}, {"layers.1.num_batches_tracked"}),
        (["layers.*.num_*"], {"layers.1.num_batches_tracked", "layers.2.num_batches_tracked"}, {"calls"}),
    ):
        mp, model, optimizer = make(restore_on_skip=which)
        assert step(mp, model, optimizer, GOOD).taken
        before = buffers(model)
        assert step(mp, model, optimizer, BAD).skipped
        after = buffers(model)
        for name in back:
            assert torch.equal(after[name], before[name]), (which, name)
        for name in stay:
            assert not torch.equal(after[name], before[name]), (which, name)


@pytest.mark.parametrize("which", [["nobody"], [], [1], "running_mean", ["calls", ""]])
def test_a_name_that_means_no_buffer_is_refused(which):
    with pytest.raises(PolicyError, match="restore_on_skip"):
        make(restore_on_skip=which)


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("fused", [False, True])
def test_taken_steps_move_statistics_and_skipped_ones_do_not(fused):
    mp, model, optimizer = make(fused)
    assert step(mp, model, optimizer, GOOD).taken
    after_good = buffers(model)
    assert after_good["layers.1.num_batches_tracked"] == 1 and after_good["layers.1.running_mean"].abs().sum() > 0
    assert step(mp, model, optimizer, BAD).skipped
    for name, value in buffers(model).items():
        if name != "calls":
            assert torch.equal(value, after_good[name]), name
    assert model.calls == 2
    assert step(mp, model, optimizer, GOOD).taken
    assert model.layers[1].num_batches_tracked == 2
    assert all(torch.isfinite(value).all() for value in buffers(model).values())


def test_all_micro_batches_of_a_skipped_step_are_taken_back():
    mp, model, optimizer = make()
    before = buffers(model)
    for x in (GOOD, BAD, GOOD):
        mp.backward(model(x).square().sum())
    assert mp.step(optimizer).skipped
    assert torch.equal(model.layers[1].running_mean, before["layers.1.running_mean"])


def test_other_buffers_on_request_and_nothing_on_request():
    mp, model, optimizer = make(restore_on_skip="buffers")
    step(mp, model, optimizer, BAD)
    assert model.calls == 0
    mp, model, optimizer = make(restore_on_skip="nothing")
    step(mp, model, optimizer, BAD)
    assert not torch.isfinite(model.layers[1].running_mean).all()


def test_loaded_statistics_are_what_a_skip_goes_back_to():
    mp, model, optimizer = make()
    saved = {**copy.deepcopy(model.state_dict()), "layers.1.running_mean": torch.tensor([5.0, 6.0])}
    model.load_state_dict(saved)
    assert step(mp, model, optimizer, BAD).skipped
    assert model.layers[1].running_mean.tolist() == [5.0, 6.0]


def test_a_model_whose_buffers_changed_dtype_is_followed():
    mp, model, optimizer = make()
    step(mp, model, optimizer, GOOD)
    model.layers[1].running_mean.data = model.layers[1].running_mean.data.double()
    model.layers[1].running_var.data = model.layers[1].running_var.data.double()
    mean = model.layers[1].running_mean.clone()
    optimizer.zero_grad()
    mp.backward(model.layers[0](BAD).sum())
    model.layers[1].running_mean.fill_(math.nan)
    assert mp.step(optimizer).skipped
    assert model.layers[1].running_mean.dtype is torch.float64
    assert torch.equal(model.layers[1].running_mean, mean)


def test_two_optimizers_restore_if_either_overflows():
    mp = bind("float32", initial=8.0)
    model = Net()
    a = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    b = torch.optim.SGD(model.layers[1].parameters(), lr=0.1)
    mp.prepare(model, [a, b])
    mp.backward(model(GOOD).square().sum())
    model.layers[1].weight.grad.fill_(math.nan)
    first, second = mp.step(a, b)
    assert first.taken and second.skipped
    assert model.layers[1].num_batches_tracked == 0


def test_restoring_reads_nothing():
    mp, model, optimizer = make(fused=True)
    with HostReads() as reads:
        for x in (GOOD, BAD, GOOD):
            step(mp, model, optimizer, x)
    assert reads.count == 0
    assert model.layers[1].num_batches_tracked == 2


def test_statistics_loaded_into_a_part_are_what_a_skip_goes_back_to():
    mp, model, optimizer = make()
    norm = model.layers[1]
    norm.load_state_dict(norm.state_dict() | {"running_mean": torch.full((2,), 5.0)})
    assert step(mp, model, optimizer, BAD).skipped
    assert torch.equal(norm.running_mean, torch.full((2,), 5.0))
    assert torch.equal(model.layers[2].running_mean, torch.zeros(2))


def test_preparing_again_may_switch_it_off():
    mp, model, optimizer = make()
    mp.prepare(model, optimizer, restore_on_skip="nothing")
    assert step(mp, model, optimizer, BAD).skipped
    assert model.layers[1].num_batches_tracked == 1
    assert not torch.isfinite(model.layers[1].running_mean).all()


def test_buffers_that_cannot_be_restored():
    mp = bind("float32", initial=8.0)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(4))  # cannot be written to, so it is left out
    model.register_buffer("cache", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    mp.prepare(model, optimizer, restore_on_skip="buffers")
    assert step(mp, model, optimizer, GOOD).taken
    model.cache = torch.zeros(5)
    with pytest.raises(PolicyError, match="changed its shape.*cache.*'batch_norm'"):
        step(mp, model, optimizer, GOOD)


def test_optimizers_that_take_turns_go_back_to_the_last_step_of_either():
    mp, model = bind("float32", initial=8.0), Net()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.layers[0], model.layers[1]))
    mp.prepare(model, [first, second])
    for _ in range(3):
        assert step(mp, model, first, GOOD).taken
    model.zero_grad()
    before = buffers(model)
    assert before["layers.1.num_batches_tracked"] == 3
    assert step(mp, model, second, BAD).skipped
    for name in ("layers.1.num_batches_tracked", "layers.1.running_mean", "layers.2.running_var"):
        assert torch.equal(buffers(model)[name], before[name]), name


def test_models_prepared_together_are_restored_together():
    """A GAN's generator also runs in the discriminator's iterations."""
    mp = bind("float32", initial=8.0)
    generator, discriminator = nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
    mp.prepare(nn.ModuleList([generator, discriminator]), optimizers)
    mp.backward(discriminator(generator(BAD).detach()).sum())
    assert mp.step(optimizers[1]).skipped
    assert torch.equal(generator[0].running_mean, torch.zeros(2))
