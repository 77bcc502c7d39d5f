"""Casting trees of tensors, and functions at their boundary: what ``cast_to_*``, ``autocast`` and ``op`` do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

# Keras lets variables turn into a layer's compute dtype on being read, through a scope it does not export. Turning that
# off around marked functions needs the scope itself; this is the one place that reaches for it.
from keras.src.backend import AutocastScope

from precision.backend import check_leaf
from precision.ops import canonical_family, decide
from precision.policy import PrecisionPolicy, Rule
from precision_tensorflow.graphs import plain
from precision_tensorflow.opcast import marks
from precision_tensorflow.paths import rule_at

Function = TypeVar("Function", bound=Callable[..., Any])

_LOW_OR_SINGLE = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


def float_dtype(leaf: Any) -> str | None:
    """The dtype name of a tensor-like leaf that may be cast; None for float64, integers, strings, None, and the like."""
    name = _dtype_name(leaf)
    return name if name in _LOW_OR_SINGLE else None


def cast_leaf(leaf: Any, dtype: str) -> Any:
    """Cast a floating tensor, variable, symbolic tensor or array (not float64); return anything else as it is."""
    known = float_dtype(leaf)
    if known is None or known == dtype:
        return leaf
    if isinstance(leaf, keras.KerasTensor):
        return keras.ops.cast(leaf, dtype)
    if isinstance(leaf, (np.ndarray, np.generic, keras.Variable)):
        leaf = tf.convert_to_tensor(leaf)
    return tf.cast(leaf, dtype)


@plain
def cast_tree(tree: Any, dtype: str, policy: PrecisionPolicy | None = None) -> Any:
    """Cast a tree's floating leaves; with a policy, the first module rule that covers a leaf's path gives its dtype.

    Raises:
        MixedFrameworksError: a leaf belongs to another framework.
    """
    if policy is None or not policy.module_rules:
        return keras.tree.map_structure(lambda leaf: cast_leaf(_checked(leaf), dtype), tree)
    leaves = []
    for path, leaf in keras.tree.flatten_with_path(tree):
        rule = _rule_for_leaf(policy, path, _checked(leaf))
        leaves.append(cast_leaf(leaf, dtype if rule is None else rule.dtype))
    return keras.tree.pack_sequence_as(tree, leaves)


def _rule_for_leaf(policy: PrecisionPolicy, path: tuple[Any, ...], leaf: Any) -> Rule | None:
    if isinstance(leaf, keras.Variable):
        return rule_at(policy, leaf.path)
    return policy.rule_for("/".join(map(str, path)))


def _checked(leaf: Any) -> Any:
    check_leaf(leaf, "tensorflow")
    return leaf


def autocast(policy: PrecisionPolicy, function: Function) -> Function:
    """Wrap a function so that floating inputs come in the compute dtype and outputs leave in the output dtype."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_tree((args, kwargs), policy.compute_dtype)
        return cast_tree(function(*args, **kwargs), policy.output_dtype)

    return run  # type: ignore[return-value]


def op(policy: PrecisionPolicy, family: str) -> Callable[[Function], Function]:
    """A decorator that casts floating inputs as :func:`precision.ops.decide` says for the family."""
    canonical_family(family)

    def mark(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if marks.tracing():  # inside of mp.autocast: marked, and cast when it is replayed
                with marks.region(family=family):
                    return function(*args, **kwargs)
            with AutocastScope(None):
                cast_args, cast_kwargs = _cast_as_decided(policy, family, (args, kwargs))
                return function(*cast_args, **cast_kwargs)

        return run  # type: ignore[return-value]

    return mark


@plain
def _cast_as_decided(policy: PrecisionPolicy, family: str, tree: Any) -> Any:
    leaves = [_checked(leaf) for leaf in keras.tree.flatten(tree)]
    places = [i for i, leaf in enumerate(leaves) if _dtype_name(leaf) is not None]
    wanted = decide(policy, family, [str(_dtype_name(leaves[i])) for i in places])
    for i, dtype in zip(places, wanted, strict=True):
        leaves[i] = cast_leaf(leaves[i], dtype)
    return keras.tree.pack_sequence_as(tree, leaves)


def _dtype_name(leaf: Any) -> str | None:
    # A layer (the ``self`` of a decorated method) and a TensorSpec have a dtype too, and are no tensors.
    if not tf.is_tensor(leaf) and not isinstance(leaf, (np.ndarray, np.generic, keras.Variable, keras.KerasTensor)):
        return None
    name = getattr(leaf.dtype, "name", leaf.dtype)
    return name if isinstance(name, str) else None


def island(dtype: str, function: Function) -> Function:
    """Wrap a function so that floating inputs (not float64) come in ``dtype`` and no variable is autocast inside."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with AutocastScope(None):
            args, kwargs = cast_tree((args, kwargs), dtype)
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
