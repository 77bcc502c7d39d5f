"""DeepSpeed's JSON config: what it says about precision, and what the engine makes of it at each stage of ZeRO.

DeepSpeed has two rule sets. ``torch_autocast`` keeps the parameters in float32 and lets PyTorch's autocasting choose op by op:
that is ``param_dtype = "float32"``. ``fp16`` and ``bf16`` make the model's parameters low and keep float32 masters in the
optimizer: that is a low ``param_dtype``. The loss scale of ``fp16`` is in ``deepspeed_scale``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from precision.errors import InteropError, PolicyError
from precision.formats import canonical_dtype
from precision.interop._deepspeed_scale import SCALE_FIELDS, autocast_scale, bf16_check, fp16_scale, read_fp16_scale
from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged, shown
from precision.loss_scale import LossScale
from precision.names import DYNAMIC
from precision.policy import PrecisionPolicy

FIELDS = (
    Field("torch_autocast.enabled", "compute_dtype", "true if param_dtype is float32 and compute_dtype low"),
    Field("torch_autocast.dtype", "compute_dtype", "always written: without it PyTorch picks one by device, unscaled"),
    Field(
        "torch_autocast.lower_precision_safe_modules", "reduce_dtype",
        "under ZeRO, whose gradients are reduced in torch_autocast.dtype: [] for a float32 reduce_dtype",
    ),
    Field("fp16.enabled", "param_dtype", "true if param_dtype and compute_dtype are float16; excludes bf16"),
    Field("fp16.auto_cast", "compute_dtype", "true: positional floating inputs are cast to float16"),
    *SCALE_FIELDS,
    Field("fp16.fp16_master_weights_and_grads", "", "false: masters are float32"),
    Field("bf16.enabled", "param_dtype", "true if param_dtype and compute_dtype are bfloat16; excludes fp16"),
    Field("bf16.check_grad_overflow", "loss_scale.mode", "false for none; true skips non-finite steps, as a static scale of 1"),
    Field("bf16.immediate_grad_update", "", "false"),
    Field("bf16.bf16_master_weights_and_grads", "", "false: masters are float32"),
    Field("bf16.bf16_optimizer_states", "", "false: the optimizer's state is float32"),
    Field("communication_data_type", "reduce_dtype", "fp32, fp16 or bf16"),
    Field("data_types.grad_accum_dtype", "reduce_dtype", "the same; at ZeRO stage 0 only the model's own dtype is allowed"),
    Field("data_types.param_dtype", "param_dtype", "fp32, fp16 or bf16; must agree with fp16 and bf16"),
    Field("gradient_clipping", "", "kept; 0.0 if not said, since DeepSpeed's default became 1.0 in 2026"),
    Field("zero_optimization.stage", "", "left alone; read, as it decides what the rest means; written if zero_stage= is given"),
)  # fmt: skip

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_LONG = {short: name for name, short in _SHORT.items()}
_UNDECIDED = {
    "fp16": {"fp16_master_weights_and_grads": False},
    "bf16": {"immediate_grad_update": False, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
}
"""Switches of which a policy says nothing, with what is written unless the base says otherwise."""
_LISTED = ["torch.nn.modules.linear.Linear", *(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3))]
"""DeepSpeed's own ``lower_precision_safe_modules``."""


@dataclasses.dataclass(frozen=True)
class _Engine:
    """What a config makes of the engine: ``model``, the dtype its parameters have; ``compute``; and the stage of ZeRO."""

    model: str
    compute: str
    stage: int

    @property
    def autocast(self) -> bool:
        return self.model == "float32" != self.compute


def to_deepspeed(
    policy: PrecisionPolicy,
    *,
    base: Any = None,
    strict: bool = False,
    zero_stage: int | None = None,
    low_params: bool = False,
) -> Export:
    """Write a policy as a DeepSpeed config.

    Args:
        policy: the policy.
        base: a DeepSpeed config to lay the result over.
        strict: whether something lost is an error.
        zero_stage: the stage of ZeRO, 0 to 3, on which the meaning of some fields depends; it is written, too. Left out, it
            is what ``base`` says, or 0, and nothing about ZeRO is written.
        low_params: whether float32 parameters computed low may become low parameters of the model, with float32 masters in
            the optimizer (``fp16``/``bf16`` in place of ``torch_autocast``). Then every op runs low, norm and softmax too.

    Raises:
        InteropError: ``base`` or ``zero_stage`` is not valid; or ``strict`` and something is lost.

    Example:
        >>> to_deepspeed(PrecisionPolicy(compute_dtype="bfloat16")).config["torch_autocast"]["enabled"]
        True
    """
    losses = Losses(policy)
    over = Section({} if base is None else base, "base").rest
    engine = _engine(policy, losses, _stage(over, zero_stage), low_params)
    reduce = _reduce(policy, engine, losses)
    _common(policy, engine, losses)
    accumulate = engine.model if engine.stage == 0 or reduce not in ("float32", engine.model) else reduce
    config: dict[str, Any] = {
        "torch_autocast": {
            "enabled": engine.autocast,
            "dtype": engine.compute,
            "lower_precision_safe_modules": _LISTED if reduce == engine.compute != "float32" else [],
        },
        "fp16": {"enabled": engine.model == "float16"},
        "bf16": {"enabled": engine.model == "bfloat16"},
        "communication_data_type": _SHORT[reduce],
        "data_types": {"grad_accum_dtype": _SHORT[accumulate], "param_dtype": _SHORT[engine.model]},
    }
    if engine.model == "float16":
        config["fp16"].update(auto_cast=True, **fp16_scale(policy.loss_scale, engine.stage, losses))
    elif engine.model == "bfloat16":
        always = engine.stage in (0, 3) or (engine.stage == 1 and accumulate == "float32")
        config["bf16"]["check_grad_overflow"] = bf16_check(policy.loss_scale, always, losses)
        losses.note("bf16 casts no inputs: give the model floating inputs in bfloat16")
    else:
        autocast_scale(policy.loss_scale, engine.compute, engine.stage, losses)
    _undecided(config, over, losses)
    if zero_stage is not None:
        config["zero_optimization"] = {"stage": zero_stage}
    return losses.export("deepspeed", _over(over, config), strict)


def from_deepspeed(config: Any) -> Import:
    """Read a DeepSpeed config: what its engine does at the stage of ZeRO that it names.

    Raises:
        InteropError: a value is not one that DeepSpeed takes, or what it would do is not settled by the config.

    Example:
        >>> from_deepspeed({"fp16": {"enabled": True, "loss_scale": 0}}).policy.loss_scale.growth_interval
        1000
    """
    top = Section(config, "DeepSpeed's config")
    notes: list[str] = []
    stage = _stage(top.rest, None)
    if "bfloat16" in top.rest:
        old = top.take("bfloat16")
        if "bf16" not in top.rest:
            top.rest["bf16"] = old
            notes.append("bfloat16 is the old name of bf16")
    fp16, bf16, auto = (_part(top, key, notes) for key in ("fp16", "bf16", "torch_autocast"))
    low = [name for name, part in (("float16", fp16), ("bfloat16", bf16)) if _switch(part, "enabled")]
    if len(low) == 2:
        raise InteropError("DeepSpeed's config: fp16 and bf16 exclude each other; enable one.")
    model = low[0] if low else "float32"
    compute = _autocast_dtype(auto, model, notes)
    listed = auto.take("lower_precision_safe_modules", _LISTED)
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise InteropError(
            f"{auto.name('lower_precision_safe_modules')} must be a list of class names, not {shown(listed)}."
        )
    if listed and list(listed) != _LISTED:
        auto.rest["lower_precision_safe_modules"] = list(listed)
    reduce = _reading_dtype(top, "communication_data_type") or model
    if model == "float32" != compute and stage > 0:
        reduce = compute if listed else "float32"
        if listed:
            notes.append(
                f"under ZeRO, gradients of lower_precision_safe_modules are reduced in {compute}, others in float32"
            )
    _data_types(top, model, reduce, stage, notes)
    if model == "float16":
        scale = read_fp16_scale(fp16, stage, notes)
    elif model == "bfloat16":
        checks = bf16.take("check_grad_overflow", True)
        if not isinstance(checks, bool):
            raise InteropError(f"{bf16.name('check_grad_overflow')} must be true or false, not {shown(checks)}.")
        scale = LossScale(mode="static", initial=1.0) if checks else LossScale()
        if checks:
            notes.append(
                "steps with non-finite gradients are skipped (check_grad_overflow): read as a static loss scale of 1"
            )
    else:
        scale = DYNAMIC if compute == "float16" else LossScale()
        if compute == "float16":
            notes.append("torch_autocast in float16: PyTorch's own GradScaler with its defaults scales the loss")
            if stage > 0:
                notes.append("under ZeRO the scale of torch_autocast in float16 never backs off")
    for name, part in (("fp16", fp16), ("bf16", bf16), ("torch_autocast", auto)):
        for key, written in _UNDECIDED.get(name, {}).items():
            if _switch(part, key) is not written:
                part.rest[key] = True
                notes.append(f"{name}.{key} is true, of which a policy says nothing")
        if name == "fp16":
            part.take("auto_cast")
        top.keep(name, part)
    output = model if model != "float32" else "float32"
    policy = PrecisionPolicy(
        param_dtype=model, compute_dtype=compute, output_dtype=output, reduce_dtype=reduce, loss_scale=scale
    )
    return Import("deepspeed", policy, top.rest, tuple(notes))


def recognises(config: Any) -> bool:
    """Whether it has a section that only DeepSpeed's config has."""
    keys = ("fp16", "bf16", "bfloat16", "torch_autocast", "zero_optimization")
    return isinstance(config, Mapping) and any(isinstance(config.get(key), Mapping) for key in keys)


# ---- writing -----------------------------------------------------------------------------------------------------


def _engine(policy: PrecisionPolicy, losses: Losses, stage: int, low_params: bool) -> _Engine:
    compute = policy.compute_dtype if policy.compute_dtype in _SHORT else "bfloat16"
    losses.unless(
        compute == policy.compute_dtype, "compute_dtype", f"DeepSpeed has no such mode; ops compute in {compute}"
    )
    low = compute != "float32" and (policy.param_dtype == compute or low_params)
    model = compute if low else "float32"
    if low and policy.param_dtype != compute:
        instead = f"the model's parameters become {model}, and float32 masters of them live in the optimizer"
    elif low or policy.param_dtype == "float32":
        instead = ""
    else:
        instead = f"parameters are low only if ops compute in the same dtype; they are kept in float32, ops compute in {compute}"
    losses.unless(not instead, "param_dtype", instead)
    if low:
        losses.note(
            f"{_SHORT[model]} runs every op in {model}, norm and softmax too, unless the model casts by itself; the optimizer "
            "updates float32 masters"
        )
    return _Engine(model, compute, stage)


def _reduce(policy: PrecisionPolicy, engine: _Engine, losses: Losses) -> str:
    """The dtype gradients will be reduced in."""
    wanted, zero = policy.reduce_dtype, engine.stage > 0
    if wanted not in _SHORT:
        losses.unless(False, "reduce_dtype", f"DeepSpeed has {', '.join(_LONG)}; gradients are reduced in float32")
        return "float32"
    if engine.autocast and zero and wanted not in ("float32", engine.compute):
        losses.unless(
            False, "reduce_dtype",
            f"with torch_autocast under ZeRO gradients are reduced in float32 or {engine.compute}; it will be float32",
        )  # fmt: skip
        return "float32"
    if engine.autocast and zero and wanted != "float32":
        losses.note(f"only gradients of linear and conv layers are reduced in {wanted}, others in float32")
    elif engine.stage == 0 and wanted != engine.model:
        if engine.model == "float32":
            losses.note(f"gradients are reduced in {wanted}, but accumulated in float32")
        else:
            losses.unless(
                False, "reduce_dtype",
                f"at ZeRO stage 0 gradients are reduced in {wanted}, but accumulated in {engine.model}; use a later stage",
            )  # fmt: skip
    elif zero and wanted not in ("float32", engine.model):
        losses.note(f"gradients are reduced in {wanted}, but accumulated in {engine.model}")
    return wanted


def _common(policy: PrecisionPolicy, engine: _Engine, losses: Losses) -> None:
    expected = engine.model
    losses.unless(
        policy.output_dtype == expected, "output_dtype",
        "DeepSpeed casts no outputs: they leave as the model makes them, "
        + (f"usually in {expected}" if expected != "float32" or not engine.autocast else "losses in float32"),
    )  # fmt: skip
    if engine.autocast:
        losses.note(
            f"DeepSpeed casts no outputs: losses leave in float32, outputs of linear layers in {engine.compute}"
        )
    if engine.compute != "float32":
        what = "casts all parameters alike" if not engine.autocast else "knows autocasting's own lists of ops only"
        losses.unless(not policy.rules, "rules", f"DeepSpeed {what}")
    else:
        losses.unless(not policy.rules, "rules", "DeepSpeed computes in float32 throughout")
    losses.unless(not policy.emulate, "emulate", "DeepSpeed computes in the dtype itself")


def _undecided(config: dict[str, Any], over: Mapping[str, Any], losses: Losses) -> None:
    """Write what a policy does not decide, unless the base does."""
    for name, switches in _UNDECIDED.items():
        said = over.get(name)
        if config[name]["enabled"]:
            known = said if isinstance(said, Mapping) else {}
            config[name].update((key, value) for key, value in switches.items() if key not in known)
    listed = over.get("torch_autocast")
    auto = config["torch_autocast"]
    if (
        auto["lower_precision_safe_modules"]
        and isinstance(listed, Mapping)
        and listed.get("lower_precision_safe_modules")
    ):
        del auto["lower_precision_safe_modules"]  # the base's own list stays
    if "gradient_clipping" not in over:
        config["gradient_clipping"] = 0.0
        losses.note(
            "gradient_clipping is written as 0.0 (off), as the policy does not clip; left out, DeepSpeed 0.19 clips at 1.0"
        )


def _over(over: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config laid over the base; settings of a mode that is now off are left as they are."""
    rest = {key: value for key, value in over.items() if key != "bfloat16"}
    if isinstance(rest.get("zero_optimization"), bool) and "zero_optimization" in config:
        del rest["zero_optimization"]
    return merged(rest, config)


# ---- reading -----------------------------------------------------------------------------------------------------


def _stage(config: Mapping[str, Any], asked: int | None) -> int:
    zero = config.get("zero_optimization", {})
    said = int(zero) if isinstance(zero, bool) else zero.get("stage", 0) if isinstance(zero, Mapping) else zero
    said = 0 if said == "auto" else said
    for what, stage in (("zero_optimization.stage", said), ("zero_stage", 0 if asked is None else asked)):
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise InteropError(f"{what} must be 0, 1, 2 or 3, not {shown(stage)}.")
    if asked is not None and zero and said != asked:
        raise InteropError(f"zero_stage = {asked} was asked for, but base says zero_optimization.stage = {said}.")
    return int(said if asked is None else asked)


def _part(top: Section, key: str, notes: list[str]) -> Section:
    """A section without the values that are ``"auto"``, which DeepSpeed takes as left out."""
    part = top.section(key) or Section({}, top.name(key))
    for name in [name for name, value in part.rest.items() if value == "auto"]:
        part.take(name)
        notes.append(
            f"{key}.{name} is 'auto': DeepSpeed takes that as left out (the Hugging Face Trainer replaces it first)"
        )
    return part


def _switch(part: Section, key: str) -> bool:
    value = part.take(key, False)
    value = (
        {0: False, 1: True, "true": True, "false": False}.get(value, value) if isinstance(value, (int, str)) else value
    )
    if not isinstance(value, bool):
        raise InteropError(f"{part.name(key)} must be true or false, not {shown(value)}.")
    return value


def _autocast_dtype(auto: Section, model: str, notes: list[str]) -> str:
    """The dtype ops compute in."""
    enabled, said = _switch(auto, "enabled"), auto.take("dtype")
    dtype = None if said is None else _name(said, auto.name("dtype"))
    if not enabled:
        return model
    if dtype is None:
        raise InteropError(
            "torch_autocast.dtype is not said: PyTorch would take its default for the device (float16 on CUDA, and DeepSpeed "
            "would then not scale the loss; bfloat16 on CPU). Write it."
        )
    if model != "float32":
        notes.append(f"torch_autocast on top of {_SHORT[model]}: ops that autocasting keeps in float32 run in it")
    return dtype


def _data_types(top: Section, model: str, reduce: str, stage: int, notes: list[str]) -> None:
    inner = _part(top, "data_types", notes)
    said, accumulate = _reading_dtype(inner, "param_dtype"), _reading_dtype(inner, "grad_accum_dtype") or model
    if said not in (None, model):
        raise InteropError(f"{inner.name('param_dtype')} is {said}, but fp16 and bf16 make the parameters {model}.")
    if stage == 0 and accumulate != model:
        raise InteropError(
            f"{inner.name('grad_accum_dtype')} must be {_SHORT[model]} at ZeRO stage 0, like the parameters."
        )
    if accumulate != reduce:
        notes.append(f"gradients are reduced in {reduce}, but accumulated in {accumulate}")
    top.keep("data_types", inner)


def _reading_dtype(section: Section, key: str) -> str | None:
    value = section.take(key)
    return None if value is None or value == "auto" else _name(value, section.name(key))


def _name(value: Any, where: str) -> str:
    """A dtype's canonical name; DeepSpeed says ``half`` and ``float`` as PyTorch does."""
    try:
        text = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
        name = {"half": "float16", "float": "float32"}.get(text) or canonical_dtype(text)
    except PolicyError:
        name = ""
    if name not in _SHORT:
        raise InteropError(f"{where} must be one of {', '.join(_LONG)}, not {shown(value)}.")
    return name


TARGET = Target("deepspeed", "DeepSpeed", FIELDS, to_deepspeed, from_deepspeed, recognises, kinds=("json", "yaml"))
