"""What Accelerate makes of its settings: the words of ``mixed_precision``, its objects' arguments, and FSDP's dtypes."""

from __future__ import annotations

from precision.errors import InteropError
from precision.interop.base import Section, shown
from precision.loss_scale import LossScale
from precision.names import DYNAMIC, PRESETS
from precision.policy import PrecisionPolicy

WORDS = {
    "no": PRESETS["float32"],
    "fp16": PRESETS["mixed_float16"],
    "bf16": PRESETS["mixed_bfloat16"],
}
"""What each word of ``mixed_precision`` means, unsharded: autocasting, float32 parameters, gradients and results."""

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DTYPES = ("float32", "float16", "bfloat16")


def low_word(policy: PrecisionPolicy) -> str:
    """The word of ``mixed_precision`` nearest to a policy: that of its compute dtype."""
    return {"float16": "fp16", "bfloat16": "bf16"}.get(policy.compute_dtype, "no")


def meaning(word: str, sharded: tuple[int, dict[str, str] | None] | None) -> PrecisionPolicy:
    """The policy that a word means; under FSDP with its version and dtypes, or with those that Accelerate takes."""
    policy = WORDS[word]
    if sharded is None:
        return policy
    version, dtypes = sharded
    low = policy.compute_dtype
    dtypes = dtypes or {"param_dtype": low, "reduce_dtype": low, "output_dtype": low}
    compute = low if word != "no" else dtypes["param_dtype"]
    output = dtypes["output_dtype"] if version == 2 else policy.output_dtype if word != "no" else compute
    return policy.with_(compute_dtype=compute, reduce_dtype=dtypes["reduce_dtype"], output_dtype=output)


def fsdp_version(section: Section) -> int:
    """The version of FSDP that a ``fsdp_config`` or ``fsdp_plugin`` names; 1 if it does not."""
    value = section.rest.get("fsdp_version")
    if value is None:
        return 1
    text = str(value)
    if isinstance(value, bool) or text not in ("1", "2"):
        raise InteropError(f"{section.name('fsdp_version')} must be 1 or 2, not {shown(value)}.")
    return int(text)


def fsdp_dtypes(policy: PrecisionPolicy, word: str, version: int) -> dict[str, str]:
    """The ``mixed_precision_policy`` of a plugin, dtypes by name."""

    def written(name: str) -> str:
        return name if name in _DTYPES else "float32"

    dtypes = {"param_dtype": WORDS[word].compute_dtype, "reduce_dtype": written(policy.reduce_dtype)}
    other = {"output_dtype": written(policy.output_dtype)} if version == 2 else {"buffer_dtype": "float32"}
    return {**dtypes, **other}


def sharding(top: Section, word: str, notes: list[str]) -> tuple[int, dict[str, str] | None] | None:
    """What an ``fsdp_plugin`` says: its version, and its dtypes if it names any; None without one."""
    plugin = top.section("fsdp_plugin")
    if plugin is None:
        return None
    version = fsdp_version(plugin)
    said = plugin.take("mixed_precision_policy")
    if isinstance(said, str):
        if said not in _SHORT:
            raise InteropError(
                f"{plugin.name('mixed_precision_policy')} must be one of {', '.join(_SHORT)}, not {shown(said)}."
            )
        low = _SHORT[said]
        said = {"param_dtype": low, "reduce_dtype": low, ("output_dtype" if version == 2 else "buffer_dtype"): low}
    if said is None:
        if word != "no":
            notes.append(
                "Accelerate has FSDP reduce gradients in the compute dtype, as no mixed_precision_policy is given"
            )
        dtypes = None
    else:
        section = Section(said, plugin.name("mixed_precision_policy"))
        dtypes = _dtypes(section, version, notes)
        plugin.keep("mixed_precision_policy", section)
        if word != "no" and dtypes["param_dtype"] not in (WORDS[word].compute_dtype, "float32"):
            raise InteropError(
                f"accelerate config: mixed_precision {word} autocasts to another dtype than FSDP's param_dtype, "
                f"{dtypes['param_dtype']}; give them the same."
            )
    top.rest["fsdp_plugin"] = plugin.rest
    return version, dtypes


def _dtypes(section: Section, version: int, notes: list[str]) -> dict[str, str]:
    keys = ("param_dtype", "reduce_dtype", "output_dtype" if version == 2 else "buffer_dtype")
    if missing := [key for key in keys if key not in section.rest]:
        raise InteropError(f"{section.where} must have {', '.join(keys)} under FSDP{version}; {missing[0]} is missing.")
    dtypes = {key: section.word(key, _DTYPES) or "float32" for key in keys}
    if dtypes.get("buffer_dtype", "float32") != "float32":
        section.rest["buffer_dtype"] = dtypes["buffer_dtype"]
        notes.append(f"buffers are cast to {dtypes['buffer_dtype']}; a policy leaves buffers as they are")
    return dtypes


def read_scaler(top: Section, notes: list[str]) -> LossScale:
    """A ``GradScalerKwargs``; torch's defaults for what it does not say."""
    section = top.section("grad_scaler_kwargs")
    if section is None:
        return DYNAMIC
    enabled = section.flag("enabled", True)
    scale = LossScale(
        mode="dynamic",
        initial=section.number("init_scale", DYNAMIC.initial) or 0.0,
        growth_factor=section.number("growth_factor", DYNAMIC.growth_factor) or 0.0,
        backoff_factor=section.number("backoff_factor", DYNAMIC.backoff_factor) or 0.0,
        growth_interval=section.whole("growth_interval", DYNAMIC.growth_interval, least=1) or 0,
    )
    if section.rest:
        notes.append(f"not known here in grad_scaler_kwargs, and kept: {', '.join(section.rest)}")
    top.keep("grad_scaler_kwargs", section)
    return scale if enabled else LossScale()


def read_autocast(top: Section, notes: list[str]) -> bool:
    """Whether an ``AutocastKwargs`` leaves autocasting on. What it says of the cache is kept."""
    section = top.section("autocast_kwargs")
    if section is None:
        return True
    enabled = bool(section.flag("enabled", True))
    if section.flag("cache_enabled") is True:
        section.rest["cache_enabled"] = True
        notes.append("autocast's cache is on: gradients of a weight that is used twice add up in the compute dtype")
    if not enabled:
        notes.append("autocasting is switched off: ops compute in the parameters' dtype")
    top.keep("autocast_kwargs", section)
    return enabled
