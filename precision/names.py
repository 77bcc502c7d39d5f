"""The spellings people know, each resolved to a policy, and back where an inverse exists.

Keras (``mixed_bfloat16``), Lightning (``16-mixed``, ``bf16-true``), Accelerate and Hugging Face (``fp16``, ``bf16``,
``no``), apex (``O0`` to ``O3``) and jmp (``params=float32,compute=float16,output=float32``, ``p=f32,c=bf16``).
"""

from __future__ import annotations

from precision.errors import PolicyError, nearest
from precision.formats import canonical_dtype
from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy

DYNAMIC = LossScale(mode="dynamic")

PRESETS: dict[str, PrecisionPolicy] = {
    "float32": PrecisionPolicy(),
    "mixed_float16": PrecisionPolicy(compute_dtype="float16", loss_scale=DYNAMIC),
    "mixed_bfloat16": PrecisionPolicy(compute_dtype="bfloat16"),
    "float16": PrecisionPolicy(
        param_dtype="float16", compute_dtype="float16", output_dtype="float16", loss_scale=DYNAMIC
    ),
    "bfloat16": PrecisionPolicy(param_dtype="bfloat16", compute_dtype="bfloat16", output_dtype="bfloat16"),
}
"""The presets by name. Float16 ones scale the loss dynamically; bfloat16 has float32's range and needs no scale."""

_KERAS = {name: name for name in PRESETS}
_LIGHTNING = {
    "32-true": "float32", "16-mixed": "mixed_float16", "bf16-mixed": "mixed_bfloat16", "16-true": "float16",
    "bf16-true": "bfloat16", "32": "float32", "16": "mixed_float16", "bf16": "mixed_bfloat16",
}  # fmt: skip
_ACCELERATE = {"no": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
_APEX = {"O0": "float32", "O1": "mixed_float16", "O2": "mixed_float16"}
_APEX_O3 = PRESETS["float16"].with_(loss_scale=LossScale(mode="static", initial=1.0))  # apex: O3 has loss_scale 1.0

STYLES: dict[str, dict[str, PrecisionPolicy]] = {
    style: {spelling: PRESETS[preset] for spelling, preset in table.items()}
    for style, table in {"keras": _KERAS, "lightning": _LIGHTNING, "accelerate": _ACCELERATE, "apex": _APEX}.items()
}
"""Spelling to policy, a table a tool; where two spellings share a policy the first is the one written back."""
STYLES["apex"]["O3"] = _APEX_O3

_REFUSED = {
    "half": "'half' means float16 on GPUs and bfloat16 on TPUs (jmp); name float16 or bfloat16.",
    "64-true": "float64 needs no precision policy: float64 tensors are never narrowed. Use float32.",
    "fp8": "fp8 recipes belong to the kernels of Transformer Engine or torchao; there is no fp8 preset. Use bf16.",
    "transformer-engine": "that is a library's own recipe, not a dtype policy. Use bf16-mixed around its modules.",
    "transformer-engine-float16": "that is a library's own recipe, not a dtype policy. Use 16-mixed around its modules.",
    "fp32": "ambiguous between tools; write float32 (Keras), 32-true (Lightning) or no (Accelerate).",
}
_REFUSED["float64"] = _REFUSED["64"] = _REFUSED["64-true"]

_JMP_KEYS = {"p": "param", "params": "param", "c": "compute", "compute": "compute", "o": "output", "output": "output"}


def policy_from_name(name: str) -> PrecisionPolicy:
    """Resolve any accepted spelling. Case and surrounding blanks do not matter.

    Raises:
        PolicyError: unknown spelling (with the nearest known), or one that has no single meaning (with what to write).
    """
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise PolicyError(f"a policy name is a string such as 'mixed_bfloat16', not {type(name).__name__}.")
    key = str(name).strip()
    lowered = key.lower()
    if "=" in key:
        return _from_jmp(key)
    for table in STYLES.values():
        for spelling, policy in table.items():
            if spelling.lower() == lowered:
                return policy
    if lowered in _REFUSED:
        raise PolicyError(f"policy {key!r}: {_REFUSED[lowered]}")
    known = [spelling for table in STYLES.values() for spelling in table]
    raise PolicyError(
        f"unknown policy {key!r}.{nearest(lowered, known)} Known: {', '.join(dict.fromkeys(known))}; jmp strings such as "
        "'params=float32,compute=float16,output=float32'; or a path to a .toml, .json or .yaml file."
    )


def policy_to_name(policy: PrecisionPolicy, style: str = "keras") -> str:
    """Write a policy in a tool's spelling. ``policy_from_name`` of the result is the policy again.

    Raises:
        PolicyError: the style is unknown, or it has no name for this policy.
    """
    if style == "jmp":
        text = f"params={policy.param_dtype},compute={policy.compute_dtype},output={policy.output_dtype}"
        if _from_jmp(text) == policy:
            return text
    elif style not in STYLES:
        raise PolicyError(
            f"unknown style {style!r}. Known: {', '.join(STYLES)}, jmp.{nearest(style, [*STYLES, 'jmp'])}"
        )
    else:
        for spelling, named in STYLES[style].items():
            if named == policy:
                return spelling
    raise PolicyError(f"{style} has no name for this policy; write it to a file instead (policy.to_file).")


def _from_jmp(text: str) -> PrecisionPolicy:
    """Read ``params=..,compute=..,output=..``; left out, compute follows params and output follows compute (as in jmp).

    jmp keeps the loss scale apart; here float16 compute gets the dynamic one and everything else none.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        field = _JMP_KEYS.get(key.strip().lower())
        if field is None:
            raise PolicyError(
                f"policy {text!r}: unknown part {part.strip()!r}. A jmp string has params= (p=), compute= (c=) and "
                "output= (o=), separated by commas."
            )
        if field in given:
            raise PolicyError(f"policy {text!r}: {field} is given twice.")
        given[field] = canonical_dtype(value)
    param = given.get("param", "float32")
    compute = given.get("compute", param)
    return PrecisionPolicy(
        param_dtype=param, compute_dtype=compute, output_dtype=given.get("output", compute),
        loss_scale=DYNAMIC if compute == "float16" else LossScale(),
    )  # fmt: skip
