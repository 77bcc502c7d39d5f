"""MaxText's dtype flags: keys of its ``base.yml``, of a file laid over it, or ``key=value`` on its command line.

Meanings and defaults are those of MaxText 0.2.5 (``configs/base.yml`` and the layers that read it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged
from precision.loss_scale import LossScale
from precision.ops import family_dtype
from precision.policy import PrecisionPolicy, Rule

FIELDS = (
    Field("weight_dtype", "param_dtype", "the same dtype"),
    Field("dtype", "compute_dtype", "the same dtype; activations, and the copies of weights that matmuls take"),
    Field(
        "grad_dtype", "reduce_dtype", "float32 gradients are cast to it once computed; those of low weights never are"
    ),
    Field("cast_logits_to_fp32", "output_dtype", "true for float32, false for the compute dtype"),
    Field("matmul_precision", "compute_dtype", "highest for float32 (TPUs would use bfloat16 passes), else default"),
    Field("float32_logits", "rules", "whether the family softmax runs in float32 (attention's softmax)"),
    Field("float32_qk_product", "rules", "whether the family attention runs in float32 (its first matmul)"),
    Field(
        "activations_in_float32", "rules", "whether the family transcendental runs in float32 (the MLP's activations)"
    ),
    Field("float32_weight_sum", "rules", "whether the family reduction runs in float32 (the sum over experts)"),
    Field("logits_dot_in_fp32", "", "false: a matmul, so in the compute dtype; true where that is float32"),
    Field("float32_gate_logits", "", "false: a matmul, so in the compute dtype; true where that is float32"),
)

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MATMUL = ("default", "high", "highest", "bfloat16", "float32", "tensorfloat32", "")
_FLAGS = {
    "float32_logits": "softmax",
    "float32_qk_product": "attention",
    "activations_in_float32": "transcendental",
    "float32_weight_sum": "reduction",
}
_THEIRS: dict[str, Any] = {
    "weight_dtype": "float32", "dtype": "bfloat16", "grad_dtype": "float32", "matmul_precision": "default",
    "cast_logits_to_fp32": True, "float32_logits": False, "float32_qk_product": False, "activations_in_float32": False,
    "float32_weight_sum": True, "logits_dot_in_fp32": False, "float32_gate_logits": False,
}  # fmt: skip
"""MaxText's own defaults."""

_INSTEAD = {
    "param_dtype": "weights are kept in another dtype",
    "compute_dtype": "matmuls run in another dtype",
    "output_dtype": "logits leave in float32 (cast_logits_to_fp32) or in the compute dtype, and no other",
    "reduce_dtype": "gradients of low weights stay in the weights' dtype: MaxText casts float32 ones only",
    "rules": "MaxText has flags for softmax, attention, transcendental and reduction in float32, and no rules by module; "
    "norms always compute in float32",
    "loss_scale": "MaxText never scales the loss and skips no step",
    "emulate": "it computes in the dtype itself",
}


def to_maxtext(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write MaxText's dtype flags.

    Args:
        policy: the policy.
        base: a MaxText config to lay the flags over.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``strict`` and something is lost; ``base`` is no table.

    Example:
        >>> to_maxtext(PrecisionPolicy(compute_dtype="bfloat16")).config["float32_logits"]
        True
    """
    float32 = policy.compute_dtype == "float32"
    config: dict[str, Any] = {
        "weight_dtype": policy.param_dtype,
        "dtype": policy.compute_dtype,
        "grad_dtype": policy.reduce_dtype if policy.param_dtype == "float32" else policy.param_dtype,
        "matmul_precision": "highest" if float32 else "default",
        "cast_logits_to_fp32": float32 or policy.output_dtype == "float32",
        **{flag: float32 or family_dtype(policy, family) == "float32" for flag, family in _FLAGS.items()},
        "logits_dot_in_fp32": float32,
        "float32_gate_logits": float32,
    }
    losses = Losses(policy)
    losses.against(_meaning(config), _INSTEAD)
    if policy.compute_dtype == "float16":
        losses.note("MaxText trains float16 without loss scaling: gradients below 6e-8 become zero; prefer bfloat16")
    if policy.param_dtype != "float32":
        losses.note(f"with mu_dtype unset, AdamW's first moment is kept in weight_dtype ({policy.param_dtype}) too")
    if policy.reduce_dtype != "float32":
        losses.note(
            "gradients are cast to grad_dtype once computed; XLA may have reduced them over devices before that"
        )
    return losses.export("maxtext", merged(base, config), strict)


def from_maxtext(config: Any) -> Import:
    """Read MaxText's dtype flags; what is not given has the default of MaxText's ``base.yml``.

    Raises:
        InteropError: a flag has no valid value.

    Example:
        >>> from_maxtext({"dtype": "bfloat16", "weight_dtype": "float32", "float32_logits": True}).policy.compute_dtype
        'bfloat16'
    """
    section = Section(config, "maxtext config")
    notes: list[str] = []
    assumed = [key for key in _THEIRS if key not in section.rest]
    if assumed:
        notes.append(
            f"not given, so MaxText's default: {', '.join(f'{key} = {_plain(_THEIRS[key])}' for key in assumed)}"
        )
    found: dict[str, Any] = {}
    for key, default in _THEIRS.items():
        if key in ("weight_dtype", "dtype", "grad_dtype"):
            found[key] = section.word(key, _DTYPES, default)
        elif key == "matmul_precision":
            found[key] = section.word(key, _MATMUL, default)
        else:
            found[key] = section.flag(key, default)
    policy = _meaning(found)
    if policy.compute_dtype == "float32" and found["matmul_precision"] not in ("highest", "float32"):
        notes.append(
            f"matmul_precision = {found['matmul_precision']}: on TPUs float32 matmuls run in bfloat16 passes; 'highest' is float32"
        )
    if policy.compute_dtype != "float32":
        notes += [
            f"{flag}: true goes beyond the policy, which has that matmul in {policy.compute_dtype}"
            for flag in ("logits_dot_in_fp32", "float32_gate_logits")
            if found[flag]
        ]
    if policy.compute_dtype == "float16":
        notes.append("MaxText never scales the loss: float16 gradients below 6e-8 become zero")
    if mu := section.rest.get("mu_dtype"):
        notes.append(f"mu_dtype = {mu}: the dtype of AdamW's first moment, which a policy does not decide; it is kept")
    if quantization := section.rest.get("quantization"):
        notes.append(f"quantization = {quantization}: acts on top of the dtypes; it is kept")
    return Import("maxtext", policy, section.rest, tuple(notes))


def _meaning(config: Mapping[str, Any]) -> PrecisionPolicy:
    """The policy that a whole set of flags amounts to."""
    weight, compute = config["weight_dtype"], config["dtype"]
    rules = []
    if compute != "float32":
        plain = PrecisionPolicy(compute_dtype=compute)
        for flag, family in _FLAGS.items():
            dtype = "float32" if config[flag] else compute
            if dtype != family_dtype(plain, family):
                rules.append(Rule(family=family, dtype=dtype))
    return PrecisionPolicy(
        param_dtype=weight,
        compute_dtype=compute,
        output_dtype="float32" if config["cast_logits_to_fp32"] else compute,
        reduce_dtype=config["grad_dtype"] if weight == "float32" else weight,
        rules=tuple(rules),
        loss_scale=LossScale(),
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def recognises(config: Any) -> bool:
    """Whether it has MaxText's names for the dtypes of weights and activations or gradients."""
    return isinstance(config, Mapping) and "weight_dtype" in config and bool({"dtype", "grad_dtype"} & set(config))


TARGET = Target("maxtext", "MaxText", FIELDS, to_maxtext, from_maxtext, recognises, kinds=("yaml", "json"))
