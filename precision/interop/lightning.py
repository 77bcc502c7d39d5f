"""Lightning's precision, of Trainer and Fabric: ``precision=`` strings, and the plugin with a scaler where a string will not do.

The form with a plugin is the one of LightningCLI (``class_path`` and ``init_args``), at the top or under ``trainer``. Strings,
defaults and meanings are those of Lightning 2.6.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from precision.errors import InteropError
from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged, shown
from precision.loss_scale import LossScale
from precision.names import PRESETS
from precision.policy import PrecisionPolicy

FIELDS = (
    Field(
        "precision",
        "compute_dtype",
        "32-true, 16-mixed, bf16-mixed; 16-true and bf16-true where parameters are low too",
    ),
    Field(
        "plugins", "loss_scale", "MixedPrecision with a torch.amp.GradScaler, where its settings are not the usual ones"
    ),
)
SCALER_FIELDS = (
    Field("init_scale", "loss_scale.initial", "the same number"),
    Field("growth_factor", "loss_scale.growth_factor", "the same number"),
    Field("backoff_factor", "loss_scale.backoff_factor", "the same number"),
    Field("growth_interval", "loss_scale.growth_interval", "the same number"),
    Field("enabled", "loss_scale.mode", "true for dynamic, false for none"),
)
"""What the GradScaler's ``init_args`` hold."""

PLUGIN = "lightning.pytorch.plugins.MixedPrecision"
FABRIC_PLUGIN = "lightning.fabric.plugins.MixedPrecision"
SCALER = "torch.amp.GradScaler"

_USUAL = LossScale(mode="dynamic")  # a GradScaler() has these defaults
_BY_STRING = {
    "32-true": PRESETS["float32"],
    "16-mixed": PRESETS["mixed_float16"],
    "bf16-mixed": PRESETS["mixed_bfloat16"],
    # parameters, and so gradients, are low: they accumulate and are reduced low. Nothing scales the loss.
    "16-true": PRESETS["float16"].with_(reduce_dtype="float16", loss_scale=LossScale()),
    "bf16-true": PRESETS["bfloat16"].with_(reduce_dtype="bfloat16"),
}
_OLD = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
_OTHER = {
    "64-true": "float64 needs no precision policy: float64 tensors are never narrowed",
    "transformer-engine": "that is a library's own recipe, not a dtype policy",
    "transformer-engine-float16": "that is a library's own recipe, not a dtype policy",
}
_KINDS = {
    "MixedPrecision": ("16-mixed", "bf16-mixed"),
    "HalfPrecision": ("16-true", "bf16-true"),
    "Precision": ("32-true",),
}
"""Lightning's plugins that are a dtype policy, and the strings they take."""
_INSTEAD = {
    "param_dtype": "a mixed or 32-true precision leaves parameters as the model makes them: float32, usually",
    "compute_dtype": "Lightning has float32, float16 and bfloat16",
    "output_dtype": "Fabric casts results to float32; Trainer leaves them as autocast, or a low model, gives them",
    "reduce_dtype": "gradients accumulate and are reduced in the parameters' dtype",
    "rules": "Lightning has no rules by module, and autocast keeps its own lists of ops; precision_torch.lightning_plugin has them",
    "loss_scale": "this precision has no place for a loss scale that does so; precision_torch.lightning_plugin has",
    "loss_scale.minimum": "a GradScaler's scale falls without a bound, to 0",
    "loss_scale.maximum": "a GradScaler's scale grows without a bound, to infinity",
    "loss_scale.hysteresis": "a GradScaler backs off at once",
    "loss_scale.hysteresis_refill": "a GradScaler has no hysteresis",
    "loss_scale.max_consecutive_skips": "a GradScaler skips without an end",
    "emulate": "it computes in the dtype itself",
}


def to_lightning(
    policy: PrecisionPolicy,
    *,
    base: Any = None,
    strict: bool = False,
    plugin: bool = False,
    device: str | None = None,
    fabric: bool = False,
) -> Export:
    """Write the arguments of a Lightning ``Trainer`` or ``Fabric``.

    Args:
        policy: the policy.
        base: arguments to lay these over; a table under ``trainer``, as in LightningCLI's files, is then written into, and a
            plugin that is there keeps its other settings.
        strict: whether something lost is an error.
        plugin: whether float16 is written as a plugin with its scaler's settings, even where a string would mean the same.
        device: the plugin's device type; by default that of the base's plugin, or ``cuda``.
        fabric: whether the plugin is Fabric's instead of Trainer's.

    Raises:
        InteropError: ``strict`` and something is lost; ``base`` is no table.

    Example:
        >>> to_lightning(PrecisionPolicy(compute_dtype="bfloat16")).config
        {'precision': 'bf16-mixed'}
    """
    string = nearest_string(policy)
    scale = policy.loss_scale
    before = _plugin_of(base)
    config: dict[str, Any] = {"precision": string}
    losses = Losses(policy)
    if string == "16-mixed":
        written = _native(scale)
        if plugin or before or written != _USUAL:
            where = device or str(before.get("init_args", {}).get("device", "cuda"))
            ours = _plugin(written, FABRIC_PLUGIN if fabric else PLUGIN, where)
            config = {"plugins": [merged(before, ours)]}
        else:
            losses.note(
                "the scaler is a torch.amp.GradScaler at its defaults: init_scale 65536, growth_factor 2, backoff_factor 0.5, "
                "growth_interval 2000 (plugin=True writes them)"
            )
            losses.note("on a CPU Lightning runs 16-mixed as bf16-mixed, with a warning; a plugin runs float16 there")
        losses.note("a GradScaler has no bounds: its scale can fall to 0 and grow to infinity")
    elif before:
        losses.note(f"the base's plugin {before['class_path']} gave way to precision = {string}, with all its settings")
    losses.against(_meaning(string, _native(scale)), _INSTEAD)
    if string == "16-true":
        losses.note("16-true trains float16 parameters without loss scaling or master weights: small updates are lost")
    if string == "bf16-true":
        losses.note("bf16-true has no master weights: bfloat16(0.999) is 1, so Adam's small updates are lost")
    if string.endswith("-mixed"):
        low = policy.compute_dtype
        losses.note(f"Fabric casts the model's float inputs to {low} before any layer; Trainer does not")
        losses.note(
            f"a Trainer's model hands on results as autocast gives them ({low} after a linear layer); Fabric casts them"
        )
        losses.note(
            f"under FSDPStrategy gradients are reduced in {low}, unless FSDPStrategy(mixed_precision=...) says otherwise"
        )
    return losses.export("lightning", _laid_over(base, config), strict)


def nearest_string(policy: PrecisionPolicy) -> str:
    """The ``precision=`` string that comes nearest to a policy.

    Example:
        >>> nearest_string(PrecisionPolicy(compute_dtype="float16", loss_scale={"mode": "static"}))
        '16-mixed'
    """
    low = {"float16": "16", "bfloat16": "bf16"}.get(policy.compute_dtype)
    if low is None:
        return "32-true"
    return f"{low}-true" if policy.param_dtype == policy.compute_dtype else f"{low}-mixed"


def _native(scale: LossScale) -> LossScale:
    """What a GradScaler can hold of a loss scale."""
    if scale.mode == "none":
        return scale
    kept = {name: getattr(scale, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
    # a static scale cannot be had: the scaler starts there
    initial = min(max(scale.initial, _USUAL.minimum), _USUAL.maximum)
    return LossScale(mode="dynamic", initial=initial, **kept)


def _plugin(scale: LossScale, path: str, device: str) -> dict[str, Any]:
    scaler = {
        "device": device,
        "init_scale": scale.initial,
        "growth_factor": scale.growth_factor,
        "backoff_factor": scale.backoff_factor,
        "growth_interval": scale.growth_interval,
        "enabled": scale.mode != "none",
    }
    return {
        "class_path": path,
        "init_args": {
            "precision": "16-mixed",
            "device": device,
            "scaler": {"class_path": SCALER, "init_args": scaler},
        },
    }


def _meaning(string: str, scale: LossScale) -> PrecisionPolicy:
    policy = _BY_STRING[string]
    return policy.with_(loss_scale=scale) if string == "16-mixed" else policy


def _plugin_of(base: Any) -> dict[str, Any]:
    """The MixedPrecision plugin that a base has, or an empty table."""
    inner = base.get("trainer", base) if isinstance(base, Mapping) else {}
    plugins = _listed(inner.get("plugins")) if isinstance(inner, Mapping) else []
    for plugin in plugins:
        if _is_precision(plugin) and plugin["class_path"].endswith(".MixedPrecision"):
            if not isinstance(plugin.setdefault("init_args", {}), Mapping):
                raise InteropError(f"base: plugins: init_args must be a table, not {shown(plugin['init_args'])}.")
            return dict(plugin)
    return {}


def _laid_over(base: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The config over a base: under ``trainer`` if the base has that, beside other plugins, and never both of ours."""
    if base is None:
        return config
    out = Section(base, "base").rest
    inner = Section(out["trainer"], "base: trainer").rest if "trainer" in out else out
    others = [plugin for plugin in _listed(inner.pop("plugins", None)) if not _is_precision(plugin)]
    inner.pop("precision", None)
    both = merged(inner, {**config, "plugins": [*config.get("plugins", ()), *others]})
    if not both["plugins"]:
        del both["plugins"]
    return {**out, "trainer": both} if "trainer" in out else both


def from_lightning(config: Any) -> Import:
    """Read a Trainer's or Fabric's arguments, or a LightningCLI file.

    Raises:
        InteropError: a value is not valid, both a string and a plugin are given, or the precision is no dtype policy.

    Example:
        >>> from_lightning({"precision": "16-mixed"}).policy.loss_scale.mode
        'dynamic'
    """
    section = Section(config, "lightning config")
    nested = "trainer" in section.rest
    inner = Section(section.rest["trainer"], "lightning config: trainer") if nested else section
    notes: list[str] = []
    plugins = _listed(inner.rest.get("plugins"))
    ours = [plugin for plugin in plugins if _is_precision(plugin)]
    given = inner.take("precision")
    if len(ours) > 1 or (ours and given is not None):
        raise InteropError("lightning config: it has more than one precision (precision= and plugins); keep one.")
    if ours:
        string, scale, left = _read_plugin(ours[0], notes)
        inner.rest["plugins"] = [*([left] if left else []), *(plugin for plugin in plugins if plugin is not ours[0])]
        if not inner.rest["plugins"]:
            del inner.rest["plugins"]
    else:
        string, scale = _read_string(given, notes), _USUAL
    if nested:
        section.rest["trainer"] = inner.rest
    if string == "16-true":
        notes.append("16-true trains without loss scaling: gradients below 6e-8 become zero")
    if string == "16-mixed" and not ours:
        notes.append("on a CPU Lightning runs 16-mixed as bf16-mixed, with a warning")
    if string.endswith("-mixed") and "fsdp" in str(inner.rest.get("strategy", "")).lower():
        notes.append(
            "under FSDPStrategy gradients are reduced in the compute dtype, unless its mixed_precision says otherwise"
        )
    return Import("lightning", _meaning(string, scale), section.rest, tuple(notes))


def _read_string(value: Any, notes: list[str]) -> str:
    if value is None:
        notes.append("precision is not given: Lightning's default, 32-true")
        return "32-true"
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if text in _OLD:
        notes.append(f"precision = {text} is an old name of {_OLD[text]}")
        text = _OLD[text]
    if text in _OTHER:
        raise InteropError(f"lightning config: precision {text}: {_OTHER[text]}.")
    if text not in _BY_STRING:
        raise InteropError(f"lightning config: precision must be one of {', '.join(_BY_STRING)}, not {shown(value)}.")
    return text


def _read_plugin(plugin: Any, notes: list[str]) -> tuple[str, LossScale, dict[str, Any]]:
    """The string, the scale, and what is left of a plugin, empty if nothing of interest is."""
    section = Section(plugin, "lightning config: plugins")
    kind = str(section.take("class_path"))
    args = Section(section.take("init_args", {}), "lightning config: plugins: init_args")
    string = _read_string(args.take("precision"), notes)
    device = args.take("device", "cuda")
    name = kind.rpartition(".")[2]
    if name not in _KINDS:
        raise InteropError(
            f"lightning config: the plugin {kind} is not known here; {', '.join(_KINDS)} are, and the strings of precision=."
        )
    if string not in _KINDS[name]:
        raise InteropError(f"lightning config: {name} takes {' or '.join(_KINDS[name])}, not {string}.")
    scaler = args.section("scaler")
    if scaler is not None and string != "16-mixed":
        raise InteropError(f"lightning config: {string} takes no scaler.")
    scale = _USUAL
    if scaler is not None:
        scaler.take("class_path")
        settings = Section(scaler.take("init_args", {}), "lightning config: scaler: init_args")
        if settings.rest.get("device") == device:
            settings.take("device")
        enabled = settings.flag("enabled", True)
        scale = _read_scaler(settings)
        scale = scale if enabled else LossScale()
        scaler.keep("init_args", settings)
        args.keep("scaler", scaler)
    if device != "cuda":
        args.rest["device"] = device
    if unknown := [key for key in (*section.rest, *args.rest) if key != "device"]:
        notes.append(f"not known here in the plugin's settings, and kept: {', '.join(unknown)}")
    section.keep("init_args", args)
    return string, scale, {"class_path": kind, **section.rest} if section.rest else {}


def _read_scaler(settings: Section) -> LossScale:
    return LossScale(
        mode="dynamic",
        initial=settings.number("init_scale", _USUAL.initial) or 0.0,
        growth_factor=settings.number("growth_factor", _USUAL.growth_factor) or 0.0,
        backoff_factor=settings.number("backoff_factor", _USUAL.backoff_factor) or 0.0,
        growth_interval=settings.whole("growth_interval", _USUAL.growth_interval, least=1) or 0,
    )


def _listed(plugins: Any) -> list[Any]:
    if plugins is None:
        return []
    return copy.deepcopy(list(plugins)) if isinstance(plugins, (list, tuple)) else [copy.deepcopy(plugins)]


def _is_precision(plugin: Any) -> bool:
    """Whether a plugin is one for precision (Lightning has others: checkpoint IO, clusters, layer sync)."""
    path = plugin.get("class_path") if isinstance(plugin, Mapping) else None
    return isinstance(path, str) and path.endswith("Precision")


def recognises(config: Any) -> bool:
    """Whether it has a ``precision`` of Lightning's, or a precision plugin; at the top or under ``trainer``."""
    if not isinstance(config, Mapping):
        return False
    inner = config.get("trainer", config)
    if not isinstance(inner, Mapping):
        return False
    value = inner.get("precision")
    known = {*_BY_STRING, *_OLD, *_OTHER}
    named = isinstance(value, (str, int)) and not isinstance(value, bool) and str(value) in known
    return named or any(_is_precision(plugin) for plugin in _listed(inner.get("plugins")))


TARGET = Target(
    "lightning",
    "Lightning and Fabric",
    FIELDS,
    to_lightning,
    from_lightning,
    recognises,
    kinds=("yaml", "json", "toml"),
)
