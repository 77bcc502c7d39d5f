"""TensorFlow's ops with floating inputs or outputs by name, then known functions: for the table of all backends."""

from __future__ import annotations

import keras
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from precision.ops import OpEntry
from precision_tensorflow.opcast.families import ENTERED, FAMILY, WHY, opaque
from precision_tensorflow.opcast.known import FUNCTIONS
from precision_tensorflow.opcast.notes import CASTABLE

_FLOATS = frozenset(d.as_datatype_enum for d in CASTABLE)


def floating_ops() -> list[str]:
    """The op types of ``tf.raw_ops`` that can take or give a floating tensor."""
    return sorted(name for name in dir(tf.raw_ops) if not name.startswith("_") and _floats(name))


def _floats(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    if definition is None:
        return False
    allowed = {a.name: a.allowed_values.list.type for a in definition.attr}
    for argument in (*definition.input_arg, *definition.output_arg):
        attr = argument.type_attr or argument.type_list_attr
        if argument.type in _FLOATS or (attr and (not allowed[attr] or _FLOATS & set(allowed[attr]))):
            return True
    return False


def op_table() -> list[OpEntry]:
    """The table; an op in none of the parts of it would be missing, which a test forbids."""
    found = []
    for name in floating_ops():
        if name in FAMILY:
            found.append(OpEntry(name, FAMILY[name], WHY.get(name, "")))
        elif name in ENTERED:
            found.append(OpEntry(name, None, ENTERED[name]))
        elif (why := opaque(name)) is not None:
            found.append(OpEntry(name, None, why))
    return found + [OpEntry(name, family) for name, family in sorted(known_functions().items())]


def known_functions() -> dict[str, str]:
    """The public functions made of several ops that are recognised as one, with the family of each."""
    spaces = {"tf.nn": tf.nn, "tf.math": tf.math, "tf.linalg": tf.linalg, "keras.ops": keras.ops}
    found = {}
    for file, functions in FUNCTIONS.items():
        ours = {n: m for n, m in spaces.items() if n.startswith("keras" if file.startswith("keras") else "tf")}
        for name, family in functions.items():
            public = name.lstrip("_")
            place = next((space for space, module in ours.items() if hasattr(module, public)), None)
            if place is not None:
                found[f"{place}.{public}"] = family
    return found
