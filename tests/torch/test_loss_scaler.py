"""The neutral, explicit-state scaler on trees of tensors."""

import math

import pytest
import torch
from torch import nn

from precision import LossScaleError, NonFiniteGradientsError

from .helpers import bind


def scaler_of(**kwargs):
    return bind("float32", **({"initial": 8.0} | kwargs)).loss_scaler


def test_unscale_is_pure_and_gives_float32_or_wider():
    scaler = scaler_of()
    state = scaler.init()
    grads = {
        "f16": torch.full((2,), 8.0).half(), "bf16": [torch.full((2,), 8.0).bfloat16()], "f32": torch.full((2,), 8.0),
        "f64": (torch.full((2,), 8.0, dtype=torch.float64),), "c64": torch.full((2,), 8j, dtype=torch.complex64),
        "int": torch.tensor([8]), "none": None,
    }  # fmt: skip
    out, finite = scaler.unscale(grads, state)
    assert finite.dtype is torch.bool and finite.shape == () and bool(finite)
    assert out["f16"].dtype is out["bf16"][0].dtype is out["f32"].dtype is torch.float32
    assert out["f64"][0].dtype is torch.float64 and out["c64"].dtype is torch.complex64
    assert all((t == 1).all() for t in (out["f16"], out["bf16"][0], out["f32"], out["f64"][0]))
    assert (out["c64"] == 1j).all() and out["int"] is grads["int"] and out["none"] is None
    assert all(float(t[0]) == 8.0 for t in (grads["f16"], grads["bf16"][0], grads["f32"], grads["f64"][0]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_any_non_finite_leaf_is_found(bad, dtype):
    scaler = scaler_of()
    leaf = torch.tensor([1.0, bad]).to(dtype)
    assert not bool(scaler.unscale([torch.ones(3), {"x": leaf}], scaler.init())[1])
    assert bool(scaler.unscale([torch.ones(3), {"x": torch.ones(2).to(dtype)}], scaler.init())[1])


def test_small_float16_gradients_survive():
    scaler = scaler_of(initial=2.0**16)
    tiny = torch.tensor([2.0**-24]).half()  # the smallest float16
    (out,), _ = scaler.unscale([tiny], scaler.init())
    assert out.item() == 2.0**-40


def test_overflow_of_the_result_counts():
    scaler = scaler_of(initial=2.0**-20)
    assert not bool(scaler.unscale([torch.tensor([1e36])], scaler.init())[1])


def test_a_module_stands_for_its_gradients():
    scaler, model = scaler_of(), nn.Linear(2, 1)
    state = scaler.init()
    scaler.scale(model(torch.ones(1, 2)).sum(), state).backward()
    grads, finite = scaler.unscale(model, state)
    assert set(grads) == {"weight", "bias"} and bool(finite)
    assert grads["weight"].tolist() == [[1.0, 1.0]] and model.weight.grad.tolist() == [[8.0, 8.0]]


def test_sparse_gradients_coalesce_in_float32():
    scaler = scaler_of()
    table = nn.Embedding(3, 1, sparse=True)
    state = scaler.init()
    scaler.scale(table(torch.tensor([1, 1])).sum(), state).backward()
    grads, finite = scaler.unscale(table, state)
    assert grads["weight"].to_dense().flatten().tolist() == [0.0, 2.0, 0.0] and bool(finite)


def test_functional_training_with_torch_func():
    scaler = scaler_of(initial=2.0**10)
    state, w = scaler.init(), {"w": torch.tensor([2.0])}
    grads = torch.func.grad(lambda p: scaler.scale((p["w"] ** 2).sum(), state))(w)
    grads, finite = scaler.unscale(grads, state)
    assert grads["w"].item() == 4.0 and bool(finite)


def test_it_compiles_in_one_graph():
    scaler = scaler_of(growth_interval=2)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(grads, state):
        grads, finite = scaler.unscale(grads, state)
        return grads, scaler.update(state, finite)

    state, eager = scaler.init(), scaler.init()
    for value in (1.0, 2.0, math.inf, 3.0):
        grads, state = step([torch.tensor([8.0, 8.0 * value])], state)
        eager = scaler.update(eager, math.isfinite(value))
        assert scaler.state_dict(state) == scaler.state_dict(eager)
    assert grads[0].tolist() == [8.0 / 8.0, 24.0 / 8.0]


def test_mode_none_is_the_identity():
    scaler, x = bind("float32").loss_scaler, torch.tensor([math.inf])
    state = scaler.init()
    assert scaler.scale(x, state) is x
    out, finite = scaler.unscale([x], state)
    assert out[0] is x and bool(finite)


def test_empty_trees_are_finite_and_checks_raise():
    scaler = scaler_of(max_consecutive_skips=1)
    state = scaler.init()
    assert bool(scaler.unscale([], state)[1])
    for _ in range(2):
        state = scaler.update(state, False)
    with pytest.raises(NonFiniteGradientsError):
        scaler.check(state)
    assert not issubclass(NonFiniteGradientsError, LossScaleError)


def test_lazy_conjugates_are_unscaled():
    scaler = scaler_of()
    grads, finite = scaler.unscale([torch.full((1,), 8 + 16j).conj(), torch.full((1,), 8j).conj().imag], scaler.init())
    assert (grads[0].item(), grads[1].item(), bool(finite)) == (1 - 2j, -1.0, True)
