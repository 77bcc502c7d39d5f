"""Tracing a function, and what is noted of each op meanwhile: its Keras path, the known function it is in, its region."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

# TensorFlow tells what ops are made in graphs, in any function traced meanwhile and only in this thread, through callbacks
# that it does not export; Keras keeps the path of the running layer to itself. This is the one place that reaches for either.
from keras.src.backend.common.name_scope import current_path
from tensorflow.python.framework import op_callbacks

from precision_tensorflow.opcast import known, marks


class Record(NamedTuple):
    """What is noted of an op when it is made.

    Attributes:
        path: the path of the Keras layer that is running.
        known: the known function it is made in.
        region: the region of the author's that it is made in.
    """

    path: str
    known: known.Known | None
    region: marks.Region | None


class Records:
    """The notes of the ops of all graphs traced for one call, by graph and name."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[Any, dict[str, Record]]] = {}
        self.casts: dict[int, dict[str, int]] = {}
        self.scopes: dict[str, str] = {}

    def of(self, graph: Any) -> dict[str, Record]:
        """The notes of a graph's ops; empty if it was traced before."""
        found = self._graphs.get(id(graph))
        return found[1] if found is not None else {}

    def note(self, graph: Any, name: str, record: Record) -> None:
        """Note an op."""
        self._graphs.setdefault(id(graph), (graph, {}))[1][name] = record
        if record.path:
            scope = name.rpartition("/")[0]
            self.scopes.setdefault(scope, record.path)

    def cast(self, tensor: Any) -> None:
        """Note that the author casts a float32 tensor to float32, which makes no op."""
        graph = tensor.graph
        self._graphs.setdefault(id(graph), (graph, {}))
        self.casts.setdefault(id(graph), {}).setdefault(tensor.name, len(graph.get_operations()))


@contextmanager
def recording(stop: Any, casts: bool) -> Iterator[Records]:
    """Note the ops made in this thread.

    Args:
        stop: the code of the function that calls what is traced.
        casts: whether casts of float32 to float32 are looked for too, at some cost.
    """
    records = Records()
    held: dict[int, Any] = {}

    def made(op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if graph is not None and op_name is not None:
            where = known.from_frames(sys._getframe(1), stop, held)
            name = op_name.decode() if isinstance(op_name, bytes) else op_name
            records.note(graph, name, Record(current_path(), where, marks.current()))

    op_callbacks.add_op_callback(made)
    try:
        with _watching(records) if casts else _nothing():
            yield records
    finally:
        op_callbacks.remove_op_callback(made)
        held.clear()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


_CAST = tf.cast
while hasattr(_CAST, "__wrapped__"):
    _CAST = _CAST.__wrapped__
_LIBRARIES = ("/tensorflow/python/", "/keras/src/")
_HELPERS = ("/tensorflow/python/util/", "/tensorflow/python/autograph/", "/tensorflow/python/ops/weak_tensor_ops.py",
            "/keras/src/ops/core.py", "/keras/src/backend/tensorflow/core.py", "/keras/src/utils/traceback_utils.py")  # fmt: skip


@contextmanager
def _watching(records: Records) -> Iterator[None]:
    """Watch for calls of ``tf.cast`` by the author's own code. The profiler that was there is put back."""
    code, before = _CAST.__code__, sys.getprofile()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code is code and event == "call":
            x, dtype = frame.f_locals["x"], frame.f_locals["dtype"]
            symbolic = isinstance(x, tf.Tensor) and hasattr(x, "graph")
            if symbolic and x.dtype == tf.float32 == tf.as_dtype(dtype) and _by_author(frame.f_back):
                records.cast(x)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def _by_author(frame: Any) -> bool:
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if not any(helper in path for helper in _HELPERS):
            return not any(library in path for library in _LIBRARIES)
        frame = frame.f_back
    return False


def mentions_casts(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that it calls by name, could cast to float32: by the names in its code."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting and len(seen) < 2000:
        item = waiting.pop()
        item = getattr(item, "python_function", None) or getattr(item, "__wrapped__", None) or item
        if hasattr(item, "func") and hasattr(item, "keywords"):
            waiting.append(item.func)
        if hasattr(item, "__self__") and not isinstance(item.__self__, type(sys)):
            waiting.append(item.__self__)
        item = getattr(item, "__func__", item)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if hasattr(item, "__code__"):
            if _in_library(item.__code__.co_filename):
                continue
            if _mentions(item.__code__):
                return True
            waiting.extend(_reached(item))
        elif isinstance(item, (tf.Module,)) or hasattr(item, "_layers"):
            waiting.extend(_methods(item))
    return False


def _in_library(path: str) -> bool:
    path = path.replace("\\", "/")
    return any(library in path for library in _LIBRARIES) or "/precision_tensorflow/" in path


def _mentions(code: Any) -> bool:
    if {"cast", "astype", "saturate_cast"} & set(code.co_names):
        return True
    return any(_mentions(c) for c in code.co_consts if hasattr(c, "co_names"))


def _reached(function: Any) -> list[Any]:
    found = [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    many = [x for item in found if isinstance(item, (list, tuple)) for x in item]
    return [x for x in [*found, *many] if callable(x) and not isinstance(x, type)]


def _methods(module: Any) -> list[Any]:
    layers = module._flatten_layers() if hasattr(module, "_flatten_layers") else [module, *module.submodules]
    return [getattr(layer, n) for layer in layers for n in ("call", "__call__") if hasattr(type(layer), n)]


def trace(
    function: Callable[..., Any], specs: Sequence[Any], stop: Any, casts: bool, autograph: bool
) -> tuple[Any, Records]:
    """Trace a function of tensors.

    Returns:
        The concrete function, and what was noted of its ops.
    """
    with marks.traced(), recording(stop, casts) as records:
        concrete = tf.function(function, autograph=autograph).get_concrete_function(*specs)
    return concrete, records
