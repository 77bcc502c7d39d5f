"""The replay: makes the ops of a traced graph again, with every op's inputs cast as its family, rules and islands say.

Values carry their own dtypes; those of the traced graph say what the author declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry, tensor_util
from tensorflow.python.framework import ops as tf_ops

from precision_tensorflow.opcast import build, marks, patterns, products, regions
from precision_tensorflow.opcast.families import CONTRACTIONS, EACH, EXACT, FAMILY, SELECTING, VIEW
from precision_tensorflow.opcast.gradients import KERNEL
from precision_tensorflow.opcast.notes import F32, Value, castable, exact, fits, in_range, meet
from precision_tensorflow.opcast.record import Records
from precision_tensorflow.opcast.rules import Rules

Handler = Callable[["Frame", Any], None]
HANDLERS: dict[str, Handler] = {}
"""What enters, or otherwise treats, ops with a rule of their own; filled by the modules beside this one."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler of op types."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Replayer:
    """What the replay of all graphs of one call shares.

    Args:
        rules: the policy's decisions.
        records: what was noted when the function was traced.
        device: the kind of device ops run on unless they say otherwise (``"CPU"``, ``"GPU"``).
        native: whether products run in the device's own low-precision kernels; else low operands are multiplied in float32.
        recompute: whether known functions are computed again in the backward pass rather than their insides kept.
    """

    def __init__(self, rules: Rules, records: Records, device: str, native: bool, recompute: bool = True) -> None:
        self.rules, self.records = rules, records
        self.device, self.native, self.recompute = device, native, recompute
        self._plans: dict[int, tuple[Any, patterns.Plan]] = {}
        self.dtypes: dict[Any, Any] = {}

    def plan(self, graph: Any) -> patterns.Plan:
        """The plan of a graph, made once."""
        found = self._plans.get(id(graph))
        if found is None:
            found = self._plans[id(graph)] = (graph, patterns.plan(graph, self.records.of(graph)))
        return found[1]


class Frame:
    """The replay of one graph into the current one.

    Args:
        replayer: what is shared.
        graph: the traced graph.
        scope: the name scope of the call that it is the body of.
        region: the author's region around that call.
    """

    def __init__(self, replayer: Replayer, graph: Any, scope: str = "", region: marks.Region | None = None) -> None:
        self.rp, self.graph, self.scope, self.around = replayer, graph, scope, region
        self.records = replayer.records.of(graph)
        self.authors = replayer.records.casts.get(id(graph), {})
        self.plan = replayer.plan(graph)
        self.values: dict[str, Value] = {}
        self.made: dict[str, list[Any]] = {}
        self.casts: dict[Any, tuple[Any, Any]] = {}
        self.position = 0

    # ---- running ------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Replay the graph on values for its inputs. Gives its outputs."""
        for tensor, value in zip(self.graph.inputs, inputs, strict=True):
            self.values[tensor.name] = value
        operations = self.plan.operations
        while self.position < len(operations):
            found = self.plan.regions.get(self.position)
            if found is not None and regions.run(self, found[0]):
                self.position = found[1]
                continue
            self.step(operations[self.position])
            self.position += 1
        return [self.read(t) for t in self.graph.outputs]

    def step(self, op: Any) -> None:
        """Replay one op."""
        if op.type == "Placeholder" and op.outputs[0].name in self.values:
            return
        before = [made for c in op.control_inputs for made in self.made.get(c.name, ())]
        if before:
            with tf_ops.get_default_graph().control_dependencies(before):
                self.apply(op)
        else:
            self.apply(op)

    def apply(self, op: Any) -> None:
        """Replay one op, what must come before it being seen to."""
        region = self.region_of(op)
        if op.type in HANDLERS:
            HANDLERS[op.type](self, op)
            return
        family = FAMILY.get(op.type)
        if family is None or not any(castable(x.dtype) for x in op.inputs) or _wide(op):
            self.opaque(op)
        elif region is not None and self.in_region(op, region, family):
            return
        elif op.type in EACH:
            self.write(op, self.create(op, [self.read(x).tensor for x in op.inputs]))
        elif op.type in CONTRACTIONS:
            products.contraction(self, op, family)
        elif (op.name in self.plan.additions and products.addition(self, op)) or (
            op.name in self.plan.joined and products.joined(self, op)
        ):
            return
        elif op.type in VIEW and self.raw(op.inputs[self.operand(op)]).pending is not None:
            products.view_of_pending(self, op)
        else:
            self.ordinary(op, family)

    def ordinary(self, op: Any, family: str) -> None:
        """An op of a family, outside of any region."""
        if op.type in ("RealDiv", "Div") and self.read(op.inputs[0]).number == 1:
            family = "transcendental"  # a literal one divided: the reciprocal
        target = self.rp.rules.target(family, self.names(op))
        if target is None and op.name in self.plan.asked:
            target = F32
        self.plain(op, target, family)

    # ---- values -------------------------------------------------------------------------------------------------

    def raw(self, tensor: Any) -> Value:
        """The value of a traced tensor, a product's sum perhaps not yet rounded."""
        value = self.values[tensor.name]
        if (
            self.authors
            and self.authors.get(tensor.name, len(self.plan.operations)) <= self.position
            and not value.weak
        ) and castable(value.dtype):
            return Value(self.cast(self._rounded(value), F32), pinned=2)
        return value

    def read(self, tensor: Any) -> Value:
        """The value of a traced tensor."""
        return self._rounded(self.raw(tensor))

    def _rounded(self, value: Value) -> Value:
        if value.pending is None:
            return value
        return Value(self.cast(value._replace(pending=None), value.pending))

    def write(self, op: Any, new: Any, notes: Value | None = None) -> None:
        """Keep a new op's outputs as those of a traced op."""
        self.made[op.name] = [new]
        build.settle(op, new)
        for old, tensor in zip(op.outputs, new.outputs, strict=True):
            self.values[old.name] = Value(tensor) if notes is None else notes._replace(tensor=tensor)

    def keep(self, op: Any, values: Sequence[Value], made: Sequence[Any] = ()) -> None:
        """Keep values as the outputs of a traced op."""
        self.made[op.name] = list(made) or list(dict.fromkeys(v.tensor.op for v in values if hasattr(v.tensor, "op")))
        for old, value in zip(op.outputs, values, strict=True):
            value.tensor.set_shape(old.shape)
            self.values[old.name] = value

    def create(self, op: Any, inputs: Sequence[Any], **options: Any) -> Any:
        """Make an op again in the current graph, under its name."""
        return build.create(op, inputs, name=self.where(op.name), **options)

    def where(self, name: str) -> str:
        """The name of a traced op in the new graph."""
        return f"{self.scope}/{name}" if self.scope else name

    def cast(self, value: Value, dtype: tf.DType, kernel: bool | None = None, gradient: str | None = None) -> Any:
        """Cast a value, once however often it is asked for. A constant beyond the range becomes the largest number."""
        x = value.tensor
        if x.dtype == dtype or not castable(x.dtype):
            return x
        graph = tf_ops.get_default_graph()
        key = (id(x), dtype, kernel, gradient, id(graph))
        if key not in self.casts:
            with graph.control_dependencies(None):
                self.casts[key] = (x, self._cast(value, dtype, kernel, gradient))
        return self.casts[key][1]

    def _cast(self, value: Value, dtype: tf.DType, kernel: bool | None, gradient: str | None) -> Any:
        x, number = value.tensor, value.number
        if number is not None and dtype != F32:
            inside = in_range(number, dtype)
            if x.shape.is_fully_defined():
                return tf.constant(inside, dtype, x.shape)
            if inside != number:
                return tf.fill(tf.shape(x), tf.constant(inside, dtype))
        return build.cast(x, dtype, kernel=kernel, gradient=gradient)

    def names(self, op: Any) -> tuple[str, ...]:
        """The module paths an op counts as being in."""
        if not self.rp.rules.named:
            return ()
        scope = "/".join(part for part in (self.scope, op.name.rpartition("/")[0]) if part)
        return self.rp.rules.names(self.rp.records, self.records.get(op.name), scope)

    def region_of(self, op: Any) -> marks.Region | None:
        """The author's region that an op was made in."""
        noted = self.records.get(op.name)
        return noted.region if noted is not None and noted.region is not None else self.around

    def operand(self, op: Any) -> int:
        """The position of an op's first floating operand."""
        return next(i for i, x in enumerate(op.inputs) if castable(x.dtype))

    # ---- ops ----------------------------------------------------------------------------------------------------

    def opaque(self, op: Any) -> None:
        """What sees the dtypes it was traced with."""
        inputs = [self.declared(self.read(x), x) for x in op.inputs]
        self.write(op, self.create(op, inputs), OPAQUE_NOTES.get(op.type))

    def declared(self, value: Value, tensor: Any) -> Any:
        """A value in the dtype of its traced tensor."""
        return self.cast(value, tensor.dtype) if castable(tensor.dtype) and castable(value.dtype) else value.tensor

    def plain(self, op: Any, target: tf.DType | None, family: str) -> None:
        """Cast the floating inputs to one dtype and make the op. Constants take the dtype of what they meet."""
        values = [self.read(x) for x in op.inputs]
        attrs = [attr for attr, _ in build.signature(op).inputs]
        moving = [
            i
            for i, v in enumerate(values)
            if attrs[i] is not None and castable(v.dtype) and castable(op.inputs[i].dtype)
        ]
        strong = [values[i] for i in moving if not values[i].weak]
        back = None
        if target is None:
            target = meet([v.dtype for v in strong]) if strong else F32
            if target != F32 and op.type not in SELECTING:
                numbers = [values[i].number for i in moving if values[i].weak]
                if any(n is None or not exact(n, target) for n in numbers):
                    # with the constant as it is, then rounded; not where that would lose it
                    back = target if all(n is not None and fits(n, target) for n in numbers) else None
                    target = F32
        inside = family == "elementwise" and op.type not in EXACT
        if target != F32 and (inside or not self.computes(op, attrs, moving, target)):
            back, target = target, F32
        low = any(v.dtype != F32 for v in strong)
        again = target == F32 and low and (back is not None or family in ("softmax", "transcendental", "norm", "loss"))
        kernel = (back is not None) if again else None
        inputs = [self.cast(v, target, kernel) if i in moving else v.tensor for i, v in enumerate(values)]
        for i, x in enumerate(op.inputs):
            if i not in moving and castable(x.dtype):  # an operand with a dtype of its own
                inputs[i] = self.declared(values[i], x)
        gradient = KERNEL if again and self.rp.recompute and not _has_gradient(op) else None
        new = self.create(op, inputs, gradient=gradient)
        notes = _notes(op, values, moving)
        if notes.weak and notes.number is None:
            notes = notes._replace(number=_fold(op, values))
        self.write(op, new, notes)
        if back is not None:
            for old, tensor in zip(op.outputs, new.outputs, strict=True):
                if castable(tensor.dtype):
                    self.values[old.name] = notes._replace(tensor=build.cast(tensor, back), pinned=0)

    def computes(self, op: Any, attrs: Sequence[str | None], moving: Sequence[int], dtype: tf.DType) -> bool:
        """Whether the device has a kernel for an op in a dtype."""
        device = build.device_of(op, self.rp.device)
        return all(build.computes(op.type, str(a), dtype, device) for a in {attrs[i] for i in moving})

    # ---- the author's regions -----------------------------------------------------------------------------------

    def in_region(self, op: Any, region: marks.Region, family: str) -> bool:
        """An op in ``mp.island`` or ``mp.op``: what comes from outside is cast on the way in, inside all follow their inputs."""
        if region.dtype is not None:
            target = tf.as_dtype(region.dtype)
        else:
            decided = self.rp.rules.target(str(region.family), self.names(op))
            if decided is None:
                self.plain(op, None, "elementwise")
                return True
            target = decided
        if op.type in CONTRACTIONS and target != F32:
            products.contraction(self, op, family, target)
        elif family == "shape" and not any(self._enters(x, region) for x in op.inputs):
            self.plain(op, None, family)
        else:
            self.plain(op, target, family)
        if region.dtype is not None:
            for tensor in op.outputs:
                value = self.values[tensor.name]
                if castable(value.dtype) and value.dtype == F32:
                    self.values[tensor.name] = value._replace(pinned=2)
        return True

    def _enters(self, tensor: Any, region: marks.Region) -> bool:
        noted = self.records.get(tensor.op.name)
        return noted is None or noted.region != region


OPAQUE_NOTES = {"OneHot": Value(None, weak=True), "ReadVariableOp": Value(None, stored=True)}


def _wide(op: Any) -> bool:
    return any(x.dtype == tf.float64 for x in op.inputs)


def _has_gradient(op: Any) -> bool:
    return "_gradient_op_type" in op.node_def.attr


def _notes(op: Any, values: Sequence[Value], moving: Sequence[int]) -> Value:
    known = [values[i] for i in moving]
    strong = [v for v in known if not v.weak]
    if op.type in VIEW and len(known) == 1:
        kept = known[0]
        return Value(None, kept.stored, kept.pinned, kept.weak, kept.number)
    return Value(None, pinned=int(any(v.pinned for v in strong)), weak=not strong)


def _fold(op: Any, values: Sequence[Value]) -> float | None:
    """The number that an op makes of numbers; None if it is not known."""
    numbers = [v.number for v in values]
    if len(op.outputs) != 1 or op.outputs[0].shape.rank != 0 or any(n is None for n in numbers):
        return None
    definition = op_def_registry.get(op.type)
    if {a.name for a in definition.attr} != {"T"}:
        return None
    names = [argument.name for argument in definition.input_arg]
    with tf.init_scope():
        constants = {n: tf.constant(number, x.dtype) for n, number, x in zip(names, numbers, op.inputs, strict=True)}
        return float(getattr(tf.raw_ops, op.type)(**constants))


@handles("Const")
def _const(frame: Frame, op: Any) -> None:
    new = frame.create(op, [])
    note = None
    if castable(op.outputs[0].dtype):
        array = tensor_util.constant_value(op.outputs[0])
        if array is not None and array.size and (array == array.flat[0]).all():
            # one number takes the dtype of what it meets; a tensor full of it is a tensor
            note = Value(None, stored=array.size > 1, weak=array.size == 1, number=float(array.flat[0]))
        else:
            note = Value(None, stored=True)
    frame.write(op, new, note)


@handles("Fill")
def _fill(frame: Frame, op: Any) -> None:
    value = frame.read(op.inputs[1])
    if not castable(op.inputs[1].dtype):
        frame.opaque(op)
        return
    new = frame.create(op, [frame.read(op.inputs[0]).tensor, frame.declared(value, op.inputs[1])])
    frame.write(op, new, Value(None, weak=value.weak and op.outputs[0].shape.num_elements() == 1, number=value.number))


@handles("Cast")
def _author_cast(frame: Frame, op: Any) -> None:
    """An author's cast is obeyed; a mask made of a condition takes the dtype of what it meets."""
    value, wanted = frame.read(op.inputs[0]), op.outputs[0].dtype
    if castable(wanted) and castable(value.dtype):
        cast = frame.cast(value, wanted) if value.dtype != wanted else value.tensor
        frame.keep(op, [Value(cast, pinned=2 if wanted == F32 else 0, weak=value.weak, number=value.number)])
        return
    new = frame.create(op, [value.tensor])
    number = tensor_util.constant_value(op.outputs[0]) if castable(wanted) and op.outputs[0].shape.rank == 0 else None
    weak = castable(wanted) and (op.inputs[0].dtype == tf.bool or op.outputs[0].shape.rank == 0)
    frame.write(op, new, Value(None, weak=weak and not op.inputs[0].dtype.is_floating, number=_number(number)))


def _number(array: Any) -> float | None:
    return None if array is None else float(array)
