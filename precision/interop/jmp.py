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


_DTYPES = ("float32", "bfloat16", "float16")
_PLAIN = {
    "full": "float32", "f32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16", "f16": "float16",
    "float16": "float16",
}  # fmt: skip
_INSTEAD = {
    **{
        f"{part}_dtype": "jmp has float32, bfloat16 and float16; float32 is written"
        for part in ("param", "compute", "output")
    },
    "reduce_dtype": "jmp reduces nothing; cast gradients before jax.lax.pmean",
    "rules": "jmp casts whole trees; give modules a policy of their own",
    "loss_scale": "the string does not say it; make a jmp.DynamicLossScale or StaticLossScale, which have fewer settings "
    "(one factor both ways, a minimum of 1, no maximum)",
    "emulate": "jmp computes in the dtype itself",
}


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
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    param, compute, output = (dtype if dtype in _DTYPES else "float32" for dtype in dtypes)
    text = f"params={param},compute={compute},output={output}"
    losses = Losses(policy)
    meant = policy_from_name(text)
    losses.against(meant, _INSTEAD)
    if meant.loss_scale.mode != "none":
        losses.note("jmp scales no loss by itself: use a jmp.DynamicLossScale, whose minimum is lost across jax.jit")
    losses.note("jmp casts every floating leaf, float64 ones too, and skips no step by itself (jmp.select_tree does)")
    return losses.export("jmp", text, strict)


def from_jmp(config: Any) -> Import:
    """Read a jmp string: parts, or one dtype for all three. Float16 compute is taken to go with a dynamic loss scale.

    Raises:
        InteropError: not a string, or one that means float16 or bfloat16 by device (``half``).
        PolicyError: an unknown part or dtype.

    Example:
        >>> from_jmp("p=f32,c=bf16").policy.output_dtype
        'bfloat16'
        >>> from_jmp("bf16").policy.param_dtype
        'bfloat16'
    """
    if isinstance(config, str) and config.strip() in _PLAIN:
        dtype = _PLAIN[config.strip()]
        config = f"params={dtype},compute={dtype},output={dtype}"
    if not recognises(config):
        raise InteropError(
            "a jmp policy is a string such as 'params=float32,compute=bfloat16', or one dtype (half, which depends on the "
            f"device, is no policy), not {shown(config)}."
        )
    policy = policy_from_name(config)
    notes = (
        ("float16 compute: a dynamic loss scale is assumed; jmp keeps it apart",)
        if policy.loss_scale.mode != "none"
        else ()
    )
    return Import("jmp", policy, {}, notes)


def recognises(config: Any) -> bool:
    """Whether it is a string of the form."""
    return isinstance(config, str) and "=" in config


TARGET = Target("jmp", "jmp", FIELDS, to_jmp, from_jmp, recognises, kinds=("text",))
