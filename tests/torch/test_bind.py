"""Binding: devices, capabilities, what is refused, and the casts."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

import precision
from precision import MixedFrameworksError, PolicyError, PrecisionPolicy, PrecisionWarning, Rule, UnsupportedError
from precision_torch import TorchBackend
from precision_torch.capabilities import capabilities_of

from .helpers import bind


def test_the_registry_finds_the_backend_under_its_names():
    for name in ("torch", "pytorch"):
        assert isinstance(precision.get_backend(name), TorchBackend)
    assert precision.get_backend("torch").versions() == {"torch": torch.__version__}


def test_default_device_is_an_accelerator_if_there_is_one():
    mp = precision.bind("float32", backend="torch")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert mp.device.type == (accelerator.type if accelerator else "cpu")


@pytest.mark.parametrize("device", ["nonsense", "meta", "cpu:7"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device):
    with pytest.raises(UnsupportedError, match=r"cpu") as error:
        precision.bind("float32", backend="torch", device=device)
    assert device in str(error.value)


def test_every_visible_device_reports_every_dtype_with_a_reason():
    found = precision.get_backend("torch").capabilities()
    devices = {c.device for c in found}
    assert "cpu" in devices
    for device in devices:
        mine = [c for c in found if c.device == device]
        assert {c.dtype for c in mine} == set(precision.DTYPES)
        assert all(c.reason for c in mine)


def test_cpu_support_follows_the_flags_of_the_cpu():
    by_dtype = {c.dtype: c for c in capabilities_of(torch.device("cpu"))}
    flags = torch.cpu.get_capabilities()
    has_bf16 = any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    assert by_dtype["bfloat16"].support == ("native" if has_bf16 else "slow")
    assert by_dtype["float32"].support == "native"
    assert by_dtype["float8_e4m3fn"].support == "storage"
    with pytest.raises(NotImplementedError):  # which is what "storage" says
        torch.ones(2).to(torch.float8_e4m3fn) + torch.ones(2).to(torch.float8_e4m3fn)


def test_float8_compute_is_refused_and_float8_output_is_not():
    with pytest.raises(UnsupportedError, match=r"compute_dtype float8_e5m2.*float32, float16, bfloat16"):
        bind(PrecisionPolicy(compute_dtype="float8_e5m2"))
    mp = bind(PrecisionPolicy(output_dtype="float8_e5m2"))
    assert mp.cast_to_output(torch.ones(2)).dtype is torch.float8_e5m2


def test_emulation_is_refused_not_ignored():
    with pytest.raises(UnsupportedError, match="emulate"):
        bind(PrecisionPolicy(emulate=True))


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    hidden: list


def test_casts_reach_every_container_and_leave_the_rest_alone():
    mp = bind("mixed_bfloat16")
    x, f64, i = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    c = torch.ones(2, dtype=torch.complex64)
    tree = {
        "a": [x, (x, None, "s", 3, True)], "p": Point(x, f64), "i": i, "c": c, "r": Result(x, [x]),
        "d": collections.OrderedDict(k=x), "n": np.ones(2, np.float32),
    }  # fmt: skip
    out = mp.cast_to_compute(tree)
    assert out["a"][0].dtype is out["a"][1][0].dtype is torch.bfloat16
    assert out["a"][1][1:] == (None, "s", 3, True)
    assert isinstance(out["p"], Point) and out["p"].x.dtype is torch.bfloat16 and out["p"].y is f64
    assert out["i"] is i and out["c"] is c and out["n"] is tree["n"]
    assert isinstance(out["r"], Result) and out["r"].logits.dtype is out["r"].hidden[0].dtype is torch.bfloat16
    assert isinstance(out["d"], collections.OrderedDict) and out["d"]["k"].dtype is torch.bfloat16
    assert x.dtype is torch.float32 and tree["r"].logits is x  # nothing was changed in place
    assert mp.cast_to_output(out)["a"][0].dtype is torch.float32


def test_rules_win_for_the_paths_they_cover():
    mp = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(module="**norm*", dtype="float32"),)))
    out = mp.cast_to_compute({"layer": {"norm1": {"weight": torch.ones(2)}, "fc": {"weight": torch.ones(2)}}})
    assert out["layer"]["norm1"]["weight"].dtype is torch.float32
    assert out["layer"]["fc"]["weight"].dtype is torch.bfloat16


def test_casts_keep_gradients_flowing():
    mp = bind("mixed_bfloat16")
    x = torch.ones(2, requires_grad=True)
    mp.cast_to_compute([x])[0].sum().backward()
    assert x.grad.dtype is torch.float32 and torch.equal(x.grad, torch.ones(2))


def test_another_frameworks_tensor_is_refused():
    jnp = pytest.importorskip("jax.numpy", reason="needs a second framework")
    with pytest.raises(MixedFrameworksError, match="jax"):
        bind().cast_to_compute({"w": jnp.ones(2)})


def test_native_autocasting_says_once_that_it_does_not_see_family_rules():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),))
    mp = precision.bind(policy, backend="torch", device="cpu", native_autocast=True)
    with pytest.warns(PrecisionWarning, match="softmax"):
        mp.autocast()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.autocast()
        bind(policy).autocast()


def test_float16_training_without_a_loss_scale_is_refused_at_every_entry():
    mp = bind(PrecisionPolicy(compute_dtype="float16"))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for enter in (
        mp.grad_scaler,
        lambda: mp.backward(model(torch.ones(1, 2)).sum()),
        lambda: mp.step(optimizer),
        lambda: mp.optimizer(optimizer),
        lambda: mp.prepare(model, optimizer),
    ):
        with pytest.raises(PolicyError, match=r"float16.*loss_scale"):
            enter()
    assert mp.autocast() is not None  # inference is fine


def test_a_reduce_dtype_that_has_no_effect_is_said():
    mp = precision.bind(precision.PrecisionPolicy(reduce_dtype="bfloat16"), backend="torch", device="cpu")
    model = torch.nn.Linear(2, 2)
    with pytest.warns(precision.PrecisionWarning, match="reduce_dtype bfloat16 has no effect here") as caught:
        mp.prepare(model, torch.optim.SGD(model.parameters()))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("cast", ["cast_to_param", "cast_to_compute", "cast_to_output"])
def test_a_module_is_not_a_tree(cast):
    with pytest.raises(PolicyError, match="mp.prepare"):
        getattr(bind("bfloat16"), cast)(torch.nn.Linear(2, 2))
