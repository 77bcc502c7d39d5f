"""What each visible torch device can do with each dtype, and how that is known."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from precision.backend import Capability
from precision.errors import UnsupportedError

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def visible_devices() -> list[torch.device]:
    """The devices torch can use here, accelerators first."""
    found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append(torch.device("mps", 0))
    if torch.xpu.is_available():
        found += [torch.device("xpu", i) for i in range(torch.xpu.device_count())]
    return [*found, torch.device("cpu")]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device a policy is bound to: the one asked for, or the first of CUDA, MPS, XPU and CPU that is there.

    Raises:
        UnsupportedError: no such device here; lists those that are.
    """
    visible = visible_devices()
    shown = ", ".join(str(d) for d in visible)
    if device is None:
        return visible[0]
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device {device!r} is not a torch device ({error}). Visible here: {shown}.") from None
    for found in visible:
        if found.type == asked.type and asked.index in (None, found.index or 0):
            if asked.index is None and asked.type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
            return found
    raise UnsupportedError(f"device {str(asked)!r} is not visible here. Visible: {shown}.")


def capabilities_of(device: torch.device) -> list[Capability]:
    """The capabilities of one device, one a dtype."""
    table = {"cpu": _cpu, "cuda": _cuda, "mps": _mps, "xpu": _xpu}[device.type](device)
    return [Capability(str(device), dtype, support, reason) for dtype, (support, reason) in table.items()]  # type: ignore[arg-type]


def _cpu(device: torch.device) -> dict[str, tuple[str, str]]:
    flags = cpu_flags()
    return {
        "float32": ("native", "every CPU"),
        "float16": _from_flags(flags, ("avx512_fp16", "amx_fp16", "fp16_arith"), "float16 arithmetic"),
        "bfloat16": _from_flags(flags, ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"), "bfloat16 arithmetic"),
        **dict.fromkeys(_FP8, ("storage", "torch casts to and from it on CPU and has no arithmetic in it")),
    }


def cpu_flags() -> Mapping[str, object]:
    """CPU features as torch (cpuinfo) reports them."""
    return torch.cpu.get_capabilities()


def _from_flags(flags: Mapping[str, object], wanted: tuple[str, ...], what: str) -> tuple[str, str]:
    have = [flag for flag in wanted if flags.get(flag)]
    if have:
        return "native", f"the CPU has {', '.join(have)}"
    return (
        "slow",
        f"the CPU ({platform.machine()}) has no {what} (none of {', '.join(wanted)}); torch converts around it",
    )


def _cuda(device: torch.device) -> dict[str, tuple[str, str]]:
    if torch.version.hip:
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
        return {
            "float32": ("native", "every GPU"),
            "float16": ("native", f"ROCm, {name}"),
            "bfloat16": ("native" if bf16 else "slow", f"ROCm, {name}: is_bf16_supported is {bf16}"),
            **dict.fromkeys(_FP8, ("storage", "matmul only through scaled kernels, no general arithmetic")),
        }
    major, minor = torch.cuda.get_device_capability(device)
    sm = f"compute capability {major}.{minor}"
    with torch.cuda.device(device):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    scaled = (major, minor) >= (8, 9)
    fp8 = f"{sm}: " + (
        "only scaled matmuls, no general arithmetic" if scaled else "casts only; scaled matmuls need 8.9"
    )
    return {
        "float32": ("native", "every GPU"),
        "float16": ("native" if (major, minor) >= (5, 3) else "slow", f"{sm}; tensor cores from 7.0"),
        "bfloat16": ("native" if bf16 else "slow", f"{sm}; native from 8.0" + ("" if bf16 else ", emulated before")),
        **dict.fromkeys(_FP8, ("storage", fp8)),
    }


def _mps(device: torch.device) -> dict[str, tuple[str, str]]:
    new_enough = torch.backends.mps.is_macos_or_newer(14, 0)
    return {
        "float32": ("native", "Metal"),
        "float16": ("native", "Metal"),
        "bfloat16": ("native", "macOS 14 or newer") if new_enough else ("none", "needs macOS 14"),
        **dict.fromkeys(_FP8, ("none", "Metal has no 8-bit floats")),
    }


def _xpu(device: torch.device) -> dict[str, tuple[str, str]]:
    bf16 = torch.xpu.is_bf16_supported(including_emulation=False)
    return {
        "float32": ("native", "every XPU"),
        "float16": ("native", "every XPU that torch supports"),
        "bfloat16": ("native" if bf16 else "slow", f"torch.xpu.is_bf16_supported is {bf16}"),
        **dict.fromkeys(_FP8, ("storage", "casts, and scaled matmuls only")),
    }
