"""Rules by op family act on every op; rules by module as before, and where both apply the first one wins."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import precision
from precision import PolicyError, PrecisionPolicy, PrecisionWarning, Rule

from ..helpers import bind

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WIDE = torch.linspace(-1, 1, 16).view(4, 4)
LOW = WIDE.bfloat16()


def policy(*rules, compute="bfloat16", **others):
    made = tuple(
        Rule(**{"module" if key not in precision.ops.FAMILIES else "family": key, "dtype": dtype})
        for key, dtype in rules
    )
    return PrecisionPolicy(compute_dtype=compute, rules=made, **others)


CALLS = {
    "matmul": lambda x: x @ x.T,
    "conv": lambda x: F.conv1d(x[None], x[None, :4, :3].new_ones(2, 4, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: x.log_softmax(-1),
    "loss": lambda x: F.l1_loss(x, x),
    "reduction": torch.mean,
    "transcendental": torch.exp,
    "elementwise": torch.tanh,
    "shape": lambda x: x.amax(-1),
    "linalg": torch.linalg.det,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", CALLS)
def test_a_family_rule_acts_on_every_op_of_it(family, dtype):
    if family == "linalg" and dtype == "bfloat16":
        # the kernel has no bfloat16, and torch says so
        with bind(policy((family, dtype))).autocast(), pytest.raises(RuntimeError, match="BFloat16"):
            torch.linalg.det(WIDE)
        return
    with bind(policy((family, dtype))).autocast():
        assert CALLS[family](WIDE).dtype is CALLS[family](LOW).dtype is getattr(torch, dtype)
        for other in ("matmul", "norm"):
            if other != family:
                assert CALLS[other](WIDE).dtype is (BF16 if other == "matmul" else F32)


def test_a_rule_may_be_the_only_thing_that_is_low():
    mp = bind(policy(("matmul", "bfloat16"), compute="float32"))
    with mp.autocast():
        assert (WIDE @ WIDE).dtype is torch.mv(WIDE, WIDE[0]).dtype is BF16
        assert F.conv1d(WIDE[None], torch.ones(2, 4, 3)).dtype is CALLS["attention"](WIDE).dtype is F32
        assert WIDE.softmax(-1).dtype is F32


def test_no_warning_any_more_but_for_native_autocasting(recwarn):
    rules = policy(("softmax", "bfloat16"))
    bind(rules).autocast()
    assert not recwarn.list
    with pytest.warns(PrecisionWarning, match="softmax.*torch.autocast keeps its own lists"):
        precision.bind(rules, backend="torch", device="cpu", native_autocast=True).autocast()


def test_the_first_of_rules_for_a_family_wins_and_contradictions_are_errors():
    with pytest.raises(PolicyError, match="softmax"):
        policy(("softmax", "bfloat16"), ("softmax", "float32"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(self.body(x))
        return self.attend(x)

    def attend(self, x):
        return self.head(x)


class Head(nn.Linear):
    seen: tuple = ()

    def forward(self, x):
        y = super().forward(x)
        self.seen = (y.dtype, y.softmax(-1).dtype, y.exp().dtype)
        return y


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        ([("head", "float32")], (F32, F32, F32)),
        ([("head", "bfloat16")], (BF16, BF16, BF16)),
        ([("softmax", "bfloat16"), ("head", "float32")], (F32, BF16, F32)),  # first match wins
        ([("head", "float32"), ("softmax", "bfloat16")], (F32, F32, F32)),
        ([("matmul", "float32"), ("transcendental", "float32"), ("head", "bfloat16")], (F32, F32, F32)),
    ],
)
def test_the_first_rule_that_matches_wins(rules, seen):
    mp, model = bind(policy(*rules)), Net()
    model.head = Head(4, 4)
    model.requires_grad_(False)
    mp.prepare(model, None)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with mp.autocast():
            each(WIDE)
        assert each.head.seen == seen


def test_a_rule_for_norms_reaches_norm_layers_and_keeps_running_statistics_in_float32():
    mp, model = bind(policy(("norm", "bfloat16"))), Net()
    mp.prepare(model, None)
    dtypes = []
    model.norm.register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    with mp.autocast():
        model(WIDE)
    assert dtypes == [BF16] and model.norm.running_mean.dtype is F32
    expected = 0.1 * model.body(WIDE).mean(0)
    assert torch.allclose(model.norm.running_mean, expected, atol=1e-3) and expected.abs().max() > 1e-3


def test_low_running_statistics_are_updated_though_the_norm_computes_in_float32():
    norm = nn.BatchNorm1d(4).bfloat16()
    with bind().autocast():
        assert norm(LOW).dtype is F32
    assert norm.running_mean.dtype is BF16
    assert torch.allclose(norm.running_mean.float(), 0.1 * WIDE.mean(0), atol=2e-3)
    before = norm.running_mean.clone()
    with bind().autocast():
        norm.eval()(LOW)
    assert torch.equal(norm.running_mean, before)


def test_module_rules_that_match_nothing_are_reported():
    with pytest.warns(PrecisionWarning, match="'tail'"):
        bind(policy(("tail", "float32"))).prepare(Net())


def test_an_island_in_a_dtype_without_arithmetic_is_refused():
    with pytest.raises(PolicyError, match="float8_e4m3fn.*computes in float32"):
        bind().island("float8_e4m3fn")


def test_island_inside_of_everything():
    mp = bind(policy(("softmax", "bfloat16")))
    with mp.autocast(), mp.island("float32") as cast:
        assert cast(LOW).softmax(-1).dtype is F32
        with mp.island("bfloat16") as inner:
            assert inner(WIDE).exp().dtype is BF16
            with mp.autocast():
                assert WIDE.softmax(-1).dtype is BF16 and LOW.exp().dtype is F32
