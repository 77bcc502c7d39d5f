"""The targets by name: a table of strings, each imported when it is asked for. A new one is one file and one line here."""

from __future__ import annotations

import importlib

from precision.errors import InteropError, nearest
from precision.interop.base import Target

_TARGETS = {
    "deepspeed": "precision.interop.deepspeed",
    "huggingface": "precision.interop.huggingface",
    "accelerate": "precision.interop.accelerate",
    "lightning": "precision.interop.lightning",
    "fsdp": "precision.interop.fsdp",
    "torchtitan": "precision.interop.torchtitan",
    "keras": "precision.interop.keras",
    "jmp": "precision.interop.jmp",
    "maxtext": "precision.interop.maxtext",
    "flax": "precision.interop.flax",
}
_ALIASES = {
    "ds": "deepspeed", "hf": "huggingface", "transformers": "huggingface", "trainer": "huggingface", "fabric": "lightning",
    "fsdp1": "fsdp", "fsdp2": "fsdp", "optax": "flax",
}  # fmt: skip


def list_targets() -> list[Target]:
    """All targets, in the order of the documentation."""
    return [get_target(name) for name in _TARGETS]


def get_target(name: str) -> Target:
    """A target by name or alias. Raises ``InteropError`` for an unknown one, with the nearest."""
    key = str(name).strip().lower()
    key = _ALIASES.get(key, key)
    if key not in _TARGETS:
        known = [*_TARGETS, *_ALIASES]
        raise InteropError(f"unknown tool {name!r}.{nearest(key, known)} Known: {', '.join(_TARGETS)}, precision.")
    target: Target = importlib.import_module(_TARGETS[key]).TARGET
    return target
