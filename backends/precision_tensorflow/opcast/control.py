"""Control flow and calls: branches, loops and functions are entered; what they carry comes to one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import graph_only_ops
from tensorflow.python.framework import func_graph as tf_func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.framework import tensor_util

from precision_tensorflow.opcast import build, marks
from precision_tensorflow.opcast.gradients import Rule, with_rule
from precision_tensorflow.opcast.notes import F32, Value, castable, meet
from precision_tensorflow.opcast.record import trace
from precision_tensorflow.opcast.replay import Frame, handles


def body_of(op: Any, attr: str, index: int | None = None) -> Any:
    """The graph of a function that an op calls."""
    value = op.get_attr(attr)
    name = value.name if index is None else value[index].name
    found = build.function_of(op.graph, name)
    return found.graph


def _inner(frame: Frame, op: Any, graph: Any, attr: str) -> Frame:
    return Frame(frame.rp, graph, frame.where(op.name) if attr == "inline" else "", frame.region_of(op))


# ---- calls ------------------------------------------------------------------------------------------------------


@handles("PartitionedCall", "StatefulPartitionedCall")
def _call(frame: Frame, op: Any) -> None:
    graph = body_of(op, "f")
    values = [frame.read(x) for x in op.inputs]
    attrs = op.node_def.attr
    if "_XlaMustCompile" in attrs and attrs["_XlaMustCompile"].b:
        _compiled(frame, op, graph, values)
        return
    inner = _inner(frame, op, graph, "inline")
    results = inner.run(values)
    made = [m for name in (o.name for o in graph.control_outputs) for m in inner.made.get(name, ())]
    made += [v.tensor.op for v in results if hasattr(v.tensor, "op")]
    frame.keep(op, results, list(dict.fromkeys(made)) or [tf.raw_ops.NoOp()])


def _compiled(frame: Frame, op: Any, graph: Any, values: list[Value]) -> None:
    """A function that the author has compiled stays one."""
    notes: list[Value] = []

    def body() -> list[Any]:
        notes[:] = _inner(frame, op, graph, "own").run(values)
        return [v.tensor for v in notes]

    body.__name__ = op.name.rpartition("/")[2]
    tensors = tf.function(body, jit_compile=True, autograph=False)()
    kept = [n._replace(tensor=t, number=None) for n, t in zip(notes, tensors, strict=True)]
    frame.keep(op, kept, [t.op for t in tensors] or [_last(op.type)])


# ---- branches ---------------------------------------------------------------------------------------------------


@handles("If", "StatelessIf")
def _if(frame: Frame, op: Any) -> None:
    graphs = [body_of(op, "then_branch"), body_of(op, "else_branch")]
    condition = frame.read(op.inputs[0]).tensor
    if condition.dtype != tf.bool:
        condition = tf.cast(condition, tf.bool)
    _branches(frame, op, graphs, lambda fns, name: tf.cond(condition, *fns, name=name))


@handles("Case", "StatelessCase")
def _case(frame: Frame, op: Any) -> None:
    graphs = [body_of(op, "branches", i) for i in range(len(op.get_attr("branches")))]
    index = frame.read(op.inputs[0]).tensor
    _branches(frame, op, graphs, lambda fns, name: tf.switch_case(index, list(fns), name=name))


def _branches(frame: Frame, op: Any, graphs: list[Any], build_op: Callable[..., Any]) -> None:
    values = [frame.read(x) for x in op.inputs[1:]]
    found = [_dtypes(frame, op, graph, values) for graph in graphs]
    agreed = [_agree([f[i] for f in found]) for i in range(len(op.outputs))]

    def branch(graph: Any) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            inner = _inner(frame, op, graph, "own")
            results = inner.run(values)
            cast = [inner.cast(v, d) if d is not None else v.tensor for v, d in zip(results, agreed, strict=True)]
            return [tf.identity(t) if t.dtype != tf.variant and t.dtype != tf.resource else t for t in cast] or [
                tf.no_op()
            ]

        return run

    outputs = build_op([branch(g) for g in graphs], frame.where(op.name))
    if not op.outputs:
        frame.made[op.name] = [outputs.op if isinstance(outputs, tf.Tensor) else _last(*_IFS)]
        return
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    frame.keep(op, [Value(t) for t in outputs], _sources(outputs))


_IFS = ("If", "StatelessIf", "Case", "StatelessCase")


def _agree(found: Sequence[tuple[Any, bool]]) -> tf.DType | None:
    """The dtype that values meet in; None for those that have none to choose."""
    if not castable(found[0][0]):
        return None
    strong = [d for d, weak in found if not weak]
    return meet(strong) if strong else F32


def _dtypes(frame: Frame, op: Any, graph: Any, values: Sequence[Value]) -> list[tuple[Any, bool]]:
    """The dtypes a body gives for given inputs, and which of them depend on constants only. Found by a trial replay."""
    region = frame.region_of(op)
    key = (id(graph), region, tuple((v.dtype, v[1:5]) for v in values))
    if key not in frame.rp.dtypes:
        scratch = tf_func_graph.FuncGraph("precision_trial")
        with scratch.as_default():
            results = Frame(frame.rp, graph, "", region).run(values)
        frame.rp.dtypes[key] = (graph, [(v.dtype, v.weak) for v in results])
    found: list[tuple[Any, bool]] = frame.rp.dtypes[key][1]
    return found


def _last(*types: str) -> Any:
    return next(op for op in reversed(tf_ops.get_default_graph().get_operations()) if op.type in types)


def _sources(tensors: Sequence[Any]) -> list[Any]:
    """The control-flow ops that tensors come from."""
    found = []
    for tensor in tensors:
        op = tensor.op
        while op.type == "Identity":
            op = op.inputs[0].op
        found.append(op)
    return list(dict.fromkeys(found))


# ---- loops ------------------------------------------------------------------------------------------------------


@handles("While", "StatelessWhile")
def _while(frame: Frame, op: Any) -> None:
    condition, body = body_of(op, "cond"), body_of(op, "body")
    values = [frame.read(x) for x in op.inputs]
    names = [t.name for t in body.inputs]
    carried = [i for i, t in enumerate(body.outputs) if _source(t) != names[i]]
    dtypes = _fixed_point(frame, op, body, values, carried)
    starts = [frame.cast(values[i], dtypes[i]) if dtypes[i] is not None else values[i].tensor for i in carried]

    def all_values(carries: Sequence[Any]) -> list[Value]:
        inside = list(values)
        for i, tensor in zip(carried, carries, strict=True):
            inside[i] = Value(tensor)
        return inside

    def test(*carries: Any) -> Any:
        return _inner(frame, op, condition, "own").run(all_values(carries))[0].tensor

    def step(*carries: Any) -> list[Any]:
        inner = _inner(frame, op, body, "own")
        results = inner.run(all_values(carries))
        return [inner.cast(results[i], dtypes[i]) if dtypes[i] is not None else results[i].tensor for i in carried]

    outputs = tf.while_loop(
        test,
        step,
        starts,
        shape_invariants=[_invariant(body.inputs[i]) for i in carried],
        parallel_iterations=op.get_attr("parallel_iterations"),
        maximum_iterations=_maximum(op, values),
        name=frame.where(op.name),
    )
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    results = list(values)
    for i, tensor in zip(carried, outputs, strict=True):
        results[i] = Value(tensor)
    frame.made[op.name] = _sources(outputs)
    for old, value in zip(op.outputs, results, strict=True):
        frame.values[old.name] = value


def _source(tensor: Any) -> str:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return str(tensor.name)


def _invariant(tensor: Any) -> Any:
    return tensor.shape if tensor.dtype not in (tf.variant, tf.resource) else tf.TensorShape(None)


def _maximum(op: Any, values: Sequence[Value]) -> Any:
    """The bound on the number of iterations, which XLA needs for gradients: While's second input, by TensorFlow's custom."""
    if len(op.inputs) < 2 or op.inputs[1].dtype != tf.int32 or op.inputs[1].shape.rank != 0:
        return None
    if "maximum_iterations" not in op.inputs[1].op.name:
        return None
    number = tensor_util.constant_value(op.inputs[1])
    return int(number) if number is not None and number >= 0 else None


def _fixed_point(
    frame: Frame, op: Any, body: Any, values: Sequence[Value], carried: Sequence[int]
) -> dict[int, tf.DType | None]:
    """Dtypes that a loop's carries can start with and come back in."""
    low = frame.rp.rules.compute
    dtypes: dict[int, tf.DType | None] = {
        i: None if not castable(values[i].dtype) or not castable(body.inputs[i].dtype)
        else low if values[i].weak else values[i].dtype
        for i in carried
    }  # fmt: skip
    free = {i for i in carried if values[i].weak and dtypes[i] is not None}
    for _ in range(2 * len(carried) + 2):
        scratch = tf_func_graph.FuncGraph("precision_trial")
        with scratch.as_default():
            inside = list(values)
            for i in carried:
                dtype = dtypes[i] or body.inputs[i].dtype
                placeholder = graph_only_ops.graph_placeholder(dtype, body.inputs[i].shape)
                build.handle_data_util.copy_handle_data(body.inputs[i], placeholder)
                inside[i] = Value(placeholder)
            found = [(v.dtype, v.weak) for v in Frame(frame.rp, body, "", frame.region_of(op)).run(inside)]
        changed = False
        for i in carried:
            if dtypes[i] is None or found[i][1]:
                continue
            meets = found[i][0] if i in free else meet([dtypes[i], found[i][0]])
            free.discard(i)
            changed |= meets != dtypes[i]
            dtypes[i] = meets
        if not changed:
            break
    return dtypes


# ---- gradients of the author's own ------------------------------------------------------------------------------


@handles("IdentityN")
def _identity_n(frame: Frame, op: Any) -> None:
    values = [frame.read(x) for x in op.inputs]
    if "_gradient_op_type" not in op.node_def.attr:
        new = frame.create(op, [v.tensor for v in values])
        frame.write(op, new)
        for old, tensor, value in zip(op.outputs, new.outputs, values, strict=True):
            frame.values[old.name] = value._replace(tensor=tensor)
        return
    tensors = [v.tensor for v in values]
    outputs = with_rule(_Author(frame, op, values), tensors, tensors, name=frame.where(op.name))
    frame.keep(op, [Value(t, pinned=int(bool(v.pinned))) for t, v in zip(outputs, values, strict=True)])


class _Author(Rule):
    """The rule of a ``tf.custom_gradient``, traced when it is asked for and replayed like everything else."""

    def __init__(self, frame: Frame, op: Any, values: Sequence[Value]) -> None:
        super().__init__(len(values), self._backward)
        self.frame, self.old, self.values = frame, op, values

    def _backward(self, grads: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        rule = tf_ops.get_gradient_function(self.old)
        given = [i for i, g in enumerate(grads) if g is not None]
        places: list[int] = []

        def traced(*tensors: Any) -> list[Any]:
            by_place = dict(zip(given, tensors, strict=True))
            found = rule(self.old, *[by_place.get(i) for i in range(len(grads))])
            found = list(found) if isinstance(found, (list, tuple)) else [found]
            places[:] = [i for i, g in enumerate(found) if g is not None]
            return [tf.convert_to_tensor(found[i]) for i in places]

        specs = [tf.TensorSpec(self.old.outputs[i].shape, self.old.outputs[i].dtype) for i in given]
        with self.old.graph.as_default(), marks.replaying():
            concrete, records = trace(traced, specs, traced.__code__, casts=False, autograph=False)
        shared = self.frame.rp
        rp = type(shared)(shared.rules, records, shared.device, shared.native, shared.recompute)
        captured = [self._outside(t) for t in concrete.captured_inputs]
        values = [Value(grads[i]) for i in given]
        with marks.replaying():
            results = Frame(rp, concrete.graph).run([*values, *captured])
        found: list[Any] = [None] * len(inputs)
        for i, value in zip(places, results, strict=True):
            like = self.values[i].tensor
            found[i] = build.cast(value.tensor, like.dtype) if castable(like.dtype) else value.tensor
        return found

    def _outside(self, tensor: Any) -> Value:
        known = self.frame.values.get(tensor.name) if hasattr(tensor, "graph") else None
        return self.frame.read(tensor) if known is not None else Value(tensor, stored=True)
