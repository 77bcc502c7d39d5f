"""``mp.prepare``: what it refuses, what it mends, and that models stay models."""

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from precision import LossScale, MasterWeightsError, PolicyError, PrecisionPolicy, PrecisionWarning, Rule

from .helpers import bind

NORMS = [
    (nn.BatchNorm1d(4), (8, 4)),
    (nn.BatchNorm2d(4), (2, 4, 3, 3)),
    (nn.SyncBatchNorm(4).eval(), (2, 4, 3)),
    (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 5)),
    (nn.LayerNorm(4), (8, 4)),
    (nn.GroupNorm(2, 4), (8, 4)),
    (nn.RMSNorm(4, eps=1e-6), (8, 4)),
    (nn.LocalResponseNorm(2), (2, 4, 3)),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 6)
        self.norm1 = nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 2)
        self.register_buffer("table", torch.ones(2, dtype=torch.float16))

    def forward(self, x, *, gain: float = 1.0):
        return {"logits": self.head(self.body(self.norm1(self.fc1(x)))) * gain, "table": self.table}


def trained(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=[type(n).__name__ for n, _ in NORMS])
def test_norms_run_in_float32_under_autocast(norm, shape):
    mp, low = bind("mixed_bfloat16"), torch.randn(shape).bfloat16()
    expected = copy.deepcopy(norm)(low.float())
    model = nn.Sequential(copy.deepcopy(norm)).train(norm.training)
    mp.prepare(model, None, master_weights=False)
    with mp.autocast():
        out = model[0](low)
    assert out.dtype is torch.float32
    assert torch.equal(out, expected)


def test_it_returns_the_same_objects_and_the_state_dict_keeps_its_keys():
    mp, model = bind("mixed_bfloat16"), Net()
    optimizer, keys = trained(model), list(model.state_dict())
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    again = mp.prepare(model, optimizer)
    assert again[0] is model and again[1] is optimizer
    assert list(model.state_dict()) == keys
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == dtypes
    assert mp.prepare(model) == (model, None)


def test_results_leave_in_the_output_dtype_and_compute_is_low():
    mp, model = bind("mixed_bfloat16"), Net()
    mp.prepare(model, trained(model))
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: getattr(out, "dtype", None)}), prepend=True
        )
    with mp.autocast():
        out = model(torch.randn(4, 6), gain=2.0)
    assert out["logits"].dtype is out["table"].dtype is torch.float32
    assert seen["fc1"] is seen["head"] is torch.bfloat16
    assert seen["norm1"] is seen["body.1"] is torch.float32


def test_float16_output_dtype_and_preparing_again_under_another_policy():
    model = Net()
    bind(PrecisionPolicy(output_dtype="float16")).prepare(model)
    assert model(torch.randn(4, 6))["logits"].dtype is torch.float16
    bind("float32").prepare(model)
    assert model(torch.randn(4, 6))["logits"].dtype is torch.float32
    assert len(model._forward_hooks) == 1


def test_modules_under_a_rule_keep_its_dtype_in_parameters_and_compute():
    policy = PrecisionPolicy(
        compute_dtype="bfloat16",
        rules=(Rule(module="head", dtype="float32"), Rule(module="body.0", dtype="bfloat16")),
    )
    mp, model = bind(policy), Net()
    mp.prepare(model, trained(model), master_weights=True)
    seen = {}
    for name in ("fc1", "body.0", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: (m.weight.dtype, out.dtype)})
        )
    with mp.autocast():
        model(torch.randn(4, 6))
    assert seen == {
        "fc1": (torch.float32, torch.bfloat16),
        "body.0": (torch.bfloat16, torch.bfloat16),
        "head": (torch.float32, torch.float32),
    }


def test_a_rule_covers_what_is_inside_and_wins_over_norms():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="body", dtype="float32"),))
    mp, model = bind(policy), Net()
    mp.prepare(model, trained(model))
    inside = []
    model.body[0].register_forward_hook(lambda m, a, out: inside.append((a[0].dtype, out.dtype)))
    with mp.autocast():
        model(torch.randn(4, 6))
    assert inside == [(torch.float32, torch.float32)]
    with mp.autocast():
        model.body[0](torch.randn(4, 6).bfloat16())  # past its parent
    assert inside[1][1] is torch.float32

    low = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="norm1", dtype="bfloat16"),))
    mp, model = bind(low), Net()
    mp.prepare(model, trained(model), master_weights=True)
    assert model.norm1.weight.dtype is torch.bfloat16


def test_low_rules_for_trained_modules_need_masters_too():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="body.0", dtype="bfloat16"),))
    model = Net()
    with pytest.raises(MasterWeightsError, match=r"2 trainable parameters.*body\.0\.weight, body\.0\.bias"):
        bind(policy).prepare(model, trained(model))
    assert model.body[0].weight.dtype is torch.float32  # nothing was changed


def test_rules_that_match_nothing_are_reported():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="encoder.*", dtype="float32"),))
    with pytest.warns(PrecisionWarning, match=r"'encoder\.\*' matched nothing in Net"):
        bind(policy).prepare(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(policy.with_(rules=(Rule(module="body", dtype="float32"),))).prepare(Net())


def test_float16_trainable_parameters_are_an_error_that_names_them():
    model = Net().half()
    with pytest.raises(MasterWeightsError) as error:
        bind("mixed_float16").prepare(model, trained(model))
    message = str(error.value)
    assert "fc1.weight" in message and "float16" in message and "master_weights=True" in message
    assert "norm1" not in message  # those are mended
    for insist in (False, None):
        with pytest.raises(MasterWeightsError):
            bind("mixed_float16").prepare(model, trained(model), master_weights=insist)
    with pytest.raises(MasterWeightsError, match="needs the optimizer"):
        bind("mixed_float16").prepare(model, master_weights=True)
    bind("mixed_float16").prepare(model.requires_grad_(False))  # inference
    assert model.norm1.weight.dtype is torch.float32


def test_low_parameters_of_the_optimizer_alone_are_named_by_position():
    mp, model, extra = bind("mixed_bfloat16"), nn.Linear(2, 2), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(MasterWeightsError, match=r"param_groups\[1\]\['params'\]\[0\]"):
        mp.prepare(model, torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=0.1))


def test_bfloat16_without_masters_takes_insisting():
    model = Net()
    mp = bind("bfloat16")
    with pytest.raises(MasterWeightsError):
        mp.prepare(model, trained(model))
    model, optimizer = mp.prepare(model, trained(model), master_weights=False)
    assert model.fc1.weight.dtype is torch.bfloat16 and model.norm1.weight.dtype is torch.float32
    with mp.autocast():
        loss = model(torch.randn(4, 6))["logits"].float().square().mean()
    mp.backward(loss)
    before = model.fc1.weight.detach().clone()
    assert mp.step(optimizer).taken
    assert not torch.equal(before, model.fc1.weight)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    mp, model = bind("float16"), Tied()
    model, optimizer = mp.prepare(model, trained(model), master_weights=True)
    assert model.head.weight is model.embed.weight and model.embed.weight.dtype is torch.float16
    assert len(optimizer.param_groups[0]["params"]) == 1
    mixed = PrecisionPolicy(
        param_dtype="bfloat16", compute_dtype="bfloat16", rules=(Rule(module="embed", dtype="float32"),)
    )
    model = Tied()
    bind(mixed).prepare(model, trained(model), master_weights=True)
    assert model.head.weight is model.embed.weight and model.embed.weight.dtype is torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_prepared_models_copy_and_pickle(how):
    mp, model = bind("mixed_bfloat16", initial=8.0), Net()
    model, _ = mp.prepare(model, trained(model))
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # the copy must not reach into the original
    with mp.autocast():
        out, zero = other(torch.randn(4, 6)), model(torch.randn(4, 6))
    assert out["logits"].dtype is torch.float32 and out["logits"].abs().sum() > 0
    assert zero["logits"].abs().sum() == 0
    assert other.norm1.forward.module is other.norm1
    other.load_state_dict(model.state_dict())


def test_preparing_twice_changes_nothing_more():
    mp, model = bind("float16"), Net()
    optimizer = trained(model)
    for _ in range(2):
        mp.prepare(model, optimizer, master_weights=True)
    assert all(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"])
    assert len(model._forward_hooks) == 1
    x = torch.randn(4, 6)
    with mp.autocast():
        assert model(x)["logits"].dtype is torch.float16


def test_optimizer_state_made_before_follows():
    model = Net().half()
    for norm in (model.norm1, model.body[1]):
        assert norm.weight.dtype is torch.float16
    optimizer = torch.optim.SGD(model.norm1.parameters(), lr=0.1, momentum=0.9)
    model.norm1.weight.grad = torch.ones(6, dtype=torch.float16)
    optimizer.step()
    mp = bind("mixed_bfloat16")
    mp.prepare(model, optimizer, master_weights=True)
    assert optimizer.state[model.norm1.weight]["momentum_buffer"].dtype is torch.float32


def test_signatures_of_pinned_modules_are_their_own():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="**", dtype="float32"),))
    model = Net()
    bind(policy).prepare(model)
    assert list(inspect.signature(model.fc1.forward).parameters) == ["input"]


def test_an_instances_own_forward_is_kept_inside():
    model = nn.Sequential(nn.LayerNorm(2))
    model[0].forward = lambda x: x * 2
    bind("mixed_bfloat16").prepare(model, trained(model))
    out = model(torch.ones(1, 2).bfloat16())
    assert out.dtype is torch.float32 and torch.equal(out, torch.full((1, 2), 2.0))


def test_a_float32_policy_leaves_modules_alone():
    model = Net()
    bind("float32").prepare(model, trained(model))
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((lambda x: x,), {}, "torch.nn.Module"),
        ((nn.Linear(2, 2), "sgd"), {}, "torch.optim"),
        ((nn.Linear(2, 2),), {"restore_on_skip": "all"}, "restore_on_skip"),
    ],
)
def test_wrong_arguments(args, kwargs, message):
    with pytest.raises(PolicyError, match=message):
        bind("float32").prepare(*args, **kwargs)


def test_several_optimizers_and_wrapped_ones():
    mp, model = bind("mixed_bfloat16", initial=8.0), Net()
    a, b = (
        torch.optim.SGD(model.fc1.parameters(), lr=0.1),
        mp.optimizer(torch.optim.SGD(model.head.parameters(), lr=0.1)),
    )
    assert mp.prepare(model, [a, b]) == (model, [a, b])
    assert mp.policy.loss_scale == LossScale(mode="dynamic", initial=8.0)


def test_a_rule_for_a_container_reaches_what_is_in_it():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    mp, model = (
        bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="layers", dtype="float32"),))),
        Stack(),
    )
    mp.prepare(model, trained(model))
    seen = []
    model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    with mp.autocast():
        model(torch.randn(2, 4))
    assert seen == [torch.float32]


def test_an_optimizer_of_another_model_is_refused():
    mp, model = bind("bfloat16"), Net()
    _, optimizer = mp.prepare(model, trained(model), master_weights=True)
    for other in (trained(Net()), copy.deepcopy(optimizer)):
        with pytest.raises(PolicyError, match="none of the model's parameters"):
            mp.prepare(model, other, master_weights=True)


def test_methods_of_modules_may_be_marked():
    mp = bind("mixed_bfloat16")

    class Marked(nn.Module):
        @mp.op("softmax")
        def probabilities(self, x):
            assert isinstance(self, Marked)
            return x.softmax(-1)

        forward = mp.island("float32")(lambda self, x: self.probabilities(x) @ x.T)

    assert Marked()(torch.randn(2, 2).bfloat16()).dtype is torch.float32


def test_a_rule_that_a_tied_weight_cannot_follow_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    policy = PrecisionPolicy.from_name("mixed_bfloat16").with_(rules=(Rule(module="head", dtype="bfloat16"),))
    with pytest.raises(PolicyError, match=r"'head' asks for bfloat16.*head.weight.*embedding.weight.*float32"):
        bind(policy).prepare(Tied())


def test_a_rule_that_trains_in_float16_needs_a_loss_scale():
    policy = PrecisionPolicy.from_name("mixed_bfloat16").with_(rules=(Rule(module="head", dtype="float16"),))
    model = Net()
    with pytest.raises(PolicyError, match=r"rules\.0\.dtype \('head'\) float16.*'none'"):
        bind(policy).prepare(model, trained(model), master_weights=True)
    assert model.head.weight.dtype is torch.float32
    model.head.requires_grad_(False)  # gradients still pass through it on their way
    with pytest.raises(PolicyError, match="'none'"):
        bind(policy).prepare(model, trained(model))
    bind(policy).prepare(model)  # to run, not to train
    assert model.head.weight.dtype is torch.float16


@pytest.mark.parametrize(
    ("lazy", "name"),
    [(nn.LazyLinear(2), "parameter 0.weight"), (nn.LazyBatchNorm1d(affine=False), "buffer 0.running_mean")],
)
def test_lazy_modules_are_initialised_first(lazy, name):
    mp, model = bind("mixed_bfloat16"), nn.Sequential(lazy)
    with pytest.raises(PolicyError, match=f"{name} is not initialised"):
        mp.prepare(model)
    model(torch.ones(2, 3))
    assert mp.prepare(model)[0] is model


def test_the_results_of_models_in_a_container_leave_in_the_output_dtype():
    mp = bind("mixed_bfloat16")
    models = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})])
    mp.prepare(models)
    with mp.autocast():
        assert models[0](torch.ones(1, 2)).dtype is torch.float32
        assert models[1]["a"](torch.ones(1, 2)).dtype is torch.float32
        assert models[1]["a"][0](torch.ones(1, 2)).dtype is torch.bfloat16
