"""PyTorch's FSDP, both kinds: the arguments of ``MixedPrecision`` (FSDP1) and of ``MixedPrecisionPolicy`` (FSDP2).

FSDP has no config file. The plain form here holds the dtype of the model when it is sharded, the keyword arguments with
dtypes by name, and a list of the modules that get a mixed precision of their own.
"""

from __future__ import annotations

from typing import Any

from precision.errors import InteropError, PolicyError
from precision.formats import canonical_dtype
from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged, shown
from precision.loss_scale import LossScale
from precision.names import DYNAMIC
from precision.policy import PrecisionPolicy, Rule

FIELDS = (
    Field("fsdp_version", "", "2 (fully_shard) or 1 (FullyShardedDataParallel)"),
    Field("model_dtype", "param_dtype", "the dtype of the model when it is sharded: what the optimizer updates"),
    Field("mixed_precision.param_dtype", "compute_dtype", "the same dtype: what shards are gathered and ops run in"),
    Field("mixed_precision.reduce_dtype", "reduce_dtype", "the same dtype"),
    Field("mixed_precision.output_dtype", "output_dtype", "the same dtype; FSDP2 only"),
    Field("mixed_precision.cast_forward_inputs", "", "true: a module computes in its own dtype whatever comes in"),
    Field("mixed_precision.cast_root_forward_inputs", "", "true; FSDP1 only"),
    Field("mixed_precision.buffer_dtype", "", "null: buffers stay as they are; FSDP1 only (FSDP2 never casts them)"),
    Field(
        "mixed_precision.keep_low_precision_grads", "", "false: the optimizer gets gradients in model_dtype; FSDP1 only"
    ),
    Field("modules", "rules", "for each module rule, its pattern, model_dtype and mixed_precision, in order"),
)


def to_fsdp(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False, version: int | None = None) -> Export:
    """Write a policy as arguments for FSDP.

    Args:
        policy: the policy.
        base: plain values in the same form to lay the result over.
        strict: whether something lost is an error.
        version: 2 for ``fully_shard``, 1 for ``FullyShardedDataParallel``; left out, what ``base`` says, or 2.

    Raises:
        InteropError: ``version`` or ``base`` is not valid; or ``strict`` and something is lost.

    Example:
        >>> to_fsdp(PrecisionPolicy(compute_dtype="bfloat16")).config["mixed_precision"]["param_dtype"]
        'bfloat16'
    """
    version = _version(base, version)
    losses = Losses(policy)
    whole = _arguments(policy, policy.compute_dtype, version, policy.output_dtype)
    said = base.get("mixed_precision") if isinstance(base, dict) else None
    if isinstance(said, dict):
        whole.update((key, said[key]) for key in _UNDECIDED[version] if key in said)
    config: dict[str, Any] = {
        "fsdp_version": version,
        "model_dtype": policy.param_dtype,
        "mixed_precision": whole,
        "modules": [
            {
                "module": rule.module,
                "model_dtype": rule.dtype,
                "mixed_precision": _arguments(policy, rule.dtype, version, policy.compute_dtype),
            }
            for rule in policy.module_rules
        ],
    }
    losses.unless(
        not policy.family_rules, "rules",
        "FSDP casts modules, not ops: rules for op families are left out (those for modules are kept)",
    )  # fmt: skip
    if policy.module_rules:
        losses.note(
            f"results of modules with a rule leave in {policy.compute_dtype}, which the next module computes in; for a last one "
            "set its output_dtype to float32"
            if version == 2
            else "FSDP1 casts no outputs: results of a module with a rule reach the next one in the rule's dtype, which only a "
            "module that is wrapped by itself takes"
        )
    if version == 1:
        losses.unless(
            policy.output_dtype == policy.compute_dtype, "output_dtype",
            f"FSDP1 casts no outputs: they leave as the model makes them, usually in {policy.compute_dtype}",
        )  # fmt: skip
        losses.note(
            "FSDP1 accumulates gradients in the compute dtype under no_sync(); reduce_dtype is for the reduction alone"
        )
    usual = _usual_scale(policy.compute_dtype)
    losses.unless(
        policy.loss_scale == usual, "loss_scale",
        "FSDP scales no loss; use the policy's own mp.grad_scaler() around it",
    )  # fmt: skip
    losses.unless(not policy.emulate, "emulate", "FSDP computes in the dtype itself")
    if usual.mode != "none":
        losses.note(f"FSDP scales no loss by itself: float16 compute needs {_SCALERS[version]}")
    if policy.param_dtype != "float32":
        losses.note(
            f"with a model in {policy.param_dtype} FSDP keeps no float32 masters, and gives the optimizer gradients in "
            f"{policy.param_dtype}: small updates are rounded away"
        )
    if policy.is_mixed:
        losses.note(
            f"FSDP runs every op of a module in {policy.compute_dtype}, norm, softmax and losses too, where autocasting keeps "
            "those in float32: add rules for such modules, or use mp.autocast() and leave param_dtype out"
        )
    return losses.export("fsdp", merged(base, config), strict)


def from_fsdp(config: Any) -> Import:
    """Read arguments for FSDP in the plain form that :func:`to_fsdp` writes.

    Raises:
        InteropError: a value is not valid.

    Example:
        >>> from_fsdp({"fsdp_version": 2, "mixed_precision": {"param_dtype": "bfloat16"}}).policy.reduce_dtype
        'bfloat16'
    """
    top = Section(config, "FSDP's arguments")
    version = _version(top.rest, None)
    top.take("fsdp_version")
    notes: list[str] = []
    stored = _dtype(top, "model_dtype") or _told(
        notes, "model_dtype: the dtype of the model is not said; float32 is assumed"
    )
    found = _read(top, stored, version, notes)
    rules = tuple(_rule(entry, i, version, found, notes) for i, entry in enumerate(_list(top, "modules")))
    scale = _usual_scale(found["compute_dtype"])
    if scale.mode != "none":
        notes.append("float16 compute: a dynamic loss scale is assumed; FSDP keeps it apart")
    policy = PrecisionPolicy(
        param_dtype=stored, compute_dtype=found["compute_dtype"], reduce_dtype=found["reduce_dtype"],
        output_dtype=found["output_dtype"], rules=rules, loss_scale=scale,
    )  # fmt: skip
    return Import("fsdp", policy, top.rest, tuple(notes))


def recognises(config: Any) -> bool:
    """Whether it is in the form that :func:`to_fsdp` writes."""
    return isinstance(config, dict) and "fsdp_version" in config and isinstance(config.get("mixed_precision"), dict)


_SCALERS = {1: "a ShardedGradScaler", 2: "a GradScaler whose flag is reduced over the mesh"}


def _usual_scale(compute_dtype: str) -> LossScale:
    return DYNAMIC if compute_dtype == "float16" else LossScale()


def _version(base: Any, version: int | None) -> int:
    said = base.get("fsdp_version") if isinstance(base, dict) else None
    chosen = version if version is not None else 2 if said is None else said
    if isinstance(chosen, bool) or chosen not in (1, 2):
        raise InteropError(f"fsdp_version must be 1 or 2, not {shown(chosen)}.")
    if version is not None and said not in (None, version):
        raise InteropError(f"version = {version} was asked for, but base says fsdp_version = {shown(said)}.")
    return int(chosen)


_UNDECIDED: dict[int, dict[str, Any]] = {
    1: {
        "buffer_dtype": None,
        "keep_low_precision_grads": False,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": True,
    },
    2: {"cast_forward_inputs": True},
}
"""What a policy does not decide, by version, with what is written unless the base says otherwise."""


def _arguments(policy: PrecisionPolicy, dtype: str, version: int, output: str) -> dict[str, Any]:
    """The keyword arguments of ``MixedPrecision`` or ``MixedPrecisionPolicy``, dtypes by name."""
    dtypes = {"param_dtype": dtype, "reduce_dtype": policy.reduce_dtype}
    return {**dtypes, **({"output_dtype": output} if version == 2 else {}), **_UNDECIDED[version]}


def _read(top: Section, stored: str, version: int, notes: list[str]) -> dict[str, str]:
    """The dtypes that a ``mixed_precision`` amounts to, with FSDP's own defaults for what is not said."""
    inner = top.section("mixed_precision") or Section({}, top.name("mixed_precision"))
    compute = _dtype(inner, "param_dtype") or stored
    reduce = _dtype(inner, "reduce_dtype")
    if reduce is None:
        reduce = compute
        _told(notes, f"reduce_dtype is not said: FSDP reduces gradients in the compute dtype, {compute}")
    output = compute
    other = 3 - version
    foreign = [key for key in (*_UNDECIDED[other], *(("output_dtype",) if version == 1 else ())) if key in inner.rest]
    foreign = [key for key in foreign if key not in _UNDECIDED[version]]
    if foreign:
        raise InteropError(f"{inner.name(foreign[0])} belongs to FSDP{other}; FSDP{version} has no such argument.")
    if version == 2:
        output = _dtype(inner, "output_dtype") or compute
    elif (buffers := _dtype(inner, "buffer_dtype")) is not None:
        inner.rest["buffer_dtype"] = buffers
        _told(notes, f"buffers are cast to {buffers}, BatchNorm statistics too; a policy leaves buffers as they are")
    for key, written in _UNDECIDED[version].items():
        if key != "buffer_dtype" and key in inner.rest and inner.flag(key) is not written:
            inner.rest[key] = not written
            _told(notes, f"{key} is {str(not written).lower()}, of which a policy says nothing")
    top.keep("mixed_precision", inner)
    return {"compute_dtype": compute, "reduce_dtype": reduce, "output_dtype": output}


def _rule(entry: Any, i: int, version: int, whole: dict[str, str], notes: list[str]) -> Rule:
    section = Section(entry, f"FSDP's arguments: modules[{i}]")
    pattern = section.take("module")
    if not isinstance(pattern, str):
        raise InteropError(f"{section.name('module')} must be a pattern over module paths, not {shown(pattern)}.")
    stored = _dtype(section, "model_dtype")
    found = _read(section, stored or "float32", version, notes)
    dtype = found["compute_dtype"]
    if stored not in (None, dtype):
        notes.append(
            f"modules[{i}]: parameters in {stored}, compute in {dtype}; a rule has one dtype for both, {dtype}"
        )
    if found["reduce_dtype"] != whole["reduce_dtype"]:
        notes.append(f"modules[{i}]: reduces in {found['reduce_dtype']}; a rule says nothing of that")
    try:
        return Rule(module=pattern, dtype=dtype)
    except PolicyError as error:
        raise InteropError(f"{section.name('module')}: {error}") from None


def _list(section: Section, key: str) -> list[Any]:
    value = section.take(key)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise InteropError(f"{section.name(key)} must be a list, not {shown(value)}.")
    return list(value)


def _dtype(section: Section, key: str) -> str | None:
    value = section.take(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InteropError(f"{section.name(key)} must be a dtype's name or null, not {shown(value)}.")
    try:
        return canonical_dtype(value)
    except PolicyError as error:
        raise InteropError(f"{section.name(key)}: {error}") from None


def _told(notes: list[str], text: str) -> str:
    if text not in notes:
        notes.append(text)
    return "float32"


TARGET = Target("fsdp", "PyTorch FSDP", FIELDS, to_fsdp, from_fsdp, recognises, kinds=("json", "yaml"))
