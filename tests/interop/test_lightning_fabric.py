"""The plugin for Lightning's Fabric: the numbers of a plain loop, and what Fabric's own plugin gets wrong."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from precision import LossScale, MasterWeightsError, UnsupportedError
from precision.names import PRESETS
from precision_torch.lightning_check import require_same
from precision_torch.lightning_plugin import FabricPrecisionPlugin
from tests.interop.tiny import NormNet, TinyGPT, flat, next_token_loss, tokens

HALF = PRESETS["mixed_float16"].with_(loss_scale=LossScale(mode="dynamic", initial=2.0**14, growth_interval=2))
EAGER = HALF.with_(loss_scale=LossScale(mode="dynamic", initial=2.0**10, growth_interval=1))


def on(plugin):
    return Fabric(accelerator="cpu", plugins=[plugin])


def native(growth_interval=2, initial=2.0**14):
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=growth_interval)
    )


def train(fabric, model, optimizer, batches, clip=None, closure=False):
    losses = []
    for batch in batches:
        optimizer.zero_grad()

        def backward(batch=batch):
            loss = next_token_loss(model, batch)
            fabric.backward(loss)
            return loss

        if closure:
            losses.append(optimizer.step(backward).item())
            continue
        losses.append(backward().item())
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
    return losses


def plain_loop(batches, clip=None):
    model = TinyGPT()
    for norm in (model.block.norm1, model.block.norm2):  # as the policy has them: torch leaves them low on a CPU
        norm.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = next_token_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.mark.parametrize("how", [{}, {"clip": 0.05}, {"closure": True}])
def test_a_gpt_trains_in_float16_on_a_cpu_with_the_numbers_of_a_plain_loop(how):
    batches = tokens(4)
    plugin = FabricPrecisionPlugin(HALF)
    fabric = on(plugin)
    require_same(HALF, fabric)
    bare = TinyGPT()
    model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=0.01))
    dtypes = []
    bare.block.qkv.register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    losses = train(fabric, model, optimizer, batches, **how)
    assert set(dtypes) == {torch.float16} and len(losses) == 4
    assert torch.equal(flat(bare), flat(plain_loop(batches, how.get("clip"))))
    assert plugin.scaler.get_scale() == 2.0**16


def test_fabrics_own_scaler_takes_no_closure():
    fabric = on(native())
    bare = TinyGPT()
    model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=0.01))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        train(fabric, model, optimizer, tokens(1), closure=True)


def test_a_run_resumed_from_a_checkpoint_is_bit_equal(tmp_path):
    batches = tokens(6)

    def run(seed=0):
        fabric = on(plugin := FabricPrecisionPlugin(HALF))
        bare = TinyGPT(seed)
        model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=0.01))
        return fabric, plugin, bare, model, optimizer

    fabric, plugin, bare, model, optimizer = run()
    train(fabric, model, optimizer, batches)
    first, begun, _, first_model, first_optimizer = run()
    train(first, first_model, first_optimizer, batches[:3])
    first.save(tmp_path / "half.ckpt", {"model": first_model, "optimizer": first_optimizer, "precision": begun})
    second, resumed, second_bare, second_model, second_optimizer = run(seed=5)
    second.load(tmp_path / "half.ckpt", {"model": second_model, "optimizer": second_optimizer, "precision": resumed})
    assert resumed.state_dict()["good_steps"] == 1
    train(second, second_model, second_optimizer, batches[3:])
    assert torch.equal(flat(second_bare), flat(bare))
    assert resumed.state_dict() == plugin.state_dict() and plugin.state_dict()["scale"] == 2.0**17


def test_rules_are_in_force_and_inputs_keep_their_dtype_where_fabric_casts_them():
    policy = HALF.with_(rules=[{"module": "first", "dtype": "float32"}])
    seen = {}
    for name, plugin in (("ours", FabricPrecisionPlugin(policy)), ("native", native())):
        bare = NormNet()
        model, _ = on(plugin).setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        bare.first.register_forward_hook(lambda m, a, out, name=name: seen.update({name: (a[0], out.dtype)}))
        out = model(torch.full((2, 3), 70000.0))
        assert out.dtype is torch.float32
    assert seen["ours"][0].dtype is torch.float32 and seen["ours"][0].isfinite().all()
    assert seen["ours"][1] is torch.float32
    assert seen["native"][0].dtype is torch.float16 and seen["native"][0].isinf().all()  # 70000 is no float16


def test_a_skipped_step_leaves_no_trace_where_fabrics_leaves_nan():
    found = {}
    for name, plugin in (("ours", FabricPrecisionPlugin(HALF)), ("native", native())):
        fabric, bare = on(plugin), NormNet()
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        before = flat(bare)
        fabric.backward(model(torch.randn(8, 3) * 4e4).square().mean())
        optimizer.step()
        assert torch.equal(flat(bare), before)
        found[name] = torch.equal(bare.norm.running_mean, torch.zeros(4))
    assert found == {"ours": True, "native": False}


@pytest.mark.parametrize("name", ["ours", "native"])
def test_two_optimizers_share_one_scale_where_fabrics_second_takes_the_next(name):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return (self.a + 3 * self.b) * x

    plugin = FabricPrecisionPlugin(EAGER) if name == "ours" else native(1, 2.0**10)
    fabric, bare = on(plugin), Two()
    model, first, second = fabric.setup(
        bare, torch.optim.SGD([bare.a], lr=0.125), torch.optim.SGD([bare.b], lr=0.125)
    )  # fmt: skip
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        fabric.backward(model(torch.ones(())))
        first.step()
        second.step()
    assert bare.a.item() == 1 - 2 * 0.125
    assert bare.b.item() == (1 - 2 * 3 * 0.125 if name == "ours" else 1 - 2 * 3 * 0.125 / 2)
    if name == "ours":
        assert plugin.scaler.get_scale() == 2.0**12


def test_fabrics_clipping_raises_on_an_overflow_unless_told_not_to():
    fabric, bare = on(FabricPrecisionPlugin(HALF)), NormNet()
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(8, 3)).sum() * float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):  # Fabric's default, whatever the plugin
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    before = flat(bare)
    optimizer.step()
    assert torch.equal(flat(bare), before)


def test_fused_optimizers_clip():
    bare = TinyGPT()
    fabric = on(native())
    model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=0.01, fused=True))
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented"):
        train(fabric, model, optimizer, tokens(1), clip=0.1)
    bare = TinyGPT()
    fabric = on(FabricPrecisionPlugin(HALF))
    model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=0.01, fused=True))
    train(fabric, model, optimizer, tokens(2), clip=0.1)
    torch.testing.assert_close(flat(bare), flat(plain_loop(tokens(2), 0.1)), rtol=0, atol=1e-5)


def test_low_parameters_need_prepare_before_setup():
    plugin = FabricPrecisionPlugin("bfloat16", master_weights=True)
    fabric, bare = on(plugin), TinyGPT()
    with pytest.raises(MasterWeightsError, match="plugin.prepare"):
        fabric.setup(bare, torch.optim.Adam(bare.parameters(), lr=1e-4))
    bare, optimizer = plugin.prepare(bare, torch.optim.Adam(bare.parameters(), lr=1e-4))
    model, wrapped = fabric.setup(bare, optimizer)
    before = {k: v.clone() for k, v in optimizer.state_dict()["precision_master_weights"].items()}
    train(fabric, model, wrapped, tokens(3), clip=1.0)
    assert bare.head.weight.dtype is torch.bfloat16
    after = optimizer.state_dict()["precision_master_weights"]
    moved = (after["head.weight"] - before["head.weight"]).abs().max()
    assert 1e-4 < moved < 4e-4  # three updates of 1e-4, below bfloat16's spacing


def test_lbfgs_is_refused_under_loss_scaling_and_runs_without():
    for policy, taken in ((HALF, False), ("mixed_bfloat16", True)):
        fabric, bare = on(FabricPrecisionPlugin(policy)), TinyGPT()
        model, optimizer = fabric.setup(bare, torch.optim.LBFGS(bare.parameters(), lr=0.1, max_iter=2))
        if taken:
            train(fabric, model, optimizer, tokens(1), closure=True)
        else:
            model(tokens(1)[0][:, :-1])
            with pytest.raises(UnsupportedError, match="LBFGS"):
                train(fabric, model, optimizer, tokens(1), closure=True)
        assert torch.equal(flat(bare), flat(TinyGPT())) is not taken
