"""Whole training steps: under torch.compile, with checkpointing and accumulation, and on real data."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from precision import PrecisionPolicy, Rule

from .helpers import bind


class Net(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 4)
        self.checkpointed = checkpointed  # use_reentrant

    def forward(self, x):
        if self.checkpointed is None:
            return self.head(self.second(self.first(x)))
        x = checkpoint(self.first, x, use_reentrant=self.checkpointed)
        return self.head(self.second(x))


def make(policy="mixed_bfloat16", checkpointed=None, **prepare):
    torch.manual_seed(0)
    if isinstance(policy, str):
        policy = PrecisionPolicy.from_name(policy)
    mp = bind(policy.with_(rules=(Rule(module="head", dtype="float32"),)), initial=2.0**10)
    model = Net(checkpointed)
    model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **prepare)
    return mp, model, optimizer


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(mp, model, optimizer, steps=3, forward=None):
    forward = model if forward is None else forward
    losses = []
    for i in range(steps):
        x, y = batch(i)
        optimizer.zero_grad()
        with mp.autocast():
            loss = F.cross_entropy(forward(x), y)
        mp.backward(loss)
        mp.step(optimizer, clip_norm=1.0)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_numbers(reentrant):
    expected = train(*make())
    mp, model, optimizer = make(checkpointed=reentrant)
    if reentrant:  # torch's reentrant form needs an input that requires a gradient
        assert train(mp, model, optimizer, forward=lambda x: model(x.requires_grad_())) == expected
    else:
        assert train(mp, model, optimizer) == expected


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32", "bfloat16"])
def test_a_compiled_model_trains_as_the_eager_one(policy):
    masters = {"master_weights": True} if policy == "bfloat16" else {}
    expected = train(*make(policy, **masters))
    mp, model, optimizer = make(policy, **masters)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert train(mp, model, optimizer, forward=compiled) == pytest.approx(expected, rel=1e-2)


def test_autocast_islands_and_ops_trace_in_one_graph():
    mp = bind("mixed_bfloat16")
    model, _ = mp.prepare(Net())
    softmax = mp.op("softmax")(lambda x: x.softmax(-1))
    square = mp.island("float32")(lambda x: x @ x.T)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(x):
        with mp.autocast():
            out = model(x)
            low = model.first[0](x)
            with mp.island("float32") as cast:
                exact = cast(low) @ cast(low).T
            return out, low, exact, softmax(low), square(low), mp.cast_to_compute({"o": out})["o"]

    out, low, exact, probabilities, squared, cast = step(batch()[0])
    assert [t.dtype for t in (out, low, exact, probabilities, squared, cast)] == [
        torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.bfloat16,
    ]  # fmt: skip
    assert len(graphs) == 1
    assert not torch.is_autocast_enabled("cpu")


def test_scaling_the_loss_inside_a_compiled_function():
    mp, model, optimizer = make()

    @torch.compile(backend="aot_eager")
    def scaled(x, y):
        with mp.autocast():
            loss = F.cross_entropy(model(x), y)
        return mp.scaler.scale(loss)

    scaled(*batch()).backward()
    assert mp.step(optimizer).taken


@pytest.mark.slow
def test_inductor_compiles_a_prepared_model():
    torch.manual_seed(0)
    mp = bind("mixed_bfloat16")
    model, _ = mp.prepare(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    compiled = torch.compile(model, fullgraph=True)
    with mp.autocast(), torch.no_grad():
        out = compiled(batch()[0])
        assert out.dtype is torch.float32
        assert torch.allclose(out, model(batch()[0]), atol=2e-2)


def test_accumulation_equals_one_large_batch():
    def gradients(parts):
        mp, model, optimizer = make()
        model.second[1] = nn.Identity()  # batch norm sees the parts
        x, y = batch()
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with mp.autocast():
                loss = F.cross_entropy(model(xs), ys) / parts
            mp.backward(loss)
        mp.scaler.unscale_(optimizer)
        return [p.grad for p in model.parameters() if p.grad is not None]

    for whole, summed in zip(gradients(1), gradients(4), strict=True):
        assert torch.allclose(whole, summed, atol=2e-3, rtol=2e-2)


def test_several_losses_share_the_scale():
    mp, model, optimizer = make("float32")
    x, y = batch()
    with mp.autocast():
        out = model(x)
        losses = F.cross_entropy(out, y), out.square().mean()
    mp.backward(*losses)
    mp.scaler.unscale_(optimizer)
    together = [p.grad.clone() for p in model.parameters()]
    mp2, model2, _ = make("float32")
    with mp2.autocast():
        out = model2(x)
        (F.cross_entropy(out, y) + out.square().mean()).backward()
    for ours, plain in zip(together, (p.grad for p in model2.parameters()), strict=True):
        assert torch.allclose(ours, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": False}])
def test_every_kind_of_adam(kwargs):
    torch.manual_seed(0)
    mp, model = bind("mixed_bfloat16", initial=8.0), Net()
    model, optimizer = mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs))
    before = [p.detach().clone() for p in model.parameters()]
    train(mp, model, optimizer, steps=2)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert mp.scaler.state_dict()["good_steps"] == 2


def test_gradient_penalty_with_create_graph():
    mp, model, optimizer = make("float32")
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    scaled = torch.autograd.grad(mp.scaler.scale(loss), list(model.parameters()), create_graph=True)
    penalty = sum((g / mp.scaler.get_scale()).square().sum() for g in scaled)
    mp.backward(loss + penalty)
    assert mp.step(optimizer).taken


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_training_on_digits_learns(policy):
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.from_numpy((data.data / 16.0).astype(np.float32))
    y = torch.from_numpy(data.target)
    small = "16" in policy and "bf" not in policy  # float16 products are very slow on a CPU
    torch.manual_seed(0)
    mp = bind(policy)
    model = nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))
    model, optimizer = mp.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), master_weights=True)
    losses, order = [], np.random.default_rng(0)
    for _ in range(60 if small else 100):
        rows = torch.from_numpy(order.integers(0, len(x), 16 if small else 64))
        optimizer.zero_grad()
        with mp.autocast():
            loss = F.cross_entropy(model(x[rows]).float(), y[rows])
        mp.backward(loss)
        mp.step(optimizer)
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    assert np.isfinite(losses).all()
