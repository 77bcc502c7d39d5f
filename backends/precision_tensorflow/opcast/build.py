"""Making an op again in another graph, with inputs of other dtypes: its attributes, its name, its device, its order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# Ops are made from their types and attributes, as TensorFlow's own graph importer does it, with functions it does not export.
from tensorflow.core.framework import attr_value_pb2, types_pb2
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import handle_data_util

_FLOATS = frozenset((types_pb2.DT_FLOAT, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16))


class Signature(NamedTuple):
    """How an op's type attributes follow from its inputs.

    Attributes:
        inputs: for each input the attribute that holds its dtype (None: fixed), and the place in it, for lists.
        outputs: the same for outputs.
    """

    inputs: tuple[tuple[str | None, int | None], ...]
    outputs: tuple[tuple[str | None, int | None], ...]


def signature(op: Any) -> Signature:
    """The signature of an op."""
    definition = op_def_registry.get(op.type)
    if definition is None or any(
        a.number_attr or a.type_list_attr for a in (*definition.input_arg, *definition.output_arg)
    ):
        lengths = _lengths(op, definition)
    else:
        lengths = ()
    return _signature(op.type, lengths)


def _lengths(op: Any, definition: Any) -> tuple[tuple[str, int], ...]:
    if definition is None:
        return (("?", len(op.inputs)), ("?", len(op.outputs)))
    names = {a.number_attr or a.type_list_attr for a in (*definition.input_arg, *definition.output_arg)} - {""}
    found = []
    for name in sorted(names):
        value = op.get_attr(name)
        found.append((name, value if isinstance(value, int) else len(value)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _signature(op_type: str, lengths: tuple[tuple[str, int], ...]) -> Signature:
    definition = op_def_registry.get(op_type)
    if definition is None:
        return Signature(((None, None),) * lengths[0][1], ((None, None),) * lengths[1][1])
    count = dict(lengths)

    def flat(arguments: Any) -> tuple[tuple[str | None, int | None], ...]:
        found: list[tuple[str | None, int | None]] = []
        for argument in arguments:
            if argument.type_list_attr:
                found += [(argument.type_list_attr, i) for i in range(count[argument.type_list_attr])]
            else:
                times = count[argument.number_attr] if argument.number_attr else 1
                found += [(argument.type_attr or None, None)] * times
        return tuple(found)

    return Signature(flat(definition.input_arg), flat(definition.output_arg))


@functools.lru_cache(maxsize=8192)
def computes(op_type: str, attr: str, dtype: tf.DType, device: str) -> bool:
    """Whether an op type has a kernel for a dtype on a kind of device (``"CPU"``, ``"GPU"``)."""
    definition = op_def_registry.get(op_type)
    allowed = next((a.allowed_values.list.type for a in definition.attr if a.name == attr), ())
    number = dtype.as_datatype_enum
    if allowed and number not in allowed:
        return False
    found = [k for k in kernels.get_registered_kernels_for_op(op_type).kernel if k.device_type == device]
    for kernel in found:
        constraints = [c.allowed_values.list.type for c in kernel.constraint if c.name == attr]
        if not constraints or all(number in types for types in constraints):
            return True
    return not found and device != "CPU" and computes(op_type, attr, dtype, "CPU")


def device_of(op: Any, default: str) -> str:
    """The kind of device an op is placed on."""
    name = op.device.upper()
    return "GPU" if "GPU" in name else "CPU" if "CPU" in name else default


def type_attr(dtype: tf.DType) -> Any:
    """A dtype as an attribute."""
    return attr_value_pb2.AttrValue(type=dtype.as_datatype_enum)


def create(op: Any, inputs: Sequence[Any], name: str | None = None, gradient: str | None = None, **changed: Any) -> Any:
    """Make an op again in the current graph.

    Args:
        op: the op as it was traced.
        inputs: its inputs; dtypes may differ from those that were traced.
        name: what to call it (made unique).
        gradient: the registered gradient to use in the place of its own.
        changed: attributes to change.
    """
    graph = tf_ops.get_default_graph()
    attrs = {k: v for k, v in op.node_def.attr.items() if k not in ("_class", "_output_shapes", "_gradient_op_type")}
    for (attr, place), x in zip(signature(op).inputs, inputs, strict=True):
        if attr is None:
            continue
        number = x.dtype.as_datatype_enum
        if place is None:
            if attrs[attr].type != number:
                attrs[attr] = attr_value_pb2.AttrValue(type=number)
        elif attrs[attr].list.type[place] != number:
            fresh = attr_value_pb2.AttrValue()
            fresh.CopyFrom(attrs[attr])
            fresh.list.type[place] = number
            attrs[attr] = fresh
    attrs.update(changed)
    for value in attrs.values():
        for function in (value.func, *value.list.func):
            if function.name and not graph._is_function(function.name):
                found = function_of(op.graph, function.name)
                if found is not None:
                    graph._add_function_recursive(found)
    if gradient is not None:
        attrs["_gradient_op_type"] = attr_value_pb2.AttrValue(s=gradient.encode())
    device = op.device
    with graph.device(device) if device else _NOWHERE:
        return graph._create_op_internal(op.type, list(inputs), attrs=attrs, name=name or op.name)


def function_of(graph: Any, name: str) -> Any:
    """The function of a name, as a graph or those around it know it."""
    while graph is not None:
        found = graph._get_function(name)
        if found is not None:
            return found
        graph = getattr(graph, "outer_graph", None)
    return None


def keep(graph: Any, item: Any) -> None:
    """Keep something alive as long as a graph is."""
    kept = getattr(graph, "_precision_kept", None)
    if kept is None:
        kept = graph._precision_kept = []
    kept.append(item)


class _Nowhere:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOWHERE = _Nowhere()


def settle(old: Any, new: Any) -> None:
    """Give a new op's outputs the shapes and handles known of the old one's."""
    for before, after in zip(old.outputs, new.outputs, strict=True):
        if before.dtype in (tf.resource, tf.variant):
            handle_data_util.copy_handle_data(before, after)
        after.set_shape(before.shape)


def cast(x: Any, dtype: tf.DType, *, kernel: bool | None = None, gradient: str | None = None) -> Any:
    """Cast a tensor.

    Args:
        x: the tensor.
        dtype: the dtype.
        kernel: given if gradients are to keep the cast's input, not its result; True where the cast stands for the inside
            of a low-precision kernel, whose operand its input is.
        gradient: the registered gradient to use in the place of the cast's own.
    """
    if x.dtype == dtype:
        return x
    graph = tf_ops.get_default_graph()
    attrs = {
        "SrcT": type_attr(x.dtype),
        "DstT": type_attr(dtype),
        "Truncate": attr_value_pb2.AttrValue(b=False),
    }
    if kernel is not None:
        attrs["_precision_kernel"] = attr_value_pb2.AttrValue(b=kernel)
    if gradient is not None:
        attrs["_gradient_op_type"] = attr_value_pb2.AttrValue(s=gradient.encode())
        if kernel is not None:
            # What is kept for the backward pass stands beside the path that float32 gradients take through low values:
            # loops that accumulate what is kept give it gradients in its own dtype.
            kept = graph._create_op_internal(
                "StopGradient", [x], attrs={"T": type_attr(x.dtype)}, name="precision_kept"
            )
            attrs["_precision_kept"] = attr_value_pb2.AttrValue(s=kept.name.encode())
    return graph._create_op_internal("Cast", [x], attrs=attrs, name="precision_cast").outputs[0]


def kernel_input(x: Any) -> Any:
    """What a kernel's operand was before the casts inside of it."""
    attrs = x.op.node_def.attr if x.op.type == "Cast" else {}
    if "_precision_kept" in attrs:
        return x.graph.get_operation_by_name(attrs["_precision_kept"].s.decode()).outputs[0]
    return x.op.inputs[0] if "_precision_kernel" in attrs else x
