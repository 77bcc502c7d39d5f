"""The backend itself: what it says of devices, what it refuses, and that importing it touches nothing."""

import subprocess
import sys

import jax
import pytest

import precision
from precision import DTYPES, PrecisionPolicy, Rule, UnsupportedError
from precision_jax import JaxBackend, JaxPolicy
from precision_jax.devices import capabilities


def test_importing_and_making_the_backend_touches_no_device_and_makes_no_array():
    code = """
import jax, precision
import precision_jax, precision_jax.parity, precision_jax.parity_training
backend = precision.get_backend("jax")
assert type(backend).__name__ == "JaxBackend"
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was touched"
precision.bind("mixed_bfloat16", backend="jax")
assert xla_bridge.backends_are_initialized(), "the check can fail"
assert not jax.live_arrays(), "an array was made"
import sys
loaded = {"flax", "equinox", "haiku", "orbax", "jmp", "torch", "tensorflow"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bind_gives_a_jax_policy():
    mp = precision.bind("mixed_bfloat16", backend="jax")
    assert isinstance(mp, JaxPolicy)
    assert isinstance(mp.backend, JaxBackend)
    assert mp.device == f"{jax.devices()[0].platform}:{jax.devices()[0].id}"
    names = [str(d) for d in (mp.param_dtype, mp.compute_dtype, mp.output_dtype, mp.reduce_dtype)]
    assert names == ["float32", "bfloat16", "float32", "float32"]


def test_versions_are_the_installed_ones():
    from importlib.metadata import version

    assert precision.get_backend("jax").versions() == {name: version(name) for name in ("jax", "jaxlib", "optax")}


def test_every_device_and_dtype_is_spoken_of_with_a_reason():
    found = precision.get_backend("jax").capabilities()
    assert {c.device for c in found} == {f"{d.platform}:{d.id}" for d in jax.local_devices()}
    for device in {c.device for c in found}:
        assert [c.dtype for c in found if c.device == device] == list(DTYPES)
    assert all(len(c.reason) > 10 for c in found)


class FakeDevice:
    """Only the description of a device that is not here; no part of JAX runs on it."""

    def __init__(self, platform, kind="", capability=None):
        self.platform, self.id, self.device_kind = platform, 0, kind
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("device", "support"),
    [
        (FakeDevice("cpu"), ("native", "slow", "slow", "storage", "storage")),
        (FakeDevice("gpu", "V100", "7.0"), ("native", "native", "slow", "storage", "storage")),
        (FakeDevice("gpu", "P100", "6.0"), ("native", "slow", "slow", "storage", "storage")),
        (FakeDevice("gpu", "H200", "9.0"), ("native", "native", "native", "storage", "storage")),
        (FakeDevice("gpu", "MI300", "gfx942"), ("native", "native", "native", "storage", "storage")),
        (FakeDevice("tpu", "TPU v5"), ("native", "slow", "native", "storage", "storage")),
    ],
    ids=lambda value: getattr(value, "device_kind", "") or getattr(value, "platform", ""),
)
def test_what_other_devices_can_do(device, support):
    assert tuple(c.support for c in capabilities(device)) == support


def test_what_the_device_cannot_do_is_refused():
    bad = [
        (
            PrecisionPolicy(compute_dtype="float8_e4m3fn"),
            "compute_dtype float8_e4m3fn: not on cpu:0: casts and storage",
        ),
        (PrecisionPolicy(param_dtype="float8_e5m2"), "param_dtype float8_e5m2"),
        (PrecisionPolicy(reduce_dtype="float8_e5m2"), "reduce_dtype float8_e5m2"),
        (PrecisionPolicy(rules=(Rule(module="x", dtype="float8_e5m2"),)), "rule 'x': dtype float8_e5m2"),
        (PrecisionPolicy(emulate=True), "does not emulate"),
    ]
    for policy, message in bad:
        with pytest.raises(UnsupportedError, match=message):
            precision.bind(policy, backend="jax", device="cpu")
    mp = precision.bind(PrecisionPolicy(output_dtype="float8_e5m2"), backend="jax", device="cpu")
    assert str(mp.cast_to_output(jax.numpy.ones(1)).dtype) == "float8_e5m2", "casts are there"


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "CPU"])
def test_devices_by_name(name):
    assert precision.bind("float32", backend="jax", device=name).device == "cpu:0"


def test_devices_as_objects_and_the_default_device():
    device = jax.local_devices(backend="cpu")[0]
    assert precision.bind("float32", backend="jax", device=device).device == "cpu:0"
    with jax.default_device(device):
        assert precision.bind("float32", backend="jax").device == "cpu:0"


def test_a_default_device_that_is_a_name():
    with jax.default_device("cpu"):
        assert precision.bind("float32", backend="jax").device == "cpu:0"


def test_what_is_no_device():
    with pytest.raises(precision.UnsupportedError, match="a name such as 'cpu'.*, not int"):
        precision.bind("float32", backend="jax", device=0)


def test_a_device_that_is_not_there():
    with pytest.raises(UnsupportedError, match="JAX has no device 'cpu:7' here; it has cpu:0"):
        precision.bind("float32", backend="jax", device="cpu:7")
    with pytest.raises(UnsupportedError, match="no device 'quantum'"):
        precision.bind("float32", backend="jax", device="quantum")


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="devise"):
        precision.bind("float32", backend="jax", devise="cpu")
