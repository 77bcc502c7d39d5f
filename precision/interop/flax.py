"""Flax's and Optax's dtype flags, as training scripts in JAX keep them: ``dtype``, ``param_dtype``, ``precision`` for layers
(``flax.linen`` and ``flax.nnx`` take the same), ``accumulator_dtype`` and ``mu_dtype`` for Optax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy

FIELDS = (
    Field(
        "dtype",
        "compute_dtype",
        "the same dtype: a layer casts inputs and weights to it, and hands on its result in it",
    ),
    Field("param_dtype", "param_dtype", "the same dtype"),
    Field("precision", "compute_dtype", "highest for float32 (TPUs would use bfloat16 passes), else default"),
    Field("accumulator_dtype", "reduce_dtype", "the same dtype: optax.MultiSteps accumulates gradients in it"),
    Field("mu_dtype", "", "param_dtype, as Optax infers it, unless the base says otherwise"),
)

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_PRECISIONS = ("default", "high", "highest", "fastest", "bfloat16", "tensorfloat32", "float32", "bfloat16_3x")
_INSTEAD = {
    "param_dtype": "parameters are kept in another dtype",
    "compute_dtype": "layers compute in another dtype",
    "output_dtype": "a layer hands on its result in dtype, the last one too; cast the model's result yourself, as in "
    "logits.astype(jax.numpy.float32)",
    "reduce_dtype": "gradients accumulate in another dtype",
    "rules": "the flags are the same for all layers; give a layer dtype= and param_dtype= of its own",
    "loss_scale": "the flags do not say it and neither Flax nor Optax scales by itself; keep a flax.training.dynamic_scale."
    "DynamicScale in the training step",
    "emulate": "layers compute in the dtype itself",
}


def to_flax(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write the flags. Layers take ``dtype``, ``param_dtype`` and (those with matmuls) ``precision``.

    Args:
        policy: the policy.
        base: flags to lay these over; its ``mu_dtype`` is kept.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``strict`` and something is lost; ``base`` is no table.

    Example:
        >>> to_flax(PrecisionPolicy(compute_dtype="bfloat16")).config["dtype"]
        'bfloat16'
    """
    config = {
        "dtype": policy.compute_dtype,
        "param_dtype": policy.param_dtype,
        "precision": "highest" if policy.compute_dtype == "float32" else "default",
        "accumulator_dtype": policy.reduce_dtype,
    }
    merged_config = merged(base, config)
    merged_config.setdefault("mu_dtype", policy.param_dtype)
    losses = Losses(policy)
    losses.against(_meaning(config), _INSTEAD)
    if policy.compute_dtype == "float16":
        losses.note("nothing scales the loss by itself: keep a DynamicScale in the step, or use bfloat16")
    losses.note(
        "Flax's norm layers take means and variances in float32 whatever dtype is, and hand on their result in dtype"
    )
    return losses.export("flax", merged_config, strict)


def from_flax(config: Any) -> Import:
    """Read the flags. Float16 layers are taken to go with a dynamic loss scale, which is kept apart.

    Raises:
        InteropError: a flag has no valid value.

    Example:
        >>> from_flax({"dtype": "bfloat16", "param_dtype": "float32"}).policy.output_dtype
        'bfloat16'
    """
    section = Section(config, "flax flags")
    notes: list[str] = []
    param = section.word("param_dtype", _DTYPES) or "float32"
    compute = section.word("dtype", _DTYPES)
    if compute is None:
        notes.append(
            "dtype is not given: layers compute in the widest of input and parameter; the parameters' is assumed"
        )
        compute = param
    precision = section.word("precision", _PRECISIONS)
    if compute == "float32" and precision not in ("highest", "float32"):
        notes.append(
            f"precision = {precision or 'None'}: on TPUs float32 matmuls run in bfloat16 passes; 'highest' is float32"
        )
    accumulator = section.word("accumulator_dtype", _DTYPES) or "float32"
    mu = section.word("mu_dtype", _DTYPES)
    if mu is not None and mu != param:
        section.rest["mu_dtype"] = mu
        notes.append(f"mu_dtype = {mu}: the dtype of the first moment, which a policy does not decide; it is kept")
    policy = _meaning({"dtype": compute, "param_dtype": param, "accumulator_dtype": accumulator})
    if policy.loss_scale.mode != "none":
        notes.append("float16 layers: a dynamic loss scale is assumed; Flax keeps it apart, as a DynamicScale")
    return Import("flax", policy, section.rest, tuple(notes))


def _meaning(config: Mapping[str, Any]) -> PrecisionPolicy:
    compute = config["dtype"]
    return PrecisionPolicy(
        param_dtype=config["param_dtype"],
        compute_dtype=compute,
        output_dtype=compute,
        reduce_dtype=config["accumulator_dtype"],
        loss_scale=LossScale(mode="dynamic") if compute == "float16" else LossScale(),
    )


def recognises(config: Any) -> bool:
    """Whether it has Flax's two dtype flags, and none of a policy, FSDP or MaxText."""
    if not isinstance(config, Mapping):
        return False
    others = {"weight_dtype", "reduce_dtype", "compute_dtype", "buffer_dtype", "output_dtype"}
    return {"dtype", "param_dtype"} <= set(config) and not others & set(config)


TARGET = Target("flax", "Flax and Optax flags", FIELDS, to_flax, from_flax, recognises, kinds=("json", "yaml", "toml"))
