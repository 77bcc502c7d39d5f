"""Keras's ``DTypePolicy`` and ``DTypePolicyMap``, as ``keras.dtype_policies.serialize`` writes them and ``deserialize`` reads.

A map's keys are layer paths (``encoder/block/dense``) or regular expressions that must match a whole path; what is inside a
layer is not covered by the layer's key, and a path that two expressions match is an error in Keras. Meanings are those of
Keras 3.15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from precision.errors import InteropError, PolicyError
from precision.formats import DTYPES
from precision.interop.base import Export, Field, Import, Losses, Section, Target, shown
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy, Rule

FIELDS = (
    Field("module", "", "keras, or keras.dtype_policies for a map"),
    Field("class_name", "rules", "DTypePolicy; DTypePolicyMap with module rules"),
    Field("config.name", "compute_dtype", "mixed_float16, mixed_bfloat16, or one dtype for parameters and compute"),
    Field("config.default_policy", "param_dtype", "the same, of the layers that no rule names"),
    Field("config.policy_map", "rules", "an expression for each module rule, and the rule's dtype"),
    Field("registered_name", "", "null, for a class of Keras's own"),
)

MAX_RULES = 200
"""Module rules that a map can have: the text of its keys grows with the square of their number."""

_MAP = "DTypePolicyMap"
_PLAIN = ("DTypePolicy", "FloatDTypePolicy", "Policy")  # the second and third are old names
_QUANTIZED = (
    "QuantizedDTypePolicy",
    "QuantizedFloat8DTypePolicy",
    "Int4DTypePolicy",
    "GPTQDTypePolicy",
    "AWQDTypePolicy",
)
_AUTOMATIC = LossScale(mode="dynamic", initial=2.0**15)
"""The LossScaleOptimizer that ``compile`` wraps an optimizer in where the model's policy is called ``mixed_float16``."""

_INSTEAD = {
    "param_dtype": "Keras has policies of one dtype, mixed_float16 and mixed_bfloat16; one of these is written",
    "compute_dtype": "Keras has policies of one dtype, mixed_float16 and mixed_bfloat16; one of these is written",
    "output_dtype": "a layer hands on its result in the compute dtype, the last one too; end the model with "
    "keras.layers.Activation('linear', dtype=...), as mp.prepare(model) does",
    "reduce_dtype": "gradients accumulate and are reduced in the dtype of the variables",
    "rules": "Keras has no rules for op families",
    "loss_scale": "compile() wraps the optimizer in a LossScaleOptimizer (initial 32768) where the policy's name is exactly "
    "mixed_float16, and scales nothing otherwise (a map's name is another); wrap the optimizer yourself, or use mp.optimizer",
    "loss_scale.initial": "compile() wraps the optimizer in a LossScaleOptimizer that starts at 32768; "
    "keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=...) starts where you say",
    "loss_scale.growth_interval": "compile() wraps the optimizer in a LossScaleOptimizer that grows after 2000 steps; "
    "keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=...) takes another number",
    "loss_scale.growth_factor": "a LossScaleOptimizer doubles the scale",
    "loss_scale.backoff_factor": "a LossScaleOptimizer halves the scale",
    "loss_scale.minimum": "a LossScaleOptimizer's scale falls without a bound",
    "loss_scale.maximum": "a LossScaleOptimizer's scale grows without a bound, to infinity",
    "loss_scale.hysteresis": "a LossScaleOptimizer backs off at once",
    "loss_scale.hysteresis_refill": "a LossScaleOptimizer has no hysteresis",
    "loss_scale.max_consecutive_skips": "a LossScaleOptimizer skips without an end",
    "emulate": "layers compute in the dtype itself",
}


def to_keras(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write a serialized Keras policy.

    Args:
        policy: the policy.
        base: a serialized Keras policy; expressions of its map that are no rules here are kept.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``strict`` and something is lost; ``base`` is no table; more than ``MAX_RULES`` module rules.

    Example:
        >>> to_keras(PrecisionPolicy(compute_dtype="bfloat16")).config["config"]
        {'name': 'mixed_bfloat16'}
    """
    name = _name(policy)
    keys = {key: _serialized(dtype) for key, dtype in layer_patterns(policy)}
    kept = _foreign_keys(base)
    config = _serialized(name)
    if keys or kept:
        inner = {"default_policy": config, "policy_map": {**keys, **kept}}
        config = {"module": "keras.dtype_policies", "class_name": _MAP, "config": inner, "registered_name": None}
    losses = Losses(policy)
    losses.against(_meaning(name, policy.module_rules if keys else (), is_map=bool(keys or kept)), _INSTEAD)
    if name == "mixed_float16" and not keys and not kept:
        losses.note("a LossScaleOptimizer's scale has no bounds: it can grow to infinity and stays there")
    if kept:
        losses.note(f"kept from the base: {', '.join(kept)}; Keras refuses a path that two keys match")
    if keys:
        losses.note(
            "a key matches whole paths of layers only: a path (model/encoder/dense) may begin with the model's own name, which "
            "the keys here allow for; Keras refuses a path that two keys match, so each key rules out those before it"
        )
    if policy.compute_dtype != "float32":
        losses.note("norm layers compute in float32 inside and hand on their result in the compute dtype")
    return losses.export("keras", _laid_over(base, config), strict)


def layer_patterns(policy: PrecisionPolicy) -> list[tuple[str, str]]:
    """The module rules as pairs of a regular expression over whole Keras layer paths and a dtype.

    A model's own name in front of a path is allowed for. ``DTypePolicyMap`` refuses a path that two keys match, so each
    expression rules out those before it: the first match wins.

    Example:
        >>> layer_patterns(PrecisionPolicy(rules=[{"module": "head", "dtype": "float32"}]))
        [('(?:[^/]+/)?head(?:[./].*)?', 'float32')]
    """
    if len(policy.module_rules) > MAX_RULES:
        raise InteropError(
            f"Keras cannot be given more than {MAX_RULES} module rules: each key rules out those before it."
        )
    patterns: list[tuple[str, str]] = []
    earlier: list[str] = []
    for rule in policy.module_rules:
        key = _own_key(rule)
        if key not in earlier:
            patterns.append((_ruling_out(earlier) + key, rule.dtype))
            earlier.append(key)
    return patterns


def _own_key(rule: Rule) -> str:
    return _PREFIX + _expression(str(rule.module)) + _SUFFIX


def _ruling_out(keys: list[str]) -> str:
    return rf"(?!(?:{'|'.join(keys)})\Z)" if keys else ""


_PREFIX, _SUFFIX = "(?:[^/]+/)?", "(?:[./].*)?"
_TOKENS = {"**": ".*", "*": "[^./]*", "?": "[^./]", ".": "[./]", "/": "[./]"}


def _expression(pattern: str) -> str:
    pieces = re.split(r"(\*\*|[*?./])", pattern.strip("./"))
    return "".join(_TOKENS.get(piece) or re.escape(piece) for piece in pieces if piece)


def _name(policy: PrecisionPolicy) -> str:
    """The name of the nearest Keras policy."""
    if policy.param_dtype == policy.compute_dtype:
        return policy.compute_dtype
    return f"mixed_{policy.compute_dtype}" if policy.compute_dtype in ("float16", "bfloat16") else policy.compute_dtype


def _serialized(name: str) -> dict[str, Any]:
    return {"module": "keras", "class_name": "DTypePolicy", "config": {"name": name}, "registered_name": None}


def _meaning(name: str, rules: tuple[Rule, ...], *, is_map: bool) -> PrecisionPolicy:
    mixed = name.startswith("mixed_")
    compute = name.removeprefix("mixed_")
    param = "float32" if mixed else compute
    return PrecisionPolicy(
        param_dtype=param,
        compute_dtype=compute,
        output_dtype=compute,
        reduce_dtype=param,
        rules=rules,
        loss_scale=_AUTOMATIC if name == "mixed_float16" and not is_map else LossScale(),
    )


def _foreign_keys(base: Any) -> dict[str, Any]:
    """The keys of a base's map that are no rules here."""
    inner = base["config"] if recognises(base) and base["class_name"] == _MAP else None
    table = inner.get("policy_map") if isinstance(inner, Mapping) else None
    return _split(Section(table, "base: policy_map").rest)[1] if table is not None else {}


def _laid_over(base: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The config over a base, of which the keys of the policy itself give way whole."""
    if base is None:
        return config
    out = Section(base, "base").rest
    old = out.get("config")
    extra = {k: v for k, v in old.items() if k not in _OURS} if isinstance(old, Mapping) else {}
    return {**out, **config, "config": {**extra, **config["config"]}}


_OURS = ("name", "default_policy", "policy_map", "mode", "source_name", "amax_history_length")


def from_keras(config: Any) -> Import:
    """Read a serialized ``DTypePolicy`` or ``DTypePolicyMap``.

    Keys of a map that are no pattern of a rule, and policies in it that are no single dtype, are kept and told of.

    Raises:
        InteropError: not a serialized policy, or a quantized one.

    Example:
        >>> from_keras({"class_name": "DTypePolicy", "config": {"name": "mixed_float16"}}).policy.loss_scale.initial
        32768.0
    """
    if not recognises(config):
        raise InteropError(
            "a Keras policy is a table with class_name (DTypePolicy or DTypePolicyMap) and config, as "
            f"keras.dtype_policies.serialize gives it, not {shown(config)}."
        )
    section = Section(config, "keras policy")
    notes: list[str] = []
    kind = section.word("class_name", (*_PLAIN, _MAP, *_QUANTIZED))
    module, registered = section.take("module", "keras"), section.take("registered_name")
    if registered is not None and registered != kind:
        section.rest["registered_name"] = registered
    if module not in ("keras", "keras.dtype_policies", "keras.mixed_precision"):
        section.rest["module"] = module
        notes.append(f"module = {shown(module)} is not where Keras keeps its policies; it is kept")
    if kind in _PLAIN[1:]:
        notes.append(f"{kind} is an old name of DTypePolicy")
    inner = section.section("config")
    if inner is None:
        raise InteropError("keras policy: config is missing.")
    if kind != _MAP:
        name = _plain_name(kind, inner, notes)
        policy = _meaning(name, (), is_map=False)
    else:
        name, rules, kept = _read_map(inner, notes)
        policy = _meaning(name, rules, is_map=True)
        if kept:
            # as a map, so that it can be told from the config's other keys when it is written again
            section.rest["class_name"] = _MAP
            inner.rest["policy_map"] = kept
    section.keep("config", inner)
    if policy.compute_dtype == "float16" and policy.loss_scale.mode == "none":
        notes.append("Keras scales the loss by itself only where the policy's name is exactly mixed_float16")
    return Import("keras", policy, section.rest, tuple(notes))


def _plain_name(kind: str | None, config: Section, notes: list[str]) -> str:
    """The name of a policy that is one; an error for a quantized one."""
    if kind in _QUANTIZED:
        raise InteropError(
            f"keras policy: {kind} quantizes, which is no dtype policy; read the policy that it was made from (source_name)."
        )
    name = config.take("name")
    if name is None:
        notes.append("a policy without a name is the global one: float32 is assumed, Keras's default")
        return "float32"
    allowed = (*DTYPES, "mixed_float16", "mixed_bfloat16")
    if isinstance(name, str) and name in allowed:
        return name
    raise InteropError(f"keras policy: name must be one of {', '.join(allowed)}, not {shown(name)}.")


def _read_map(config: Section, notes: list[str]) -> tuple[str, tuple[Rule, ...], dict[str, Any]]:
    """The default's name, the rules, and the keys that are no rules."""
    default = config.take("default_policy")
    if default is None:
        notes.append("default_policy is not given, so the global policy's: float32 is assumed, Keras's default")
        name = "float32"
    elif isinstance(default, str):
        name = _plain_name("DTypePolicy", Section({"name": default}, "keras policy: default_policy"), notes)
    else:
        inner = Section(default, "keras policy: default_policy")
        kind = inner.word("class_name", (*_PLAIN, *_QUANTIZED))
        name = _plain_name(kind, Section(inner.take("config", {}), "keras policy: default_policy: config"), notes)
    table = Section(config.take("policy_map", {}), "keras policy: policy_map").rest
    rules, kept = _split(table)
    for key in (key for key in table if key not in kept):
        if not key.endswith((_SUFFIX, "/.*")):
            notes.append(f"key {key!r} is that layer alone in Keras; the rule covers what is inside it as well")
    if kept:
        notes.append(f"no rules here, and kept: {', '.join(kept)}")
    return name, rules, kept


def _split(table: Mapping[str, Any]) -> tuple[tuple[Rule, ...], dict[str, Any]]:
    """The keys of a map that are rules, and the others as they are."""
    rules: list[Rule] = []
    kept: dict[str, Any] = {}
    earlier: list[str] = []
    for key, value in table.items():
        rule = _rule(key, value) if len(rules) < MAX_RULES else None
        own = None if rule is None else _own_key(rule)
        if rule is None or own is None or own in earlier:
            kept[key] = value
        elif _SUFFIX in key and _ruling_out(earlier) + own != key:
            kept[key] = value  # rules out something else than the keys before it
        else:
            rules.append(rule)
            earlier.append(own)
    return tuple(rules), kept


def _rule(key: str, value: Any) -> Rule | None:
    """A key and policy of a map as a rule; None where there is no rule like it."""
    name = value
    if isinstance(value, Mapping):
        inner = value.get("config")
        name = inner.get("name") if value.get("class_name") in _PLAIN and isinstance(inner, Mapping) else None
    pattern = _pattern(key)
    if not isinstance(name, str) or name not in DTYPES or pattern is None:
        return None
    try:
        return Rule(module=pattern, dtype=name)
    except PolicyError:
        return None


def _pattern(key: str) -> str | None:
    """The pattern of a rule that an expression stands for: one of ours, a plain path, or a plain path and all inside it."""
    if key.startswith("(?!") and r")\Z)" in key:
        key = key[key.rindex(r")\Z)") + len(r")\Z)") :]
    if key.startswith(_PREFIX) and key.endswith(_SUFFIX):
        body = key[len(_PREFIX) : len(key) - len(_SUFFIX)]
        pattern = _undone(body)
        return pattern if pattern is not None and _expression(pattern) == body else None
    path = key.removesuffix("/.*")
    if not re.fullmatch(r"[\w\-]+(/[\w\-]+)*", path):
        return None
    return path.replace("/", ".") + (".**" if path != key else "")


def _undone(body: str) -> str | None:
    """The pattern whose expression this is, if any."""
    back = {value: token for token, value in _TOKENS.items() if token != "/"}
    out, at = "", 0
    while at < len(body):
        token = next((value for value in sorted(back, key=len, reverse=True) if body.startswith(value, at)), None)
        if token is not None:
            out, at = out + back[token], at + len(token)
        elif body[at] == "\\" and at + 1 < len(body):
            out, at = out + body[at + 1], at + 2
        else:
            out, at = out + body[at], at + 1
    return out


def recognises(config: Any) -> bool:
    """Whether it is a serialized policy: a table with a class_name of Keras's policies, and config."""
    kinds = (*_PLAIN, _MAP, *_QUANTIZED)
    return (
        isinstance(config, Mapping)
        and isinstance(config.get("class_name"), str)
        and config["class_name"] in kinds
        and "config" in config
    )


TARGET = Target("keras", "Keras", FIELDS, to_keras, from_keras, recognises, kinds=("json", "yaml"))

__all__ = ["FIELDS", "TARGET", "from_keras", "layer_patterns", "recognises", "to_keras"]
