"""Products and their biases: low operands, a float32 sum, one rounding; and what stands for it where a device has no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from precision_tensorflow.opcast import build
from precision_tensorflow.opcast.gradients import KERNEL, PASS
from precision_tensorflow.opcast.notes import F32, Value, castable, meet

if TYPE_CHECKING:
    from precision_tensorflow.opcast.replay import Frame


def contraction(frame: Frame, op: Any, family: str, target: tf.DType | None = None) -> None:
    """A matrix product or convolution: low operands, a float32 sum, one rounding (after the bias, if there is one)."""
    values = [frame.read(x) for x in op.inputs]
    floats = [i for i, x in enumerate(op.inputs) if castable(x.dtype) and castable(values[i].dtype)]
    pair = [values[i] for i in floats]
    kept = any(v.pinned == 2 for v in pair) or all(v.pinned for v in pair)
    target = target or frame.rp.rules.target(family, frame.names(op)) or meet([v.dtype for v in pair])
    if kept or target == F32:
        inputs = [frame.cast(v, F32) for v in values]
        frame.write(op, frame.create(op, inputs), Value(None, pinned=int(kept)))
        return
    steps = [i for i in floats if op.inputs[i].op.name in frame.plan.inner and values[i].dtype == F32]
    low = {i: frame.cast(values[i], target, gradient=PASS if values[i].dtype == F32 else None)
           for i in floats if i not in steps}  # fmt: skip
    attrs = [attr for attr, _ in build.signature(op).inputs]
    if frame.rp.native and not steps and frame.computes(op, attrs, floats, target):
        inputs = [low.get(i, v.tensor) for i, v in enumerate(values)]
        frame.write(op, frame.create(op, inputs))
        if op.name in frame.plan.wide:
            frame.values[op.outputs[0].name] = Value(build.cast(frame.values[op.outputs[0].name].tensor, F32))
        return
    inputs = [v.tensor for v in values]
    for i, x in low.items():
        gradient = PASS if values[i].dtype == F32 else None
        inputs[i] = frame.cast(Value(x), F32, kernel=True, gradient=gradient)
    new = frame.create(op, inputs, gradient=KERNEL)
    frame.write(op, new, Value(None, pending=target if op.name in frame.plan.biased else None))
    if not any(op.name in names for names in (frame.plan.biased, frame.plan.wide, frame.plan.inner)):
        frame.values[op.outputs[0].name] = Value(build.cast(new.outputs[0], target))


def view_of_pending(frame: Frame, op: Any) -> None:
    """A product's float32 sum put into another shape before its bias is added."""
    value = frame.raw(op.inputs[frame.operand(op)])
    inputs = [value.tensor if i == frame.operand(op) else frame.read(x).tensor for i, x in enumerate(op.inputs)]
    frame.write(op, frame.create(op, inputs), Value(None, pending=value.pending))


def addition(frame: Frame, op: Any) -> bool:
    """A bias added to a product's float32 sum, and the one rounding. False if it is no bias of that product after all."""
    which = frame.plan.additions[op.name]
    total, bias = frame.raw(op.inputs[1 - which]), frame.read(op.inputs[which])
    if total.pending is None or not castable(bias.dtype):
        if total.pending is None and castable(total.dtype) and total.dtype != F32 and bias.stored and not bias.pinned:
            # a low kernel's product: its bias is low too
            pair = {1 - which: total.tensor, which: frame.cast(bias, total.dtype)}
            attrs = [attr for attr, _ in build.signature(op).inputs]
            if frame.computes(op, attrs, [0, 1], total.dtype):
                frame.write(op, frame.create(op, [pair[0], pair[1]]))
                return True
        return False
    if not bias.stored or bias.pinned:
        return False
    target = frame.rp.rules.target("matmul", frame.names(op)) or total.pending
    wide = frame.cast(bias, F32)
    if target != F32:
        narrow = frame.cast(bias, target, gradient=PASS)
        wide = frame.cast(Value(narrow), F32, kernel=True, gradient=PASS if bias.dtype == F32 else None)
    pair = {1 - which: total.tensor, which: wide}
    new = frame.create(op, [pair[0], pair[1]])
    frame.write(op, new)
    frame.values[op.outputs[0].name] = Value(build.cast(new.outputs[0], total.pending))
    return True


def joined(frame: Frame, op: Any) -> bool:
    """A bias added to a sum of several products, which is low: the bias counts as low too."""
    which = frame.plan.joined[op.name]
    total, bias = frame.read(op.inputs[1 - which]), frame.read(op.inputs[which])
    if not castable(total.dtype) or total.dtype == F32 or bias.dtype != F32 or not bias.stored or bias.pinned:
        return False
    target = frame.rp.rules.target("matmul", frame.names(op))
    if target is not None and target != total.dtype:
        return False
    narrow = frame.cast(bias, total.dtype, gradient=PASS)
    pair = {1 - which: frame.cast(total, F32, kernel=True), which: frame.cast(Value(narrow), F32, True, PASS)}
    new = frame.create(op, [pair[0], pair[1]])
    frame.write(op, new)
    frame.values[op.outputs[0].name] = Value(build.cast(new.outputs[0], total.dtype))
    return True
