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


@tf.RegisterGradient(PASS)
def _pass(op: Any, grad: Any) -> Any:
    """Of a cast on the way into a product: the product's gradient as it comes, in the end in the dtype of what was cast."""
    return grad if op.outputs[0].dtype == F32 else build.cast(grad, op.inputs[0].dtype)


@tf.RegisterGradient(KERNEL)
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
        self.inputs: list[Any] = []

    def __call__(self, op: Any, *grads: Any) -> list[Any]:
        """What TensorFlow calls."""
        inputs = self.inputs if op is None else list(op.inputs)
        return [None] * self.results + list(self.backward(grads[: self.results], inputs[self.results :]))


def with_rule(rule: Rule, results: Sequence[Any], through: Sequence[Any], name: str | None = None) -> list[Any]:
    """Give results a gradient of their own with respect to other tensors."""
    graph = tf_ops.get_default_graph()
    rule.inputs = [*results, *through]
    # The graph keeps the rule, and with it what the rule holds; TensorFlow's registry, which never forgets, does not.
    build.keep(graph, rule)
    registered = f"PrecisionAutocastRule{next(_numbers)}"
    weak = weakref.ref(rule)

    def gradient(op: Any, *grads: Any) -> list[Any]:
        alive = weak()
        return alive(op, *grads) if alive is not None else [None] * len(op.inputs)

    tf.RegisterGradient(registered)(gradient)
    with graph.gradient_override_map({"IdentityN": registered}):
        outputs = tf.raw_ops.IdentityN(input=rule.inputs, name=name)
    return list(outputs[: len(results)])
