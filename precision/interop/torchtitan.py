"""torchtitan's ``[training]`` section: the dtype of the model, and FSDP2's two dtypes.

Up to 0.2 this is a TOML job config. From 0.3 the same fields are set in Python or as options; see :func:`arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy

FIELDS = (
    Field("training.dtype", "param_dtype", "the dtype the model is built in: bfloat16 or float32"),
    Field("training.mixed_precision_param", "compute_dtype", "FSDP2's param_dtype: bfloat16 or float32"),
    Field("training.mixed_precision_reduce", "reduce_dtype", "FSDP2's reduce_dtype: always float32"),
)
_DTYPES = ("bfloat16", "float32")


def to_torchtitan(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write a policy as torchtitan's ``[training]`` section.

    Args:
        policy: the policy.
        base: a job config to lay the result over.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``base`` is not valid; or ``strict`` and something is lost.

    Example:
        >>> to_torchtitan(PrecisionPolicy(compute_dtype="bfloat16")).config["training"]["mixed_precision_param"]
        'bfloat16'
    """
    losses = Losses(policy)
    chosen = {}
    for field in ("param_dtype", "compute_dtype"):
        dtype = getattr(policy, field)
        chosen[field] = dtype if dtype in _DTYPES else "bfloat16" if field == "compute_dtype" else "float32"
        losses.unless(
            dtype == chosen[field], field, f"torchtitan has {' and '.join(_DTYPES)} only; it will be {chosen[field]}"
        )
    losses.unless(policy.reduce_dtype == "float32", "reduce_dtype", "torchtitan reduces gradients in float32 only")
    losses.unless(
        policy.output_dtype == "float32", "output_dtype",
        "torchtitan casts predictions to float32 for the loss, which leaves in float32",
    )  # fmt: skip
    losses.unless(
        not policy.rules,
        "rules",
        "torchtitan shards every block with the same dtypes (its MoE router computes in float32)",
    )
    losses.unless(policy.loss_scale.mode == "none", "loss_scale", "torchtitan scales no loss")
    losses.unless(not policy.emulate, "emulate", "torchtitan computes in the dtype itself")
    if chosen["compute_dtype"] == "bfloat16":
        losses.note(
            "torchtitan runs every op of a block in bfloat16 (its own code casts rotary embeddings and the loss), where "
            "autocasting keeps norm and softmax in float32; up to 0.2 it autocasts instead where nothing is sharded"
        )
    if chosen["param_dtype"] == "bfloat16":
        losses.note("torchtitan keeps no float32 masters with dtype bfloat16: small updates are rounded away")
    section = {
        "dtype": chosen["param_dtype"],
        "mixed_precision_param": chosen["compute_dtype"],
        "mixed_precision_reduce": "float32",
    }
    return losses.export("torchtitan", merged(base, {"training": section}), strict)


def from_torchtitan(config: Any) -> Import:
    """Read torchtitan's ``[training]`` section.

    Raises:
        InteropError: a value is not one that torchtitan takes.

    Example:
        >>> from_torchtitan({"training": {"mixed_precision_param": "bfloat16"}}).policy.param_dtype
        'float32'
    """
    top = Section(config, "torchtitan's config")
    training = top.section("training") or Section({}, top.name("training"))
    notes = []
    found = {}
    for key, default, allowed in (
        ("dtype", "float32", _DTYPES), ("mixed_precision_param", "bfloat16", _DTYPES),
        ("mixed_precision_reduce", "float32", ("float32",)),
    ):  # fmt: skip
        if key not in training.rest:
            notes.append(f"training.{key} is not said; torchtitan's own default, {default}, is assumed")
        found[key] = str(training.word(key, allowed, default))
    top.keep("training", training)
    policy = PrecisionPolicy(
        param_dtype=found["dtype"], compute_dtype=found["mixed_precision_param"],
        reduce_dtype=found["mixed_precision_reduce"], output_dtype="float32", loss_scale=LossScale(),
    )  # fmt: skip
    return Import("torchtitan", policy, top.rest, tuple(notes))


def arguments(config: Mapping[str, Any]) -> list[str]:
    """The options of torchtitan's command line for a config (torchtitan 0.3 reads no file).

    Example:
        >>> arguments(to_torchtitan(PrecisionPolicy()).config)[0]
        '--training.dtype=float32'
    """
    keys = [field.theirs for field in FIELDS]
    training = config.get("training", {})
    return [f"--{key}={training[key.split('.')[1]]}" for key in keys if key.split(".")[1] in training]


def recognises(config: Any) -> bool:
    """Whether it has a ``[training]`` section with torchtitan's names."""
    training = config.get("training") if isinstance(config, dict) else None
    return isinstance(training, dict) and any(
        key in training for key in ("mixed_precision_param", "mixed_precision_reduce")
    )


TARGET = Target(
    "torchtitan", "torchtitan", FIELDS, to_torchtitan, from_torchtitan, recognises, kinds=("toml", "json", "yaml")
)
