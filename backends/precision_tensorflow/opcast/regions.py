"""Known functions as one op: computed in the family's dtype throughout, and again in the backward pass from their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from precision_tensorflow.opcast import build
from precision_tensorflow.opcast.families import CONTRACTIONS, VIEW
from precision_tensorflow.opcast.gradients import Rule, with_rule
from precision_tensorflow.opcast.notes import F32, Value, castable, meet
from precision_tensorflow.opcast.patterns import Region

if TYPE_CHECKING:
    from precision_tensorflow.opcast.replay import Frame


def run(frame: Frame, region: Region) -> bool:
    """Replay a known function. False if it is to go op by op."""
    if any(frame.region_of(op) is not None for op in region.ops) or not _ready(frame, region):
        return False
    for op in region.hoisted:
        frame.step(op)
    inputs = [frame.read(t) for t in region.inputs]
    strong = [v for v in inputs if castable(v.dtype) and not v.weak]
    if not strong:
        return _op_by_op(frame, region, None)
    target = frame.rp.rules.target(region.family, frame.names(region.ops[-1]))
    back = None
    if region.family == "elementwise":
        back = target or meet([v.dtype for v in strong])
        target = F32
    elif region.family == "attention" and target is not None and target != F32:
        if frame.rp.native:
            return _op_by_op(frame, region, None)
        back, target = target, F32
    if target != F32:
        return _op_by_op(frame, region, target)
    low = back is not None and back != F32
    inside = _Inside(frame, region, kernel=True if low else None)
    if region.family == "attention" and low:
        inputs = [_operand(frame, v, old, region, back) for v, old in zip(inputs, region.inputs, strict=True)]
    before = [m for op in region.ops for c in op.control_inputs for m in frame.made.get(c.name, ())]
    with tf.control_dependencies(before):
        tensors = inside([v.tensor for v in inputs])
    dtypes = [back if low and result and castable(t.dtype) else t.dtype
              for t, result in zip(tensors, region.results, strict=True)]  # fmt: skip
    tensors = [build.cast(t, d) if castable(t.dtype) else t for t, d in zip(tensors, dtypes, strict=True)]
    if frame.rp.recompute and all(region.results) and any(castable(t.dtype) for t in tensors):
        rule = Rule(len(tensors), _Again(inside))
        tensors = with_rule(
            rule, tensors, [v.tensor for v in inputs], name=f"{frame.where(region.ops[-1].name)}_region"
        )
    pinned = int(any(v.pinned for v in strong))
    for old, tensor in zip(region.outputs, tensors, strict=True):
        tensor.set_shape(old.shape)
        frame.values[old.name] = Value(tensor, pinned=pinned)
    for op in region.ops:
        frame.made[op.name] = [t.op for t in tensors]
    return True


def _operand(frame: Frame, value: Value, old: Any, region: Region, low: tf.DType) -> Value:
    """Queries, keys and values come low into attention; a mask or a bias that is added to the scores as it is."""
    names = {op.name for op in region.ops}
    users = [u for u in old.consumers() if u.name in names]
    if not castable(value.dtype) or value.weak or not all(u.type in _MULTIPLYING for u in users):
        return value
    return value._replace(tensor=frame.cast(value, low))


_MULTIPLYING = CONTRACTIONS | VIEW | {"Mul", "RealDiv", "Cast"}


def _ready(frame: Frame, region: Region) -> bool:
    """Whether everything that comes from outside is there already."""
    hoisted = {t.name for op in region.hoisted for t in op.outputs}
    return all(t.name in frame.values or t.name in hoisted for t in region.inputs)


def _op_by_op(frame: Frame, region: Region, target: tf.DType | None) -> bool:
    """In a dtype that a rule asks for, or without any floating input."""
    for op in region.ops:
        if target is None or not any(castable(x.dtype) for x in op.inputs):
            frame.step(op)
        else:
            frame.plain(op, target, region.family)
    return True


class _Inside:
    """The function: from its inputs to its outputs in the dtypes it was traced with."""

    def __init__(self, frame: Frame, region: Region, kernel: bool | None) -> None:
        self.frame, self.region, self.kernel = frame, region, kernel

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        values = {old.name: self._widened(old, x) for old, x in zip(self.region.inputs, inputs, strict=True)}
        for op in self.region.ops:
            new = build.create(op, [values[x.name] for x in op.inputs], name=self.frame.where(op.name))
            build.settle(op, new)
            values.update((old.name, tensor) for old, tensor in zip(op.outputs, new.outputs, strict=True))
        return [values[t.name] for t in self.region.outputs]

    def _widened(self, old: Any, x: Any) -> Any:
        return build.cast(x, old.dtype, kernel=self.kernel) if castable(old.dtype) and castable(x.dtype) else x


class _Again:
    """Its gradient: computed again from its inputs, in the backward pass."""

    def __init__(self, inside: _Inside) -> None:
        self.inside = inside

    def __call__(self, grads: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        given = [g for g in grads if g is not None]
        if not given:
            return [None] * len(inputs)
        with tf.control_dependencies(given):  # so that it is not taken for what the forward pass has computed
            inputs = [tf.identity(x) for x in inputs]
        results = self.inside(inputs)
        pairs = [(y, build.cast(g, y.dtype)) for y, g in zip(results, grads, strict=True) if g is not None]
        floats = [i for i, x in enumerate(inputs) if castable(x.dtype)]
        found = tf.gradients([y for y, _ in pairs], [inputs[i] for i in floats], [g for _, g in pairs])
        by_input = dict(zip(floats, found, strict=True))
        return [by_input.get(i) for i in range(len(inputs))]
