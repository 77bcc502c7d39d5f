"""Hugging Face ``TrainingArguments``: ``fp16``, ``bf16`` and the switches beside them.

Names, defaults and meanings are those of Transformers 5.24, whose Trainer leaves precision to Accelerate; names of version 4
are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision.errors import InteropError
from precision.interop._accelerate_read import low_word, meaning
from precision.interop.base import Export, Field, Import, Losses, Section, Target, merged, shown
from precision.names import policy_from_name
from precision.policy import PrecisionPolicy

FIELDS = (
    Field("fp16", "compute_dtype", "true for float16; excludes bf16"),
    Field("bf16", "compute_dtype", "true for bfloat16; excludes fp16"),
    Field("fp16_full_eval", "", "false unless the base says otherwise: true casts the model for good at the first evaluation"),
    Field("bf16_full_eval", "", "false unless the base says otherwise: as fp16_full_eval"),
    Field("tf32", "", "false unless the base says otherwise: left out, torch_compile switches it on"),
    Field("max_grad_norm", "", "kept: not about precision, and 1.0 if not said; gradients are unscaled first"),
)  # fmt: skip

_UNDECIDED = {"fp16_full_eval": False, "bf16_full_eval": False, "tf32": False}
"""Switches of which a policy says nothing, with what is written unless the base says otherwise."""
_BACKENDS = ("auto", "amp", "cuda_amp", "cpu_amp", "apex")
_LEVELS = ("O0", "O1", "O2", "O3")
_INSTEAD = {
    "param_dtype": "Trainer leaves the parameters as the model has them; from_pretrained(dtype=...) makes them, by default in "
    "the checkpoint's dtype",
    "compute_dtype": "Trainer has float32, fp16 and bf16 (and fp16 is float32 on a CPU, with no word of it)",
    "output_dtype": "Trainer's results are cast to float32",
    "reduce_dtype": "gradients accumulate and are reduced in the parameters' dtype; under FSDP in the compute dtype",
    "rules": "Trainer has no rules by module, and autocast keeps its own lists of ops; "
    "precision_torch.huggingface_trainer has them",
    "loss_scale": "TrainingArguments has no field for it: fp16 has a GradScaler at its defaults (dynamic, from 65536, times 2 "
    "after 2000 steps, times 0.5), the rest none; precision_torch.huggingface_trainer has them all",
    "emulate": "Trainer computes in the dtype itself",
}
_ON_CPU = "on a CPU Trainer trains fp16 as float32 and scales nothing, with no word of it"


def to_huggingface(policy: PrecisionPolicy, *, base: Any = None, strict: bool = False) -> Export:
    """Write a policy as keyword arguments of ``TrainingArguments``.

    Args:
        policy: the policy.
        base: arguments to lay these over.
        strict: whether something lost is an error.

    Raises:
        InteropError: ``base`` is no table; or ``strict`` and something is lost.

    Example:
        >>> to_huggingface(PrecisionPolicy(compute_dtype="bfloat16")).config["bf16"]
        True
    """
    losses = Losses(policy)
    word = low_word(policy)
    over = Section({} if base is None else base, "base").rest
    for key in ("half_precision_backend", "fp16_backend", "fp16_opt_level"):
        over.pop(key, None)  # version 5 refuses them
    undecided = {key: over.get(key, value) for key, value in _UNDECIDED.items()}
    config = merged(over, {"fp16": word == "fp16", "bf16": word == "bf16", **undecided})
    found = from_huggingface(config)
    losses.against(found.policy, _INSTEAD)
    for note in found.notes:
        losses.note(note)
    if word == "fp16":
        losses.note(
            "the scaler is a torch.amp.GradScaler at its defaults, and has no bounds: its scale can fall to 0 and grow to "
            "infinity"
        )
        losses.note(_ON_CPU)
        losses.note(
            "the default optimizer is fused, for which Accelerate cannot see a skipped step: the schedule goes on "
            "(precision_torch.huggingface_trainer mends it)"
        )
    if word != "no":
        losses.note(
            "from_pretrained loads a model in its checkpoint's dtype: a bfloat16 or float16 one would train without float32 "
            "master weights; load it with dtype='float32'"
        )
        losses.note("losses that are not finite are left out of the logs, unless logging_nan_inf_filter is false")
    return losses.export("huggingface", config, strict)


def from_huggingface(config: Any) -> Import:
    """Read keyword arguments of ``TrainingArguments``, of version 5 or 4.

    Raises:
        InteropError: a value is not valid, or fp16 and bf16 are both on.

    Example:
        >>> from_huggingface({"fp16": True}).policy.loss_scale.mode
        'dynamic'
    """
    top = Section(config, "TrainingArguments")
    notes: list[str] = []
    fp16, bf16 = (bool(top.flag(key, False)) for key in ("fp16", "bf16"))
    if fp16 and bf16:
        raise InteropError("TrainingArguments: fp16 and bf16 exclude each other; keep one.")
    old = _old_names(top, notes)
    _switches(top, notes)
    word = "fp16" if fp16 else "bf16" if bf16 else "no"
    if old is not None and fp16:
        return Import("huggingface", old, top.rest, tuple(notes))
    if word == "fp16" and top.rest.get("use_cpu") is True:
        notes.append(f"{_ON_CPU}: read as float32")
        word = "no"
    if top.rest.get("deepspeed"):
        notes.append("DeepSpeed carries the precision out: what its own config (deepspeed) says counts")
        if top.rest.get("fp16_full_eval") or top.rest.get("bf16_full_eval"):
            notes.append("under DeepSpeed fp16_full_eval and bf16_full_eval switch low-precision training on")
    return Import("huggingface", meaning(word, _sharding(top, word, notes)), top.rest, tuple(notes))


def _switches(top: Section, notes: list[str]) -> None:
    """Take the switches out that say what is written anyway; keep the others, and say so."""
    full = [key for key in ("fp16_full_eval", "bf16_full_eval") if top.flag(key, False)]
    if len(full) == 2:
        raise InteropError("TrainingArguments: fp16_full_eval and bf16_full_eval exclude each other; keep one.")
    for key in full:
        top.rest[key] = True
        notes.append(
            f"{key}: evaluation outside of training casts the model for good, and training then goes on from that"
        )
    tf32 = top.flag("tf32", None)
    if tf32:
        top.rest["tf32"] = True
        notes.append("tf32: float32 matmuls round their inputs to 10 bits of mantissa, of which a policy says nothing")
    elif tf32 is None and top.rest.get("torch_compile") is True:
        notes.append("tf32 is not given: torch_compile switches it on, unless fp16 is on")


def _old_names(top: Section, notes: list[str]) -> PrecisionPolicy | None:
    """Names of version 4; the policy that apex had, if it was asked for."""
    backend = None
    for key in ("half_precision_backend", "fp16_backend"):
        value = top.word(key, _BACKENDS)
        if value is not None:
            notes.append(f"{key} is a name of version 4; Trainer 5 has one way and refuses it")
            backend = backend or value
    level = top.word("fp16_opt_level", _LEVELS)
    if level is not None:
        notes.append("fp16_opt_level is a name of version 4, for apex only; Trainer 5 refuses it")
    if "no_cuda" in top.rest:
        top.rest["use_cpu"] = top.flag("no_cuda")
        notes.append("no_cuda is the old name of use_cpu")
    return policy_from_name(level or "O1") if backend == "apex" else None


def _sharding(top: Section, word: str, notes: list[str]) -> tuple[int, None] | None:
    """The version of FSDP if there is sharding; a policy of its own for FSDP's dtypes cannot be given here."""
    if not top.rest.get("fsdp") or word == "no":
        return None
    inner = top.rest.get("fsdp_config")
    table = Section(inner if isinstance(inner, Mapping) else {}, "TrainingArguments: fsdp_config")
    version = table.rest.get("version", table.rest.get("fsdp_version", 2))
    if isinstance(version, bool) or str(version) not in ("1", "2"):
        raise InteropError(f"{table.name('version')} must be 1 or 2, not {shown(version)}.")
    notes.append("under FSDP Trainer has gradients reduced in the compute dtype, and cannot say otherwise")
    return int(version), None


def recognises(config: Any) -> bool:
    """Whether it has one of the switches, as a boolean, and nothing of Accelerate's own config."""
    if not isinstance(config, Mapping) or {"mixed_precision", "distributed_type", "compute_environment"} & set(config):
        return False
    return any(isinstance(config.get(key), bool) for key in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"))


TARGET = Target(
    "huggingface",
    "Hugging Face TrainingArguments",
    FIELDS,
    to_huggingface,
    from_huggingface,
    recognises,
    kinds=("json", "yaml", "toml"),
)
