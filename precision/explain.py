"""A policy in words: each field with what it does, each op family with its dtype, each format with its limits."""

from __future__ import annotations

from typing import Any

from precision.errors import PolicyError
from precision.formats import FloatFormat
from precision.names import STYLES
from precision.ops import FAMILIES, family_dtype
from precision.policy import PrecisionPolicy


def explain(policy: PrecisionPolicy) -> dict[str, Any]:
    """Return a policy's explanation as plain values.

    Returns:
        ``policy`` (as in a file), ``fields`` (list of name, value, meaning), ``families`` (name to dtype and reason),
        ``formats`` (the limits of the dtypes in use) and ``names`` (the spellings other tools have for it).
    """
    return {
        "policy": policy.to_dict(),
        "fields": [{"field": f, "value": v, "meaning": m} for f, v, m in _fields(policy)],
        "families": {
            name: {"dtype": family_dtype(policy, name) or f"({family.treatment})", "why": family.why}
            for name, family in FAMILIES.items()
        },
        "formats": {dtype: _format(dtype) for dtype in sorted({policy.param_dtype, policy.compute_dtype})},
        "names": _names(policy),
    }


def _fields(policy: PrecisionPolicy) -> list[tuple[str, Any, str]]:
    low = policy.compute_dtype != "float32"
    masters = policy.param_dtype == "float32" and low
    rows: list[tuple[str, Any, str]] = [
        ("param_dtype", policy.param_dtype,
         "parameters are kept in this; float32 masters, of which ops use low copies" if masters
         else "parameters are kept and updated in this"),
        ("compute_dtype", policy.compute_dtype, "matmuls, convolutions and attention run in this, accumulating in float32"),
        ("output_dtype", policy.output_dtype, "model outputs and the loss leave in this"),
        ("reduce_dtype", policy.reduce_dtype, "gradients are reduced over replicas and accumulated in this"),
        ("emulate", policy.emulate,
         "low formats are emulated by rounding" if policy.emulate else "low formats are the device's own"),
    ]  # fmt: skip
    for i, rule in enumerate(policy.rules):
        what = f"module {rule.module}" if rule.module else f"op family {rule.family}"
        rows.append((f"rules.{i}", what, f"runs in {rule.dtype} (the first rule that matches wins)"))
    scale = policy.loss_scale
    modes = {
        "none": "the loss is not scaled and gradients are not checked",
        "static": "the loss is multiplied by a constant; steps with non-finite gradients are skipped",
        "dynamic": "the loss is multiplied by a factor that adapts; steps with non-finite gradients are skipped",
    }
    meanings = {
        "mode": modes[scale.mode],
        "initial": "the scale at the first step",
        "growth_factor": f"multiplies the scale after {scale.growth_interval} finite steps in a row",
        "backoff_factor": "multiplies the scale on overflow",
        "growth_interval": "finite steps in a row before the scale grows",
        "minimum": "the scale never falls below this",
        "maximum": "the scale never rises above this",
        "hysteresis": "overflows tolerated before backing off (1: none)",
        "hysteresis_refill": "when that tolerance is restored",
        "max_consecutive_skips": "more skipped steps in a row than this raise NonFiniteGradientsError",
    }
    rows += [(f"loss_scale.{name}", value, meanings[name]) for name, value in scale.effective().items()]
    return rows


def _format(dtype: str) -> dict[str, float]:
    fmt = FloatFormat.of(dtype)
    return {
        "max": fmt.max,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal,
        "eps": fmt.eps,
    }


def _names(policy: PrecisionPolicy) -> dict[str, str]:
    names = {}
    for style in (*STYLES, "jmp"):
        try:
            names[style] = policy.to_name(style)
        except PolicyError:
            continue
    return names
