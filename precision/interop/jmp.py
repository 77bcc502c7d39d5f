"""jmp's policy strings: ``params=float32,compute=bfloat16,output=float32``. jmp keeps the loss scale in an object apart."""

from __future__ import annotations

from typing import Any

from precision.errors import InteropError
from precision.interop.base import Export, Field, Import, Losses, Target, shown
from precision.names import policy_from_name
from precision.policy import PrecisionPolicy

FIELDS = (
    Field("params", "param_dtype", "the same dtype"),
    Field("compute", "compute_dtype", "the same dtype"),
    Field("output", "output_dtype", "the same dtype"),
)


def to_jmp(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write a policy as the string that ``jmp.get_policy`` takes.

    Args:
        policy: the policy.
        base: not used: the string holds nothing else.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``strict`` and something is lost.

    Example:
        >>> to_jmp(PrecisionPolicy(compute_dtype="bfloat16")).config
        'params=float32,compute=bfloat16,output=float32'
    """
    text = f"params={policy.param_dtype},compute={policy.compute_dtype},output={policy.output_dtype}"
    losses = Losses(policy)
    losses.unless(not policy.rules, "rules", "jmp casts whole trees; give modules a policy of their own")
    losses.unless(policy.reduce_dtype == "float32", "reduce_dtype", "jmp reduces nothing; cast gradients before jax.lax.pmean")
    losses.unless(not policy.emulate, "emulate", "jmp computes in the dtype itself")
    usual = policy_from_name(text).loss_scale
    losses.unless(
        policy.loss_scale == usual, "loss_scale",
        "the string does not say it; make a jmp.DynamicLossScale or StaticLossScale, which have fewer settings",
    )  # fmt: skip
    if usual.mode != "none":
        losses.note("jmp scales no loss by itself: use a jmp.DynamicLossScale, whose minimum is lost across jax.jit")
    return losses.export("jmp", text, strict)


def from_jmp(config: Any) -> Import:
    """Read a jmp string. Float16 compute is taken to go with a dynamic loss scale.

    Raises:
        InteropError: not a string with ``=``. PolicyError: an unknown part or dtype.

    Example:
        >>> from_jmp("p=f32,c=bf16").policy.output_dtype
        'bfloat16'
    """
    if not recognises(config):
        raise InteropError(f"a jmp policy is a string such as 'params=float32,compute=bfloat16', not {shown(config)}.")
    policy = policy_from_name(config)
    notes = ("float16 compute: a dynamic loss scale is assumed; jmp keeps it apart",) if policy.loss_scale.mode != "none" else ()
    return Import("jmp", policy, {}, notes)


def recognises(config: Any) -> bool:
    """Whether it is a string of the form."""
    return isinstance(config, str) and "=" in config


TARGET = Target("jmp", "jmp", FIELDS, to_jmp, from_jmp, recognises, kinds=("text",))
