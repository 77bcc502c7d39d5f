"""Layer paths: how the rules' patterns find Keras layers, as plain lookups and as Keras's own regular expressions.

Keras puts a Sequential or subclassed model's own name in front of its layers' paths (``"sequential/head"``) and a
functional model's not (``"head"``). A pattern is therefore tried on the path and on the path without its first part.
"""

from __future__ import annotations

from precision.interop.keras import layer_patterns
from precision.policy import PrecisionPolicy, Rule


def covers(rule: Rule, path: str) -> bool:
    """Whether a module rule covers the layer or variable at a Keras path."""
    return rule.matches(path) or ("/" in path and rule.matches(path.partition("/")[2]))


def rule_at(policy: PrecisionPolicy, path: str) -> Rule | None:
    """The first module rule that covers the layer or variable at a Keras path."""
    return next((rule for rule in policy.module_rules if covers(rule, path)), None)


def unmatched(policy: PrecisionPolicy, paths: list[str]) -> tuple[Rule, ...]:
    """The module rules that cover none of the given Keras paths."""
    return tuple(rule for rule in policy.module_rules if not any(covers(rule, path) for path in paths))


def rule_patterns(policy: PrecisionPolicy) -> list[tuple[str, str]]:
    """The module rules as pairs of a regular expression over whole layer paths and a dtype, as exported policies have them."""
    return layer_patterns(policy)
