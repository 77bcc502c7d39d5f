"""Op families and what autocast does to each: the one table every backend follows, and the pure decision over it.

The treatments are those of ``torch.autocast`` on CUDA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from precision.errors import PolicyError, nearest

if TYPE_CHECKING:
    from precision.policy import PrecisionPolicy

Treatment = Literal["compute", "float32", "promote", "follow"]


@dataclasses.dataclass(frozen=True)
class OpFamily:
    """A named group of ops treated alike.

    Attributes:
        name: the family's name.
        treatment: ``compute`` (inputs cast to the compute dtype), ``float32``, ``promote`` (to the widest input) or
            ``follow`` (left as they come).
        why: the reason, in a sentence.
    """

    name: str
    treatment: Treatment
    why: str


FAMILIES: dict[str, OpFamily] = {
    family.name: family
    for family in (
        OpFamily("matmul", "compute", "dominates the cost and accumulates in float32; its bias is part of it"),
        OpFamily("conv", "compute", "dominates the cost and accumulates in float32; its bias is part of it"),
        OpFamily("attention", "compute", "two matmuls around a softmax that kernels keep in float32 inside"),
        OpFamily("norm", "float32", "means and variances cancel and square: both lose digits and overflow in float16"),
        OpFamily("softmax", "float32", "exponentials overflow, and small probabilities flush to zero"),
        OpFamily("loss", "float32", "logarithms and long sums; the loss is multiplied by the loss scale"),
        OpFamily("reduction", "float32", "a long sum in a low format stops growing once terms fall below its spacing"),
        OpFamily("transcendental", "float32", "exp, log and pow leave float16's range quickly"),
        OpFamily("elementwise", "promote", "cheap; mixed inputs meet in the widest dtype"),
        OpFamily("shape", "follow", "moves values without computing"),
        OpFamily("linalg", "float32", "factorisations and solves amplify rounding, and have no low-precision kernels"),
    )
}
"""The families by name, in the order of the design."""


@dataclasses.dataclass(frozen=True)
class OpEntry:
    """Where one op of a framework stands.

    Attributes:
        name: the framework's name for it.
        family: its op family, or None for one that autocast leaves as it is.
        why: the reason, where there is something to say: always for an op left as it is, and for one that computes but only
            follows or promotes.
    """

    name: str
    family: str | None
    why: str = ""


_WIDTH = {"float8_e4m3fn": 0, "float8_e5m2": 0, "bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}


def canonical_family(name: str) -> str:
    """Return ``name`` if it is an op family. Raises ``PolicyError`` naming the nearest otherwise."""
    if name not in FAMILIES:
        raise PolicyError(f"unknown op family {name!r}. Known: {', '.join(FAMILIES)}.{nearest(name, FAMILIES)}")
    return name


def decide(policy: PrecisionPolicy, family: str, input_dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return the dtypes the inputs of an op are cast to before it runs. The one decision all backends share.

    The policy's first rule for the family wins over the table. Integers, bools and float64 are returned as they come;
    an op with a float64 input is left alone, as ``torch.autocast`` leaves it.

    Args:
        policy: the policy in force.
        family: an op family's name.
        input_dtypes: NumPy dtype names of the inputs, floating or not.

    Returns:
        One dtype name an input.

    Raises:
        PolicyError: the family is unknown.

    Example:
        >>> from precision import PrecisionPolicy
        >>> decide(PrecisionPolicy.from_name("mixed_bfloat16"), "softmax", ["bfloat16"])
        ('float32',)
    """
    target = family_dtype(policy, family)
    floats = [dtype for dtype in input_dtypes if dtype in _WIDTH]
    if "float64" in floats or not floats:
        return tuple(input_dtypes)
    if target is None:
        if FAMILIES[family].treatment == "follow":
            return tuple(input_dtypes)
        target = widest(floats)
    return tuple(target if dtype in _WIDTH else dtype for dtype in input_dtypes)


def family_dtype(policy: PrecisionPolicy, family: str) -> str | None:
    """The dtype a family runs in under a policy, or None where that depends on the inputs (promote, follow)."""
    treatment = FAMILIES[canonical_family(family)].treatment
    for rule in policy.rules:
        if rule.family == family:
            return rule.dtype
    return {"compute": policy.compute_dtype, "float32": "float32"}.get(treatment)


def widest(dtypes: Sequence[str]) -> str:
    """The dtype that floating inputs meet in: the widest; float32 where two different low formats meet."""
    top = max(_WIDTH[dtype] for dtype in dtypes)
    names = {dtype for dtype in dtypes if _WIDTH[dtype] == top}
    return names.pop() if len(names) == 1 else "float32"
