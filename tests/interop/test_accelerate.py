"""Accelerate: its config both ways, and training through the real one; what it would do silently is shown first."""

import copy
import importlib
import sys
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin, GradScalerKwargs
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import InteropError, PolicyError, PrecisionPolicy, Rule, UnsupportedError
from precision.errors import BackendUnavailableError, LossScaleError, MasterWeightsError, PrecisionWarning
from precision.interop import convert, read
from precision.interop.accelerate import from_accelerate, to_accelerate
from precision.interop.base import differing_fields
from precision.interop.convert import write_text
from precision.names import PRESETS
from precision.testing import run_ranks
from precision_torch.accelerate_arguments import accelerator_arguments
from precision_torch.accelerate_check import effective_policy, require_same
from precision_torch.accelerate_policy import PrecisionAccelerator, prepare_accelerator
from precision_torch.accelerate_scaler import AcceleratorScaler
from tests.interop import workers_accelerate as workers
from tests.interop.strategies import any_policies
from tests.interop.tiny import TinyGPT, flat, next_token_loss, tokens

MIXED = PRESETS["mixed_float16"]


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's state is one for the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def scaling(**settings):
    return MIXED.with_(loss_scale={"mode": "dynamic", **settings})


class Weight(torch.nn.Module):
    """One weight, whose gradient is the input."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[value]]))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


def one(value):
    return torch.full((1, 1), float(value))


def prepared(accelerator, model, optimizer=None, schedule=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.25)
    if schedule is None:
        return accelerator.prepare(model, optimizer)
    return accelerator.prepare(model, optimizer, schedule(optimizer))


# ---- the config ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(policy=any_policies(), fsdp=st.sampled_from([None, 1, 2]))
def test_arguments_keep_the_contract_too(policy, fsdp):
    export = to_accelerate(policy, form="arguments", fsdp=fsdp)
    found = from_accelerate(export.config)
    lost = {entry.field for entry in export.lost}
    differ = differing_fields(policy, found.policy)
    assert {field for field in differ if field not in lost and field.partition(".")[0] not in lost} == set()
    assert export.lost or found.policy == policy
    assert to_accelerate(found.policy, form="arguments", fsdp=fsdp).config == export.config
    base = {**copy.deepcopy(export.config), "log_with": "tensorboard"}
    assert to_accelerate(policy, base=base).config == base
    assert convert(base, "accelerate").config == base


def test_arguments_hold_the_scale_and_fsdp_the_reduction():
    policy = scaling(initial=1024.0, growth_interval=50).with_(output_dtype="bfloat16", reduce_dtype="bfloat16")
    assert to_accelerate(policy, form="arguments", fsdp=2).lost == ()
    assert {entry.field for entry in to_accelerate(policy).lost} == {
        "output_dtype", "reduce_dtype", "loss_scale.initial", "loss_scale.growth_interval",
    }  # fmt: skip


@pytest.mark.parametrize("preset", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_accelerates_own_parser_takes_the_file(preset, kind, tmp_path):
    export = convert(preset, "accelerate")
    path = tmp_path / f"accelerate.{kind}"
    write_text(export, path)
    config = load_config_from_file(str(path))
    assert config.mixed_precision == export.config["mixed_precision"]
    assert (config.use_cpu, config.downcast_bf16) == (False, False)
    written = tmp_path / "theirs.yaml"
    config.to_yaml_file(str(written))
    assert read(written).policy == PRESETS[preset]


def test_a_file_keeps_its_other_parts():
    base = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no", "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}, "downcast_bf16": "no",
    }  # fmt: skip
    export = convert("mixed_bfloat16", "accelerate", base=base)
    assert export.config == {**base, "mixed_precision": "bf16", "use_cpu": False}
    assert [entry.field for entry in export.lost] == ["output_dtype", "reduce_dtype"]
    assert read(export.config).policy.reduce_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "policy", "note"),
    [
        ({"distributed_type": "NO", "fp16": True}, MIXED, "old name"),
        ({"distributed_type": "NO", "mixed_precision": False}, PRESETS["float32"], ""),  # an unquoted no in YAML
        ({"distributed_type": "NO"}, PRESETS["float32"], "ACCELERATE_MIXED_PRECISION"),
        ({"distributed_type": "NO", "mixed_precision": "fp16", "use_cpu": True}, PRESETS["float32"], "float32"),
        ({"distributed_type": "MULTI_CPU", "mixed_precision": "fp16"}, PRESETS["float32"], "float32"),
        ({"distributed_type": "FSDP", "mixed_precision": "bf16"}, PRESETS["mixed_bfloat16"].with_(reduce_dtype="bfloat16"), "reduce"),
        ({"mixed_precision": "bf16", "autocast_kwargs": {"enabled": False}}, PRESETS["float32"], "switched off"),
        ({"mixed_precision": "fp16", "grad_scaler_kwargs": {"enabled": False}}, MIXED.with_(loss_scale={"mode": "none"}), ""),
    ],
)  # fmt: skip
def test_what_a_config_means(config, policy, note):
    found = read(config)
    assert found.policy == policy
    assert note in " ".join(found.notes)


def test_deepspeed_in_the_file_has_deepspeeds_defaults():
    config = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 2}}
    found = read(config)
    assert (found.policy.param_dtype, found.policy.loss_scale.growth_interval) == ("float16", 1000)
    assert found.rest["deepspeed_config"] == {"zero_stage": 2}
    config["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    with pytest.raises(InteropError, match=r"ds\.json"):
        read(config)


@pytest.mark.parametrize(
    "config",
    [
        {"mixed_precision": "fp8"},
        {"mixed_precision": "half", "distributed_type": "NO"},
        {"mixed_precision": "bf16", "fsdp_plugin": {"fsdp_version": 3}},
        {"mixed_precision": "bf16", "fsdp_plugin": {"mixed_precision_policy": {"param_dtype": "bfloat16"}}},
        {"mixed_precision": "bf16", "fsdp_plugin": {"mixed_precision_policy": "half"}},
        {"mixed_precision": "fp16", "grad_scaler_kwargs": {"init_scale": "big"}},
    ],
)
def test_what_is_not_valid_is_told(config):
    with pytest.raises(InteropError):
        read(config, "accelerate")


def test_accelerate_itself_takes_the_arguments():
    policy = scaling(initial=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=50)
    arguments = accelerator_arguments(convert(policy, "accelerate", form="arguments").config)
    accelerator = Accelerator(cpu=True, **arguments)
    made = torch.amp.GradScaler("cpu", **accelerator.scaler_handler.to_kwargs())
    settings = made.get_scale(), made.get_growth_factor(), made.get_backoff_factor(), made.get_growth_interval()
    assert settings == (1024.0, 4.0, 0.25, 50)
    assert accelerator.autocast_handler.cache_enabled is False


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_reduces_low_by_default_and_as_exported_otherwise(version):
    default = FullyShardedDataParallelPlugin(fsdp_version=version)
    default.set_mixed_precision("bf16")  # what Accelerator does
    assert default.mixed_precision_policy.reduce_dtype is torch.bfloat16
    config = convert("mixed_bfloat16", "accelerate", form="arguments", fsdp=version).config
    plugin = accelerator_arguments(config)["fsdp_plugin"]
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype is torch.float32
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    if version == 2:
        assert default.mixed_precision_policy.output_dtype is torch.bfloat16
        assert plugin.mixed_precision_policy.output_dtype is torch.float32


def test_bfloat16_does_what_the_export_says():
    config = convert("mixed_bfloat16", "accelerate", form="arguments").config
    accelerator = Accelerator(cpu=True, **accelerator_arguments(config))
    model, _ = prepared(accelerator, TinyGPT())
    inside = []
    model.head.register_forward_hook(lambda _, args, out: inside.append(out.dtype))
    loss = model(tokens(1)[0][:, :-1])
    assert inside == [torch.bfloat16] and loss.dtype is torch.float32
    require_same("mixed_bfloat16", accelerator)
    with pytest.raises(UnsupportedError, match="reduce_dtype would be 'float32'"):
        require_same(PRESETS["mixed_bfloat16"].with_(reduce_dtype="bfloat16"), accelerator)


# ---- what it would do silently ------------------------------------------------------------------------------------


def test_float16_on_a_cpu_is_float32_there_and_float16_here():
    dtypes = []

    def train(accelerator):
        model, optimizer = prepared(accelerator, TinyGPT())
        model.head.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
        accelerator.backward(next_token_loss(model, tokens(1)[0]))
        optimizer.step()
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native = Accelerator(cpu=True, mixed_precision="fp16")
        before = flat(TinyGPT())
        assert not torch.equal(flat(train(native)), before)  # it trains, and says nothing
    assert dtypes == [torch.float32] and native.scaler is None
    assert effective_policy(native) == PRESETS["float32"]
    with pytest.raises(UnsupportedError, match="compute_dtype would be 'float32', not 'float16'"):
        require_same("fp16", native)

    dtypes.clear()
    ours = PrecisionAccelerator("fp16", cpu=True)
    require_same("fp16", ours)
    train(ours)
    assert dtypes == [torch.float16]
    assert isinstance(ours.scaler, AcceleratorScaler) and ours.scaler.state_dict()["good_steps"] == 1


def fused_step(scaler, accelerator, kind):
    """A step on a non-finite gradient: the schedule's learning rate and whether it counts as skipped."""
    weight = torch.nn.Parameter(torch.tensor(1.0))
    native = torch.optim.AdamW([weight], lr=0.5, fused=True)
    optimizer = kind(native, scaler=scaler)
    schedule = AcceleratedScheduler(torch.optim.lr_scheduler.ExponentialLR(native, 0.5), [optimizer])
    scaler.scale(weight * float("inf")).backward()
    optimizer.step()
    schedule.step()
    assert weight.item() == 1.0  # both skip
    return native.param_groups[0]["lr"], optimizer.step_was_skipped


@pytest.mark.filterwarnings("ignore:Seems like")
def test_a_skipped_fused_step_is_seen():
    accelerator = PrecisionAccelerator("fp16", cpu=True)
    assert fused_step(torch.amp.GradScaler("cpu"), accelerator, AcceleratedOptimizer) == (0.25, False)
    assert fused_step(accelerator.scaler, accelerator, AcceleratedOptimizer) == (0.5, True)


def two_optimizers(scaler, watch=lambda module: None):
    """Two weights, gradient 1 each, learning rate 0.25: both should come from 1 to 0.75."""
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    watch(module)
    optimizers = [AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.25), scaler=scaler) for weight in module]
    scaler.scale(module[0] + module[1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    return [weight.item() for weight in module]


def test_two_optimizers_share_an_update():
    accelerator = PrecisionAccelerator(scaling(initial=8.0, growth_interval=1), cpu=True)
    native = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    assert two_optimizers(native) == [0.75, 0.875]  # the second divided by the scale after the first's update
    assert two_optimizers(accelerator.scaler, accelerator.scaler.iterations.watch) == [0.75, 0.75]
    assert accelerator.scaler.get_scale() == 16.0


# ---- training under the policy ------------------------------------------------------------------------------------


def test_the_policy_is_followed_inside_and_outside():
    policy = MIXED.with_(rules=(Rule(module="head", dtype="float32"),))
    accelerator = prepare_accelerator(policy, Accelerator(cpu=True))
    model, _ = prepared(accelerator, TinyGPT())
    seen = {}
    for name in ("block.mlp.0", "block.norm1", "head"):
        model.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
    assert model(tokens(1)[0][:, :-1]).dtype is torch.float32
    assert seen == {"block.mlp.0": torch.float16, "block.norm1": torch.float32, "head": torch.float32}
    x = torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype is torch.float16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32
    assert (x @ x).dtype is torch.float32
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward.__func__ is TinyGPT.forward


def test_trained_and_skipped_as_the_rule_says():
    policy = scaling(initial=8.0, growth_interval=2, hysteresis=2)
    accelerator = PrecisionAccelerator(policy, cpu=True)
    schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    model, optimizer, scheduler = prepared(accelerator, Weight(), schedule=schedule)
    told = []
    for finite in (True, True, False, False, True):
        accelerator.backward(model(one(0.5 if finite else float("inf"))).sum())
        before = model.weight.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is (not finite) is (model.weight.item() == before)
        told.append((accelerator.scaler.get_scale(), scheduler.get_last_lr()[0]))
    assert told == [(8.0, 0.125), (16.0, 0.0625), (16.0, 0.0625), (8.0, 0.0625), (8.0, 0.03125)]
    assert model.weight.item() == 1 - 0.5 * (0.25 + 0.125 + 0.0625)
    assert accelerator.scaler.state_dict()["skipped"] == 2


@pytest.mark.parametrize("fused", [False, True])
def test_accumulated_and_clipped_gradients_are_unscaled(fused):
    accelerator = PrecisionAccelerator(scaling(initial=8.0), cpu=True, gradient_accumulation_steps=2)
    model = Weight()
    model, optimizer = prepared(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
    for value in (3.0, 5.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(one(value)).sum())
            if accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
                accelerator.clip_grad_value_(model.parameters(), 0.5)  # unscales no second time
                assert model.weight.grad.item() == 0.5
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == 0.5


def test_several_models_clip_and_step_apart():
    accelerator = PrecisionAccelerator(scaling(initial=8.0, growth_interval=1), cpu=True)
    a, b = Weight(), Weight()
    a, b, first, second = accelerator.prepare(
        a, b, torch.optim.SGD(a.parameters(), lr=0.25), torch.optim.SGD(b.parameters(), lr=0.25)
    )
    accelerator.backward(a(one(1)).sum())
    accelerator.backward(b(one(1)).sum())
    assert accelerator.clip_grad_norm_(a.parameters(), 10.0) == 1.0
    first.step()
    assert accelerator.clip_grad_norm_(b.parameters(), 10.0) == 1.0
    second.step()
    assert (a.weight.item(), b.weight.item(), accelerator.scaler.get_scale()) == (0.75, 0.75, 16.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_goes_on_bit_equal_from_its_saved_state(fused, tmp_path):
    policy = scaling(initial=2.0**20, growth_interval=2)

    def start():
        accelerator = PrecisionAccelerator(policy, cpu=True)
        model = TinyGPT()
        return accelerator, *prepared(accelerator, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))

    def train(accelerator, model, optimizer, batches):
        for batch in batches:
            accelerator.backward(next_token_loss(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return flat(model), accelerator.scaler.state_dict()

    batches = tokens(8)
    straight, state = train(*start(), batches)
    assert state["skipped"] > 0 and state["scale"] < 2.0**20  # it came down from overflowing
    half = start()
    train(*half, batches[:5])
    half[0].save_state(str(tmp_path))
    accelerator, model, optimizer = start()
    accelerator.load_state(str(tmp_path))
    weights, resumed = train(accelerator, model, optimizer, batches[5:])
    assert torch.equal(weights, straight) and resumed == state


def test_a_saved_state_of_another_kind(tmp_path):
    native = torch.amp.GradScaler("cpu", init_scale=128.0)
    native.scale(torch.ones(1))
    accelerator = PrecisionAccelerator("fp16", cpu=True)
    prepared(accelerator, Weight())
    accelerator.save_state(str(tmp_path))
    torch.save(native.state_dict(), tmp_path / "scaler.pt")
    accelerator.load_state(str(tmp_path))
    assert accelerator.scaler.get_scale() == 128.0
    (tmp_path / "scaler.pt").unlink()
    with pytest.warns(PrecisionWarning, match="starts at 65536"):
        accelerator.load_state(str(tmp_path))
    assert isinstance(accelerator.scaler, AcceleratorScaler)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_low_parameters_get_masters_or_are_refused(name):
    accelerator = PrecisionAccelerator(name, cpu=True)
    with pytest.raises(MasterWeightsError, match="weight"):
        prepared(accelerator, Weight())
    policy = PRESETS[name] if name == "bfloat16" else PRESETS[name].with_(loss_scale={"mode": "static", "initial": 8.0})
    accelerator = PrecisionAccelerator(policy, cpu=True, master_weights=True)
    model, optimizer = prepared(accelerator, Weight())
    accelerator.backward(model(one(2.0**-12)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 2.0**-12
    optimizer.step()
    assert model.weight.dtype is getattr(torch, name) and model.weight.item() == 1.0
    assert optimizer.param_groups[0]["params"][0].item() == 1.0 - 2.0**-14


def test_without_scaling_there_is_no_scaler():
    accelerator = PrecisionAccelerator("bf16", cpu=True)
    model, optimizer = prepared(accelerator, Weight())
    accelerator.backward(model(one(1)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 10.0) == 1.0
    optimizer.step()
    assert accelerator.scaler is None and model.weight.item() == 0.75


def test_what_says_otherwise_is_refused():
    with pytest.raises(PolicyError, match="'bf16', but the policy computes in float16"):
        prepare_accelerator("fp16", Accelerator(cpu=True, mixed_precision="bf16"))
    AcceleratorState._reset_state(True)
    with pytest.raises(PolicyError, match="GradScalerKwargs"):
        PrecisionAccelerator("fp16", cpu=True, kwargs_handlers=[GradScalerKwargs()])
    accelerator = Accelerator(cpu=True)
    prepared(accelerator, Weight())
    with pytest.raises(PolicyError, match="already"):
        prepare_accelerator("fp16", accelerator)
    with pytest.raises(PolicyError, match="not Weight"):
        prepare_accelerator("fp16", Weight())
    ours = prepare_accelerator("fp16", Accelerator(cpu=True))
    model = Weight()
    with pytest.raises(PolicyError, match="native one"):
        ours.prepare(model, ours.mp.optimizer(torch.optim.SGD(model.parameters(), lr=1.0)))
    with pytest.raises(UnsupportedError, match="LBFGS"):
        ours.prepare(model, torch.optim.LBFGS(model.parameters()))
    model, optimizer = prepared(ours, model)
    ours.backward(model(one(1)).sum())
    with pytest.raises(LossScaleError, match="closures"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("module", ["accelerate_policy", "accelerate_arguments"])
def test_without_the_package_it_says_what_to_install(module, monkeypatch):
    for name in ("accelerate", "accelerate.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"precision_torch.{module}")
    with pytest.raises(BackendUnavailableError, match="pip install"):
        importlib.import_module(f"precision_torch.{module}")


def test_two_processes_skip_and_scale_alike():
    first, second = run_ranks(workers.work, 2, env=workers.ENV, timeout=150)
    assert first == second
    assert first["steps"] == [(False, 8.0, 0.625), (True, 4.0, 0.625), (False, 4.0, 0.25)]
    assert "DDP reduces gradients in float32, but the policy says reduce_dtype float16" in first["reduce"]
    assert "DDP cannot reduce the float32 gradients" in first["masters"]


def test_a_bound_policy_does_too():
    import precision

    mp = precision.bind(PrecisionPolicy(compute_dtype="bfloat16"), backend="torch", device="cpu")
    assert prepare_accelerator(mp, Accelerator(cpu=True)).mp is mp
