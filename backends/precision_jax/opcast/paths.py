"""What the policy's rules say of an equation: by op family, by the scopes it is in, by the parameters it takes.

Scopes are JAX's name stack: Flax linen and Haiku put every module there, ``jax.named_scope`` whatever one likes. Where a
framework does not (Equinox, Flax NNX, plain JAX), the parameters' own paths name the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from precision.errors import PolicyError
from precision.ops import family_dtype
from precision.policy import PrecisionPolicy, Rule
from precision_jax.opcast import _private, marks


class Rules:
    """A policy's decisions, and which scopes were seen.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.compute = _dtype(policy.compute_dtype)
        self.named = bool(policy.module_rules)
        self.seen: set[str] = set()
        self._families: dict[str, np.dtype | None] = {}

    def scope(self, prefix: tuple[str, ...], eqn: Any) -> tuple[str, ...]:
        """The scopes that an equation is in."""
        if not self.named:
            return prefix  # nothing but marks
        found = prefix + _private.scopes(eqn.source_info.name_stack)
        if found:
            self.seen.update(_spellings(found))
        return found

    def target(
        self, family: str, scope: tuple[str, ...], paths: Sequence[str], islands: bool = False
    ) -> np.dtype | None:
        """The dtype an op computes in, or None where that depends on its inputs.

        Args:
            family: its op family.
            scope: the scopes it is in.
            paths: the paths of the parameters among its inputs; empty strings do not count.
            islands: whether its inputs are an author's float32.

        Raises:
            PolicyError: rules for two of its names disagree.
        """
        if not self.named:
            return self._family(family)
        names = [*(_spellings(scope) if scope else ()), *(p for p in paths if p and not p.startswith("\0"))]
        rule = self._rule(family, names)
        return _dtype(rule.dtype) if rule is not None and not islands else self._family(family)

    def _rule(self, family: str, names: Sequence[str]) -> Rule | None:
        found: Rule | None = None
        module: dict[str, tuple[str, Rule]] = {}
        for rule in self.policy.rules:
            if rule.family == family:
                found = found or rule
            for name in names:
                if rule.matches(name):
                    module.setdefault(name, (name, rule))
                    found = found or rule
        if len({rule.dtype for _, rule in module.values()}) > 1:
            told = ", ".join(f"{n!r} by rule {r.module!r}: {r.dtype}" for n, r in module.values())
            raise PolicyError(
                f"rules disagree on the dtype of one op ({family}): {told}. Make one of them more specific."
            )
        return found

    def _family(self, family: str) -> np.dtype | None:
        if family not in self._families:
            name = family_dtype(self.policy, family)
            self._families[family] = None if name is None else _dtype(name)
        return self._families[family]


def _dtype(name: str) -> np.dtype:
    from precision_jax.casting import numpy_dtype

    return numpy_dtype(name)


def _spellings(scope: tuple[str, ...]) -> tuple[str, ...]:
    """A scope path as rules may read it: as it is, and without the outermost module, which frameworks leave out."""
    parts = [part for name in scope if name not in marks.INSIDE for part in name.split("/")]
    return (".".join(parts), *((".".join(parts[1:]),) if len(parts) > 1 else ()))


class Fixed(Rules):
    """Decisions for a region all of whose ops run in float32."""

    def target(
        self, family: str, scope: tuple[str, ...], paths: Sequence[str], islands: bool = False
    ) -> np.dtype | None:
        """Float32."""
        del family, scope, paths, islands
        return np.dtype("float32")


class Following(Rules):
    """Decisions for a region whose ops run in whatever dtype their inputs meet in."""

    def target(
        self, family: str, scope: tuple[str, ...], paths: Sequence[str], islands: bool = False
    ) -> np.dtype | None:
        """None: it depends on the inputs."""
        del family, scope, paths, islands
        return None
