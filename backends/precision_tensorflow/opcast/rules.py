"""What the policy's rules say of an op: by its family, by the Keras layers and name scopes it was made in."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from precision.ops import family_dtype
from precision.policy import PrecisionPolicy
from precision_tensorflow.opcast.record import Records
from precision_tensorflow.paths import covers

_GRADIENT = "gradient_tape/"


class Rules:
    """A policy's decisions, and which modules were seen.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.compute = tf.as_dtype(policy.compute_dtype)
        self.named = bool(policy.module_rules)
        self.seen: dict[str, None] = {}
        self._families: dict[str, tf.DType | None] = {}

    def names(self, records: Records, noted: Any, scope: str) -> tuple[str, ...]:
        """The module paths that an op counts as being in."""
        if not self.named:
            return ()
        if noted is not None and noted.path:
            found = [noted.path]
        else:
            if _GRADIENT in scope:
                scope = scope.partition(_GRADIENT)[2]
            found = [scope] if scope else []
            parts = scope.split("/")
            for n in range(len(parts), 0, -1):
                path = records.scopes.get("/".join(parts[:n]))
                if path is not None:
                    found.append(path)
                    break
        self.seen.update(dict.fromkeys(found))
        return tuple(found)

    def target(self, family: str, names: tuple[str, ...]) -> tf.DType | None:
        """The dtype an op computes in, or None where that depends on its inputs."""
        if names:
            for rule in self.policy.rules:
                if rule.family == family:
                    break
                if rule.module is not None and any(covers(rule, name) for name in names):
                    return None if family == "shape" else tf.as_dtype(rule.dtype)
        return self.family(family)

    def family(self, family: str) -> tf.DType | None:
        """The dtype that a family runs in, apart from module rules."""
        if family not in self._families:
            name = family_dtype(self.policy, family)
            self._families[family] = None if name is None else tf.as_dtype(name)
        return self._families[family]
