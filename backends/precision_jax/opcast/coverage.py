"""JAX's primitives and known functions by name, and where each stands: for the table of all backends."""

from __future__ import annotations

from precision.ops import OpEntry
from precision_jax.opcast.families import ENTERED, FAMILY, OPAQUE, WHY
from precision_jax.opcast.patterns import ATTENTION, KNOWN


def op_table() -> list[OpEntry]:
    """Every primitive; then the functions that are recognised as a whole, by file and name."""
    primitives = [OpEntry(name, family, WHY.get(name, "")) for name, family in FAMILY.items()]
    primitives += [OpEntry(name, None, why) for name, why in (ENTERED | OPAQUE).items()]
    known = {**KNOWN, **dict.fromkeys(ATTENTION, "attention")}
    return primitives + [OpEntry(_spelt(file, name), family) for (file, name), family in known.items()]


def _spelt(file: str, name: str) -> str:
    return f"{file.removesuffix('.py').replace('/', '.')}.{name}"
