"""Accelerate: the arguments of an ``Accelerator``, and the YAML file of ``accelerate config``.

The file has one word on precision. The arguments can hold more (a ``GradScalerKwargs``, an ``AutocastKwargs``, a policy for
FSDP); their plain form here has the keyword arguments of those objects as tables. Names, defaults and meanings are those of
Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision.errors import InteropError
from precision.interop._accelerate_read import (
    WORDS,
    fsdp_dtypes,
    fsdp_version,
    low_word,
    meaning,
    read_autocast,
    read_scaler,
    sharding,
)
from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged, shown
from precision.interop.deepspeed import from_deepspeed
from precision.loss_scale import LossScale
from precision.names import DYNAMIC
from precision.policy import PrecisionPolicy

FIELDS = (
    Field("mixed_precision", "compute_dtype", "no, fp16 or bf16"),
    Field("grad_scaler_kwargs.init_scale", "loss_scale.initial", "the same number; arguments only, as all of this table"),
    Field("grad_scaler_kwargs.growth_factor", "loss_scale.growth_factor", "the same number"),
    Field("grad_scaler_kwargs.backoff_factor", "loss_scale.backoff_factor", "the same number"),
    Field("grad_scaler_kwargs.growth_interval", "loss_scale.growth_interval", "the same number"),
    Field("grad_scaler_kwargs.enabled", "loss_scale.mode", "true for dynamic, false for none"),
    Field("autocast_kwargs.enabled", "compute_dtype", "true; false would compute in the parameters' dtype"),
    Field("autocast_kwargs.cache_enabled", "", "false: gradients of a weight that is used twice add up in float32"),
    Field("fsdp_plugin.fsdp_version", "", "1 or 2; arguments only, where fsdp= or the base asks for FSDP"),
    Field("fsdp_plugin.mixed_precision_policy.param_dtype", "compute_dtype", "the same dtype: what shards are gathered in"),
    Field("fsdp_plugin.mixed_precision_policy.reduce_dtype", "reduce_dtype", "the same dtype; left out, Accelerate takes param_dtype"),
    Field("fsdp_plugin.mixed_precision_policy.output_dtype", "output_dtype", "the same dtype; FSDP2 only"),
    Field("fsdp_plugin.mixed_precision_policy.buffer_dtype", "", "float32; FSDP1 only"),
    Field("compute_environment", "", "LOCAL_MACHINE unless the base says otherwise; file only, as what follows"),
    Field("distributed_type", "", "NO unless the base says otherwise; the file must have it"),
    Field("use_cpu", "", "false unless the base says otherwise: on a CPU fp16 becomes float32"),
    Field("downcast_bf16", "", "false unless the base says otherwise; for TPUs"),
)  # fmt: skip

_FILE_DEFAULTS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "use_cpu": False,
    "downcast_bf16": False,
}
_INSTEAD = {
    "param_dtype": "Accelerate leaves the parameters as the model has them, usually float32 (FSDP makes them float32)",
    "compute_dtype": "Accelerate has no, fp16 and bf16 (and fp16 is float32 on a CPU, with no word of it)",
    "output_dtype": "Accelerate casts what a prepared model gives to float32; FSDP2 then to its output_dtype, which is the "
    "compute dtype unless a mixed_precision_policy says otherwise",
    "reduce_dtype": "gradients accumulate and are reduced in the parameters' dtype, float32; under FSDP in the compute dtype "
    "unless a mixed_precision_policy says otherwise",
    "rules": "Accelerate has no rules by module, and autocast keeps its own lists of ops; "
    "precision_torch.accelerate_policy has them",
    "loss_scale": "Accelerate makes a GradScaler under fp16 only, and the file has no place for its settings (arguments have: "
    "form='arguments'); precision_torch.accelerate_policy has them all",
    "loss_scale.minimum": "a GradScaler's scale falls without a bound, to 0",
    "loss_scale.maximum": "a GradScaler's scale grows without a bound, to infinity",
    "loss_scale.hysteresis": "a GradScaler backs off at once",
    "loss_scale.hysteresis_refill": "a GradScaler has no hysteresis",
    "loss_scale.max_consecutive_skips": "a GradScaler skips without an end",
    "emulate": "Accelerate computes in the dtype itself",
}
_BY_DEEPSPEED = "DeepSpeed carries the precision out; export to deepspeed, and name its file in deepspeed_config"


def to_accelerate(
    policy: PrecisionPolicy,
    *,
    base: Any = None,
    strict: bool = False,
    form: str | None = None,
    fsdp: int | None = None,
) -> Export:
    """Write a policy for Accelerate.

    Args:
        policy: the policy.
        base: a config of the same form to lay the result over; ``fsdp_config``, ``deepspeed_config`` and the rest are kept.
            What has no ``distributed_type`` and no ``compute_environment`` is taken for arguments.
        strict: whether something lost is an error.
        form: ``"file"`` for the file of ``accelerate config`` or ``"arguments"`` for those of an ``Accelerator``; left out,
            that of ``base``, or the file.
        fsdp: for arguments, the version of FSDP to write a policy for; left out, that of the base's ``fsdp_plugin``, if any.

    Raises:
        InteropError: an option or ``base`` is not valid; or ``strict`` and something is lost.

    Example:
        >>> to_accelerate(PrecisionPolicy(compute_dtype="bfloat16")).config["mixed_precision"]
        'bf16'
    """
    over = Section({} if base is None else base, "base").rest
    said = None if base is None else "arguments" if is_arguments(over) else "file"
    if form not in (None, "file", "arguments"):
        raise InteropError(f"form must be 'file' or 'arguments', not {shown(form)}.")
    if form and said and form != said:
        raise InteropError(f"the base is a config of the form {said!r}, not {form!r}.")
    if (form or said) == "arguments":
        return _arguments(policy, over, strict, fsdp)
    if fsdp is not None:
        raise InteropError("the file has no place for FSDP's dtypes; fsdp= goes with form='arguments'.")
    return _file(policy, over, strict)


def _file(policy: PrecisionPolicy, over: dict[str, Any], strict: bool) -> Export:
    losses = Losses(policy)
    word = low_word(policy)
    over.pop("fp16", None)  # its name in old files
    config = merged(
        over, {**{key: over.get(key, value) for key, value in _FILE_DEFAULTS.items()}, "mixed_precision": word}
    )
    found = from_accelerate(config)
    by_deepspeed = config["distributed_type"] == "DEEPSPEED"
    losses.against(found.policy, {**_INSTEAD, **dict.fromkeys(_INSTEAD, _BY_DEEPSPEED)} if by_deepspeed else _INSTEAD)
    for note in found.notes:
        losses.note(note)
    if word == "fp16" and not by_deepspeed:
        losses.note(_DEFAULT_SCALER)
        _scaler_notes(losses, word)
    elif word != "no":
        _scaler_notes(losses, word)
    return losses.export("accelerate", config, strict)


def _arguments(policy: PrecisionPolicy, over: dict[str, Any], strict: bool, fsdp: int | None) -> Export:
    losses = Losses(policy)
    word = low_word(policy)
    written = _native(policy.loss_scale) if word == "fp16" else LossScale()
    before = over.get("autocast_kwargs")
    cache = before.get("cache_enabled", False) if isinstance(before, Mapping) else False
    config: dict[str, Any] = {
        "mixed_precision": word,
        "grad_scaler_kwargs": {
            "init_scale": written.initial,
            "growth_factor": written.growth_factor,
            "backoff_factor": written.backoff_factor,
            "growth_interval": written.growth_interval,
            "enabled": written.mode != "none",
        },
        "autocast_kwargs": {"enabled": True, "cache_enabled": cache},
    }
    plugin = Section(over.get("fsdp_plugin") or {}, "base: fsdp_plugin")
    version = fsdp if fsdp is not None else fsdp_version(plugin) if over.get("fsdp_plugin") is not None else None
    if version is not None:
        if isinstance(version, bool) or version not in (1, 2):
            raise InteropError(f"fsdp must be 1 or 2, not {shown(version)}.")
        if isinstance(over.get("fsdp_plugin"), dict) and fsdp is not None:
            over["fsdp_plugin"].pop("mixed_precision_policy", None)  # of another version, perhaps
        config["fsdp_plugin"] = {
            "fsdp_version": version,
            "mixed_precision_policy": fsdp_dtypes(policy, word, version),
        }
    if isinstance(over.get("fsdp_plugin"), dict) and isinstance(over["fsdp_plugin"].get("mixed_precision_policy"), str):
        over["fsdp_plugin"].pop("mixed_precision_policy")
    config = merged(over, config)
    found = from_accelerate(config)
    losses.against(found.policy, _INSTEAD)
    _scaler_notes(losses, word)
    if word != "no" and version is None:
        losses.note("under FSDP gradients are reduced in the compute dtype, unless fsdp_plugin says otherwise (fsdp=)")
    return losses.export("accelerate", config, strict)


_DEFAULT_SCALER = (
    "the scaler is a torch.amp.GradScaler at its defaults: init_scale 65536, growth_factor 2, backoff_factor 0.5, "
    "growth_interval 2000 (form='arguments' writes them)"
)


def _scaler_notes(losses: Losses, word: str) -> None:
    if word == "fp16":
        losses.note("a GradScaler has no bounds: its scale can fall to 0 and grow to infinity")
        losses.note("on a CPU Accelerate trains fp16 as float32 and scales nothing, with no word of it")
        losses.note(
            "with a fused optimizer optimizer_step_was_skipped stays False on a skipped step, so schedulers go on; with two "
            "optimizers the scale is updated between their steps (precision_torch.accelerate_policy mends both)"
        )
    if word != "no":
        losses.note("Accelerate reduces in the compute dtype under FSDP by default")


def _native(scale: LossScale) -> LossScale:
    """What a GradScaler can hold of a loss scale; at its defaults for one without scaling."""
    if scale.mode == "none":
        return scale
    kept = {name: getattr(scale, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
    initial = min(max(scale.initial, DYNAMIC.minimum), DYNAMIC.maximum)  # a static scale cannot be had: it starts there
    return LossScale(mode="dynamic", initial=initial, **kept)


def from_accelerate(config: Any) -> Import:
    """Read the file of ``accelerate config``, or an ``Accelerator``'s arguments in the plain form.

    Raises:
        InteropError: a value is not valid, or the precision is fp8 or in DeepSpeed's own file.

    Example:
        >>> from_accelerate({"mixed_precision": "fp16"}).policy.loss_scale.mode
        'dynamic'
    """
    top = Section(config, "accelerate config")
    notes: list[str] = []
    if is_arguments(top.rest):
        policy = _read_arguments(top, notes)
    else:
        policy = _read_file(top, notes)
    return Import("accelerate", policy, top.rest, tuple(notes))


def _word(top: Section, notes: list[str]) -> str:
    value = top.take("mixed_precision")
    if value is None and "fp16" in top.rest and not is_arguments(top.rest):
        notes.append("fp16 is the old name of mixed_precision")
        value = "fp16" if top.flag("fp16") else "no"
    if value is None:
        notes.append("mixed_precision is not given: Accelerate takes ACCELERATE_MIXED_PRECISION, or no")
        return "no"
    if value is False:  # what YAML 1.1 makes of an unquoted no
        return "no"
    text = value.lower() if isinstance(value, str) else value
    if text == "fp8":
        raise InteropError(
            "accelerate config: mixed_precision fp8 is a recipe of the kernels' own, not a dtype policy."
        )
    if not isinstance(text, str) or text not in WORDS:
        raise InteropError(f"{top.name('mixed_precision')} must be one of {', '.join(WORDS)}, not {shown(value)}.")
    return text


def _read_arguments(top: Section, notes: list[str]) -> PrecisionPolicy:
    word = _word(top, notes)
    scale = read_scaler(top, notes)
    enabled = read_autocast(top, notes)
    policy = meaning(word if enabled else "no", sharding(top, word, notes))
    if word == "fp16":
        policy = policy.with_(loss_scale=scale)
        if top.rest.get("cpu") is True:
            notes.append(_ON_CPU)
            policy = meaning("no", None)
    return policy


def _read_file(top: Section, notes: list[str]) -> PrecisionPolicy:
    word = _word(top, notes)
    kind = top.rest.get("distributed_type")
    on_cpu = top.rest.get("use_cpu", False)
    if not isinstance(on_cpu, bool):
        raise InteropError(f"{top.name('use_cpu')} must be true or false, not {shown(on_cpu)}.")
    for key in ("use_cpu", "downcast_bf16"):
        if top.rest.get(key) is False:
            top.take(key)
    if kind == "DEEPSPEED":
        return _by_deepspeed(top, word, notes)
    if kind in ("MEGATRON_LM", "XLA", "TPU") and word != "no":
        notes.append(f"{kind} carries {word} out by itself: it may keep parameters in {word} too")
    version = None
    if kind == "FSDP":
        inner = Section(top.rest.get("fsdp_config") or {}, "accelerate config: fsdp_config")
        version = fsdp_version(inner)
        if word != "no":
            notes.append("Accelerate has FSDP reduce gradients in the compute dtype; the file cannot say otherwise")
    if word == "fp16" and (on_cpu or kind == "MULTI_CPU"):
        notes.append(_ON_CPU)
        word = "no"
    return meaning(word, None if version is None or word == "no" else (version, None))


_ON_CPU = "on a CPU Accelerate trains fp16 as float32 and scales nothing, with no word of it: read as float32"


def _by_deepspeed(top: Section, word: str, notes: list[str]) -> PrecisionPolicy:
    inner = Section(top.rest.get("deepspeed_config") or {}, "accelerate config: deepspeed_config")
    file = inner.rest.get("deepspeed_config_file")
    if file not in (None, "none"):
        raise InteropError(
            f"accelerate config: the precision is in DeepSpeed's own file, {shown(file)}: convert that one instead."
        )
    config: dict[str, Any] = {"zero_optimization": {"stage": inner.whole("zero_stage", 2)}}
    if word != "no":  # what DeepSpeedPlugin.set_mixed_precision writes
        config[word] = {"enabled": True, **({"auto_cast": True} if word == "fp16" else {})}
    found = from_deepspeed(config)
    notes.append("DeepSpeed carries the precision out, with its own defaults for the loss scale")
    notes.extend(found.notes)
    return found.policy


def is_arguments(config: Mapping[str, Any]) -> bool:
    """Whether a config has the form of an ``Accelerator``'s arguments, not of a file."""
    return not {"compute_environment", "distributed_type"} & set(config)


def recognises(config: Any) -> bool:
    """Whether it has Accelerate's names: those of its file, or ``mixed_precision`` as a word."""
    if not isinstance(config, Mapping):
        return False
    if not is_arguments(config):
        return "mixed_precision" in config or "distributed_type" in config
    value = config.get("mixed_precision")
    return (isinstance(value, str) and value in (*WORDS, "fp8")) or "grad_scaler_kwargs" in config


TARGET = Target("accelerate", "Accelerate", FIELDS, to_accelerate, from_accelerate, recognises, kinds=("yaml", "json"))
