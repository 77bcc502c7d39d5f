"""What a graph shows beyond its single ops: biases, what float32 ops ask of their inputs, known functions, literals.

A plan is made once a graph, from its structure and what was noted when it was traced; it knows no dtypes but the declared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from precision_tensorflow.opcast import known
from precision_tensorflow.opcast.families import CONTRACTIONS, ENTERED, FAMILY, VIEW
from precision_tensorflow.opcast.notes import castable
from precision_tensorflow.opcast.record import Record

FLOAT32 = frozenset(
    n for n, f in FAMILY.items() if f in ("reduction", "transcendental", "linalg", "softmax", "loss", "norm")
)
_ADD = frozenset(("Add", "AddV2", "BiasAdd", "BiasAddV1"))
_ENTERING = frozenset(ENTERED) - {"Cast", "Const", "Fill", "IdentityN"}
_HOISTED = frozenset(("Const", "Placeholder", "ReadVariableOp"))


@dataclasses.dataclass(frozen=True)
class Region:
    """The ops of one call of a known function.

    Attributes:
        family: its family.
        hoisted: constants and reads of variables among them.
        ops: the others.
        inputs: tensors from outside.
        outputs: tensors used outside.
        results: for each of those, whether nothing inside computes with it: then it is what the function gives.
    """

    family: str
    hoisted: tuple[Any, ...]
    ops: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    results: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found in a graph.

    Attributes:
        operations: its ops, in order.
        biased: names of contractions whose result a bias is added to.
        additions: names of the additions that do so, and which operand is the bias.
        joined: the same for additions to a sum of several products.
        inner: names of contractions that are a step of one ``einsum`` of several operands, but the last.
        asked: names of elementwise ops computed in float32 since all that use them are.
        wide: names of contractions in a backward pass that give what no other product takes: gradients of variables, float32.
        regions: by the position of their first op, with the position after their last.
    """

    operations: tuple[Any, ...]
    biased: frozenset[str]
    additions: dict[str, int]
    joined: dict[str, int]
    inner: frozenset[str]
    asked: frozenset[str]
    wide: frozenset[str]
    regions: dict[int, tuple[Region, int]]


def plan(graph: Any, records: dict[str, Record]) -> Plan:
    """The plan of a traced graph."""
    operations = tuple(graph.get_operations())
    results = {t.name for t in graph.outputs}
    regions, within = _regions(operations, records, results)
    biased, additions = _biases(operations, results, within)
    joined, inner = _sums(operations, additions, within), _steps(operations, within)
    return Plan(
        operations,
        biased,
        additions,
        joined,
        inner,
        _asked(operations, results, additions, within),
        _wide(operations),
        regions,
    )


def _wide(operations: Any) -> frozenset[str]:
    reaches: set[str] = set()
    wide: set[str] = set()
    for op in reversed(operations):
        users = [u for t in op.outputs for u in t.consumers()]
        if any(u.type in CONTRACTIONS or u.type in _ENTERING or u.name in reaches for u in users):
            reaches.add(op.name)
        elif op.type in CONTRACTIONS and ("gradient_tape/" in op.name or op.name.startswith("gradients")):
            wide.add(op.name)
    return frozenset(wide)


def _biases(operations: Any, results: set[str], within: set[str]) -> tuple[frozenset[str], dict[str, int]]:
    biased: set[str] = set()
    additions: dict[str, int] = {}
    for op in operations:
        if op.type not in CONTRACTIONS or op.name in within:
            continue
        tensor = op.outputs[0]
        while tensor.name not in results:
            users = tensor.consumers()
            if len(users) != 1 or users[0].name in within:
                break
            user = users[0]
            if user.type in VIEW and len(user.outputs) == 1 and user.inputs[0] is tensor:
                tensor = user.outputs[0]
                continue
            if user.type in _ADD and user.name not in additions:
                other = 1 if user.inputs[0] is tensor else 0
                if (user.type.startswith("BiasAdd") and other == 1) or _is_row(user.inputs[other]):
                    biased.add(op.name)
                    additions[user.name] = other
            break
    return frozenset(biased), additions


def _sums(operations: Any, additions: dict[str, int], within: set[str]) -> dict[str, int]:
    """Additions of a bias to a sum of several products, as in the cells of recurrent networks."""
    products: set[str] = set()
    joined: dict[str, int] = {}
    for op in operations:
        if op.name in within or not op.outputs:
            continue
        if op.type in CONTRACTIONS or op.name in additions or (op.type in VIEW and op.inputs[0].name in products):
            products.update(t.name for t in op.outputs)
        elif op.type in _ADD:
            come = [x.name in products for x in op.inputs]
            if all(come):
                products.add(op.outputs[0].name)
            elif any(come) and _is_row(op.inputs[come.index(False)]):
                joined[op.name] = come.index(False)
                products.add(op.outputs[0].name)
    return joined


def _steps(operations: Any, within: set[str]) -> frozenset[str]:
    found: set[str] = set()
    for op in operations:
        if op.type == "Einsum" and op.name not in within and "einsum" in op.name.rpartition("/")[0]:
            users = op.outputs[0].consumers()
            scope = op.name.rpartition("/")[0]
            if len(users) == 1 and users[0].type == "Einsum" and users[0].name.rpartition("/")[0] == scope:
                found.add(op.name)
    return frozenset(found)


def _is_row(tensor: Any) -> bool:
    """Whether a value is a parameter: one number a feature, put into the shape of a result."""
    while tensor.op.type in VIEW:
        tensor = tensor.op.inputs[0]
    shape = tensor.shape
    if tensor.op.type not in ("ReadVariableOp", "Placeholder") or shape.rank is None or shape.rank == 0:
        return False
    return sum(size != 1 for size in shape) <= 1


def _asked(operations: Any, results: set[str], additions: dict[str, int], within: set[str]) -> frozenset[str]:
    wide: set[str] = set()  # results that are float32 whatever comes in
    for op in operations:
        passes = FAMILY.get(op.type) == "elementwise" or op.type in VIEW
        if op.type in FLOAT32 or (passes and any(x.name in wide for x in op.inputs)):
            wide.update(t.name for t in op.outputs if castable(t.dtype))
    asked: set[str] = set()
    passing: set[str] = set()
    for op in reversed(operations):
        if op.name in additions or op.name in within or not (op.type in VIEW or FAMILY.get(op.type) == "elementwise"):
            continue
        outputs = [t for t in op.outputs if castable(t.dtype)]
        if not outputs or any(t.name in results for t in outputs):
            continue
        users = [(u, t) for t in outputs for u in t.consumers()]
        if users and all(_asks(u, t, wide, asked, passing) for u, t in users):
            (passing if op.type in VIEW else asked).add(op.name)
    return frozenset(asked)


def _asks(user: Any, tensor: Any, wide: set[str], asked: set[str], passing: set[str]) -> bool:
    if user.type in FLOAT32 or user.name in asked or user.name in passing:
        return True
    return FAMILY.get(user.type) == "elementwise" and any(x.name in wide and x is not tensor for x in user.inputs)


def _regions(
    operations: Any, records: dict[str, Record], results: set[str]
) -> tuple[dict[int, tuple[Region, int]], set[str]]:
    found: dict[int, tuple[Region, int]] = {}
    within: set[str] = set()
    start = 0
    while start < len(operations):
        call = _call(operations[start], records)
        if call is None:
            start += 1
            continue
        stop, last = start + 1, start + 1
        while stop < len(operations):
            op = operations[stop]
            if _call(op, records) == call:
                last = stop + 1
            elif op.type not in ("Const", "Placeholder"):
                break
            stop += 1
        region = _region(operations[start:last], call.family, results)
        if region is not None:
            found[start] = (region, last)
            within.update(op.name for op in region.ops)
        start = last
    return found, within


def _call(op: Any, records: dict[str, Record]) -> known.Known | None:
    if op.type in ENTERED and op.type not in ("Const", "Cast", "Fill"):
        return None
    if op.type == "Placeholder" or (op.type != "ReadVariableOp" and op._is_stateful):
        return None
    noted = records.get(op.name)
    if noted is not None:
        if noted.region is not None or noted.known is None:
            return None
        return noted.known if op.type not in CONTRACTIONS or noted.known.family == "attention" else None
    return (
        known.from_scope(op.name) if not records and "gradient" not in op.name and op.type not in CONTRACTIONS else None
    )


def _region(operations: Any, family: str, results: set[str]) -> Region | None:
    names = {op.name for op in operations}
    hoisted = tuple(
        op
        for op in operations
        if op.type in _HOISTED
        and (
            op.type != "Const"
            or any(u.name not in names for u in op.outputs[0].consumers())
            or op.outputs[0].name in results
        )
    )
    lifted = {op.name for op in hoisted}
    inside = [op for op in operations if op.name not in lifted]
    if not any(castable(t.dtype) for op in inside for t in op.outputs):
        return None
    if any(t.dtype == tf.float64 or t.dtype.is_complex or t.dtype in (tf.resource, tf.variant)
           for op in inside for t in (*op.inputs, *op.outputs)):  # fmt: skip
        return None
    names = {op.name for op in inside}
    inputs = {t.name: t for op in inside for t in op.inputs if t.op.name not in names}
    outputs, sinks = [], []
    for op in inside:
        for tensor in op.outputs:
            users = tensor.consumers()
            if tensor.name in results or any(u.name not in names for u in users):
                outputs.append(tensor)
                sinks.append(not any(u.name in names and u.type not in VIEW for u in users))
    return Region(family, hoisted, tuple(inside), tuple(inputs.values()), tuple(outputs), tuple(sinks))
