"""Modules and functions made of others: attention with weights, recurrent cells and layers, masks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..helpers import bind

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Ops(TorchDispatchMode):
    """Which ops ran below autocasting, and on which floating dtypes."""

    def __init__(self):
        super().__init__()
        self.ran = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        dtypes = {t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}
        self.ran.setdefault(func.overloadpacket.__name__, []).append(dtypes)
        return func(*args, **(kwargs or {}))


def run(module, *args, policy="mixed_bfloat16", **kwargs):
    with Ops() as ops, bind(policy).autocast():
        return module(*args, **kwargs), ops.ran


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention(weights):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    (out, weights_given), ran = run(attention, x, x, x, need_weights=weights)
    assert out.dtype is BF16
    if weights:
        assert weights_given.dtype is F32 and ran["_softmax"] == [{F32}] and ran["bmm"] == [{BF16}, {BF16}]
        assert torch.allclose(weights_given.sum(-1), torch.ones(2, 3), atol=1e-6)
    assert torch.allclose(out.float(), attention(x, x, x)[0], atol=0.02)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_has_the_same_decisions_in_evaluation(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    out, ran = run(layer, torch.randn(2, 3, 8))
    assert out.dtype is F32 and all(dtypes == {F32} for dtypes in ran["native_layer_norm"])
    assert all(dtypes == {BF16} for dtypes in ran["addmm"]) and "_transformer_encoder_layer_fwd" not in ran


CELLS = [(nn.LSTMCell, F32), (nn.GRUCell, F32), (nn.RNNCell, BF16)]


@pytest.mark.parametrize(("kind", "gives"), CELLS)
def test_cells_follow_the_table_inside(kind, gives):
    torch.manual_seed(0)
    cell, x = kind(4, 3), torch.randn(2, 4)
    state = (torch.randn(2, 3), torch.randn(2, 3)) if kind is nn.LSTMCell else torch.randn(2, 3)
    out, ran = run(cell, x, state)
    out = out if isinstance(out, tuple) else (out,)
    assert all(each.dtype is gives for each in out)
    assert ran["addmm"] == [{BF16}, {BF16}]
    exact = cell(x, state)
    for ours, theirs in zip(out, exact if isinstance(exact, tuple) else (exact,), strict=True):
        assert torch.allclose(ours.float(), theirs, atol=0.03)


@pytest.mark.parametrize(("kind", "gives"), CELLS)
def test_in_float32_the_cells_parts_are_the_cell(kind, gives):
    from precision_torch.op_treatments import cell_of

    torch.manual_seed(0)
    cell, x = kind(4, 3), torch.randn(2, 4)
    function = {nn.LSTMCell: torch.lstm_cell, nn.GRUCell: torch.gru_cell, nn.RNNCell: torch.rnn_tanh_cell}[kind]
    state = (torch.randn(2, 3), torch.randn(2, 3)) if kind is nn.LSTMCell else torch.randn(2, 3)
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    for bias in (weights, weights[:2]):
        ours, theirs = cell_of(function)(x, state, *bias), function(x, state, *bias)
        for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_layer_over_a_whole_sequence_is_one_matmul(kind):
    torch.manual_seed(0)
    layer, x = kind(4, 3, num_layers=2, bidirectional=True), torch.randn(5, 2, 4)
    (out, state), _ = run(layer, x)
    assert out.dtype is BF16 and all(s.dtype is BF16 for s in (state if isinstance(state, tuple) else (state,)))
    assert torch.allclose(out.float(), layer(x)[0], atol=0.05)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    (out, _), _ = run(layer, packed)
    assert out.data.dtype is BF16
    out.data.float().sum().backward()
    assert layer.weight_ih_l0.grad.dtype is F32 and layer.weight_ih_l0.grad.abs().sum() > 0


# ---- masks --------------------------------------------------------------------------------------------------------


def additive(value):
    mask = torch.zeros(1, 1, 3, 3)
    mask[..., 1:] = value
    mask[..., 0, :] = value  # a row with nothing to look at
    return mask


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_finite_mask_stays_finite_in_attention(policy):
    torch.manual_seed(0)
    q, mask = torch.randn(1, 1, 3, 8), additive(torch.finfo(F32).min)
    out, _ = run(F.scaled_dot_product_attention, q, q, q, mask, policy=policy)
    assert out.isfinite().all()
    exact = F.scaled_dot_product_attention(q, q, q, mask)
    assert torch.allclose(out[..., 1:, :].float(), exact[..., 1:, :], atol=0.02)
    with torch.autocast("cpu", F16 if policy == "mixed_float16" else BF16):
        blind = F.scaled_dot_product_attention(q, q, q, mask)[..., 0, :]
    # The fault: the mask becomes -inf, and what looks at nothing sees zero or NaN rather than a mean.
    assert blind.isnan().all() or (blind == 0).all()
    if policy == "mixed_bfloat16":
        assert torch.allclose(out[..., 0, :].float(), q.mean(-2), atol=0.02)
    keyword, _ = run(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), policy=policy)
    assert torch.equal(keyword, out)


def test_minus_infinity_in_a_mask_stays_so():
    q, mask = torch.ones(1, 1, 2, 8), torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    q[..., 1, :] = 3.0
    out, _ = run(F.scaled_dot_product_attention, q, q, q, mask)
    assert out[0, 0, 0, 0] == 1.0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_finite_mask_stays_finite_in_multi_head_attention(policy):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 1, batch_first=True), torch.randn(1, 3, 8)
    mask = additive(torch.finfo(F32).min)[0, 0]
    (out, weights), _ = run(attention, x, x, x, attn_mask=mask, policy=policy)
    assert out.isfinite().all() and weights.isfinite().all()


@pytest.mark.parametrize(
    "fill",
    [
        lambda scores, mask: scores.masked_fill(mask, -1e9), lambda scores, mask: scores.clone().masked_fill_(mask, -1e9),
        lambda scores, mask: torch.where(mask, -1e9, scores), lambda scores, mask: torch.masked_fill(scores, mask, float(torch.finfo(F32).min)),
    ],
)  # fmt: skip
def test_a_number_beyond_float16_fills_with_the_largest_it_has(fill):
    scores, mask = torch.ones(2, 2, dtype=F16), torch.tensor([[True, True], [False, True]])
    with bind("mixed_float16").autocast():
        filled = fill(scores, mask)
        assert filled.dtype is F16 and filled.isfinite().all() and filled[0, 0] == -65504
        assert torch.equal(filled.softmax(-1), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        assert fill(scores.float(), mask)[0, 0] <= -1e9
        assert scores.masked_fill(mask, -torch.inf).isinf().any()


def test_prepared_and_unprepared_models_agree():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)
    )
    mp, x = bind(), torch.randn(2, 1, 4, 4)
    prepared = mp.prepare(copy.deepcopy(model))[0]
    with mp.autocast():
        assert torch.equal(model(x), prepared(x))
