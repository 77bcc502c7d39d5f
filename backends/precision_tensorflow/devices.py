"""What each visible device can do with each dtype under TensorFlow, and how that is known."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from precision.backend import Capability
from precision.errors import UnsupportedError

Support = Literal["native", "slow", "storage", "none"]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_CPU_FLAGS = {"bfloat16": ("amx_bf16", "avx512_bf16"), "float16": ("amx_fp16", "avx512_fp16")}
_GPU_SINCE = {"float16": (7, 0), "bfloat16": (8, 0)}  # the first compute capability with tensor cores for the dtype


def default_device() -> str:
    """The device ops run on when none is named: the first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def capabilities() -> list[Capability]:
    """List every visible CPU and GPU with every dtype a policy may name. Does not initialise the devices."""
    found = [capability for dtype, support, why in _cpu() for capability in [Capability("CPU:0", dtype, support, why)]]
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        found += [Capability(f"GPU:{index}", dtype, support, why) for dtype, support, why in _gpu(details)]
    return found


def multiplies(device: str, dtype: str) -> bool:
    """Whether a device's own kernels multiply a dtype in hardware, accumulate in float32 and round to nearest."""
    found = next((c for c in capabilities() if (c.device, c.dtype) == (device, dtype)), None)
    return found is not None and found.support == "native"


def require_computing(device: str, dtype: str, what: str) -> None:
    """Refuse a dtype that a device does not compute in.

    Raises:
        UnsupportedError: names the dtypes that it computes in.
    """
    usable = [c.dtype for c in capabilities() if c.device == device and c.support in ("native", "slow")]
    if dtype not in usable and dtype != "float64":
        raise UnsupportedError(f"{what} in {dtype}: {device} does not compute in it. It has {', '.join(usable)}.")


def _cpu(flags: frozenset[str] | None = None) -> Iterable[tuple[str, Support, str]]:
    have = cpu_flags() if flags is None else flags
    yield "float32", "native", "hardware arithmetic"
    for dtype, wanted in _CPU_FLAGS.items():
        hit = next((flag for flag in wanted if flag in have), None)
        if hit is not None:
            yield dtype, "native", f"the processor has {hit}, which oneDNN uses for matmuls and convolutions"
        else:
            why = (
                f"the processor reports none of {', '.join(wanted)}" if have else "the processor's flags are not known"
            )
            yield dtype, "slow", f"{why}: TensorFlow's kernels convert to float32 and back"
    for dtype in _FLOAT8:
        yield dtype, "storage", "TensorFlow casts to and from it; its kernels compute in no float8"


def _gpu(details: dict[str, Any]) -> Iterable[tuple[str, Support, str]]:
    name = details.get("device_name", "GPU")
    capability = details.get("compute_capability")
    yield "float32", "native", f"{name}: hardware arithmetic"
    for dtype, since in _GPU_SINCE.items():
        if capability is None:
            yield dtype, "slow", f"{name}: no compute capability is reported, so hardware support is not known"
        elif tuple(capability) >= since:
            yield dtype, "native", f"{name}: compute capability {capability[0]}.{capability[1]} has tensor cores for it"
        else:
            yield (
                dtype, "slow",
                f"{name}: compute capability {capability[0]}.{capability[1]}; tensor cores for it need {since[0]}.{since[1]}",
            )  # fmt: skip
    for dtype in _FLOAT8:
        yield dtype, "storage", "TensorFlow casts to and from it; its kernels compute in no float8"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature flags as Linux reports them; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next(
        (frozenset(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")), frozenset()
    )
