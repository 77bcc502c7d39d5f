"""All that autocast knows by name, for people: primitives, the functions recognised as such, and what common functions amount to."""

from __future__ import annotations

from precision.ops import OpEntry
from precision_jax.opcast.families import ENTERED, FAMILY, OPAQUE, WHY
from precision_jax.opcast.patterns import ATTENTION, KNOWN, LIBRARIES

AMOUNTS: dict[str, str] = {
    f"{module}.{name}": family
    for family, module, names in (
        ("matmul", "jax.numpy", "dot matmul vdot inner tensordot einsum vecdot matvec vecmat"),
        ("conv", "jax.lax", "conv conv_with_general_padding conv_transpose conv_general_dilated"),
        ("conv", "jax.numpy", "convolve correlate"),
        ("reduction", "jax.numpy", "sum mean average prod nansum nanmean cumsum cumprod trace linalg.norm"),
        ("norm", "jax.numpy", "var std"),
        ("reduction", "jax.image", "resize"),
        ("transcendental", "jax.numpy", "power reciprocal logaddexp"),
        ("linalg", "jax.numpy", "linalg.solve linalg.inv linalg.det linalg.pinv linalg.lstsq linalg.cond"),
        ("elementwise", "jax.numpy", "where clip concatenate stack maximum minimum add subtract multiply divide"),
        ("elementwise", "jax.nn", "relu relu6 leaky_relu hard_tanh hard_sigmoid"),
        ("shape", "jax.numpy", "take take_along_axis reshape pad sort flip roll tile repeat max min argmax"),
    )
    for name in names.split()
}  # fmt: skip
"""Functions that are made of primitives, by what these amount to."""


def op_table() -> list[OpEntry]:
    """Every op, with its family, by name; primitives by their bare names."""
    found = {name: OpEntry(name, family, WHY.get(name, "")) for name, family in FAMILY.items()}
    for table in (ENTERED, OPAQUE):
        found |= {name: OpEntry(name, None, why) for name, why in table.items()}
    for (file, name), family in KNOWN.items():
        if not name.startswith("_"):
            found[_path(file, name)] = OpEntry(_path(file, name), family)
    for file, name in ATTENTION:
        found[_path(file, name)] = OpEntry(_path(file, name), "attention")
    for folder, family in LIBRARIES.items():
        found[_module(folder)] = OpEntry(_module(folder), family)
    found |= {name: OpEntry(name, family) for name, family in AMOUNTS.items()}
    return sorted(found.values(), key=lambda entry: entry.name)


_PUBLIC = {
    "jax/_src/nn/functions.py": "jax.nn",
    "jax/_src/ops/special.py": "jax.nn",
    "jax/_src/lax/other.py": "jax.numpy",
}


def _path(file: str, name: str) -> str:
    module = _PUBLIC.get(file) or _module(file).replace("._", ".")
    return module if name == "__call__" else f"{module}.{name}"


def _module(place: str) -> str:
    """A file or folder as a module."""
    return place.removesuffix(".py").strip("/").replace("/_src", "").replace("/", ".")
