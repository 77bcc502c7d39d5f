"""Lightning's config: the real Trainer and Fabric take what is exported and do what the policy says, or are told not to."""

import importlib
import warnings

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy

from precision import InteropError, LossScale, PrecisionPolicy, UnsupportedError
from precision.interop.lightning import from_lightning, to_lightning
from precision.names import PRESETS
from precision_torch.lightning_check import effective_policy, require_same

QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SCALE = LossScale(mode="dynamic", initial=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)


def made(spec):
    """What jsonargparse makes of class_path and init_args, for LightningCLI: the real class, called."""
    module, _, name = spec["class_path"].rpartition(".")
    arguments = {k: made(v) if isinstance(v, dict) else v for k, v in spec["init_args"].items()}
    return getattr(importlib.import_module(module), name)(**arguments)


def trainer(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(**QUIET, **options)


@pytest.mark.parametrize(
    ("preset", "string", "plugin"),
    [
        ("float32", "32-true", "Precision"),
        ("mixed_bfloat16", "bf16-mixed", "MixedPrecision"),
        ("float16", "16-true", "HalfPrecision"),
        ("bfloat16", "bf16-true", "HalfPrecision"),
    ],
)
def test_trainer_and_fabric_take_the_string(preset, string, plugin):
    config = to_lightning(PRESETS[preset]).config
    assert config == {"precision": string}
    made = trainer(**config)
    assert made.precision == string and type(made.precision_plugin).__name__ == plugin
    fabric = Fabric(accelerator="cpu", **config)
    assert type(fabric._precision).__name__ == plugin
    assert effective_policy(made) == effective_policy(fabric) == from_lightning(config).policy


def test_a_scale_of_ones_own_is_a_plugin_with_a_scaler_that_has_it():
    policy = PRESETS["mixed_float16"].with_(loss_scale=SCALE)
    export = to_lightning(policy, device="cpu")
    assert export.lost == ()
    plugin = made(export.config["plugins"][0])
    assert isinstance(plugin, MixedPrecision) and plugin.precision == "16-mixed"
    scaler = plugin.scaler
    assert scaler.is_enabled() and scaler.get_scale() == 1024.0 and scaler.get_growth_interval() == 7
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.25)
    run = trainer(plugins=[plugin])
    assert run.precision == "16-mixed"  # a plugin is left as it is, on a CPU too
    assert effective_policy(run) == policy
    assert type(made(to_lightning(policy, device="cpu", fabric=True).config["plugins"][0])).__module__.startswith(
        "lightning.fabric"
    )


def test_unscaled_float16_is_a_disabled_scaler():
    policy = PRESETS["mixed_float16"].with_(loss_scale=LossScale())
    export = to_lightning(policy, device="cpu")
    assert export.lost == () and from_lightning(export.config).policy == policy
    plugin = made(export.config["plugins"][0])
    assert not plugin.scaler.is_enabled()
    assert effective_policy(trainer(plugins=[plugin])) == policy


def test_lightning_turns_float16_into_bfloat16_on_a_cpu_and_the_check_says_so():
    config = to_lightning(PRESETS["mixed_float16"]).config
    for make in (lambda: Trainer(**QUIET, **config), lambda: Fabric(accelerator="cpu", **config)):
        with pytest.warns(UserWarning, match="bf16-mixed"):
            run = make()
        assert effective_policy(run).compute_dtype == "bfloat16"
        with pytest.raises(UnsupportedError, match="compute_dtype would be 'bfloat16', not 'float16'"):
            require_same("mixed_float16", run)
        require_same("mixed_bfloat16", run)
    assert any("bf16-mixed" in note for note in to_lightning(PRESETS["mixed_float16"]).notes)


def test_lightning_scales_no_loss_under_16_true_and_the_check_says_so():
    run = trainer(precision="16-true")
    assert isinstance(run.precision_plugin, HalfPrecision) and not hasattr(run.precision_plugin, "scaler")
    lost = {entry.field for entry in to_lightning(PRESETS["float16"]).lost}
    assert lost == {"reduce_dtype", "loss_scale"}
    with pytest.raises(UnsupportedError, match=r"loss_scale.mode would be 'none', not 'dynamic'"):
        require_same("float16", run)


def test_lightning_reduces_in_the_compute_dtype_under_fsdp_and_the_check_says_so():
    strategy = FSDPStrategy(precision_plugin=FSDPPrecision("bf16-mixed"))
    assert strategy.mixed_precision_config.reduce_dtype is torch.bfloat16
    with pytest.raises(UnsupportedError, match="reduce_dtype would be 'bfloat16', not 'float32'"):
        require_same("mixed_bfloat16", strategy)
    require_same(PRESETS["mixed_bfloat16"].with_(reduce_dtype="bfloat16"), strategy)
    assert any("FSDPStrategy" in note for note in to_lightning(PRESETS["mixed_bfloat16"]).notes)
    told = from_lightning({"precision": "bf16-mixed", "strategy": "fsdp"}).notes
    assert any("FSDPStrategy" in note for note in told)


def test_lightnings_fsdp_plugins_take_no_scaler_of_ones_own():
    # so a scale's settings cannot be had there at all: the class attribute is looked at, not the argument
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for plugin in (FSDPPrecision, FabricFSDPPrecision):
        with pytest.raises(ValueError, match="does not use a scaler"):
            plugin("16-mixed", scaler=ShardedGradScaler(init_scale=2.0))


@pytest.mark.parametrize("old", [16, "16", "bf16", 32, "32"])
def test_old_spellings_are_read_as_lightning_reads_them(old):
    found = from_lightning({"precision": old})
    assert any("old name" in note for note in found.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", precision=old)
    if str(old) != "16":  # which a CPU turns into bfloat16
        require_same(found.policy, made)
    assert (
        found.policy
        == from_lightning({"precision": {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}[str(old)]}).policy
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"precision": "64-true"}, "float64 needs no precision policy"),
        ({"precision": "transformer-engine"}, "recipe"),
        ({"precision": "fp16"}, "16-mixed"),
        ({"precision": True}, "16-mixed"),
        ({"precision": "16-mixed", "plugins": [{"class_path": "a.MixedPrecision"}]}, "more than one"),
        ({"plugins": [{"class_path": "a.BitsandbytesPrecision"}]}, "not known here"),
        (
            {"plugins": [{"class_path": "a.HalfPrecision", "init_args": {"precision": "16-mixed"}}]},
            "HalfPrecision takes",
        ),
        (
            {"plugins": [{"class_path": "a.MixedPrecision", "init_args": {"precision": "bf16-mixed", "scaler": {}}}]},
            "no scaler",
        ),
    ],
)
def test_what_is_no_dtype_policy_is_refused(config, says):
    with pytest.raises(InteropError, match=says):
        from_lightning(config)


def test_a_lightning_cli_file_keeps_the_rest_of_itself():
    file = {
        "seed_everything": 1,
        "trainer": {"max_epochs": 3, "precision": "16-mixed", "plugins": [{"class_path": "x.AsyncCheckpointIO"}]},
        "model": {"width": 8},
    }
    found = from_lightning(file)
    assert found.policy == PRESETS["mixed_float16"]
    assert found.rest == {
        "seed_everything": 1,
        "trainer": {"max_epochs": 3, "plugins": [{"class_path": "x.AsyncCheckpointIO"}]},
        "model": {"width": 8},
    }
    assert to_lightning(found.policy, base=found.rest).config == file
    scaled = to_lightning(found.policy.with_(loss_scale=SCALE), base=file).config["trainer"]
    assert "precision" not in scaled and scaled["max_epochs"] == 3
    assert [plugin["class_path"] for plugin in scaled["plugins"]] == [
        "lightning.pytorch.plugins.MixedPrecision", "x.AsyncCheckpointIO",
    ]  # fmt: skip
    back = to_lightning(PRESETS["float32"], base={**file, "trainer": scaled})
    assert back.config["trainer"] == {
        "max_epochs": 3,
        "plugins": [{"class_path": "x.AsyncCheckpointIO"}],
        "precision": "32-true",
    }
    assert any("gave way" in note for note in back.notes)


def test_a_plugins_unknown_settings_are_kept():
    policy = PRESETS["mixed_float16"].with_(loss_scale=SCALE)
    config = to_lightning(policy, device="cpu").config
    config["plugins"][0]["init_args"]["colour"] = "red"
    config["plugins"][0]["init_args"]["scaler"]["init_args"]["mood"] = 3
    found = from_lightning(config)
    assert found.policy == policy and any("colour" in note for note in found.notes)
    assert to_lightning(found.policy, base=found.rest).config == config


def test_what_is_lost_says_what_lightning_does():
    policy = PrecisionPolicy(
        compute_dtype="float16",
        rules=[{"module": "head", "dtype": "float32"}],
        loss_scale=SCALE.with_(minimum=1.0, hysteresis=2, max_consecutive_skips=5),
    )
    lost = {entry.field: entry.instead for entry in to_lightning(policy).lost}
    assert set(lost) == {"rules", "loss_scale.minimum", "loss_scale.hysteresis", "loss_scale.max_consecutive_skips"}
    assert "to 0" in lost["loss_scale.minimum"] and "at once" in lost["loss_scale.hysteresis"]
