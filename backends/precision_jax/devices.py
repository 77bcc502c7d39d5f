"""What the devices that JAX sees can do with each dtype, and how that is known."""

from __future__ import annotations

from typing import Any, Literal

import jax

from precision.backend import Capability
from precision.errors import UnsupportedError
from precision.formats import DTYPES

Support = Literal["native", "slow", "storage", "none"]

_FLOAT8 = "casts and storage; matmuls need a quantisation recipe, which a policy does not have"
_CPU: dict[str, tuple[Support, str]] = {
    "float32": ("native", "hardware arithmetic"),
    "float16": (
        "slow",
        "XLA computes most float16 ops on CPUs by converting to float32 and back: no gain, smaller memory",
    ),
    "bfloat16": (
        "slow",
        "XLA computes most bfloat16 ops on CPUs by converting to float32 and back: no gain, smaller memory",
    ),
    "float8_e4m3fn": ("storage", _FLOAT8),
    "float8_e5m2": ("storage", _FLOAT8),
}
_TPU: dict[str, tuple[Support, str]] = {
    "float32": (
        "native",
        "vector units; matmuls take bfloat16 passes unless jax_default_matmul_precision says otherwise",
    ),
    "float16": ("slow", "TPU matrix units have no float16; XLA converts"),
    "bfloat16": ("native", "the matrix units' own format"),
    "float8_e4m3fn": ("storage", _FLOAT8),
    "float8_e5m2": ("storage", _FLOAT8),
}


def device_name(device: Any) -> str:
    """A device's name here: platform and id, ``"cpu:0"``."""
    return f"{device.platform}:{device.id}"


def capabilities(device: Any) -> list[Capability]:
    """What one JAX device can do with each dtype a policy may name."""
    table = {"cpu": _CPU, "tpu": _TPU}.get(device.platform) or _gpu(device)
    return [Capability(device_name(device), dtype, *table[dtype]) for dtype in DTYPES]


def _gpu(device: Any) -> dict[str, tuple[Support, str]]:
    text = str(getattr(device, "compute_capability", ""))
    kind = device.device_kind
    try:
        capability = float(text)
    except ValueError:  # ROCm names an architecture; every one that JAX supports has both
        return {**_CPU, **dict.fromkeys(("float32", "float16", "bfloat16"), ("native", f"matrix cores of {kind}"))}
    has = f"{kind} has compute capability {text}"
    return {
        "float32": ("native", "hardware arithmetic; matmuls may use TensorFloat-32 (jax_default_matmul_precision)"),
        "float16": ("native", f"{has}, tensor cores from 7.0") if capability >= 7.0 else ("slow", f"{has}, below 7.0"),
        "bfloat16": ("native", f"{has}, tensor cores from 8.0") if capability >= 8.0 else ("slow", f"{has}, below 8.0"),
        "float8_e4m3fn": ("storage", _FLOAT8),
        "float8_e5m2": ("storage", _FLOAT8),
    }


def find_device(device: Any) -> Any:
    """The JAX device meant by None (the default one), a name (``"cpu"``, ``"gpu:1"``, ``"cuda"``) or a device.

    Raises:
        UnsupportedError: no such device; names those that there are.
    """
    if device is None:
        device = jax.config.jax_default_device or jax.local_devices()[0]  # JAX takes a name for it, too
    if isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise UnsupportedError(
            f"device is None, a name such as 'cpu' or 'gpu:0', or a jax.Device, not {type(device).__name__}."
        )
    platform, _, index = device.lower().partition(":")
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError:
        found = []
    for candidate in found:
        if not index or str(candidate.id) == index:
            return candidate
    there = ", ".join(device_name(d) for d in jax.local_devices())
    raise UnsupportedError(f"JAX has no device {device!r} here; it has {there}.")
