"""Autocast with checkpointing, torch.func, torch.compile, FSDP's tensors, and what is saved for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from precision import PrecisionPolicy, Rule

from ..helpers import bind

F32, BF16 = torch.float32, torch.bfloat16


class Block(nn.Module):
    """Ops that the CPU's list leaves low, between matmuls; notes what they gave."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        h = self.inner(x)
        p = F.softmax(h, -1) + h.mean(-1, keepdim=True) + torch.nn.functional.layer_norm(h, (8,))
        if not torch.compiler.is_compiling():
            self.seen.append((h.dtype, p.dtype))
        return self.outer(p)


def gradients(block, how, region, x):
    block.zero_grad()
    with region:
        if how == "plain":
            out = block(x)
        elif how == "sequential":
            out = checkpoint_sequential([block, nn.Identity()], 2, x, use_reentrant=True)
        else:
            out = checkpoint(block, x, use_reentrant=how == "reentrant")
        loss = out.sum()
    loss.backward()
    return [p.grad.clone() for p in block.parameters()]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "sequential"])
def test_checkpoints_recompute_by_the_same_table(how):
    block, mp, x = Block(), bind(), torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
    expected = gradients(block, "plain", mp.autocast(), x)
    block.seen.clear()
    found = gradients(block, how, mp.autocast(), x)
    assert block.seen == [(BF16, F32), (BF16, F32)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch._C._len_torch_function_stack() == 0


def test_a_checkpoint_recomputes_by_its_own_policy_inside_of_another_region():
    low = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),)))
    block, x = Block(), torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
    seen = []

    def run(x):
        seen.append(block.inner(x).softmax(-1).dtype)
        return block(x)

    with bind().autocast():
        out = checkpoint(run, x, use_reentrant=False)
    with low.autocast():
        out.sum().backward()
    assert seen == [F32, F32]


def test_recomputing_with_contexts_and_nested():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    block, mp, x = Block(), bind(), torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
    expected = gradients(block, "plain", mp.autocast(), x)
    block.zero_grad()

    def inner(x):
        return checkpoint(block, x, use_reentrant=False)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    with mp.autocast():
        loss = checkpoint(inner, x, use_reentrant=False, context_fn=contexts).sum()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(block.parameters(), expected, strict=True))


def test_functional_transforms():
    block, mp = Block(), bind()
    x = torch.linspace(-2, 2, 32).view(4, 8)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(mp.autocast(block)(leaf).float().sum(), leaf)[0]

    def loss(x):
        return block(x).float().sum()

    with mp.autocast():
        assert torch.equal(torch.func.grad(loss)(x), expected)
        rows = torch.func.vmap(lambda x: F.softmax(x @ block.inner.weight.T, -1))(x)
        assert rows.dtype is F32 and torch.equal(rows, F.softmax(x @ block.inner.weight.T, -1))
        per_row = torch.func.vmap(torch.func.grad(loss))(x)
    assert torch.allclose(per_row, expected, atol=0.05)
    assert torch.allclose(torch.func.grad(mp.autocast(loss))(x), expected)
    assert torch.func.jvp(mp.autocast(loss), (x,), (x,))[1].isfinite()


# ---- torch.compile ------------------------------------------------------------------------------------------------


def many(x):
    h = F.linear(x, x)
    return (
        h, F.softmax(h, -1), h.sum(), h.mean(-1), h**2, 1 / h, 2 / h, torch.mv(h, x[0]), F.layer_norm(h, h.shape[-1:]), F.gelu(h),
        h.unflatten(-1, (2, -1)), torch.where(h > 0, h, -1e39), F.cross_entropy(h, h.argmax(-1)), h.exp(), torch.einsum("ij,kj->ik", h, x),
        F.interpolate(h[None], scale_factor=2.0), h.sum(dtype=torch.bfloat16), torch.special.expit(h), torch.linalg.vector_norm(h),
        F.scaled_dot_product_attention(h[None], x[None], h[None]), h.float() @ h,
    )  # fmt: skip


def dtypes(results):
    return [each.dtype for each in results]


def compiled(function, backend="eager"):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def test_compiled_inside_of_a_region():
    mp, x, run = bind(), torch.linspace(0.1, 1, 64).view(8, 8), compiled(many)
    with mp.autocast():
        expected, found = many(x), run(x)
    assert dtypes(found) == dtypes(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_around_regions_islands_and_rules():
    rule = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),)))
    mp, plain = bind(), bind("float32")
    decorated = mp.autocast(lambda x: (x @ x).softmax(-1))

    def function(x):
        with mp.autocast():
            low = x @ x
            wide = low.softmax(-1)
            with mp.island() as cast:
                island = cast(low) @ x
            with rule.autocast():
                ruled = x.softmax(-1)
            with plain.autocast(), torch.autocast("cpu", enabled=False):
                full = x @ x
            after = low.softmax(-1)
        return low, wide, island, ruled, full, after, low.softmax(-1), decorated(x)

    x = torch.linspace(0.1, 1, 64).view(8, 8)
    found, expected = compiled(function)(x), function(x)
    assert dtypes(found) == dtypes(expected) == [BF16, F32, F32, BF16, F32, F32, BF16, F32]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_one_compiled_function_under_several_policies():
    function = compiled(lambda x: F.softmax(x @ x, -1))
    x = torch.rand(4, 4)
    low = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),)))
    for _ in range(2):
        for mp, expected in ((bind(), F32), (low, BF16), (bind("float32"), F32)):
            with mp.autocast():
                assert function(x).dtype is expected
        assert function(x.bfloat16()).dtype is BF16


class Model(nn.Module):
    """Attention with weights, a recurrent cell, batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.cell, self.norm = nn.MultiheadAttention(8, 2), nn.LSTMCell(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        h, weights = self.attention(x, x, x)
        h, c = self.cell(h)
        return self.norm(h), c, weights


@pytest.mark.parametrize("prepared", [True, False])
def test_compiled_modules(prepared):
    mp, model, x = bind(), Model(), torch.randn(4, 8)
    if prepared:
        mp.prepare(model)
    with mp.autocast():
        expected = model(x)
        found = compiled(model, "aot_eager")(x)
        sum(each.float().sum() for each in found).backward()
    assert dtypes(found) == dtypes(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert model.cell.weight_ih.grad.dtype is F32


def test_compiled_modules_under_rules():
    rules = (Rule(family="softmax", dtype="bfloat16"), Rule(module="1", dtype="float32"))
    mp = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=rules))
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))),
        torch.rand(2, 4),
    )
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for part in model[1][:2]:
        part.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    mp.prepare(model)
    with mp.autocast():
        expected, found = model(x), compiled(model)(x)
    assert seen == [F32, BF16, F32] * 2
    assert torch.equal(found, expected)


def test_compiled_checkpoints():
    block, mp, x = Block(), bind(), torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
    expected = gradients(block, "plain", mp.autocast(), x)
    block.zero_grad()
    with mp.autocast():
        compiled(lambda x: checkpoint(block, x, use_reentrant=False).sum(), "aot_eager")(x).backward()
    for p, g in zip(block.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, g, rtol=0.02, atol=0.02)


def test_compiled_to_machine_code():
    mp, x = bind(), torch.linspace(-2, 2, 32).view(4, 8)
    with mp.autocast():
        found = compiled(lambda x: F.softmax(x @ x.T, -1).mean(), "inductor")(x)
        expected = F.softmax(x @ x.T, -1).mean()
    assert found.dtype is F32 and torch.allclose(found, expected, atol=1e-4)


# ---- memory -------------------------------------------------------------------------------------------------------


def saved(policy, rows=64):
    """Bytes of all distinct storages kept, the low copies of weights among them; only parameters and the input are not counted."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    model, x = nn.Sequential(layer, nn.Linear(32, 16)), torch.randn(rows, 16, 32)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), x)}
    kept = {}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), bind(policy).autocast():
        F.cross_entropy(model(x).flatten(0, 1), torch.zeros(rows * 16).long())
    return sum(storage.nbytes() for address, storage in kept.items() if address not in given)


def test_bfloat16_keeps_at_most_six_tenths_for_the_backward_pass():
    assert saved("mixed_bfloat16") <= 0.6 * saved("float32")
