"""Gradients of what the replay makes: they keep low operands, and bring float32 to variables without another rounding."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from precision_tensorflow.opcast import build
from precision_tensorflow.opcast.notes import F32, castable

PASS = "PrecisionAutocastPass"
KERNEL = "PrecisionAutocastKernel"
_numbers = itertools.count(1)


def _unsaved(tensors: Sequence[Any]) -> list[Any]:
    """In the place of a gradient when a SavedModel is written: the model can be run, not trained further, once loaded."""
    told = (
        "a SavedModel written under mp.autocast holds no gradients: load the weights into the model's code to train on"
    )
    with tf.control_dependencies([tf.debugging.Assert(False, [told])]):
        return [tf.identity(x) for x in tensors]


def _registered(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a gradient. TensorFlow calls those of a SavedModel's ops without the op."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @tf.autograph.experimental.do_not_convert
        def gradient(op: Any, *grads: Any) -> Any:
            return function(op, *grads) if op is not None else _unsaved(grads)

        tf.RegisterGradient(name)(gradient)
        return function

    return register


@_registered(PASS)
def _pass(op: Any, grad: Any) -> Any:
    """Of a cast on the way into a product: the product's gradient as it comes, in the end in the dtype of what was cast."""
    return grad if op.outputs[0].dtype == F32 else build.cast(grad, op.inputs[0].dtype)


@_registered(KERNEL)
def _kernel(op: Any, *grads: Any) -> list[Any]:
    """Of a float32 op on operands that were low: from the low ones, which are all that is kept."""
    floats = [i for i, x in enumerate(op.inputs) if castable(x.dtype)]
    with tf.control_dependencies([g for g in grads if g is not None]):
        again = [tf.identity(build.kernel_input(x)) if i in floats else x for i, x in enumerate(op.inputs)]
    wide = [build.cast(x, F32) if i in floats else x for i, x in enumerate(again)]
    results = build.create(op, wide).outputs
    found = tf.gradients(list(results), [wide[i] for i in floats], list(grads))
    by_input = dict(zip(floats, found, strict=True))
    return [by_input.get(i) for i in range(len(op.inputs))]


class Rule:
    """The gradient of an ``IdentityN`` of results and of what they were computed from.

    Args:
        results: the number of results.
        backward: called with the gradients of the results (None where there is none) and the inputs they were computed from;
            gives a gradient for each of those.
    """

    def __init__(self, results: int, backward: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]) -> None:
        self.results, self.backward = results, backward

    def __call__(self, op: Any, *grads: Any) -> list[Any]:
        """What TensorFlow calls."""
        inputs = list(op.inputs)
        return [None] * self.results + list(self.backward(grads[: self.results], inputs[self.results :]))


def with_rule(rule: Rule, results: Sequence[Any], through: Sequence[Any], name: str | None = None) -> list[Any]:
    """Give results a gradient of their own with respect to other tensors."""
    graph = tf_ops.get_default_graph()
    # The graph keeps the rule, and with it what the rule holds; TensorFlow's registry, which never forgets, does not.
    build.keep(graph, rule)
    registered = f"PrecisionAutocastRule{next(_numbers)}"
    weak = weakref.ref(rule)

    def gradient(op: Any, *grads: Any) -> list[Any]:
        alive = weak()
        return alive(op, *grads) if alive is not None else [None] * len(op.inputs)

    _registered(registered)(gradient)
    with graph.gradient_override_map({"IdentityN": registered}):
        outputs = tf.raw_ops.IdentityN(input=[*results, *through], name=name)
    return list(outputs[: len(results)])
