"""What a function's backward pass keeps of its forward pass: for measuring, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph as tf_func_graph

_SAME = frozenset(("Identity", "StopGradient"))


def saved_tensors(concrete: Any, variables: Sequence[Any], output: int = 0) -> list[Any]:
    """The distinct tensors of a concrete function that its gradient captures, parameters and inputs themselves excluded.

    Args:
        concrete: a function traced by ``get_concrete_function``.
        variables: what the gradient is taken with respect to.
        output: which of its flat outputs is differentiated.
    """
    graph = concrete.graph
    resources = {id(outer): inner for outer, inner in graph.captures}
    inside = [resources[id(v.handle)] for v in variables if id(v.handle) in resources]
    with graph.as_default():
        backward = tf_func_graph.FuncGraph("precision_backward")
    with backward.as_default():
        tf.gradients([graph.outputs[output]], inside, [tf.ones_like(graph.outputs[output])])
    found = {}
    for outer, _ in backward.captures:
        while outer.op.type in _SAME:
            outer = outer.op.inputs[0]
        if outer.op.type not in ("Placeholder", "ReadVariableOp", "Const") and outer.dtype != tf.resource:
            found[outer.name] = outer
    return list(found.values())
