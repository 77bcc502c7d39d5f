"""The plugin for Lightning's Trainer: the numbers of a plain loop, and what the Trainer's own plugin gets wrong."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import precision
from precision import LossScale, MasterWeightsError, PrecisionPolicy, PrecisionWarning, UnsupportedError
from precision.names import PRESETS
from precision_torch.lightning_check import require_same
from precision_torch.lightning_plugin import PrecisionPlugin
from tests.interop.tiny import NormNet, TinyGPT, flat, next_token_loss, tokens

HALF = PRESETS["mixed_float16"].with_(loss_scale=LossScale(mode="dynamic", initial=2.0**14, growth_interval=2))


class Lit(pl.LightningModule):
    """A module under Lightning, with a loss and an optimizer."""

    def __init__(self, module, loss=next_token_loss, make=lambda p: torch.optim.Adam(p, lr=0.01)):
        super().__init__()
        self.module, self.loss, self.make = module, loss, make
        self.seen = []

    def forward(self, x):
        return self.module(x)

    def training_step(self, batch):
        loss = self.loss(self.module, batch)
        self.seen.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return self.make(self.module.parameters())


def fit(lit, batches, plugin, steps=None, ckpt_path=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu", plugins=[plugin], max_steps=steps or len(batches), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torch")
        trainer.fit(lit, torch.utils.data.DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def native(growth_interval=2, initial=2.0**14):
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=growth_interval)
    )


def plain_loop(model, batches, optimizer, loss=next_token_loss, clip=None, accumulate=1, initial=2.0**14):
    """The same with torch's own autocast and GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=2)
    for at, batch in enumerate(batches):
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            value = loss(model, batch) / accumulate
        scaler.scale(value).backward()
        if (at + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return scaler


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
def test_a_gpt_trains_in_float16_on_a_cpu_with_the_numbers_of_a_plain_loop(options):
    batches = tokens(6)
    plain = TinyGPT()
    for norm in (plain.block.norm1, plain.block.norm2):  # as the policy has them: torch leaves them low on a CPU
        norm.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
    scaler = plain_loop(
        plain, batches, torch.optim.Adam(plain.parameters(), lr=0.01), clip=options.get("gradient_clip_val"),
        accumulate=options.get("accumulate_grad_batches", 1),
    )  # fmt: skip
    plugin = PrecisionPlugin(HALF)
    lit = Lit(TinyGPT())
    dtypes = []
    lit.module.block.qkv.register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    fit(lit, batches, plugin, steps=6 // options.get("accumulate_grad_batches", 1), **options)
    assert set(dtypes) == {torch.float16}
    assert plugin.scaler.get_scale() == scaler.get_scale() > 2.0**14
    assert torch.equal(flat(lit.module), flat(plain))
    assert not torch.equal(flat(lit.module), flat(TinyGPT()))


def test_it_learns_with_a_rule_in_force():
    policy = HALF.with_(rules=[{"module": "**.head", "dtype": "float32"}])
    lit = Lit(TinyGPT(), make=lambda p: torch.optim.Adam(p, lr=0.05))
    dtypes = {}
    for name in ("head", "block.qkv"):
        lit.module.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: dtypes.update({name: out.dtype})
        )
    fit(lit, tokens(16), PrecisionPlugin(policy))
    assert dtypes == {"head": torch.float32, "block.qkv": torch.float16}
    held_out = torch.cat(tokens(4, seed=9))
    assert next_token_loss(lit.module, held_out) < 0.6 * next_token_loss(TinyGPT(), held_out)


@pytest.mark.parametrize("name", ["mixed_bfloat16", "float32"])
def test_unscaled_policies_step_with_the_closure_as_lightning_does(name):
    lit, plugin = Lit(TinyGPT()), PrecisionPlugin(name)
    trainer = fit(lit, tokens(4), plugin, gradient_clip_val=1.0)
    own = Lit(TinyGPT())
    string = {"mixed_bfloat16": "bf16-mixed", "float32": "32-true"}[name]
    ours, theirs = flat(lit.module), flat(own.module)
    assert plugin.precision == trainer.precision == string and plugin.state_dict() == {}
    fit(
        own,
        tokens(4),
        MixedPrecision(string, "cpu") if name != "float32" else pl.plugins.Precision(),
        gradient_clip_val=1.0,
    )
    theirs = flat(own.module)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if name == "float32" else 5e-3)
    require_same(name, trainer)


def test_a_run_resumed_from_a_checkpoint_is_bit_equal(tmp_path):
    batches = tokens(1) * 3  # the same batch, as Lightning begins with another one when it resumes
    whole, plugin = Lit(TinyGPT()), PrecisionPlugin(HALF)
    fit(whole, batches, plugin, steps=6)
    first, begun = Lit(TinyGPT()), PrecisionPlugin(HALF)
    trainer = fit(first, batches, begun, steps=3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["PrecisionPlugin"]
    assert saved == begun.scaler.state_dict() and saved["good_steps"] == 1
    second, resumed = Lit(TinyGPT(seed=5)), PrecisionPlugin(HALF)
    fit(second, batches, resumed, steps=6, ckpt_path=tmp_path / "half.ckpt")
    assert len(second.seen) == 3 and second.seen == whole.seen[3:]
    assert torch.equal(flat(second.module), flat(whole.module))
    assert resumed.scaler.state_dict() == plugin.scaler.state_dict()


def test_a_checkpoint_of_lightnings_own_plugin_resumes_and_one_without_a_scale_is_told_of(tmp_path):
    trainer = fit(Lit(TinyGPT()), tokens(3), native())
    trainer.save_checkpoint(tmp_path / "native.ckpt")
    plugin = PrecisionPlugin(HALF)
    fit(Lit(TinyGPT()), tokens(3), plugin, ckpt_path=tmp_path / "native.ckpt")
    assert plugin.state_dict()["scale"] == trainer.precision_plugin.scaler.get_scale() == 2.0**15
    assert plugin.state_dict()["good_steps"] == 1
    fit(Lit(TinyGPT()), tokens(2), PrecisionPlugin("float32")).save_checkpoint(tmp_path / "none.ckpt")
    with pytest.warns(PrecisionWarning, match="no loss-scale state"):
        plugin.on_load_checkpoint(torch.load(tmp_path / "none.ckpt", weights_only=True))


def squares(model, batch):
    return model(batch).square().mean()


def test_a_skipped_step_leaves_no_trace_where_lightnings_leaves_nan():
    # the third batch overflows float16 in the forward pass
    batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    batches[2] = batches[2] * 1e6
    found = {}
    for name, plugin in (("ours", PrecisionPlugin(HALF)), ("native", native())):
        lit = Lit(NormNet(), squares)
        before = []

        class Watch(pl.Callback):
            def on_train_batch_start(self, trainer, module, batch, index, before=before):
                before.append(flat(module))

        trainer = fit(lit, batches, plugin, callbacks=[Watch()])
        assert torch.equal(before[2], before[3])  # skipped
        found[name] = lit.module.norm.running_mean.isfinite().all().item(), lit.module.norm.num_batches_tracked.item()
        assert trainer.precision_plugin.scaler.get_scale() == 2.0**14
    assert found == {"ours": (True, 3), "native": (False, 4)}


def test_an_overflow_before_validation_is_undone_before_it():
    batches = [torch.ones(8, 3) * 1e6]
    lit = Lit(NormNet(), squares)
    means = []
    lit.validation_step = lambda batch: means.append(lit.module.norm.running_mean.clone())
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = pl.Trainer(
        accelerator="cpu", plugins=[PrecisionPlugin(HALF)], max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(lit, loader, loader)
    assert len(means) == 1 and torch.equal(means[0], torch.zeros(4))


class Pair(pl.LightningModule):
    """Two weights, an optimizer each, and one loss for both."""

    def __init__(self, clip=None):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward((self.a + 3 * self.b) * batch)
        for optimizer in (first, second):
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD([self.a], lr=0.125), torch.optim.SGD([self.b], lr=0.125)


ONE = torch.ones(())
EAGER = HALF.with_(loss_scale=LossScale(mode="dynamic", initial=2.0**10, growth_interval=1))


def test_two_optimizers_share_one_scale_where_lightnings_second_takes_the_next():
    ours, theirs = Pair(), Pair()
    plugin = PrecisionPlugin(EAGER)
    fit(ours, [ONE, ONE], plugin, steps=4)
    assert (ours.a.item(), ours.b.item()) == (1 - 2 * 0.125, 1 - 2 * 3 * 0.125)
    assert plugin.scaler.get_scale() == 2.0**12  # two iterations, two updates
    fit(theirs, [ONE, ONE], native(growth_interval=1, initial=2.0**10), steps=4)
    assert theirs.a.item() == ours.a.item()
    assert (
        theirs.b.item() == 1 - 2 * 3 * 0.125 / 2
    )  # half of what it should be: divided by a scale that had grown meanwhile


def test_clipping_by_hand_sees_unscaled_gradients_where_lightnings_sees_scaled_ones():
    ours, theirs = Pair(clip=2.0), Pair(clip=2.0)
    fit(ours, [ONE], PrecisionPlugin(EAGER), steps=2)
    assert ours.a.item() == 1 - 0.125  # below the limit
    assert ours.b.item() == pytest.approx(1 - 2.0 * 0.125, abs=1e-6)
    fit(theirs, [ONE], native(growth_interval=1000, initial=2.0**10), steps=2)
    assert theirs.a.item() == pytest.approx(1 - 0.125 * 2.0 / 2**10, abs=1e-6)  # 512 times too small


class Turns(Pair):
    """The second optimizer steps every other time, on what has accumulated."""

    def training_step(self, batch):
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward((self.a + 3 * self.b) * batch)
        first.step()
        if self.trainer.fit_loop.epoch_loop.batch_idx % 2:
            second.step()
            second.zero_grad()


def test_gradients_that_wait_for_their_optimizer_are_carried_over_to_the_new_scale():
    lit, plugin = Turns(), PrecisionPlugin(EAGER)
    fit(lit, [ONE] * 4, plugin, steps=6)
    assert lit.a.item() == 1 - 4 * 0.125
    assert lit.b.item() == 1 - 4 * 3 * 0.125
    assert plugin.scaler.get_scale() > 2.0**10


def test_fused_optimizers_clip():
    make = lambda p: torch.optim.Adam(p, lr=0.01, fused=True)  # noqa: E731
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Lit(TinyGPT(), make=make), tokens(1), native(), gradient_clip_val=0.1)
    lit, same = Lit(TinyGPT(), make=make), Lit(TinyGPT())
    fit(lit, tokens(3), PrecisionPlugin(HALF), gradient_clip_val=0.1)
    fit(same, tokens(3), PrecisionPlugin(HALF), gradient_clip_val=0.1)
    torch.testing.assert_close(flat(lit.module), flat(same.module), rtol=0, atol=1e-5)


def test_a_training_step_that_returns_none_takes_no_step():
    lit = Lit(TinyGPT())
    lit.training_step = lambda batch: None
    plugin = PrecisionPlugin(HALF)
    fit(lit, tokens(2), plugin)
    assert torch.equal(flat(lit.module), flat(TinyGPT())) and plugin.state_dict()["good_steps"] == 0


def test_low_parameters_train_with_masters_and_are_refused_without():
    untouched = Lit(TinyGPT().bfloat16())
    with pytest.raises(MasterWeightsError, match="master_weights"):
        fit(untouched, tokens(1), PrecisionPlugin("bfloat16"))
    assert untouched.seen == []  # before the first step
    lit = Lit(TinyGPT(), make=lambda p: torch.optim.Adam(p, lr=1e-4))
    fit(lit, tokens(10), PrecisionPlugin("bfloat16", master_weights=True), gradient_clip_val=1.0)
    assert lit.module.head.weight.dtype is torch.bfloat16
    optimizer = lit.trainer.optimizers[0]
    masters = optimizer.state_dict()["precision_master_weights"]
    name = next(name for name in masters if name.endswith("head.weight"))
    moved = (masters[name] - TinyGPT().head.weight).abs().mean()
    assert 2e-4 < moved < 1.1e-3  # ten updates of 1e-4, most of them below bfloat16's spacing


def test_what_cannot_be_is_refused_before_training():
    lit = Lit(TinyGPT(), make=lambda p: torch.optim.LBFGS(p))
    with pytest.raises(UnsupportedError, match="LBFGS"):
        fit(lit, tokens(1), PrecisionPlugin(HALF))
    assert lit.seen == []
    fit(lit, tokens(1), PrecisionPlugin("float32"))  # unscaled, closures are what they always were
    assert len(lit.seen) > 1
    with pytest.raises(UnsupportedError, match="emulate"):
        fit(
            Lit(TinyGPT()),
            tokens(1),
            PrecisionPlugin(PrecisionPolicy(compute_dtype="float16", loss_scale=HALF.loss_scale, emulate=True)),
        )
    with pytest.raises(precision.PolicyError, match="loss_scale"):
        fit(Lit(TinyGPT()), tokens(1), PrecisionPlugin(PrecisionPolicy(compute_dtype="float16")))
    with pytest.raises(precision.PolicyError, match="sets up the model"):
        PrecisionPlugin(HALF).scaler  # noqa: B018


def test_a_strategy_with_a_precision_of_its_own_is_refused():
    from lightning.pytorch.strategies import DeepSpeedStrategy

    lit = Lit(TinyGPT())
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    lit.trainer = trainer
    trainer._accelerator_connector.strategy = DeepSpeedStrategy(accelerator=trainer.accelerator)
    with pytest.raises(UnsupportedError, match="DeepSpeedStrategy carries out the precision itself"):
        PrecisionPlugin(HALF).connect(lit, [], [])


def test_more_skips_than_allowed_end_the_run():
    policy = HALF.with_(loss_scale=HALF.loss_scale.with_(max_consecutive_skips=2))
    lit = Lit(NormNet(), squares)
    with pytest.raises(precision.NonFiniteGradientsError):
        fit(lit, [torch.ones(8, 3) * 1e6] * 9, PrecisionPlugin(policy))
    assert len(lit.seen) < 9


def test_validation_and_prediction_run_under_the_policy():
    lit = Lit(TinyGPT())
    lit.validation_step = lambda batch: None
    lit.predict_step = lambda batch: lit(batch[:, :-1])
    dtypes = []
    lit.module.head.register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[PrecisionPlugin(HALF)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(tokens(2), batch_size=None)
    trainer.validate(lit, loader, verbose=False)
    out = trainer.predict(lit, loader)
    assert dtypes == [torch.float16] * 2 and {o.dtype for o in out} == {torch.float32}  # results leave in output_dtype


def test_under_ddp_it_is_the_same_and_a_cast_that_comes_too_late_is_refused():
    lit, same = Lit(TinyGPT()), Lit(TinyGPT())
    policy = HALF.with_(rules=[{"module": "**.head", "dtype": "float32"}])
    try:
        fit(lit, tokens(3), PrecisionPlugin(policy), strategy="ddp", devices=1, use_distributed_sampler=False)
        with pytest.raises(UnsupportedError, match=r"DDP has taken the parameters in.*module.head.weight"):
            low = PrecisionPlugin(HALF.with_(rules=[{"module": "**.head", "dtype": "bfloat16"}]), master_weights=True)
            fit(Lit(TinyGPT()), tokens(1), low, strategy="ddp", devices=1, use_distributed_sampler=False)
    finally:
        torch.distributed.destroy_process_group()
    fit(same, tokens(3), PrecisionPlugin(policy))
    assert torch.equal(flat(lit.module), flat(same.module)) and not torch.equal(flat(lit.module), flat(TinyGPT()))


def test_a_device_that_is_not_lightnings_is_refused():
    lit = Lit(TinyGPT())
    with pytest.raises(UnsupportedError):
        fit(lit, tokens(1), PrecisionPlugin(HALF, device="meta"))
    assert PrecisionPlugin(HALF, device="cpu").scaler.get_scale() == 2.0**14
