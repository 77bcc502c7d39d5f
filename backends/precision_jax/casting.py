"""Casting trees: to a dtype, with the policy's module rules deciding by path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from precision.backend import warn_unmatched
from precision.formats import FloatFormat
from precision.policy import PrecisionPolicy
from precision_jax.leaves import cast_leaf, dotted, float_paths, in_statistics, is_statistic


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype (which JAX takes) of a policy's dtype name."""
    return FloatFormat.of(name).numpy_dtype


def cast_tree(tree: Any, dtype: str) -> Any:
    """Cast every floating leaf but float64 to a dtype, whatever its path."""
    target = numpy_dtype(dtype)
    return jax.tree.map(lambda leaf: cast_leaf(leaf, target), tree)


def cast_by_rules(policy: PrecisionPolicy, tree: Any, dtype: str) -> Any:
    """Cast the floating leaves but float64 to a dtype, or to that of the first rule that covers the leaf's path.

    Running statistics (Flax' ``batch_stats`` collection, nnx ``BatchStat``) keep their dtype.
    """

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        if is_statistic(leaf) or in_statistics(path):
            return leaf
        rule = policy.rule_for(dotted(path)) if policy.module_rules else None
        return cast_leaf(leaf, numpy_dtype(rule.dtype if rule else dtype))

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_statistic)


class RuleWatch:
    """Warns, once a bound policy, of module rules that match no path of a parameter tree."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self._policy = policy
        self._done = not policy.module_rules

    def parameters(self, *trees: Any) -> None:
        """Look at trees that hold the parameters, together."""
        if self._done:
            return
        paths = [path for tree in trees for path in float_paths(tree)]
        if paths:
            self._done = True
            warn_unmatched(self._policy, paths, "the parameters")

    def maybe_parameters(self, *trees: Any, scopes: Iterable[str] = ()) -> None:
        """Look at trees that may hold parameters: only where modules are named (``dense.kernel``; a batch is no module).

        Args:
            trees: the trees.
            scopes: names of modules that were seen in a trace.
        """
        if self._done:
            return
        paths = [path for tree in trees for path in float_paths(tree)]
        if any(_names(path) > 1 for path in paths):
            self._done = True
            warn_unmatched(self._policy, [*paths, *sorted(scopes)], "the parameters")


def _names(path: str) -> int:
    return sum(not part.isdigit() for part in path.split("."))
